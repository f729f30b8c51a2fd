"""`cleave train` as a person runs it: real processes, killed servers, wrong input."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cleave.events import CheckpointSaved, DeviceJoined, DeviceLeft, StepDone, read_events

pytestmark = pytest.mark.timeout(400)
TINY = ["--model", "tiny-llama", "--sequence", "32", "--batch", "2", "--devices", "2", "--eval-every", "0"]
PATIENCE_S = 180.0


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cleave", *arguments]


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "CLEAVE_HOME": str(home), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def run(home: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*arguments), capture_output=True, text=True, timeout=PATIENCE_S, env=environment(home), check=False
    )


def losses(directory: Path) -> dict[int, float]:
    """Of each step the last time it was done."""
    return {event.step: event.loss for event in read_events(directory / "events.jsonl") if isinstance(event, StepDone)}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


def test_a_killed_server_resumes_with_the_same_losses(tmp_path: Path, text: Path) -> None:
    flags = [*TINY, "--data", str(text), "--steps", "12", "--save-every", "3"]
    whole = run(tmp_path, "train", *flags, "--out", str(tmp_path / "whole"), "--json")
    assert whole.returncode == 0, whole.stderr
    expected = losses(tmp_path / "whole")
    assert len(expected) == 12

    broken = tmp_path / "broken"
    process = subprocess.Popen(
        command("train", *flags, "--out", str(broken)),
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _wait_until(lambda: _last_step(broken) >= 5, process)
    children = _children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    at_death = losses(broken)
    _wait_until_gone(children)
    assert max(at_death) < 12
    assert any(isinstance(event, CheckpointSaved) for event in read_events(broken / "events.jsonl"))

    resumed = run(tmp_path, "train", "--resume", "--out", str(broken), "--json")
    assert resumed.returncode == 0, resumed.stderr
    continued = losses(broken)
    assert sorted(continued) == sorted(expected)
    assert all(abs(continued[step] - expected[step]) < 1e-4 for step in expected)
    assert json.loads(resumed.stdout)["steps"] == 12


def test_a_device_that_is_killed_costs_nothing(tmp_path: Path, text: Path) -> None:
    """One of two devices dies in the middle; the step goes on, and the losses are those of plain training."""
    out = tmp_path / "run"
    flags = [*TINY, "--data", str(text), "--steps", "30", "--save-every", "0"]
    whole = run(tmp_path, "train", *flags, "--out", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    process = subprocess.Popen(
        command("train", *flags, "--out", str(out)),
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    _wait_until(lambda: _last_step(out) >= 3, process)
    children = _children(process.pid)
    assert len(children) == 2
    os.kill(children[0], signal.SIGKILL)
    assert process.wait(PATIENCE_S) == 0
    seen = list(read_events(out / "events.jsonl"))
    left = next(event for event in seen if isinstance(event, DeviceLeft))
    assert left.reason
    expected, ours = losses(tmp_path / "whole"), losses(out)
    assert all(abs(ours[step] - expected[step]) < 1e-4 for step in expected)


def test_a_device_that_joins_later_gets_work(tmp_path: Path, text: Path) -> None:
    out, port = tmp_path / "run", _free_port()
    flags = [*TINY, "--data", str(text), "--steps", "400", "--listen", f"127.0.0.1:{port}"]
    process = subprocess.Popen(
        command("train", *flags, "--devices", "1", "--out", str(out)),
        env=environment(tmp_path),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    late = None
    try:
        _wait_until(lambda: _last_step(out) >= 2, process)
        late = subprocess.Popen(
            command("join", f"127.0.0.1:{port}", "--name", "late", "--threads", "1", "--memory", "1GB"),
            env=environment(tmp_path),
            stderr=subprocess.PIPE,
            text=True,
        )
        _wait_until(lambda: _has_joined(out, "late"), process)
        done = _last_step(out)
        _wait_until(lambda: _last_step(out) >= done + 3, process)
        late.send_signal(signal.SIGINT)
        assert late.wait(PATIENCE_S) == 0
        assert late.stderr is not None
        with late.stderr as spoken:
            said = spoken.read()
        assert "joined" in said
        assert "contributed" in said
        _wait_until(lambda: any("stopped by its owner" in reason for reason in _departures(out)), process)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_S)
        if late is not None and late.poll() is None:
            late.kill()


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--data", "EMPTY"], "empty"),
        (["--data", "SHORT"], "tokens"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--listen", "127.0.0.1:BUSY", "--devices", "1"], "choose another --listen"),
        (["--listen", "somewhere"], "HOST:PORT"),
        (["--listen", "127.0.0.1:0", "--devices", "0", "--wait", "1"], "cleave join"),
        (["--resume", "--out", "missing"], "resume"),
        (["missing.toml"], "missing.toml"),
    ],
)
def test_wrong_input_gives_one_sentence(tmp_path: Path, text: Path, flags: list[str], sentence: str) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("too short")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        names = {
            "EMPTY": str(tmp_path / "empty.txt"),
            "SHORT": str(tmp_path / "short.txt"),
            "127.0.0.1:BUSY": f"127.0.0.1:{busy.getsockname()[1]}",
        }
        given = [names.get(flag, flag) for flag in flags]
        usual = [] if "--resume" in flags else [*TINY, "--steps", "2", "--data", str(text)]
        result = run(tmp_path, "train", *usual, *given)
    assert result.returncode == 2, result.stderr
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("cleave train: ")
    assert sentence in last
    assert "Traceback" not in result.stderr


def test_a_loss_that_is_no_number_stops_and_loses_nothing(tmp_path: Path, text: Path) -> None:
    out = tmp_path / "run"
    flags = [*TINY, "--data", str(text), "--steps", "40", "--save-every", "1", "--learning-rate", "1e30"]
    result = run(tmp_path, "train", *flags, "--out", str(out))
    assert result.returncode == 2
    assert "--learning-rate" in result.stderr or "learning rate" in result.stderr
    assert list((out / "checkpoints").iterdir())


def test_offload_auto_says_when_nothing_is_worth_sending(tmp_path: Path, text: Path) -> None:
    flags = [*TINY, "--data", str(text), "--steps", "2", "--offload", "auto"]
    result = run(tmp_path, "train", *flags, "--out", str(tmp_path / "run"))
    assert result.returncode == 0, result.stderr
    assert "no gemm of this model is worth sending" in result.stderr


# ------------------------------------------------------------------------------------------------ watching


def _wait_until(condition: object, process: subprocess.Popen[bytes]) -> None:
    assert callable(condition)
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, "it takes too long"
        assert process.poll() is None, "it ended too soon"
        time.sleep(0.02)  # polling a file another process writes


def _wait_until_gone(pids: list[int]) -> None:
    """Devices started by a server do not outlive it."""
    import psutil

    gone, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], PATIENCE_S)
    assert not alive, gone


def _last_step(directory: Path) -> int:
    path = directory / "events.jsonl"
    return max(losses(directory), default=0) if path.exists() else 0


def _has_joined(directory: Path, name: str) -> bool:
    seen = read_events(directory / "events.jsonl")
    return any(isinstance(event, DeviceJoined) and event.device == name for event in seen)


def _departures(directory: Path) -> list[str]:
    return [event.reason for event in read_events(directory / "events.jsonl") if isinstance(event, DeviceLeft)]


def _children(pid: int) -> list[int]:
    import psutil

    return [child.pid for child in psutil.Process(pid).children() if "join" in child.cmdline()]


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])
