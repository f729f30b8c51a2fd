"""Encode matrices as bytes and decode them: fp32, bf16, fp16 and q8 (`q8.py`), little endian, row by row.

In every format all rows have the same length, so that rows of an encoded matrix can be sliced. Encoding rounds to
nearest, ties to even. Callers with a faster implementation (torch) pass their own `Codec`, with identical results.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cleave.core.cost.wire import WireFormat, encoded_bytes
from cleave.core.model.batch import Matrix
from cleave.errors import ProtocolError
from cleave.protocol import q8
from cleave.protocol.frames import Buffer

Encoded = q8.Encoded
"""Contiguous bytes."""

_BLOCK = 1 << 16  # elements converted at a time, to stay in cache


class Codec(Protocol):
    def encode(self, matrix: Matrix, format: WireFormat) -> Encoded: ...

    def decode_into(self, data: Buffer, format: WireFormat, out: Matrix, add: bool = False) -> None: ...


class NumpyCodec:
    def encode(self, matrix: Matrix, format: WireFormat) -> Encoded:
        """Encode a matrix; a contiguous fp32 matrix is not copied for fp32."""
        match format:
            case "fp32":
                return np.ascontiguousarray(matrix, dtype="<f4").reshape(-1).view(np.uint8)
            case "fp16":
                with np.errstate(over="ignore"):
                    return np.ascontiguousarray(matrix, dtype="<f2").reshape(-1).view(np.uint8)
            case "bf16":
                return _to_bf16(np.ascontiguousarray(matrix, dtype="<f4").reshape(-1))
            case "q8":
                return q8.encode(matrix)

    def decode_into(self, data: Buffer, format: WireFormat, out: Matrix, add: bool = False) -> None:
        """Decode into `out`, or add to it; its rows need not be contiguous."""
        rows, cols = out.shape
        if len(data) != encoded_bytes(format, rows, cols):
            raise ProtocolError(
                f"expected {encoded_bytes(format, rows, cols)} bytes for {rows} x {cols} in {format}, got {len(data)}; "
                "send whole rows"
            )
        match format:
            case "fp32":
                values = np.frombuffer(data, dtype="<f4").reshape(rows, cols)
            case "fp16":
                values = np.frombuffer(data, dtype="<f2").reshape(rows, cols)
            case "bf16":
                _from_bf16(np.frombuffer(data, dtype="<u2").reshape(rows, cols), out, add)
                return
            case "q8":
                q8.decode_into(np.frombuffer(data, dtype=np.uint8), out, add=add)
                return
        if add:
            np.add(out, values, out=out)
        else:
            np.copyto(out, values)


def cut_columns(data: Encoded, format: WireFormat, cols: int, part: tuple[int, int]) -> Encoded | None:
    """Cut a range of columns out of encoded rows of `cols`; a view if it is all of them, None if it splits a block."""
    if part == (0, cols):
        return data
    if format == "q8":
        return q8.cut_columns(data, cols, *part)
    width = encoded_bytes(format, 1, 1)
    return data.reshape(-1, cols * width)[:, part[0] * width : part[1] * width].reshape(-1)


def _to_bf16(flat: Matrix) -> Encoded:
    out = np.empty(len(flat), dtype="<u2")
    working = np.empty(min(len(flat), _BLOCK), dtype=np.uint32)
    for start in range(0, len(flat), _BLOCK):
        block = flat[start : start + _BLOCK]
        bits, rounded = block.view(np.uint32), working[: len(block)]
        np.right_shift(bits, 16, out=rounded)
        np.bitwise_and(rounded, 1, out=rounded)  # ties to even
        np.add(rounded, 0x7FFF, out=rounded)
        np.add(rounded, bits, out=rounded)
        np.right_shift(rounded, 16, out=rounded)
        nan = np.isnan(block)
        if nan.any():
            rounded[nan] = 0x7FC0
        out[start : start + _BLOCK] = rounded
    return out.view(np.uint8)


def _from_bf16(values: NDArray[np.uint16], out: Matrix, add: bool) -> None:
    rows = max(1, _BLOCK // max(values.shape[1], 1))
    for start in range(0, len(values), rows):
        part, target = values[start : start + rows], out[start : start + rows]
        wide = np.empty(part.shape, dtype=np.uint32) if add else target.view(np.uint32)
        np.copyto(wide, part)
        np.left_shift(wide, 16, out=wide)
        if add:
            np.add(target, wide.view(np.float32), out=target)
