"""Number formats: bytes per element on the wire and on a device."""

from __future__ import annotations

from typing import Final, Literal, get_args, overload

WireFormat = Literal["fp32", "bf16", "fp16", "q8"]
WireName = Literal["fp32", "bf16", "fp16", "q8", "int8"]
"""What people may write: `int8` is q8's former name, kept for scripts."""
WIRE_FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)
WIRE_NAMES: tuple[WireName, ...] = get_args(WireName)
BLOCK: Final = 32
"""Numbers of a row that share a scale in q8; the last block of a row may have fewer."""
SCALE_BYTES: Final = 2
WIRE_BYTES: dict[WireFormat, float] = {"fp32": 4, "bf16": 2, "fp16": 2, "q8": 1 + SCALE_BYTES / BLOCK}
"""Per number of a matrix whose rows are whole blocks; plans count with these."""
PLAN_WIRE: WireFormat = "bf16"
"""Default of plans, as fleets over home links would use it. Live training defaults to fp32."""
DEVICE_BYTES = 4
"""A live device holds numbers as fp32, whatever the wire."""


def encoded_bytes(format: WireFormat, rows: int, cols: int) -> int:
    """Bytes of a matrix on the wire."""
    if format == "q8":
        return rows * (cols + SCALE_BYTES * blocks_of(cols))
    return rows * cols * int(WIRE_BYTES[format])


def blocks_of(cols: int) -> int:
    """Blocks of q8 in a row."""
    return -(-cols // BLOCK)


@overload
def format_of(name: WireName) -> WireFormat: ...


@overload
def format_of(name: object) -> WireFormat | None: ...


def format_of(name: object) -> WireFormat | None:
    """Return a wire format, given by whatever name it has or had; None for anything else."""
    if name == "int8":
        return "q8"
    return name if name in WIRE_FORMATS else None
