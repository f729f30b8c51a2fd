"""Run directories and claims on them: who is training where, as seen by another process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from cleave import run_files
from cleave.cli.main import main
from cleave.errors import InputError

URL = "wss://192.168.1.20:7077"
CLAIM_AND_WAIT = (
    "import sys; from pathlib import Path; from cleave import run_files;"
    "run_files.claim(Path(sys.argv[1]), sys.argv[2]); print('claimed', flush=True); sys.stdin.read()"
)


def a_run(home: Path, name: str, written_s: int) -> Path:
    (home / name).mkdir(parents=True)
    (home / name / "config.toml").touch()
    os.utime(home / name / "config.toml", (written_s, written_s))
    return home / name


def train_elsewhere(directory: Path) -> subprocess.Popen[bytes]:
    """Start a process that claims the directory and lives until it is killed."""
    started = subprocess.Popen(
        [sys.executable, "-c", CLAIM_AND_WAIT, str(directory), URL], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert started.stdout is not None
    assert started.stdout.readline().strip() == b"claimed"
    return started


def kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()


def test_a_claim_holds_until_it_is_released(tmp_path: Path) -> None:
    empty, used = tmp_path / "empty", tmp_path / "used"
    assert run_files.running(used) is None
    for directory in (empty, used):
        run_files.claim(directory, URL)
    (used / "config.toml").touch()
    holder = run_files.running(used)
    assert holder is not None
    assert (holder.pid, holder.url) == (os.getpid(), URL)
    assert holder.created_s == pytest.approx(psutil.Process().create_time(), abs=1)
    for directory in (empty, used):
        run_files.release(directory)
    assert run_files.running(used) is None
    assert [path.name for path in tmp_path.rglob("*")] == ["used", "config.toml"]


def test_the_newest_run_is_a_preferred_one_if_there_is_any(tmp_path: Path) -> None:
    assert run_files.newest_run(tmp_path) is None
    for number, name in enumerate(("old", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.toml").touch()
        os.utime(tmp_path / name / "config.toml", (number, number))
    assert run_files.newest_run(tmp_path) == tmp_path / "new"
    assert run_files.newest_run(tmp_path, prefer=lambda run: run.name == "old") == tmp_path / "old"
    assert run_files.newest_run(tmp_path, prefer=lambda run: False) == tmp_path / "new"


def test_a_process_may_renew_its_own_claim(tmp_path: Path) -> None:
    run_files.claim(tmp_path / "made" / "on the way", None)
    run_files.claim(tmp_path / "made" / "on the way", URL)
    holder = run_files.running(tmp_path / "made" / "on the way")
    assert holder is not None
    assert holder.url == URL


def test_only_one_process_trains_in_a_directory(tmp_path: Path) -> None:
    other = train_elsewhere(tmp_path)
    try:
        with pytest.raises(InputError, match=str(other.pid)):
            run_files.claim(tmp_path, None)
        run_files.release(tmp_path)
        holder = run_files.running(tmp_path)
        assert holder is not None, "a process gives up only its own claim"
        assert (holder.pid, holder.url) == (other.pid, URL)
    finally:
        kill(other)


@pytest.mark.skipif(os.name == "nt", reason="there are no zombies")
def test_a_claim_dies_with_its_process_even_before_its_parent_notices(tmp_path: Path) -> None:
    other = train_elsewhere(tmp_path)
    try:
        other.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, and still listed
        assert run_files.running(tmp_path) is None
    finally:
        kill(other)
    run_files.claim(tmp_path, None)
    holder = run_files.running(tmp_path)
    assert holder is not None
    assert holder.pid == os.getpid()


CLAIM_WHEN_TOLD = (
    "import sys; from pathlib import Path; from cleave import run_files; from cleave.errors import InputError\n"
    "print('ready', flush=True); sys.stdin.readline()\n"
    "try: run_files.claim(Path(sys.argv[1])); print('claimed', flush=True)\n"
    "except InputError as fault: print(fault, flush=True)\n"
    "sys.stdin.read()"
)


@pytest.mark.skipif(os.name == "nt", reason="directories cannot be locked")
def test_of_processes_that_find_a_stale_claim_at_the_same_moment_one_trains(tmp_path: Path) -> None:
    kill(train_elsewhere(tmp_path))
    command = [sys.executable, "-c", CLAIM_WHEN_TOLD, str(tmp_path)]
    started = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(3)]
    try:
        assert {_line(process) for process in started} == {b"ready"}
        for process in started:
            assert process.stdin is not None
            process.stdin.write(b"now\n")
            process.stdin.flush()
        said = [_line(process) for process in started]
    finally:
        for process in started:
            kill(process)
    assert said.count(b"claimed") == 1
    assert sum(b"is training in" in line for line in said) == 2


def _line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline().strip()


@pytest.mark.skipif(os.name == "nt", reason="directories cannot be locked")
@pytest.mark.parametrize("fields", [{"pid": os.getpid()}, {"host": "another-container"}, None])
def test_a_process_whose_claim_cannot_be_seen_through_keeps_its_directory(
    tmp_path: Path, fields: dict[str, object] | None
) -> None:
    """Containers have process ids and host names of their own; the claim may even be gone."""
    other, file = train_elsewhere(tmp_path), tmp_path / "server.json"
    try:
        if fields is None:
            file.unlink()
        else:
            file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
        before = {path: path.read_bytes() for path in tmp_path.iterdir()}
        with pytest.raises(InputError, match="is training in"):
            run_files.claim(tmp_path, None)
        assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
        with pytest.raises(InputError, match="is training in"), run_files.locked(tmp_path):
            pass
    finally:
        kill(other)
    run_files.claim(tmp_path, None)
    run_files.release(tmp_path)


def test_a_second_server_gets_one_sentence_and_changes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    run, text = tmp_path / "run", tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    other = train_elsewhere(run)
    try:
        (run / "config.toml").write_text(f"model = 'tiny-llama'\ndata = '{text}'\nsteps = 1\n")
        (run / "events.jsonl").touch()
        before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.iterdir()}
        for command in (f"train --data {text} --out {run}", f"train --resume --out {run}", f"runs remove {run}"):
            assert main(command.split()) == 2
            said = capsys.readouterr().err
            assert f"process {other.pid}" in said
            assert said.count("\n") == 1
        assert {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in run.iterdir()} == before
        assert run_files.running(run) is not None
    finally:
        kill(other)


def change(tmp_path: Path, **fields: object) -> None:
    run_files.claim(tmp_path, URL)
    file = tmp_path / "server.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_a_later_process_with_the_same_id_does_not_hold_the_claim(tmp_path: Path) -> None:
    change(tmp_path, created_s=psutil.Process().create_time() - 3600)
    assert run_files.running(tmp_path) is None


def test_a_claim_from_another_host_counts_as_it_cannot_be_checked_but_does_not_bar_a_restart(tmp_path: Path) -> None:
    change(tmp_path, host="a-container-that-was-replaced", pid=1)
    assert run_files.running(tmp_path) is not None
    run_files.release(tmp_path)
    assert run_files.running(tmp_path) is not None
    run_files.claim(tmp_path, None)
    holder = run_files.running(tmp_path)
    assert holder is not None
    assert holder.is_visible


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"pid": "one"}', '{"pid": 1}', '{"pid": -1, "created_s": 0}', "\0" * 40]
)
def test_a_damaged_claim_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "server.json").write_text(text)
    holder = run_files.running(tmp_path)
    assert holder is None or not holder.is_visible
    run_files.claim(tmp_path, None)


def test_a_full_disk_is_no_reason_not_to_train(
    tmp_path: Path, limit_files: Callable[[int | None], None], caplog: pytest.LogCaptureFixture
) -> None:
    limit_files(8)
    run_files.claim(tmp_path, URL)
    limit_files(None)
    assert "server.json" in caplog.text
    assert run_files.running(tmp_path) is None


def test_the_newest_run_is_the_one_whose_settings_were_written_last(tmp_path: Path) -> None:
    assert run_files.newest_run(tmp_path / "missing") is None
    assert run_files.newest_run(tmp_path) is None
    last, first = a_run(tmp_path, "a", 2000), a_run(tmp_path, "z", 1000)
    (tmp_path / "no run").mkdir()
    (tmp_path / "a file").touch()
    assert run_files.find_runs(tmp_path) == [last, first]
    assert run_files.newest_run(tmp_path) == last


def test_runs_lie_in_cleave_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEAVE_HOME", str(tmp_path))
    assert run_files.runs_home() == tmp_path / "runs"
    monkeypatch.delenv("CLEAVE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert run_files.runs_home() == tmp_path / ".cleave" / "runs"


def test_a_new_run_never_takes_the_directory_of_another(tmp_path: Path) -> None:
    names: set[Path] = set()
    for _ in range(3):
        path = run_files.new_run(tmp_path)
        path.mkdir()
        names.add(path)
    assert len(names) == 3
