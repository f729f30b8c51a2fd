"""A device without a worker: its store, its tasks, and whole sequences through resident parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from cleave.core.model.batch import Matrix
from cleave.core.model.decoder import Head, Part
from cleave.core.model.keeping import Keeping
from cleave.core.schedule.rectangles import Rectangle, total, within, without
from cleave.device.kernels import Kernel, NumpyKernel
from cleave.device.programs.resident import make_task
from cleave.device.store import OperandStore
from cleave.protocol.messages import Store as StoreMessage
from cleave.protocol.programs import Backward, Collect, Forward, Program

MEMORY_BYTES = 1 << 28


class Went(NamedTuple):
    y: Matrix
    dx: Matrix
    gradients: dict[int, Matrix]


@dataclass
class Bench:
    kernel: Kernel = field(default_factory=NumpyKernel)
    memory_bytes: int = MEMORY_BYTES
    numbers: int = 0
    flops: float = 0.0
    operands: dict[int, Matrix] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.store = OperandStore(self.kernel, self.memory_bytes)

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def put(self, matrix: Matrix) -> int:
        """Send an operand; a vector becomes 1 x n."""
        matrix = np.ascontiguousarray(np.atleast_2d(matrix), dtype=np.float32)
        number, (rows, cols) = self.number(), matrix.shape
        message = StoreMessage(operand=number, rows=rows, cols=cols, format="fp32", first_row=0, strip_rows=rows)
        self.store.write(message, matrix.tobytes())
        self.operands[number] = matrix
        return number

    def run(self, program: Program) -> Matrix | None:
        """Run a program and return its whole result, or None if the task has to wait."""
        task = make_task(program, self.store, self.kernel)
        parts: list[tuple[Rectangle, Matrix]] = []
        while (chunk := task.next_chunk()) is not None:
            result = chunk.run()
            self.flops += chunk.flops
            assert chunk.part is not None
            parts.append((chunk.part, np.asarray(result).copy()))
        if not task.finished:
            assert not parts
            return None
        rows, cols = max(part.bottom for part, _ in parts), max(part.right for part, _ in parts)
        output, missing = np.full((rows, cols), np.nan, dtype=np.float32), [Rectangle(0, rows, 0, cols)]
        for part, values in parts:
            assert total(within(missing, part)) == part.area
            missing = without(missing, part)
            output[part.top : part.bottom, part.left : part.right] = values
        assert not missing
        return output

    def done(self, program: Program) -> Matrix:
        result = self.run(program)
        assert result is not None, "the task does not wait"
        return result

    def collect(self, operand: int, accumulator: int) -> Matrix:
        rows, cols = self.operands[operand].shape
        return self.done(Collect(accumulator=accumulator, rows=rows, cols=cols))


@dataclass(frozen=True, kw_only=True)
class Journey:
    """A sequence going through parts and back, chunk by chunk."""

    bench: Bench
    parts: tuple[Part, ...]
    head: Head | None = None
    is_slice: bool = False
    mask: Matrix | None = None
    rotary: Matrix | None = None
    targets: Matrix | None = None
    keeps: Keeping = "nothing"

    def go(self, x: Matrix, dy: Matrix, chunk: int, trained: Sequence[int]) -> Went:
        state = self.bench.number()
        y = np.concatenate([self.bench.done(unit) for unit in self.forward(x, chunk, state)])
        return Went(y, *self.back(x, dy, chunk, trained, state))

    def back(
        self, x: Matrix, dy: Matrix, chunk: int, trained: Sequence[int], state: int
    ) -> tuple[Matrix, dict[int, Matrix]]:
        accumulators = {operand: self.bench.number() for operand in trained}
        units = self.backward(x, dy, chunk, accumulators, state)
        dx = np.concatenate([self.bench.done(unit) for unit in units][::-1])
        return dx, {operand: self.bench.collect(operand, number) for operand, number in accumulators.items()}

    def forward(self, x: Matrix, chunk: int, state: int, *, is_silent: bool = False) -> Iterator[Forward]:
        for first in range(0, len(x), chunk):
            yield Forward(**self._unit(x, first, chunk, state), is_silent=is_silent, keeps=self.keeps)

    def backward(
        self, x: Matrix, dy: Matrix, chunk: int, accumulators: dict[int, int], state: int
    ) -> Iterator[Backward]:
        for first in reversed(range(0, len(x), chunk)):
            yield Backward(
                **self._unit(x, first, chunk, state),
                dy=self.bench.put(dy[first : first + chunk]),
                accumulators=tuple(accumulators.items()),
            )

    def _unit(self, x: Matrix, first: int, chunk: int, state: int) -> dict[str, object]:
        put = self.bench.put
        return {
            "parts": self.parts,
            "head": self.head,
            "x": put(x[first : first + chunk]),
            "state": state,
            "first_row": first,
            "sequence": len(x),
            "is_slice": self.is_slice,
            "mask": None if self.mask is None else put(self.mask),
            "rotary": None if self.rotary is None else put(self.rotary),
            "rotary_row": first,
            "targets": None if self.targets is None else put(self.targets[first : first + chunk]),
        }


def assert_close(found: Matrix, expected: Matrix, tolerance: float = 1e-4) -> None:
    """Compare relative to the largest entry, at least 1: the gradient of a key bias is zero up to rounding."""
    assert found.shape == expected.shape
    assert np.isfinite(found).all()
    np.testing.assert_allclose(found, expected, rtol=0, atol=tolerance * max(float(np.abs(expected).max()), 1.0))
