"""A run directory from a stranger can be listed, shown and removed: nothing hangs, nothing is written elsewhere."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.runs import TEXT, train

from cleave import events
from cleave.cli.main import main
from cleave.config import TrainConfig, to_toml
from cleave.disk import AppendedFile, write_whole
from cleave.errors import InputError
from cleave.run_files import running
from cleave.runs.reading import size_bytes
from cleave.server.admission.tokens import Keys

Make = Callable[[Path], object]
NESTED = "[" * 100_000
KEY: dict[str, object] = {
    "id": "0a1b2c3d",
    "role": "device",
    "salt": "00" * 16,
    "hash": "11" * 64,
    "created_s": 1.7e9,
    "revoked_s": None,
}
CLAIM: dict[str, object] = {"pid": 1, "created_s": 1.0, "url": "ws://192.168.1.20:7077", "host": "elsewhere"}
STARTED: dict[str, object] = {
    "event": "run_started",
    "time_s": 1.7e9,
    "model": "tiny-llama",
    "parameters": 1,
    "steps": 4,
    "first_step": 1,
    "tokens_per_step": 1,
    "wire": "fp32",
    "seed": 1,
}
STEP: dict[str, object] = {
    "event": "step_done",
    "time_s": 1.7e9,
    "step": 1,
    "loss": 2.5,
    "learning_rate": 1.0,
    "gradient_norm": 1.0,
    "tokens": 1,
    "seconds": 1.0,
    "waiting_s": 0.0,
    "devices": 1,
    "down_bytes": 1,
    "up_bytes": 1,
}


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLEAVE_HOME", str(tmp_path / "home"))
    directory = tmp_path / "home" / "runs" / "stranger"
    directory.mkdir(parents=True)
    (directory / "config.toml").write_text(to_toml(TrainConfig(model="tiny-llama", steps=4)))
    (directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in (STARTED, STEP)))
    return directory


def _text(content: str | bytes) -> Make:
    return lambda file: file.write_bytes(content if isinstance(content, bytes) else content.encode())


def _lines(*values: object) -> Make:
    return _text("\n".join(map(json.dumps, values)))


def _link_to(target: str) -> Make:
    return lambda file: (file.unlink(missing_ok=True), file.symlink_to(target))


def _huge(file: Path) -> None:
    file.touch()
    os.truncate(file, 1 << 40)


HOSTILE: dict[str, dict[str, Make]] = {
    "server.json": {
        "pipe": os.mkfifo,
        "endless": _link_to("/dev/zero"),
        "huge": _huge,
        "nested": _text(NESTED),
        "nested in a field": _text('{"pid": 1, "x": ' + NESTED),
        "not UTF-8": _text(b'{"pid": 1, "created_s": 1, "host": "\xff"}'),
        "absurd process": _lines({**CLAIM, "host": os.uname().nodename, "pid": 10**30}),
        "negative process": _lines({**CLAIM, "host": os.uname().nodename, "pid": -1}),
        "escapes": _lines({**CLAIM, "host": "\x1b[2J", "url": "ws://\x1b]0;x\x07"}),
        "claim of another machine": _lines(CLAIM),
        "odd url": _lines({**CLAIM, "url": "ws://[::1", "host": "x"}),
        "markup": _lines({**CLAIM, "url": "ws://[/x]", "host": "[/x]"}),
    },
    "events.jsonl": {
        "nothing": _text(""),
        "nested": _text(NESTED),
        "nested in a field": _text(json.dumps(STARTED)[:-1] + ', "x": ' + NESTED + "\n" + json.dumps(STEP)),
        "binary": _text(bytes(range(256)) * 1000),
        "one long line": _text(b"x" * 5_000_000),
        "time of no calendar": _lines({**STARTED, "time_s": 1e300}, {**STEP, "time_s": 1e300}),
        "time before all": _lines({**STARTED, "time_s": -1e18}),
        "absurd numbers": _lines({**STARTED, "parameters": 10**300, "steps": 10**300}, {**STEP, "step": 10**300}),
        "digits without end": _text(json.dumps(STARTED).replace('"steps": 4', '"steps": ' + "9" * 5000)),
        "absurd losses": _lines(STARTED, {**STEP, "loss": 1e308}, {**STEP, "step": 2, "loss": -1e308}),
        "escapes": _lines(
            {**STARTED, "model": "\x1b[2J\r\n"}, {"event": "run_finished", "step": 1, "loss": 1, "reason": "\x1b"}
        ),
        "wrong types": _lines({**STARTED, "steps": "4"}, {**STEP, "step": None}, 3, [], {"event": {}}),
    },
    "config.toml": {
        "huge": _huge,
        "nested": _text("a = " + NESTED),
        "escapes": _text('model = "\\u001b[2J"'),
        "digits without end": _text("steps = 0x" + "f" * 8000),
        "endless line": _text("a." * 20_000 + "a = 1"),
    },
    "keys.json": {
        "pipe": os.mkfifo,
        "endless": _link_to("/dev/zero"),
        "huge": _huge,
        "nested": _text(NESTED),
        "not UTF-8": _text(b'[{"id": "\xff"}]'),
        "object": _text("{}"),
        "id with escapes": _lines([{**KEY, "id": "\x1b[2J"}]),
        "hash that is no hexadecimal": _lines([{**KEY, "hash": "é"}]),
        "time of no calendar": _lines([{**KEY, "created_s": 1e300}]),
        "many salts": _lines([{**KEY, "id": f"{key:08x}", "salt": f"{key:032x}"} for key in range(100)]),
        "unknown role": _lines([{**KEY, "role": "owner"}]),
    },
    "checkpoints": {
        "pipe": os.mkfifo,
        "endless": _link_to("/dev/zero"),
        "odd entries": lambda path: (
            path.mkdir(),
            (path / "step-000001").symlink_to("/"),
            os.mkfifo(path / "step-000002"),
            (path / f"step-{'9' * 240}").mkdir(),
        ),
    },
}
CASES = {f"{name}: {kind}": (name, make) for name, kinds in HOSTILE.items() for kind, make in kinds.items()}
COMMANDS = {
    "list": ["runs", "list"],
    "list as JSON": ["runs", "list", "--json"],
    "show": ["runs", "show", "stranger"],
    "show as JSON": ["runs", "show", "stranger", "--json"],
    "tokens": ["token", "list"],
    "new token": ["token", "add"],
    "remove": ["runs", "remove", "stranger", "--yes"],
}


@pytest.mark.parametrize(("name", "make"), CASES.values(), ids=CASES)
def test_every_command_answers_whatever_a_run_holds(
    run: Path, capfd: pytest.CaptureFixture[str], name: str, make: Make
) -> None:
    if (run / name).is_file():
        (run / name).unlink()
    make(run / name)
    for arguments in COMMANDS.values():
        code = main(arguments)
        said = capfd.readouterr()
        assert code in (0, 2), arguments
        assert "Traceback" not in said.err
        assert "\x1b" not in said.err
        assert said.err.count("\n") == (1 if code == 2 else 0), said.err
        if arguments[0] == "token":
            assert "\x1b" not in said.out


@pytest.mark.parametrize("make", HOSTILE["keys.json"].values(), ids=HOSTILE["keys.json"])
def test_forged_keys_are_refused_before_a_server_uses_them(tmp_path: Path, make: Make) -> None:
    make(tmp_path / "keys.json")
    with pytest.raises(InputError, match=r"keys\.json"):
        Keys(path=tmp_path / "keys.json").identify("guess")


def test_a_claim_that_cannot_be_shown_is_none(run: Path) -> None:
    _lines(CLAIM)(run / "server.json")
    assert running(run) is not None
    HOSTILE["server.json"]["escapes"](run / "server.json")
    assert running(run) is None


def test_events_around_a_broken_line_are_read(run: Path) -> None:
    log = run / "events.jsonl"
    log.write_text(f"{json.dumps(STARTED)}\n{NESTED}\n{'x' * 3_000_000}\n\0\0{json.dumps(STEP)}\r\n")
    assert [type(event) for event in events.read_events(log)] == [events.RunStarted, events.StepDone]


def test_the_size_of_directories_nested_deeper_than_python_recurses(deep_directory: Path) -> None:
    assert size_bytes(deep_directory) == len("deep")


# -------------------------------------------------------------------------------------------- links out of a directory


def test_nothing_is_written_through_a_link(run: Path, tmp_path: Path) -> None:
    """A shell would execute what a run's settings put into its log, if a link led to a file such as ~/.bashrc."""
    victim = tmp_path / ".bashrc"
    victim.write_text("alias ll='ls -l'\n")
    for name in ("events.jsonl", ".config.toml.partial", ".server.json.partial", "server.json", "keys.json"):
        _link_to(str(victim))(run / name)
    log = AppendedFile(run / "events.jsonl", end=b"\n")
    log.write(b"$(touch executed)\n")
    log.close()
    write_whole(run / "config.toml", b"steps = 4\n")
    main(["token", "add", "--out", str(run)])
    assert victim.read_text() == "alias ll='ls -l'\n"
    assert (run / "config.toml").read_text() == "steps = 4\n"


def test_a_log_that_is_a_pipe_is_not_waited_for(run: Path) -> None:
    (run / "events.jsonl").unlink()
    os.mkfifo(run / "events.jsonl")
    log = AppendedFile(run / "events.jsonl", end=b"\n")
    log.write(b"x\n")
    assert log.waiting
    log.close()


def test_a_run_resumes_only_from_what_it_can_trust(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    config = TrainConfig(model="tiny-llama", data=text, steps=2, sequence=16, batch=2, sample=0, tensorboard=False)
    train(config, tmp_path / "run")
    state = tmp_path / "run" / "checkpoints" / "step-000002" / "state.json"
    state.unlink()
    os.mkfifo(state)
    with pytest.raises(InputError, match=r"no intact checkpoint .*step-000002"):
        train(config, tmp_path / "run", resume=True)
