"""A device's resident data under its memory cap: operands received, and accumulators and states created locally.

All share one number space. The server decides what is held and what is dropped. The store only rejects what would
exceed the cap or arrives out of order, so a faulty server cannot take more of a volunteer's memory than was offered.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cleave.core.cost.resident import state_bytes
from cleave.core.cost.wire import DEVICE_BYTES
from cleave.core.model.keeping import Keeping
from cleave.device.kernels import Array, Kernel
from cleave.errors import ProtocolError
from cleave.protocol.frames import Buffer
from cleave.protocol.messages import Store as StoreMessage

_MOST_HELD = 1 << 17
"""Operands and states at once: each costs some hundred bytes beyond its numbers, which the memory limit ignores."""
_MOST_SPARE = 256


@dataclass(slots=True)
class HeldOperand:
    """A matrix on the device, filled from its first row down."""

    array: Array
    rows: int
    cols: int
    ready_rows: int = 0
    """Leading rows received so far."""
    is_accumulator: bool = False
    """Made here, by a backward task or a copy."""
    is_reusable: bool = True
    """Whether its memory may serve another operand once it is dropped: not if a task may still write or return it."""

    @property
    def is_whole(self) -> bool:
        return self.ready_rows == self.rows

    @property
    def bytes(self) -> int:
        return self.rows * self.cols * DEVICE_BYTES


@dataclass(slots=True)
class KVCache:
    """Keys and values of one sequence in one attention: sequence x width, laid out key heads x sequence x head_dim."""

    keys: Array
    values: Array
    key_gradients: Array = None
    value_gradients: Array = None


@dataclass(frozen=True, slots=True)
class Kept:
    """What forward kept of some rows in one sublayer."""

    x: Array
    """Its input; None for the first sublayer, whose input is an operand."""
    inside: tuple[Array, ...] = ()
    """What its own backward would otherwise recompute; empty if that was not kept."""


@dataclass(frozen=True, slots=True)
class Tape:
    """What forward kept of one chunk."""

    of: object
    """The rows, the shard and the shapes of its weights: only the same ones can use it."""
    kept: tuple[Kept, ...]
    """An entry per sublayer; empty if nothing was computed."""


@dataclass(slots=True)
class State:
    """Keys and values of one sequence, what forward kept for backward, and its progress in both directions."""

    kv_widths: tuple[int, ...]
    sequence: int
    keeps: Keeping
    """What forward keeps for backward."""
    kept_numbers: int
    """Numbers per row of that."""
    caches: tuple[KVCache, ...]
    forward_rows: int
    """Leading rows already processed forward."""
    backward_row: int
    """First of the trailing rows already processed backward; negative while a backward task runs or after it failed."""
    tapes: dict[int, Tape] = field(default_factory=lambda: dict[int, Tape]())
    """What was kept of each chunk, by its first row."""

    @property
    def bytes(self) -> int:
        return state_bytes(self.kv_widths, self.sequence, self.kept_numbers)

    def open_gradients(self, kernel: Kernel) -> None:
        """Allocate zeroed key and value gradients, unless an earlier backward task did."""
        for cache, width in zip(self.caches, self.kv_widths, strict=True):
            if cache.value_gradients is None:
                cache.key_gradients = kernel.zeros(self.sequence, width)
                cache.value_gradients = kernel.zeros(self.sequence, width)


class OperandStore:
    """Operands, accumulators and states by number, within `memory_bytes`."""

    def __init__(self, kernel: Kernel, memory_bytes: int) -> None:
        self._kernel = kernel
        self._memory_bytes = memory_bytes
        self._operands: dict[int, HeldOperand] = {}
        self._states: dict[int, State] = {}
        self._spare: list[HeldOperand] = []
        self.used_bytes = 0
        self.result_bytes = 0
        self.spare_bytes = 0
        """Dropped buffers kept for operands of equal size, as fresh pages cost more than a copy; freed when needed."""

    def write(self, message: StoreMessage, payload: Buffer) -> None:
        """Decode a strip of rows into its operand; the first strip allocates all of it."""
        operand = self._operands.get(message.operand)
        if message.operand in self._states or (operand is not None and operand.is_accumulator):
            raise ProtocolError(
                f"expected a number for an operand that is free, got {message.operand}, which was made here"
            )
        if operand is None:
            operand = self._allocate(message)
        end = message.first_row + message.strip_rows
        if (
            (message.rows, message.cols) != (operand.rows, operand.cols)
            or message.first_row != operand.ready_rows
            or not message.first_row < end <= operand.rows
        ):
            raise ProtocolError(
                f"expected rows from {operand.ready_rows} on of operand {message.operand} ({operand.rows} x "
                f"{operand.cols}), got {message.first_row}-{end} of {message.rows} x {message.cols}"
            )
        self._kernel.write(operand.array[message.first_row : end], payload, message.format)
        operand.ready_rows = end

    def drop(self, operands: tuple[int, ...]) -> None:
        for operand in operands:
            dropped = self._operands.pop(operand, None) or self._states.pop(operand, None)
            if dropped is None:
                continue
            self.used_bytes -= dropped.bytes
            if isinstance(dropped, HeldOperand) and dropped.is_reusable:  # states never are: tasks write to them
                self.spare_bytes += dropped.bytes
                self._spare.append(dropped)
        self._trim(0)

    def get(self, operand: int) -> HeldOperand | None:
        return self._operands.get(operand)

    def state(self, number: int) -> State | None:
        return self._states.get(number)

    def make_state(
        self,
        number: int,
        kv_widths: tuple[int, ...],
        sequence: int,
        keeps: Keeping = "nothing",
        kept_numbers: int = 0,
    ) -> State:
        self._claim(number, state_bytes(kv_widths, sequence, kept_numbers))
        caches = tuple(KVCache(self._zeros(sequence, width), self._zeros(sequence, width)) for width in kv_widths)
        self._states[number] = State(kv_widths, sequence, keeps, kept_numbers, caches, 0, sequence)
        self.used_bytes += self._states[number].bytes
        return self._states[number]

    def may_keep(self, entries: int) -> bool:
        """Whether a tape of so many entries may be added: they too cost some hundred bytes beyond their numbers."""
        tapes = [tape for state in self._states.values() for tape in state.tapes.values()]
        return len(tapes) + sum(len(tape.kept) for tape in tapes) + entries < _MOST_HELD

    def accumulator(self, number: int, rows: int, cols: int) -> HeldOperand:
        """Return the accumulator of that number, created as zeros if missing."""
        held = self._operands.get(number) or self.make_accumulator(number, rows, cols)
        if not held.is_accumulator or (held.rows, held.cols) != (rows, cols):
            raise ProtocolError(
                f"expected operand {number} to be an accumulator of {rows} x {cols}, but it is "
                f"{'one' if held.is_accumulator else 'an operand'} of {held.rows} x {held.cols}"
            )
        return held

    def make_accumulator(self, number: int, rows: int, cols: int) -> HeldOperand:
        """Create zeros under a number that must be free."""
        self._claim(number, rows * cols * DEVICE_BYTES)
        array = self._zeros(rows, cols)
        held = HeldOperand(array, rows, cols, rows, is_accumulator=True, is_reusable=False)
        self._operands[number] = held
        self.used_bytes += held.bytes
        return held

    def expect_result(self, size: int) -> None:
        """Reserve space for a task's result; a negative size releases it."""
        self.result_bytes += size
        self._trim(0)

    def clear(self) -> None:
        self._operands.clear()
        self._states.clear()
        self._spare.clear()
        self.used_bytes = self.spare_bytes = self.result_bytes = 0

    def _allocate(self, message: StoreMessage) -> HeldOperand:
        if min(message.rows, message.cols) < 1:
            raise ProtocolError(f"expected an operand of at least 1 x 1, got {message.rows} x {message.cols}")
        need = message.rows * message.cols * DEVICE_BYTES
        self._require_space(need)
        operand = HeldOperand(self._reuse_or_allocate(message.rows, message.cols, need), message.rows, message.cols)
        self._operands[message.operand] = operand
        self.used_bytes += need
        return operand

    def _claim(self, number: int, need: int) -> None:
        """Check the number and free space for something created locally."""
        if number in self._operands or number in self._states:
            raise ProtocolError(f"expected a number for what is made here that is free, got {number}; use another")
        self._require_space(need)
        self._trim(need)

    def _require_space(self, need: int) -> None:
        if len(self._operands) + len(self._states) >= _MOST_HELD:
            raise ProtocolError(f"expected at most {_MOST_HELD} operands at once, got one more; drop some")
        if self.used_bytes + need > self._memory_bytes:
            raise ProtocolError(
                f"this needs {need} more bytes where {self._memory_bytes - self.used_bytes} of "
                f"{self._memory_bytes} are free; a device never exceeds its memory limit"
            )

    def _zeros(self, rows: int, cols: int) -> Array:
        try:
            return self._kernel.zeros(rows, cols)
        except (MemoryError, RuntimeError):  # torch raises RuntimeError
            raise ProtocolError("there is less memory than was offered") from None

    def _reuse_or_allocate(self, rows: int, cols: int, need: int) -> Array:
        for i, spare in enumerate(self._spare):
            if spare.bytes == need:
                del self._spare[i]
                self.spare_bytes -= need
                return spare.array.reshape(rows, cols)
        self._trim(need)
        return self._kernel.allocate(rows, cols)

    def _trim(self, need: int) -> None:
        """Free spare buffers, oldest first, until `need` more bytes fit."""
        occupied = self.used_bytes + self.result_bytes + need
        while self._spare and (len(self._spare) > _MOST_SPARE or occupied + self.spare_bytes > self._memory_bytes):
            self.spare_bytes -= self._spare.pop(0).bytes
