"""The server's own death: killed without warning, or its disk full, it costs neither work nor devices."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from tests.live.test_train import PATIENCE_S, _free_port, _last_step, _wait_until, command, environment, losses, run

from cleave.events import CheckpointSaved, DeviceJoined, Resumed, StepDone, read_events

pytestmark = pytest.mark.timeout(600)
# In its warm-up, a run's learning rate does not depend on how many steps there will be, so tests may decide that later.
SETTINGS = """
model = "tiny-llama"
data = '{data}'
sequence = 32
batch = 2
steps = 100_000
warmup_steps = 100_000
learning_rate = 20.0
eval_every = 0
sample = 0
"""


@pytest.fixture
def settings(tmp_path: Path) -> str:
    text, path = tmp_path / "text.txt", tmp_path / "run.toml"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    path.write_text(SETTINGS.format(data=text))
    return str(path)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a command that must not outlive the test; what it says is in a file of its name."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(name: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (tmp_path / f"{name}.said").open("ab") as said:
            process = subprocess.Popen(command(*arguments), env=environment(tmp_path), stdout=said, stderr=said)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


def test_a_device_of_its_own_comes_back_to_a_killed_server_and_the_losses_stay_the_same(
    tmp_path: Path, settings: str, start: Callable[..., subprocess.Popen[bytes]]
) -> None:
    out, address = tmp_path / "broken", f"127.0.0.1:{_free_port()}"
    device = start("device", "join", address, "--name", "faithful", "--threads", "1", "--wait", str(PATIENCE_S))
    flags = ["--listen", address, "--devices", "0", "--wait", str(PATIENCE_S), "--save-every", "3"]
    server = start("server", "train", settings, *flags, "--out", str(out))
    _kill_after(5, server, out)
    server = start("server", "train", "--resume", "--out", str(out))
    _kill_after(5, server, out)
    assert device.poll() is None
    steps = _last_step(out) + 2

    resumed = run(tmp_path, "train", "--resume", "--out", str(out), "--steps", str(steps))
    assert resumed.returncode == 0, resumed.stderr
    assert device.wait(PATIENCE_S) == 0
    events = list(read_events(out / "events.jsonl"))
    joined = [event.device for event in events if isinstance(event, DeviceJoined)]
    assert len(joined) >= 3
    assert set(joined) == {"faithful"}
    assert sum(isinstance(event, Resumed) for event in events) == 2
    whole = run(tmp_path, "train", settings, "--devices", "1", "--steps", str(steps), "--out", str(tmp_path / "whole"))
    assert whole.returncode == 0, whole.stderr
    expected, ours = losses(tmp_path / "whole"), losses(out)
    assert sorted(ours) == sorted(expected) == list(range(1, steps + 1))
    assert all(abs(ours[step] - expected[step]) < 1e-4 for step in expected)


def test_a_disk_that_is_full_for_a_while_costs_no_step_and_no_event(
    tmp_path: Path,
    settings: str,
    mount_disk: Callable[[int], Path],
    start: Callable[..., subprocess.Popen[bytes]],
) -> None:
    disk, said = mount_disk(16 << 20), tmp_path / "server.said"
    out, balloon = disk / "run", disk / "balloon"
    server = start("server", "train", settings, "--devices", "1", "--save-every", "2", "--out", str(out))
    _wait_until(lambda: _last_step(out) >= 3, server)
    _fill(balloon)
    for sentence in ("cannot write the checkpoint", f"cannot write {out / 'events.jsonl'}"):
        _wait_until(lambda sentence=sentence: sentence in _unwrapped(said), server)
    balloon.unlink()
    reached = _last_step(out)
    _wait_until(lambda: any(step > reached for step in _saved(out)), server)
    assert "Traceback" not in said.read_text()
    server.send_signal(signal.SIGINT)
    assert server.wait(PATIENCE_S) == 0
    done = [event.step for event in read_events(out / "events.jsonl") if isinstance(event, StepDone)]
    assert done == list(range(1, len(done) + 1))
    assert _saved(out)[-1] == len(done)


def _fill(balloon: Path) -> None:
    with suppress(OSError), balloon.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _kill_after(steps: int, server: subprocess.Popen[bytes], out: Path) -> None:
    reached = _last_step(out)
    _wait_until(lambda: _last_step(out) >= reached + steps, server)
    server.kill()
    assert server.wait() == -signal.SIGKILL


def _saved(out: Path) -> list[int]:
    return [event.step for event in read_events(out / "events.jsonl") if isinstance(event, CheckpointSaved)]


def _unwrapped(said: Path) -> str:
    return " ".join(said.read_text().split())
