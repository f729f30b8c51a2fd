"""The log of a run holds every event in intact lines, whatever happened to the disk or to an earlier process."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cleave import disk
from cleave.events import AnyEvent, DeviceJoined, DeviceLeft, EventLog, Note, RunFinished, Throttle, read_events

Limit = Callable[[int | None], None]


def _log(path: Path, max_waiting: int = 100) -> EventLog:
    return EventLog(path, lambda: 1.0, max_waiting=max_waiting)


def _texts(path: Path) -> list[str]:
    return [event.text for event in read_events(path) if isinstance(event, Note)]


@pytest.mark.parametrize(
    "tail",
    [b"", b'{"event":"note","te', b"{", b"\0\0\0\0", b'{"event":"note","text":"\xc3', b"\xff\xfe\n", b"\r", b"[" * 99],
    ids=["none", "half", "brace", "nuls", "half-letter", "no-text", "return", "deep"],
)
def test_a_torn_tail_costs_no_other_line(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "events.jsonl"
    for round_ in range(2):
        log = _log(path)
        log(Note(text=f"before {round_}"))
        log.close()
        path.write_bytes(path.read_bytes() + tail)
    log = _log(path)
    log(Note(text="after"))
    log.close()
    assert _texts(path) == ["before 0", "before 1", "after"]
    assert path.read_bytes().endswith(b"\n")


def test_a_line_is_found_behind_the_zeros_a_power_failure_left(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'\0\0\0{"event":"note","text":"here"}\n{"event":"note","text":"\xff"}\n')
    assert _texts(path) == ["here"]


@pytest.mark.parametrize("room", range(0, 150, 10))
def test_events_a_full_disk_refuses_are_written_once_there_is_room(
    tmp_path: Path, room: int, limit_files: Limit
) -> None:
    path = tmp_path / "events.jsonl"
    expected = [f"note {number}" for number in range(9)]
    limit_files(room)
    log = _log(path)
    for text in expected[:7]:
        log(Note(text=text))
    assert path.stat().st_size == room
    limit_files(None)
    for text in expected[7:]:
        log(Note(text=text))
    log.close()
    assert _texts(path) == expected
    assert len(path.read_bytes().splitlines()) == len(expected)


def test_pending_events_are_written_on_close_at_the_latest(tmp_path: Path, limit_files: Limit) -> None:
    path = tmp_path / "events.jsonl"
    limit_files(10)
    log = _log(path)
    log(Note(text="waits"))
    limit_files(None)
    log.close()
    assert _texts(path) == ["waits"]


def test_events_wait_while_the_log_cannot_be_opened(tmp_path: Path) -> None:
    path = tmp_path / "run" / "events.jsonl"
    (tmp_path / "run").write_text("a file where the directory should be")
    log = _log(path)
    log(Note(text="waits"))
    (tmp_path / "run").unlink()
    log(Note(text="goes"))
    log.close()
    assert _texts(path) == ["waits", "goes"]


def test_a_disk_that_stays_full_stops_nothing_and_is_reported_once(caplog: pytest.LogCaptureFixture) -> None:
    path = Path("/dev/full")
    if not path.exists():
        pytest.skip("there is no /dev/full here")
    log = _log(path)
    for _ in range(5):
        log(Note(text="into the void"))
    log.close()
    assert [record.getMessage() for record in caplog.records] == [
        "cannot write /dev/full: No space left on device; make room there; until then records are kept in memory"
    ]


def test_memory_is_bounded_and_the_gap_is_reported(tmp_path: Path, limit_files: Limit) -> None:
    path = tmp_path / "events.jsonl"
    limit_files(10)
    log = _log(path, max_waiting=3)
    for number in range(10):
        log(Note(text=f"note {number}"))
    limit_files(None)
    log(Note(text="room"))
    log(Note(text="more"))
    log.close()
    gap = "the disk was full or did not answer for too long: 7 events were dropped"
    assert _texts(path) == ["note 0", "note 8", "note 9", "room", gap, "more"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="needs a named pipe")
def test_a_disk_that_never_answers_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "_CLOSE_S", 0.1)
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)  # opening it waits for a reader, as a hung network file system does
    log = _log(path, max_waiting=10)
    for number in range(1000):
        log(Note(text=f"note {number}"))
    log.close()
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # frees the thread
    os.close(reader)


def test_an_event_is_on_disk_when_the_call_returns(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = _log(path)
    for number in range(100):
        log(Note(text=f"note {number}"))
        assert _texts(path)[-1] == f"note {number}"
    log.close()


# ------------------------------------------------------------------------------------------------ floods


def _coming_and_going(count: int) -> Iterator[AnyEvent]:
    for number in range(count):
        yield DeviceJoined(
            device=f"d{number}",
            flops_per_s=1e9,
            down_bytes_per_s=1e6,
            up_bytes_per_s=1e6,
            latency_s=0.01,
            memory_bytes=1e9,
            kernel="numpy",
        )
        yield DeviceLeft(device=f"d{number}", reason="bye", lost_tasks=0)


def test_a_flood_of_joins_and_leaves_adds_little_and_is_summed_up_every_minute() -> None:
    now_s = 0.0
    throttle = Throttle(lambda: now_s)
    passed: list[AnyEvent] = []
    for number, event in enumerate(_coming_and_going(50_000)):  # 100 a second
        now_s = number / 100
        passed += throttle(event)
    passed += throttle.rest()
    notes = [event.text for event in passed if isinstance(event, Note)]
    assert len(passed) - len(notes) <= 10_000 + 2 * now_s + 1
    assert 1 < len(notes) <= now_s / 60 + 1
    omitted = sum(int(count.replace(",", "")) for note in notes for count in re.findall(r"([\d,]+) x", note))
    assert omitted == 100_000 - (len(passed) - len(notes))


def test_a_flood_hides_no_step_and_ends_without_a_trace() -> None:
    now_s = 0.0
    throttle = Throttle(lambda: now_s)
    for event in _coming_and_going(50_000):
        throttle(event)
    finished = RunFinished(step=1, loss=None, reason="done")
    assert throttle(finished) == [finished]
    now_s = 60.0
    (note,) = throttle(Note(text="after"))[:-1]
    assert "45,000 x device_joined" in note.text  # type: ignore[union-attr]
    assert throttle(Note(text="later")) == [Note(text="later")]


def test_a_large_fleet_that_joins_at_once_is_logged_whole() -> None:
    throttle = Throttle(lambda: 0.0)
    assert all(throttle(event) == [event] for event in _coming_and_going(5_000))


def test_a_run_that_ended_before_its_first_step_can_be_read_back(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = _log(path)
    log(RunFinished(step=0, loss=None, reason="the fleet is gone"))
    log.close()
    assert [event.reason for event in read_events(path) if isinstance(event, RunFinished)] == ["the fleet is gone"]
