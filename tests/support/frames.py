"""Frames and numbers in the format of the golden files."""

from __future__ import annotations

import math

import msgspec

from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Matrix
from cleave.protocol import messages
from cleave.protocol.messages import AnyMessage, FromDevice, Result, Store
from cleave.protocol.numbers import NumpyCodec

Json = dict[str, object]
Frame = tuple[AnyMessage, bytes]

codec = NumpyCodec()


def stored(operand: int, matrix: Matrix, wire: WireFormat, first: int, last: int) -> Frame:
    payload = bytes(codec.encode(matrix[first:last], wire))
    rows, cols = matrix.shape
    return (
        Store(
            operand=operand,
            rows=rows,
            cols=cols,
            format=wire,
            first_row=first,
            strip_rows=last - first,
            payload=len(payload),
        ),
        payload,
    )


def result(task: int, at: tuple[int, int], part: Matrix, wire: WireFormat, inner: int = 0) -> Frame:
    payload = bytes(codec.encode(part, wire))
    rows, cols = part.shape
    return (
        Result(
            task=task,
            first_row=at[0],
            rows=rows,
            first_col=at[1],
            cols=cols,
            format=wire,
            flops=2.0 * rows * cols * inner,
            compute_s=0.0009765625,
            down_bytes=64,
            down_s=0.001953125,
            payload=len(payload),
        ),
        payload,
    )


def described(frame: Frame) -> Json:
    message, payload = frame
    assert message.payload == len(payload)
    return {
        "from": "device" if isinstance(message, FromDevice) else "server",
        "message": msgspec.to_builtins(message),
        "header_hex": messages.encode(message).hex(),
        "payload_hex": payload.hex(),
    }


def values(matrix: Matrix) -> list[list[float | str]]:
    return [[float(x) if math.isfinite(x) else str(float(x)) for x in row] for row in matrix]
