"""Laws of q8: within half a step of its block, blocks independent, rows and whole blocks cut out, NaN in the scale."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from cleave.core.cost.wire import BLOCK, WIRE_BYTES, blocks_of, encoded_bytes, format_of
from cleave.core.model.batch import Matrix
from cleave.protocol import q8
from cleave.protocol.numbers import Codec, NumpyCodec, cut_columns

codec = NumpyCodec()
quick = settings(max_examples=60, deadline=None)
shapes = st.tuples(st.integers(1, 6), st.integers(1, 100))
finite = st.floats(-(2.0**100), 2.0**100, width=32)
finite_matrix = arrays.arrays(np.float32, shapes, elements=finite, fill=finite)
any_matrix = arrays.arrays(np.float32, shapes, elements=st.floats(width=32), fill=st.floats(width=32))
bad = pytest.mark.parametrize("bad", [0x7FC00000, 0x7F800001, 0xFFC00000, 0x7F800000, 0xFF800000])


def torch_codec() -> Codec:
    from cleave.train.offload.codec import TorchCodec

    return TorchCodec()


each_codec = pytest.mark.parametrize("make", [NumpyCodec, torch_codec], ids=["numpy", "torch"])
reads_only = pytest.mark.filterwarnings("ignore:The given buffer is not writable")


def decoded(data: NDArray[np.uint8], shape: tuple[int, int], using: Codec = codec) -> Matrix:
    out = np.full(shape, np.float32(7), dtype=np.float32)
    using.decode_into(data.data, "q8", out)
    return out


def round_trip(matrix: Matrix) -> Matrix:
    return decoded(codec.encode(matrix, "q8"), matrix.shape)


def by_the_book(row: Matrix) -> bytes:
    """One row as the protocol describes it, block by block."""
    scales, numbers = bytearray(), bytearray()
    for first in range(0, len(row), BLOCK):
        block = row[first : first + BLOCK]
        if not np.isfinite(block).all():
            scales += b"\xc0\x7f"
            numbers += bytes(len(block))
            continue
        least = max(np.abs(block).max() / np.float32(127), np.float32(2.0**-126))
        half = (int(least.view(np.uint32)) + 0xFFFF) >> 16
        scale = np.uint32(half << 16).view(np.float32)
        scales += half.to_bytes(2, "little")
        numbers += np.rint(block * (np.float32(1) / scale)).astype(np.int8).tobytes()
    return bytes(scales + numbers)


# ------------------------------------------------------------------------------------------------ rounding


@each_codec
@quick
@given(matrix=any_matrix)
def test_the_bytes_are_those_of_the_protocol(make: Callable[[], Codec], matrix: Matrix) -> None:
    assert bytes(make().encode(matrix, "q8")) == b"".join(map(by_the_book, matrix))


@quick
@given(finite_matrix)
def test_numbers_are_within_half_a_step_of_their_block(matrix: Matrix) -> None:
    scales, _ = q8.split(codec.encode(matrix, "q8"), *matrix.shape)
    steps = np.repeat(q8.factors_of(scales).astype(np.float64), BLOCK, axis=1)[:, : matrix.shape[1]]
    errors = np.abs(round_trip(matrix).astype(np.float64) - matrix)
    assert (errors <= 0.50002 * steps).all()
    for first in range(0, matrix.shape[1], BLOCK):
        largest = np.abs(matrix[:, first : first + BLOCK].astype(np.float64)).max(axis=1)
        assert (steps[:, first] <= np.maximum(largest / 127 * (1 + 2.0**-7) * (1 + 1e-6), 2.0**-126)).all()


@quick
@given(finite_matrix)
def test_a_second_round_trip_moves_nothing_by_more_than_the_first(matrix: Matrix) -> None:
    once = round_trip(matrix)
    assert (np.abs(round_trip(once) - once) <= np.abs(once).max() / 250 + 2.0**-126).all()


@pytest.mark.parametrize("shape", [(1, 1), (3, 31), (2, 64), (3, 65)])
def test_zeros_stay_zeros(shape: tuple[int, int]) -> None:
    np.testing.assert_array_equal(round_trip(np.zeros(shape, dtype=np.float32)), 0)
    np.testing.assert_array_equal(round_trip(np.full(shape, -1e-45, dtype=np.float32)), 0)


def test_ties_go_to_even() -> None:
    row = np.array([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]], dtype=np.float32)
    assert round_trip(row).tolist() == [[127, 0, 2, 2, 0, -2, -2]]


@quick
@given(finite_matrix)
def test_blocks_do_not_influence_each_other(matrix: Matrix) -> None:
    together = round_trip(matrix)
    for row in range(len(matrix)):
        for first in range(0, matrix.shape[1], BLOCK):
            part = matrix[row : row + 1, first : first + BLOCK]
            np.testing.assert_array_equal(round_trip(part), together[row : row + 1, first : first + BLOCK])


@bad
@each_codec
def test_a_block_with_a_number_that_is_not_finite_arrives_as_nan(make: Callable[[], Codec], bad: int) -> None:
    matrix = np.ones((2, 70), dtype=np.float32)
    matrix.view(np.uint32)[1, 40] = bad
    back = decoded(make().encode(matrix, "q8"), matrix.shape, make())
    assert np.isnan(back[1, 32:64]).all()
    back[1, 32:64] = 1
    np.testing.assert_allclose(back, 1, rtol=0.005)


def test_large_numbers_arrive_as_such_and_the_largest_as_infinite_at_worst() -> None:
    assert np.isfinite(round_trip(np.full((1, 40), 3.37e38, dtype=np.float32))).all()
    assert (round_trip(np.full((1, 40), 3.4028235e38, dtype=np.float32)) > 3.3e38).all()


# ------------------------------------------------------------------------------------------------ layout


@quick
@given(shape=shapes)
def test_sizes_follow_the_law(shape: tuple[int, int]) -> None:
    rows, cols = shape
    assert len(codec.encode(np.ones(shape, dtype=np.float32), "q8")) == rows * (cols + 2 * -(-cols // 32))
    assert encoded_bytes("q8", rows, BLOCK * cols) == WIRE_BYTES["q8"] * rows * BLOCK * cols


@quick
@given(matrix=any_matrix, data=st.data())
def test_rows_of_an_encoding_are_the_encoding_of_the_rows(matrix: Matrix, data: st.DataObject) -> None:
    rows, cols = matrix.shape
    first = data.draw(st.integers(0, rows - 1))
    last = data.draw(st.integers(first + 1, rows))
    size = encoded_bytes("q8", 1, cols)
    whole = codec.encode(matrix, "q8")
    part = cut_columns(whole[first * size : last * size], "q8", cols, (0, cols))
    assert part is not None
    assert np.shares_memory(part, whole)
    assert bytes(part) == bytes(codec.encode(matrix[first:last], "q8"))


@quick
@given(matrix=any_matrix, data=st.data())
def test_whole_blocks_of_columns_can_be_cut_out(matrix: Matrix, data: st.DataObject) -> None:
    cols = matrix.shape[1]
    first = data.draw(st.integers(0, blocks_of(cols) - 1))
    last = data.draw(st.integers(first + 1, blocks_of(cols)))
    part = (first * BLOCK, min(last * BLOCK, cols))
    cut = cut_columns(codec.encode(matrix, "q8"), "q8", cols, part)
    assert cut is not None
    assert bytes(cut) == bytes(codec.encode(matrix[:, slice(*part)], "q8"))


@pytest.mark.parametrize("part", [(1, 64), (0, 31), (32, 65), (33, 70)])
def test_columns_that_would_split_a_block_are_not_cut(part: tuple[int, int]) -> None:
    assert cut_columns(codec.encode(np.ones((3, 70), dtype=np.float32), "q8"), "q8", 70, part) is None


# ------------------------------------------------------------------------------------------------ torch


large = pytest.mark.parametrize("shape", [(5000, 33), (37, 7001), (3, 300_001), (8192, 32), (4099, 160), (3, 600_000)])
"""More than a band of either codec; rows of whole blocks, which torch converts itself, and others."""


@reads_only
@quick
@given(matrix=any_matrix, add=st.booleans())
def test_torch_decodes_the_same_numbers(matrix: Matrix, add: bool) -> None:
    data = bytes(codec.encode(matrix, "q8"))
    one, two = (np.full((matrix.shape[0] + 2, matrix.shape[1] + 2), 0.5, dtype=np.float32) for _ in range(2))
    codec.decode_into(data, "q8", one[1:-1, 1:-1], add=add)
    torch_codec().decode_into(data, "q8", two[1:-1, 1:-1], add=add)
    np.testing.assert_array_equal(one, two)


@settings(max_examples=20, deadline=None)
@given(matrix=any_matrix)
def test_torch_encodes_any_numbers_of_a_large_matrix_to_the_same_bytes(matrix: Matrix) -> None:
    repeated = np.resize(matrix, (8192, 32))
    assert bytes(torch_codec().encode(repeated, "q8")) == bytes(codec.encode(repeated, "q8"))


@reads_only
@large
def test_large_matrices_have_the_same_bytes_and_numbers_in_torch(shape: tuple[int, int]) -> None:
    wide = np.random.default_rng(0).standard_normal((shape[0], shape[1] + 7), dtype=np.float32)
    matrix = wide[:, 5:-2]  # rows need not be contiguous
    matrix[1, 5:8] = np.nan, np.inf, -np.inf
    ours = codec.encode(matrix, "q8")
    assert bytes(torch_codec().encode(matrix, "q8")) == bytes(ours)
    for add in (False, True):
        one, two = (np.full(wide.shape, 0.5, dtype=np.float32) for _ in range(2))
        codec.decode_into(bytes(ours), "q8", one[:, 5:-2], add=add)
        torch_codec().decode_into(bytes(ours), "q8", two[:, 5:-2], add=add)
        np.testing.assert_array_equal(one, two)


# ------------------------------------------------------------------------------------------------ hostile payloads


@reads_only
@each_codec
@pytest.mark.parametrize("half", [0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81])
def test_a_scale_that_is_not_finite_makes_its_block_so(make: Callable[[], Codec], half: int) -> None:
    data = codec.encode(np.ones((2, 40), dtype=np.float32), "q8")
    q8.split(data, 2, 40)[0][1, :2] = np.frombuffer(half.to_bytes(2, "little"), dtype=np.uint8)
    back = decoded(data, (2, 40), make())
    assert not np.isfinite(back[1, :32]).any()
    assert np.isfinite(back[0]).all()
    assert np.isfinite(back[1, 32:]).all()


@reads_only
@each_codec
@quick
@given(data=st.binary(min_size=2 * 44, max_size=2 * 44))
def test_any_bytes_of_the_right_length_decode_to_byte_times_scale(make: Callable[[], Codec], data: bytes) -> None:
    back = decoded(np.frombuffer(data, dtype=np.uint8), (2, 40), make())
    for row in range(2):
        for col in range(40):
            half = int.from_bytes(data[row * 44 + 2 * (col // 32) :][:2], "little")
            scale = np.uint32(half << 16).view(np.float32)
            with np.errstate(all="ignore"):
                expected = np.float32(np.int8(np.uint8(data[row * 44 + 4 + col]).view(np.int8))) * scale
            np.testing.assert_array_equal(back[row, col], expected)


def test_int8_is_the_former_name_of_q8() -> None:
    assert [format_of(name) for name in ("int8", "q8", "bf16", "fp8", None, 3)] == [
        "q8",
        "q8",
        "bf16",
        None,
        None,
        None,
    ]
