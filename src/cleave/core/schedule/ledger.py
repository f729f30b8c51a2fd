"""The only decider of who does what when: events in, commands out. No clock, no sockets, no numbers of matrices.

A task is one run of a program on operands, planned for one device. It starts when it is next in line (lower priority
number first, then in order of submission), when the device has few others unfinished, and when its operands and result
fit into the device's memory (`shelf.py`). An operand that a device holds is never sent again. A result comes in
rectangles; each element is accepted exactly once, from whoever brings it first. Tasks wait for room and turn, never
for other tasks of their gemm: there is no barrier.

Departure: what is left of a device's tasks, and no other device has, is handed back as orphans to be planned anew.
Lag: from what a device is known to do follows when a task should be there. A device that is late gets nothing new, what
waits in its line goes elsewhere, and what it runs is hedged: given to others too, the slower of whom is cancelled;
tasks bound to a device stay there. One that lets a deadline pass is parted with. A cancelled task keeps its place
until the cancellation is sent, as its operands may still be on their way.

`check` states the invariants; tests call it after every event.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from cleave.core.cost.gemm import Pace
from cleave.core.schedule.device_memory import Shelf
from cleave.core.schedule.rectangles import Rectangle, total, within, without
from cleave.core.schedule.tasks import (
    Accept,
    Back,
    Cancel,
    CancelSent,
    Command,
    DeviceAnswered,
    DeviceId,
    DeviceJoined,
    DeviceLeft,
    DeviceMoved,
    Event,
    Forget,
    Hedge,
    Late,
    OperandId,
    OperandsReleased,
    Orphan,
    Overdue,
    PaceMeasured,
    Refuse,
    RegionsAbandoned,
    Resend,
    ResultArrived,
    Start,
    Task,
    TaskFailed,
    TaskId,
    TasksSubmitted,
    Tick,
)

IN_FLIGHT = 6
"""Tasks a device may have unfinished: enough that its links and its compute never wait for the server's turn."""

TICK_S = 0.1
LATE_S, LATE_TIMES = 0.5, 3.0
"""A task is late so many seconds, and so many times what it should take, after it should be there."""
DEADLINE_S, DEADLINE_TIMES = 10.0, 10.0
"""And this long after, with nothing of it arriving in between, its device is parted with."""
_MOST_PIECES = 64  # of what a device owes of one task, which honest ones return in bands
_REMEMBERED = 256  # cancelled tasks whose results may still be on their way


@dataclass(slots=True)
class _Running:
    task: Task
    owed: list[Rectangle]
    """What the device has not returned, wanted or not."""
    expected_s: float
    started: float
    late_at: float
    deadline: float
    hedged_at: float | None = None
    cancelled: bool = False


@dataclass(slots=True)
class _Region:
    missing: list[Rectangle]
    tasks: dict[TaskId, Task]
    """Those that may still bring something of it, in lines and on devices."""


@dataclass(slots=True)
class _Device:
    shelf: Shelf
    pace: Pace
    running: dict[TaskId, _Running] = field(default_factory=lambda: dict[TaskId, _Running]())
    waiting: list[tuple[int, int, Task]] = field(default_factory=lambda: list[tuple[int, int, Task]]())
    past: deque[TaskId] = field(default_factory=lambda: deque[TaskId](maxlen=_REMEMBERED))
    busy_until: float = 0.0
    is_late: bool = False

    def take(self, task: Task) -> None:
        """Out of its line."""
        if self.waiting[0][2] is task:
            heapq.heappop(self.waiting)
        else:
            self.waiting = [entry for entry in self.waiting if entry[2] is not task]
            heapq.heapify(self.waiting)

    def line(self) -> list[Task]:
        return [task for _, _, task in sorted(self.waiting, key=lambda entry: entry[:2])]


class Ledger:
    def __init__(self) -> None:
        self._devices: dict[DeviceId, _Device] = {}
        self._regions: dict[TaskId, _Region] = {}
        self._sequence = 0
        self._ticked = 0.0

    # -------------------------------------------------------------------------------------------- questions

    @property
    def is_busy(self) -> bool:
        return bool(self._regions)

    def __contains__(self, device: DeviceId) -> bool:
        return device in self._devices

    def holds(self, device: DeviceId, operand: OperandId) -> bool:
        return device in self._devices and operand in self._devices[device].shelf

    def needs(self, device: DeviceId, operand: OperandId) -> bool:
        """Whether a task that the device runs, and nobody cancelled, is about this operand."""
        entries = self._running(device).values()
        return any(operand == o.id for entry in entries if not entry.cancelled for o in entry.task.operands)

    def tasks(self, device: DeviceId) -> Collection[TaskId]:
        """What it has been told to run."""
        return self._running(device).keys()

    def unfinished(self, device: DeviceId) -> int:
        there = self._devices.get(device)
        return 0 if there is None else len(there.waiting) + sum(not entry.cancelled for entry in there.running.values())

    def backlog_s(self, device: DeviceId, now: float) -> float:
        """How long until the device should be done with what it has."""
        there = self._devices.get(device)
        return 0.0 if there is None else max(0.0, there.busy_until - now)

    def wanted(self, name: DeviceId, task: TaskId, part: Rectangle) -> Task | Refuse:
        """The task that a device has and owes this part of; whether the part is right is for others to say."""
        device = self._devices.get(name)
        entry = device.running.get(task) if device else None
        if device is None or entry is None:
            is_past = device is not None and task in device.past
            return Refuse(name, f"a result of task {task}, which this device does not have", not is_past)
        if total(within(entry.owed, part)) != part.area or part.area <= 0:
            return Refuse(name, f"{part} of task {task}, which it does not owe", is_fault=True)
        if entry.cancelled:
            return Refuse(name, f"a result of task {task}, which was cancelled", is_fault=False)
        if len(without(entry.owed, part)) > _MOST_PIECES:
            return Refuse(name, f"a result of task {task} in more than {_MOST_PIECES} scattered pieces", is_fault=True)
        return entry.task

    # -------------------------------------------------------------------------------------------- events

    def handle(self, event: Event, now: float) -> list[Command]:
        match event:
            case DeviceJoined(device, memory_bytes, pace):
                assert device not in self._devices, "the roster gives unique names"
                self._devices[device] = _Device(Shelf(memory_bytes), pace)
                return []
            case PaceMeasured(device, pace):
                if device in self._devices:
                    self._devices[device].pace = pace
                return []
            case DeviceLeft(device):
                return self._leave(device)
            case DeviceAnswered(device):
                return self._forgive(device, now)
            case DeviceMoved(device):
                for entry in self._running(device).values():
                    entry.deadline = max(entry.deadline, now + DEADLINE_S)
                return []
            case TasksSubmitted(tasks):
                return self._submit(tasks, now)
            case ResultArrived(device, task, part):
                return self._arrive(device, task, part, now)
            case TaskFailed(device, task):
                return self._fail(device, task, now)
            case CancelSent(device, task, unsent):
                return self._bury(device, task, unsent, now)
            case RegionsAbandoned(regions):
                return self._abandon(regions, now)
            case OperandsReleased(operands):
                return self._release(operands, now)
            case Tick():
                return self._tick(now)

    def _leave(self, name: DeviceId) -> list[Command]:
        device = self._devices.pop(name, None)
        if device is None:
            return []
        tasks = [entry.task for entry in device.running.values() if not entry.cancelled] + device.line()
        return [command for task in tasks for command in self._lose(task)]

    def _submit(self, tasks: tuple[Task, ...], now: float) -> list[Command]:
        if not self._regions:
            self._ticked = now
        lost: list[Command] = []
        touched: dict[DeviceId, _Device] = {}
        for task in tasks:
            if task.region is None:
                self._regions[task.id] = _Region([task.whole], {task.id: task})
            else:
                region = self._regions.get(task.region)
                if region is None or not within(region.missing, task.area):  # it came meanwhile
                    continue
                region.tasks[task.id] = task
            device = self._devices.get(task.device)
            if device is None or not device.shelf.can_ever_fit(task):
                lost += self._lose(task)
                continue
            self._sequence += 1
            heapq.heappush(device.waiting, (task.priority, self._sequence, task))
            touched[task.device] = device
        started = [command for device in touched.values() for command in self._start(device, now)]
        return started + lost

    def _arrive(self, name: DeviceId, id: TaskId, part: Rectangle, now: float) -> list[Command]:
        task = self.wanted(name, id, part)
        if isinstance(task, Refuse):
            return [task]
        entry, region = self._devices[name].running[id], self._regions[_region(task)]
        entry.owed = without(entry.owed, part)
        entry.deadline = max(entry.deadline, _after(now, entry.expected_s, DEADLINE_S, DEADLINE_TIMES))
        fresh = within(region.missing, part.moved(task.top, task.left))
        for piece in fresh:
            region.missing = without(region.missing, piece)
        commands: list[Command] = [
            Accept(task, part, tuple(piece.moved(-task.top, -task.left) for piece in fresh), not region.missing)
            if fresh
            else Refuse(name, f"{part} of task {id}, which another device brought before", is_fault=False)
        ]
        pointless = [other for other in region.tasks.values() if not within(region.missing, other.area)]
        for other in pointless:
            del region.tasks[other.id]
        if not region.missing:
            del self._regions[_region(task)]
        commands += self._withdraw([other for other in pointless if other.id != id or entry.owed], now)
        if not entry.owed:
            commands += self._end(name, id, now)
        return commands + self._forgive(name, now)

    def _fail(self, name: DeviceId, id: TaskId, now: float) -> list[Command]:
        entry = self._running(name).get(id)
        if entry is None or entry.cancelled:
            is_past = entry is not None or (name in self._devices and id in self._devices[name].past)
            return [Refuse(name, f"a failure of task {id}, which this device does not have", not is_past)]
        return [*self._withdraw([entry.task], now), *self._lose(entry.task)]

    def _release(self, operands: tuple[OperandId, ...], now: float) -> list[Command]:
        commands: list[Command] = []
        for name, device in self._devices.items():
            free = device.shelf.release(operands)
            if free:
                commands += [Forget(name, free), *self._start(device, now)]
        return commands

    def _tick(self, now: float) -> list[Command]:
        stalled_s = now - self._ticked - 2 * TICK_S  # the server itself stood still: nobody's fault
        self._ticked = now
        commands: list[Command] = []
        hedged: list[tuple[TaskId, Rectangle]] = []
        for name, device in list(self._devices.items()):
            entries = [entry for entry in device.running.values() if not entry.cancelled]
            if stalled_s > 0:
                for entry in entries:
                    entry.late_at, entry.deadline = entry.late_at + stalled_s, entry.deadline + stalled_s
            overdue = next((entry for entry in entries if now > entry.deadline), None)
            if overdue is not None:
                commands.append(Overdue(name, overdue.task, now - overdue.started, overdue.expected_s))
            elif any(now > entry.late_at for entry in entries):
                commands += self._lag(name, device, entries, hedged, now)
        return commands

    # -------------------------------------------------------------------------------------------- lag

    def _lag(
        self,
        name: DeviceId,
        device: _Device,
        entries: list[_Running],
        hedged: list[tuple[TaskId, Rectangle]],
        now: float,
    ) -> list[Command]:
        """A late device: tell so once, move what waits in its line, hedge what it runs and no healthy device has.

        `hedged` is what was hedged at this moment already, of which region.
        """
        commands: list[Command] = []
        if not device.is_late:
            device.is_late = True
            commands.append(Late(name))
        if all(other.is_late for other in self._devices.values()):
            return commands
        line = [task for task in device.line() if not task.is_bound]
        device.waiting = [entry for entry in device.waiting if entry[2].is_bound]
        heapq.heapify(device.waiting)
        for task in line:
            commands += self._lose(task)
        for entry in entries:
            if entry.task.is_bound:
                continue
            if entry.hedged_at is None or now > entry.hedged_at + LATE_S + entry.expected_s:
                entry.hedged_at = now
                task, region = entry.task, _region(entry.task)
                missing = self._uncovered(task, besides_late=True)
                for part in [part for of, part in hedged if of == region]:
                    missing = tuple(without(missing, part.moved(-task.top, -task.left)))
                if missing:
                    commands.append(Hedge(task, missing))
                    hedged += [(region, part.moved(task.top, task.left)) for part in missing]
        return commands

    def _forgive(self, name: DeviceId, now: float) -> list[Command]:
        """A late device that spoke, and of which nothing is late any more, is back."""
        device = self._devices.get(name)
        if device is None or not device.is_late:
            return []
        if any(now > entry.late_at and not entry.cancelled for entry in device.running.values()):
            return []
        device.is_late = False
        return [Back(name)]

    # -------------------------------------------------------------------------------------------- tasks and regions

    def _lose(self, task: Task) -> list[Command]:
        """A task will not be done: what of it is missing, and no other task of its region covers, is an orphan."""
        region = self._regions[_region(task)]
        missing = self._uncovered(task, besides_late=False)
        del region.tasks[task.id]
        for piece in missing:
            region.missing = without(region.missing, piece.moved(task.top, task.left))
        if not region.missing:
            del self._regions[_region(task)]
        return [Orphan(task, missing, not region.missing)] if missing else []

    def _uncovered(self, task: Task, *, besides_late: bool) -> tuple[Rectangle, ...]:
        """What is missing of a task that no other covers; those of late devices do not count, if asked so."""
        region = self._regions[_region(task)]
        missing = within(region.missing, task.area)
        for other in region.tasks.values():
            if other.id != task.id and not (besides_late and self._is_late(other.device)):
                missing = without(missing, other.area)
        return tuple(piece.moved(-task.top, -task.left) for piece in missing)

    def _is_late(self, name: DeviceId) -> bool:
        return name not in self._devices or self._devices[name].is_late

    def _withdraw(self, tasks: list[Task], now: float) -> list[Command]:
        """Nobody wants them any more: out of the lines, or cancelled on the devices."""
        commands: list[Command] = []
        for task in tasks:
            device = self._devices[task.device]
            entry = device.running.get(task.id)
            if entry is not None:
                entry.cancelled = True
                commands.append(Cancel(task))
            else:
                device.waiting = [other for other in device.waiting if other[2].id != task.id]
                heapq.heapify(device.waiting)
        for name in dict.fromkeys(task.device for task in tasks):  # what stood behind them may fit
            commands += self._start(self._devices[name], now)
        return commands

    def _abandon(self, regions: tuple[TaskId, ...], now: float) -> list[Command]:
        gone = [region for id in regions if (region := self._regions.pop(id, None)) is not None]
        return self._withdraw([task for region in gone for task in region.tasks.values()], now)

    # -------------------------------------------------------------------------------------------- one device

    def _running(self, name: DeviceId) -> dict[TaskId, _Running]:
        return self._devices[name].running if name in self._devices else {}

    def _bury(self, name: DeviceId, id: TaskId, unsent: tuple[OperandId, ...], now: float) -> list[Command]:
        """A cancelled task is off its device; what of its operands did not get there is not held."""
        if id not in self._running(name):
            return []
        device = self._devices[name]
        free = self._take_off(device, id, now)
        device.past.append(id)
        needed = tuple(operand for operand in unsent if self.needs(name, operand))
        useless = tuple(operand for operand in unsent if operand not in needed and operand not in free)
        device.shelf.discard(useless)
        commands: list[Command] = [Resend(name, needed)] if needed else []
        if free or useless:
            commands.append(Forget(name, free + useless))
        return commands + self._start(device, now)

    def _end(self, name: DeviceId, id: TaskId, now: float) -> list[Command]:
        device = self._devices[name]
        free = self._take_off(device, id, now)
        forget: list[Command] = [Forget(name, free)] if free else []
        return forget + self._start(device, now)

    def _take_off(self, device: _Device, id: TaskId, now: float) -> tuple[OperandId, ...]:
        """A task leaves its device: with it goes what only it kept there."""
        entry = device.running.pop(id)
        device.busy_until = min(device.busy_until, now + sum(other.expected_s for other in device.running.values()))
        return device.shelf.unplace(entry.task)

    def _start(self, device: _Device, now: float) -> list[Command]:
        """Start what is next in line, as long as there is a turn and room for it."""
        commands: list[Command] = []
        while device.waiting and len(device.running) < IN_FLIGHT:
            task = device.waiting[0][2]
            missing = device.shelf.missing(task)
            dropped = device.shelf.place(task)
            if dropped is None and not device.running:  # it waits for room that only others can free
                for task in device.line()[1:]:
                    missing = device.shelf.missing(task)
                    dropped = device.shelf.place(task)
                    if dropped is not None:
                        break
            if dropped is None:
                break
            if dropped:
                commands.append(Forget(task.device, dropped))
            device.take(task)
            down_bytes = sum(operand.wire_bytes for operand in missing)
            expected_s = device.pace.seconds(down_bytes, task.flops * task.effort, task.up_bytes)
            for other in device.running.values():
                if other.task.priority > task.priority:  # it has to wait for this one
                    other.late_at, other.deadline = other.late_at + expected_s, other.deadline + expected_s
            device.busy_until = max(device.busy_until, now) + expected_s
            device.running[task.id] = _Running(
                task=task,
                owed=[task.whole],
                expected_s=expected_s,
                started=now,
                late_at=_after(device.busy_until, expected_s, LATE_S, LATE_TIMES),
                deadline=_after(device.busy_until, expected_s, DEADLINE_S, DEADLINE_TIMES),
            )
            commands.append(Start(task, tuple(operand.id for operand in missing)))
        return commands

    # -------------------------------------------------------------------------------------------- invariants

    def check(self) -> None:
        """A violation is our own bug."""
        live = dict(self._live())
        assert live == {task.id: task for region in self._regions.values() for task in region.tasks.values()}
        for region in self._regions.values():
            assert region.missing, "a region with nothing missing is finished"
            rest = region.missing
            for task in region.tasks.values():
                assert within(region.missing, task.area), "a task that can bring nothing is cancelled"
                rest = without(rest, task.area)
            assert not rest, "someone has what is missing"
        for device in self._devices.values():
            device.shelf.check(entry.task for entry in device.running.values())
            assert all(entry.owed for entry in device.running.values()), "a task with nothing owed is over"
            assert len(device.running) <= IN_FLIGHT
            fits = [task for task in device.line() if device.shelf.has_room_for(task)]
            assert device.running or not fits, "a device with work waiting that fits has work"

    def _live(self) -> Iterator[tuple[TaskId, Task]]:
        for device in self._devices.values():
            yield from ((entry.task.id, entry.task) for entry in device.running.values() if not entry.cancelled)
            yield from ((task.id, task) for task in device.line())


def _region(task: Task) -> TaskId:
    return task.id if task.region is None else task.region


def _after(moment: float, expected_s: float, slack_s: float, times: float) -> float:
    return moment + slack_s + times * expected_s
