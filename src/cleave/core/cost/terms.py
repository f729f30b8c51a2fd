"""Terms of resident shards: bytes per number by where it is, and what a device recomputes in backward.

`live_terms` describe today's devices and are used by plans of a live server; `lean_terms` describe devices that hold as
little as possible and are used by plans of named models. The laws that use them are in `resident.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cleave.core.cost.streams import stream_bytes
from cleave.core.cost.wire import DEVICE_BYTES, WireFormat

RUNTIME_BYTES = 16e6
"""A device's own buffers, on top of everything counted here."""
ALLOWANCE_BYTES = 64 << 20
"""Memory that computing may use beyond what a live device offers: tiles and buffers, however small the task."""
STATE_NUMBER_BYTES = 4 * DEVICE_BYTES
"""Keys, values and their gradients on a live device, per token of an open sequence and element of K."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Bytes per number by where it is, and what a device recomputes in backward."""

    activation_bytes: float
    """per activation on the wire; the same for weights and gradients below"""
    weight_bytes: float
    gradient_bytes: float
    resident_bytes: float
    """per parameter on the device"""
    accumulator_bytes: float
    """per gradient of a trained parameter on the device"""
    state_bytes: float
    """K, V and their gradients, per token of an open sequence and element of K"""
    working_bytes: float
    """per activation on the device"""
    attention_numbers: float
    """numbers at work per row inside a sublayer, in widths of its inner activation"""
    mlp_numbers: float
    head_numbers: float
    score_numbers: float
    """numbers at work per row of an attention, in keys of the sequence"""
    hidden_numbers: float
    """numbers at work per row, in hidden widths: results and copies"""
    moved_numbers: float
    """numbers held per row on top of those, in hidden widths: x and dy"""
    entering_numbers: float
    """numbers per row and part, in hidden widths: its input"""
    tables_bytes: float
    """positions and mask, per row of a sequence"""
    runtime_bytes: float
    """a device's own buffers, on top of everything counted here"""
    is_thin: bool
    """reading weights costs what was measured (`thin_effort`); else what memory bandwidth allows"""
    recomputes: Literal["once", "by sublayer"]
    """backward reruns the whole forward once, or first computes each sublayer's input and then reruns one at a time"""


def live_terms(wire: WireFormat) -> Terms:
    """Terms of live devices: fp32 at rest, the wire's format in transit."""
    return Terms(
        activation_bytes=stream_bytes("activation", wire),
        weight_bytes=stream_bytes("weight", wire),
        gradient_bytes=stream_bytes("weight gradient", wire),
        resident_bytes=DEVICE_BYTES,
        accumulator_bytes=DEVICE_BYTES,
        state_bytes=STATE_NUMBER_BYTES,
        working_bytes=DEVICE_BYTES,
        attention_numbers=8,
        mlp_numbers=6,
        head_numbers=1,
        score_numbers=1,
        hidden_numbers=8,
        moved_numbers=2,
        entering_numbers=1,
        tables_bytes=1028,
        runtime_bytes=0,
        is_thin=True,
        recomputes="by sublayer",
    )


def lean_terms(wire: WireFormat) -> Terms:
    """The least a device can hold: 16-bit weights, gradients and activations, dK and dV in fp32."""
    return Terms(
        activation_bytes=stream_bytes("activation", wire),
        weight_bytes=stream_bytes("weight", wire),
        gradient_bytes=stream_bytes("weight gradient", wire),
        resident_bytes=2,
        accumulator_bytes=2,
        state_bytes=12,
        working_bytes=2,
        attention_numbers=4,
        mlp_numbers=4,
        head_numbers=4,
        score_numbers=2,
        hidden_numbers=6,
        moved_numbers=0,
        entering_numbers=0,
        tables_bytes=0,
        runtime_bytes=RUNTIME_BYTES,
        is_thin=False,
        recomputes="once",
    )
