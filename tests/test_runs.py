"""`cleave runs`: what run directories tell, and what is removed from them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.commands import command, environment

from cleave import events, run_files
from cleave.cli.main import main
from cleave.config import TrainConfig, to_toml
from cleave.errors import InputError
from cleave.runs.reading import find_run, list_runs, read_run
from cleave.runs.removal import plan_removal, remove

STARTED_S = 1_700_000_000.0


def started(first_step: int = 1, steps: int = 4) -> events.RunStarted:
    return events.RunStarted(
        model="tiny-llama",
        parameters=1_000_000,
        steps=steps,
        first_step=first_step,
        tokens_per_step=64,
        wire="fp32",
        seed=1,
    )


def step(number: int, loss: float) -> events.StepDone:
    return events.StepDone(
        step=number,
        loss=loss,
        learning_rate=1e-3,
        gradient_norm=1.0,
        tokens=64,
        seconds=0.5,
        waiting_s=0.25,
        devices=1,
        down_bytes=10,
        up_bytes=5,
    )


def finished(number: int, reason: str = "done") -> events.RunFinished:
    return events.RunFinished(step=number, loss=None, reason=reason)


def joined(name: str) -> events.DeviceJoined:
    return events.DeviceJoined(
        device=name,
        flops_per_s=1e11,
        down_bytes_per_s=1e8,
        up_bytes_per_s=1e7,
        latency_s=0.01,
        memory_bytes=2e9,
        kernel="numpy",
    )


DONE = (started(), joined("attic"), *(step(n, 5.0 - n) for n in range(1, 5)), events.Evaluated(step=4, loss=1.5))


def make_run(
    path: Path,
    log: Iterable[events.AnyEvent] = (*DONE, finished(4)),
    config: TrainConfig | None = None,
    *,
    written_s: float = STARTED_S,
) -> Path:
    """Write a run as `cleave train` leaves it; events are one second apart."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.toml").write_text(to_toml(config or TrainConfig(model="tiny-llama", steps=4)))
    os.utime(path / "config.toml", (written_s, written_s))
    seconds = iter(range(1_000_000))
    writer = events.EventLog(path / "events.jsonl", lambda: STARTED_S + next(seconds))
    for event in log:
        writer(event)
    writer.close()
    for number in (2, 4):
        saved = path / "checkpoints" / f"step-{number:06d}"
        saved.mkdir(parents=True)
        (saved / "model.safetensors").write_bytes(b"x" * 3000)
    (path / "model").mkdir()
    (path / "model" / "model.safetensors").write_bytes(b"x" * 2000)
    (path / "keys.json").write_text("{}")
    (path / "tensorboard").mkdir()
    (path / "tensorboard" / "events.out.tfevents.1.host.2").write_bytes(b"x" * 100)
    return path


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CLEAVE_HOME", str(tmp_path / "cleave"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cleave" / "runs"


@pytest.fixture
def busy(home: Path) -> Iterator[Path]:
    """A run that this process trains in."""
    run = make_run(home / "busy", DONE[:4])
    run_files.claim(run, "wss://192.168.1.20:7077")
    yield run
    run_files.release(run)


# -------------------------------------------------------------------------------------------------------- reading


def test_a_finished_run_tells_its_loss_devices_checkpoints_and_size(home: Path) -> None:
    run = read_run(make_run(home / "one"))
    assert (run.state, run.step, run.steps, run.model) == ("done", 4, 4, "tiny-llama")
    assert run.losses == (4.0, 3.0, 2.0, 1.0)
    assert run.evaluations == ((4, 1.5),)
    assert run.tokens == 4 * 64
    assert [(saved.step, saved.size_bytes) for saved in run.checkpoints] == [(2, 3000), (4, 3000)]
    assert run.exported == home / "one" / "model"
    assert run.started_s == STARTED_S
    assert run.size_bytes > 2 * 3000 + 2000
    [device] = run.devices
    assert (device.name, device.joined, device.wrong) == ("attic", 1, 0)
    assert device.connected_s == 6.0, "from joining to the end of the run"
    assert {(setting.name, setting.value) for setting in run.settings} == {("model", "tiny-llama"), ("steps", 4)}


@pytest.mark.parametrize(
    ("log", "state"),
    [
        ((*DONE, finished(4)), "done"),
        ((*DONE[:4], finished(2, "interrupted")), "interrupted"),
        ((*DONE[:4], finished(2, "stopped")), "interrupted"),
        (DONE[:4], "interrupted"),  # killed
        ((), "interrupted"),
        ((*DONE[:4], finished(2, "the loss is NaN")), "failed"),
        ((*DONE[:4], finished(2, "the loss is NaN"), started(3), *DONE[4:], finished(4)), "done"),
        ((*DONE, finished(4), started(5, steps=9)), "interrupted"),  # resumed for more steps, and killed
    ],
)
def test_the_last_events_tell_how_a_run_ended(home: Path, log: tuple[events.AnyEvent, ...], state: str) -> None:
    run = read_run(make_run(home / "one", log))
    assert run.state == state
    assert bool(run.reason) == (state == "failed")


def test_a_run_is_running_while_its_process_holds_the_directory(busy: Path) -> None:
    assert read_run(busy).state == "running"
    run_files.release(busy)
    assert read_run(busy).state == "interrupted"


@given(saved=st.integers(0, 6), reached=st.integers(0, 6), again=st.integers(0, 6))
def test_a_resumed_run_forgets_the_steps_it_does_again(
    tmp_path_factory: pytest.TempPathFactory, saved: int, reached: int, again: int
) -> None:
    saved = min(saved, reached)
    first = [step(n, 100.0 + n) for n in range(1, reached + 1)]
    second = [step(n, 200.0 + n) for n in range(saved + 1, saved + again + 1)]
    run = read_run(make_run(tmp_path_factory.mktemp("run") / "one", [started(), *first, started(saved + 1), *second]))
    expected = [100.0 + n for n in range(1, saved + 1)] + [200.0 + n for n in range(saved + 1, saved + again + 1)]
    assert list(run.losses) == expected
    assert run.step == len(expected)


def test_devices_are_shown_with_what_the_log_says_of_them(home: Path) -> None:
    log = [
        started(),
        joined("attic"),
        events.Audited(device="attic", units=3, is_right=True),
        events.ResultRefused(device="attic", reason="wrong"),
        events.DeviceLeft(device="attic", reason="gone", lost_tasks=2),  # 3 s after it joined
        step(1, 4.0),
        joined("attic"),
        joined("cellar"),
        events.Audited(device="cellar", units=1, is_right=False),
        finished(1, "interrupted"),
        events.DeviceLeft(device="nobody", reason="gone", lost_tasks=1),
    ]
    attic, cellar = read_run(make_run(home / "one", log)).devices
    assert (attic.joined, attic.connected_s, attic.lost_tasks) == (2, 3.0 + 3.0, 2)
    assert (attic.audited_units, attic.wrong) == (3, 1)
    assert (cellar.joined, cellar.connected_s, cellar.wrong) == (1, 2.0, 1)


def test_damaged_settings_and_logs_are_shown_as_far_as_they_can_be_read(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(home / "one")
    (run / "config.toml").write_text("steps = maybe")
    with (run / "events.jsonl").open("ab") as log:
        log.write(b'\0\0{"event": "step_do')
    assert read_run(run).settings_problem
    assert read_run(run).step == 4
    assert main(["runs", "show", "one"]) == 0
    assert "config.toml" in capsys.readouterr().out


def test_runs_are_listed_newest_first_and_found_by_name_path_or_age(home: Path, tmp_path: Path) -> None:
    old, new = make_run(home / "z", written_s=1000), make_run(home / "a", written_s=2000)
    (home / "no-run").mkdir()
    (home / "no-log").mkdir()
    (home / "no-log" / "config.toml").touch()
    elsewhere = make_run(tmp_path / "elsewhere" / "mine")
    assert [run.path for run in list_runs()] == [new, old]
    assert [run.path for run in list_runs(tmp_path / "elsewhere")] == [elsewhere]
    assert [run.path for run in list_runs(elsewhere)] == [elsewhere]
    assert find_run(None) == new
    assert find_run("z") == find_run("z/") == old
    assert find_run(str(elsewhere)) == elsewhere
    assert find_run("mine", tmp_path / "elsewhere") == elsewhere
    assert find_run("mine", elsewhere) == elsewhere
    assert find_run("elsewhere/mine") == Path("elsewhere/mine")


# ---------------------------------------------------------------------------------------------------------- words


def test_a_list_fits_80_columns_without_cutting_numbers(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(home / "20260131-142500")
    make_run(home / "a-run-with-a-name-that-is-far-too-long", config=TrainConfig(model="organization/a-long-name"))
    of_a_terminal = {**os.environ, "COLUMNS": "80", "TERM": "dumb", "LINES": "24"}  # dumb: without codes for colors
    leader, follower = pty.openpty()
    os.set_blocking(leader, False)
    subprocess.run(command("runs", "list"), stdout=follower, env=of_a_terminal, check=True, timeout=60)
    shown = os.read(leader, 65536).decode()
    os.close(leader)
    os.close(follower)
    table = [line for line in shown.splitlines() if str(home) not in line]
    assert max(map(len, table)) <= 80
    for words in ("20260131-142500", "4/4", "1.0000", "tiny-llama", "done"):
        assert words in shown
    assert "…" not in shown


def test_a_list_as_json_has_every_column(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(home / "one")
    assert main(["runs", "list", "--json"]) == 0
    [run] = json.loads(capsys.readouterr().out)["runs"]
    assert run["size_bytes"] > 8000
    del run["size_bytes"]
    assert run == {
        "run": "one",
        "path": str(home / "one"),
        "state": "done",
        "reason": "",
        "started_s": STARTED_S,
        "model": "tiny-llama",
        "step": 4,
        "steps": 4,
        "loss": 1.0,
    }


def test_a_list_without_runs_says_so(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "list"]) == 0
    assert str(home) in capsys.readouterr().out
    assert main(["runs", "list", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["runs"] == []


def test_show_describes_the_newest_run_and_how_to_continue(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(home / "one", DONE[:4], TrainConfig(model="tiny-llama", steps=4, learning_rate=0.5, tls=True))
    assert main(["runs", "show"]) == 0
    text = capsys.readouterr().out
    for words in (
        f"cleave train --resume --out {run}",
        f"cleave token add --out {run}",
        "learning_rate 0.5",
        "tls on",
        "attic",
        "step 2 (3 kB), step 4 (3 kB)",
        "4.0000 -> 3.0000",
        "interrupted",
        str(run / "model"),
    ):
        assert words in text


def test_show_names_the_process_and_the_address_of_a_running_run(
    busy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", "show", "busy"]) == 0
    text = capsys.readouterr().out
    assert str(os.getpid()) in text
    assert "wss://192.168.1.20:7077" in text
    assert "--resume" not in text
    assert f"cleave token add --out {busy}" in text


def test_show_as_json_has_losses_settings_devices_and_checkpoints(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(home / "one", (*DONE, step(5, float("nan"))), TrainConfig(data=Path("texts"), model="tiny-llama"))
    assert main(["runs", "show", "one", "--json"]) == 0
    run = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert run["losses"][:4] == [4.0, 3.0, 2.0, 1.0]
    assert run["evaluations"] == [{"step": 4, "loss": 1.5}]
    assert run["settings"] == {"data": "texts", "model": "tiny-llama"}
    assert run["devices"][0]["device"] == "attic"
    assert [saved["step"] for saved in run["checkpoints"]] == [2, 4]


# ------------------------------------------------------------------------------------------------------- removing


def test_remove_frees_a_whole_run_and_nothing_else(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, other = make_run(home / "one"), make_run(home / "other")
    held = read_run(run).size_bytes
    assert main(["runs", "remove", "one", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"runs": [str(run)], "freed_bytes": held, "kept": []}
    assert not run.exists()
    assert read_run(other).state == "done"


def test_remove_checkpoints_keeps_model_log_and_settings(home: Path) -> None:
    run = make_run(home / "one")
    (run / "checkpoints" / ".partial-step-000005").mkdir()
    assert main(["runs", "remove", "--checkpoints", "one", "--yes"]) == 0
    left = read_run(run)
    assert left.checkpoints == ()
    assert not (run / "checkpoints").exists()
    assert (left.state, left.exported) == ("done", run / "model")
    assert (run / "keys.json").is_file()


def test_files_that_cleave_did_not_write_stay(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(home / "one")
    (run / "thesis.tex").write_text("years of work")
    (run / "checkpoints" / "mine").mkdir()
    assert main(["runs", "remove", "one", "--yes"]) == 0
    told = capsys.readouterr().out
    assert (run / "thesis.tex").read_text() == "years of work"
    assert str(run / "thesis.tex") in told
    assert sorted(path.name for path in run.iterdir()) == ["checkpoints", "thesis.tex"]
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["mine"]


def test_a_model_that_the_run_did_not_export_stays(home: Path) -> None:
    unfinished, finished_run = make_run(home / "one", DONE), make_run(home / "two")
    (finished_run / "model" / "mine.py").write_text("years of work")
    assert main(["runs", "remove", "one", "two", "--yes"]) == 0
    assert [path.name for path in unfinished.rglob("*")] == ["model", "model.safetensors"]
    assert [path.name for path in finished_run.rglob("*")] == ["model", "mine.py"]


def test_the_current_directory_can_be_removed_by_its_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(home / "one")
    monkeypatch.chdir(run)
    assert main(["runs", "remove", ".", "--yes"]) == 0
    assert not run.exists()


def test_remove_follows_no_links(home: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "step-000009").mkdir()
    (outside / "precious").touch()
    run = make_run(home / "one")
    (run / "checkpoints" / "step-000006").symlink_to(outside)
    (run / "model" / "tokenizer.json").symlink_to(outside)
    linked = make_run(home / "two")
    (linked / "checkpoints").rename(tmp_path / "moved")
    (linked / "checkpoints").symlink_to(outside)
    alias = home / "alias"
    alias.symlink_to(run)
    assert main(["runs", "remove", "alias", "--yes"]) == 2
    assert main(["runs", "remove", "one", "two", "--yes"]) == 0
    assert not run.exists()
    assert sorted(path.name for path in outside.iterdir()) == ["precious", "step-000009"]


def test_a_running_run_is_never_touched(busy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(busy.parent / "idle")
    before = sorted(busy.rglob("*"))
    for flags in (["busy"], ["--checkpoints", "busy"], ["idle", "busy"]):
        assert main(["runs", "remove", *flags, "--yes"]) == 2
        assert str(os.getpid()) in capsys.readouterr().err
    assert sorted(busy.rglob("*")) == before
    assert read_run(busy.parent / "idle").state == "done", "all names are checked before anything is removed"


def test_a_run_that_started_after_the_question_is_not_removed(home: Path) -> None:
    run = make_run(home / "one")
    removal = plan_removal(run, checkpoints_only=False)
    run_files.claim(run)
    with pytest.raises(InputError, match=str(os.getpid())):
        remove(removal)
    assert read_run(run).step == 4


def test_a_run_of_another_host_is_not_removed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(home / "one")
    (run / "server.json").write_text('{"pid": 1, "created_s": 5.0, "url": null, "host": "another-host"}')
    assert main(["runs", "remove", "one", "--yes"]) == 2
    assert "another-host" in capsys.readouterr().err
    assert run.exists()


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["remove", "missing", "--yes"], "missing"),
        (["remove", "no-run", "--yes"], "config.toml"),
        (["remove", "..", "--yes"], ".."),
        (["remove", ".", "--yes"], "config.toml"),
        (["remove", "/", "--yes"], "/"),
        (["remove", "one"], "--yes"),
        (["show", "missing"], "missing"),
        (["show", "--dir", "missing"], "missing"),
        (["list", "--dir", "missing"], "missing"),
        (["show", "--dir", "empty"], "empty"),
    ],
)
def test_wrong_input_gives_one_sentence_and_exit_code_2(
    home: Path, tmp_path: Path, arguments: list[str], fact: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_run(home / "one")
    (home / "no-run").mkdir()
    (tmp_path / "empty").mkdir()
    assert main(["runs", *arguments]) == 2
    told = capsys.readouterr().err
    assert told.startswith("cleave runs: ")
    assert told.count("\n") == 1
    assert fact in told
    assert (home / "one").is_dir()


@pytest.mark.parametrize(("answer", "is_gone"), [("y\n", True), ("yes\n", True), ("\n", False), ("n\n", False)])
def test_remove_asks_on_a_terminal(home: Path, tmp_path: Path, answer: str, is_gone: bool) -> None:
    run = make_run(home / "one")
    leader, follower = pty.openpty()
    os.write(leader, answer.encode())
    asked = subprocess.run(
        command("runs", "remove", "one"),
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env=environment(tmp_path / "cleave"),
        timeout=60,
        check=False,
    )
    said = os.read(leader, 65536).decode()
    os.close(leader)
    os.close(follower)
    assert asked.returncode == 0
    assert "[y/N]" in said
    assert str(run) in said
    assert run.exists() != is_gone


def test_dates_are_those_of_the_runs(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(home / "one")
    assert main(["runs", "list"]) == 0
    assert time.strftime("%b %d  %Y", time.localtime(STARTED_S)) in capsys.readouterr().out
