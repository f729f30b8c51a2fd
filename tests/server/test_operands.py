"""Laws of staged tensors: any slice of an encoding is what encoding the slice gives, and rows are not copied."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.core.cost.wire import BLOCK, WireFormat, encoded_bytes
from cleave.core.model.batch import Matrix
from cleave.protocol.numbers import Encoded, NumpyCodec
from cleave.server.operands import Operands, Range, Tensor

quick = settings(max_examples=60, deadline=None)
each_format = pytest.mark.parametrize("format", get_args(WireFormat))


class Counting(NumpyCodec):
    """A codec that counts the numbers it encodes."""

    encoded = 0

    def encode(self, matrix: Matrix, format: WireFormat) -> Encoded:
        self.encoded += matrix.size
        return super().encode(matrix, format)


def drawn(rows: int, cols: int) -> Matrix:
    return np.random.default_rng(rows * cols).standard_normal((rows, cols), dtype=np.float32)


def a_range(data: st.DataObject, length: int, step: int = 1) -> Range:
    first = step * data.draw(st.integers(0, (length - 1) // step))
    last = data.draw(st.integers(first + 1, length))
    return first, min(length, -(-last // step) * step)


@each_format
@quick
@given(rows=st.integers(1, 9), cols=st.integers(1, 100), data=st.data())
def test_any_slice_is_what_encoding_it_gives(format: WireFormat, rows: int, cols: int, data: st.DataObject) -> None:
    codec, matrix, tensor = NumpyCodec(), drawn(rows, cols), Tensor(rows, cols, format)
    tensor.bind(matrix)
    top, left = a_range(data, rows), a_range(data, cols)
    part = matrix[slice(*top), slice(*left)]
    payload = tensor.payload(top, left, codec)
    assert bytes(payload) == bytes(codec.encode(part, format))
    expected = np.empty(part.shape, dtype=np.float32)
    codec.decode_into(payload, format, expected)
    np.testing.assert_array_equal(tensor.values(top, left, codec), expected)


@each_format
def test_strips_of_rows_are_views_of_one_encoding(format: WireFormat) -> None:
    codec, tensor = Counting(), Tensor(40, 100, format)
    tensor.bind(drawn(40, 100))
    first, second = (np.frombuffer(tensor.payload(rows, (0, 100), codec), np.uint8) for rows in ((0, 40), (7, 9)))
    assert np.shares_memory(first, second)
    assert codec.encoded == 40 * 100


def test_whole_blocks_of_columns_come_from_the_same_encoding() -> None:
    codec, tensor = Counting(), Tensor(40, 100, "q8")
    tensor.bind(drawn(40, 100))
    for cols in ((0, 100), (0, 64), (32, 96), (96, 100)):
        tensor.payload((3, 20), cols, codec)
    assert codec.encoded == 40 * 100


@quick
@given(rows=st.integers(1, 5), cols=st.integers(1, 100), data=st.data())
def test_numbers_bound_in_q8_can_be_cut_anywhere(rows: int, cols: int, data: st.DataObject) -> None:
    """Columns that split a block are rounded once more, within half a step of it."""
    codec, matrix, tensor = NumpyCodec(), drawn(rows, cols), Tensor(rows, cols, "q8")
    tensor.bind(None, codec.encode(matrix, "q8"))
    top, left = a_range(data, rows), a_range(data, cols)
    found = tensor.values(top, left, codec)
    assert np.abs(found - matrix[slice(*top), slice(*left)]).max() <= np.abs(matrix).max() / 125


@each_format
def test_strips_add_up_to_the_bytes_that_were_planned(format: WireFormat) -> None:
    operands = Operands(NumpyCodec(), lambda _: None)
    tensor = operands.tensor(3000, 1000, format)
    tensor.bind(drawn(3000, 1000))
    part = operands.slice(tensor, (10, 3000), (BLOCK, 1000))
    sent = list(operands.strips(part.operand.id))
    assert len(sent) > 2
    assert sum(len(payload) for _, payload in sent) == part.operand.wire_bytes == encoded_bytes(format, 2990, 968)
    assert all(message.payload == len(payload) for message, payload in sent)
