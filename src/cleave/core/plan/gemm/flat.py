"""2D: blocks that keep the inner dimension whole. One sheet, its columns found by cutting and by search.

Large fleets are cut (`columns.cut`) a few ways and the best is taken: within a few parts in a thousand of the bound.
In small fleets every device counts: up to EXHAUSTIVE devices every way to put them into columns is tried, up to
SEARCHED a local search moves and swaps devices between columns; a device that dwarfs the others gets a corner
(`corner`). Candidates are balanced all at once, as sheets of one layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from cleave.core.cost.gemm import UnitCosts, area_within
from cleave.core.fleet.profiles import Floats, Ints
from cleave.core.plan.gemm.corner import plan_corner
from cleave.core.plan.gemm.exchange import improved
from cleave.core.plan.gemm.sheets import Layout, Sheets, balance, cut, mean_widths, settle, widths_within
from cleave.core.plan.gemm.tiling import Tiling, from_columns

EXHAUSTIVE = 8
SEARCHED = 256
BOTH_WAYS = 2048
_GOOD_ENOUGH = 1.005
_TURNS = 15
_SEARCH_TURNS = 8
_STARTS = ((32, 4), (64, 2), (SEARCHED, 1), (float("inf"), 3))
"""Up to so many devices, so many candidates are searched and rounded: rounding may change their order."""


def plan_flat(unit: UnitCosts, rows: int, cols: int, inner: int, target_s: float) -> tuple[Tiling, float] | None:
    """The best 2D tiling found and its finish; `target_s` is the bound, where the search starts and may stop."""
    ways = [False, True] if len(unit) <= BOTH_WAYS and rows != cols else [rows < cols]
    best: tuple[Tiling, float] | None = None
    for transposed in ways:
        sides = (cols, rows) if transposed else (rows, cols)
        for search in (_plan_way, plan_corner):
            found = search(unit, *sides, inner, target_s)
            if found and (best is None or found[1] < best[1]):
                best = (found[0].transposed() if transposed else found[0], found[1])
    return best


def _plan_way(unit: UnitCosts, rows: int, cols: int, inner: int, target_s: float) -> tuple[Tiling, float] | None:
    suits = _blocks_that_suit(unit, rows, cols, inner, target_s * 1.01)
    spread = 3 if len(unit) <= BOTH_WAYS else 1
    if len(unit) <= EXHAUSTIVE:
        layout, sheets = _layouts(np.arange(len(unit)), _partitions(len(unit)), rows, cols, inner)
        widths = mean_widths(layout, sheets, suits.width[layout.devices])
    else:
        devices = np.flatnonzero(suits.area >= min(1.0, suits.area.max()))
        candidates = 2 * spread + 1
        sheets = _sheets(rows, cols, inner, candidates)
        many, sheet = np.tile(devices, candidates), np.repeat(np.arange(candidates), len(devices))
        shifts = np.arange(-spread, spread + 1)
        layout, widths = cut(sheets, many, sheet, suits.length[many], suits.width[many], shifts)
    widths, times = balance(unit, layout, sheets, np.full(layout.sheets, target_s * 1.02), widths, _TURNS)
    single = _sheets(rows, cols, inner, 1)
    best: tuple[Tiling, float] | None = None
    starts = next(starts for devices, starts in _STARTS if len(unit) <= devices)
    for sheet in np.argsort(times)[:starts]:
        alone, columns = layout.only(sheet, sheet + 1)
        way = _Way(alone, widths[columns], min(float(times[sheet]), target_s * 2))
        if EXHAUSTIVE < len(unit) <= SEARCHED:
            way = _search(unit, way, single, inner, target_s)
        whole = settle(unit, way.layout, single, way.widths, np.array([way.finish_s]))
        if whole and (best is None or whole[2].max() < best[1]):
            best = from_columns(way.layout, sheets.frame, *whole[:2], np.array([inner])), float(whole[2].max())
    return best


@dataclass(frozen=True, slots=True)
class _Suits:
    """The block each device would choose: a square, or the full short side."""

    area: Floats
    length: Floats
    width: Floats


def _blocks_that_suit(unit: UnitCosts, rows: int, cols: int, inner: int, deadline_s: float) -> _Suits:
    area = area_within(unit, deadline_s, float(min(rows, cols)), float(max(rows, cols)), float(inner))
    width = np.clip(np.sqrt(area), 1e-3, cols)
    return _Suits(area, np.clip(area / width, 1e-6, rows), width)


def _sheets(rows: int, cols: int, inner: int, count: int) -> Sheets:
    return Sheets.alike("inner-side-side", rows, cols, np.full(count, float(inner)))


@dataclass(frozen=True, slots=True)
class _Way:
    """One sheet, balanced."""

    layout: Layout
    widths: Floats
    finish_s: float


def _search(unit: UnitCosts, way: _Way, sheets: Sheets, inner: int, target_s: float) -> _Way:
    """Exchange devices between columns while that shortens the sheet."""
    for _ in range(_SEARCH_TURNS):
        if way.finish_s <= target_s * _GOOD_ENOUGH:
            break
        now = way

        def widths_of(entries: Ints, column: Ints, like: Ints, now: _Way = now) -> Floats:
            start = np.append(now.widths, now.widths.mean())[like]
            return widths_within(unit, now.layout.devices[entries], column, sheets, now.finish_s, start)

        ways = improved(way.layout.column, widths_of, 1e-6 * float(sheets.width[0]))
        tried, many = _layouts(way.layout.devices, ways, int(sheets.length[0]), int(sheets.width[0]), inner)
        order = np.argsort(way.layout.devices)
        before = order[np.searchsorted(way.layout.devices, tried.devices, sorter=order)]
        start = mean_widths(tried, many, way.widths[way.layout.column][before])
        widths, times = balance(unit, tried, many, np.full(len(ways), way.finish_s), start, _TURNS)
        best = int(times.argmin())
        if times[best] > way.finish_s * (1 - 2e-4):
            break
        layout, columns = tried.only(best, best + 1)
        way = _Way(layout, widths[columns], float(times[best]))
    return way


def _layouts(devices: Ints, columns: Ints, rows: int, cols: int, inner: int) -> tuple[Layout, Sheets]:
    """One sheet per assignment: columns[c, i] is where candidate c puts device i."""
    candidates, entries = len(columns), len(devices)
    key = np.repeat(np.arange(candidates) * (entries + 2), entries) + np.ravel(columns)
    layout = Layout.of(np.tile(devices, candidates), key, entries + 2)
    return layout, _sheets(rows, cols, inner, candidates)


@cache
def _partitions(entries: int) -> Ints:
    """Every way to put so many devices into columns, as restricted growth strings (4,140 for eight)."""
    ways = np.zeros((1, 1), dtype=np.int64)
    for _ in range(1, entries):
        highest = ways.max(axis=1)
        ways = np.concatenate(
            [
                np.column_stack([ways[highest >= c - 1], np.full((highest >= c - 1).sum(), c)])
                for c in range(ways.shape[1] + 1)
            ]
        )
    return ways
