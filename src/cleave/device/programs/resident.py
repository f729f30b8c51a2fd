"""Tasks over resident weights: rows of a sequence forward or backward, and gradients read at the end.

A task waits until its operands are complete and its sequence has reached its rows; it is then computed in one go and
returned in bands of rows. Shards without attention keep no state and wait for none. The server decides the order of
rows; the worker sends results.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from cleave.core.model.decoder import Attention
from cleave.core.schedule.rectangles import Rectangle
from cleave.device.kernels import Array, Kernel
from cleave.device.programs import shards
from cleave.device.programs.binding import Bound, bind, check_program
from cleave.device.programs.gemm import Chunk, GemmTask, bands
from cleave.device.programs.lease import LeaseTask
from cleave.device.store import HeldOperand, Kept, OperandStore, State, Tape
from cleave.errors import ProtocolError
from cleave.protocol.programs import (
    Backward,
    Collect,
    Copy,
    Forward,
    GemmProgram,
    Hold,
    Program,
    SquareSum,
    Update,
    parameters,
)

_EMPTY_RESULT_SHAPE = 1, 1
"""Shape of a result that only signals completion."""
_FAILED = -1
_MOST_NAMED = 8
"""Operands whose shapes an error lists."""


class DeviceTask(Protocol):
    """A task in progress. Call `next_chunk` until `finished`, and run each chunk before asking for the next."""

    @property
    def finished(self) -> bool: ...

    @property
    def only_returns(self) -> bool:
        """Whether everything is computed: further chunks only copy parts of the result, to be sent."""
        ...

    @property
    def room_bytes(self) -> int:
        """Bytes of result and temporaries beyond operands, as far as known yet."""
        ...

    def next_chunk(self) -> Chunk | None:
        """Return the next chunk; None if nothing is ready."""
        ...


def make_task(program: Program, store: OperandStore, kernel: Kernel) -> DeviceTask:
    match program:
        case GemmProgram():
            return GemmTask(program, store, kernel)
        case Forward() | Backward():
            return ShardTask(program, store, kernel)
        case Collect():
            return CollectTask(program, store, kernel)
        case Hold():
            return HoldTask(program, store, kernel)
        case SquareSum() | Update() | Copy():
            return LeaseTask(program, store, kernel)


class ShardTask:
    """Some rows of a sequence through a shard, forward or backward."""

    def __init__(self, program: Forward | Backward, store: OperandStore, kernel: Kernel) -> None:
        check_program(program)
        self._program, self._store, self._kernel = program, store, kernel
        self._has_state = any(isinstance(part, Attention) for part in program.parts)
        self._is_checked = self._has_begun = False
        self._result: Array = None
        self._pending: list[Rectangle] = []
        self.room_bytes = 0

    @property
    def finished(self) -> bool:
        return self._has_begun and not self._pending

    @property
    def only_returns(self) -> bool:
        return self._has_begun and bool(self._pending)

    def next_chunk(self) -> Chunk | None:
        if self._has_begun:
            return self._next_band() if self._pending else None
        if self._is_checked and not self._is_in_order():
            return None  # binding many operands is slow, and this is polled after every chunk
        bound = bind(self._program, self._store, self._kernel)
        if bound is None:
            return None
        self._is_checked = True
        if not self._is_in_order():
            return None
        return self._begin(bound, self._state(bound))

    def _is_in_order(self) -> bool:
        """Whether the sequence has reached these rows."""
        if not self._has_state:
            return True
        program, state = self._program, self._store.state(self._program.state)
        if isinstance(program, Forward):
            return (0 if state is None else state.forward_rows) == program.first_row
        x = self._store.get(program.x)
        if state is None or x is None or state.forward_rows < state.sequence:
            return False
        return state.backward_row == program.first_row + x.rows

    def _state(self, bound: Bound) -> State | None:
        program = self._program
        if not self._has_state:
            return None
        state = self._store.state(program.state)
        keeps = program.keeps if isinstance(program, Forward) else "nothing" if state is None else state.keeps
        kept = shards.numbers_kept(bound.scope, bound.shard, bound.hidden, keeps)
        if state is None:
            state = self._store.make_state(program.state, bound.kv_widths, program.sequence, keeps, kept)
        made, asked = (state.sequence, state.kv_widths, state.kept_numbers), (program.sequence, bound.kv_widths, kept)
        if made != asked:
            raise ProtocolError(
                f"expected state {program.state} of {made[0]} rows, key widths {made[1]} and {made[2]} numbers kept "
                f"per row, got a program for {asked[0]}, {asked[1]} and {asked[2]}"
            )
        return state

    def _begin(self, bound: Bound, state: State | None) -> Chunk:
        program, scope, shard = self._program, bound.scope, bound.shard
        tape = _tape(state, program, bound)
        match program:
            case Forward(is_silent=True):
                flops = shards.rebuild_flops(scope, shard, "nothing" if state is None else state.keeps)
            case Forward():
                flops = shards.forward_flops(scope, shard)
            case Backward():
                flops = shards.backward_flops(scope, shard, "nothing" if state is None or tape is None else state.keeps)
        rows, cols = _result_shape(program, bound)
        self.room_bytes = 4 * rows * cols + shards.workspace_bytes(scope, shard, bound.hidden)
        self._pending, self._has_begun = bands(rows, cols), True
        first = self._pending.pop(0)

        def run() -> Array:
            with np.errstate(all="ignore"):  # the server rejects nonfinite results
                if isinstance(program, Backward):
                    result = self._backward(bound, state, () if tape is None else tape.kept)
                else:
                    result = self._forward(bound, state)
            self._result = self._kernel.zeros(*_EMPTY_RESULT_SHAPE) if result is None else result
            return self._result[first.top : first.bottom]

        return Chunk(run, first, flops, scope.rows, lambda: self._advance(bound, state))

    def _advance(self, bound: Bound, state: State | None, kept: tuple[Kept, ...] = ()) -> None:
        """Note that the sequence has passed these rows, and what is kept of them; nothing if they were skipped."""
        program = self._program
        if state is not None and isinstance(program, Forward):
            state.forward_rows += bound.scope.rows
            if state.kept_numbers and self._store.may_keep(len(kept)):
                state.tapes[program.first_row] = Tape(_identity(program, bound), kept)
        elif state is not None:
            state.backward_row = program.first_row
            state.tapes.pop(program.first_row, None)

    def _forward(self, bound: Bound, state: State | None) -> Array:
        program, caches = self._program, () if state is None else state.caches
        result, keeps = None, "nothing" if state is None else state.keeps
        if isinstance(program, Forward) and program.is_silent:
            kept = shards.rebuild(bound.scope, bound.shard, caches, bound.x, keeps)
        else:
            result, kept = shards.forward(bound.scope, bound.shard, caches, bound.x, keeps)
        self._advance(bound, state, kept)
        return result

    def _backward(self, bound: Bound, state: State | None, kept: tuple[Kept, ...]) -> Array:
        if state is not None:
            state.backward_row = _FAILED  # until done: nothing may be added to half a gradient
            state.open_gradients(self._kernel)
        dx = shards.backward(bound.scope, bound.shard, () if state is None else state.caches, bound.x, bound.dy, kept)
        self._advance(bound, state)
        return dx if isinstance(self._program, Backward) and self._program.wants_dx else None

    def _next_band(self) -> Chunk:
        part = self._pending.pop(0)
        return Chunk(lambda: self._result[part.top : part.bottom], part, 0.0)


class CollectTask:
    """Return accumulators, or operands that were sent and may have been updated, stacked and in bands of rows."""

    only_returns = True
    room_bytes = 0

    def __init__(self, program: Collect, store: OperandStore, kernel: Kernel) -> None:
        if min(program.rows, program.cols) < 1:
            raise ProtocolError(f"expected an operand of at least 1 x 1, got {program.rows} x {program.cols}")
        if program.first_row < 0 or (program.first_row and program.below):
            raise ProtocolError(f"expected rows from 0 of one operand alone, got {program.first_row}")
        self._program, self._store, self._kernel = program, store, kernel
        self._totals: list[HeldOperand] = []
        self._pending: list[Rectangle] = []

    @property
    def finished(self) -> bool:
        return bool(self._totals) and not self._pending

    def next_chunk(self) -> Chunk | None:
        program = self._program
        if not self._totals:
            found = [self._store.get(number) for number in (program.accumulator, *program.below)]
            totals = [held for held in found if held is not None and held.is_whole]
            if len(totals) < len(found):
                return None
            self._check(totals)
            for held in totals:
                held.is_reusable = False  # its bands may still be read when it is dropped
            self._totals, self._pending = totals, bands(program.rows, program.cols)
        if not self._pending:
            return None
        part = self._pending.pop(0)
        first = program.first_row
        return Chunk(lambda: self._rows(first + part.top, first + part.bottom), part, 0.0)

    def _check(self, totals: list[HeldOperand]) -> None:
        program = self._program
        rows = sum(held.rows for held in totals)
        fits = rows == program.rows if program.below else program.first_row + program.rows <= rows
        if not fits or any(held.cols != program.cols for held in totals):
            shapes = ", ".join(f"{held.rows} x {held.cols}" for held in totals[:_MOST_NAMED])
            raise ProtocolError(
                f"expected operand {program.accumulator} and {len(program.below)} below it to have {program.rows} x "
                f"{program.cols} from row {program.first_row}, but they are {shapes}"
            )

    def _rows(self, top: int, bottom: int) -> Array:
        pieces, first = list[Array](), 0
        for held in self._totals:
            if first < bottom and top < first + held.rows:
                pieces.append(held.array[max(top - first, 0) : bottom - first])
            first += held.rows
        return pieces[0] if len(pieces) == 1 else self._kernel.ops.concatenate(pieces)


class HoldTask:
    """Report completion once all listed operands have arrived."""

    only_returns = False
    room_bytes = 4

    def __init__(self, program: Hold, store: OperandStore, kernel: Kernel) -> None:
        self._program, self._store, self._kernel = program, store, kernel
        self.finished = False

    def next_chunk(self) -> Chunk | None:
        held = [self._store.get(operand) for operand in self._program.operands]
        if self.finished or not all(operand is not None and operand.is_whole for operand in held):
            return None
        self.finished = True
        return Chunk(lambda: self._kernel.zeros(*_EMPTY_RESULT_SHAPE), Rectangle(0, 1, 0, 1), 0.0)


def _tape(state: State | None, program: Forward | Backward, bound: Bound) -> Tape | None:
    """What forward kept of these very rows in this very shard; None if it kept nothing, or something else."""
    tape = None if state is None else state.tapes.get(program.first_row)
    return tape if tape is not None and tape.of == _identity(program, bound) else None


def _identity(program: Forward | Backward, bound: Bound) -> object:
    """Rows, shard and shapes: a number may have been given to another operand between forward and backward."""
    shapes = tuple(tuple(bound.scope.values[number].shape) for number in parameters(program))
    return bound.scope.rows, bound.hidden, bound.shard, shapes


def _result_shape(program: Forward | Backward, bound: Bound) -> tuple[int, int]:
    match program:
        case Forward(is_silent=True) | Backward(wants_dx=False):
            return _EMPTY_RESULT_SHAPE
        case Forward(head=head) if head is not None:
            return bound.scope.rows, 2
        case _:
            return bound.scope.rows, bound.hidden
