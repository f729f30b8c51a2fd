"""A shard of the model over some rows of a sequence: forward, and backward from the input alone.

Forward keeps only keys and values. Backward first reruns forward to recover the input of each part, then goes back
through the parts; each recomputes its own inner activations, so a device holds those of one part at a time. A slice
omits the residual connection, which the server adds. Knows no store and no wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cleave.core.model.decoder import Attention, Head, Mlp, Part
from cleave.device.kernels import Array
from cleave.device.programs import attention, head, mlp
from cleave.device.programs.linear import Scope
from cleave.device.store import KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShard:
    """Consecutive sublayers and perhaps the head, or a slice of just one; weights are operand numbers."""

    parts: tuple[Part, ...]
    head: Head | None
    is_slice: bool


def forward(scope: Scope, shard: DeviceShard, caches: Sequence[KVCache], x: Array) -> Array:
    remaining = iter(caches)
    for part in shard.parts:
        x = _apply_part(scope, shard, part, remaining, x, fills_cache=True)
    return x if shard.head is None else head.forward(scope, shard.head, x)


def rebuild(scope: Scope, shard: DeviceShard, caches: Sequence[KVCache], x: Array) -> None:
    """Refill the KV caches: run forward, but only up to the last attention's keys and values."""
    remaining = iter(caches)
    parts = _until_last_attention(shard)
    for part in parts[:-1]:
        x = _apply_part(scope, shard, part, remaining, x, fills_cache=True)
    if parts and isinstance(parts[-1], Attention):
        attention.fill_cache(scope, parts[-1], next(remaining), x)


def backward(scope: Scope, shard: DeviceShard, caches: Sequence[KVCache], x: Array, dy: Array) -> Array:
    """Return dx; weight gradients go to their accumulators."""
    inputs, remaining = [x], iter(caches)
    for part in shard.parts if shard.head is not None else shard.parts[:-1]:
        inputs.append(_apply_part(scope, shard, part, remaining, inputs[-1], fills_cache=False))
    if shard.head is not None:
        dy = head.backward(scope, shard.head, inputs.pop(), dy)
    remaining = iter(reversed(caches))
    for part in reversed(shard.parts):
        match part:
            case Attention():
                dx = attention.backward(scope, part, next(remaining), inputs.pop(), dy)
            case Mlp():
                dx = mlp.backward(scope, part, inputs.pop(), dy)
        if not shard.is_slice:
            dx += dy
        dy = dx
    return dy


def _apply_part(
    scope: Scope, shard: DeviceShard, part: Part, caches: Iterator[KVCache], x: Array, *, fills_cache: bool
) -> Array:
    match part:
        case Attention():
            y = attention.forward(scope, part, next(caches), x, fills_cache=fills_cache)
        case Mlp():
            y = mlp.forward(scope, part, x)
    if not shard.is_slice:
        y += x
    return y


def _until_last_attention(shard: DeviceShard) -> tuple[Part, ...]:
    last = max((i for i, part in enumerate(shard.parts) if isinstance(part, Attention)), default=-1)
    return shard.parts[: last + 1]


# ------------------------------------------------------------------------------------------------ cost


def forward_flops(scope: Scope, shard: DeviceShard) -> float:
    total = 0.0 if shard.head is None else head.forward_flops(scope, shard.head)
    return total + _parts_flops(scope, shard.parts, fills_cache=True)


def rebuild_flops(scope: Scope, shard: DeviceShard) -> float:
    parts = _until_last_attention(shard)
    total = _parts_flops(scope, parts[:-1], fills_cache=True)
    return total + sum(attention.fill_cache_flops(scope, part) for part in parts[-1:] if isinstance(part, Attention))


def backward_flops(scope: Scope, shard: DeviceShard) -> float:
    total = 0.0 if shard.head is None else head.backward_flops(scope, shard.head)
    rerun = shard.parts if shard.head is not None else shard.parts[:-1]
    total += _parts_flops(scope, rerun, fills_cache=False)
    for part in shard.parts:
        match part:
            case Attention():
                total += attention.backward_flops(scope, part)
            case Mlp():
                total += mlp.backward_flops(scope, part)
    return total


def workspace_bytes(scope: Scope, shard: DeviceShard, hidden: int) -> int:
    """Estimate the temporaries of backward, which needs more than forward: the input of every part, and the inner
    activations of the largest."""
    largest = 0 if shard.head is None else head.workspace_elements(scope, shard.head)
    for part in shard.parts:
        match part:
            case Attention():
                largest = max(largest, attention.workspace_elements(scope, part))
            case Mlp():
                largest = max(largest, mlp.workspace_elements(scope, part))
    return 4 * (largest + scope.rows * hidden * (len(shard.parts) + 6))


def _parts_flops(scope: Scope, parts: Sequence[Part], *, fills_cache: bool) -> float:
    total = 0.0
    for part in parts:
        match part:
            case Attention():
                total += attention.forward_flops(scope, part, fills_cache=fills_cache)
            case Mlp():
                total += mlp.forward_flops(scope, part)
    return total
