"""One block of a product, computed as its operands arrive, returned in rectangles.

Strips of both operands come in turn, so what can be computed grows as a square (nt): new rows against all columns so
far, then new columns against the rows before. With inner rows (tn) the block is a sum over strips, returned at the
end; else (nn) rows follow once b is whole. Rectangles are about four megabytes, so that results go up while the next is
computed; their columns begin and end where the server checks them. Which rectangle comes next is decided here;
multiplying and sending are the worker's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cleave.core.schedule.rectangles import Rectangle
from cleave.device.programs.kernels import Array, Kernel
from cleave.device.store import Operand, Store
from cleave.errors import ProtocolError
from cleave.protocol.messages import CHECKED_COLUMNS
from cleave.protocol.programs import Gemm

_RESULT_ELEMENTS = 1 << 20  # a rectangle of about 4 MB: one part of a payload
_LEAST_SIDE = 512
"""Rows, columns or inner rows worth a product: a BLAS packs its other operand anew for each; 128 cost half again."""
_WIDEST = 8 * _LEAST_SIDE
"""Columns of a rectangle: 512 rows of a whole vocabulary would be more than a message, or a volunteer, can hold."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Something that can be computed now; `run` blocks, and may run in any thread."""

    run: Callable[[], Array]
    part: Rectangle | None
    """Which part of the block it gives; None: nothing yet, as a sum goes on."""
    flops: float


class GemmTask:
    """`next_chunk` until `finished`; a chunk must have run before the next is asked for."""

    def __init__(self, program: Gemm, store: Store, kernel: Kernel) -> None:
        self._program, self._store, self._kernel = program, store, kernel
        self._done_rows = self._done_cols = self._done_inner = 0
        self._todo: list[Rectangle] = []
        self._sum: Array = None

    @property
    def finished(self) -> bool:
        whole = (self._program.rows, self._program.cols)
        return not self._todo and (self._done_rows, self._done_cols) == whole

    @property
    def room_bytes(self) -> int:
        return 4 * self._program.rows * self._program.cols

    @property
    def only_returns(self) -> bool:
        """A sum is complete; further chunks compute nothing, but each is a copy beside the sum until it is sent."""
        return self._program.layout == "tn" and bool(self._todo)

    def next_chunk(self) -> Chunk | None:
        """None: nothing to do until more strips arrive."""
        pairs = [(self._store.get(a), self._store.get(b)) for a, b in self._program.terms]
        held = [(a, b) for a, b in pairs if a is not None and b is not None]
        if len(held) < len(pairs):
            return None
        _check(self._program, held)
        if self._program.layout == "tn":
            return self._next_sum(held)
        if not self._todo:
            self._grow(held)
        if not self._todo:
            return None
        part = self._todo.pop(0)
        return Chunk(lambda: self._multiply(held, part), part, 2.0 * part.area * self._inner(held))

    def _grow(self, pairs: list[tuple[Operand, Operand]]) -> None:
        program = self._program
        rows = min(a.ready_rows for a, _ in pairs)
        if program.layout == "nt":
            cols = min(b.ready_rows for _, b in pairs)
        else:
            cols = program.cols if all(b.is_whole for _, b in pairs) else 0
        rows = _worth(self._done_rows, rows, program.rows)
        cols = _worth(self._done_cols, cols if cols == program.cols else cols - cols % CHECKED_COLUMNS, program.cols)
        if rows * cols <= self._done_rows * self._done_cols:
            return
        self._todo += _strips(Rectangle(0, self._done_rows, self._done_cols, cols))
        self._todo += _strips(Rectangle(self._done_rows, rows, 0, cols))
        self._done_rows, self._done_cols = rows, cols

    def _next_sum(self, pairs: list[tuple[Operand, Operand]]) -> Chunk | None:
        if self._todo:
            part = self._todo.pop(0)
            return Chunk(lambda: self._sum[part.top : part.bottom], part, 0.0)
        a, b = pairs[0]
        start, ready = self._done_inner, min(a.ready_rows, b.ready_rows)
        if ready == start or (ready < a.rows and ready - start < _LEAST_SIDE):
            return None
        self._done_inner = ready
        whole = Rectangle(0, self._program.rows, 0, self._program.cols)
        if ready == a.rows:
            self._done_rows, self._done_cols = self._program.rows, self._program.cols
            self._todo = bands(whole.rows, whole.cols)

        def add() -> None:
            if start == 0 and len(list(_strips(whole))) == 1:
                self._sum = self._kernel.multiply("tn", [(a.array[:ready], b.array[:ready])])
                return
            if self._sum is None:
                self._sum = self._kernel.allocate(whole.rows, whole.cols)
            for part in _strips(whole):  # not the whole at once, which would take its room a second time
                rows, cols = slice(part.top, part.bottom), slice(part.left, part.right)
                product = self._kernel.multiply("tn", [(a.array[start:ready, rows], b.array[start:ready, cols])])
                if start == 0:
                    self._sum[rows, cols] = product
                else:
                    self._sum[rows, cols] += product

        return Chunk(add, None, 2.0 * whole.area * (ready - start))

    def _multiply(self, pairs: list[tuple[Operand, Operand]], part: Rectangle) -> Array:
        if self._program.layout == "nt":
            cut = [(a.array[part.top : part.bottom], b.array[part.left : part.right]) for a, b in pairs]
        else:
            cut = [(a.array[part.top : part.bottom], b.array[:, part.left : part.right]) for a, b in pairs]
        return self._kernel.multiply(self._program.layout, cut)

    def _inner(self, pairs: list[tuple[Operand, Operand]]) -> int:
        return sum(a.cols for a, _ in pairs)


def bands(rows: int, cols: int) -> list[Rectangle]:
    """A result that is complete, in rectangles to send: as many whole rows as make about four megabytes."""
    height = max(1, _RESULT_ELEMENTS // cols)
    return [Rectangle(top, min(top + height, rows), 0, cols) for top in range(0, rows, height)]


def _worth(done: int, ready: int, whole: int) -> int:
    """How far to go: as far as is ready, if that is a step worth taking."""
    return ready if ready == whole or ready - done >= _LEAST_SIDE else done


def _strips(whole: Rectangle) -> Iterator[Rectangle]:
    """A rectangle in bands of rows worth sending by themselves, none too wide."""
    for left in range(whole.left, whole.right, _WIDEST):
        right = min(left + _WIDEST, whole.right)
        height = max(_LEAST_SIDE, _RESULT_ELEMENTS // (right - left))
        for top in range(whole.top, whole.bottom, height):
            yield Rectangle(top, min(top + height, whole.bottom), left, right)


def _check(program: Gemm, pairs: list[tuple[Operand, Operand]]) -> None:
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
