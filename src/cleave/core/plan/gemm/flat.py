"""2D plans: blocks over the whole inner dimension, on one sheet, whose columns are found by cutting and by search.

Large fleets are cut (`sheets.cut`) in a few ways and the best one is taken, within a few parts in a thousand of the
bound. In small fleets every device counts: up to EXHAUSTIVE devices, every assignment to columns is tried; up to
SEARCHED, a local search moves and swaps devices between columns; a device that dwarfs the others gets a corner
(`corner`). Candidates are balanced all at once, as sheets of one layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from cleave.core.cost.gemm import UnitCosts, area_within
from cleave.core.fleet.profiles import Floats, Ints
from cleave.core.plan.gemm.corner import plan_corner
from cleave.core.plan.gemm.exchange import propose_exchanges
from cleave.core.plan.gemm.sheets import Layout, Sheets, balance, cut, mean_widths, settle, widths_within
from cleave.core.plan.gemm.tiling import Tiling, from_columns

EXHAUSTIVE = 8
SEARCHED = 256
BOTH_ORIENTATIONS = 2048
_GOOD_ENOUGH = 1.005
_TURNS = 15
_SEARCH_TURNS = 8
_STARTS = ((32, 4), (64, 2), (SEARCHED, 1), (float("inf"), 3))
"""(up to this many devices, candidates to search and round); several, as rounding may change their order."""


def plan_flat(unit: UnitCosts, rows: int, cols: int, inner: int, target_s: float) -> tuple[Tiling, float] | None:
    """Return the best 2D tiling found and its finish. The search starts at the bound `target_s`, and may stop there."""
    orientations = [False, True] if len(unit) <= BOTH_ORIENTATIONS and rows != cols else [rows < cols]
    best: tuple[Tiling, float] | None = None
    for transposed in orientations:
        sides = (cols, rows) if transposed else (rows, cols)
        for search in (_plan_sheet, plan_corner):
            found = search(unit, *sides, inner, target_s)
            if found and (best is None or found[1] < best[1]):
                best = (found[0].transposed() if transposed else found[0], found[1])
    return best


def _plan_sheet(unit: UnitCosts, rows: int, cols: int, inner: int, target_s: float) -> tuple[Tiling, float] | None:
    best_blocks = _best_blocks(unit, rows, cols, inner, target_s * 1.01)
    spread = 3 if len(unit) <= BOTH_ORIENTATIONS else 1
    if len(unit) <= EXHAUSTIVE:
        layout, sheets = _layouts(np.arange(len(unit)), _partitions(len(unit)), rows, cols, inner)
        widths = mean_widths(layout, sheets, best_blocks.width[layout.devices])
    else:
        devices = np.flatnonzero(best_blocks.area >= min(1.0, best_blocks.area.max()))
        candidates = 2 * spread + 1
        sheets = _sheets(rows, cols, inner, candidates)
        many, sheet = np.tile(devices, candidates), np.repeat(np.arange(candidates), len(devices))
        shifts = np.arange(-spread, spread + 1)
        layout, widths = cut(sheets, many, sheet, best_blocks.length[many], best_blocks.width[many], shifts)
    widths, times = balance(unit, layout, sheets, np.full(layout.sheets, target_s * 1.02), widths, _TURNS)
    single = _sheets(rows, cols, inner, 1)
    best: tuple[Tiling, float] | None = None
    starts = next(starts for devices, starts in _STARTS if len(unit) <= devices)
    for sheet in np.argsort(times)[:starts]:
        alone, columns = layout.only(sheet, sheet + 1)
        candidate = _BalancedSheet(alone, widths[columns], min(float(times[sheet]), target_s * 2))
        if EXHAUSTIVE < len(unit) <= SEARCHED:
            candidate = _search(unit, candidate, single, inner, target_s)
        whole = settle(unit, candidate.layout, single, candidate.widths, np.array([candidate.finish_s]))
        if whole and (best is None or whole[2].max() < best[1]):
            best = from_columns(candidate.layout, sheets.frame, *whole[:2], np.array([inner])), float(whole[2].max())
    return best


@dataclass(frozen=True, slots=True)
class _BestBlocks:
    """The block that suits each device best: a square, or the full short side."""

    area: Floats
    length: Floats
    width: Floats


def _best_blocks(unit: UnitCosts, rows: int, cols: int, inner: int, deadline_s: float) -> _BestBlocks:
    area = area_within(unit, deadline_s, float(min(rows, cols)), float(max(rows, cols)), float(inner))
    width = np.clip(np.sqrt(area), 1e-3, cols)
    return _BestBlocks(area, np.clip(area / width, 1e-6, rows), width)


def _sheets(rows: int, cols: int, inner: int, count: int) -> Sheets:
    return Sheets.alike("inner-side-side", rows, cols, np.full(count, float(inner)))


@dataclass(frozen=True, slots=True)
class _BalancedSheet:
    """A candidate: one sheet with balanced columns."""

    layout: Layout
    widths: Floats
    finish_s: float


def _search(unit: UnitCosts, candidate: _BalancedSheet, sheets: Sheets, inner: int, target_s: float) -> _BalancedSheet:
    """Exchange devices between columns while that shortens the sheet."""
    for _ in range(_SEARCH_TURNS):
        if candidate.finish_s <= target_s * _GOOD_ENOUGH:
            break
        current = candidate

        def widths_of(entries: Ints, column: Ints, like: Ints, current: _BalancedSheet = current) -> Floats:
            start = np.append(current.widths, current.widths.mean())[like]
            return widths_within(unit, current.layout.devices[entries], column, sheets, current.finish_s, start)

        assignments = propose_exchanges(candidate.layout.column, widths_of, 1e-6 * float(sheets.width[0]))
        tried, many = _layouts(
            candidate.layout.devices, assignments, int(sheets.length[0]), int(sheets.width[0]), inner
        )
        order = np.argsort(candidate.layout.devices)
        before = order[np.searchsorted(candidate.layout.devices, tried.devices, sorter=order)]
        start = mean_widths(tried, many, candidate.widths[candidate.layout.column][before])
        widths, times = balance(unit, tried, many, np.full(len(assignments), candidate.finish_s), start, _TURNS)
        best = int(times.argmin())
        if times[best] > candidate.finish_s * (1 - 2e-4):
            break
        layout, columns = tried.only(best, best + 1)
        candidate = _BalancedSheet(layout, widths[columns], float(times[best]))
    return candidate


def _layouts(devices: Ints, columns: Ints, rows: int, cols: int, inner: int) -> tuple[Layout, Sheets]:
    """Lay out one sheet per assignment: columns[c, i] is the column of device i in candidate c."""
    candidates, entries = len(columns), len(devices)
    key = np.repeat(np.arange(candidates) * (entries + 2), entries) + np.ravel(columns)
    layout = Layout.of(np.tile(devices, candidates), key, entries + 2)
    return layout, _sheets(rows, cols, inner, candidates)


@cache
def _partitions(entries: int) -> Ints:
    """Enumerate all assignments of devices to columns, as restricted growth strings (4,140 for eight)."""
    assignments = np.zeros((1, 1), dtype=np.int64)
    for _ in range(1, entries):
        highest = assignments.max(axis=1)
        assignments = np.concatenate(
            [
                np.column_stack([assignments[highest >= c - 1], np.full((highest >= c - 1).sum(), c)])
                for c in range(assignments.shape[1] + 1)
            ]
        )
    return assignments
