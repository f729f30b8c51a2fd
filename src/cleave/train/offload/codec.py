# pyright: standard
"""The codec of `protocol/numbers.py` with 16-bit formats and q8 in torch, several times faster than numpy; same bytes.

Work that needs room beside its operands is done in bands of rows: torch would allocate it for the whole matrix, as
fresh pages, which costs more than the arithmetic.
"""

from __future__ import annotations

import threading
import warnings
from typing import Final

import numpy as np
import torch

from cleave.core.cost.wire import BLOCK, WireFormat, encoded_bytes
from cleave.core.model.batch import Matrix
from cleave.protocol import q8
from cleave.protocol.frames import Buffer
from cleave.protocol.numbers import Encoded, NumpyCodec

# Received buffers may be read-only memory; they are only read here.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

_HALVES: dict[WireFormat, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BAND: Final = 1 << 19
"""Numbers converted at a time: a call of torch costs more than one of numpy."""
_LEAST: Final = 1 << 18
"""Matrices of fewer numbers are left to numpy in q8."""

_thread = threading.local()


class TorchCodec(NumpyCodec):
    def encode(self, matrix: Matrix, format: WireFormat) -> Encoded:
        if format == "q8" and _is_for_torch(matrix):
            return _encode_q8(matrix)
        if format not in _HALVES:
            return super().encode(matrix, format)
        encoded = np.empty(encoded_bytes(format, *matrix.shape), dtype=np.uint8)  # torch's own would be fresh pages
        target = torch.from_numpy(encoded).view(_HALVES[format]).view(*matrix.shape)
        target.copy_(torch.from_numpy(matrix))
        return encoded

    def decode_into(self, data: Buffer, format: WireFormat, out: Matrix, add: bool = False) -> None:
        rows, cols = out.shape
        is_whole = len(data) == encoded_bytes(format, rows, cols)
        if is_whole and format == "q8" and _is_for_torch(out):
            _decode_q8(data, out, add)
            return
        if not is_whole or format not in _HALVES:
            super().decode_into(data, format, out, add)
            return
        target = torch.from_numpy(out)
        values = torch.frombuffer(data, dtype=_HALVES[format]).view(rows, cols)
        if add:
            height = q8.height_of(rows, cols, _BAND)
            for part, into in zip(values.split(height), target.split(height), strict=True):
                into += part
        else:
            target.copy_(values)


def _encode_q8(matrix: Matrix) -> Encoded:
    rows, cols = matrix.shape
    height, room = _band(rows, cols)
    out = np.empty(encoded_bytes("q8", rows, cols), dtype=np.uint8)
    scales, numbers = q8.split(out, rows, cols)
    given, target = _blocks(torch.from_numpy(matrix)), _blocks(torch.from_numpy(numbers))
    peaks = np.empty((height, cols // BLOCK), dtype=np.int32)
    for top in range(0, rows, height):
        band = slice(top, min(top + height, rows))
        part, largest = given[band], peaks[: band.stop - top]
        values = room[: len(part)]
        magnitudes = torch.bitwise_and(part.view(torch.int32), q8.MAGNITUDE, out=values.view(torch.int32))
        torch.amax(magnitudes, -1, out=torch.from_numpy(largest))
        halves, inverses, is_finite = q8.scales_of(largest)
        scales[band] = halves.view(np.uint8)
        torch.mul(part, torch.from_numpy(inverses).unsqueeze(-1), out=values).round_()
        target[band].copy_(values if is_finite else values.nan_to_num_())
    return out


def _decode_q8(data: Buffer, out: Matrix, add: bool) -> None:
    rows, cols = out.shape
    height, room = _band(rows, cols)
    scales, _ = q8.split(np.frombuffer(data, dtype=np.uint8), rows, cols)
    factors = torch.from_numpy(q8.factors_of(scales)).unsqueeze(-1)
    numbers = torch.frombuffer(data, dtype=torch.int8).view(rows, -1)[:, scales.shape[1] :]
    given, target = _blocks(numbers), _blocks(torch.from_numpy(out))
    for part, factor, into in zip(given.split(height), factors.split(height), target.split(height), strict=True):
        if add:
            into += room[: len(part)].copy_(part).mul_(factor)
        else:
            into.copy_(part).mul_(factor)


def _is_for_torch(matrix: Matrix) -> bool:
    return matrix.size >= _LEAST and matrix.shape[1] % BLOCK == 0 and matrix.dtype == np.float32


def _blocks(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.unflatten(1, (-1, BLOCK))


def _band(rows: int, cols: int) -> tuple[int, torch.Tensor]:
    """Return the rows of a band, and room for their blocks that this thread keeps."""
    height = q8.height_of(rows, cols, _BAND)
    held: torch.Tensor | None = getattr(_thread, "numbers", None)
    if held is None or held.numel() < height * cols:
        held = torch.empty(max(height * cols, _BAND))
        _thread.numbers = held
    return height, held[: height * cols].view(height, -1, BLOCK)
