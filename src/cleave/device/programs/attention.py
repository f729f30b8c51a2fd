"""Causal attention over some rows of a sequence, forward and backward, with a KV cache for the rows before them.

Forward, rows come in order and leave their keys and values in the cache. Backward, they come in reverse, so the
gradients of keys and values accumulated there are complete by the time their own rows are reached. Scores are computed
in small tiles, for as many key heads at once as fit; keys that no row of a tile can see are skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from cleave.core.model.decoder import Attention, Weight
from cleave.device.kernels import Array
from cleave.device.programs.linear import (
    Inside,
    Scope,
    add_gradients,
    apply,
    forward_macs,
    gradient_macs,
    input_gradient,
    normalize,
    normalize_back,
    out_width,
)
from cleave.device.store import KVCache

_MAX_TILE_ROWS = 128
"""A taller tile would compute too many scores beyond the diagonal in vain."""
_MIN_TILE_ROWS = 16
_MASKED = -1e30
"""Added to the score of a masked key. A row whose scores are all this low attends to nothing."""


class _Band(NamedTuple):
    """Tiles that share rows and keys and differ in key heads."""

    rows: slice
    keys: slice
    groups: list[slice]
    """Key heads per tile."""


def fill_cache(scope: Scope, part: Attention, cache: KVCache, x: Array) -> None:
    """Compute only the keys and values of `x`."""
    _fill_cache(scope, part, cache, normalize(scope, part.norm, x).y)


def forward(
    scope: Scope, part: Attention, cache: KVCache, x: Array, *, fills_cache: bool, keeps: bool = False
) -> tuple[Array, Inside]:
    """Compute f(norm(x)); return it and, if asked, the queries and contexts that backward would recompute.

    Without `fills_cache`, the cache already holds the keys and values of these rows.
    """
    normed = normalize(scope, part.norm, x).y
    if fills_cache:
        _fill_cache(scope, part, cache, normed)
    queries = _queries(scope, part, normed)
    keys, values = _by_head(part, cache.keys), _by_head(part, cache.values)
    context, group_size = scope.kernel.ops.empty_like(queries), len(queries) // len(keys)
    for band in _bands(scope, part):
        bias = _mask_bias(scope, part, band)
        for group in band.groups:
            probabilities = _probabilities(scope, _tile(queries, group, band, group_size), keys[group, band.keys], bias)
            _put_tile(
                context, group, band, group_size, scope.kernel.ops.matmul(probabilities, values[group, band.keys])
            )
    return apply(scope, part.o, _merge_heads(context)), (queries, context) if keeps else ()


def backward(scope: Scope, part: Attention, cache: KVCache, x: Array, dy: Array, kept: Inside = ()) -> Array:
    """Return dx of f(norm(x)), recomputing scores, and queries and contexts unless they were kept."""
    ops, matmul = scope.kernel.ops, scope.kernel.ops.matmul
    normed = normalize(scope, part.norm, x)
    queries = kept[0] if kept else _queries(scope, part, normed.y)
    context = kept[1] if kept else ops.empty_like(queries)
    d_context = _split_heads(scope, part, input_gradient(scope, part.o, dy), is_rotated=False)
    d_queries = ops.empty_like(queries)
    keys, values, d_keys, d_values = (
        _by_head(part, stored) for stored in (cache.keys, cache.values, cache.key_gradients, cache.value_gradients)
    )
    group_size = len(queries) // len(keys)
    for band in _bands(scope, part):
        bias = _mask_bias(scope, part, band)
        for group in band.groups:
            visible = group, band.keys
            q = _tile(queries, group, band, group_size)
            probabilities = _probabilities(scope, q, keys[visible], bias)
            d_out = _tile(d_context, group, band, group_size)
            if not kept:
                _put_tile(context, group, band, group_size, matmul(probabilities, values[visible]))
            d_values[visible] += matmul(probabilities.swapaxes(1, 2), d_out)
            d_scores = matmul(d_out, values[visible].swapaxes(1, 2))
            d_scores -= (_tile(context, group, band, group_size) * d_out).sum(axis=2, keepdims=True)
            d_scores *= probabilities
            _put_tile(d_queries, group, band, group_size, matmul(d_scores, keys[visible]))
            d_keys[visible] += matmul(d_scores.swapaxes(1, 2), q)
    add_gradients(scope, part.o, _merge_heads(context), dy)
    d_queries *= part.scale
    own = slice(scope.first_row, scope.first_row + scope.rows)
    d_normed = None
    for weight, gradient, is_rotated in (
        (part.q, d_queries, part.is_rotary),
        (part.k, d_keys[:, own], part.is_rotary),
        (part.v, d_values[:, own], False),
    ):
        flat = _merge_heads(_unrotate(scope, part, gradient) if is_rotated else gradient)
        add_gradients(scope, weight, normed.y, flat)
        d_normed = input_gradient(scope, weight, flat, d_normed)
    return normalize_back(scope, part.norm, normed, d_normed)


# ------------------------------------------------------------------------------------------------ cost


def forward_flops(scope: Scope, part: Attention, *, fills_cache: bool) -> float:
    weights: tuple[Weight, ...] = (part.q, part.o, *((part.k, part.v) if fills_cache else ()))
    return 2.0 * (scope.rows * sum(forward_macs(scope, weight) for weight in weights) + 2 * _score_macs(scope, part))


def fill_cache_flops(scope: Scope, part: Attention) -> float:
    return 2.0 * scope.rows * (forward_macs(scope, part.k) + forward_macs(scope, part.v))


def backward_flops(scope: Scope, part: Attention, *, is_kept: bool = False) -> float:
    weights = part.q, part.k, part.v, part.o
    macs = 0 if is_kept else forward_macs(scope, part.q)
    macs += sum(forward_macs(scope, weight) + gradient_macs(scope, weight) for weight in weights)
    return 2.0 * (scope.rows * macs + (5 if is_kept else 6) * _score_macs(scope, part))


def kept_numbers(scope: Scope, part: Attention) -> int:
    """Numbers per row that can be kept for backward."""
    return 2 * out_width(scope, part.q)


def workspace_elements(scope: Scope, part: Attention) -> int:
    """Elements of queries, context, keys and values with their gradients, and three tiles of scores."""
    queries, keys = out_width(scope, part.q), out_width(scope, part.k)
    tile = max(scope.kernel.tile_elements, _MIN_TILE_ROWS * queries // keys * (scope.first_row + scope.rows))
    return 4 * scope.rows * (queries + keys) + 3 * tile


def _score_macs(scope: Scope, part: Attention) -> int:
    """Multiply-adds of q k^T, and of each other product involving scores."""
    queries = out_width(scope, part.q)
    return queries * sum(
        (band.rows.stop - band.rows.start) * (band.keys.stop - band.keys.start) for band in _bands(scope, part)
    )


# ------------------------------------------------------------------------------------------------ tiles


def _bands(scope: Scope, part: Attention) -> Iterator[_Band]:
    tile_elements = scope.kernel.tile_elements
    key_heads = out_width(scope, part.k) // part.head_dim
    group_size = out_width(scope, part.q) // out_width(scope, part.k)
    end = scope.first_row + scope.rows
    height = min(_MAX_TILE_ROWS, max(_MIN_TILE_ROWS, tile_elements // (group_size * end)))
    for top in range(0, scope.rows, height):
        bottom = min(top + height, scope.rows)
        first_key = max(0, scope.first_row + top + 1 - (part.window or end))
        keys = slice(first_key, scope.first_row + bottom)
        heads_at_once = max(1, tile_elements // (group_size * (bottom - top) * (keys.stop - first_key)))
        groups = [slice(first, min(first + heads_at_once, key_heads)) for first in range(0, key_heads, heads_at_once)]
        yield _Band(slice(top, bottom), keys, groups)


def _mask_bias(scope: Scope, part: Attention, band: _Band) -> Array:
    """Return the bias to add to scores, rows x trailing keys; all earlier keys of the band are visible."""
    kernel, clip = scope.kernel, scope.kernel.ops.clip
    end = scope.first_row + scope.rows
    is_windowed = part.window is not None and part.window < end
    first, last = scope.first_row + band.rows.start, scope.first_row + band.rows.stop
    first_key = band.keys.start if is_windowed or scope.mask is not None else first
    rows, keys = kernel.positions(first, last).reshape(-1, 1), kernel.positions(first_key, last).reshape(1, -1)
    bias = clip(keys - rows, 0, 1)
    if is_windowed:
        assert part.window is not None
        bias += clip(rows - keys - (part.window - 1), 0, 1)
    if scope.mask is not None:
        bias += 1 - scope.mask[:, first_key:last]
    bias *= _MASKED
    return bias


def _probabilities(scope: Scope, queries: Array, keys: Array, bias: Array) -> Array:
    """Return softmax(q k^T + bias): key heads x (query heads per key head, rows) x keys."""
    ops = scope.kernel.ops
    scores = ops.matmul(queries, keys.swapaxes(1, 2))
    rows, cols = bias.shape
    width = scores.shape[2]
    scores.reshape(scores.shape[0], -1, rows, width)[..., width - cols :] += bias
    scores -= ops.clip(ops.amax(scores, axis=2, keepdims=True), _MASKED / 2, None)
    ops.exp(scores, out=scores)
    scores /= ops.clip(scores.sum(axis=2, keepdims=True), 1e-30, None)
    return scores


def _tile(array: Array, group: slice, band: _Band, group_size: int) -> Array:
    """Cut a tile out of heads x rows x head_dim: key heads x (query heads per key head, rows) x head_dim."""
    heads = array[group.start * group_size : group.stop * group_size, band.rows]
    return heads.reshape(group.stop - group.start, -1, array.shape[2])


def _put_tile(array: Array, group: slice, band: _Band, group_size: int, tile: Array) -> None:
    heads, rows = (group.stop - group.start) * group_size, band.rows.stop - band.rows.start
    array[group.start * group_size : group.stop * group_size, band.rows] = tile.reshape(heads, rows, array.shape[2])


# ------------------------------------------------------------------------------------------------ heads


def _fill_cache(scope: Scope, part: Attention, cache: KVCache, normed: Array) -> None:
    own = slice(scope.first_row, scope.first_row + scope.rows)
    _by_head(part, cache.keys)[:, own] = _split_heads(scope, part, apply(scope, part.k, normed), part.is_rotary)
    _by_head(part, cache.values)[:, own] = _split_heads(scope, part, apply(scope, part.v, normed), is_rotated=False)


def _queries(scope: Scope, part: Attention, normed: Array) -> Array:
    queries = _split_heads(scope, part, apply(scope, part.q, normed), part.is_rotary)
    queries *= part.scale
    return queries


def _by_head(part: Attention, stored: Array) -> Array:
    rows, width = stored.shape
    return stored.reshape(width // part.head_dim, rows, part.head_dim)


def _split_heads(scope: Scope, part: Attention, flat: Array, is_rotated: bool) -> Array:
    """Turn rows x width into heads x rows x head_dim, rotated by position if asked."""
    rows, width = flat.shape
    heads = width // part.head_dim
    by_head = flat.reshape(rows, heads, part.head_dim).swapaxes(0, 1)
    out = scope.kernel.allocate(heads * rows, part.head_dim).reshape(heads, rows, part.head_dim)
    if not is_rotated:
        out[...] = by_head
        return out
    half = part.head_dim // 2
    first, second = by_head[..., :half], by_head[..., half:]
    cos_first, cos_second, sin_first, sin_second = _cos_sin(scope, half)
    out[..., :half] = first * cos_first - second * sin_first
    out[..., half:] = second * cos_second + first * sin_second
    return out


def _unrotate(scope: Scope, part: Attention, gradient: Array) -> Array:
    """Apply the transpose of the rotation."""
    half = part.head_dim // 2
    first, second = gradient[..., :half], gradient[..., half:]
    cos_first, cos_second, sin_first, sin_second = _cos_sin(scope, half)
    out = scope.kernel.ops.empty_like(gradient)
    out[..., :half] = first * cos_first + second * sin_second
    out[..., half:] = second * cos_second - first * sin_first
    return out


def _cos_sin(scope: Scope, half: int) -> tuple[Array, Array, Array, Array]:
    """Cosines for the first and second half of a head, then sines."""
    table = scope.rotary
    assert table is not None
    return table[:, :half], table[:, half : 2 * half], table[:, 2 * half : 3 * half], table[:, 3 * half :]


def _merge_heads(heads: Array) -> Array:
    """Turn heads x rows x head_dim into rows x width."""
    return heads.swapaxes(0, 1).reshape(heads.shape[1], -1)
