"""Operands a device holds, under its memory cap.

The server decides what is held and what is dropped; the store only refuses what would break the cap or the order, so a
faulty server cannot take more of a volunteer's memory than was offered.
"""

from __future__ import annotations

from dataclasses import dataclass

from cleave.device.programs.kernels import Array, Kernel
from cleave.errors import ProtocolError
from cleave.wire.frame import Buffer
from cleave.wire.messages import Store as StoreMessage

_ELEMENT_BYTES = 4


@dataclass(slots=True)
class Operand:
    array: Array
    rows: int
    cols: int
    ready_rows: int = 0
    """The first rows, which have arrived."""

    @property
    def is_whole(self) -> bool:
        return self.ready_rows == self.rows

    @property
    def bytes(self) -> int:
        return self.rows * self.cols * _ELEMENT_BYTES


class Store:
    def __init__(self, kernel: Kernel, memory_bytes: int) -> None:
        self._kernel = kernel
        self._memory_bytes = memory_bytes
        self._operands: dict[int, Operand] = {}
        self._spare: list[Operand] = []
        self.used_bytes = 0
        self.result_bytes = 0
        self.spare_bytes = 0
        """Kept for operands of the same size, as fresh pages cost more than a copy; given up when room is needed."""

    def write(self, message: StoreMessage, payload: Buffer) -> None:
        """Take a strip of rows; the first one makes room for the whole operand."""
        operand = self._operands.get(message.operand)
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
            dropped = self._operands.pop(operand, None)
            if dropped is not None:
                self.used_bytes -= dropped.bytes
                self.spare_bytes += dropped.bytes
                self._spare.append(dropped)
        self._trim(0)

    def get(self, operand: int) -> Operand | None:
        return self._operands.get(operand)

    def expect_result(self, size: int) -> None:
        """Room that a task's result will take, or (negative) has taken."""
        self.result_bytes += size
        self._trim(0)

    def clear(self) -> None:
        self._operands.clear()
        self._spare.clear()
        self.used_bytes = self.spare_bytes = self.result_bytes = 0

    def _allocate(self, message: StoreMessage) -> Operand:
        if min(message.rows, message.cols) < 1:
            raise ProtocolError(f"expected an operand of at least 1 x 1, got {message.rows} x {message.cols}")
        need = message.rows * message.cols * _ELEMENT_BYTES
        if self.used_bytes + need > self._memory_bytes:
            raise ProtocolError(
                f"the server sends {need} bytes more where {self._memory_bytes - self.used_bytes} of "
                f"{self._memory_bytes} are left; this device does not go beyond its memory"
            )
        operand = Operand(self._room(message.rows, message.cols, need), message.rows, message.cols)
        self._operands[message.operand] = operand
        self.used_bytes += need
        return operand

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
