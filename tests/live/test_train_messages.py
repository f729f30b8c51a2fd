"""`cleave train` says in one sentence why it cannot train, and exits with the right code."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.live.conftest import Start
from tests.support.commands import PATIENCE_S, free_port, last_step, run, wait_until

from cleave.cli.main import main
from cleave.events import RunStarted, read_events

TINY = ["--model", "tiny-llama", "--sequence", "32", "--batch", "2", "--devices", "1", "--eval-every", "0"]


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep runs of this process in the test's directory, and restore torch's thread count."""
    before = torch.get_num_threads()
    monkeypatch.setenv("CLEAVE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("flags", "fact"),
    [
        (["--data", "nowhere.txt"], "nowhere.txt"),
        (["--data", "empty.txt"], "empty"),
        (["--data", "short.txt"], "33"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--listen", "127.0.0.1:BUSY"], "127.0.0.1:BUSY"),
        (["--listen", "somewhere"], "HOST:PORT"),
        (["--listen", "127.0.0.1:0", "--devices", "0", "--wait", "1"], "cleave join"),
        (["missing.toml"], "missing.toml"),
    ],
)
def test_wrong_input_gives_one_sentence_and_exit_code_2(
    text: Path, flags: list[str], fact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty.txt").write_text("")
    Path("short.txt").write_text("too short")
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        given = [flag.replace("BUSY", port) for flag in flags]
        assert main(["train", *TINY, "--steps", "2", "--data", str(text), *given]) == 2
    told = capsys.readouterr().err.strip().splitlines()[-1]
    assert told.startswith("cleave train: ")
    assert fact.replace("BUSY", port) in told


def test_a_process_with_wrong_input_ends_with_one_sentence_and_exit_code_2(tmp_path: Path) -> None:
    ended = run(tmp_path, "train", "--resume", "--out", "missing")
    assert ended.returncode == 2
    assert len(ended.stderr.splitlines()) == 1
    assert "missing" in ended.stderr


def test_a_nan_loss_ends_the_run_with_advice_and_loses_nothing(
    tmp_path: Path, settings: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--devices", "1", "--save-every", "1", "--learning-rate", "1e35", "--out", str(tmp_path / "run")]
    assert main(["train", settings, *flags]) == 2
    assert "--learning-rate" in capsys.readouterr().err
    assert list((tmp_path / "run" / "checkpoints").iterdir())


def test_offload_auto_says_when_nothing_is_worth_sending(
    tmp_path: Path, settings: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--devices", "1", "--steps", "2", "--offload", "auto", "--out", str(tmp_path / "run"), "--json"]
    assert main(["train", settings, *flags]) == 0
    told = capsys.readouterr()
    assert "devices have no work" in told.err
    summary = json.loads(told.out)
    assert summary["grain"] == "server"
    (device,) = summary["devices"]
    assert device["tasks"] == 0
    assert "offload always" in device["idle_reason"]


def test_a_run_that_is_refused_its_directory_leaves_the_other_run_untouched(
    tmp_path: Path, settings: str, start: Start
) -> None:
    out = tmp_path / "run"
    server = start("server", "train", settings, "--devices", "1", "--out", str(out))
    wait_until(lambda: last_step(out) >= 1, server)
    config = (out / "config.toml").read_bytes()
    refused = run(tmp_path, "train", "--resume", "--out", str(out), "--steps", "7")
    assert refused.returncode == 2
    assert str(server.pid) in refused.stderr
    assert (out / "config.toml").read_bytes() == config
    started = [event for event in read_events(out / "events.jsonl") if isinstance(event, RunStarted)]
    assert len(started) == 1


def test_wrong_input_leaves_no_run_directory_behind(tmp_path: Path) -> None:
    assert main(["train", "--out", str(tmp_path / "run"), "--data", str(tmp_path / "missing")]) == 2
    assert not (tmp_path / "run").exists()


def test_the_token_in_a_pasted_address_beats_that_of_the_environment(
    tmp_path: Path, settings: str, start: Start
) -> None:
    port = free_port()
    flags = [
        "--listen",
        f"127.0.0.1:{port}",
        "--token",
        "the-right-one",
        "--steps",
        "1",
        "--out",
        str(tmp_path / "run"),
    ]
    server = start("server", "train", settings, *flags)
    wait_until(lambda: "cleave join" in (tmp_path / "server.out").read_text(), server)
    lent = run(tmp_path, "join", f"127.0.0.1:{port}#the-right-one", "--threads", "1", token="another")
    assert lent.returncode == 0, lent.stderr
    assert server.wait(PATIENCE_S) == 0
