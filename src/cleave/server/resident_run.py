"""Batches on their way through resident layers: units of `core/flow` into tasks, results into boundaries and gradients.

Beside `jobs.py`, which does the same for products: both hand tasks to the ledger and are asked by the dispatcher what
a task is about. Lives in the server's event loop; callers in other threads wait for the futures of a `PassRun`. Passes
go one after another, as each alone may fill the devices' memory. One whose devices are too few to go on begins again
with another plan, or waits for devices.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from cleave import events
from cleave.core.cost.gemm import WireFormat
from cleave.core.fleet.profiles import Profiles
from cleave.core.plan.resident.stages import ColumnPlan
from cleave.core.schedule.ledger import Ledger
from cleave.core.schedule.pipeline import Account, Column, Course, Desk, Seat, Unit
from cleave.core.schedule.rectangles import Rectangle, total, within, without
from cleave.core.schedule.tasks import (
    Accept,
    DeviceId,
    Event,
    Hedge,
    Operand,
    OperandsReleased,
    Orphan,
    RegionsAbandoned,
    Task,
    TasksSubmitted,
)
from cleave.errors import CleaveError, InfeasibleError, ProtocolError
from cleave.protocol import messages
from cleave.protocol.decoder import Batch, Stack
from cleave.protocol.frames import Buffer
from cleave.protocol.numbers import Codec, Matrix
from cleave.protocol.programs import Hold, Program
from cleave.server.audits import Audits
from cleave.server.operands import Staging, Tensor
from cleave.server.resident_tasks import HoldWork, PassRun, ReadWork, UnitWork

Planner = Callable[..., tuple[ColumnPlan, tuple[str, ...]]]
"""A plan, without some devices if it can be, and the names of the devices it numbers."""

_FEW = 2
"""Columns of results that are no hidden numbers: logsumexp and logit, or a sign that something is done."""

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Loss:
    """What a device left behind: sequences that go their way again."""

    device: DeviceId
    noticed: float
    units: int
    open: set[tuple[Column, int]]


class Passes:
    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        *,
        ids: Iterator[int],
        ledger: Ledger,
        staging: Staging,
        codec: Codec,
        fleet: Callable[[], Profiles | None],
        planner: Planner,
        audits: Audits,
        alone: Callable[[str], None],
        listener: events.Listener,
    ) -> None:
        self._loop, self._ids, self._ledger, self._staging, self._codec = loop, ids, ledger, staging, codec
        self._fleet, self._planner, self._alone, self._listener = fleet, planner, alone, listener
        self._audits = audits
        audits.ended, audits.failed = self._audited, lambda fault: self.fail(fault, for_good=False)
        self._line: deque[tuple[PassRun, Course]] = deque()
        self._run: PassRun | None = None
        """The one that is under way."""
        self._is_parked = False
        self._losses: list[_Loss] = []
        self._late: set[DeviceId] = set()
        self._ended: CleaveError | None = None
        self.handle: Callable[[Event], None] = lambda event: None
        """The dispatcher's, which is made after this."""

    # -------------------------------------------------------------------------------------------- any thread

    def start(self, stack: Stack, batch: Batch, format: WireFormat) -> PassRun:
        def queue(run: PassRun, course: Course) -> None:
            self._loop.call_soon_threadsafe(self._queue, run, course)

        def send_ahead(run: PassRun, parameter: int, tensor: Tensor) -> None:
            self._loop.call_soon_threadsafe(self._publish, run, parameter, tensor)

        run = PassRun(
            self,
            stack,
            batch,
            format=format,
            staging=self._staging,
            ids=self._ids,
            go_back=lambda run: queue(run, "backward"),
            send_ahead=send_ahead,
        )
        queue(run, "both" if stack.head is not None and batch.is_trained else "forward")
        return run

    # -------------------------------------------------------------------------------------------- begin, end

    @property
    def is_parked(self) -> bool:
        return self._is_parked

    def unpark(self) -> None:
        """Someone is there again."""
        run = self._run
        if self._is_parked and run is not None:
            self._is_parked = False
            self._safely(run, lambda: self._resettle(run) if run.has_delivered else self._begin(run))

    def fail(self, fault: CleaveError, *, for_good: bool) -> None:
        """End every pass with an error; `for_good`, those to come too."""
        if for_good:
            self._ended = fault
        runs, self._line = [run for run, _ in self._line], deque[tuple[PassRun, Course]]()
        if self._run is not None:
            runs.append(self._run)
            self._stop(self._run)
        for run in runs:
            _fail(run, fault)

    def _queue(self, run: PassRun, course: Course) -> None:
        if self._ended is not None:
            _fail(run, self._ended)
            return
        self._line.append((run, course))
        self._next()

    def _next(self) -> None:
        if self._line and self._run is None:
            run, run.course = self._line.popleft()
            self._run = run
            self._safely(run, lambda: self._begin(run, again=False))

    def _begin(self, run: PassRun, *, again: bool = True) -> None:
        """With a plan for those who are there; a pass that has begun before begins again."""
        self._clear(run)
        try:
            plan, names = self._planner(run.stack, run.batch, run.unable, run.barred, anew=again)
            memory = self._memory()
            if not {names[device] for stage in plan.stages for device in stage.devices} <= memory.keys():
                raise InfeasibleError("a device left while it was planned for")
            if run.course == "backward" and not run.follows(plan, names):
                run.course = "both"  # what is between the stages of another plan is not there
            run.lay_out(plan, names, lambda device: memory[device], self._late)
        except InfeasibleError as fault:
            self._is_parked = True
            self._alone(str(fault))
            return
        self._submit(run, run.flow.begin())

    def _safely(self, run: PassRun, step: Callable[[], None]) -> None:
        """Whoever waits for a pass must not wait for ever, if what goes on in the loop fails through our own fault."""
        try:
            step()
        except Exception as fault:
            log.exception("a pass failed")
            if run is self._run:
                self._stop(run)
            _fail(run, CleaveError(f"a pass failed: {fault!r}; please report this"))
            self._next()

    def _resettle(self, run: PassRun, units: Sequence[Unit] = ()) -> None:
        """Columns that nobody serves go to others."""
        for column in run.flow.unserved:
            self._adopt(run, column)
        self._submit(run, [*units, *run.flow.settle()])

    def _end(self, run: PassRun) -> None:
        self._stop(run)
        self._next()

    def _stop(self, run: PassRun) -> None:
        self._run, self._is_parked = None, False
        self._clear(run)

    def _clear(self, run: PassRun) -> None:
        """Nobody wants what is under way of it any more, nor what devices made for it."""
        self._losses.clear()
        self._audits.drop()
        regions = tuple(task for tasks in run.regions.values() for task in tasks)
        made = [operand.id for operand in run.states.values()]
        made += [operand.id for reading in run.readings.values() for operand in reading.operands]
        run.regions.clear()
        run.states.clear()
        run.readings.clear()
        if regions:
            self.handle(RegionsAbandoned(regions))
        if made:
            self.handle(OperandsReleased(tuple(made)))

    # -------------------------------------------------------------------------------------------- the fleet

    def left(self, device: DeviceId) -> None:
        """A device is gone, with all it had made."""
        if self._run is not None and (self._run.has_delivered or not self._is_parked):
            self._leave(self._run, device)

    def lag(self, late: set[DeviceId]) -> None:
        """Who is late now: others take what they can of theirs."""
        self._late = late
        run = self._run
        if run is None or self._is_parked:
            return
        desks = [desk for desks in run.flow.desks.values() for desk in desks]
        newly = {desk.device for desk in desks if desk.device in late and not desk.is_late}
        for desk in desks:
            desk.is_late = desk.device in late
        for device in newly:
            lost, units = run.flow.give_up_seats(device)
            for seat in lost:
                self._forget(run, seat)
            self._submit(run, units)

    def _leave(self, run: PassRun, device: DeviceId) -> None:
        readings = {account: reading for account, reading in run.readings.items() if account.device == device}
        left_over = {account: reading.wanted for account, reading in readings.items() if reading.has_begun}
        lost, units = run.flow.leave(device, left_over)
        for what in [*lost, *readings]:
            self._forget(run, what)
        if lost:
            done = sum(seat.done["forward"] + seat.done["backward"] for seat in lost)
            places = {(seat.column, seat.sequence) for seat in lost}
            self._losses.append(_Loss(device, self._loop.time(), done, places))
        self._resettle(run, units)

    def _adopt(self, run: PassRun, column: Column) -> None:
        """A column that nobody serves goes to whoever has room for it beside its own, the fastest first."""
        memory = {device: left for device, left in self._memory().items() if device not in run.barred}
        for other, desks in run.flow.desks.items():
            for desk in desks:
                if desk.device in memory:
                    memory[desk.device] -= run.need_bytes(other, desk.slots)
        rooms = {device: run.slots(column, left) for device, left in memory.items() if device not in run.unable}
        profiles = self._fleet()
        if profiles is not None and any(rooms.values()):
            speeds = dict(zip(profiles.names, profiles.flops_per_s.tolist(), strict=True))
            best = max((device for device in rooms if rooms[device]), key=lambda device: speeds[device])
            run.flow.desks[column].append(Desk(best, rooms[best], speeds[best], is_late=best in self._late))

    def _memory(self) -> dict[DeviceId, int]:
        profiles = self._fleet()
        if profiles is None:
            return {}
        return {DeviceId(name): int(size) for name, size in zip(profiles.names, profiles.memory_bytes, strict=True)}

    # -------------------------------------------------------------------------------------------- for the dispatcher

    def describe(self, task: Task) -> messages.Run:
        if isinstance(task.work, HoldWork):
            program = Hold(operands=tuple(operand.id for operand in task.operands))
        else:
            program = _program(cast("UnitWork | ReadWork", task.work))
        return messages.Run(task=task.id, priority=task.priority, format=_format(task), program=program)

    def inspect(self, task: Task, part: Rectangle, result: messages.Result, payload: Buffer, harder: bool) -> Matrix:
        """Numbers as they came: what a fused unit computes cannot be checked by projection, only audited."""
        if result.format != _format(task):
            raise ProtocolError(f"expected a result in {_format(task)}, got {result.format}")
        values = np.empty((part.rows, part.cols), dtype=np.float32)
        self._codec.decode_into(payload, result.format, values)
        return values

    def accept(self, accept: Accept, values: Matrix) -> None:
        work, part = accept.task.work, accept.part
        if isinstance(work, ReadWork):
            self._add(work, accept, values)
            return
        if isinstance(work, HoldWork):
            return
        assert isinstance(work, UnitWork)
        work.values[part.top : part.bottom, part.left : part.right] = values
        if accept.finished:
            work.run.regions[work.unit.seat].discard(accept.task.id)
            if self._audits.wants(work.run, work.unit.seat.account):
                self._audits.keep_unit(work.run, work.unit, self.describe(accept.task), work.values)
            for unit, values in work.run.in_order(work.unit, work.values):
                self._put(work.run, unit, values)

    def reject(self, task: Task, device: DeviceId, reason: str) -> None:
        """Nothing is said of a unit but that it failed, which `redo` is told."""

    def redo(self, orphans: list[Orphan], device: DeviceId | None) -> None:
        """Tasks that a device could not do: it has no more part in this pass. Of one that left, see `left`."""
        for orphan in orphans:
            if isinstance(orphan.task.work, HoldWork):
                continue  # it will be sent when it is needed
            run = cast("UnitWork | ReadWork", orphan.task.work).run
            if orphan.task.device in self._ledger and run is self._run:
                log.info("%s has no more part in this pass: it could not do a unit", orphan.task.device)
                run.unable.add(orphan.task.device)
                self._leave(run, orphan.task.device)

    def hedge(self, hedges: list[Hedge]) -> None:
        raise AssertionError("tasks bound to a device are not hedged")

    # -------------------------------------------------------------------------------------------- results

    def _put(self, run: PassRun, unit: Unit, values: Matrix) -> None:
        """A unit is done: its result in its place, its successors on their way."""
        seat, between = unit.seat, run.between
        stage, sequence = seat.column.stage, seat.sequence
        if not unit.is_silent and unit.direction == "forward":
            between.put_forward(stage, seat.column.slice, sequence, unit.chunk, values)
        elif not unit.is_silent and run.wants_dx(seat.column):
            between.put_backward(stage, sequence, unit.chunk, values)
        units = run.flow.done(unit)
        is_last = unit.direction == "forward" and stage == len(run.plan.stages) - 1
        if (
            is_last
            and run.stack.head is not None
            and run.flow.is_complete(seat.column, sequence, "forward", unit.chunk)
        ):
            between.close_loss(sequence, unit.chunk)
        if run.flow.is_over(seat):
            self._forget(run, seat)
            self._made_good(seat)
            mates = [column for column in run.flow.columns if column.stage == stage]
            is_needed = run.course == "forward" and run.batch.is_trained
            if not is_needed and all(run.flow.is_through(column, sequence) for column in mates):
                between.release(stage, sequence)
        self._submit(run, units, [seat.column] if run.flow.is_over(seat) else [])

    def _add(self, work: ReadWork, accept: Accept, values: Matrix) -> None:
        """A rectangle of a gradient, as far as nobody had returned it before."""
        run, account = work.run, work.account
        reading = run.readings[account]
        if self._audits.wants(run, account):
            self._audits.keep_gradient(account, work.index, self.describe(accept.task), accept.part, values)
        view, _ = run.residents[account.column].trained[work.index]
        target = run.gradients[view.parameter][slice(*view.rows), slice(*view.cols)]
        for wanted in within(reading.wanted[work.index], accept.part):
            inside = wanted.moved(-accept.part.top, -accept.part.left)
            part = values[inside.top : inside.bottom, inside.left : inside.right]
            target[wanted.top : wanted.bottom, wanted.left : wanted.right] += part
            reading.wanted[work.index] = without(reading.wanted[work.index], wanted)
        if accept.finished:
            run.regions[account].discard(accept.task.id)
        if not any(total(parts) for parts in reading.wanted.values()):
            account.is_read = True
            self._forget(run, account)
            if run.batch.is_piecemeal and not self._audits.are_open and run.flow.is_gathered(account.column):
                run.deliver(account.column)
            self._audits.close(account)
            self._close_what_ended(run)

    def _publish(self, run: PassRun, parameter: int, tensor: Tensor) -> None:
        if self._ended is None:
            self.handle(TasksSubmitted(tuple(run.hold_tasks(parameter, tensor))))

    def _submit(self, run: PassRun, units: list[Unit], columns: Sequence[Column] | None = None) -> None:
        """Units, and what can be read now of some columns, or of all."""
        tasks = [run.unit_task(unit) for unit in units]
        for column in run.flow.columns if columns is None else columns:
            accounts = run.flow.readable(column)
            for account in accounts:
                tasks += run.read_tasks(account)
            if accounts:
                tasks += [run.unit_task(unit) for unit in run.flow.settle()]
        if tasks:
            self.handle(TasksSubmitted(tuple(tasks)))
        if run is self._run and not self._is_parked:
            self._close_what_ended(run)

    def _close_what_ended(self, run: PassRun) -> None:
        has_outputs = run.flow.ended("forward")
        is_over = run.flow.ended("backward") and run.flow.is_read if run.goes_back else has_outputs
        is_sure = self._audits.settle() if is_over else not self._audits.are_open
        if has_outputs and is_sure and run.course != "backward" and not run.outputs.done():
            run.outputs.set_result(run.between.outputs)
        if is_over and is_sure:
            self._end(run)
            if run.goes_back and not run.returned.done():
                run.returned.set_result(run.gathered())
                run.end_arrivals()
        elif not is_over and run.flow.is_stuck:
            self._loop.call_soon(self._go_round, run)  # the ledger's commands of this moment are not all done

    def _go_round(self, run: PassRun) -> None:
        """What cannot go on begins again; unless its first gradients are used already: then it waits for a device."""
        if run is not self._run or self._is_parked or not run.flow.is_stuck:
            return
        reason = "the devices that are left cannot go on with what they hold"
        if run.has_delivered:
            self._is_parked = True
            self._alone(reason)
        else:
            log.info("a pass begins again: %s", reason)
            self._safely(run, lambda: self._begin(run))

    def _audited(self, wrong: DeviceId | None) -> None:
        """Another audit of the pass under way is through."""
        run = self._run
        assert run is not None, "audits are dropped with their pass"
        if wrong is None:
            self._close_what_ended(run)
        elif run.has_delivered:
            self._stop(run)
            _fail(
                run,
                CleaveError(f"{wrong} was found wrong when weights were updated already; resume from what is saved"),
            )
            self._next()
        else:
            log.info("a pass begins again: what %s did in it was found wrong", wrong)
            run.barred.add(wrong)
            self._safely(run, lambda: self._begin(run))

    def _forget(self, run: PassRun, what: Seat | Account) -> None:
        """Nothing more is asked of a seat or an account: what its device keeps for it goes."""
        regions = run.regions.pop(what, None)
        if regions:
            self.handle(RegionsAbandoned(tuple(regions)))
        made: list[Operand] = []
        if isinstance(what, Seat):
            if what in run.states:
                made = [run.states.pop(what)]
        elif what in run.readings:
            made = run.readings.pop(what).operands
        if made:
            self.handle(OperandsReleased(tuple(operand.id for operand in made)))

    def _made_good(self, seat: Seat) -> None:
        for loss in list(self._losses):
            loss.open.discard((seat.column, seat.sequence))
            if not loss.open:
                self._losses.remove(loss)
                seconds = self._loop.time() - loss.noticed
                self._listener(events.Recovered(device=loss.device, blocks=loss.units, seconds=seconds))


def _format(task: Task) -> WireFormat:
    """Of its result."""
    work = task.work
    if isinstance(work, ReadWork) or (isinstance(work, UnitWork) and work.values.shape[1] > _FEW):
        return work.run.format
    return "fp32"


def _program(work: UnitWork | ReadWork) -> Program:
    if isinstance(work, ReadWork):
        return work.run.read_program(work.account, work.index)
    return work.run.unit_program(work.unit)


def _fail(run: PassRun, fault: CleaveError) -> None:
    for future in (run.outputs, run.returned):
        if not future.done():
            future.set_exception(fault)
    run.end_arrivals()
