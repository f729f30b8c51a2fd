"""Tensors as operands: encoded once in wire format, sliced many times, each slice with an identity.

A tensor's identity outlives its numbers: between forward and backward the numbers may be gone (checkpointing), while
devices still hold the slices they were sent. `bind` provides the numbers while something may be sent. When a tensor is
no longer referenced, its slices are released on all devices. Row slices are views; column slices are gathered, or
encoded by themselves where they would split a block of q8.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np

from cleave.core.cost.wire import DEVICE_BYTES, WireFormat, encoded_bytes
from cleave.core.model.batch import Matrix
from cleave.core.schedule.tasks import Operand, OperandId
from cleave.protocol.messages import Store
from cleave.protocol.numbers import Codec, Encoded, cut_columns

STRIP_BYTES = 1 << 20

Range = tuple[int, int]


class Tensor:
    """A matrix with an identity; created by `Operands.tensor`."""

    __slots__ = ("__weakref__", "_encoded", "_matrix", "cols", "format", "rows", "slices")

    rows: int
    cols: int
    format: WireFormat

    def __init__(self, rows: int, cols: int, format: WireFormat) -> None:
        self.rows, self.cols, self.format = rows, cols, format
        self.slices: dict[tuple[Range, Range], Slice] = {}
        self._matrix: Matrix | None = None
        self._encoded: Encoded | None = None

    def bind(self, matrix: Matrix | None, encoded: Encoded | None = None) -> None:
        """Set the numbers, as fp32 or already in wire format; `bind(None)` drops them."""
        assert matrix is None or matrix.shape == (self.rows, self.cols)
        self._matrix, self._encoded = matrix, encoded

    def payload(self, rows: Range, cols: Range, codec: Codec) -> memoryview:
        """Return some rows of some columns in wire format; full-width rows of the cached encoding are views."""
        if self._encoded is None:
            matrix = self._matrix
            assert matrix is not None, "numbers are bound while something may be sent"
            whole_width = cols == (0, self.cols)
            if self.format == "fp32" and not (whole_width and matrix.flags.c_contiguous):  # encoding would copy it all
                return codec.encode(matrix[rows[0] : rows[1], cols[0] : cols[1]], self.format).data
            self._encoded = codec.encode(matrix, self.format)
        size = len(self._encoded) // self.rows
        found = cut_columns(self._encoded[rows[0] * size : rows[1] * size], self.format, self.cols, cols)
        if found is None:  # a block of q8 would be split
            found = codec.encode(self._numbers(rows, codec)[:, cols[0] : cols[1]], self.format)
        return found.data

    def _numbers(self, rows: Range, codec: Codec) -> Matrix:
        """Return whole rows as exactly as they are known here."""
        if self._matrix is not None:
            return self._matrix[rows[0] : rows[1]]
        return self.values(rows, (0, self.cols), codec)

    def values(self, rows: Range, cols: Range, codec: Codec) -> Matrix:
        """Return the same as numbers, rounded as a device sees them; a view where nothing is rounded."""
        if self.format == "fp32" and self._matrix is not None:
            return self._matrix[rows[0] : rows[1], cols[0] : cols[1]]
        values = np.empty((rows[1] - rows[0], cols[1] - cols[0]), dtype=np.float32)
        codec.decode_into(self.payload(rows, cols, codec), self.format, values)
        return values


class Cut(NamedTuple):
    """A slice that may not have an identity yet."""

    tensor: Tensor
    rows: Range
    cols: Range


class Slice(NamedTuple):
    operand: Operand
    tensor: weakref.ref[Tensor]
    rows: Range
    cols: Range

    def strips(self, codec: Codec) -> Iterator[tuple[Store, memoryview]]:
        """Yield the messages that send it to a device, in order."""
        tensor = self.tensor()
        assert tensor is not None, "a job refers to its tensors"
        width = self.cols[1] - self.cols[0]
        height = max(1, STRIP_BYTES // encoded_bytes(tensor.format, 1, width))
        first, last = self.rows
        for top in range(first, last, height):
            bottom = min(top + height, last)
            yield (
                Store(
                    operand=self.operand.id,
                    rows=last - first,
                    cols=width,
                    format=tensor.format,
                    first_row=top - first,
                    strip_rows=bottom - top,
                    payload=encoded_bytes(tensor.format, bottom - top, width),
                ),
                tensor.payload((top, bottom), self.cols, codec),
            )


class Operands:
    """Issue identities. Call `slice` and `made` in the event loop's thread only, `tensor` in any."""

    def __init__(self, codec: Codec, released: Callable[[tuple[OperandId, ...]], None]) -> None:
        self._codec = codec
        self._released = released
        self._ids = itertools.count(1)
        self._slices: dict[OperandId, Slice] = {}
        self._table: tuple[Matrix, Tensor] | None = None
        self._tabling = threading.Lock()

    def tensor(self, rows: int, cols: int, format: WireFormat) -> Tensor:
        tensor = Tensor(rows, cols, format)
        weakref.finalize(tensor, self._gone, tensor.slices).atexit = False
        return tensor

    def table(self, matrix: Matrix) -> Tensor:
        """Return an fp32 tensor for recurring numbers, such as positions: the same one while they do not change."""
        with self._tabling:
            if self._table is None or not np.array_equal(self._table[0], matrix):
                tensor = self.tensor(matrix.shape[0], matrix.shape[1], "fp32")
                numbers = np.ascontiguousarray(matrix, dtype=np.float32)
                tensor.bind(numbers)
                self._table = numbers, tensor
            return self._table[1]

    def slice(self, tensor: Tensor, rows: Range, cols: Range) -> Slice:
        found = tensor.slices.get((rows, cols))
        if found is None:
            height, width = rows[1] - rows[0], cols[1] - cols[0]
            operand = Operand(
                id=OperandId(next(self._ids)),
                bytes=height * width * DEVICE_BYTES,
                wire_bytes=encoded_bytes(tensor.format, height, width),
            )
            found = Slice(operand, weakref.ref(tensor), rows, cols)
            tensor.slices[rows, cols] = found
            self._slices[operand.id] = found
        return found

    def made(self, size: int) -> Operand:
        """Create an identity for an operand that a device makes itself."""
        return Operand(id=OperandId(next(self._ids)), bytes=size, is_made=True)

    def drop(self, operands: Iterable[Operand]) -> None:
        """Release operands that devices made themselves; from any thread."""
        self._released(tuple(operand.id for operand in operands))

    def strips(self, operand: OperandId) -> Iterator[tuple[Store, memoryview]]:
        return self._slices[operand].strips(self._codec)

    def forget(self, operands: Iterable[OperandId]) -> None:
        for operand in operands:
            self._slices.pop(operand, None)

    def _gone(self, slices: dict[tuple[Range, Range], Slice]) -> None:
        if slices:
            self._released(tuple(found.operand.id for found in slices.values()))
