# pyright: standard
"""The codec of `protocol/numbers.py` in torch, which rounds several times faster than numpy; same bytes."""

from __future__ import annotations

import warnings
from typing import Final

import numpy as np
import torch

from cleave.core.cost.wire import BLOCK, WireFormat, blocks_of, encoded_bytes
from cleave.core.model.batch import Matrix
from cleave.protocol import q8
from cleave.protocol.frames import Buffer
from cleave.protocol.numbers import Encoded, NumpyCodec

# Received buffers may be read-only memory; they are only read here.
warnings.filterwarnings("ignore", message="The given buffer is not writable")

_HALVES: dict[WireFormat, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16}
_BAND: Final = 1 << 18
"""Numbers converted at a time in q8: fewer cost more in calls, more do not stay in cache."""


class TorchCodec(NumpyCodec):
    def encode(self, matrix: Matrix, format: WireFormat) -> Encoded:
        if format == "q8":
            return _to_q8(torch.from_numpy(np.asarray(matrix, dtype=np.float32)))
        if format not in _HALVES:
            return super().encode(matrix, format)
        encoded = np.empty(encoded_bytes(format, *matrix.shape), dtype=np.uint8)  # torch's own would be fresh pages
        target = torch.from_numpy(encoded).view(_HALVES[format]).view(*matrix.shape)
        target.copy_(torch.from_numpy(matrix))
        return encoded

    def decode_into(self, data: Buffer, format: WireFormat, out: Matrix, add: bool = False) -> None:
        if format == "fp32" or len(data) != encoded_bytes(format, *out.shape):
            super().decode_into(data, format, out, add)
            return
        target = torch.from_numpy(out)
        if format == "q8":
            _from_q8(data, target, add)
            return
        values = torch.frombuffer(data, dtype=_HALVES[format]).view(*out.shape)
        if add:
            target += values
        else:
            target.copy_(values)


def _to_q8(matrix: torch.Tensor) -> Encoded:
    rows, cols = matrix.shape
    out = np.empty(encoded_bytes("q8", rows, cols), dtype=np.uint8)
    scales, numbers = q8.split(out, rows, cols)
    blocks = blocks_of(cols)
    working = torch.zeros(min(rows, max(1, _BAND // (blocks * BLOCK))), blocks * BLOCK)  # a short last block is padded
    for band in q8.bands(rows, len(working)):
        part = matrix[band]
        values = working[: len(part)]
        torch.abs(part, out=values[:, :cols])
        peaks = values.view(torch.int32).unflatten(1, (blocks, BLOCK)).amax(2).numpy()
        halves, inverses, is_finite = q8.scales_of(peaks)
        scales[band] = halves.view(np.uint8)
        _multiply(part, torch.from_numpy(inverses), values[:, :cols])
        values.round_()
        if not is_finite:
            values.nan_to_num_()
        torch.from_numpy(numbers[band]).copy_(values[:, :cols])
    return out


def _from_q8(data: Buffer, out: torch.Tensor, add: bool) -> None:
    rows, cols = out.shape
    scales, _ = q8.split(np.frombuffer(data, dtype=np.uint8), rows, cols)
    numbers = torch.frombuffer(data, dtype=torch.int8).view(rows, -1)[:, -cols:]
    height = min(rows, max(1, _BAND // (blocks_of(cols) * BLOCK)))
    working = torch.empty(height if add else 0, cols)
    for band in q8.bands(rows, height):
        factors = torch.from_numpy(q8.factors_of(scales[band]))
        target = working[: len(factors)] if add else out[band]
        target.copy_(numbers[band])
        _multiply(target, factors, target)
        if add:
            out[band] += target


def _multiply(values: torch.Tensor, factors: torch.Tensor, out: torch.Tensor) -> None:
    """Multiply each block by its factor."""
    whole = values.shape[1] // BLOCK
    shape, end = (whole, BLOCK), whole * BLOCK
    torch.mul(values[:, :end].unflatten(1, shape), factors[:, :whole, None], out=out[:, :end].unflatten(1, shape))
    if end < values.shape[1]:
        torch.mul(values[:, end:], factors[:, whole:], out=out[:, end:])
