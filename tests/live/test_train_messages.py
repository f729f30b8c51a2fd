"""`cleave train` says in one sentence why it cannot train, and exits with the right code."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tests.support.commands import run

from cleave.cli.main import main

pytestmark = pytest.mark.timeout(400)
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
