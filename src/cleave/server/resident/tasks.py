"""Turn a pass's units, accounts and weights into operands, tasks and programs for devices.

Tracks what devices make for the pass: a state (keys and values) per seat, accumulators per account. `attempt.py` drives
the pass; this module knows no results.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import ClassVar, TypedDict, cast

import msgspec

from cleave.core.cost.demand import tables_bytes
from cleave.core.cost.rates import thin_effort
from cleave.core.cost.resident import STACK_BYTES
from cleave.core.cost.streams import stream_format
from cleave.core.cost.wire import DEVICE_BYTES, WireFormat, encoded_bytes
from cleave.core.model.decoder import Decoder, Head, Part, View
from cleave.core.model.keeping import KEEPINGS, Keeping
from cleave.core.model.shard import Shard
from cleave.core.plan.resident.stages import Holding, ResidentPlan
from cleave.core.plan.resident.timeline import AHEAD, FIRST, READING, row_priority, sequences_ahead
from cleave.core.schedule.accounts import Account, Seat
from cleave.core.schedule.desks import Desk
from cleave.core.schedule.pipeline import Course, Pipeline, Unit
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import DeviceId, Operand, OperandId, Task, TaskId
from cleave.errors import InfeasibleError
from cleave.protocol import messages
from cleave.protocol.programs import Backward, Collect, Forward, Hold, Program
from cleave.server.contract import Kind, Run
from cleave.server.operands import Operands, Tensor
from cleave.server.resident.activations import Activations, Batched
from cleave.server.resident.held_shard import HeldShard, hold
from cleave.server.resident.pass_lease import PassLease
from cleave.server.resident.readings import Accumulator, Reading, Stack

_LEAST_SPEED = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class UnitWork:
    """Work of a task that computes a unit."""

    run: Run
    unit: Unit
    message: messages.RunTask
    rows: int
    cols: int
    parts: list[tuple[Rectangle, object]] = field(default_factory=lambda: list[tuple[Rectangle, object]]())
    """The result, as far as it has arrived."""

    @property
    def kind(self) -> Kind:
        return self.unit.direction


@dataclass(frozen=True, slots=True, eq=False)
class ReadWork:
    """Work of a task that reads some accumulators of an account, stacked."""

    run: Run
    account: Account
    indexes: tuple[int, ...]
    """Their places among the shard's trained views."""
    message: messages.RunTask
    kind: ClassVar[Kind] = "gradients"

    def alone(self, operand: Operand, view: View) -> messages.RunTask:
        """Return the message that reads one of them by itself."""
        program = Collect(accumulator=operand.id, rows=view.height, cols=view.width)
        return msgspec.structs.replace(self.message, program=program)


@dataclass(frozen=True, slots=True, eq=False)
class HoldWork:
    """Work of a task that only sends weights; keeps new ones while they are in flight."""

    run: Run
    tensor: Tensor | None
    message: messages.RunTask
    kind: ClassVar[Kind] = "weights"


ResidentWork = UnitWork | ReadWork | HoldWork


class _Place(TypedDict):
    """Fields that forward and backward programs of a unit share."""

    parts: tuple[Part, ...]
    head: Head | None
    state: int
    first_row: int
    sequence: int
    is_slice: bool
    rotary_row: int


class ResidentTasks:
    def __init__(
        self,
        run: Run,
        decoder: Decoder,
        batch: Batched,
        plan: ResidentPlan,
        activations: Activations,
        *,
        format: WireFormat,
        gradient_format: WireFormat,
        operands: Operands,
        ids: Iterator[int],
        course: Course,
        lease: PassLease | None = None,
    ) -> None:
        self._run_ref = weakref.ref(run)  # the run holds these tasks: a cycle would keep weights until collected
        self._decoder, self._batch, self._plan, self._activations = decoder, batch, plan, activations
        self._format: WireFormat = format
        self._gradient_format: WireFormat = gradient_format
        self._operands, self._ids, self._tables_bytes = operands, ids, tables_bytes(batch)
        self._stage = {shard: number for number, stage in enumerate(plan.stages) for shard in stage.shards}
        self._ahead = sequences_ahead([stage.holders for stage in plan.stages], plan.lead)
        self.held: dict[Shard, HeldShard] = {
            shard: hold(decoder, shard, batch, operands, lease, is_trained=course != "forward") for shard in self._stage
        }
        self._lease = lease
        self._may_keep = course != "forward"
        """Whether backward follows, which starts from what forward, or a silent forward, keeps."""
        self.states: dict[Seat, Operand] = {}
        self.readings: dict[Account, Reading] = {}

    @property
    def _run(self) -> Run:
        run = self._run_ref()
        assert run is not None, "whoever asks for tasks holds their run"
        return run

    # -------------------------------------------------------------------------------------------- memory

    def set_desks(self, pipeline: Pipeline, memory_bytes: Callable[[DeviceId], int]) -> None:
        """Let devices serve their planned shards as memory allows; InfeasibleError if a shard fits on none."""
        served: dict[DeviceId, list[tuple[Shard, Holding]]] = {}
        for stage in self._plan.stages:
            for column in stage.columns:
                for holding in column.holdings:
                    served.setdefault(holding.device, []).append((column.shard, holding))
        for device, shards in served.items():
            kept = sum(self.held[shard].demand.trained_bytes for shard, _ in shards)
            bare = [self.need_bytes(shard, 0) for shard, _ in shards]
            for (shard, holding), need in zip(shards, bare, strict=True):
                others = kept - self.held[shard].demand.trained_bytes  # what its other shards keep,
                others += 0 if self._lease is None else self._lease.kept_bytes(device)
                others += max(bare) - need  # and what the largest of them needs to run
                keeps, room = holding.keeps if self._may_keep else "nothing", memory_bytes(device) - others
                slots = self._slots(shard, room, len(shards), keeps)
                if not slots:
                    keeps, slots = "nothing", self._slots(shard, room, len(shards))
                if slots:
                    pipeline.desks.add(shard, Desk(device, slots, max(holding.sequences, _LEAST_SPEED), keeps))
            if self._lease is not None:
                free = memory_bytes(device) - self._lease.kept_bytes(device) - self._taken_bytes(device, pipeline)
                self._lease.passes_leave(device, free)
        for shard in pipeline.unserved:
            holdings = self._plan.stages[self._stage[shard]].columns[shard.index].holdings
            offered = max(memory_bytes(holding.device) for holding in holdings)
            raise InfeasibleError(
                f"a shard needs {self.need_bytes(shard, 1) / 1e6:.3g} MB on a device, but the largest it was planned "
                f"for offers {offered / 1e6:.3g} MB; add devices or memory, or train with shorter sequences"
            )

    def desk_beside(
        self, shard: Shard, device: DeviceId, flops_per_s: float, memory_bytes: int, pipeline: Pipeline
    ) -> Desk | None:
        """A desk for a device at a shard beside those it already serves; None if it has no room for a sequence.

        It keeps for backward whatever leaves room for all sequences.
        """
        free_bytes = memory_bytes - self._taken_bytes(device, pipeline)
        may_keep = self._may_keep and bool(self.held[shard].demand.kv_width)
        for keeps in reversed(KEEPINGS) if may_keep else KEEPINGS[:1]:
            slots = self._slots(shard, free_bytes, 1, keeps)
            if slots == self._batch.sequences or (slots and keeps == "nothing"):
                return Desk(device, slots, flops_per_s, keeps)
        return None

    def _taken_bytes(self, device: DeviceId, pipeline: Pipeline) -> int:
        """Memory that the shards a device serves take, with as many sequences as it may have open."""
        return sum(self.need_bytes(shard, desk.slots, desk.keeps) for shard, desk in pipeline.desks.of(device))

    def _slots(self, shard: Shard, memory_bytes: int, shared_by: int, keeps: Keeping = "nothing") -> int:
        demand, most = self.held[shard].demand, self._batch.sequences
        return demand.sequences_within(memory_bytes, self._plan.chunk, self._tables_bytes, most, shared_by, keeps)

    def need_bytes(self, shard: Shard, open_sequences: int, keeps: Keeping = "nothing") -> int:
        """Memory that a shard takes on a device with `open_sequences`."""
        return self.held[shard].demand.memory_bytes(self._plan.chunk, open_sequences, self._tables_bytes, keeps)

    def wants_dx(self, shard: Shard) -> bool:
        return self._stage[shard] > 0 or self._batch.wants_dx

    # -------------------------------------------------------------------------------------------- tasks

    def unit_task(self, unit: Unit) -> Task:
        seat = unit.seat
        held = self.held[seat.shard]
        first, last = self._activations.rows(seat.sequence, unit.chunk)
        operands = [*held.operands, self._state(seat)]
        if unit.direction == "backward":
            operands += (one.operand for one in self.reading(seat.account).accumulators if one.wanted)
            operands += (self._leased_accumulator(view) for view, _ in held.leased)
        operands += self.read_by(unit)
        stream = "activation" if unit.direction == "forward" else "activation gradient"
        rows, cols, format = last - first, self._decoder.hidden, stream_format(stream, self._format)
        if unit.is_silent or (unit.direction == "backward" and not self.wants_dx(seat.shard)):
            rows, cols, format = 1, 1, "fp32"
        elif unit.direction == "forward" and held.head is not None:
            cols, format = 2, "fp32"
        id = TaskId(next(self._ids))
        ahead = self._ahead[self._stage[seat.shard]]
        priority = row_priority(seat.sequence, ahead, is_backward=unit.direction == "backward")
        message = messages.RunTask(task=id, priority=priority, format=format, program=self._program(unit))
        return Task(
            id=id,
            device=seat.device,
            group=seat,
            priority=priority,
            operands=tuple(operands),
            rows=rows,
            cols=cols,
            result_bytes=held.demand.workspace_bytes(last - first),
            flops=held.demand.flops(
                unit.direction,
                first - seat.sequence * self._batch.sequence,
                last - first,
                is_silent=unit.is_silent,
                keeps=seat.keeps,
            ),
            effort=float(thin_effort(last - first)),
            up_bytes=encoded_bytes(format, rows, cols),
            is_bound=True,
            work=UnitWork(self._run, unit, message, rows, cols),
        )

    def read_tasks(self, account: Account) -> Iterator[Task]:
        """Yield tasks that read every accumulator of which parts are missing."""
        reading = self.reading(account)
        reading.has_begun = True
        views = [view for view, _ in self.held[account.shard].trained]
        missing = {index: views[index] for index, one in enumerate(reading.accumulators) if one.wanted}
        for indexes in self._stacks(missing):
            stack = tuple(reading.accumulators[index] for index in indexes)
            for accumulator in stack:
                accumulator.stack = stack
            operands = tuple(accumulator.operand for accumulator in stack)
            rows, cols = sum(views[index].height for index in indexes), views[indexes[0]].width
            first, *below = (operand.id for operand in operands)
            program = Collect(accumulator=first, rows=rows, cols=cols, below=tuple(below))
            id = TaskId(next(self._ids))
            message = messages.RunTask(task=id, priority=READING, format=self._gradient_format, program=program)
            yield Task(
                id=id,
                device=account.device,
                group=stack,
                priority=READING,
                operands=operands,
                rows=rows,
                cols=cols,
                result_bytes=0,
                up_bytes=encoded_bytes(self._gradient_format, rows, cols),
                is_bound=True,
                work=ReadWork(self._run, account, indexes, message),
            )

    def _stacks(self, views: dict[int, View]) -> Iterator[tuple[int, ...]]:
        """Group views of equal width into stacks of at most STACK_BYTES, or of one view."""
        stacks: dict[int, list[int]] = {}
        sizes: dict[int, int] = {}
        for index, view in views.items():
            size = encoded_bytes(self._gradient_format, view.height, view.width)
            if view.width in stacks and sizes[view.width] + size > STACK_BYTES:
                yield tuple(stacks.pop(view.width))
            sizes[view.width] = size + (sizes[view.width] if view.width in stacks else 0)
            stacks.setdefault(view.width, []).append(index)
        yield from map(tuple, stacks.values())

    def hold_tasks(self, parameter: int, tensor: Tensor, pipeline: Pipeline) -> Iterator[Task]:
        """Yield tasks that send every holder of a parameter its part of the new numbers."""
        for shard, held in self.held.items():
            views = [view for view, _ in held.trained if view.parameter == parameter]
            operands = tuple(self._operands.slice(tensor, view.rows, view.cols).operand for view in views)
            for desk in pipeline.desks.at(shard) if operands else ():
                yield self._hold_task(desk.device, operands, tensor)

    def first_hold_tasks(
        self, pipeline: Pipeline, memory_bytes: Callable[[DeviceId], int], holds: Callable[[DeviceId, Operand], bool]
    ) -> Iterator[Task]:
        """Yield tasks that send devices the weights they lack, before the first unit reaches them.

        Those of a device's first shard go before any rows, which it cannot compute without them. None go to devices
        whose shards do not fit at once: one would evict the other.
        """
        begun: set[DeviceId] = set()
        for shard, held in self.held.items():
            for desk in pipeline.desks.at(shard):
                priority = AHEAD if desk.device in begun else FIRST
                begun.add(desk.device)
                served = sum(
                    self.need_bytes(other, one.slots, one.keeps) for other, one in pipeline.desks.of(desk.device)
                )
                if served > memory_bytes(desk.device):
                    continue
                missing = tuple(operand for operand in held.operands if not holds(desk.device, operand))
                if missing:
                    yield self._hold_task(desk.device, missing, None, priority)

    def _hold_task(
        self, device: DeviceId, operands: tuple[Operand, ...], tensor: Tensor | None, priority: int = AHEAD
    ) -> Task:
        program = Hold(operands=tuple(operand.id for operand in operands))
        id = TaskId(next(self._ids))
        message = messages.RunTask(task=id, priority=priority, format="fp32", program=program)
        return Task(
            id=id,
            device=device,
            group=self._run if tensor is not None else self,
            priority=priority,
            operands=operands,
            rows=1,
            cols=1,
            result_bytes=DEVICE_BYTES,
            up_bytes=DEVICE_BYTES,
            is_bound=True,
            work=HoldWork(self._run, tensor, message),
        )

    # -------------------------------------------------------------------------------------------- what devices make

    def reading(self, account: Account) -> Reading:
        if account not in self.readings:
            part = cast("dict[int, list[Rectangle]] | None", account.part)
            self.readings[account] = Reading(
                [
                    Accumulator(
                        self._operands.made(view.area * DEVICE_BYTES),
                        [Rectangle(0, view.height, 0, view.width)] if part is None else list(part[index]),
                        [account],
                    )
                    for index, (view, _) in enumerate(self.held[account.shard].trained)
                ]
            )
        return self.readings[account]

    def join(self, account: Account, other: Account) -> list[Stack]:
        """Let a new account add to what is wanted of another one of its device and has not begun to arrive.

        Both then miss the same parts of it, which need to be read only once. Return the stacks that are to be
        abandoned: they are read with the new account.
        """
        ours, theirs = self.reading(account).accumulators, self.readings[other].accumulators
        places = {their: index for index, their in enumerate(theirs)}
        joined: list[Stack] = []
        for stack in dict.fromkeys(one.stack for one in theirs):
            if stack and all(one in places and one.may_join(ours[places[one]], account) for one in stack):
                for one in stack:
                    one.accounts.append(account)
                    ours[places[one]] = one
                joined.append(stack)
        return joined

    def forget(self, what: Seat | Account) -> tuple[tuple[object, ...], tuple[OperandId, ...]]:
        """Forget a seat or an account; return the groups of its tasks, and what its device still keeps for it alone."""
        if isinstance(what, Seat):
            return (what,), (self.states.pop(what).id,) if what in self.states else ()
        accumulators = self.readings.pop(what).accumulators if what in self.readings else []
        for one in accumulators:
            one.accounts.remove(what)
        own = [one for one in accumulators if not one.accounts]
        groups = dict.fromkeys(one.stack for one in own if one.stack)
        return tuple(groups), tuple(one.operand.id for one in own if not one.is_added)

    def forget_all(self) -> tuple[tuple[object, ...], tuple[OperandId, ...]]:
        """Forget every seat and account; return all groups of tasks, and what devices made for them."""
        forgotten = [self.forget(what) for what in (*self.states, *self.readings)]
        groups = tuple(group for groups, _ in forgotten for group in groups)
        return (*groups, self), tuple(operand for _, operands in forgotten for operand in operands)

    def _leased_accumulator(self, view: View) -> Operand:
        assert self._lease is not None, "else nothing is leased"
        return self._lease.accumulator(view)

    def _state(self, seat: Seat) -> Operand:
        if seat not in self.states:
            self.states[seat] = self._operands.made(self.held[seat.shard].demand.state_bytes(seat.keeps))
        return self.states[seat]

    # -------------------------------------------------------------------------------------------- programs

    def _program(self, unit: Unit) -> Program:
        seat, held = unit.seat, self.held[unit.seat.shard]
        read = {name: self._whole(tensor).id for name, tensor in self._tensors(unit).items()}
        rotary = self._activations.rotary(seat.sequence, unit.chunk)
        place = _Place(
            parts=held.parts,
            head=held.head,
            state=self.states[seat].id,
            first_row=self._activations.rows(seat.sequence, unit.chunk)[0] - seat.sequence * self._batch.sequence,
            sequence=self._batch.sequence,
            is_slice=seat.shard.of > 1,
            rotary_row=rotary[1] if rotary else 0,
        )
        if unit.direction == "forward":
            return Forward(**place, **read, is_silent=unit.is_silent, keeps=seat.keeps)
        sums = zip(held.trained, self.readings[seat.account].accumulators, strict=True)
        accumulators = ((weight, one.operand.id) for (_, weight), one in sums if one.wanted)
        leased = ((weight, self._leased_accumulator(view).id) for view, weight in held.leased)
        return Backward(
            **place,
            **read,
            accumulators=(*accumulators, *leased),
            wants_dx=not unit.is_silent and self.wants_dx(seat.shard),
        )

    def read_by(self, unit: Unit) -> list[Operand]:
        """Operands a unit reads besides weights."""
        return [self._whole(tensor) for tensor in self._tensors(unit).values()]

    def _tensors(self, unit: Unit) -> dict[str, Tensor]:
        """Tensors a unit reads besides weights, by their names in its program."""
        seat, between, stage = unit.seat, self._activations, self._stage[unit.seat.shard]
        found = {"x": between.x(stage, seat.sequence, unit.chunk)}
        if unit.direction == "backward":
            found["dy"] = between.dy(stage, seat.sequence, unit.chunk)
        mask, rotary = between.mask(seat.sequence), between.rotary(seat.sequence, unit.chunk)
        targets = between.targets(seat.sequence, unit.chunk)
        if mask is not None:
            found["mask"] = mask
        if rotary is not None:
            found["rotary"] = rotary[0]
        if targets is not None and self.held[seat.shard].head is not None:
            found["targets"] = targets
        return found

    def _whole(self, tensor: Tensor) -> Operand:
        return self._operands.slice(tensor, (0, tensor.rows), (0, tensor.cols)).operand
