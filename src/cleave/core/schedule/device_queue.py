"""The waiting and running tasks of one device, and when each should be done.

A task starts when it is next (lower priority number first, then in order of submission), when few others are
unfinished, and when its operands and result fit into the device's memory. The device's measured pace predicts when it
should be done. After that there are three limits (`lateness.py`): late, stalled, overdue. A cancelled task keeps its
slot and its memory until the cancellation is sent, because its operands may still be on their way; if it cannot be
sent, the task becomes overdue like any other. All times are in ledger time (see `ledger.py`).
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Collection
from dataclasses import dataclass

from cleave.core.cost.rates import Pace
from cleave.core.plan.resident.timeline import IN_FLIGHT
from cleave.core.schedule.device_memory import DeviceMemory
from cleave.core.schedule.lateness import LATE, LATE_S, OVERDUE, STALLED, Slack
from cleave.core.schedule.rectangles import Rectangle, total, within, without
from cleave.core.schedule.tasks import Command, DeviceId, Forget, OperandId, Refuse, Start, Task, TaskId

_MAX_PIECES = 64  # pieces of one task that a device may owe; honest devices return bands
_MAX_CANCELLED = 256  # cancelled tasks remembered, as their results may still be on their way


@dataclass(slots=True)
class Running:
    """A task that the device was told to run."""

    task: Task
    owed: list[Rectangle]
    """Parts that the device has not returned, needed or not."""
    expected_s: float
    started: float
    due: float
    """When it should be done, behind the tasks that were running before it."""
    hedged_at: float | None = None
    stalled_at: float | None = None
    """When it was last reported as stalled."""
    is_cancelled: bool = False

    @property
    def late_at(self) -> float:
        return self.due + LATE.seconds(self.expected_s)

    def is_late(self, now: float) -> bool:
        return not self.is_cancelled and now > self.late_at

    def limit(self, slack: Slack, moved_at: float) -> float:
        """When the slack is used up, if nothing more arrives; `moved_at` is when bytes last moved."""
        returned = 1 - total(self.owed) / self.task.whole.area
        return slack.limit(self.due, self.expected_s, returned=returned, moved_at=moved_at)

    def stalls_at(self, moved_at: float) -> float:
        """When to report the task as stalled, or report it again; only tasks bound to their device stall."""
        if not self.task.is_bound or self.is_cancelled:
            return math.inf
        again = -math.inf if self.stalled_at is None else self.stalled_at + LATE_S + self.expected_s
        return max(again, self.limit(STALLED, moved_at))

    def delay(self, seconds: float) -> None:
        """Shift the schedule: a more urgent task goes first."""
        self.due += seconds

    def cancel(self, now: float) -> None:
        """Wait only until the cancellation is sent."""
        self.is_cancelled = True
        self.due = max(self.due, now)

    @property
    def hedge_at(self) -> float:
        """When to hedge the task, or hedge it again, if its device is late; never if it is bound."""
        if self.task.is_bound:
            return math.inf
        return -math.inf if self.hedged_at is None else self.hedged_at + LATE_S + self.expected_s


class DeviceQueue:
    def __init__(self, device: DeviceId, memory: DeviceMemory, pace: Pace) -> None:
        self.device, self.memory, self.pace = device, memory, pace
        self.running: dict[TaskId, Running] = {}
        self.busy_until = -math.inf
        """When the running tasks should be done."""
        self.moved_at = -math.inf
        """When bytes last moved to or from the device."""
        self.returned_at = -math.inf
        """When the last part of a result was accepted."""
        self._waiting: list[tuple[int, int, Task]] = []
        """A heap by priority, then submission number."""
        self._cancelled: deque[TaskId] = deque(maxlen=_MAX_CANCELLED)

    # -------------------------------------------------------------------------------------------- questions

    @property
    def live(self) -> list[Running]:
        """Running tasks that are not cancelled."""
        return [entry for entry in self.running.values() if not entry.is_cancelled]

    @property
    def waiting(self) -> list[Task]:
        """Waiting tasks in the order in which they should start."""
        return [task for _, _, task in sorted(self._waiting, key=lambda entry: entry[:2])]

    @property
    def unfinished(self) -> int:
        return len(self._waiting) + len(self.live)

    @property
    def free_at(self) -> float:
        """When the running tasks should be done; minus infinity if the device is idle."""
        return self.busy_until if self.running or self._waiting else -math.inf

    def needs(self, operand: OperandId) -> bool:
        return any(operand == other.id for entry in self.live for other in entry.task.operands)

    def was_cancelled(self, id: TaskId) -> bool:
        entry = self.running.get(id)
        return id in self._cancelled if entry is None else entry.is_cancelled

    def expects(self, id: TaskId, part: Rectangle) -> Task | Refuse:
        """The running task that this rectangle is a result of; Refuse if the device does not owe it."""
        entry = self.running.get(id)
        if entry is None:
            reason = f"result of task {id}, which this device does not run"
            return Refuse(self.device, reason, is_fault=not self.was_cancelled(id))
        if total(within(entry.owed, part)) != part.area or part.area <= 0:
            return Refuse(self.device, f"{part} of task {id}, which this device does not owe", is_fault=True)
        if entry.is_cancelled:
            return Refuse(self.device, f"result of task {id}, which was cancelled", is_fault=False)
        if len(without(entry.owed, part)) > _MAX_PIECES:
            reason = f"result of task {id} in more than {_MAX_PIECES} scattered pieces"
            return Refuse(self.device, reason, is_fault=True)
        return entry.task

    def lags(self, now: float) -> bool:
        return any(entry.is_late(now) for entry in self.running.values())

    def stalled(self, now: float) -> list[Running]:
        """Bound tasks to report as stalled now."""
        return [entry for entry in self.live if now > entry.stalls_at(self.moved_at)]

    def overdue(self, now: float, *, is_alone: bool) -> Running | None:
        """A task whose deadline has passed; a cancelled one, if its cancellation could not be sent."""
        return next((entry for entry in self.running.values() if now > self._deadline(entry, is_alone=is_alone)), None)

    def _deadline(self, entry: Running, *, is_alone: bool) -> float:
        """Deadline of a task. The only device of a fleet is given more time with each part of a result."""
        deadline = entry.limit(OVERDUE, self.moved_at)
        if is_alone:
            deadline = max(deadline, self.returned_at + OVERDUE.seconds(entry.expected_s))
        return deadline

    def next_check(self, now: float, *, can_move: bool, is_alone: bool) -> float:
        """The earliest time a task may become late or overdue or, if work can move to others, stall or need a hedge.

        Never too late, but may be too early: limits are extended and tasks finish in the meantime.
        """
        soonest, lags = math.inf, False
        for entry in self.running.values():
            is_late = entry.is_late(now)
            is_settled = is_late or entry.is_cancelled
            soonest = min(soonest, self._deadline(entry, is_alone=is_alone) if is_settled else entry.late_at)
            lags |= is_late
        if lags and can_move:
            if any(not task.is_bound for _, _, task in self._waiting):
                return -math.inf
            for entry in self.live:
                soonest = min(soonest, entry.hedge_at, entry.stalls_at(self.moved_at))
        return soonest

    # -------------------------------------------------------------------------------------------- changes

    def enqueue(self, task: Task, number: int) -> None:
        heapq.heappush(self._waiting, (task.priority, number, task))

    def dequeue(self, tasks: Collection[TaskId]) -> None:
        """Remove waiting tasks."""
        if len(tasks) == 1 and self._waiting[0][2].id in tasks:
            heapq.heappop(self._waiting)
        else:
            self._waiting = [entry for entry in self._waiting if entry[2].id not in tasks]
            heapq.heapify(self._waiting)

    def start(self, now: float) -> list[Command]:
        """Start waiting tasks in order, while there are slots and memory for them."""
        commands: list[Command] = []
        while self._waiting and len(self.running) < IN_FLIGHT:
            placed = self._place(self._waiting[0][2])
            if placed is None and not self.running:  # the first one waits for memory that only later ones can free
                placed = next(filter(None, map(self._place, self.waiting[1:])), None)
            if placed is None:
                break
            start, evicted, down_bytes = placed
            if evicted:
                commands.append(Forget(self.device, evicted))
            commands.append(start)
            self.dequeue((start.task.id,))
            self._expect(start.task, down_bytes, now)
        return commands

    def finish(self, id: TaskId, now: float) -> tuple[OperandId, ...]:
        """Remove a running task; return the operands the device must drop."""
        entry = self.running.pop(id)
        if entry.is_cancelled:
            self._cancelled.append(id)
        self.busy_until = min(self.busy_until, now + sum(other.expected_s for other in self.running.values()))
        return self.memory.unplace(entry.task)

    def check(self) -> None:
        """Assert the invariants."""
        self.memory.check(entry.task for entry in self.running.values())
        assert all(entry.owed for entry in self.running.values()), "a task with nothing owed is over"
        assert len(self.running) <= IN_FLIGHT
        fits = [task for task in self.waiting if self.memory.has_room_for(task)]
        assert self.running or not fits, "a device with waiting tasks that fit runs one"

    def _place(self, task: Task) -> tuple[Start, tuple[OperandId, ...], int] | None:
        """Place a task in memory; return it with evicted operands and bytes to send, or None if it does not fit."""
        missing = self.memory.missing(task)
        evicted = self.memory.place(task)
        if evicted is None:
            return None
        start = Start(task, tuple(operand.id for operand in missing))
        return start, evicted, sum(operand.wire_bytes for operand in missing)

    def _expect(self, task: Task, down_bytes: int, now: float) -> None:
        """Predict when a task that starts now will be done, behind those already running."""
        expected_s = self.pace.seconds(down_bytes, task.flops * task.effort, task.up_bytes)
        for other in self.running.values():
            if other.task.priority > task.priority:
                other.delay(expected_s)
        self.busy_until = max(self.busy_until, now) + expected_s
        self.running[task.id] = Running(
            task=task,
            owed=[task.whole],
            expected_s=expected_s,
            started=now,
            due=self.busy_until,
        )
