"""A shard of the model over some rows of a sequence: forward, and backward from the input alone or from what was kept.

Where memory is short, forward keeps only keys and values. Backward then first reruns forward to recover the input of
each part and goes back through the parts; each recomputes its own inner activations, so a device holds those of one
part at a time. Where there is room, forward keeps the inputs, or the inner activations too, and backward starts from
those. A slice omits the residual connection, which the server adds. Knows no store and no wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cleave.core.cost.resident import kept_numbers
from cleave.core.model.decoder import Attention, Head, Mlp, Part
from cleave.core.model.keeping import Keeping
from cleave.device.kernels import Array
from cleave.device.programs import attention, head, mlp
from cleave.device.programs.linear import Inside, Scope
from cleave.device.store import Kept, KVCache


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceShard:
    """Consecutive sublayers and perhaps the head, or a slice of just one; weights are operand numbers."""

    parts: tuple[Part, ...]
    head: Head | None
    is_slice: bool


def forward(
    scope: Scope, shard: DeviceShard, caches: Sequence[KVCache], x: Array, keeps: Keeping = "nothing"
) -> tuple[Array, tuple[Kept, ...]]:
    """Return the result, and what to keep for backward: an entry per part, and one for the head."""
    y, tape = _apply_parts(scope, shard, caches, x, keeps)
    if shard.head is not None:
        y = head.forward(scope, shard.head, y)
    return y, () if keeps == "nothing" else tape


def rebuild(
    scope: Scope, shard: DeviceShard, caches: Sequence[KVCache], x: Array, keeps: Keeping = "nothing"
) -> tuple[Kept, ...]:
    """Refill the KV caches, and return what to keep for backward.

    Skips the head and, if nothing is kept, whatever comes after the last attention's keys and values.
    """
    if keeps != "nothing":
        return _apply_parts(scope, shard, caches, x, keeps)[1]
    remaining = iter(caches)
    parts = _until_last_attention(shard)
    for part in parts[:-1]:
        x, _ = _apply_part(scope, shard, part, remaining, x, fills_cache=True)
    if parts and isinstance(parts[-1], Attention):
        attention.fill_cache(scope, parts[-1], next(remaining), x)
    return ()


def backward(
    scope: Scope, shard: DeviceShard, caches: Sequence[KVCache], x: Array, dy: Array, tape: Sequence[Kept] = ()
) -> Array:
    """Return dx; weight gradients go to their accumulators. `tape` is what forward kept of these rows, if anything."""
    kept = list(tape) or _rerun(scope, shard, caches, x)
    if shard.head is not None:
        entered = kept.pop().x
        dy = head.backward(scope, shard.head, x if entered is None else entered, dy)
    remaining = iter(reversed(caches))
    for part in reversed(shard.parts):
        own = kept.pop()
        entered = x if own.x is None else own.x
        match part:
            case Attention():
                dx = attention.backward(scope, part, next(remaining), entered, dy, own.inside)
            case Mlp():
                dx = mlp.backward(scope, part, entered, dy, own.inside)
        if not shard.is_slice:
            dx += dy
        dy = dx
    return dy


def _rerun(scope: Scope, shard: DeviceShard, caches: Sequence[KVCache], x: Array) -> list[Kept]:
    """Recompute the input of every part, and of the head."""
    inputs, remaining = [Kept(None)], iter(caches)
    for part in shard.parts if shard.head is not None else shard.parts[:-1]:
        x, _ = _apply_part(scope, shard, part, remaining, x, fills_cache=False)
        inputs.append(Kept(x))
    return inputs


def _apply_parts(
    scope: Scope, shard: DeviceShard, caches: Sequence[KVCache], x: Array, keeps: Keeping
) -> tuple[Array, tuple[Kept, ...]]:
    """Return what leaves the last part, and what to keep of each part and of the head."""
    remaining, tape, entered = iter(caches), list[Kept](), x
    for part in shard.parts:
        y, inside = _apply_part(scope, shard, part, remaining, x, fills_cache=True, keeps=keeps == "all")
        tape.append(Kept(None if x is entered else x, inside))
        x = y
    if shard.head is not None:
        tape.append(Kept(None if x is entered else x))
    return x, tuple(tape)


def _apply_part(
    scope: Scope,
    shard: DeviceShard,
    part: Part,
    caches: Iterator[KVCache],
    x: Array,
    *,
    fills_cache: bool,
    keeps: bool = False,
) -> tuple[Array, Inside]:
    match part:
        case Attention():
            y, inside = attention.forward(scope, part, next(caches), x, fills_cache=fills_cache, keeps=keeps)
        case Mlp():
            y, inside = mlp.forward(scope, part, x, keeps=keeps)
    if not shard.is_slice:
        y += x
    return y, inside


def _until_last_attention(shard: DeviceShard) -> tuple[Part, ...]:
    last = max((i for i, part in enumerate(shard.parts) if isinstance(part, Attention)), default=-1)
    return shard.parts[: last + 1]


# ------------------------------------------------------------------------------------------------ cost


def forward_flops(scope: Scope, shard: DeviceShard) -> float:
    total = 0.0 if shard.head is None else head.forward_flops(scope, shard.head)
    return total + _parts_flops(scope, shard.parts, fills_cache=True)


def rebuild_flops(scope: Scope, shard: DeviceShard, keeps: Keeping = "nothing") -> float:
    if keeps != "nothing":
        return _parts_flops(scope, shard.parts, fills_cache=True)
    parts = _until_last_attention(shard)
    total = _parts_flops(scope, parts[:-1], fills_cache=True)
    return total + sum(attention.fill_cache_flops(scope, part) for part in parts[-1:] if isinstance(part, Attention))


def backward_flops(scope: Scope, shard: DeviceShard, keeps: Keeping = "nothing") -> float:
    """FLOPs of these rows, of which forward kept so much."""
    total = 0.0 if shard.head is None else head.backward_flops(scope, shard.head)
    if keeps == "nothing":
        rerun = shard.parts if shard.head is not None else shard.parts[:-1]
        total += _parts_flops(scope, rerun, fills_cache=False)
    for part in shard.parts:
        match part:
            case Attention():
                total += attention.backward_flops(scope, part, is_kept=keeps == "all")
            case Mlp():
                total += mlp.backward_flops(scope, part, is_kept=keeps == "all")
    return total


def numbers_kept(scope: Scope, shard: DeviceShard, hidden: int, keeps: Keeping) -> int:
    """Numbers per row that forward keeps for backward."""
    inside = 0
    for part in shard.parts:
        match part:
            case Attention():
                inside += attention.kept_numbers(scope, part)
            case Mlp():
                inside += mlp.kept_numbers(scope, part)
    sublayers = len(shard.parts) + (shard.head is not None)
    return int(kept_numbers(keeps, hidden=hidden, sublayers=sublayers, inside=inside))


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
