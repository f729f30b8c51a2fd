"""What a device holds, under its memory cap: operands that were sent, and accumulators and states it made itself.

All share one space of numbers. The server decides what is held and what is dropped; the store only refuses what would
break the cap or the order, so a faulty server cannot take more of a volunteer's memory than was offered.
"""

from __future__ import annotations

from dataclasses import dataclass

from cleave.core.cost.resident import state_bytes
from cleave.device.programs.attention import Cache
from cleave.device.programs.kernels import Array, Kernel
from cleave.errors import ProtocolError
from cleave.protocol.frames import Buffer
from cleave.protocol.messages import Store as StoreMessage

_ELEMENT_BYTES = 4


@dataclass(slots=True)
class Operand:
    array: Array
    rows: int
    cols: int
    ready_rows: int = 0
    """The first rows, which have arrived."""
    is_accumulator: bool = False

    @property
    def is_whole(self) -> bool:
        return self.ready_rows == self.rows

    @property
    def bytes(self) -> int:
        return self.rows * self.cols * _ELEMENT_BYTES


@dataclass(slots=True)
class State:
    """Keys and values of a sequence, and how far it has come."""

    kv_widths: tuple[int, ...]
    sequence: int
    caches: tuple[Cache, ...]
    forward_rows: int
    """The first rows, which have gone forward."""
    backward_row: int
    """Where the last rows begin, which have gone backward; negative while some go, and for ever if they fail."""

    @property
    def bytes(self) -> int:
        return state_bytes(self.kv_widths, self.sequence)

    def open_gradients(self, kernel: Kernel) -> None:
        """From zero, with the first rows that go backward."""
        for cache, width in zip(self.caches, self.kv_widths, strict=True):
            if cache.value_gradients is None:
                cache.key_gradients = kernel.zeros(self.sequence, width)
                cache.value_gradients = kernel.zeros(self.sequence, width)


class Store:
    def __init__(self, kernel: Kernel, memory_bytes: int) -> None:
        self._kernel = kernel
        self._memory_bytes = memory_bytes
        self._operands: dict[int, Operand] = {}
        self._states: dict[int, State] = {}
        self._spare: list[Operand] = []
        self.used_bytes = 0
        self.result_bytes = 0
        self.spare_bytes = 0
        """Kept for operands of the same size, as fresh pages cost more than a copy; given up when room is needed."""

    def write(self, message: StoreMessage, payload: Buffer) -> None:
        """Take a strip of rows; the first one makes room for the whole operand."""
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
            if isinstance(dropped, Operand) and not dropped.is_accumulator:  # a task may still write to the others
                self.spare_bytes += dropped.bytes
                self._spare.append(dropped)
        self._trim(0)

    def get(self, operand: int) -> Operand | None:
        return self._operands.get(operand)

    def state(self, number: int) -> State | None:
        return self._states.get(number)

    def make_state(self, number: int, kv_widths: tuple[int, ...], sequence: int) -> State:
        self._take(number, state_bytes(kv_widths, sequence))
        caches = tuple(Cache(self._new(sequence, width), self._new(sequence, width)) for width in kv_widths)
        self._states[number] = State(kv_widths, sequence, caches, 0, sequence)
        self.used_bytes += self._states[number].bytes
        return self._states[number]

    def accumulator(self, number: int, rows: int, cols: int) -> Operand:
        """The one of that number; if there is none, a new one of zeros."""
        held = self._operands.get(number)
        if held is None:
            self._take(number, rows * cols * _ELEMENT_BYTES)
            held = self._operands[number] = Operand(self._new(rows, cols), rows, cols, rows, is_accumulator=True)
            self.used_bytes += held.bytes
        if not held.is_accumulator or (held.rows, held.cols) != (rows, cols):
            raise ProtocolError(
                f"expected operand {number} to be an accumulator of {rows} x {cols}, but it is "
                f"{'one' if held.is_accumulator else 'an operand'} of {held.rows} x {held.cols}"
            )
        return held

    def expect_result(self, size: int) -> None:
        """Room that a task's result will take, or (negative) has taken."""
        self.result_bytes += size
        self._trim(0)

    def clear(self) -> None:
        self._operands.clear()
        self._states.clear()
        self._spare.clear()
        self.used_bytes = self.spare_bytes = self.result_bytes = 0

    def _allocate(self, message: StoreMessage) -> Operand:
        if min(message.rows, message.cols) < 1:
            raise ProtocolError(f"expected an operand of at least 1 x 1, got {message.rows} x {message.cols}")
        need = message.rows * message.cols * _ELEMENT_BYTES
        self._require(need)
        operand = Operand(self._room(message.rows, message.cols, need), message.rows, message.cols)
        self._operands[message.operand] = operand
        self.used_bytes += need
        return operand

    def _take(self, number: int, need: int) -> None:
        """Make room for something made here."""
        if number in self._operands or number in self._states:
            raise ProtocolError(f"expected a number for what is made here that is free, got {number}; use another")
        self._require(need)
        self._trim(need)

    def _require(self, need: int) -> None:
        if self.used_bytes + need > self._memory_bytes:
            raise ProtocolError(
                f"the server sends {need} bytes more where {self._memory_bytes - self.used_bytes} of "
                f"{self._memory_bytes} are left; this device does not go beyond its memory"
            )

    def _new(self, rows: int, cols: int) -> Array:
        try:
            return self._kernel.zeros(rows, cols)
        except (MemoryError, RuntimeError):  # torch raises the latter
            raise ProtocolError("there is less memory than was offered") from None

    def _room(self, rows: int, cols: int, need: int) -> Array:
        for i, spare in enumerate(self._spare):
            if spare.bytes == need:
                del self._spare[i]
                self.spare_bytes -= need
                return spare.array.reshape(rows, cols)
        self._trim(need)

        return self._kernel.allocate(rows, cols)

    def _trim(self, need: int) -> None:
        """Give up spare room, the oldest first, until all of it fits."""
        others = self.used_bytes + self.result_bytes + need
        while self._spare and others + self.spare_bytes > self._memory_bytes:
            self.spare_bytes -= self._spare.pop(0).bytes
