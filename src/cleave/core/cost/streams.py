"""Streams of numbers between server and devices, and the format each travels in.

A run has one wire; a few streams deviate from it. The rules are here and nowhere else: the server and the autograd
bridge ask for the format of what they send, plans for the bytes. docs/wire.md has the measurements behind them.
"""

from __future__ import annotations

from typing import Literal

from cleave.core.cost.wire import WIRE_BYTES, WireFormat

Stream = Literal["activation", "activation gradient", "weight", "weight gradient", "logit gradient", "vector", "table"]
"""- activation, activation gradient: between stages, and as operands and results of products
- weight, weight gradient: matrices of parameters
- logit gradient: dY of the head where the head is a product of its own (grain gemm)
- vector: norms and biases, as sent to devices
- table: positions, masks, targets, losses per token
"""


def stream_format(stream: Stream, wire: WireFormat) -> WireFormat:
    """Return the format of a stream in a run with this wire."""
    match stream:
        case "vector" | "table":  # small, and norms are sensitive
            return "fp32"
        case "logit gradient":  # one large number among thousands of tiny ones: nearly all that 8 bits cost
            return "bf16" if wire == "q8" else wire
        case "activation" | "activation gradient" | "weight" | "weight gradient":
            return wire


def dy_format(is_head: bool, wire: WireFormat) -> WireFormat:
    """Return the format of dY of a linear layer that is a product of its own."""
    return stream_format("logit gradient" if is_head else "activation gradient", wire)


def stream_bytes(stream: Stream, wire: WireFormat) -> float:
    """Bytes per number of a stream."""
    return WIRE_BYTES[stream_format(stream, wire)]
