"""One block of a matrix product, computed while its operands arrive and returned in rectangles.

Strips of both operands alternate, so in layout nt the computable part grows as a square: new columns against the rows
before, then new rows against all columns so far. In tn the block is a sum over strips, returned at the end; in nn rows
follow once b is complete. Rectangles are about 4 MB, so that one uploads while the next is computed; their columns end
where the server verifies them. This module picks the next rectangle; the worker runs and sends it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cleave.core.schedule.rectangles import Rectangle
from cleave.device.kernels import Array, Kernel
from cleave.device.store import HeldOperand, OperandStore
from cleave.errors import ProtocolError
from cleave.protocol.messages import CHECKED_COLUMNS
from cleave.protocol.programs import GemmProgram

_RESULT_ELEMENTS = 1 << 20  # about 4 MB: one part of a payload
_MIN_SIDE = 512
"""Fewest rows, columns or inner rows per product: BLAS repacks the other operand for each; 128 was 50% slower."""
_MAX_WIDTH = 8 * _MIN_SIDE
"""Most columns of a rectangle: 512 rows of a whole vocabulary would exceed a message, and many a device's memory."""


def _do_nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Chunk:
    """A computation that is ready; `run` blocks and is safe in any thread."""

    run: Callable[[], Array]
    part: Rectangle | None
    """The rectangle of the block it yields; None while a sum is incomplete."""
    flops: float
    rows: float = math.inf
    """Rows that share each reading of the weights, where that limits the speed."""
    skip: Callable[[], None] = _do_nothing
    """Instead of `run`: count the chunk as done without computing it."""


class GemmTask:
    """A block of a product; see `DeviceTask`."""

    def __init__(self, program: GemmProgram, store: OperandStore, kernel: Kernel) -> None:
        self._program, self._store, self._kernel = program, store, kernel
        self._done_rows = self._done_cols = self._done_inner = 0
        self._pending: list[Rectangle] = []
        self._sum: Array = None

    @property
    def finished(self) -> bool:
        whole = (self._program.rows, self._program.cols)
        return not self._pending and (self._done_rows, self._done_cols) == whole

    @property
    def room_bytes(self) -> int:
        return 4 * self._program.rows * self._program.cols

    @property
    def only_returns(self) -> bool:
        """Whether the sum is complete: further chunks compute nothing, but each holds a copy until it is sent."""
        return self._program.layout == "tn" and bool(self._pending)

    def next_chunk(self) -> Chunk | None:
        """Return the next chunk; None until more strips arrive."""
        terms = [(self._store.get(a), self._store.get(b)) for a, b in self._program.terms]
        pairs = [(a, b) for a, b in terms if a is not None and b is not None]
        if len(pairs) < len(terms):
            return None
        _check_shapes(self._program, pairs)
        if self._program.layout == "tn":
            return self._next_sum(pairs)
        if not self._pending:
            self._grow(pairs)
        if not self._pending:
            return None
        part = self._pending.pop(0)
        return Chunk(lambda: self._multiply(pairs, part), part, 2.0 * part.area * self._inner(pairs))

    def _grow(self, pairs: list[tuple[HeldOperand, HeldOperand]]) -> None:
        program = self._program
        rows = min(a.ready_rows for a, _ in pairs)
        if program.layout == "nt":
            cols = min(b.ready_rows for _, b in pairs)
        else:
            cols = program.cols if all(b.is_whole for _, b in pairs) else 0
        rows = _next_boundary(self._done_rows, rows, program.rows)
        cols = _next_boundary(
            self._done_cols, cols if cols == program.cols else cols - cols % CHECKED_COLUMNS, program.cols
        )
        if rows * cols <= self._done_rows * self._done_cols:
            return
        self._pending += _strips(Rectangle(0, self._done_rows, self._done_cols, cols))
        self._pending += _strips(Rectangle(self._done_rows, rows, 0, cols))
        self._done_rows, self._done_cols = rows, cols

    def _next_sum(self, pairs: list[tuple[HeldOperand, HeldOperand]]) -> Chunk | None:
        if self._pending:
            part = self._pending.pop(0)
            return Chunk(lambda: self._sum[part.top : part.bottom], part, 0.0)
        a, b = pairs[0]
        start, ready = self._done_inner, min(a.ready_rows, b.ready_rows)
        if ready == start or (ready < a.rows and ready - start < _MIN_SIDE):
            return None
        self._done_inner = ready
        whole = Rectangle(0, self._program.rows, 0, self._program.cols)
        if ready == a.rows:
            self._done_rows, self._done_cols = self._program.rows, self._program.cols
            self._pending = bands(whole.rows, whole.cols)

        def add() -> None:
            if start == 0 and len(list(_strips(whole))) == 1:
                self._sum = self._kernel.multiply("tn", [(a.array[:ready], b.array[:ready])])
                return
            if self._sum is None:
                self._sum = self._kernel.allocate(whole.rows, whole.cols)
            for part in _strips(whole):  # all at once would need the space of the sum twice
                rows, cols = slice(part.top, part.bottom), slice(part.left, part.right)
                product = self._kernel.multiply("tn", [(a.array[start:ready, rows], b.array[start:ready, cols])])
                if start == 0:
                    self._sum[rows, cols] = product
                else:
                    self._sum[rows, cols] += product

        return Chunk(add, None, 2.0 * whole.area * (ready - start))

    def _multiply(self, pairs: list[tuple[HeldOperand, HeldOperand]], part: Rectangle) -> Array:
        if self._program.layout == "nt":
            cut = [(a.array[part.top : part.bottom], b.array[part.left : part.right]) for a, b in pairs]
        else:
            cut = [(a.array[part.top : part.bottom], b.array[:, part.left : part.right]) for a, b in pairs]
        return self._kernel.multiply(self._program.layout, cut)

    def _inner(self, pairs: list[tuple[HeldOperand, HeldOperand]]) -> int:
        return sum(a.cols for a, _ in pairs)


def bands(rows: int, cols: int) -> list[Rectangle]:
    """Cut a complete result into bands of whole rows of about 4 MB, to be sent one by one."""
    height = max(1, _RESULT_ELEMENTS // cols)
    return [Rectangle(top, min(top + height, rows), 0, cols) for top in range(0, rows, height)]


def _next_boundary(done: int, ready: int, whole: int) -> int:
    """How far to compute: up to what is ready if that is enough for a product, else no further."""
    return ready if ready == whole or ready - done >= _MIN_SIDE else done


def _strips(whole: Rectangle) -> Iterator[Rectangle]:
    """Cut a rectangle into pieces large enough to send by themselves and not too wide."""
    for left in range(whole.left, whole.right, _MAX_WIDTH):
        right = min(left + _MAX_WIDTH, whole.right)
        height = max(_MIN_SIDE, _RESULT_ELEMENTS // (right - left))
        for top in range(whole.top, whole.bottom, height):
            yield Rectangle(top, min(top + height, whole.bottom), left, right)


def _check_shapes(program: GemmProgram, pairs: list[tuple[HeldOperand, HeldOperand]]) -> None:
    if not pairs:
        raise ProtocolError("expected a block of at least one term, got none; the server is at fault")
    for a, b in pairs:
        match program.layout:
            case "nt":
                fits = (a.rows, b.rows, a.cols) == (program.rows, program.cols, b.cols)
            case "nn":
                fits = (a.rows, b.cols, a.cols) == (program.rows, program.cols, b.rows)
            case "tn":
                fits = (a.cols, b.cols, a.rows) == (program.rows, program.cols, b.rows) and len(pairs) == 1
        if not fits:
            raise ProtocolError(
                f"operands {a.rows} x {a.cols} and {b.rows} x {b.cols} do not make a block of {program.rows} x "
                f"{program.cols} in layout {program.layout}; the server is at fault"
            )
