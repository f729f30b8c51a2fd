"""A batch through resident layers, from its caller's point of view: outputs, then gradients, whatever happens between.

Each attempt follows one plan (`attempt.py`). If the remaining devices cannot continue, or an audit found one wrong,
another attempt begins with another plan; if there is none, the pass waits for devices. Gradients the caller already has
cannot be recomputed: from then on the pass waits instead of beginning again. Knows no numbers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import cast

from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Gradients
from cleave.core.model.decoder import Decoder
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.core.schedule.pipeline import Course
from cleave.core.schedule.tasks import Accept, DeviceId, Hedge, Orphan, Task
from cleave.errors import CleaveError, InfeasibleError, LeaseLost
from cleave.protocol import messages
from cleave.protocol.numbers import Matrix
from cleave.server.contract import (
    End,
    EngineEvent,
    MakePlan,
    Park,
    Prompted,
    Reject,
    Requests,
    Resolve,
    RunSubmitted,
    Stall,
)
from cleave.server.fleet_view import FleetView
from cleave.server.operands import Operands, Tensor
from cleave.server.resident.activations import Activations, Batched
from cleave.server.resident.attempt import Attempt
from cleave.server.resident.audit_case import AuditCase
from cleave.server.resident.audits import Audits
from cleave.server.resident.pass_lease import PassLease
from cleave.server.resident.results import GradientPart, ResidentResults, UnitResult
from cleave.server.resident.tasks import HoldWork, ResidentTasks, ResidentWork

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _NewWeights:
    """An updated parameter, whose new numbers the devices that hold it need next."""

    parameter: int
    tensor: Tensor


class ResidentRun:
    def __init__(
        self,
        decoder: Decoder,
        batch: Batched,
        plan: ResidentPlan | None,
        results: ResidentResults,
        *,
        format: WireFormat,
        gradient_format: WireFormat,
        operands: Operands,
        ids: Iterator[int],
        fleet: FleetView,
        audits: Audits,
        post: Callable[[EngineEvent], None],
        lease: PassLease | None = None,
        dy: Matrix | None = None,
        is_beside: bool = False,
    ) -> None:
        """`plan` is the one chosen for the batch; without one, the run requests it. `post` reaches the engine.

        With a lease, `plan` is the one it was made for, and the run ends with LeaseLost where others begin again. With
        `dy`, the gradient of the output is known from the start, and no output is wanted. `is_beside` lets other passes
        run meanwhile, on other devices.
        """
        self._lease, self.is_exclusive = lease, not is_beside
        self.decoder, self.batch, self.results = decoder, batch, results
        self.outputs: Future[Matrix] = Future()
        self.returned: Future[Gradients] = Future()
        self.unable: set[DeviceId] = set()
        """Devices that failed a unit of this pass, or stalled."""
        self._stalled: set[DeviceId] = set()
        """Unable devices that merely stalled: asked again if there is nobody else."""
        self.barred: set[DeviceId] = set()
        """Devices whose work in this pass was found wrong."""
        self._spoilers: dict[DeviceId, str] = {}
        """Devices that returned implausible numbers, which made the pass begin again under audits of everything."""
        self._format: WireFormat = format
        self._gradient_format: WireFormat = gradient_format
        self._operands, self._ids, self._fleet, self._audits, self._post = operands, ids, fleet, audits, post
        self._plan, self._dy = plan, dy
        self._course: Course = "forward"
        self._attempt: Attempt | None = None
        self._last: Attempt | None = None
        """The last attempt that ended: its devices hold the weights, and its results may still be in the pool."""
        self._activations: Activations | None = None
        self._next_plan: ResidentPlan | None = None
        """Plan to follow once the previous attempt's results are stored."""
        self._planned_for = -1
        self._is_parked = False
        self._arrivals: SimpleQueue[tuple[int, Matrix] | None] = SimpleQueue()
        self._has_delivered = False
        """Whether the caller has some gradients, which cannot be recomputed."""

    @property
    def is_done(self) -> bool:
        """Whether its caller has everything, or the error."""
        return (self.outputs.done() or self._course == "backward") and (
            self.returned.done() or not self.batch.is_trained
        )

    @property
    def plan(self) -> ResidentPlan | None:
        """The plan of the latest attempt, or the one to begin with."""
        return self._plan

    # -------------------------------------------------------------------------------------------- the caller's thread

    def backward(self, dy: Matrix | None) -> Future[Gradients]:
        if dy is not None:
            self._dy = dy
            self._post(RunSubmitted(self))
        return self.returned

    def arrivals(self) -> Iterator[tuple[int, Matrix]]:
        yield from iter(self._arrivals.get, None)

    def publish(self, parameter: int, operand: Tensor) -> None:
        self._post(Prompted(self, _NewWeights(parameter, operand)))

    def boundary(self, stage: int) -> tuple[Matrix, Matrix | None]:
        """Return a stage's input and the gradient of its output, once `returned` is done."""
        assert self._activations is not None, "it ran"
        return self._activations.boundary(stage)

    # -------------------------------------------------------------------------------------------- attempts

    def begin(self, now: float) -> Requests:
        has_loss = self.decoder.head is not None and self.batch.is_trained
        self._course = "backward" if self._dy is not None else "both" if has_loss else "forward"
        devices = self._plan.devices if self._plan is not None else ()
        is_here = self._plan is not None and all(one in self._fleet and one not in self.unable for one in devices)
        if self._lease is not None and not (is_here and self._lease.is_held):
            yield from self._lose("a device that kept weights left")
        elif self._plan is not None and is_here:
            yield from self._try(self._plan, now)
        else:
            yield from self._plan_again()

    def _plan_again(self) -> Requests:
        self._planned_for = self._fleet.number
        yield MakePlan(self)

    def planned(self, plan: object, now: float) -> Requests:
        match plan:
            case InfeasibleError() if self._planned_for != self._fleet.number:  # the fleet has changed since
                yield from self._plan_again()
            case InfeasibleError() if self._stalled:
                self._readmit()
                yield from self._plan_again()
            case InfeasibleError():
                yield from self._park(str(plan))
            case ResidentPlan() if self._is_storing:
                self._next_plan = plan
            case ResidentPlan():
                yield from self._try(plan, now)
            case _:
                yield from self.fail(CleaveError(f"planning failed: {plan!r}; please report this"))
                yield End(self)

    def _try(self, plan: ResidentPlan, now: float) -> Requests:
        """Begin an attempt; a backward under the same arrangement reuses the activations."""
        if not all(device in self._fleet for device in plan.devices):  # one left during planning
            yield from self._plan_again()
            return
        if self._course == "backward" and (self._plan is None or plan.arrangement != self._plan.arrangement):
            self._course = "both"  # there are no activations for another plan's stages
        self._plan = plan
        activations = self._activations if self._course == "backward" else None
        if activations is None:
            activations = Activations(
                self.batch,
                [len(stage.shards) for stage in plan.stages],
                chunk=plan.chunk,
                has_head=self.decoder.head is not None,
                operands=self._operands,
                format=self._format,
            )
        self._activations = activations
        self.results.begin(takes_anything=bool(self._spoilers) or not self._audits.can_replay)
        self._audits.covers_all = bool(self._spoilers)
        if self._course != "forward":
            activations.expect_gradients(self._dy)
            self.results.expect_gradients()
        tasks = ResidentTasks(
            self,
            self.decoder,
            self.batch,
            plan,
            activations,
            format=self._format,
            gradient_format=self._gradient_format,
            operands=self._operands,
            ids=self._ids,
            course=self._course,
            lease=self._lease,
        )
        try:
            self._attempt = Attempt(
                self,
                self.decoder,
                self.batch,
                plan,
                self._course,
                activations,
                self.results,
                tasks,
                fleet=self._fleet,
                audits=self._audits,
                avoid=self.unable,
                barred=self.barred,
                leased=() if self._lease is None else self._lease.parameters,
            )
        except InfeasibleError as fault:
            yield from self._park(str(fault)) if self._lease is None else self._lose(str(fault))
            return
        yield from self._attempt.begin()
        yield from self._go_on(now)

    def _lose(self, reason: str) -> Requests:
        """End: what devices have added to leased gradients cannot be taken back."""
        yield from self.fail(LeaseLost(reason))
        yield End(self)

    def _try_again(self, reason: str) -> Requests:
        if self._lease is not None:
            yield from self._lose(reason)
            return
        log.info("pass begins again: %s", reason)
        yield from self._end_attempt()
        yield from self._plan_again()

    def _end_attempt(self) -> Requests:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            self._last = attempt
            yield from attempt.end()

    def _park(self, reason: str) -> Requests:
        self._is_parked = True
        yield Park(self, reason)

    def resume(self, now: float) -> Requests:
        self._is_parked = False
        if self._attempt is not None and self._has_delivered:
            yield from self._attempt.resettle()
            yield from self._go_on(now)
        else:
            yield from self._end_attempt()
            yield from self._plan_again()

    # -------------------------------------------------------------------------------------------- the fleet

    def left(self, device: DeviceId, now: float) -> Requests:
        if self._lease is not None and device in self._lease.devices:
            yield from self._lose(f"{device}, which kept weights, left")
        elif self._attempt is not None and (self._has_delivered or not self._is_parked):
            yield from self._attempt.left(device, now)
            yield from self._go_on(now)

    def late(self, device: DeviceId, now: float) -> Requests:
        if self._attempt is not None and not self._is_parked:
            yield from self._attempt.late(device)
            yield from self._go_on(now)

    def stalled(self, device: DeviceId, reason: str, now: float) -> Requests:
        """Move a device out of this pass while it stays connected, if others can do its part."""
        if self._attempt is None or self._is_parked or not self._attempt.can_spare(device):
            return
        log.info("moved %s out of this pass: %s", device, reason)
        self.unable.add(device)
        self._stalled.add(device)
        yield Stall(device, reason)
        yield from self.left(device, now)

    def _readmit(self) -> None:
        self.unable -= self._stalled
        self._stalled.clear()

    def orphaned(self, orphans: Sequence[Orphan], device: DeviceId | None, now: float) -> Requests:
        """Exclude devices that failed a task from this pass. Departed ones are handled by `left`."""
        for orphan in orphans:
            unfit = orphan.task.device
            if not isinstance(orphan.task.work, HoldWork) and unfit in self._fleet:
                log.info("excluded %s from this pass: it failed a unit", unfit)
                self.unable.add(unfit)
                yield from self.left(unfit, now)

    # -------------------------------------------------------------------------------------------- results

    def format(self, task: Task) -> WireFormat:
        return cast("ResidentWork", task.work).message.format

    def describe(self, task: Task) -> messages.RunTask:
        return cast("ResidentWork", task.work).message

    def accepted(self, accept: Accept, payload: object, now: float) -> Requests:
        if self._attempt is not None and not isinstance(accept.task.work, HoldWork):
            yield from self._attempt.accepted(accept, payload)

    def kept(self, item: object, now: float) -> Requests:
        attempt = self._attempt
        if attempt is not None:  # which began when all results of the one before were stored
            yield from attempt.kept(item, now)
            if isinstance(item, GradientPart) and self.batch.is_piecemeal and not self._audits.are_open:
                self._deliver(attempt, item)
            yield from self._go_on(now)
            return
        assert self._last is not None
        self._last.keeping -= 1
        if self._next_plan is not None and not self._is_storing:
            plan, self._next_plan = self._next_plan, None
            yield from self._try(plan, now)

    def spoiled(self, item: object, reason: str, now: float) -> Requests:
        """Begin again under audits of everything: the numbers are the device's fault, or the model's own."""
        assert isinstance(item, UnitResult | GradientPart)
        device = (item.unit.seat if isinstance(item, UnitResult) else item.account).device
        if self._attempt is None:
            yield from self.kept(item, now)  # of an attempt that has ended
            return
        self._attempt.keeping -= 1
        if self._has_delivered:
            yield from self._fail_late(f"{device} returned {reason}")
            return
        self._spoilers[device] = reason
        yield from self._try_again(f"{device} returned {reason}")

    def _fail_late(self, reason: str) -> Requests:
        yield from self.fail(CleaveError(f"{reason} after weights had been updated; resume from the last checkpoint"))
        yield End(self)

    @property
    def _is_storing(self) -> bool:
        """Whether results of an attempt that ended are still being stored."""
        return self._last is not None and self._last.keeping > 0

    def _deliver(self, attempt: Attempt, item: GradientPart) -> None:
        """Hand out the gradients of a shard as soon as they are complete."""
        if attempt.is_gathered(item.account.shard):
            for settled in attempt.settled(item.account.shard):
                self._has_delivered = True
                self._arrivals.put(settled)

    def audited(self, case: object, reason: str, now: float) -> Requests:
        case = cast("AuditCase", case)
        if case.is_dropped:
            return
        yield from self._audits.conclude(case, reason, self)
        wrong = case.account.device
        if not reason:
            yield from self._go_on(now)
        elif self._has_delivered:
            yield from self._fail_late(f"{wrong} was found wrong")
        else:
            self.barred.add(wrong)
            yield from self._try_again(f"the work of {wrong} was found wrong")

    def rejected(self, task: Task, device: DeviceId, reason: str) -> Requests:
        raise AssertionError("units are audited, not checked")

    def hedged(self, hedges: Sequence[Hedge], now: float) -> Requests:
        raise AssertionError("tasks bound to a device are not hedged")

    def prompted(self, request: object, now: float) -> Requests:
        if isinstance(request, LeaseLost):
            yield from self._lose(str(request)) if self._attempt is not None else ()
            return
        assert isinstance(request, _NewWeights)
        holder = self._attempt or self._last
        if holder is not None:
            yield from holder.send_ahead(request.parameter, request.tensor)

    # -------------------------------------------------------------------------------------------- completion

    def _go_on(self, now: float) -> Requests:
        """Hand out what is complete; begin again, or wait, if the attempt is stuck."""
        attempt = self._attempt
        if attempt is None or self._is_parked:
            return
        if attempt.is_over:
            yield from self._audits.settle(self)
        is_sure = not self._audits.are_open
        if is_sure and attempt.has_outputs:
            yield Resolve(self.outputs, attempt.activations.outputs)
        if is_sure and attempt.is_over:
            yield from self._blame_spoilers()
            gathered = attempt.gathered() if attempt.goes_back else None
            yield from self._end_attempt()
            yield End(self)
            if gathered is not None:
                yield Resolve(self.returned, gathered)
                self._arrivals.put(None)
        elif attempt.is_stuck and self._has_delivered and self._stalled:
            self._readmit()
            yield from attempt.resettle()
            yield from self._go_on(now)
        elif attempt.is_stuck:
            reason = "the remaining devices cannot continue with what they hold"
            yield from self._park(reason) if self._has_delivered else self._try_again(reason)

    def _blame_spoilers(self) -> Requests:
        """Blame devices for implausible numbers, unless they are the model's own: everything was recomputed since."""
        if self.results.is_plausible:
            for device, reason in self._spoilers.items():
                if device not in self.barred:  # else found wrong already
                    yield from self._audits.convict(device, f"it returned {reason}; recomputed, they are neither")
        self._spoilers.clear()

    def fail(self, error: CleaveError) -> Requests:
        yield from self._end_attempt()
        self._is_parked, self._next_plan = False, None
        yield Reject(self.outputs, error)
        yield Reject(self.returned, error)
        self._arrivals.put(None)
