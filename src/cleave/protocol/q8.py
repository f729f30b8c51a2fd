"""q8: signed bytes in blocks of 32 numbers along a row, each block with a bf16 scale.

A row is its scales and then its bytes, so all rows have the same length: a range of rows of an encoded matrix is the
encoding of those rows, and whole blocks of columns can be cut out. A number is byte x scale, exactly, in fp32.

    scale = max(largest |number| / 127, 2^-126), rounded up to bf16        NaN if a number is not finite
    byte  = number x (1 / scale), rounded to nearest, ties to even         0 if a number is not finite

Each operation is in fp32. `scales_of` is shared with the torch codec, the loops are not. The work is done in bands of
rows that stay in cache; comparing magnitudes as integers is twice as fast as comparing them as floats.
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

_MAGNITUDE: Final = 0x7FFFFFFF
"""Mask of all bits but the sign."""
_INFINITE: Final = 0x7F800000
_NAN: Final = 0x7FC0
_LEAST_SCALE: Final = np.float32(2.0**-126)
"""The smallest normal number, so that 1 / scale is finite and zeros need no rule of their own."""
_BAND: Final = 1 << 17
"""Numbers converted at a time."""


def encode(matrix: Matrix) -> Encoded:
    rows, cols = matrix.shape
    matrix = np.asarray(matrix, dtype="<f4")
    out = np.empty(encoded_bytes("q8", rows, cols), dtype=np.uint8)
    scales, numbers = split(out, rows, cols)
    blocks, height = blocks_of(cols), min(rows, max(1, _BAND // max(cols, BLOCK)))
    starts = np.arange(0, height * blocks * BLOCK, BLOCK, dtype=np.intp)
    working = np.zeros((height, blocks * BLOCK), dtype=np.float32)  # a short last block ends in zeros
    for band in bands(rows, height):
        part = matrix[band]
        values = working[: len(part)]
        bits = values.view(np.int32)
        np.bitwise_and(part.view(np.int32), _MAGNITUDE, out=bits[:, :cols])
        peaks = np.maximum.reduceat(bits.reshape(-1), starts[: len(part) * blocks])
        halves, inverses, is_finite = scales_of(peaks.reshape(len(part), blocks))
        scales[band] = halves.view(np.uint8)
        values = values[:, :cols]
        with np.errstate(invalid="ignore"):
            _multiply(part, inverses, values)
        np.rint(values, out=values)
        if not is_finite:
            np.nan_to_num(values, copy=False)
        np.copyto(numbers[band], values, casting="unsafe")
    return out


def decode_into(data: Encoded, out: Matrix, *, add: bool) -> None:
    """Decode bytes whose length is known to be right."""
    rows, cols = out.shape
    scales, numbers = split(data, rows, cols)
    height = min(rows, max(1, _BAND // max(cols, BLOCK)))
    working = np.empty((height if add else 0, cols), dtype=np.float32)
    for band in bands(rows, height):
        factors = factors_of(scales[band])
        target = working[: len(factors)] if add else out[band]
        np.copyto(target, numbers[band])
        with np.errstate(invalid="ignore", over="ignore"):  # a sender may send any scale
            _multiply(target, factors, target)
            if add:
                out[band] += target


def _multiply(values: Matrix, factors: Matrix, out: Matrix) -> None:
    """Multiply each block by its factor."""
    rows, cols = values.shape
    whole = cols // BLOCK
    shape, end = (rows, whole, BLOCK), whole * BLOCK
    np.multiply(values[:, :end].reshape(shape), factors[:, :whole, None], out=out[:, :end].reshape(shape))
    if end < cols:
        np.multiply(values[:, end:], factors[:, whole:], out=out[:, end:])


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


def bands(rows: int, height: int) -> Iterator[slice]:
    """Cut rows into slices of at most `height`."""
    return (slice(top, min(top + height, rows)) for top in range(0, rows, height))


# ------------------------------------------------------------------------------------------------ scales


def scales_of(peaks: NDArray[np.int32]) -> tuple[Halves, Matrix, bool]:
    """Return the scales of blocks as bf16, what their numbers are multiplied by, and whether all numbers are finite.

    `peaks` are the largest magnitudes of blocks, as the bits of fp32: those of infinity and NaN are the largest.
    """
    if int(peaks.max()) >= _INFINITE:
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
