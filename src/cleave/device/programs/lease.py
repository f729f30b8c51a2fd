"""Tasks on leased weights: sum the squares of gradients, update weights and states in place, copy them.

A task waits until its operands are complete and its accumulators exist; it then runs in one go, so no other task sees a
weight half updated, and a cancel never leaves one. Everything about a program is checked here; `optimizer.py` computes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cleave.core.cost.update import ROWS, copy_flops, square_sum_flops, update_flops
from cleave.core.cost.wire import DEVICE_BYTES
from cleave.core.model.update_rule import check, states
from cleave.core.schedule.rectangles import Rectangle
from cleave.device.kernels import Array, Kernel
from cleave.device.programs.gemm import Chunk
from cleave.device.programs.optimizer import Step, scratch_numbers, square_sum, update
from cleave.device.store import HeldOperand, OperandStore
from cleave.errors import ProtocolError
from cleave.protocol.programs import Copy, SquareSum, Update


class LeaseTask:
    """A program on leased weights; see `DeviceTask`."""

    only_returns = False

    def __init__(self, program: SquareSum | Update | Copy, store: OperandStore, kernel: Kernel) -> None:
        _check_program(program)
        self._program, self._store, self._kernel = program, store, kernel
        self._cols = len(program.accumulators) if isinstance(program, SquareSum) else 1
        self.room_bytes = DEVICE_BYTES * self._cols
        self.finished = False

    def next_chunk(self) -> Chunk | None:
        if self.finished:
            return None
        match self._program:
            case SquareSum() as program:
                chunk = self._square_sum(program)
            case Update() as program:
                chunk = self._update(program)
            case Copy() as program:
                chunk = self._copy(program)
        self.finished = chunk is not None
        return chunk

    def _square_sum(self, program: SquareSum) -> Chunk | None:
        totals = [_accumulator(self._store, number) for number in program.accumulators]
        found = [total for total in totals if total is not None]
        if len(found) < len(totals):
            return None
        self.room_bytes += DEVICE_BYTES * scratch_numbers(self._kernel, max(map(_numbers, found)))

        def run() -> Array:
            result = self._kernel.zeros(1, len(found))
            with np.errstate(over="ignore"):  # beyond fp32 is infinity
                for i, total in enumerate(found):
                    result[0, i] = square_sum(self._kernel, total.array)
            return result

        return self._chunk(run, square_sum_flops(sum(map(_numbers, found))))

    def _update(self, program: Update) -> Chunk | None:
        bound: list[tuple[HeldOperand, ...]] = []
        for leased in program.weights:
            sent = [_sent(self._store, number) for number in (leased.weight, *leased.states)]
            held = [each for each in (*sent, _accumulator(self._store, leased.accumulator)) if each is not None]
            if len(held) <= len(sent):
                return None
            _check_shapes((leased.weight, *leased.states, leased.accumulator), held)
            bound.append(tuple(held))
        for weight, *rest in bound:
            for written in (weight, *rest[:-1]):
                written.is_reusable = False
        sizes = [_numbers(weight) for weight, *_ in bound]
        self.room_bytes += 2 * DEVICE_BYTES * scratch_numbers(self._kernel, max(sizes))
        steps = [
            Step(weight=weight.array, gradient=rest[-1].array, states=tuple(state.array for state in rest[:-1]))
            for weight, *rest in bound
        ]

        def run() -> Array:
            update(self._kernel, program.rule, program.scale, steps)
            return self._kernel.zeros(1, 1)

        return self._chunk(run, update_flops(program.rule, sum(sizes)))

    def _copy(self, program: Copy) -> Chunk | None:
        sources = [_sent(self._store, number) for number, _ in program.copies]
        found = [source for source in sources if source is not None]
        if len(found) < len(sources):
            return None
        targets = [
            self._store.make_accumulator(number, source.rows, source.cols)
            for source, (_, number) in zip(found, program.copies, strict=True)
        ]

        def run() -> Array:
            for source, target in zip(found, targets, strict=True):
                target.array[...] = source.array
            return self._kernel.zeros(1, 1)

        return self._chunk(run, copy_flops(sum(map(_numbers, found))))

    def _chunk(self, run: Callable[[], Array], flops: float) -> Chunk:
        return Chunk(run, Rectangle(0, 1, 0, self._cols), flops, ROWS)


# ------------------------------------------------------------------------------------------------ operands


def _sent(store: OperandStore, number: int) -> HeldOperand | None:
    """Return an operand that the server sent, once it is complete."""
    held = store.get(number)
    if held is not None and held.is_accumulator:
        raise ProtocolError(f"expected operand {number} to have been sent, but it is an accumulator")
    return held if held is not None and held.is_whole else None


def _accumulator(store: OperandStore, number: int) -> HeldOperand | None:
    """Return an accumulator, once it exists."""
    held = store.get(number)
    if held is not None and not held.is_accumulator:
        raise ProtocolError(f"expected operand {number} to be an accumulator, but it was sent")
    return held


def _check_shapes(numbers: tuple[int, ...], held: list[HeldOperand]) -> None:
    rows, cols = held[0].rows, held[0].cols
    for number, other in zip(numbers, held, strict=True):
        if (other.rows, other.cols) != (rows, cols):
            raise ProtocolError(
                f"expected operand {number} of {rows} x {cols} like weight {numbers[0]}, got {other.rows} x "
                f"{other.cols}; send another"
            )


def _numbers(held: HeldOperand) -> int:
    return held.rows * held.cols


# ------------------------------------------------------------------------------------------------ programs


def _check_program(program: SquareSum | Update | Copy) -> None:
    """Check everything that does not depend on operands. Raises ProtocolError."""
    match program:
        case SquareSum(accumulators=accumulators):
            named = accumulators
        case Copy(copies=copies):
            named = tuple(number for pair in copies for number in pair)
        case Update(rule=rule, weights=weights):
            named = tuple(number for one in weights for number in (one.weight, one.accumulator, *one.states))
            check(rule, program.scale)
            for one in weights:
                if len(one.states) != states(rule):
                    raise ProtocolError(
                        f"expected {states(rule)} states of weight {one.weight} for this rule, got {len(one.states)}"
                    )
    if not named or len(set(named)) < len(named):
        raise ProtocolError(
            f"expected at least one operand and none twice, got {len(named)} of which {len(set(named))} differ"
        )
