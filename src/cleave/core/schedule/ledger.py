"""The scheduler's state machine, the only place that decides which device does what and when: events in, commands out.

It knows no clock, no sockets and no matrix contents. A task is one run of a program on operands, planned for one
device; it waits in the device's queue (`device_queue.py`) for a slot and for memory (`device_memory.py`), never for
other tasks: there is no barrier. An operand that a device holds is never sent again. A result arrives in rectangles,
and each element is accepted exactly once, from whichever device returns it first (`regions.py`).

Departures: the unfinished work of a device that leaves is handed back as orphans, unless another device has it too.
Stragglers: a late device gets no new work, its waiting tasks are handed back, and its running ones are hedged: given to
others too; the first result wins and the others are cancelled. Tasks bound to a device stay there; if they stall, the
submitter hears of it and may abandon them. A device that misses a deadline is to be disconnected (`lateness.py`).

Cost: an event costs time for the tasks, operands and devices it concerns, whatever the size of the fleet. Devices that
may need attention are found in heaps (`soonest.py`), the holders of an operand in an index.

Ledger time is the caller's `now` minus the server's own stalls, so that no device is blamed for them: it stops two
ticks after the last tick and resumes with the next one. While nothing is unfinished there are no ticks, and it runs on.

`check` asserts the invariants; tests call it after every event.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable
from collections.abc import Set as AbstractSet
from itertools import islice

from cleave.core.cost.rates import Pace
from cleave.core.schedule.device_memory import DeviceMemory, Holders
from cleave.core.schedule.device_queue import DeviceQueue
from cleave.core.schedule.lateness import Elapsed
from cleave.core.schedule.rectangles import Rectangle, without
from cleave.core.schedule.regions import Regions
from cleave.core.schedule.soonest import Soonest
from cleave.core.schedule.tasks import (
    Accept,
    Back,
    Cancel,
    CancelSent,
    Command,
    DeviceAdded,
    DeviceAnswered,
    DeviceId,
    DeviceMoved,
    DeviceRemoved,
    Event,
    Forget,
    GroupsAbandoned,
    Hedge,
    Late,
    OperandId,
    OperandsReleased,
    Overdue,
    PaceMeasured,
    Refuse,
    Resend,
    ResultArrived,
    Stalled,
    Task,
    TaskFailed,
    TaskId,
    TasksSubmitted,
    Tick,
)

TICK_S = 0.1
_STALL_S = 2 * TICK_S  # without a tick for this long, the server itself has stalled


class Ledger:
    def __init__(self) -> None:
        self._queues: dict[DeviceId, DeviceQueue] = {}
        self._regions = Regions()
        self._holders = Holders()
        self._late: dict[DeviceId, None] = {}
        self._checks = Soonest()
        """When each device with unfinished tasks may next be late or overdue, or need hedges."""
        self._free = Soonest()
        """When each healthy device should be free."""
        self._submitted = 0
        self._stalled_s = 0.0
        self._ticked = 0.0
        """Ledger time of the last tick."""

    # -------------------------------------------------------------------------------------------- questions

    @property
    def is_busy(self) -> bool:
        return len(self._regions) > 0

    @property
    def late(self) -> AbstractSet[DeviceId]:
        """Late devices, in the order they became late: a live, read-only view."""
        return self._late.keys()

    def __contains__(self, device: DeviceId) -> bool:
        return device in self._queues

    def is_open(self, group: Hashable) -> bool:
        """Whether some region of the group is unfinished."""
        return self._regions.is_open(group)

    def holders(self, operand: OperandId) -> Collection[DeviceId]:
        """Devices that hold an operand or are being sent it."""
        return self._holders[operand]

    def holds(self, device: DeviceId, operand: OperandId) -> bool:
        return device in self._holders[operand]

    def needs(self, device: DeviceId, operand: OperandId) -> bool:
        """Whether the device runs a task on this operand, not counting cancelled ones."""
        queue = self._queues.get(device)
        return queue is not None and queue.needs(operand)

    def used_bytes(self, device: DeviceId) -> int:
        """Memory that operands and expected results take on the device."""
        queue = self._queues.get(device)
        return 0 if queue is None else queue.memory.used_bytes

    def tasks(self, device: DeviceId) -> Collection[TaskId]:
        """Tasks the device was told to run, including cancelled ones."""
        queue = self._queues.get(device)
        return () if queue is None else queue.running.keys()

    def unfinished(self, device: DeviceId) -> int:
        """Number of tasks the device runs or has queued."""
        queue = self._queues.get(device)
        return 0 if queue is None else queue.unfinished

    def elapsed(self, device: DeviceId, task: TaskId, now: float) -> Elapsed:
        """Observed durations of a running task, to judge those that its device reports."""
        queue, time = self._queues[device], self._time(now)
        entry = queue.running[task]
        since = max(entry.started, queue.returned_at)
        return Elapsed(
            longest_s=time - min(other.started for other in queue.running.values()),
            late_s=time - since if entry.is_late(time) else 0.0,
        )

    def waited_s(self, device: DeviceId, now: float) -> float:
        """Seconds since the oldest task of the device started, without an accepted result since; 0 if it owes none."""
        queue = self._queues.get(device)
        if queue is None or not queue.live:
            return 0.0
        return self._time(now) - max(min(entry.started for entry in queue.live), queue.returned_at)

    def is_slower(self, device: DeviceId, pace: Pace) -> bool:
        """Whether a measured pace is clearly slower than the one that a device's deadlines assume."""
        queue = self._queues.get(device)
        return queue is not None and queue.pace.is_clearly_faster(pace)

    def backlog_s(self, device: DeviceId, now: float) -> float:
        """Seconds until the device should be done with the tasks it runs."""
        queue = self._queues.get(device)
        return 0.0 if queue is None else max(0.0, queue.busy_until - self._time(now))

    def least_busy(self, limit: int) -> list[DeviceId]:
        """The healthy devices that should be free soonest, in that order, at most `limit`.

        Idle devices come first, the longest idle ahead; then those whose running tasks should be done soonest.
        Cost: O(limit log limit).
        """
        return list(islice(self._free.in_order(), limit))

    def wanted(self, device: DeviceId, task: TaskId, part: Rectangle) -> Task | Refuse:
        """The running task of which the device owes this part; verifying the part is left to the caller."""
        queue = self._queues.get(device)
        if queue is None:
            return Refuse(device, f"result of task {task} from a device that is not connected", is_fault=True)
        return queue.expects(task, part)

    # -------------------------------------------------------------------------------------------- events

    def handle(self, event: Event, now: float) -> list[Command]:
        time = self._time(now)
        match event:
            case DeviceAdded(device, memory_bytes, pace):
                return self._join(device, memory_bytes, pace)
            case PaceMeasured(device, pace):
                if device in self._queues:
                    self._queues[device].pace = pace
                return []
            case DeviceRemoved(device):
                return self._leave(device)
            case DeviceAnswered(device):
                return self._recover(device, time)
            case DeviceMoved(device):
                if device in self._queues:
                    self._queues[device].moved_at = time
                return []
            case TasksSubmitted(tasks):
                return self._submit(tasks, time)
            case ResultArrived(device, task, part):
                return self._deliver(device, task, part, time)
            case TaskFailed(device, task):
                return self._fail(device, task, time)
            case CancelSent(device, task, unsent):
                return self._end_cancelled(device, task, unsent, time)
            case GroupsAbandoned(groups):
                return self._cancel(self._regions.abandon(groups), time)
            case OperandsReleased(operands):
                return self._release(operands, time)
            case Tick():
                if time < now - self._stalled_s:
                    self._stalled_s = now - time
                self._ticked = time
                return self._tick(time)

    def _time(self, now: float) -> float:
        """Ledger time."""
        time = now - self._stalled_s
        return min(time, self._ticked + _STALL_S) if self.is_busy else time

    def _join(self, device: DeviceId, memory_bytes: int, pace: Pace) -> list[Command]:
        assert device not in self._queues, "the roster gives unique names"
        queue = self._queues[device] = DeviceQueue(device, DeviceMemory(device, memory_bytes, self._holders), pace)
        self._free.put(device, queue.free_at)
        self._check_stragglers()
        return []

    def _leave(self, device: DeviceId) -> list[Command]:
        queue = self._queues.pop(device, None)
        if queue is None:
            return []
        self._late.pop(device, None)
        self._checks.discard(device)
        self._free.discard(device)
        queue.memory.clear()
        return self._give_up([*(entry.task for entry in queue.live), *queue.waiting])

    def _submit(self, tasks: tuple[Task, ...], now: float) -> list[Command]:
        if not self.is_busy:
            self._ticked = now
        hopeless: list[Task] = []
        queues: dict[DeviceId, DeviceQueue] = {}
        for task in tasks:
            if not self._regions.add(task):
                continue
            queue = self._queues.get(task.device)
            if queue is None or not queue.memory.can_ever_fit(task):
                hopeless.append(task)
                continue
            self._submitted += 1
            queue.enqueue(task, self._submitted)
            queues[task.device] = queue
        started = [command for queue in queues.values() for command in self._start(queue, now)]
        return started + self._give_up(hopeless)

    def _deliver(self, device: DeviceId, id: TaskId, part: Rectangle, now: float) -> list[Command]:
        """Accept a rectangle of a result, cancel the tasks it makes pointless, and start the next ones."""
        task = self.wanted(device, id, part)
        if isinstance(task, Refuse):
            return [task]
        queue = self._queues[device]
        entry = queue.running[id]
        entry.owed = without(entry.owed, part)
        queue.returned_at = now
        delivery = self._regions.deliver(task, part)
        commands: list[Command] = [
            Accept(task, part, delivery.fresh, delivery.finished)
            if delivery.fresh
            else Refuse(device, f"{part} of task {id}, which another device returned first", is_fault=False)
        ]
        commands += self._cancel([other for other in delivery.pointless if other.id != id or entry.owed], now)
        if not entry.owed:
            freed = queue.finish(id, now)
            if freed:
                commands.append(Forget(device, freed))
            commands += self._start(queue, now)
        return commands + self._recover(device, now)

    def _fail(self, device: DeviceId, id: TaskId, now: float) -> list[Command]:
        queue = self._queues.get(device)
        entry = queue.running.get(id) if queue is not None else None
        if entry is None or entry.is_cancelled:
            was_cancelled = queue is not None and queue.was_cancelled(id)
            return [Refuse(device, f"failure of task {id}, which this device does not run", not was_cancelled)]
        return [*self._cancel([entry.task], now), *self._give_up([entry.task])]

    def _end_cancelled(self, device: DeviceId, id: TaskId, unsent: tuple[OperandId, ...], now: float) -> list[Command]:
        """Free the slot and memory of a cancelled task; operands of it not sent completely count as not held."""
        if id not in self.tasks(device):
            return []
        queue = self._queues[device]
        freed = queue.finish(id, now)
        needed = tuple(operand for operand in unsent if queue.needs(operand))
        useless = tuple(operand for operand in unsent if operand not in needed and operand not in freed)
        queue.memory.discard(useless)
        commands: list[Command] = [Resend(device, needed)] if needed else []
        if freed or useless:
            commands.append(Forget(device, freed + useless))
        return commands + self._start(queue, now)

    def _release(self, operands: tuple[OperandId, ...], now: float) -> list[Command]:
        held: dict[DeviceId, list[OperandId]] = {}
        for operand in operands:
            for device in self._holders[operand]:
                held.setdefault(device, []).append(operand)
        commands: list[Command] = []
        for device, released in held.items():
            freed = self._queues[device].memory.release(released)
            if freed:
                commands += [Forget(device, freed), *self._start(self._queues[device], now)]
        return commands

    # -------------------------------------------------------------------------------------------- tasks

    def _start(self, queue: DeviceQueue, now: float) -> list[Command]:
        """Start the device's waiting tasks, after any change to its queue or memory."""
        commands = queue.start(now)
        self._check_later(queue, now)
        if queue.device not in self._late:
            self._free.put(queue.device, queue.free_at)
        return commands

    def _cancel(self, tasks: list[Task], now: float) -> list[Command]:
        """Remove pointless tasks from their queues, or cancel them on their devices."""
        commands: list[Command] = []
        waiting: dict[DeviceId, set[TaskId]] = {}
        for task in tasks:
            queued = waiting.setdefault(task.device, set())
            entry = self._queues[task.device].running.get(task.id)
            if entry is None:
                queued.add(task.id)
            else:
                entry.cancel(now)
                commands.append(Cancel(task))
        for device, queued in waiting.items():
            queue = self._queues[device]
            if queued:
                queue.dequeue(queued)
            commands += self._start(queue, now)  # tasks behind them may fit
        return commands

    def _give_up(self, tasks: Iterable[Task]) -> list[Command]:
        """Give up tasks that will not be done; orphan the parts no other task covers."""
        return [orphan for task in tasks if (orphan := self._regions.give_up(task)) is not None]

    # -------------------------------------------------------------------------------------------- stragglers

    @property
    def _has_healthy(self) -> bool:
        return len(self._late) < len(self._queues)

    @property
    def _is_alone(self) -> bool:
        return len(self._queues) == 1

    def _check_later(self, queue: DeviceQueue, now: float) -> None:
        next_check = queue.next_check(now, can_move=self._has_healthy, is_alone=self._is_alone)
        self._checks.put_earlier(queue.device, next_check)

    def _check_stragglers(self) -> None:
        """Check late devices at the next tick, if the fleet just got its first healthy device to take their work."""
        if len(self._queues) == len(self._late) + 1:
            for device in self._late:
                self._checks.put_earlier(device, -math.inf)

    def _tick(self, now: float) -> list[Command]:
        """Check the devices that are due: disconnect them, mark them as late; move, hedge or report their tasks."""
        commands: list[Command] = []
        due = [self._queues[device] for device in self._checks.pop_before(now)]
        lagging: list[DeviceQueue] = []
        for queue in due:
            overdue = queue.overdue(now, is_alone=self._is_alone)
            if overdue is not None:
                waited_s = now - overdue.started
                commands.append(Overdue(queue.device, overdue.task, waited_s, overdue.expected_s))
            elif queue.lags(now):
                lagging.append(queue)
                if queue.device not in self._late:
                    self._late[queue.device] = None
                    self._free.discard(queue.device)
                    commands.append(Late(queue.device))
        if self._has_healthy:
            hedged: dict[TaskId, list[Rectangle]] = {}
            for queue in lagging:
                commands += self._move_waiting(queue)
                commands += self._hedge_running(queue, hedged, now)
                commands += self._report_stalled(queue, now)
        for queue in due:
            self._check_later(queue, now)
        return commands

    def _move_waiting(self, queue: DeviceQueue) -> list[Command]:
        """Hand back a late device's waiting tasks that could run elsewhere."""
        movable = [task for task in queue.waiting if not task.is_bound]
        queue.dequeue({task.id for task in movable})
        return self._give_up(movable)

    def _hedge_running(self, queue: DeviceQueue, hedged: dict[TaskId, list[Rectangle]], now: float) -> list[Command]:
        """Hedge what a late device runs and no healthy device has, except what this tick already `hedged`."""
        commands: list[Command] = []
        for entry in queue.live:
            if now <= entry.hedge_at:
                continue
            entry.hedged_at = now
            task = entry.task
            missing = self._regions.uncovered(task, ignoring=self._late)
            done = hedged.setdefault(task.region_id, [])
            for part in done:
                missing = tuple(without(missing, part.moved(-task.top, -task.left)))
            if missing:
                commands.append(Hedge(task, missing))
                done += [part.moved(task.top, task.left) for part in missing]
        return commands

    def _report_stalled(self, queue: DeviceQueue, now: float) -> list[Command]:
        """Report a device that holds up what only it can do; again after a while, if nobody acts on it."""
        stalled = queue.stalled(now)
        for entry in stalled:
            entry.stalled_at = now
        return [Stalled(entry.task, now - entry.started, entry.expected_s) for entry in stalled[:1]]

    def _recover(self, device: DeviceId, now: float) -> list[Command]:
        """Mark a late device as healthy once it is heard from and none of its tasks is late."""
        if device not in self._late or self._queues[device].lags(now):
            return []
        del self._late[device]
        self._free.put(device, self._queues[device].free_at)
        self._check_stragglers()
        return [Back(device)]

    # -------------------------------------------------------------------------------------------- invariants

    def check(self) -> None:
        """Assert the invariants; a violation is our bug."""
        live: dict[TaskId, Task] = {}
        holders: dict[OperandId, set[DeviceId]] = {}
        for device, queue in self._queues.items():
            queue.check()
            live |= {entry.task.id: entry.task for entry in queue.live}
            live |= {task.id: task for task in queue.waiting}
            for operand in queue.memory:
                holders.setdefault(operand, set()).add(device)
        self._regions.check(live)
        assert holders == {operand: set(self._holders[operand]) for operand in self._holders}
        assert self._late.keys() <= self._queues.keys()
        now = self._ticked
        for device, queue in self._queues.items():
            next_check = queue.next_check(now, can_move=self._has_healthy, is_alone=self._is_alone)
            assert self._checks.moment(device) <= max(next_check, now), "no device is forgotten"
            assert self._free.moment(device) == (math.inf if device in self._late else queue.free_at)
