"""Tasks over weights that stay on the device: rows of a sequence forward or backward, and gradients read at the end.

A task waits until its operands are whole and its sequence stands at its rows; then it is computed at once and returned
in bands of rows. Whatever has no attention needs no state and waits for none. Why rows come in which order is the
server's affair, and sending is the worker's.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from cleave.core.schedule.rectangles import Rectangle
from cleave.device.programs import segments
from cleave.device.programs.binding import Bound, bind, check_program
from cleave.device.programs.gemm import Chunk, GemmTask, bands
from cleave.device.programs.kernels import Array, Kernel
from cleave.device.store import State, Store
from cleave.errors import ProtocolError
from cleave.protocol.programs import Attention, Backward, Collect, Forward, Gemm, Hold, Program

_NOBODY_WANTS = 1, 1
"""The shape of a result that only says that it is done."""
_FAILED = -1


class Task(Protocol):
    """`next_chunk` until `finished`; a chunk must have run before the next is asked for."""

    @property
    def finished(self) -> bool: ...

    @property
    def only_returns(self) -> bool:
        """All is computed; further chunks are copies of the result until they are sent."""
        ...

    @property
    def room_bytes(self) -> int:
        """What its result, and what is made on the way, take beside operands, as far as is known."""
        ...

    def next_chunk(self) -> Chunk | None:
        """None: nothing to do for now."""
        ...


def make_task(program: Program, store: Store, kernel: Kernel) -> Task:
    match program:
        case Gemm():
            return GemmTask(program, store, kernel)
        case Forward() | Backward():
            return SegmentTask(program, store, kernel)
        case Collect():
            return CollectTask(program, store)
        case Hold():
            return HoldTask(program, store, kernel)


class SegmentTask:
    """Some rows of a sequence through a segment."""

    def __init__(self, program: Forward | Backward, store: Store, kernel: Kernel) -> None:
        check_program(program)
        self._program, self._store, self._kernel = program, store, kernel
        self._has_state = any(isinstance(part, Attention) for part in program.parts)
        self._is_checked = self._has_begun = False
        self._result: Array = None
        self._todo: list[Rectangle] = []
        self.room_bytes = 0

    @property
    def finished(self) -> bool:
        return self._has_begun and not self._todo

    @property
    def only_returns(self) -> bool:
        return self._has_begun and bool(self._todo)

    def next_chunk(self) -> Chunk | None:
        if self._has_begun:
            return self._next_band() if self._todo else None
        if self._is_checked and not self._is_due():
            return None  # the operands of a long run are many, and it is asked after every chunk of others
        bound = bind(self._program, self._store, self._kernel)
        if bound is None:
            return None
        self._is_checked = True
        if not self._is_due():
            return None
        return self._first_band(bound, self._state(bound))

    def _is_due(self) -> bool:
        """Whether the sequence stands at these rows."""
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
        if state is None:
            state = self._store.make_state(program.state, bound.kv_widths, program.sequence)
        if (state.kv_widths, state.sequence) != (bound.kv_widths, program.sequence):
            raise ProtocolError(
                f"expected state {program.state} of {state.sequence} rows and key widths {state.kv_widths}, got a "
                f"program for {program.sequence} and {bound.kv_widths}"
            )
        return state

    def _first_band(self, bound: Bound, state: State | None) -> Chunk:
        program, unit, segment = self._program, bound.unit, bound.segment
        match program:
            case Forward(is_silent=True):
                flops = segments.rebuild_flops(unit, segment)
            case Forward():
                flops = segments.forward_flops(unit, segment)
            case Backward():
                flops = segments.backward_flops(unit, segment)
        rows, cols = _shape(program, bound)
        self.room_bytes = 4 * rows * cols + segments.workspace_bytes(unit, segment, bound.hidden)
        self._todo, self._has_begun = bands(rows, cols), True
        first = self._todo.pop(0)

        def run() -> Array:
            with np.errstate(all="ignore"):  # numbers beyond fp32 are the server's to find
                result = self._backward(bound, state) if isinstance(program, Backward) else self._forward(bound, state)
            self._result = self._kernel.zeros(*_NOBODY_WANTS) if result is None else result
            return self._result[first.top : first.bottom]

        return Chunk(run, first, flops)

    def _forward(self, bound: Bound, state: State | None) -> Array:
        caches, result = () if state is None else state.caches, None
        if isinstance(self._program, Forward) and self._program.is_silent:
            segments.rebuild(bound.unit, bound.segment, caches, bound.x)
        else:
            result = segments.forward(bound.unit, bound.segment, caches, bound.x)
        if state is not None:
            state.forward_rows += bound.unit.rows
        return result

    def _backward(self, bound: Bound, state: State | None) -> Array:
        if state is not None:
            state.backward_row = _FAILED  # until it is done: half a gradient must not be added to
            state.open_gradients(self._kernel)
        dx = segments.backward(bound.unit, bound.segment, () if state is None else state.caches, bound.x, bound.dy)
        if state is not None:
            state.backward_row = self._program.first_row
        return dx if isinstance(self._program, Backward) and self._program.wants_dx else None

    def _next_band(self) -> Chunk:
        part = self._todo.pop(0)
        return Chunk(lambda: self._result[part.top : part.bottom], part, 0.0)


class CollectTask:
    """An accumulator, in bands."""

    only_returns = True
    room_bytes = 0

    def __init__(self, program: Collect, store: Store) -> None:
        if min(program.rows, program.cols) < 1:
            raise ProtocolError(f"expected an accumulator of at least 1 x 1, got {program.rows} x {program.cols}")
        self._program, self._store = program, store
        self._total: Array = None
        self._todo: list[Rectangle] = []

    @property
    def finished(self) -> bool:
        return self._total is not None and not self._todo

    def next_chunk(self) -> Chunk | None:
        program = self._program
        if self._total is None:
            if self._store.get(program.accumulator) is None:
                return None
            self._total = self._store.accumulator(program.accumulator, program.rows, program.cols).array
            self._todo = bands(program.rows, program.cols)
        if not self._todo:
            return None
        part = self._todo.pop(0)
        return Chunk(lambda: self._total[part.top : part.bottom], part, 0.0)


class HoldTask:
    """Done when its operands are there."""

    only_returns = False
    room_bytes = 4

    def __init__(self, program: Hold, store: Store, kernel: Kernel) -> None:
        self._program, self._store, self._kernel = program, store, kernel
        self.finished = False

    def next_chunk(self) -> Chunk | None:
        held = [self._store.get(operand) for operand in self._program.operands]
        if self.finished or not all(operand is not None and operand.is_whole for operand in held):
            return None
        self.finished = True
        return Chunk(lambda: self._kernel.zeros(*_NOBODY_WANTS), Rectangle(0, 1, 0, 1), 0.0)


def _shape(program: Forward | Backward, bound: Bound) -> tuple[int, int]:
    match program:
        case Forward(is_silent=True) | Backward(wants_dx=False):
            return _NOBODY_WANTS
        case Forward(head=head) if head is not None:
            return bound.unit.rows, 2
        case _:
            return bound.unit.rows, bound.hidden
