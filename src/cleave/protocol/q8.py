"""q8: signed bytes in blocks of 32 numbers along a row, each block with a bf16 scale.

A row is its scales and then its bytes, so all rows have the same length: a range of rows of an encoded matrix is the
encoding of those rows, and whole blocks of columns can be cut out. A number is byte x scale, exactly, in fp32.

    scale = max(largest |number| / 127, 2^-126), rounded up to bf16        NaN if a number is not finite
    byte  = number x (1 / scale), rounded to nearest, ties to even         0 if a number is not finite

Each operation is in fp32. The work is done in bands of rows that stay in cache, first the peaks of all blocks and then
the bytes. Numpy's loops cost most where they are short, so factors are repeated to whole rows; comparing magnitudes as
integers is twice as fast as comparing them as floats. The server's codec is in torch (`train/offload/codec.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cleave.core.cost.wire import BLOCK, SCALE_BYTES, blocks_of, encoded_bytes
from cleave.core.model.batch import Matrix

Encoded = NDArray[np.uint8]
Bytes = NDArray[np.int8]
Halves = NDArray[np.uint16]

MAGNITUDE: Final = 0x7FFFFFFF
"""Mask of all bits but the sign."""
_INFINITE: Final = 0x7F800000
_NAN: Final = 0x7FC0
_LEAST_SCALE: Final = np.float32(2.0**-126)
"""The smallest normal number, so that 1 / scale is finite and zeros need no rule of their own."""
_ROUNDING: Final = np.float32(1.5 * 2**23)
"""Numbers of this size are whole: adding it rounds to nearest, ties to even, and leaves the result in the low byte."""
_BAND: Final = 1 << 16
"""Numbers converted at a time: fewer cost more in calls; buffers for twice as many came as fresh pages."""


def encode(matrix: Matrix) -> Encoded:
    rows, cols = matrix.shape
    matrix = np.asarray(matrix, dtype="<f4")
    out = np.empty(encoded_bytes("q8", rows, cols), dtype=np.uint8)
    scales, numbers = split(out, rows, cols)
    halves, inverses, is_finite = scales_of(_peaks(matrix))
    scales[...] = halves.view(np.uint8)
    with np.errstate(invalid="ignore"):
        for band in _bands(rows, cols):
            values = _spread(inverses[band], cols)
            np.multiply(matrix[band], values, out=values)
            if not is_finite:
                np.nan_to_num(values, copy=False)
            np.add(values, _ROUNDING, out=values)
            np.copyto(numbers[band], values.view(np.int32), casting="unsafe")
    return out


def decode_into(data: Encoded, out: Matrix, *, add: bool) -> None:
    """Decode bytes whose length is known to be right."""
    rows, cols = out.shape
    scales, numbers = split(data, rows, cols)
    factors = factors_of(scales)
    with np.errstate(invalid="ignore", over="ignore"):  # a sender may send any scale
        for band in _bands(rows, cols):
            target, values = out[band], _spread(factors[band], cols)
            if add:
                np.multiply(values, numbers[band], out=values)
                np.add(target, values, out=target)
            else:
                np.copyto(target, numbers[band])
                np.multiply(target, values, out=target)


def _peaks(matrix: Matrix) -> NDArray[np.int32]:
    """Return the largest magnitude of each block, as the bits of fp32."""
    rows, cols = matrix.shape
    blocks = blocks_of(cols)
    peaks = np.empty((rows, blocks), dtype=np.int32)
    height = height_of(rows, cols, _BAND)
    working = np.empty((height, blocks * BLOCK), dtype=np.int32)
    working[:, cols:] = 0  # a short last block ends in zeros
    starts = np.arange(0, height * blocks * BLOCK, BLOCK, dtype=np.intp)
    for band in _bands(rows, cols):
        part = matrix[band].view(np.int32)
        magnitudes = working[: len(part)]
        np.bitwise_and(part, MAGNITUDE, out=magnitudes[:, :cols])
        flat, count = magnitudes.reshape(-1), len(part) * blocks
        np.maximum.reduceat(flat, starts[:count], out=peaks[band].reshape(-1))
    return peaks


def _spread(factors: Matrix, cols: int) -> Matrix:
    """Repeat the factor of each block for each of its numbers: faster than to multiply by blocks of 32."""
    return factors.repeat(BLOCK).reshape(len(factors), -1)[:, :cols]


def _bands(rows: int, cols: int) -> Iterator[slice]:
    """Cut rows into slices that are converted at a time."""
    height = height_of(rows, cols, _BAND)
    return (slice(top, min(top + height, rows)) for top in range(0, rows, height))


def height_of(rows: int, cols: int, band: int) -> int:
    """Return how many rows have so many numbers, at least one."""
    return max(1, min(rows, band // max(cols, BLOCK)))


# ------------------------------------------------------------------------------------------------ layout


def split(data: Encoded, rows: int, cols: int) -> tuple[Encoded, Bytes]:
    """Return views of the scales, 2 bytes a block, and of the numbers, one row of each per row."""
    table = data.reshape(rows, encoded_bytes("q8", 1, cols))
    width = SCALE_BYTES * blocks_of(cols)
    return table[:, :width], table[:, width:].view(np.int8)


def cut_columns(data: Encoded, cols: int, first: int, last: int) -> Encoded | None:
    """Cut columns out of whole encoded rows; None where that would split a block."""
    if first % BLOCK or (last % BLOCK and last != cols):
        return None
    rows = len(data) // encoded_bytes("q8", 1, cols)
    scales, numbers = split(data, rows, cols)
    out = np.empty(encoded_bytes("q8", rows, last - first), dtype=np.uint8)
    cut_scales, cut_numbers = split(out, rows, last - first)
    cut_scales[...] = scales[:, SCALE_BYTES * (first // BLOCK) : SCALE_BYTES * blocks_of(last)]
    cut_numbers[...] = numbers[:, first:last]
    return out


# ------------------------------------------------------------------------------------------------ scales


def scales_of(peaks: NDArray[np.int32]) -> tuple[Halves, Matrix, bool]:
    """Return the scales of blocks as bf16, what their numbers are multiplied by, and whether all numbers are finite.

    `peaks` are the largest magnitudes of blocks, as the bits of fp32: those of infinity and NaN are the largest.
    """
    if int(peaks.max(initial=0)) >= _INFINITE:
        spoiled = peaks >= _INFINITE
        halves, inverses, _ = scales_of(np.where(spoiled, np.int32(0), peaks))
        halves[spoiled], inverses[spoiled] = _NAN, 0
        return halves, inverses, False
    scales = peaks.view(np.float32) / np.float32(127)
    np.maximum(scales, _LEAST_SCALE, out=scales)
    bits = scales.view(np.uint32)
    bits += np.uint32(0xFFFF)
    bits &= np.uint32(0xFFFF0000)
    return (bits >> np.uint32(16)).astype("<u2"), np.float32(1) / scales, True


def factors_of(scales: Encoded) -> Matrix:
    """Return encoded scales as fp32."""
    return (np.ascontiguousarray(scales).view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32)
