"""The numbers of a pass through resident layers: results are decoded into activations and gradients.

Called off the loop, from several threads. Decoded results also go to the audit of their account, if there is one.
Knows no devices and no plan.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import cast

import numpy as np

from cleave.core.cost.wire import WireFormat
from cleave.core.model.decoder import Decoder, View
from cleave.core.schedule.accounts import Account
from cleave.core.schedule.pipeline import Unit
from cleave.core.schedule.rectangles import Rectangle, within, without
from cleave.core.schedule.tasks import OperandId, Task
from cleave.core.verify.recompute import is_plausible
from cleave.errors import WrongResult
from cleave.protocol import messages
from cleave.protocol.frames import Buffer
from cleave.protocol.numbers import Codec, Matrix
from cleave.server.operands import Operands
from cleave.server.resident.activations import Activations
from cleave.server.resident.audit_case import AuditCase, Replay
from cleave.server.resident.audits import AuditTotals
from cleave.server.resident.readings import Accumulator


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitResult:
    """The complete result of a unit, as received."""

    unit: Unit
    stage: int
    rows: int
    cols: int
    parts: tuple[tuple[Rectangle, object], ...]
    message: messages.RunTask
    read: tuple[OperandId, ...]
    """Operands it read besides weights, if it is audited."""
    is_wanted: bool
    """Whether it carries numbers, not only that the unit is done."""
    activations: Activations
    case: AuditCase | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GradientPart:
    """A rectangle of a weight's gradient, and which parts of it were not returned before."""

    account: Account
    accumulator: Accumulator
    index: int
    view: View
    part: Rectangle
    payload: object
    """Numbers of a stack of gradients, of which this is one."""
    place: tuple[int, int]
    """Row of the stack at which this part begins, and rows of the stack."""
    wanted: tuple[Rectangle, ...]
    message: messages.RunTask
    case: AuditCase | None


class GradientSum:
    """A sum of rectangles. What comes first is copied, so that no pass over memory is spent on zeros."""

    def __init__(self, rows: int, cols: int) -> None:
        self._whole = Rectangle(0, rows, 0, cols)
        self._values: Matrix = np.empty((rows, cols), dtype=np.float32)
        self._written: list[Rectangle] = []
        """Disjoint parts that hold numbers."""

    def add(self, part: Rectangle, values: Matrix) -> None:
        for known in within(self._written, part):
            self._at(known)[...] += _cut(values, part, known)
        for gap in self._gaps(part):
            self._at(gap)[...] = _cut(values, part, gap)
            self._written.append(gap)

    def room(self, part: Rectangle) -> Matrix | None:
        """Return where the numbers of a part belong if they are the first; they count once `filled` is called."""
        return self._at(part) if self._gaps(part) == [part] else None

    def filled(self, part: Rectangle) -> None:
        self._written.append(part)

    def complete(self) -> Matrix:
        """Return the sum so far."""
        for gap in self._gaps(self._whole):
            self._at(gap)[...] = 0.0
        self._written = [self._whole]
        return self._values

    def _gaps(self, part: Rectangle) -> list[Rectangle]:
        gaps = [part]
        for known in self._written:
            gaps = without(gaps, known)
        return gaps

    def _at(self, part: Rectangle) -> Matrix:
        return self._values[part.top : part.bottom, part.left : part.right]


def _cut(values: Matrix, frame: Rectangle, part: Rectangle) -> Matrix:
    """Return a part of values that fill a frame."""
    inside = part.moved(-frame.top, -frame.left)
    return values[inside.top : inside.bottom, inside.left : inside.right]


class ResidentResults:
    def __init__(
        self, decoder: Decoder, codec: Codec, operands: Operands, replay: Replay | None, totals: AuditTotals
    ) -> None:
        self._decoder, self._codec, self._operands, self._replay, self._totals = (
            decoder,
            codec,
            operands,
            replay,
            totals,
        )
        self._adding = threading.Lock()
        self._gradients: dict[int, GradientSum] = {}
        self.takes_anything = False
        """Store implausible numbers too, as everything is audited."""
        self.is_plausible = True
        """Whether all numbers of the attempt were plausible."""

    def begin(self, *, takes_anything: bool) -> None:
        """Begin an attempt."""
        self.takes_anything, self.is_plausible = takes_anything, True

    def expect_gradients(self) -> None:
        """Discard the gradients of an aborted backward pass."""
        self._gradients = {}

    def gradient(self, parameter: int) -> Matrix | None:
        """Return the gradient of a parameter, zero where nothing arrived; None if it is not trained."""
        shape = self._decoder.parameters[parameter]
        if not shape.is_trained:
            return None
        with self._adding:
            return self._sum(parameter).complete()

    def _sum(self, parameter: int) -> GradientSum:
        found = self._gradients.get(parameter)
        if found is None:
            shape = self._decoder.parameters[parameter]
            assert shape.is_trained, "only trained parameters are read"
            found = self._gradients[parameter] = GradientSum(shape.rows, shape.cols)
        return found

    def check(self, task: Task, part: Rectangle, payload: object, *, is_strict: bool) -> object:
        raise AssertionError("what a fused unit computes cannot be checked by projection, only audited")

    def keep(self, item: object) -> None:
        with np.errstate(all="ignore"):  # a device may return anything
            match item:
                case UnitResult():
                    self._keep_unit(item)
                case GradientPart():
                    self._keep_gradient(item)
                case _:
                    raise AssertionError(f"a pass keeps units and gradients, not {type(item).__name__}")

    def audit(self, case: object) -> str:
        assert self._replay is not None, "else nothing is audited"
        started = time.thread_time()
        try:
            with np.errstate(all="ignore"):
                return cast("AuditCase", case).judge(self._replay, self._operands)
        finally:
            self._totals.busy_s += time.thread_time() - started

    def _keep_unit(self, result: UnitResult) -> None:
        values = np.empty((result.rows, result.cols), dtype=np.float32)
        for part, payload in result.parts:
            self._decode(payload, result.message.format, part, values[part.top : part.bottom, part.left : part.right])
        self._inspect(values)
        unit = result.unit
        sequence, chunk = unit.seat.sequence, unit.chunk
        if result.case is not None:
            result.case.keep_unit(unit, result.message, result.read, values, self._operands)
        if not result.is_wanted:
            return
        if unit.direction == "forward":
            result.activations.put_forward(result.stage, unit.seat.shard.index, sequence, chunk, values)
        else:
            result.activations.put_backward(result.stage, sequence, chunk, values)

    def _keep_gradient(self, result: GradientPart) -> None:
        part, view = result.part, result.view
        first, rows = result.place
        stack = memoryview(cast("Buffer", result.payload))
        row_bytes = len(stack) // rows
        own = stack[first * row_bytes : (first + part.rows) * row_bytes]
        if result.message.format == "fp32":
            values = np.frombuffer(own, dtype="<f4").reshape(part.rows, part.cols)
        elif self._is_first(result, own):
            return
        else:
            values = np.empty((part.rows, part.cols), dtype=np.float32)
            self._decode(own, result.message.format, part, values)
        self._inspect(values)
        if result.case is not None:
            result.case.keep_gradient(result.index, result.message, part, values)
        with self._adding:
            total = self._sum(view.parameter)
            for wanted in result.wanted:
                total.add(wanted.moved(view.rows[0], view.cols[0]), _cut(values, part, wanted))

    def _is_first(self, result: GradientPart, own: memoryview) -> bool:
        """Decode numbers where they belong, if nothing was there and nobody else reads them."""
        part, view = result.part, result.view
        if result.case is not None or result.wanted != (part,):
            return False
        with self._adding:
            total, place = self._sum(view.parameter), part.moved(view.rows[0], view.cols[0])
            values = total.room(place)
            if values is None:
                return False
            self._decode(own, result.message.format, part, values)
            self._inspect(values)  # what it refuses leaves a gap, as before
            total.filled(place)
            return True

    def _inspect(self, values: Matrix) -> None:
        """Refuse numbers that no model in training has, unless they will be audited."""
        if not is_plausible(values):
            self.is_plausible = False
            if not self.takes_anything:
                raise WrongResult("numbers that are not finite, or too large for any model")

    def _decode(self, payload: object, format: WireFormat, part: Rectangle, values: Matrix) -> None:
        if format == "fp32":
            np.copyto(values, np.frombuffer(cast("Buffer", payload), dtype="<f4").reshape(part.rows, part.cols))
        else:
            decoded = values if values.flags.c_contiguous else np.empty((part.rows, part.cols), dtype=np.float32)
            self._codec.decode_into(cast("Buffer", payload), format, decoded)
            if decoded is not values:
                np.copyto(values, decoded)
