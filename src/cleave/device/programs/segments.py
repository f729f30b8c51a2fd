"""A run of parts, and the head if there is one, over some rows of a sequence: forward, and backward from x alone.

Forward keeps nothing but keys and values. Backward goes forward again to have what entered each part, then back; inside
a part everything is made again, so that a device holds one part's inside at a time. A slice is one part, or a head,
without what passes by it. It knows no store and no wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cleave.device.programs import attention, head, mlp
from cleave.device.programs.attention import Cache
from cleave.device.programs.kernels import Array
from cleave.device.programs.linear import Unit
from cleave.protocol.programs import Attention, Head, Mlp, Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    parts: tuple[Part, ...]
    head: Head | None
    is_slice: bool


def forward(unit: Unit, segment: Segment, caches: Sequence[Cache], x: Array) -> Array:
    left = iter(caches)
    for part in segment.parts:
        x = _through(unit, segment, part, left, x, remembers=True)
    return x if segment.head is None else head.forward(unit, segment.head, x)


def rebuild(unit: Unit, segment: Segment, caches: Sequence[Cache], x: Array) -> None:
    """Forward only as far as there are keys and values to make."""
    left = iter(caches)
    parts = _until_last_attention(segment)
    for part in parts[:-1]:
        x = _through(unit, segment, part, left, x, remembers=True)
    if parts and isinstance(parts[-1], Attention):
        attention.remember(unit, parts[-1], next(left), x)


def backward(unit: Unit, segment: Segment, caches: Sequence[Cache], x: Array, dy: Array) -> Array:
    """dx"""
    entered, left = [x], iter(caches)
    for part in segment.parts if segment.head is not None else segment.parts[:-1]:
        entered.append(_through(unit, segment, part, left, entered[-1], remembers=False))
    if segment.head is not None:
        dy = head.backward(unit, segment.head, entered.pop(), dy)
    left = iter(reversed(caches))
    for part in reversed(segment.parts):
        match part:
            case Attention():
                dx = attention.backward(unit, part, next(left), entered.pop(), dy)
            case Mlp():
                dx = mlp.backward(unit, part, entered.pop(), dy)
        if not segment.is_slice:
            dx += dy
        dy = dx
    return dy


def _through(unit: Unit, segment: Segment, part: Part, caches: Iterator[Cache], x: Array, *, remembers: bool) -> Array:
    match part:
        case Attention():
            y = attention.forward(unit, part, next(caches), x, remembers=remembers)
        case Mlp():
            y = mlp.forward(unit, part, x)
    if not segment.is_slice:
        y += x
    return y


def _until_last_attention(segment: Segment) -> tuple[Part, ...]:
    last = max((i for i, part in enumerate(segment.parts) if isinstance(part, Attention)), default=-1)
    return segment.parts[: last + 1]


# ------------------------------------------------------------------------------------------------ what it takes


def forward_flops(unit: Unit, segment: Segment) -> float:
    total = 0.0 if segment.head is None else head.forward_flops(unit, segment.head)
    return total + _parts_flops(unit, segment.parts, remembers=True)


def rebuild_flops(unit: Unit, segment: Segment) -> float:
    parts = _until_last_attention(segment)
    total = _parts_flops(unit, parts[:-1], remembers=True)
    return total + sum(attention.remember_flops(unit, part) for part in parts[-1:] if isinstance(part, Attention))


def backward_flops(unit: Unit, segment: Segment) -> float:
    total = 0.0 if segment.head is None else head.backward_flops(unit, segment.head)
    again = segment.parts if segment.head is not None else segment.parts[:-1]
    total += _parts_flops(unit, again, remembers=False)
    for part in segment.parts:
        match part:
            case Attention():
                total += attention.backward_flops(unit, part)
            case Mlp():
                total += mlp.backward_flops(unit, part)
    return total


def workspace_bytes(unit: Unit, segment: Segment, hidden: int) -> int:
    """About what is made and forgotten on the way back, which is more than forward: what entered each part, and the
    inside of the widest."""
    widest = 0 if segment.head is None else head.workspace_elements(unit, segment.head)
    for part in segment.parts:
        match part:
            case Attention():
                widest = max(widest, attention.workspace_elements(unit, part))
            case Mlp():
                widest = max(widest, mlp.workspace_elements(unit, part))
    return 4 * (widest + unit.rows * hidden * (len(segment.parts) + 6))


def _parts_flops(unit: Unit, parts: Sequence[Part], *, remembers: bool) -> float:
    total = 0.0
    for part in parts:
        match part:
            case Attention():
                total += attention.forward_flops(unit, part, remembers=remembers)
            case Mlp():
                total += mlp.forward_flops(unit, part)
    return total
