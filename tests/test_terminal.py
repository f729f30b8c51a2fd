"""Whoever writes to a terminal, pipe or file through `never_blocking` never waits for a reader."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cleave import terminal
from cleave.terminal import is_behind, is_kept, never_blocking


@contextmanager
def small_pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Put a pipe in place of standard error; yields the end to read."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    with os.fdopen(writing, "w", buffering=1) as stream, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stream)
        try:
            yield reading
        finally:
            os.close(reading)  # frees a thread that is stuck


def test_a_pipe_nobody_reads_stops_nobody_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.2)
    with small_pipe(monkeypatch):
        with never_blocking("stderr"):
            for number in range(20_000):
                sys.stderr.write(f"line {number} of many that nobody reads\n")
            assert is_behind(sys.stderr)
            assert sys.stderr.waiting * 30 < 2 * terminal.ROOM_CHARACTERS  # type: ignore[union-attr]
        assert not is_behind(sys.stderr)


def test_a_late_reader_sees_the_newest_lines_in_order_and_how_much_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"line {number} of many that somebody reads late\n" for number in range(20_000)]
    with small_pipe(monkeypatch) as pipe, never_blocking("stderr"):
        for line in lines:
            sys.stderr.write(line)
        found = b""
        while not found.endswith(lines[-1].encode()):
            found += os.read(pipe, 1 << 16)
    shown = found.decode().splitlines(keepends=True)
    gaps = [int(line.split()[1]) for line in shown if line.startswith("...")]  # one, or more if the thread starts late
    kept = [line for line in shown if not line.startswith("...")]
    numbers = [int(line.split()[1]) for line in kept]
    assert numbers == sorted(set(numbers))
    assert [lines[number] for number in numbers] == kept
    assert sum(gaps) == len(lines) - len(kept) > 0


def test_a_stuck_standard_error_does_not_hold_up_standard_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(terminal, "PATIENCE_S", 0.2)
    with small_pipe(monkeypatch), (tmp_path / "out").open("w") as out:
        assert not is_kept(sys.stderr)
        monkeypatch.setattr(sys, "stdout", out)
        with never_blocking("stdout", "stderr"):
            sys.stderr.write("x" * 100_000)
            sys.stdout.write("the summary\n")
    assert (tmp_path / "out").read_text() == "the summary\n"


def test_a_reader_that_is_gone_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with never_blocking("stderr"):
            sys.stderr.write("into the void\n")


def test_output_to_one_file_keeps_its_order_and_its_encoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "both"
    with path.open("a", encoding="ascii") as one, path.open("a", encoding="utf-8") as two:
        monkeypatch.setattr(sys, "stdout", one)
        monkeypatch.setattr(sys, "stderr", two)
        with never_blocking("stdout", "stderr"):
            for number in range(200):
                (sys.stdout if number % 3 else sys.stderr).write(f"{number} é\n")
            assert is_kept(sys.stderr)
    expected = [f"{number} {'é' if number % 3 == 0 else chr(92) + 'xe9'}" for number in range(200)]
    assert path.read_text().splitlines() == expected


def test_a_stream_without_a_file_stays_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stderr
    with never_blocking("stdout", "stderr"):
        assert sys.stderr is before
    assert not is_kept(sys.stderr)
