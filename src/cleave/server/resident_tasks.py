"""One batch on its way through columns: what it holds, and its units as tasks and programs.

`passes.py` moves it on; this module only knows how things are named: a unit's operands, a seat's state, an account's
accumulators. For callers in other threads it is a `Pass`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, cast

import numpy as np

from cleave.core.cost.gemm import DEVICE_BYTES, WireFormat, thin_effort
from cleave.core.plan.resident.stages import ColumnPlan
from cleave.core.schedule.pipeline import Account, Column, Course, Desk, Direction, Flow, Seat, Unit
from cleave.core.schedule.rectangles import Rectangle
from cleave.core.schedule.tasks import DeviceId, Operand, Task, TaskId
from cleave.errors import InfeasibleError
from cleave.protocol.decoder import Batch, Gradients, Stack
from cleave.protocol.numbers import Matrix, encoded_bytes
from cleave.protocol.programs import Backward, Collect, Forward
from cleave.server.activations import Boundaries
from cleave.server.operands import Staging, Tensor
from cleave.server.residents import Resident, resident, slots
from cleave.server.segments import Share

_BACKWARD, _FORWARD, _READING, _AHEAD = 0, 1, 2, 3  # priorities, as of products


@dataclass(slots=True, eq=False)
class Reading:
    """An account's accumulators, and what of them has not come; all in the order of the column's trained views."""

    operands: list[Operand]
    wanted: dict[int, list[Rectangle]]
    has_begun: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class UnitWork:
    """What a task of a unit is about."""

    owner: Any
    run: PassRun
    unit: Unit
    values: Matrix
    """The result, as far as it has come."""


@dataclass(frozen=True, slots=True, eq=False)
class ReadWork:
    """What a task that reads an accumulator is about."""

    owner: Any
    run: PassRun
    account: Account
    index: int


@dataclass(frozen=True, slots=True, eq=False)
class HoldWork:
    """What a task that only brings weights is about."""

    owner: Any
    tensor: Tensor


class PassRun:
    def __init__(
        self,
        owner: Any,
        stack: Stack,
        batch: Batch,
        *,
        format: WireFormat,
        staging: Staging,
        ids: Iterator[int],
        go_back: Callable[[PassRun], None],
        send_ahead: Callable[[PassRun, int, Tensor], None],
    ) -> None:
        self._owner, self._staging, self._ids = owner, staging, ids
        self._go_back, self._send_ahead = go_back, send_ahead
        self.stack, self.batch = stack, batch
        self.format: WireFormat = format
        self.outputs: Future[Matrix] = Future()
        self.returned: Future[Gradients] = Future()
        self.course: Course = "forward"
        self.dy: Matrix | None = None
        self.plan: ColumnPlan
        self.names: tuple[str, ...]
        self.boundaries: Boundaries | None = None
        self.flow: Flow
        self.residents: dict[Column, Resident] = {}
        self.gradients: dict[int, Matrix] = {}
        self.states: dict[Seat, Operand] = {}
        self.readings: dict[Account, Reading] = {}
        self.regions: dict[Seat | Account, set[TaskId]] = {}
        self._early: dict[tuple[Seat, Direction], dict[int, tuple[Unit, Matrix]]] = {}
        """Results that came before those of the chunks ahead of theirs."""
        self._unsettled: dict[int, set[Column]] = {}
        """Trained parameters, and the columns whose part of their gradients is not there."""
        self._arrivals: SimpleQueue[tuple[int, Matrix] | None] = SimpleQueue()
        self.has_delivered = False
        """Some gradients are in the caller's hands: they cannot be made again."""
        self.unable: set[DeviceId] = set()
        """Who could not do a unit of it."""
        self.barred: set[DeviceId] = set()
        """Whose work in it was found wrong."""

    def backward(self, dy: Matrix | None) -> Future[Gradients]:
        if dy is not None:
            self.dy = dy
            self._go_back(self)
        return self.returned

    def arrivals(self) -> Iterator[tuple[int, Matrix]]:
        yield from iter(self._arrivals.get, None)

    def publish(self, parameter: int, operand: Tensor) -> None:
        self._send_ahead(self, parameter, operand)

    @property
    def goes_back(self) -> bool:
        return self.course != "forward"

    @property
    def between(self) -> Boundaries:
        assert self.boundaries is not None, "laid out"
        return self.boundaries

    # -------------------------------------------------------------------------------------------- layout

    def follows(self, plan: ColumnPlan, names: tuple[str, ...]) -> bool:
        """Whether it is laid out as a plan says, whatever that foresees."""
        return _arrangement(self.plan, self.names) == _arrangement(plan, names)

    def lay_out(
        self,
        plan: ColumnPlan,
        names: tuple[str, ...],
        memory_bytes: Callable[[DeviceId], int],
        late: Collection[DeviceId],
    ) -> None:
        """Columns, desks and room for a plan; what is between its stages stays for a backward of its own."""
        slices = [len(stage.slices) for stage in plan.stages]
        self.plan, self.names = plan, names
        if self.course != "backward" or self.boundaries is None:
            self.boundaries = Boundaries(
                self.batch,
                slices,
                chunk=plan.chunk,
                has_head=self.stack.head is not None,
                staging=self._staging,
                format=self.format,
            )
        shares = {
            Column(number, index): Share(first=stage.first, count=stage.count, index=index, of=len(stage.slices))
            for number, stage in enumerate(plan.stages)
            for index in range(len(stage.slices))
        }
        self.residents = {
            column: resident(self.stack, share, self.batch, self._staging) for column, share in shares.items()
        }
        self.flow = Flow(
            slices,
            sequences=self.batch.sequences,
            chunks=self.boundaries.chunks,
            course=self.course,
            trained={column.stage for column, held in self.residents.items() if held.trained},
        )
        self._early.clear()
        self._set_desks(memory_bytes)
        for desk in itertools.chain.from_iterable(self.flow.desks.values()):
            desk.is_late = desk.device in late
        if self.goes_back:
            self.boundaries.expect_gradients(self.dy)
            self.gradients = {
                number: np.zeros((parameter.rows, parameter.cols), dtype=np.float32)
                for number, parameter in enumerate(self.stack.parameters)
                if parameter.is_trained
            }
            self._unsettled = {number: set() for number in self.gradients}
            for column, held in self.residents.items():
                for view, _ in held.trained:
                    self._unsettled[view.parameter].add(column)

    def _set_desks(self, memory_bytes: Callable[[DeviceId], int]) -> None:
        """Who can serve a column as planned does; InfeasibleError where nobody can."""
        served: dict[DeviceId, list[tuple[Column, float]]] = {}
        for column in self.flow.columns:
            for place in self.plan.stages[column.stage].slices[column.slice]:
                served.setdefault(DeviceId(self.names[place.device]), []).append((column, place.sequences))
        for device, columns in served.items():
            held = [self.residents[column] for column, _ in columns]
            kept = sum(one.trained_bytes for one in held) if self.goes_back else 0
            bare = [self.need_bytes(column, 0) for column, _ in columns]
            for (column, speed), need in zip(columns, bare, strict=True):
                own = self.residents[column].trained_bytes if self.goes_back else 0
                others = kept - own + max(bare) - need  # what they keep, and what one of them needs at a time
                room = self.slots(column, memory_bytes(device) - others, share=len(columns))
                if room:
                    self.flow.desks[column].append(Desk(device, room, max(speed, 1e-9)))
        for column in self.flow.unserved:
            places = self.plan.stages[column.stage].slices[column.slice]
            offered = max(memory_bytes(DeviceId(self.names[place.device])) for place in places)
            need = self.need_bytes(column, 1)
            raise InfeasibleError(
                f"a column needs {need / 1e6:.3g} MB on a device, but the largest it was planned for offers "
                f"{offered / 1e6:.3g} MB; lend more memory or devices, or train with shorter sequences"
            )

    def deliver(self, column: Column) -> None:
        """All of a column's gradients are there: those of parameters that no other column has go out."""
        for number, columns in list(self._unsettled.items()):
            columns.discard(column)
            if not columns:
                del self._unsettled[number]
                self.has_delivered = True
                self._arrivals.put((number, self.gradients[number]))

    def end_arrivals(self) -> None:
        self._arrivals.put(None)

    def slots(self, column: Column, memory_bytes: int, share: int = 1) -> int:
        """How many sequences a device with so much memory, shared with other columns, could have open; 0: none."""
        return slots(self.residents[column], memory_bytes, self.plan.chunk, self.batch, self.goes_back, share)

    def need_bytes(self, column: Column, open_sequences: int) -> int:
        return self.residents[column].need_bytes(self.plan.chunk, self.batch, open_sequences, self.goes_back)

    def wants_dx(self, column: Column) -> bool:
        return column.stage > 0 or self.batch.wants_dx

    def gathered(self) -> Gradients:
        numbers = range(len(self.stack.parameters))
        return Gradients(
            dx=self.between.dx if self.batch.wants_dx else None,
            parameters=tuple(self.gradients.get(number) for number in numbers),
        )

    # -------------------------------------------------------------------------------------------- tasks

    def unit_task(self, unit: Unit) -> Task:
        seat = unit.seat
        held = self.residents[seat.column]
        first, last = self.between.rows(seat.sequence, unit.chunk)
        operands = [*held.operands, self._state(seat)]
        if unit.direction == "backward":
            operands += self.reading(seat.account).operands
        operands += self.brought(unit)
        rows, cols, format = last - first, self.stack.hidden, self.format
        if unit.is_silent or (unit.direction == "backward" and not self.wants_dx(seat.column)):
            rows, cols, format = 1, 1, "fp32"
        elif unit.direction == "forward" and held.head is not None:
            cols, format = 2, "fp32"
        task = Task(
            id=TaskId(next(self._ids)),
            device=seat.device,
            priority=_BACKWARD if unit.direction == "backward" else _FORWARD,
            operands=tuple(operands),
            rows=rows,
            cols=cols,
            result_bytes=held.room_bytes(last - first, self.batch.sequence),
            flops=held.flops(last - first, self.batch.sequence, unit.direction),
            effort=float(thin_effort(last - first)),
            up_bytes=encoded_bytes(format, rows, cols),
            is_bound=True,
            work=UnitWork(self._owner, self, unit, np.empty((rows, cols), dtype=np.float32)),
        )
        self.regions.setdefault(seat, set()).add(task.id)
        return task

    def read_tasks(self, account: Account) -> list[Task]:
        """Every accumulator of which something is wanted."""
        reading = self.reading(account)
        reading.has_begun = True
        tasks = [
            Task(
                id=TaskId(next(self._ids)),
                device=account.device,
                priority=_READING,
                operands=(reading.operands[index],),
                rows=view.height,
                cols=view.width,
                result_bytes=0,
                up_bytes=encoded_bytes(self.format, view.height, view.width),
                is_bound=True,
                work=ReadWork(self._owner, self, account, index),
            )
            for index, (view, _) in enumerate(self.residents[account.column].trained)
            if reading.wanted.get(index)
        ]
        self.regions.setdefault(account, set()).update(task.id for task in tasks)
        return tasks

    def hold_tasks(self, parameter: int, tensor: Tensor) -> Iterator[Task]:
        """For every device that holds some of a parameter, its part of the new numbers."""
        for column, held in self.residents.items():
            views = [view for view, _ in held.trained if view.parameter == parameter]
            operands = tuple(self._staging.slice(tensor, view.rows, view.cols).operand for view in views)
            for desk in self.flow.desks[column] if operands else ():
                yield Task(
                    id=TaskId(next(self._ids)),
                    device=desk.device,
                    priority=_AHEAD,
                    operands=operands,
                    rows=1,
                    cols=1,
                    result_bytes=DEVICE_BYTES,
                    up_bytes=DEVICE_BYTES,
                    is_bound=True,
                    work=HoldWork(self._owner, tensor),
                )

    def reading(self, account: Account) -> Reading:
        if account not in self.readings:
            trained = self.residents[account.column].trained
            part = cast("dict[int, list[Rectangle]] | None", account.part)
            self.readings[account] = Reading(
                [self._staging.made(view.area * DEVICE_BYTES) for view, _ in trained],
                {index: [Rectangle(0, view.height, 0, view.width)] for index, (view, _) in enumerate(trained)}
                if part is None
                else {index: list(parts) for index, parts in part.items()},
            )
        return self.readings[account]

    def _state(self, seat: Seat) -> Operand:
        if seat not in self.states:
            self.states[seat] = self._staging.made(self.residents[seat.column].state_bytes(self.batch.sequence))
        return self.states[seat]

    def in_order(self, unit: Unit, values: Matrix) -> Iterator[tuple[Unit, Matrix]]:
        """What can be put in its place now that a unit's result is there: chunk after chunk, however they come."""
        seat, direction = unit.seat, unit.direction
        waiting = self._early.setdefault((seat, direction), {})
        place = unit.chunk if direction == "forward" else self.between.chunks - 1 - unit.chunk
        waiting[place] = unit, values
        while seat.done[direction] in waiting:
            yield waiting.pop(seat.done[direction])

    # -------------------------------------------------------------------------------------------- programs

    def unit_program(self, unit: Unit) -> Forward | Backward:
        seat, held = unit.seat, self.residents[unit.seat.column]
        operands: dict[str, Any] = {name: self._whole(tensor).id for name, tensor in self._tensors(unit).items()}
        rotary = self.between.rotary(seat.sequence, unit.chunk)
        place: dict[str, Any] = {
            "parts": held.parts,
            "head": held.head,
            "state": self.states[seat].id,
            "first_row": self.between.rows(seat.sequence, unit.chunk)[0] - seat.sequence * self.batch.sequence,
            "sequence": self.batch.sequence,
            "is_slice": held.is_slice,
            "rotary_row": rotary[1] if rotary else 0,
        }
        if unit.direction == "forward":
            return Forward(**place, **operands, is_silent=unit.is_silent)
        accumulators = [operand.id for operand in self.readings[seat.account].operands]
        return Backward(
            **place,
            **operands,
            accumulators=tuple(zip((weight for _, weight in held.trained), accumulators, strict=True)),
            wants_dx=not unit.is_silent and self.wants_dx(seat.column),
        )

    def read_program(self, account: Account, index: int) -> Collect:
        view, _ = self.residents[account.column].trained[index]
        accumulator = self.readings[account].operands[index]
        return Collect(accumulator=accumulator.id, rows=view.height, cols=view.width)

    def brought(self, unit: Unit) -> list[Operand]:
        """What a unit reads beside weights."""
        return [self._whole(tensor) for tensor in self._tensors(unit).values()]

    def _tensors(self, unit: Unit) -> dict[str, Tensor]:
        """What a unit reads beside weights, by the names of its program."""
        seat, between = unit.seat, self.between
        found = {"x": between.x(seat.column.stage, seat.sequence, unit.chunk)}
        if unit.direction == "backward":
            found["dy"] = between.dy(seat.column.stage, seat.sequence, unit.chunk)
        mask, rotary = between.mask(seat.sequence), between.rotary(seat.sequence, unit.chunk)
        targets = between.targets(seat.sequence, unit.chunk)
        if mask is not None:
            found["mask"] = mask
        if rotary is not None:
            found["rotary"] = rotary[0]
        if targets is not None and self.residents[seat.column].head is not None:
            found["targets"] = targets
        return found

    def _whole(self, tensor: Tensor) -> Operand:
        return self._staging.slice(tensor, (0, tensor.rows), (0, tensor.cols)).operand


def _arrangement(plan: ColumnPlan, names: tuple[str, ...]) -> object:
    """Who holds what, and how long chunks are."""
    stages = [
        (stage.first, stage.count, [[names[share.device] for share in column] for column in stage.slices])
        for stage in plan.stages
    ]
    return plan.chunk, stages
