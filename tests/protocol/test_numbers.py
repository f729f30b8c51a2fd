"""Laws of the number formats: fp32 exact, bf16 and fp16 as torch rounds; `test_q8.py` has those of q8."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray
from tests.support import samples

from cleave.core.cost.wire import WireFormat, encoded_bytes
from cleave.core.model.batch import Matrix
from cleave.errors import ProtocolError
from cleave.protocol.numbers import Codec, NumpyCodec

codec = NumpyCodec()
quick = settings(max_examples=40)
each_format = pytest.mark.parametrize("wire", samples.FORMATS)
sides = st.integers(1, 9)
shapes = st.tuples(sides, sides)
any_matrix = arrays.arrays(np.float32, shapes, elements=st.floats(width=32))
finite = st.floats(-(2.0**100), 2.0**100, width=32)
finite_matrix = arrays.arrays(np.float32, shapes, elements=finite)


def decoded(data: NDArray[np.uint8], wire: WireFormat, shape: tuple[int, int], using: Codec = codec) -> Matrix:
    out = np.full(shape, np.float32(7), dtype=np.float32)
    using.decode_into(data.data, wire, out)
    return out


def round_trip(matrix: Matrix, wire: WireFormat) -> Matrix:
    return decoded(codec.encode(matrix, wire), wire, matrix.shape)


def bits(matrix: Matrix) -> NDArray[np.uint32]:
    return matrix.view(np.uint32)


def all_upper_halves(count_bits: int, lowers: tuple[int, ...]) -> Matrix:
    """Every sign, exponent and upper mantissa, each with some lower bits: all roundings, ties and special values."""
    uppers = np.arange(1 << count_bits, dtype=np.uint32) << np.uint32(32 - count_bits)
    return (uppers[:, None] | np.array(lowers, dtype=np.uint32)).view(np.float32)


HARD: dict[WireFormat, Matrix] = {
    "bf16": all_upper_halves(16, (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)),
    "fp16": all_upper_halves(19, (0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF)),
}


def same_halves(one: NDArray[np.uint8], other: NDArray[np.uint8], matrix: Matrix) -> None:
    """Check for equal bits, and for any NaN where there was one."""
    nan = np.isnan(matrix).reshape(-1)
    first, second = one.view("<u2"), other.view("<u2")
    np.testing.assert_array_equal(first[~nan], second[~nan])


# ------------------------------------------------------------------------------------------------ formats


@quick
@given(any_matrix)
def test_fp32_is_bit_exact(matrix: Matrix) -> None:
    np.testing.assert_array_equal(bits(round_trip(matrix, "fp32")), bits(matrix))


def test_a_contiguous_matrix_is_not_copied_for_fp32() -> None:
    matrix = np.ones((3, 4), dtype=np.float32)
    assert np.shares_memory(codec.encode(matrix, "fp32"), matrix)


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_half_precision_rounds_as_torch_does(wire: WireFormat) -> None:
    import torch

    matrix = HARD[wire]
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[wire]
    theirs = torch.from_numpy(matrix).to(dtype).view(torch.uint8).numpy().reshape(-1)
    ours = codec.encode(matrix, wire)
    same_halves(ours, theirs, matrix)
    back = decoded(ours, wire, matrix.shape)
    np.testing.assert_array_equal(np.isnan(back), np.isnan(matrix))
    expected = torch.from_numpy(theirs).view(dtype).to(torch.float32).numpy().reshape(matrix.shape)
    np.testing.assert_array_equal(back, expected)


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_every_half_precision_number_round_trips(wire: WireFormat) -> None:
    every = np.arange(1 << 16, dtype="<u2")
    values = decoded(every.view(np.uint8), wire, (256, 256))
    same_halves(codec.encode(values, wire), every.view(np.uint8), values)


@pytest.mark.parametrize(
    ("value", "half"),
    [
        (0x3F808000, 0x3F80),  # a tie goes to even: down
        (0x3F818000, 0x3F82),  # a tie goes to even: up
        (0x3F808001, 0x3F81),
        (0x7F7FFFFF, 0x7F80),  # the largest finite number becomes infinite
        (0x80000001, 0x8000),  # the smallest denormal becomes -0
        (0x7F800001, 0x7FC0),  # a NaN whose upper half looks infinite stays one
        (0xFFFFFFFF, 0x7FC0),
    ],
)
def test_bf16_by_example(value: int, half: int) -> None:
    matrix = np.array([[value]], dtype=np.uint32).view(np.float32)
    assert codec.encode(matrix, "bf16").view("<u2").tolist() == [half]


# ------------------------------------------------------------------------------------------------ laws of all


@each_format
@quick
@given(matrix=any_matrix)
def test_the_encoded_size_is_known_in_advance(wire: WireFormat, matrix: Matrix) -> None:
    assert len(codec.encode(matrix, wire)) == encoded_bytes(wire, *matrix.shape)


@each_format
@quick
@given(matrix=finite_matrix, add=st.booleans(), data=st.data())
def test_a_matrix_is_decoded_into_its_slice_and_nowhere_else(
    wire: WireFormat, matrix: Matrix, add: bool, data: st.DataObject
) -> None:
    rows, cols = matrix.shape
    top, left = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    large = np.arange((rows + 5) * (cols + 5), dtype=np.float32).reshape(rows + 5, cols + 5)
    expected = large.copy()
    values = round_trip(matrix, wire)
    expected[top : top + rows, left : left + cols] = (
        expected[top : top + rows, left : left + cols] + values if add else values
    )
    codec.decode_into(codec.encode(matrix, wire).data, wire, large[top : top + rows, left : left + cols], add=add)
    np.testing.assert_array_equal(large, expected)


@each_format
@quick
@given(matrix=finite_matrix)
def test_memory_layout_does_not_change_the_encoded_bytes(wire: WireFormat, matrix: Matrix) -> None:
    apart = np.zeros((matrix.shape[0] * 2, matrix.shape[1] * 3), dtype=np.float32)[::2, 1::3]
    apart[:] = matrix
    expected = bytes(codec.encode(matrix, wire))
    assert bytes(codec.encode(apart, wire)) == expected
    assert bytes(codec.encode(np.asfortranarray(matrix), wire)) == expected


@each_format
@quick
@given(rows=sides, cols=sides, size=st.integers(0, 500))
def test_a_wrong_length_is_a_protocol_error(wire: WireFormat, rows: int, cols: int, size: int) -> None:
    out = np.ones((rows, cols), dtype=np.float32)
    if size == encoded_bytes(wire, rows, cols):
        size += 1
    with pytest.raises(ProtocolError, match=f"expected {encoded_bytes(wire, rows, cols)} bytes for {rows} x {cols}"):
        codec.decode_into(bytes(size), wire, out)
    assert (out == 1).all()


@each_format
def test_large_matrices_are_rounded_like_small_ones(wire: WireFormat) -> None:
    """Larger than the blocks bf16 is encoded in, with row lengths that do not divide them."""
    matrix = np.random.default_rng(0).standard_normal((37, 7001), dtype=np.float32)
    whole = codec.encode(matrix, wire)
    np.testing.assert_array_equal(decoded(whole, wire, matrix.shape)[5:6], round_trip(matrix[5:6], wire))
    wide = np.zeros((3, 70_001), dtype=np.float32)
    wide[2, -1] = -1.5
    assert round_trip(wide, wire)[2, -1] == pytest.approx(-1.5, rel=0.004 if wire == "q8" else 0)


# ------------------------------------------------------------------------------------------------ torch's codec


def torch_codec() -> Codec:
    from cleave.train.offload.codec import TorchCodec

    return TorchCodec()


# The module sets this filter on import, but pytest resets it for each test.
reads_only = pytest.mark.filterwarnings("ignore:The given buffer is not writable")


@pytest.mark.parametrize("wire", ["bf16", "fp16"])
def test_torch_gives_the_same_bytes_for_difficult_numbers(wire: WireFormat) -> None:
    same_halves(torch_codec().encode(HARD[wire], wire), codec.encode(HARD[wire], wire), HARD[wire])


@reads_only
@each_format
@quick
@given(matrix=finite_matrix, add=st.booleans())
def test_torch_gives_the_same_bytes_and_the_same_numbers(wire: WireFormat, matrix: Matrix, add: bool) -> None:
    ours, theirs = codec.encode(matrix, wire), torch_codec().encode(matrix, wire)
    assert bytes(ours) == bytes(theirs)
    assert bytes(torch_codec().encode(np.asfortranarray(matrix), wire)) == bytes(ours)
    one, two = (np.full((matrix.shape[0] + 2, matrix.shape[1] + 2), 0.5, dtype=np.float32) for _ in range(2))
    codec.decode_into(bytes(ours), wire, one[1:-1, 1:-1], add=add)
    torch_codec().decode_into(bytes(ours), wire, two[1:-1, 1:-1], add=add)
    np.testing.assert_array_equal(one, two)


@each_format
def test_torch_refuses_a_wrong_length_too(wire: WireFormat) -> None:
    with pytest.raises(ProtocolError, match="send whole rows"):
        torch_codec().decode_into(bytes(5), wire, np.empty((2, 2), dtype=np.float32))
