"""One attempt at a pass under one plan: units become tasks, results become activations and gradients.

`core/schedule/pipeline.py` decides what can be computed next and by which device, `tasks.py` turns it into tasks. An
attempt recovers by itself what departed devices had computed; `run.py` begins another one if the remaining devices
cannot continue.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from cleave import events
from cleave.core.model.batch import Direction, Gradients
from cleave.core.model.decoder import Decoder
from cleave.core.model.shard import Shard
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.core.schedule.accounts import Account, Seat
from cleave.core.schedule.desks import Desk
from cleave.core.schedule.pipeline import Course, Pipeline, Unit
from cleave.core.schedule.rectangles import Rectangle, within, without
from cleave.core.schedule.tasks import Accept, DeviceId, GroupsAbandoned, OperandsReleased, TasksSubmitted
from cleave.protocol.numbers import Matrix
from cleave.server.contract import Keep, Requests, Run, Tell
from cleave.server.fleet_view import FleetView
from cleave.server.operands import Tensor
from cleave.server.resident.activations import Activations, Batched
from cleave.server.resident.audit_case import AuditCase
from cleave.server.resident.audits import Audits
from cleave.server.resident.readings import Accumulator
from cleave.server.resident.results import GradientPart, ResidentResults, UnitResult
from cleave.server.resident.tasks import HoldWork, ReadWork, ResidentTasks, UnitWork


@dataclass(slots=True, eq=False)
class _Loss:
    """Sequences whose units are recomputed because their device left."""

    device: DeviceId
    noticed: float
    units: int
    open: set[tuple[Shard, int]]


class Attempt:
    def __init__(
        self,
        run: Run,
        decoder: Decoder,
        batch: Batched,
        plan: ResidentPlan,
        course: Course,
        activations: Activations,
        results: ResidentResults,
        tasks: ResidentTasks,
        *,
        fleet: FleetView,
        audits: Audits,
        avoid: Collection[DeviceId],
        barred: Collection[DeviceId],
        leased: Collection[int] = (),
    ) -> None:
        """Raise InfeasibleError if devices lack memory. `avoid` devices adopt no shards, `barred` ones are audited.

        Gradients of `leased` parameters stay on their devices.
        """
        self.plan, self.course, self.activations = plan, course, activations
        self.keeping = 0
        """Results being stored."""
        self._run_ref = weakref.ref(run)  # the run holds its attempts: a cycle would keep gradients until collected
        self._decoder, self._batch, self._results, self._tasks = decoder, batch, results, tasks
        self._fleet, self._audits, self._avoid, self._barred = fleet, audits, avoid, barred
        self._leased = leased
        stages = [stage.shards for stage in plan.stages]
        self._pipeline = Pipeline(
            stages,
            sequences=batch.sequences,
            chunks=activations.chunks,
            course=course,
            trained=[shard for shard, held in tasks.held.items() if held.trained],
            late=fleet.late,
        )
        tasks.set_desks(self._pipeline, fleet.memory_bytes)
        self._early: dict[tuple[Seat, Direction], dict[int, UnitWork]] = {}
        """Results that arrived before those of earlier chunks."""
        self._losses: list[_Loss] = []
        self._unsettled: dict[int, set[Shard]] = {
            number: set()
            for number, parameter in enumerate(decoder.parameters)
            if parameter.is_trained and number not in self._leased
        }
        """Trained parameters, and the shards whose part of their gradient is missing."""
        for shard, held in tasks.held.items():
            for view, _ in held.trained:
                self._unsettled[view.parameter].add(shard)

    @property
    def _run(self) -> Run:
        run = self._run_ref()
        assert run is not None, "whoever asks an attempt holds its run"
        return run

    # -------------------------------------------------------------------------------------------- progress

    @property
    def goes_back(self) -> bool:
        return self.course != "forward"

    @property
    def has_outputs(self) -> bool:
        return self.course != "backward" and self._pipeline.ended("forward")

    @property
    def is_over(self) -> bool:
        if self.keeping:
            return False
        if not self.goes_back:
            return self._pipeline.ended("forward")
        return self._pipeline.ended("backward") and self._pipeline.is_read

    @property
    def is_stuck(self) -> bool:
        """Whether the remaining devices cannot continue with what they hold."""
        return not self.keeping and not self.is_over and self._pipeline.is_stuck

    def gathered(self) -> Gradients:
        return Gradients(
            dx=self.activations.dx if self._batch.wants_dx else None,
            parameters=tuple(
                None if number in self._leased else self._results.gradient(number)
                for number in range(len(self._decoder.parameters))
            ),
        )

    def settled(self, shard: Shard) -> list[tuple[int, Matrix]]:
        """Return the gradients that are complete now that all of this shard's have arrived."""
        found: list[tuple[int, Matrix]] = []
        for number, shards in list(self._unsettled.items()):
            shards.discard(shard)
            if not shards:
                del self._unsettled[number]
                gradient = self._results.gradient(number)
                assert gradient is not None
                found.append((number, gradient))
        return found

    # -------------------------------------------------------------------------------------------- begin, end

    def begin(self) -> Requests:
        ahead = self._tasks.first_hold_tasks(self._pipeline, self._fleet.memory_bytes, self._fleet.holds)
        yield TasksSubmitted(tuple(ahead))
        yield from self._submit(self._pipeline.begin())

    def end(self) -> Requests:
        """Abandon tasks in progress, and release what devices made for them."""
        self._audits.drop()
        groups, made = self._tasks.forget_all()
        if groups:
            yield GroupsAbandoned(groups)
        if made:
            yield OperandsReleased(made)

    def send_ahead(self, parameter: int, tensor: Tensor) -> Requests:
        """Send new weights to the devices that hold them."""
        yield TasksSubmitted(tuple(self._tasks.hold_tasks(parameter, tensor, self._pipeline)))

    # -------------------------------------------------------------------------------------------- the fleet

    def left(self, device: DeviceId, now: float) -> Requests:
        """Remove a device from the attempt: others recompute what only it had."""
        readings = {account: one for account, one in self._tasks.readings.items() if account.device == device}
        for account in [account for account, reading in readings.items() if reading.is_complete]:
            if not account.is_read:  # else it left before
                self._pipeline.read(account)  # all of it arrived and is being added
            del readings[account]
        left_over = {account: reading.wanted for account, reading in readings.items() if reading.has_begun}
        lost, units = self._pipeline.leave(device, left_over)
        for what in (*lost, *readings):
            yield from self._forget(what)
        if lost:
            done = sum(seat.done["forward"] + seat.done["backward"] for seat in lost)
            self._losses.append(_Loss(device, now, done, {(seat.shard, seat.sequence) for seat in lost}))
        yield from self.resettle(units)

    def late(self, device: DeviceId) -> Requests:
        """Reassign a straggler's sequences, except those whose gradients it has begun to add."""
        lost, units = self._pipeline.give_up_seats(device)
        for seat in lost:
            yield from self._forget(seat)
        yield from self._submit(units)

    def can_spare(self, device: DeviceId) -> bool:
        """Whether a device takes part in the attempt and others that are not late could do all of its part."""
        shards = [shard for shard, _ in self._pipeline.desks.of(device)]
        return bool(shards) and all(self._has_substitute(shard, device) for shard in shards)

    def _has_substitute(self, shard: Shard, device: DeviceId) -> bool:
        if self._tasks.held[shard].leased:
            return False
        mates = (desk.device for desk in self._pipeline.desks.at(shard))
        if any(mate != device and mate not in self._fleet.late for mate in mates):
            return True
        return any(desk.device != device for desk in self._adopters(shard))

    def resettle(self, units: Sequence[Unit] = ()) -> Requests:
        """Assign shards that no device serves, and submit units that can run now."""
        for shard in self._pipeline.unserved:
            self._adopt(shard)
        yield from self._submit([*units, *self._pipeline.settle()])

    def _adopt(self, shard: Shard) -> None:
        """Assign an unserved shard to a fast device that has room for it beside its own."""
        desk = next(self._adopters(shard), None)
        if desk is not None:
            self._pipeline.desks.add(shard, desk)

    def _adopters(self, shard: Shard) -> Iterator[Desk]:
        """Yield desks for devices with room for a shard beside their own."""
        for device, flops_per_s in self._fleet.helpers():
            if device not in self._avoid and device not in self._barred:
                memory_bytes = self._fleet.memory_bytes(device)
                desk = self._tasks.desk_beside(shard, device, flops_per_s, memory_bytes, self._pipeline)
                if desk is not None:
                    yield desk

    # -------------------------------------------------------------------------------------------- results

    def accepted(self, accept: Accept, payload: object) -> Requests:
        match accept.task.work:
            case UnitWork() as work:
                work.parts.append((accept.part, payload))
                if accept.finished and self._pipeline.is_current(work.unit.seat):
                    yield from self._receive(work)
            case ReadWork() as work:
                yield from self._read(work, accept, payload)
            case HoldWork():
                pass
            case _:
                raise AssertionError("a task of a pass is a unit, a reading or weights")

    def kept(self, item: object, now: float) -> Requests:
        self.keeping -= 1
        match item:
            case UnitResult(unit=unit):
                yield from self._unit_kept(unit, now)
            case GradientPart(accumulator=accumulator):
                yield from self._gradient_kept(accumulator)
            case _:
                raise AssertionError("a pass keeps units and gradients")

    def _receive(self, work: UnitWork) -> Requests:
        """Store a complete result; chunks are stored in order, whatever order they arrive in."""
        seat, direction = work.unit.seat, work.unit.direction
        waiting = self._early.setdefault((seat, direction), {})
        waiting[self._pipeline.place_of(work.unit)] = work
        while seat.received[direction] in waiting:
            ready = waiting.pop(seat.received[direction])
            self._pipeline.received(ready.unit)
            self.keeping += 1
            yield Keep(self._run, self._unit_result(ready))

    def _unit_result(self, work: UnitWork) -> UnitResult:
        unit, case = work.unit, self._case(work.unit.seat.account)
        return UnitResult(
            unit=unit,
            stage=self._pipeline.stage_of(unit.seat.shard),
            rows=work.rows,
            cols=work.cols,
            parts=tuple(work.parts),
            message=work.message,
            read=() if case is None else tuple(operand.id for operand in self._tasks.read_by(unit)),
            is_wanted=not unit.is_silent and (unit.direction == "forward" or self._tasks.wants_dx(unit.seat.shard)),
            activations=self.activations,
            case=case,
        )

    def _unit_kept(self, unit: Unit, now: float) -> Requests:
        seat = unit.seat
        units = self._pipeline.stored(unit)
        is_over = self._pipeline.is_current(seat) and self._pipeline.is_over(seat)
        if is_over:
            yield from self._forget(seat)
            yield from self._make_good(seat, now)
            stage = self._pipeline.stage_of(seat.shard)
            is_needed = self.course == "forward" and self._batch.is_trained
            if not is_needed and self._pipeline.is_through_stage(stage, seat.sequence):
                self.activations.release(stage, seat.sequence)
        yield from self._submit(units, [seat.shard] if is_over else [])

    def _read(self, work: ReadWork, accept: Accept, payload: object) -> Requests:
        """Add rows of stacked gradients, except what was returned before."""
        account, part, case = work.account, accept.part, self._case(work.account)
        accumulators, trained = self._tasks.readings[account].accumulators, self._tasks.held[account.shard].trained
        bottom = 0
        for index in work.indexes:
            accumulator, (view, _) = accumulators[index], trained[index]
            accumulator.has_arrived = True
            top, bottom = bottom, bottom + view.height
            for own in within([part], Rectangle(top, bottom, 0, view.width)):
                inside = own.moved(-top, 0)
                wanted = within(accumulator.wanted, inside)
                for piece in wanted:
                    accumulator.wanted = without(accumulator.wanted, piece)
                accumulator.keeping += 1
                self.keeping += 1
                yield Keep(
                    self._run,
                    GradientPart(
                        account=account,
                        accumulator=accumulator,
                        index=index,
                        view=view,
                        part=inside,
                        payload=payload,
                        place=(own.top - part.top, part.rows),
                        wanted=tuple(wanted),
                        message=work.alone(accumulator.operand, view),
                        case=case,
                    ),
                )

    def _gradient_kept(self, accumulator: Accumulator) -> Requests:
        accumulator.keeping -= 1
        if not accumulator.is_added:
            return
        yield OperandsReleased((accumulator.operand.id,))  # an account that makes up for another may need its room
        for account in list(accumulator.accounts):  # none if its device left; what had arrived is kept
            if self._tasks.readings[account].is_added:
                if not account.is_read:
                    self._pipeline.read(account)
                yield from self._forget(account)
                yield from self._audits.close(account, self._run)

    def is_gathered(self, shard: Shard) -> bool:
        """Whether every gradient of a shard has arrived and was added."""
        readings = self._tasks.readings.items()
        is_adding = any(reading.is_adding for account, reading in readings if account.shard == shard)
        return not is_adding and self._pipeline.is_gathered(shard)

    def _case(self, account: Account) -> AuditCase | None:
        direction: Direction = "backward" if self.goes_back else "forward"
        held, is_trained = self._tasks.held[account.shard], self._batch.is_trained
        return self._audits.case_of(account, held, direction, barred=self._barred, is_trained=is_trained)

    # -------------------------------------------------------------------------------------------- tasks

    def _submit(self, units: Sequence[Unit], shards: Sequence[Shard] | None = None) -> Requests:
        """Submit units, and readings of accounts that are ready, of some shards or of all."""
        for account in {unit.seat.account: None for unit in units}:
            yield from self._open(account)
        tasks = [self._tasks.unit_task(unit) for unit in units]
        for shard in self._pipeline.shards if shards is None else shards:
            accounts = self._pipeline.readable(shard)
            for account in accounts:
                tasks += self._tasks.read_tasks(account)
            if accounts:
                tasks += [self._tasks.unit_task(unit) for unit in self._pipeline.settle()]
        if tasks:
            yield TasksSubmitted(tuple(tasks))

    def _open(self, account: Account) -> Requests:
        """Let an account that makes up for a departed device add to those of its device that are being read.

        What these have not begun to return then travels once instead of twice, and gives way to the units.
        """
        if account.part is None or account in self._tasks.readings or self._case(account) is not None:
            return
        for other in self._pipeline.being_read(account.shard, account.device):
            if self._case(other) is None:  # an audit replays the units of one account
                yield GroupsAbandoned(tuple(self._tasks.join(account, other)))

    def _forget(self, what: Seat | Account) -> Requests:
        """Abandon the tasks of a seat or an account, and release what its device keeps for it."""
        groups, made = self._tasks.forget(what)
        yield GroupsAbandoned(groups)
        if made:
            yield OperandsReleased(made)

    def _make_good(self, seat: Seat, now: float) -> Requests:
        for loss in list(self._losses):
            loss.open.discard((seat.shard, seat.sequence))
            if not loss.open:
                self._losses.remove(loss)
                yield Tell(events.Recovered(device=loss.device, blocks=loss.units, seconds=now - loss.noticed))
