"""2D plans with one dominant device: its block in a corner, and two sheets of columns for the L around it.

In a plain column such a device would get a long thin block. Here its block can be nearly square; one sheet of the same
width lies below it, the other beside both. The three areas are adjusted until all finish together.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cleave.core.cost.gemm import UnitCosts, area_within, finish_s, rows_that_fit
from cleave.core.fleet.profiles import Floats, Ints
from cleave.core.plan.gemm.sheets import Layout, Sheets, balance, cut, settle
from cleave.core.plan.gemm.tiling import Tiling, from_columns, join

LARGE = 0.08
"""Smallest share of the output for which a device gets a corner."""
_SHIFTS = (-1, 0, 1)
_TURNS = 10
_MIN_SIDE = 8  # shorter sides leave no room for an L
_BELOW, _BESIDE = 0, 1


@dataclass(frozen=True, slots=True)
class _Corner:
    """The block of the large device; the rest lies below it and beside both."""

    rows: float
    cols: float

    def sizes(self, rows: int, cols: int) -> tuple[tuple[float, float], tuple[float, float]]:
        return (rows - self.rows, self.cols), (float(rows), cols - self.cols)


@dataclass(frozen=True, slots=True)
class _Sheet:
    """The best cover found for one of the two sheets."""

    layout: Layout
    widths: Floats
    finish_s: float
    transposed: bool


def plan_corner(unit: UnitCosts, rows: int, cols: int, inner: int, target_s: float) -> tuple[Tiling, float] | None:
    """Return a tiling with a corner and its finish; None if no device is large enough or the L cannot be covered."""
    areas = area_within(unit, target_s * 1.01, float(min(rows, cols)), float(max(rows, cols)), float(inner))
    large, total = int(areas.argmax()), float(rows) * cols
    others = np.flatnonzero((areas >= 1.0) & (np.arange(len(unit)) != large))
    if not LARGE * total <= areas[large] <= 0.9 * total or len(others) < 2 or min(rows, cols) < _MIN_SIDE:
        return None
    share = np.array([areas[large], 0.0, 0.0]) / total
    side = min(float(np.sqrt(areas[large])), 0.9 * rows, 0.9 * cols)
    corner = _Corner(min(float(areas[large]) / side, 0.9 * rows), side)
    share[1] = (rows - corner.rows) * corner.cols / total
    share[2] = 1 - share[0] - share[1]
    groups = _deal(areas, others, share[1] / (share[1] + share[2]))
    best: tuple[float, _Corner, list[_Sheet]] | None = None
    for _ in range(_TURNS):
        found = [
            _cover(unit, group, size, inner, areas, target_s)
            for group, size in zip(groups, corner.sizes(rows, cols), strict=True)
        ]
        corner_s = finish_s(
            unit.take(np.array([large])), np.array([corner.rows]), np.array([corner.cols]), float(inner)
        )
        times = np.array([corner_s[0], found[_BELOW].finish_s, found[_BESIDE].finish_s])
        if best is None or times.max() < best[0]:
            best = float(times.max()), corner, found
        times = np.where(np.isfinite(times), times, 2 * target_s)
        share = share * (times.mean() / times) ** 1.2
        share /= share.sum()
        high, wide = share[0] / (share[0] + share[1]), share[0] + share[1]
        corner = _Corner(float(np.clip(rows * high, 1, rows - 1)), float(np.clip(cols * wide, 1, cols - 1)))
    assert best is not None
    if not np.isfinite(best[0]):
        return None
    return _settle(unit, large, rows, cols, inner, best[1], best[2])


def _deal(areas: Floats, others: Ints, part: float) -> list[Ints]:
    """Split devices into two groups, large and small in both, the first with a share `part` of the area."""
    order = others[np.argsort(-areas[others], kind="stable")]
    turns = np.cumsum(areas[order]) * part / areas[order].mean() + 0.5
    first = np.floor(turns) > np.floor(np.append(0.5, turns[:-1]))
    if first.all() or not first.any():
        first = np.arange(len(order)) == len(order) - 1
    return [order[first], order[~first]]


def _cover(
    unit: UnitCosts, devices: Ints, size: tuple[float, float], inner: int, areas: Floats, target_s: float
) -> _Sheet:
    """Cover a sheet in both orientations and with a few numbers of columns; return the best."""
    tall, wide = size
    lengths = np.repeat([tall, wide], len(_SHIFTS))
    widths = np.repeat([wide, tall], len(_SHIFTS))
    count = len(lengths)
    sheets = Sheets("inner-side-side", lengths, widths, np.full(count, float(inner)))
    sheet, many = np.repeat(np.arange(count), len(devices)), np.tile(devices, count)
    best_width = np.clip(np.sqrt(areas[many]), 1e-3, widths[sheet])
    length = np.clip(areas[many] / best_width, 1e-6, lengths[sheet])
    layout, start = cut(sheets, many, sheet, length, best_width, np.tile(_SHIFTS, 2))
    found, times = balance(unit, layout, sheets, np.full(count, target_s * 1.02), start, 8)
    best = int(times.argmin())
    alone, columns = layout.only(best, best + 1)
    return _Sheet(alone, found[columns], float(times[best]), best >= len(_SHIFTS))


def _settle(
    unit: UnitCosts, large: int, rows: int, cols: int, inner: int, corner: _Corner, found: list[_Sheet]
) -> tuple[Tiling, float] | None:
    """Round to whole numbers: first the corner, then each sheet in what is left."""
    high, wide = round(corner.rows), round(corner.cols)
    alone = unit.take(np.array([large]))
    if not (1 <= high < rows and 1 <= wide < cols) or high > rows_that_fit(alone, float(wide), float(inner))[0]:
        return None
    tilings = [_block(large, high, wide, inner)]
    sizes, places = ((rows - high, wide), (rows, cols - wide)), ((high, 0), (0, wide))
    for sheet, (tall, broad), (down, right) in zip(found, sizes, places, strict=True):
        length, width = (broad, tall) if sheet.transposed else (tall, broad)
        sheets = Sheets.alike("inner-side-side", length, width, np.array([float(inner)]))
        widths, times = balance(
            unit, sheet.layout, sheets, np.array([sheet.finish_s]), sheet.widths * (width / sheet.widths.sum()), 6
        )
        times = np.where(np.isfinite(times), times, sheet.finish_s)
        whole = settle(unit, sheet.layout, sheets, widths, times)
        if whole is None:
            return None
        tiling = from_columns(sheet.layout, "inner-side-side", *whole[:2], np.array([inner]))
        tilings.append((tiling.transposed() if sheet.transposed else tiling).shifted(down, right, 0))
    tiling = join(tilings)
    return tiling, float(tiling.finish_s(unit).max())


def _block(device: int, rows: int, cols: int, inner: int) -> Tiling:
    one = np.zeros(1, dtype=np.int64)
    return Tiling(
        device=one + device,
        rows=np.array([[0, rows]]),
        cols=np.array([[0, cols]]),
        inner=np.array([[0, inner]]),
        round=one,
        mates=one,
        along=one,
    )
