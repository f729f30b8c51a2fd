"""The heart of a server: events in, actions out. Knows neither sockets nor clocks nor numbers.

The engine owns the ledger (which device runs which task, and when), the roster (connected devices and their speed) and
the runs (what the tasks are for). It handles one event at a time to completion: the ledger commands and run requests
that follow from it go through one queue, so nothing ever re-enters. A driver feeds it events with the time and carries
out its actions: `driver.py` over an event loop and sockets, a simulator over a virtual clock.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from typing import ParamSpec

from cleave import events
from cleave.core.schedule.ledger import Ledger
from cleave.core.schedule.members import Member, Roster
from cleave.core.schedule.rectangles import Rectangle, common
from cleave.core.schedule.tasks import (
    Accept,
    Back,
    Command,
    DeviceAdded,
    DeviceId,
    DeviceMoved,
    DeviceRemoved,
    Event,
    Hedge,
    Late,
    Orphan,
    Overdue,
    PaceMeasured,
    Refuse,
    ResultArrived,
    Stalled,
    Task,
    TaskFailed,
    TaskId,
)
from cleave.core.verify.vouching import Vouching
from cleave.errors import CleaveError, ProtocolError, WrongResult
from cleave.server.activity import Activity
from cleave.server.contract import (
    Action,
    Arrived,
    AuditEnded,
    Blame,
    Check,
    Checked,
    Closed,
    Disconnect,
    End,
    EngineEvent,
    Kept,
    Park,
    Planned,
    Prompted,
    Request,
    Requests,
    Resume,
    Run,
    RunSubmitted,
    Stall,
    Tell,
    Wait,
    WaitedInVain,
    run_of,
)

_MOST_REFUSED = 16
"""Unsolicited results in a row beyond which a device is disconnected."""

_Arguments = ParamSpec("_Arguments")
log = logging.getLogger(__name__)


class Engine:
    def __init__(self) -> None:
        self.ledger = Ledger()
        self.roster = Roster(self.ledger.late)
        self.vouching = Vouching()
        self.activity = Activity()
        self._runs: dict[Run, None] = {}
        """Runs in progress; a dict keeps their order."""
        self._exclusive: Run | None = None
        self._line: deque[Run] = deque()
        """Exclusive runs waiting for their turn."""
        self._parked: dict[Run, None] = {}
        self._checking: dict[DeviceId, dict[TaskId, list[Rectangle]]] = {}
        """Parts of results being checked, per device and task."""
        self._closed: CleaveError | None = None
        self.runs_so_far = 0
        self._queue: deque[EngineEvent | Request] = deque()
        self._actions: list[Action] = []
        self._now = 0.0

    @property
    def is_waiting(self) -> bool:
        """Whether some run waits for devices."""
        return bool(self._parked)

    @property
    def is_busy(self) -> bool:
        """Whether some run is in progress."""
        return bool(self._runs)

    def handle(self, event: EngineEvent, now: float) -> list[Action]:
        """Handle one event and everything that follows from it; return actions for the driver."""
        assert not self._queue, "the engine is not re-entered"
        self._now, self._actions = now, []
        self._queue.append(event)
        try:
            while self._queue:
                self._take(self._queue.popleft())
        finally:
            self._queue.clear()
        return self._actions

    # -------------------------------------------------------------------------------------------- one queue

    def _take(self, item: EngineEvent | Request) -> None:
        match item:
            case RunSubmitted(run):
                self._submit(run)
            case Prompted(run, request):
                self._ask(run, run.prompted, request, self._now)
            case Arrived():
                self._arrive(item)
            case Checked():
                self._checked(item)
            case Kept(run, kept, WrongResult() as fault):
                if run in self._runs:
                    self._ask(run, run.spoiled, kept, str(fault), self._now)
            case Kept(run, kept, fault):
                if self._goes_on(run, fault, "a result could not be stored"):
                    self._ask(run, run.kept, kept, self._now)
            case AuditEnded(run, case, reason, fault):
                if self._goes_on(run, fault, "work could not be audited"):
                    self._ask(run, run.audited, case, reason, self._now)
            case Planned(run, plan):
                if run in self._runs:  # else it failed during planning
                    self._ask(run, run.planned, plan, self._now)
            case WaitedInVain(error):
                for run in list(self._parked):
                    self._end_with(run, error)
            case Closed(error):
                self._closed = error
                for run in [*self._runs, *self._line]:
                    self._end_with(run, error)
            case Park(run, reason):
                if run in self._runs:
                    self._parked[run] = None
                    self._actions.append(Wait(reason))
            case End(run):
                self._end(run)
            case Blame(device, reason, is_final):
                self._blame(device, reason, is_final=is_final)
            case Stall(device, reason):
                self._count_stall(device, reason)
            case DeviceAdded():
                self._decide(item)
                self._resume()
            case DeviceRemoved(device):
                self._leave(device)
            case TaskFailed(device):
                self._decide(item, blamed=device)
            case _:
                if isinstance(item, Event):
                    self._decide(item)
                else:
                    self._actions.append(item)

    def _ask(
        self, run: Run, method: Callable[_Arguments, Requests], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> None:
        """Queue a run's requests; a bug of ours in it must not leave its caller waiting."""
        try:
            self._queue.extend(method(*args, **kwargs))
        except Exception as fault:
            log.exception("a run failed")
            self._end_with(run, CleaveError(f"a run failed: {fault!r}; please report this"))

    def _goes_on(self, run: Run, fault: Exception | None, what: str) -> bool:
        """Whether a run is still in progress; end it here if its job failed through a bug of ours."""
        if run in self._runs and fault is not None:
            log.error("%s", what, exc_info=fault)
            self._end_with(run, CleaveError(f"{what}: {fault!r}; please report this"))
        return run in self._runs

    # -------------------------------------------------------------------------------------------- runs

    def _submit(self, run: Run) -> None:
        self.runs_so_far += 1
        if self._closed is not None:
            self._queue.extend(run.fail(self._closed))
        elif run.is_exclusive and self._exclusive is not None:
            self._line.append(run)
        else:
            self._begin(run)

    def _begin(self, run: Run) -> None:
        self._runs[run] = None
        if run.is_exclusive:
            self._exclusive = run
        self._ask(run, run.begin, self._now)

    def _end(self, run: Run) -> None:
        self._runs.pop(run, None)
        self._parked.pop(run, None)
        if run is self._exclusive:
            self._exclusive = None
            if self._line:
                self._begin(self._line.popleft())

    def _end_with(self, run: Run, error: CleaveError) -> None:
        if run in self._line:
            self._line.remove(run)
        self._queue.extend(run.fail(error))
        self._end(run)

    def _resume(self) -> None:
        """Resume parked runs: there may be a device for them."""
        self._actions.append(Resume())
        parked, self._parked = self._parked, {}
        for run in parked:
            self._ask(run, run.resume, self._now)

    # -------------------------------------------------------------------------------------------- the ledger

    def _decide(self, event: Event, payload: object = None, blamed: DeviceId | None = None) -> None:
        """Let the ledger decide on an event; pass its commands to the runs and the driver."""
        orphans: dict[Run, list[Orphan]] = {}
        hedges: dict[Run, list[Hedge]] = {}
        for command in self.ledger.handle(event, self._now):
            match command:
                case Accept(task):
                    self._ask(run_of(task), run_of(task).accepted, command, payload, self._now)
                case Orphan(task):
                    orphans.setdefault(run_of(task), []).append(command)
                case Hedge(task):
                    hedges.setdefault(run_of(task), []).append(command)
                case _:
                    self._obey(command)
        for run, lost in orphans.items():
            if run in self._runs:
                self._ask(run, run.orphaned, lost, blamed, self._now)
        for run, late in hedges.items():
            if run in self._runs:
                self._ask(run, run.hedged, late, self._now)

    def _obey(self, command: Command) -> None:
        match command:
            case Refuse(device, reason, is_fault):
                self._refuse(device, reason, is_fault=is_fault)
            case Late(device):
                self._actions.append(Tell(events.DeviceLate(device=device, is_only=len(self.roster.members) == 1)))
                self.roster.lateness_changed(device)
                if self.roster.members[device].became_late():
                    self._count_stall(device, "it was late again before it had finished anything")
                if self._exclusive is not None:
                    self._ask(self._exclusive, self._exclusive.late, device, self._now)
            case Back(device):
                self.roster.lateness_changed(device)
                self._resume()
            case Stalled(task, waited_s, expected_s):
                if self._exclusive is not None:
                    reason = f"a unit took {waited_s:.1f} s instead of the predicted {expected_s:.2f} s"
                    self._ask(self._exclusive, self._exclusive.stalled, task.device, reason, self._now)
            case Overdue(device, task, waited_s, expected_s):
                member = self.roster.members[device]
                if member.key is not None and task.id not in self._checking.get(device, {}):  # else it waits for us
                    reason = f"a task took {waited_s:.1f} s instead of the predicted {expected_s:.2f} s"
                    self._end_stalled(member, reason)
            case Accept() | Orphan() | Hedge():
                raise AssertionError("handled by the caller")
            case _:
                self._actions.append(command)

    def _count_stall(self, device: DeviceId, reason: str) -> None:
        """Expect less of a device whose work others had to redo; disconnect it if it keeps stalling."""
        member = self.roster.members.get(device)
        if member is None or member.key is None:
            return
        self.roster.weaken(device)
        if member.stalled() and len(self.roster.members) > 1:
            self._end_stalled(member, f"stalled {member.stalls} times, the last: {reason}")

    def _end_stalled(self, member: Member, reason: str) -> None:
        member.was_bad = True
        self._actions.append(Disconnect(DeviceId(member.name), reason, rejoin=True))

    def _leave(self, device: DeviceId) -> None:
        self.roster.remove(device)
        self._decide(DeviceRemoved(device), blamed=device)
        self._checking.pop(device, None)
        for run in list(self._runs):
            self._ask(run, run.left, device, self._now)

    # -------------------------------------------------------------------------------------------- results

    def _arrive(self, arrived: Arrived) -> None:
        """Accept an expected result: products are checked first, units of resident layers only audited."""
        device, id, part = arrived.device, arrived.task, arrived.part
        task = self.ledger.wanted(device, id, part)
        if isinstance(task, Refuse):
            self._refuse(device, task.reason, is_fault=task.is_fault)
            return
        pending = self._checking.get(device, {}).get(id, [])
        if any(common(part, other) is not None for other in pending):
            self._refuse(device, f"{part} of task {id}, which is already being checked", is_fault=True)
            return
        expected = run_of(task).format(task)
        if arrived.format != expected:
            why = f"expected a result in {expected}, got {arrived.format}"
            self._actions.append(Disconnect(device, why, rejoin=True))
            return
        member = self.roster.members[device]
        flops = task.flops * part.area / task.whole.area
        seen = arrived.seen.bounded(self.ledger.elapsed(device, id, self._now), flops)
        self.roster.observe(device, seen, task.effort)
        self.activity.arrived(task, seen, self._now)
        if self.ledger.is_slower(device, member.pace):
            self._decide(PaceMeasured(device, member.pace))
        if task.is_bound:
            self._credit(member, task, part)
            self._decide(ResultArrived(device, id, part), arrived.payload)
            self._count(member, id)
        else:
            self._checking.setdefault(device, {}).setdefault(id, []).append(part)
            self._decide(DeviceMoved(device))  # time in our own queue must not count against it
            self._actions.append(Check(task, part, arrived.payload, is_strict=member.trust.is_suspect))

    def _checked(self, checked: Checked) -> None:
        device, task, part, fault = checked.device, checked.task, checked.part, checked.fault
        pending = self._checking.get(device, {})
        if part not in pending.get(task.id, ()):
            return  # the device has left
        pending[task.id].remove(part)
        if not pending[task.id]:
            del pending[task.id]
        member = self.roster.members[device]
        if isinstance(self.ledger.wanted(device, task.id, part), Refuse):
            return  # its task was canceled or failed meanwhile, and its operands may have changed since
        match fault:
            case None:
                self._credit(member, task, part)
                member.trust.right(part.area / task.whole.area)
                member.verified_flops += task.flops * part.area / task.whole.area
                self._decide(ResultArrived(device, task.id, part), checked.values)
                self._count(member, task.id)
            case WrongResult():
                self._blame(device, str(fault))
                self._ask(run_of(task), run_of(task).rejected, task, device, str(fault))
                self._decide(TaskFailed(device, task.id), blamed=device)
            case ProtocolError():
                self._actions.append(Disconnect(device, str(fault), rejoin=True))
            case _:  # our bug, not the device's: others would fail the same way
                log.error("a result could not be checked", exc_info=fault)
                error = CleaveError(f"a result could not be checked: {fault!r}; please report this")
                self._end_with(run_of(task), error)

    def _credit(self, member: Member, task: Task, part: Rectangle) -> None:
        member.done_flops += task.flops * part.area / task.whole.area
        member.failures = member.refused = 0
        member.has_helped = True

    def _count(self, member: Member, id: TaskId) -> None:
        if id not in self.ledger.tasks(DeviceId(member.name)):
            member.tasks += 1

    def _refuse(self, device: DeviceId, reason: str, *, is_fault: bool) -> None:
        log.info("refused a result from %s: %s", device, reason)
        member = self.roster.members.get(device)
        if is_fault and member is not None:
            member.refused += 1
            if member.refused > _MOST_REFUSED:
                why = f"{member.refused} unsolicited results in a row, the last: {reason}"
                self._actions.append(Disconnect(device, why, rejoin=True))

    def _blame(self, device: DeviceId, reason: str, *, is_final: bool = False) -> None:
        """Count a wrong result against a device, even a departed one: its trust outlives its connection."""
        log.warning("wrong result from %s: %s", device, reason)
        self._actions.append(Tell(events.ResultRefused(device=device, reason=reason)))
        is_here = device in self.roster.members
        member = self.roster.members.get(device) or self.roster.past.get(device)
        if member is not None:
            member.wrong += 1
            member.trust.wrong()
            if is_final:
                member.trust.lose()
            if member.trust.is_lost:
                if member.key is not None:
                    self.vouching.convict(member.key, device)
                if is_here:
                    member.was_bad = True
                    self._actions.append(Disconnect(device, "quarantined: its results were wrong", rejoin=False))
