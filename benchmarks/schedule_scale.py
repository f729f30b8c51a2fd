"""Cost of the scheduler's events against the size of the fleet: `python benchmarks/schedule_scale.py`.

Every device runs as many tasks as it may and has one waiting. The table gives microseconds per event, the median of
many in one process, for 64, 1,024 and 8,192 devices; flat rows are the goal. The speed of a shared machine drifts, so
the first row is a yardstick: a fixed computation in pure Python, measured with each fleet.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

from cleave.core.cost.rates import Pace
from cleave.core.schedule.device_queue import IN_FLIGHT
from cleave.core.schedule.ledger import TICK_S, Ledger
from cleave.core.schedule.members import Roster
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import (
    Command,
    DeviceAdded,
    DeviceId,
    DeviceRemoved,
    Event,
    Hedge,
    Late,
    Operand,
    OperandId,
    OperandsReleased,
    ResultArrived,
    Task,
    TaskId,
    TasksSubmitted,
    Tick,
)

_SIZES = (64, 1024, 8192)
_EVENTS = 30
_HOLDERS = 4
_ORPHAN_CANDIDATES = 32
_PACE = Pace(flops_per_s=1e9, down_bytes_per_s=1e7, up_bytes_per_s=1e6, latency_s=0.02)
_LONG_FLOPS, _SHORT_FLOPS = 1e13, 1e9
_MEMORY_BYTES = 10**9
_LATE = 8
"""Devices at the end with short tasks, each a tick longer than the previous: they become late one at a time."""
_PART = Rectangle(0, 8, 0, 8)

_T = TypeVar("_T")


class Bench:
    """A ledger and a roster with a busy fleet, and the time of the next event."""

    def __init__(self, devices: int) -> None:
        self.ledger = Ledger()
        self.roster = Roster(self.ledger.late)
        self.now = 0.0
        self._ids = 0
        self.names: list[DeviceId] = []
        for _ in range(devices):
            self.join()
        self._make_idle_operands()
        for index, name in enumerate(self.names):
            ticks_left = index - (devices - _LATE)
            flops = _LONG_FLOPS if ticks_left < 0 else _SHORT_FLOPS * (1 + TICK_S * ticks_left)
            self.handle(TasksSubmitted(tuple(self.task(name, flops) for _ in range(IN_FLIGHT + 1))))

    def join(self) -> None:
        with self.roster.reserved("phone") as name:
            member = self.roster.add(
                name=name,
                kernel="numpy",
                memory_bytes=_MEMORY_BYTES,
                flops_per_s=_PACE.flops_per_s,
                latency_s=_PACE.latency_s,
                down_bytes_per_s=_PACE.down_bytes_per_s,
                up_bytes_per_s=_PACE.up_bytes_per_s,
            )
        self.names.append(DeviceId(name))
        self.handle(DeviceAdded(DeviceId(name), _MEMORY_BYTES, member.pace))

    def leave(self, name: DeviceId) -> None:
        self.roster.remove(name)
        self.handle(DeviceRemoved(name))

    def result(self, name: DeviceId) -> None:
        member, task = self.roster.members[name], next(iter(self.ledger.tasks(name)))
        member.flops.add(1e7, 0.01)
        self.roster.measured(name)
        self.handle(ResultArrived(name, task, _PART))

    def tick(self) -> list[Command]:
        self.now += TICK_S
        return self.handle(Tick())

    def snapshot(self) -> None:
        self.roster.lateness_changed(self.names[0])
        assert self.roster.profiles() is not None

    def handle(self, event: Event) -> list[Command]:
        return self.ledger.handle(event, self.now)

    def task(self, device: DeviceId, flops: float, *operands: Operand) -> Task:
        self._ids += 1
        own = Operand(id=OperandId(self._ids), bytes=1000, wire_bytes=1000)
        return Task(
            id=TaskId(self._ids),
            device=device,
            priority=1,
            operands=(own, *operands),
            rows=_PART.rows,
            cols=_PART.cols,
            result_bytes=4 * _PART.area,
            flops=flops,
            group=device,
        )

    def _make_idle_operands(self) -> None:
        """Leave operands -1 to -_EVENTS behind on a few devices each, with no task that needs them."""
        for number in range(1, _EVENTS + 1):
            operand = Operand(id=OperandId(-number), bytes=1000, wire_bytes=1000)
            for holder in range(_HOLDERS):
                task = self.task(self.names[(number * _HOLDERS + holder) % len(self.names)], 1.0, operand)
                self.handle(TasksSubmitted((task,)))
                self.handle(ResultArrived(task.device, task.id, _PART))


def main() -> None:
    table = [measured(devices) for devices in _SIZES]
    print(f"{'microseconds per event, devices:':44}" + "".join(f"{devices:>9,}" for devices in _SIZES))
    for row in table[0]:
        print(f"{row:44}" + "".join(f"{column[row]:9.1f}" for column in table))


def measured(devices: int) -> dict[str, float]:
    """Median microseconds per kind of event, on one busy fleet."""
    bench = Bench(devices)
    gc.collect()
    gc.freeze()
    names = bench.names[: devices - _LATE]
    found = {
        "yardstick (a loop of 1,000 additions)": _median_us(lambda _: sum(number for number in range(1000)), range(30)),
        f"release of an operand held by {_HOLDERS} devices": _median_us(
            lambda number: bench.handle(OperandsReleased((OperandId(-number),))), range(1, _EVENTS + 1)
        ),
        f"{_ORPHAN_CANDIDATES} least busy devices": _median_us(
            lambda _: bench.ledger.least_busy(_ORPHAN_CANDIDATES), range(_EVENTS)
        ),
        "result, which starts the next task": _median_us(bench.result, names[:_EVENTS]),
        "tick with nothing due": _median_us(lambda _: bench.tick(), range(_EVENTS)),
        "tick with one device due, which is hedged": _one_due_us(bench),
        "snapshot, one device late or more": _median_us(lambda _: bench.snapshot(), range(_EVENTS)),
        "unchanged snapshot": _median_us(lambda _: bench.roster.profiles(), range(_EVENTS)),
        "departure (ledger and roster)": _median_us(bench.leave, names[-_EVENTS:]),
        "join (ledger and roster)": _median_us(lambda _: bench.join(), range(_EVENTS)),
    }
    gc.unfreeze()
    return found


def _one_due_us(bench: Bench) -> float:
    """Tick until all devices with short tasks are late; return the median of the ticks in which one became late."""
    times: list[float] = []
    while len(bench.ledger.late) < _LATE:
        started = time.perf_counter()
        commands = bench.tick()
        seconds = time.perf_counter() - started
        if [type(command) for command in commands].count(Late) == 1:
            assert any(isinstance(command, Hedge) for command in commands)
            times.append(seconds)
    return statistics.median(times) * 1e6


def _median_us(action: Callable[[_T], object], over: Iterable[_T]) -> float:
    times: list[float] = []
    for one in over:
        started = time.perf_counter()
        action(one)
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    main()
