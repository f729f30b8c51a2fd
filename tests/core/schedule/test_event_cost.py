"""The work per event grows at most logarithmically with the fleet, counted in bytecodes, not in seconds."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from cleave.core.cost.rates import Pace
from cleave.core.schedule.ledger import TICK_S, Ledger
from cleave.core.schedule.members import Roster
from cleave.core.schedule.tasks import (
    CancelSent,
    DeviceAdded,
    DeviceAnswered,
    DeviceId,
    DeviceRemoved,
    Event,
    GroupsAbandoned,
    Operand,
    OperandId,
    OperandsReleased,
    ResultArrived,
    Task,
    TaskId,
    TasksSubmitted,
    Tick,
)

SMALL, LARGE = 16, 1024
MORE = 1000
"""Bytecodes that six more levels of two heaps may take; visiting all devices would take thousands."""
PACE = Pace(flops_per_s=1e9, down_bytes_per_s=1e8, up_bytes_per_s=1e7, latency_s=0.01)
SHARED = Operand(id=OperandId(1), bytes=10, wire_bytes=10)
"""Held by every fourth device of the small fleet, and by as many of the large one."""


def device(number: int) -> DeviceId:
    return DeviceId(f"device-{number}")


def unit(number: int, on: int, *operands: Operand) -> Task:
    own = Operand(id=OperandId(100 + number), bytes=10, wire_bytes=10)
    return Task(
        id=TaskId(number),
        device=device(on),
        priority=1,
        operands=(own, *operands),
        rows=2,
        cols=2,
        result_bytes=4,
        flops=1e9 if on else 1e6,
        group=on,
    )


def busy_ledger(devices: int) -> Ledger:
    """A ledger whose devices all run two tasks; the first device is faster, so it is late first."""
    ledger = Ledger()
    for number in range(devices):
        ledger.handle(DeviceAdded(device(number), 1000, PACE), 0.0)
    for number in range(devices):
        shared = (SHARED,) if number < SMALL and number % 4 == 0 else ()
        tasks = (unit(2 * number, number, *shared), unit(2 * number + 1, number))
        ledger.handle(TasksSubmitted(tasks), 0.0)
    now = 0.0
    while now < 0.3:
        now += TICK_S
        assert ledger.handle(Tick(), now) == []
    return ledger


def bytecodes(action: Callable[[], object]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        action()
    finally:
        sys.settrace(before)
    return count


EVENTS: dict[str, tuple[Event, float]] = {
    "an operand is released": (OperandsReleased((SHARED.id,)), 0.35),
    "a tick with nothing due": (Tick(), 0.4),
    "a device joins": (DeviceAdded(DeviceId("new"), 1000, PACE), 0.35),
    "a device leaves": (DeviceRemoved(device(3)), 0.35),
    "a result arrives": (ResultArrived(device(3), TaskId(6), unit(6, 3).whole), 0.35),
    "tasks are submitted": (TasksSubmitted((unit(9999, 3), unit(9998, 5))), 0.35),
    "a heartbeat is answered": (DeviceAnswered(device(3)), 0.35),
    "a group is abandoned": (GroupsAbandoned((3,)), 0.35),
}


def commands_and_work(ledger: Ledger, event: Event, now: float) -> tuple[int, int]:
    said: list[object] = []
    work = bytecodes(lambda: said.extend(ledger.handle(event, now)))
    return len(said), work


@pytest.mark.parametrize("what", EVENTS)
def test_the_work_of_an_event_does_not_grow_with_the_fleet(what: str) -> None:
    small, large = (commands_and_work(busy_ledger(devices), *EVENTS[what]) for devices in (SMALL, LARGE))
    assert large[0] == small[0]
    assert large[1] <= small[1] + MORE


def test_the_work_of_a_tick_with_one_device_due_does_not_grow_with_the_fleet() -> None:
    work: list[int] = []
    for devices in (SMALL, LARGE):
        ledger, now, done = busy_ledger(devices), 0.3, 0
        while device(0) not in ledger.late:
            now += TICK_S
            _, done = commands_and_work(ledger, Tick(), now)
        work.append(done)
        assert ledger.late == {device(0)}
    assert work[1] <= work[0] + MORE


def test_the_work_of_a_server_stall_does_not_grow_with_the_fleet() -> None:
    small, large = (commands_and_work(busy_ledger(devices), Tick(), 1000.0) for devices in (SMALL, LARGE))
    assert large[1] <= small[1] + MORE


def test_the_work_of_ending_a_cancelled_task_does_not_grow_with_the_fleet() -> None:
    work: list[int] = []
    for devices in (SMALL, LARGE):
        ledger = busy_ledger(devices)
        ledger.handle(GroupsAbandoned((0,)), 0.3)
        work.append(commands_and_work(ledger, CancelSent(device(0), TaskId(0), (SHARED.id,)), 0.35)[1])
    assert work[1] <= work[0] + MORE


@pytest.mark.parametrize("limit", [1, 4])
def test_the_least_busy_devices_are_found_without_visiting_the_others(limit: int) -> None:
    small, large = busy_ledger(SMALL), busy_ledger(LARGE)
    assert bytecodes(lambda: large.least_busy(limit)) <= bytecodes(lambda: small.least_busy(limit)) + MORE


def crowded_roster(devices: int) -> Roster:
    """A roster whose devices all want the same name, after a first snapshot for the planner."""
    roster = Roster()
    for _ in range(devices):
        _join(roster)
    roster.profiles()
    return roster


def _join(roster: Roster) -> None:
    with roster.reserved("device") as name:
        roster.add(
            name=name,
            kernel="numpy",
            memory_bytes=10**9,
            flops_per_s=1e9,
            latency_s=0.01,
            down_bytes_per_s=10e6,
            up_bytes_per_s=1e6,
        )


@pytest.mark.parametrize(
    "change",
    [
        _join,
        lambda roster: roster.remove("device-3"),
        lambda roster: roster.measured("device-3"),
        lambda roster: roster.lateness_changed("device-3"),
        Roster.profiles,
    ],
    ids=["join", "departure", "measurement", "lateness", "unchanged snapshot"],
)
def test_the_work_of_a_change_to_the_roster_does_not_grow_with_the_fleet(change: Callable[[Roster], None]) -> None:
    small, large = crowded_roster(SMALL - 1), crowded_roster(LARGE - 1)
    assert bytecodes(lambda: change(large)) <= bytecodes(lambda: change(small)) + MORE
