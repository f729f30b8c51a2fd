"""Columns of blocks: who shares a strip, how wide it is, who takes how much of its length.

A block has three dimensions, and so has the gemm: sheets are stacked in one, the columns of a sheet lie side by side in
another, the devices of a column divide the third (`cost.Frame` says which is which). A 2D plan is one sheet as thick as
the inner dimension. `cut` says who stands in which column, `balance` finds the widths at which all devices of a sheet
finish at the same moment, `settle` rounds to whole numbers, again exactly. All work on many sheets at once: candidate
layouts, or the slabs of a 3D plan. Adding a device to a column never hurts (it may take nothing), so a layout leaves
nobody out; rounding does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cleave.core.cost.gemm import Frame, UnitCosts, reach, reach_and_slopes
from cleave.core.fleet.profiles import Floats, Ints

_WHOLE = 1 + 1e-9  # whole numbers survive a floating detour
_CLOSE = 2e-3  # a sheet whose columns miss rows by more than this share has not converged
_PRECISION = 2e-5
_WIDTH_TURNS = 6
_NEVER_S = 1e12


@dataclass(frozen=True, slots=True)
class Layout:
    """Who stands where: entries (devices) in columns, columns in sheets; both ascending, none empty."""

    devices: Ints
    column: Ints
    """of each entry"""
    sheet: Ints
    """of each column"""
    column_starts: Ints
    sheet_starts: Ints

    @staticmethod
    def of(devices: Ints, key: Ints, keys_per_sheet: int) -> Layout:
        """Entries of equal key form a column; key // keys_per_sheet is its sheet."""
        order = np.argsort(key, kind="stable")
        present, column = np.unique(key[order], return_inverse=True)
        sheet = np.unique(present // keys_per_sheet, return_inverse=True)[1]
        return Layout(devices[order], column, sheet, _starts(column), _starts(sheet))

    @property
    def sheets(self) -> int:
        return len(self.sheet_starts)

    def only(self, first: int, end: int) -> tuple[Layout, slice]:
        """Some sheets alone, and where their columns are."""
        columns = slice(*np.searchsorted(self.sheet, [first, end]))
        entries = slice(*np.searchsorted(self.column, [columns.start, columns.stop]))
        column, sheet = self.column[entries] - columns.start, self.sheet[columns] - first
        return Layout(self.devices[entries], column, sheet, _starts(column), _starts(sheet)), columns


@dataclass(frozen=True, slots=True)
class Sheets:
    """What is to be covered, and how the three dimensions of the gemm take part."""

    frame: Frame
    length: Floats
    """of each sheet: what the devices of a column divide"""
    width: Floats
    """of each sheet: what its columns divide"""
    thickness: Floats
    """of each sheet"""

    @staticmethod
    def alike(frame: Frame, length: int, width: int, thickness: Floats) -> Sheets:
        same = np.ones(len(thickness))
        return Sheets(frame, same * length, same * width, thickness)


def cut(
    sheets: Sheets, devices: Ints, sheet: Ints, length: Floats, width: Floats, shift: Ints
) -> tuple[Layout, Floats]:
    """Columns of similar devices: those of a sheet, widest first, cut into equal sums of lengths. With first widths.

    `length` and `width` are those of the block that suits each device best. A device of side s in a column of width w
    does w (2s - w) = s^2 - (s - w)^2 while its download binds: what it loses is second order in the mismatch, and
    nothing in a column whose lengths add up. So the natural number of columns is the sum of lengths over the length
    to cover; `shift` (per sheet) tries its neighbours.
    """
    order = np.lexsort((-length, -width, sheet))
    devices, sheet, length, width = devices[order], sheet[order], length[order], width[order]
    starts = _starts(sheet)
    total = np.add.reduceat(length, starts)
    ends = np.cumsum(length)
    middle = ends - (ends - length)[starts][sheet] - length / 2
    most = np.maximum(np.minimum(sheets.width, np.diff(np.append(starts, len(sheet)))).astype(np.int64), 1)
    columns = np.clip(np.rint(total / sheets.length).astype(np.int64) + shift, 1, most)
    column = np.minimum((middle / total[sheet] * columns[sheet]).astype(np.int64), columns[sheet] - 1)
    layout = Layout.of(devices, sheet * (len(devices) + 1) + column, len(devices) + 1)
    return layout, mean_widths(layout, sheets, width)


def mean_widths(layout: Layout, sheets: Sheets, width: Floats) -> Floats:
    """The mean width of each column's entries, scaled to the sheet."""
    crowd = np.diff(np.append(layout.column_starts, len(layout.column)))
    return _scaled(np.add.reduceat(width, layout.column_starts) / crowd, layout, sheets.width)


def balance(
    unit: UnitCosts, layout: Layout, sheets: Sheets, start_s: Floats, widths: Floats, turns: int
) -> tuple[Floats, Floats]:
    """Real widths of all columns, and the moment at which each sheet finishes (infinite where it did not converge).

    Newton's method on all columns together. With S(w, t) the rows that a column's devices manage,
    S + S_w dw + S_t dt = rows in each column and the widths of a sheet sum to its cols: one unknown dt per sheet.
    """
    column, sheet = layout.column, layout.sheet
    entries, thickness = unit.take(layout.devices), sheets.thickness[sheet][column]
    deadline, width = start_s.copy(), widths.copy()
    for _ in range(turns):
        each, by_t, by_w = reach_and_slopes(entries, deadline[sheet][column], width[column], thickness, sheets.frame)
        total = np.add.reduceat(each, layout.column_starts)
        slope_t = np.add.reduceat(by_t, layout.column_starts)
        slope_w = np.minimum(np.add.reduceat(by_w, layout.column_starts), -1e-12)
        step = np.clip((sheets.length[sheet] - total) / slope_w, -0.5 * width, 0.5 * width)
        give = np.maximum(-slope_t / slope_w, 1e-12)
        missing = sheets.width - np.add.reduceat(width + step, layout.sheet_starts)
        dt = np.clip(missing / np.add.reduceat(give, layout.sheet_starts), -0.3 * deadline, 0.5 * deadline)
        deadline += dt
        width = np.maximum(width + np.clip(step + give * dt[sheet], -0.6 * width, width), 1e-3)
        if np.abs(dt / deadline).max() < _PRECISION / 2:
            break
    width = _scaled(width, layout, sheets.width)
    each = reach(entries, deadline[sheet][column], width[column], thickness, sheets.frame)
    total = np.add.reduceat(each, layout.column_starts)
    short = np.minimum.reduceat(total / sheets.length[sheet], layout.sheet_starts) < 1 - _CLOSE
    crowded = np.bincount(sheet) > sheets.width  # columns cannot be thinner than one
    return width, np.where(short | crowded, np.inf, deadline)


def widths_within(
    unit: UnitCosts, devices: Ints, column: Ints, sheets: Sheets, deadline_s: float, widths: Floats
) -> Floats:
    """How wide each column of one sheet may be for its devices to cover the length in time; 0 if they cannot."""
    entries, starts, width, thickness = (
        unit.take(devices),
        _starts(column),
        widths.copy(),
        sheets.thickness[0],
    )
    for _ in range(_WIDTH_TURNS):
        each, _, by_w = reach_and_slopes(entries, deadline_s, width[column], thickness, sheets.frame)
        slope = np.minimum(np.add.reduceat(by_w, starts), -1e-12)
        step = (sheets.length[0] - np.add.reduceat(each, starts)) / slope
        width = np.maximum(width + np.clip(step, -0.6 * width, width), 1e-3)
    total = np.add.reduceat(reach(entries, deadline_s, width[column], thickness, sheets.frame), starts)
    return np.where(total >= sheets.length[0] * (1 - _CLOSE), width, 0.0)


def settle(
    unit: UnitCosts,
    layout: Layout,
    sheets: Sheets,
    widths: Floats,
    start_s: Floats,
    precision: float = _PRECISION,
) -> tuple[Ints, Ints, Floats] | None:
    """Whole numbers from real widths: the best rounding of each column, then the best lengths in it.

    Returns the width of each column, the length of each entry and the finish of each column; None where a sheet is
    narrower than it has columns, or a column's devices can never hold its length. A coarser precision is three times
    as fast, and rounds by the largest remainder.
    """
    sheet = layout.sheet
    low = np.maximum(np.floor(widths * _WHOLE), 1.0)
    spare = sheets.width - np.add.reduceat(low, layout.sheet_starts)
    while (spare < 0).any():  # the minimum of one took too much
        widest = np.lexsort((-low, sheet))[layout.sheet_starts]
        low[widest] -= spare < 0
        spare += spare < 0
    if (low < 1).any():
        return None
    if precision > _PRECISION:
        low += rank_within(low - widths, sheet, layout.sheet_starts) < spare[sheet]
        times = column_times(unit, layout, sheets, low, start_s, precision)
    else:
        times, wider = (column_times(unit, layout, sheets, w, start_s, precision) for w in (low, low + 1))
        grow = rank_within(wider, sheet, layout.sheet_starts) < spare[sheet]
        low, times = np.where(grow, low + 1, low), np.where(grow, wider, times)
    if not np.isfinite(times).all():
        return None
    thickness = sheets.thickness[sheet][layout.column]
    needs = sheets.length[sheet]
    each = _whole(
        unit.take(layout.devices),
        times[layout.column],
        low[layout.column],
        thickness,
        sheets.frame,
        needs[layout.column],
    )
    return low.astype(np.int64), trimmed(each, layout.column_starts, layout.column, needs), times


def column_times(
    unit: UnitCosts, layout: Layout, sheets: Sheets, widths: Floats, start_s: Floats, precision: float
) -> Floats:
    """The least finish of each column when its devices take whole lengths; infinite if memory forbids."""
    column = layout.column
    entries, width, thickness = (
        unit.take(layout.devices),
        widths[column],
        sheets.thickness[layout.sheet][column],
    )
    needs = sheets.length[layout.sheet]
    most = needs[column]

    def lengths(deadline: Floats) -> Floats:
        return _whole(entries, deadline[column], width, thickness, sheets.frame, most)

    guess = np.where(np.isfinite(start_s), start_s, 1.0)[layout.sheet]
    return least_times(lengths, layout.column_starts, needs, guess, precision)


def least_times(
    counts: Callable[[Floats], Floats], starts: Ints, needs: Floats, guess_s: Floats, precision: float
) -> Floats:
    """The least time of each group of entries at which their counts add up to its need; infinite if they never do.

    `counts` gives every entry's count from the groups' times; groups begin at `starts`.
    """

    def reached(times: Floats) -> NDArray[np.bool_]:
        return np.add.reduceat(counts(times), starts) >= needs

    low, high = guess_s * 0.97, guess_s * 1.03
    growth = 1.1
    while not (done := reached(high)).all() and high.max() < _NEVER_S:
        low, high = np.where(done, low, high), np.where(done, high, high * growth)
        growth *= 1.5
    never = ~done
    shrink = 0.9
    while (early := reached(low)).any() and shrink > 1e-6:
        high, low = np.where(early, low, high), np.where(early, low * shrink, low)
        shrink *= shrink
    while (high > low * (1 + precision)).any():
        middle = (low + high) / 2
        done = reached(middle) | never
        low, high = np.where(done, low, middle), np.where(done, middle, high)
    return np.where(never, np.inf, high)


def trimmed(counts: Floats, starts: Ints, group: Ints, needs: Floats) -> Ints:
    """Take the surplus off the end of each group, where the weakest devices stand."""
    ends = np.cumsum(counts)
    ends = np.minimum(ends - (ends - counts)[starts][group], needs[group])
    before = np.concatenate([[0.0], ends[:-1]])
    before[starts] = 0.0
    return (ends - before).astype(np.int64)


def _whole(
    entries: UnitCosts, deadline: Floats, width: Floats, thickness: Floats, frame: Frame, most: Floats
) -> Floats:
    return np.floor(np.minimum(reach(entries, deadline, width, thickness, frame), most) * _WHOLE)


def rank_within(values: Floats, group: Ints, starts: Ints) -> Ints:
    """The rank of each value among those of its group, smallest first."""
    order = np.lexsort((values, group))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - starts[group[order]]
    return rank


def _scaled(widths: Floats, layout: Layout, width: Floats) -> Floats:
    return widths * (width / np.add.reduceat(widths, layout.sheet_starts))[layout.sheet]


def _starts(group: Ints) -> Ints:
    """Where each group begins in an ascending array of group numbers 0, 1, 2 ..."""
    return np.searchsorted(group, np.arange(int(group[-1]) + 1))
