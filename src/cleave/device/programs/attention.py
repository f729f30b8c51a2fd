"""Causal attention over some rows of a sequence, forward and backward; K and V of the rows before are in a cache.

Rows come in order forward, and leave their keys and values in the cache; backward they come in reverse, so that the
gradients of keys and values, added up there, are complete when their own rows are reached. Scores are made in tiles
that stay small, for as many key heads at once as fit; what would be hidden from all rows of a tile is left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cleave.device.programs.kernels import Array
from cleave.device.programs.linear import (
    Unit,
    add_gradients,
    apply,
    forward_products,
    gradient_products,
    input_gradient,
    normalize,
    normalize_back,
    out_width,
)
from cleave.protocol.programs import Attention, Weight

_MOST_ROWS = 128
"""Of a tile: with more, too many scores beyond the diagonal are made in vain."""
_LEAST_ROWS = 16
_FAR = -1e30
"""Added to the score of a hidden key; a row whose scores are all as low sees none."""


@dataclass(slots=True)
class Cache:
    """Of one attention and one sequence: sequence x key width, stored as key heads x sequence x head_dim."""

    keys: Array
    values: Array
    key_gradients: Array = None
    value_gradients: Array = None


class _Band(NamedTuple):
    """Tiles of the same rows and keys."""

    rows: slice
    keys: slice
    groups: list[slice]
    """Key heads of each tile."""


def remember(unit: Unit, part: Attention, cache: Cache, x: Array) -> None:
    """Keys and values of x, and no more."""
    _remember(unit, part, cache, normalize(unit, part.norm, x).y)


def forward(unit: Unit, part: Attention, cache: Cache, x: Array, *, remembers: bool) -> Array:
    """f(norm(x)); unless it remembers, keys and values of these rows are in the cache already."""
    normed = normalize(unit, part.norm, x).y
    if remembers:
        _remember(unit, part, cache, normed)
    queries = _queries(unit, part, normed)
    keys, values = _by_head(part, cache.keys), _by_head(part, cache.values)
    context, share = unit.kernel.ops.empty_like(queries), len(queries) // len(keys)
    for band in _bands(unit, part):
        hidden = _hidden(unit, part, band)
        for group in band.groups:
            chances = _chances(unit, _tile(queries, group, band, share), keys[group, band.keys], hidden)
            _put(context, group, band, share, unit.kernel.ops.matmul(chances, values[group, band.keys]))
    return apply(unit, part.o, _merged(context))


def backward(unit: Unit, part: Attention, cache: Cache, x: Array, dy: Array) -> Array:
    """dx of f(norm(x)); queries and scores are made again."""
    matmul = unit.kernel.ops.matmul
    normed = normalize(unit, part.norm, x)
    queries = _queries(unit, part, normed.y)
    d_context = _split(unit, part, input_gradient(unit, part.o, dy), is_rotated=False)
    context, d_queries = unit.kernel.ops.empty_like(queries), unit.kernel.ops.empty_like(queries)
    keys, values, d_keys, d_values = (
        _by_head(part, stored) for stored in (cache.keys, cache.values, cache.key_gradients, cache.value_gradients)
    )
    share = len(queries) // len(keys)
    for band in _bands(unit, part):
        hidden = _hidden(unit, part, band)
        for group in band.groups:
            seen = group, band.keys
            q = _tile(queries, group, band, share)
            chances = _chances(unit, q, keys[seen], hidden)
            d_out = _tile(d_context, group, band, share)
            out = matmul(chances, values[seen])
            _put(context, group, band, share, out)
            d_values[seen] += matmul(chances.swapaxes(1, 2), d_out)
            out *= d_out
            d_scores = matmul(d_out, values[seen].swapaxes(1, 2))
            d_scores -= out.sum(axis=2, keepdims=True)
            d_scores *= chances
            _put(d_queries, group, band, share, matmul(d_scores, keys[seen]))
            d_keys[seen] += matmul(d_scores.swapaxes(1, 2), q)
    add_gradients(unit, part.o, _merged(context), dy)
    d_queries *= part.scale
    own = slice(unit.first_row, unit.first_row + unit.rows)
    d_normed = None
    for weight, gradient, is_rotated in (
        (part.q, d_queries, part.is_rotary),
        (part.k, d_keys[:, own], part.is_rotary),
        (part.v, d_values[:, own], False),
    ):
        flat = _merged(_rotated_back(unit, part, gradient) if is_rotated else gradient)
        add_gradients(unit, weight, normed.y, flat)
        d_normed = input_gradient(unit, weight, flat, d_normed)
    return normalize_back(unit, part.norm, normed, d_normed)


# ------------------------------------------------------------------------------------------------ what it takes


def forward_flops(unit: Unit, part: Attention, *, remembers: bool) -> float:
    weights: tuple[Weight, ...] = (part.q, part.o, *((part.k, part.v) if remembers else ()))
    return 2.0 * (unit.rows * sum(forward_products(unit, weight) for weight in weights) + 2 * _scores(unit, part))


def remember_flops(unit: Unit, part: Attention) -> float:
    return 2.0 * unit.rows * (forward_products(unit, part.k) + forward_products(unit, part.v))


def backward_flops(unit: Unit, part: Attention) -> float:
    weights = part.q, part.k, part.v, part.o
    products = forward_products(unit, part.q)
    products += sum(forward_products(unit, weight) + gradient_products(unit, weight) for weight in weights)
    return 2.0 * (unit.rows * products + 6 * _scores(unit, part))


def workspace_elements(unit: Unit, part: Attention) -> int:
    """Queries, context, keys and values with their gradients, and three tiles of scores."""
    queries, keys = out_width(unit, part.q), out_width(unit, part.k)
    tile = max(unit.kernel.tile_elements, _LEAST_ROWS * queries // keys * (unit.first_row + unit.rows))
    return 4 * unit.rows * (queries + keys) + 3 * tile


def _scores(unit: Unit, part: Attention) -> int:
    """Multiply-adds of q k^T; each of the other products of scores takes as many."""
    queries = out_width(unit, part.q)
    return queries * sum(
        (band.rows.stop - band.rows.start) * (band.keys.stop - band.keys.start) for band in _bands(unit, part)
    )


# ------------------------------------------------------------------------------------------------ tiles


def _bands(unit: Unit, part: Attention) -> Iterator[_Band]:
    most = unit.kernel.tile_elements
    key_heads = out_width(unit, part.k) // part.head_dim
    share = out_width(unit, part.q) // out_width(unit, part.k)
    end = unit.first_row + unit.rows
    height = min(_MOST_ROWS, max(_LEAST_ROWS, most // (share * end)))
    for top in range(0, unit.rows, height):
        bottom = min(top + height, unit.rows)
        first_key = max(0, unit.first_row + top + 1 - (part.window or end))
        keys = slice(first_key, unit.first_row + bottom)
        at_once = max(1, most // (share * (bottom - top) * (keys.stop - first_key)))
        groups = [slice(first, min(first + at_once, key_heads)) for first in range(0, key_heads, at_once)]
        yield _Band(slice(top, bottom), keys, groups)


def _hidden(unit: Unit, part: Attention, band: _Band) -> Array:
    """rows x the last keys, all others being seen: what to add to their scores."""
    kernel, clip = unit.kernel, unit.kernel.ops.clip
    end = unit.first_row + unit.rows
    is_windowed = part.window is not None and part.window < end
    first, last = unit.first_row + band.rows.start, unit.first_row + band.rows.stop
    first_key = band.keys.start if is_windowed or unit.mask is not None else first
    rows, keys = kernel.positions(first, last).reshape(-1, 1), kernel.positions(first_key, last).reshape(1, -1)
    hidden = clip(keys - rows, 0, 1)
    if is_windowed:
        assert part.window is not None
        hidden += clip(rows - keys - (part.window - 1), 0, 1)
    if unit.mask is not None:
        hidden += 1 - unit.mask[:, first_key:last]
    hidden *= _FAR
    return hidden


def _chances(unit: Unit, queries: Array, keys: Array, hidden: Array) -> Array:
    """The softmax of scores: key heads x (heads of each, rows) x keys."""
    ops = unit.kernel.ops
    scores = ops.matmul(queries, keys.swapaxes(1, 2))
    rows, cols = hidden.shape
    width = scores.shape[2]
    scores.reshape(scores.shape[0], -1, rows, width)[..., width - cols :] += hidden
    scores -= ops.clip(ops.amax(scores, axis=2, keepdims=True), _FAR / 2, None)
    ops.exp(scores, out=scores)
    scores /= ops.clip(scores.sum(axis=2, keepdims=True), 1e-30, None)
    return scores


def _tile(array: Array, group: slice, band: _Band, share: int) -> Array:
    """key heads x (heads of each, rows) x head_dim"""
    heads = array[group.start * share : group.stop * share, band.rows]
    return heads.reshape(group.stop - group.start, -1, array.shape[2])


def _put(array: Array, group: slice, band: _Band, share: int, tile: Array) -> None:
    heads, rows = (group.stop - group.start) * share, band.rows.stop - band.rows.start
    array[group.start * share : group.stop * share, band.rows] = tile.reshape(heads, rows, array.shape[2])


# ------------------------------------------------------------------------------------------------ heads


def _remember(unit: Unit, part: Attention, cache: Cache, normed: Array) -> None:
    own = slice(unit.first_row, unit.first_row + unit.rows)
    _by_head(part, cache.keys)[:, own] = _split(unit, part, apply(unit, part.k, normed), part.is_rotary)
    _by_head(part, cache.values)[:, own] = _split(unit, part, apply(unit, part.v, normed), is_rotated=False)


def _queries(unit: Unit, part: Attention, normed: Array) -> Array:
    queries = _split(unit, part, apply(unit, part.q, normed), part.is_rotary)
    queries *= part.scale
    return queries


def _by_head(part: Attention, stored: Array) -> Array:
    rows, width = stored.shape
    return stored.reshape(width // part.head_dim, rows, part.head_dim)


def _split(unit: Unit, part: Attention, flat: Array, is_rotated: bool) -> Array:
    """rows x width -> heads x rows x head_dim"""
    rows, width = flat.shape
    heads = width // part.head_dim
    parted = flat.reshape(rows, heads, part.head_dim).swapaxes(0, 1)
    out = unit.kernel.allocate(heads * rows, part.head_dim).reshape(heads, rows, part.head_dim)
    if not is_rotated:
        out[...] = parted
        return out
    half = part.head_dim // 2
    one, other = parted[..., :half], parted[..., half:]
    cos_one, cos_other, sin_one, sin_other = _turns(unit, half)
    out[..., :half] = one * cos_one - other * sin_one
    out[..., half:] = other * cos_other + one * sin_other
    return out


def _rotated_back(unit: Unit, part: Attention, gradient: Array) -> Array:
    half = part.head_dim // 2
    one, other = gradient[..., :half], gradient[..., half:]
    cos_one, cos_other, sin_one, sin_other = _turns(unit, half)
    out = unit.kernel.ops.empty_like(gradient)
    out[..., :half] = one * cos_one + other * sin_other
    out[..., half:] = other * cos_other - one * sin_one
    return out


def _turns(unit: Unit, half: int) -> tuple[Array, Array, Array, Array]:
    """Cosines of both halves of a head, then sines."""
    table = unit.rotary
    assert table is not None
    return table[:, :half], table[:, half : 2 * half], table[:, 2 * half : 3 * half], table[:, 3 * half :]


def _merged(heads: Array) -> Array:
    """heads x rows x head_dim -> rows x width"""
    return heads.swapaxes(0, 1).reshape(heads.shape[1], -1)
