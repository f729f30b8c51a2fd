"""Number formats: bytes per element on the wire and on a device."""

from __future__ import annotations

from typing import Literal, get_args

WireFormat = Literal["fp32", "bf16", "fp16", "int8"]
WIRE_FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)
WIRE_BYTES: dict[WireFormat, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1}
PLAN_WIRE: WireFormat = "bf16"
"""Default of plans, as fleets over home links would use it. Live training defaults to fp32."""
DEVICE_BYTES = 4
"""A live device holds numbers as fp32, whatever the wire."""
_SCALE_BYTES = 4


def encoded_bytes(format: WireFormat, rows: int, cols: int) -> int:
    """Bytes of a matrix on the wire; int8 has one fp32 scale per row."""
    return rows * cols * WIRE_BYTES[format] + (_SCALE_BYTES * rows if format == "int8" else 0)
