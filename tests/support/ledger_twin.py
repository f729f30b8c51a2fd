"""A model of devices and regions that replays the ledger's commands.

It asserts the laws of the ledger on the way, and knows nothing about how the ledger decides.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from cleave.core.schedule.device_queue import IN_FLIGHT
from cleave.core.schedule.lateness import OVERDUE, STALLED
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import (
    Accept,
    Back,
    Cancel,
    Command,
    DeviceId,
    Forget,
    Hedge,
    Late,
    Operand,
    OperandId,
    Orphan,
    Overdue,
    Refuse,
    Resend,
    Stalled,
    Start,
    Task,
    TaskId,
)

LAST = DeviceId("zed")
"""Joins at the end, and can do any task."""
OPERANDS = [
    Operand(id=OperandId(i), bytes=size, wire_bytes=size) for i, size in enumerate([1, 2, 3, 5, 8, 13, 21, 34], 100)
]
MISSING, TAKEN, ORPHANED = 0, 1, 2
NO_GROUP = -1
"""Group number given to hedges, which belong to the group of their region regardless."""

Cells = NDArray[np.int64]


def span(part: Rectangle) -> tuple[slice, slice]:
    return slice(part.top, part.bottom), slice(part.left, part.right)


class Stay:
    """One connection of a device, from its join to its departure."""

    def __init__(self, memory_bytes: int) -> None:
        self.memory_bytes = memory_bytes
        self.held: dict[OperandId, int] = {}
        self.lacking: set[OperandId] = set()
        """Operands that were not sent completely and are yet to be resent or dropped."""
        self.waiting: list[Task] = []
        self.running: dict[TaskId, Task] = {}
        self.ghosts: dict[TaskId, Task] = {}
        """Cancelled tasks whose cancellation is not sent."""
        self.owed: dict[TaskId, NDArray[np.bool_]] = {}
        self.sent_with: dict[TaskId, tuple[OperandId, ...]] = {}
        self.past: set[TaskId] = set()
        """Cancelled tasks whose cancellation is sent."""
        self.is_late = False

    @property
    def placed(self) -> list[Task]:
        return [*self.running.values(), *self.ghosts.values()]

    @property
    def live(self) -> list[Task]:
        return [*self.running.values(), *self.waiting]

    @property
    def needed(self) -> set[OperandId]:
        return {operand.id for task in self.placed for operand in task.operands}

    @property
    def live_needs(self) -> set[OperandId]:
        return {operand.id for task in self.running.values() for operand in task.operands}

    @property
    def used_bytes(self) -> int:
        return sum(self.held.values()) + sum(task.result_bytes for task in self.placed)

    def can_ever_fit(self, task: Task) -> bool:
        return sum(operand.bytes for operand in task.operands) + task.result_bytes <= self.memory_bytes

    def could_start(self) -> bool:
        """Whether the most urgent waiting task fits next to pinned operands."""
        if not self.waiting or len(self.placed) >= IN_FLIGHT:
            return False
        together = [*self.placed, min(self.waiting, key=urgency)]
        pinned = {operand.id: operand.bytes for task in together for operand in task.operands}
        return sum(pinned.values()) + sum(task.result_bytes for task in together) <= self.memory_bytes

    def drop(self, task: Task) -> None:
        for tasks in (self.running, self.ghosts):
            tasks.pop(task.id, None)
        del self.owed[task.id], self.sent_with[task.id]


def urgency(task: Task) -> tuple[int, TaskId]:
    """Sort key for the order in which tasks should start; ids are assigned in order of submission."""
    return task.priority, task.id


class Twin:
    """State of each device, and of each element of each region."""

    def __init__(self) -> None:
        self.stays: dict[DeviceId, Stay] = {}
        self.regions: dict[TaskId, Cells] = {}
        """Unfinished regions."""
        self.started: set[TaskId] = set()
        self.useless: dict[TaskId, Task] = {}
        """Running tasks that can contribute nothing more; each must be cancelled by the same event."""
        self.orphaned: list[tuple[TaskId, Rectangle]] = []
        self.hedged: list[tuple[TaskId, Rectangle]] = []
        self.dead: set[OperandId] = set()
        """Released operands that no task has used since."""

    # -------------------------------------------------------------------------------------------- events

    def leave(self, name: DeviceId) -> None:
        self.stays.pop(name, None)

    def submit(self, task: Task) -> None:
        self.dead -= {operand.id for operand in task.operands}
        if task.region is None:
            self.regions[task.id] = np.full((task.rows, task.cols), MISSING, dtype=np.int64)
        elif not self.is_wanted(task):
            return
        stay = self.stays.get(task.device)
        if stay is not None and stay.can_ever_fit(task):
            stay.waiting.append(task)

    def cancel_sent(self, name: DeviceId, id: TaskId, unsent: Iterable[OperandId]) -> None:
        stay = self.stays.get(name)
        if stay is None or id not in stay.ghosts:
            return
        stay.drop(stay.ghosts[id])
        stay.past.add(id)
        for operand in unsent:
            del stay.held[operand]
            stay.lacking.add(operand)

    def abandon(self, id: TaskId) -> None:
        if self.regions.pop(id, None) is not None:
            self.withdraw_useless()

    def fail(self, task: Task) -> None:
        self.useless[task.id] = task

    # -------------------------------------------------------------------------------------------- commands

    def replay(self, command: Command) -> None:
        match command:
            case Start(task, missing):
                self._start(task, missing)
            case Cancel(task):
                assert self.useless.pop(task.id) == task, "a task that can still contribute is not cancelled"
                stay = self.stays[task.device]
                stay.ghosts[task.id] = stay.running.pop(task.id)
            case Resend(device, operands):
                self._resend(self.stays[device], operands)
            case Forget(device, operands):
                self._forget(self.stays[device], operands)
            case Accept(task, part, fresh, finished):
                self._accept(task, part, fresh, finished)
            case Orphan(task, missing, finished):
                self._orphan(task, missing, finished)
            case Hedge(task, missing):
                assert missing
                assert self.stays[task.device].is_late
                assert task.id in self.stays[task.device].running
                self.hedged += [(task.region_id, part.moved(task.top, task.left)) for part in missing]
            case Late(device):
                assert not self.stays[device].is_late
                assert self.stays[device].running
                self.stays[device].is_late = True
            case Back(device):
                assert self.stays[device].is_late
                self.stays[device].is_late = False
            case Stalled(task, waited_s, expected_s):
                assert task.is_bound
                assert self.stays[task.device].is_late
                assert task.id in self.stays[task.device].running
                assert waited_s > STALLED.seconds(expected_s)
                assert not all(stay.is_late for stay in self.stays.values()), "someone else could do it"
            case Overdue(device, task, waited_s, expected_s):
                assert task in self.stays[device].placed, "cancelled ones too: the cancellation must go out"
                assert waited_s > OVERDUE.seconds(expected_s)
            case Refuse():
                pass
        for stay in self.stays.values():
            assert stay.used_bytes <= stay.memory_bytes, "no memory limit is exceeded, cancelled tasks included"

    def settle(self) -> None:
        """Assert what holds once all commands of an event are done."""
        assert not self.useless, "a task that can contribute nothing is cancelled at once"
        live = [task for stay in self.stays.values() for task in stay.live]
        for id, cells in self.regions.items():
            covered = np.zeros_like(cells)
            healthy = np.zeros_like(cells)
            for task in live:
                if task.region_id == id:
                    covered[span(task.area)] += 1
                    healthy[span(task.area)] += not self.stays[task.device].is_late
            assert (covered[cells == MISSING] > 0).all(), "every missing element is covered by some task"
            for region, part in self.orphaned:
                assert region != id or not covered[span(part)].any(), "no task covers orphaned elements"
            for region, part in self.hedged:
                if region == id:
                    assert (cells[span(part)] == MISSING).all()
                    assert not healthy[span(part)].any(), "work of healthy devices is not hedged"
        for stay in self.stays.values():
            assert not stay.lacking, "unsent operands are resent or dropped"
        self.orphaned.clear()
        self.hedged.clear()

    def _start(self, task: Task, missing: tuple[OperandId, ...]) -> None:
        stay = self.stays[task.device]
        assert task.id not in self.started, "no task runs twice"
        self.started.add(task.id)
        assert task == min(stay.waiting, key=urgency), "the most urgent task starts first"
        stay.waiting.remove(task)
        stay.running[task.id] = task
        assert len(stay.placed) <= IN_FLIGHT
        lacking = [operand for operand in task.operands if operand.id not in stay.held]
        assert [operand.id for operand in lacking] == list(missing), "only operands the device lacks are sent"
        stay.held.update({operand.id: operand.bytes for operand in lacking})
        stay.owed[task.id] = np.ones((task.rows, task.cols), dtype=np.bool_)
        stay.sent_with[task.id] = missing

    def _resend(self, stay: Stay, operands: tuple[OperandId, ...]) -> None:
        assert len(set(operands)) == len(operands) > 0
        assert stay.live_needs.issuperset(operands), "only operands that a task needs are resent"
        for operand in operands:
            stay.lacking.remove(operand)
            stay.held[operand] = next(known.bytes for known in OPERANDS if known.id == operand)

    def _forget(self, stay: Stay, operands: tuple[OperandId, ...]) -> None:
        assert len(set(operands)) == len(operands) > 0
        assert stay.live_needs.isdisjoint(operands), "operands of running tasks are not dropped"
        for operand in operands:
            if operand in stay.lacking:
                stay.lacking.remove(operand)
            else:
                del stay.held[operand]

    def _accept(self, task: Task, part: Rectangle, fresh: tuple[Rectangle, ...], finished: bool) -> None:
        stay, id = self.stays[task.device], task.region_id
        assert task.id in stay.running, "a result of a cancelled task is not accepted"
        cells = self.regions[id]
        wanted = np.zeros_like(cells)
        wanted[span(part.moved(task.top, task.left))] = 1
        wanted[cells != MISSING] = 0
        for piece in fresh:
            at = span(piece.moved(task.top, task.left))
            assert cells[at].size == piece.area > 0
            assert (wanted[at] == 1).all(), "each element that arrived is accepted once, and no other"
            wanted[at] = 0
            cells[at] = TAKEN
        assert not wanted.any(), "all new elements are accepted"
        self.returned(task, part)
        assert finished == (cells != MISSING).all()
        if finished:
            del self.regions[id]
        self.withdraw_useless()

    def _orphan(self, task: Task, missing: tuple[Rectangle, ...], finished: bool) -> None:
        cells = self.regions[task.region_id]
        assert missing
        for part in missing:
            at = span(part.moved(task.top, task.left))
            assert 0 <= part.top < part.bottom <= task.rows
            assert 0 <= part.left < part.right <= task.cols
            assert (cells[at] == MISSING).all(), "only missing elements are orphaned"
            cells[at] = ORPHANED
            self.orphaned.append((task.region_id, part.moved(task.top, task.left)))
        stay = self.stays.get(task.device)
        if stay is not None and task in stay.waiting:  # a waiting task that moves
            stay.waiting.remove(task)
        assert finished == (cells != MISSING).all()
        if finished:
            del self.regions[task.region_id]

    # -------------------------------------------------------------------------------------------- bookkeeping

    def returned(self, task: Task, part: Rectangle) -> None:
        stay = self.stays[task.device]
        stay.owed[task.id][span(part)] = False
        if not stay.owed[task.id].any():
            stay.drop(task)

    def is_wanted(self, task: Task) -> bool:
        cells = self.regions.get(task.region_id)
        return cells is not None and bool((cells[span(task.area)] == MISSING).any())

    def withdraw_useless(self) -> None:
        for stay in self.stays.values():
            stay.waiting = [task for task in stay.waiting if self.is_wanted(task)]
            self.useless.update({id: task for id, task in stay.running.items() if not self.is_wanted(task)})

    def owes(self, name: DeviceId, task: Task, part: Rectangle) -> bool:
        inside = 0 <= part.top < part.bottom <= task.rows and 0 <= part.left < part.right <= task.cols
        owed = self.stays[name].owed.get(task.id) if name in self.stays else None
        return inside and owed is not None and bool(owed[span(part)].all())

    def running(self) -> list[Task]:
        return [task for stay in self.stays.values() for task in stay.running.values()]
