"""Columns of blocks: which devices share a strip, how wide it is, and how its length is divided.

Blocks and gemms have three dimensions: sheets are stacked in one, the columns of a sheet lie side by side in another,
and the devices of a column divide the third (`cost.Frame` says which is which). A 2D plan is one sheet as thick as the
inner dimension. `cut` assigns devices to columns, `balance` finds the widths at which all devices of a sheet finish
together, and `settle` rounds to whole numbers, optimally per column. All of them work on many sheets at once: candidate
layouts, or the slabs of a 3D plan. Adding a device to a column never hurts, as it may take nothing, so a layout uses
every device; rounding may leave some out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cleave.core.cost.gemm import Frame, UnitCosts, reach, reach_and_slopes
from cleave.core.fleet.profiles import Floats, Ints

_ROUNDING_SLACK = 1 + 1e-9  # keeps whole numbers whole despite floating-point error
_CLOSE = 2e-3  # a sheet whose columns fall short by more than this share has not converged
_PRECISION = 2e-5
_WIDTH_TURNS = 6
_NEVER_S = 1e12


@dataclass(frozen=True, slots=True)
class Layout:
    """Assignment of entries (devices) to columns and of columns to sheets; both ascending, none empty."""

    devices: Ints
    column: Ints
    """Column of each entry."""
    sheet: Ints
    """Sheet of each column."""
    column_starts: Ints
    sheet_starts: Ints

    @staticmethod
    def of(devices: Ints, key: Ints, keys_per_sheet: int) -> Layout:
        """Build a layout: entries with equal keys form a column, in sheet key // keys_per_sheet."""
        order = np.argsort(key, kind="stable")
        present, column = np.unique(key[order], return_inverse=True)
        sheet = np.unique(present // keys_per_sheet, return_inverse=True)[1]
        return Layout(devices[order], column, sheet, _starts(column), _starts(sheet))

    @property
    def sheets(self) -> int:
        return len(self.sheet_starts)

    def only(self, first: int, end: int) -> tuple[Layout, slice]:
        """Return the layout of sheets `first` to `end` alone, and the slice of their columns."""
        columns = slice(*np.searchsorted(self.sheet, [first, end]))
        entries = slice(*np.searchsorted(self.column, [columns.start, columns.stop]))
        column, sheet = self.column[entries] - columns.start, self.sheet[columns] - first
        return Layout(self.devices[entries], column, sheet, _starts(column), _starts(sheet)), columns


@dataclass(frozen=True, slots=True)
class Sheets:
    """Sizes of sheets to cover, and how they map to the dimensions of the gemm."""

    frame: Frame
    length: Floats
    """Divided by the devices of a column; one entry per sheet, as in the others."""
    width: Floats
    """Divided by the columns of a sheet."""
    thickness: Floats

    @staticmethod
    def alike(frame: Frame, length: int, width: int, thickness: Floats) -> Sheets:
        same = np.ones(len(thickness))
        return Sheets(frame, same * length, same * width, thickness)


def cut(
    sheets: Sheets, devices: Ints, sheet: Ints, length: Floats, width: Floats, shift: Ints
) -> tuple[Layout, Floats]:
    """Cut sheets into columns of similar devices: widest first, with equal sums of lengths. Also return first widths.

    `length` and `width` are those of the block that suits each device best. A device of best side s in a column of
    width w does w (2s - w) = s^2 - (s - w)^2 while download is its bottleneck: the loss is second order in the
    mismatch, and zero in a column whose lengths add up. So the natural number of columns is the sum of lengths over the
    length to cover; `shift` (per sheet) tries neighboring numbers.
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
    """Mean width of each column's entries, scaled to fill the sheet."""
    counts = np.diff(np.append(layout.column_starts, len(layout.column)))
    return _scale_to(np.add.reduceat(width, layout.column_starts) / counts, layout, sheets.width)


def balance(
    unit: UnitCosts, layout: Layout, sheets: Sheets, start_s: Floats, widths: Floats, turns: int
) -> tuple[Floats, Floats]:
    """Return real-valued column widths and the finish of each sheet, infinite if it did not converge.

    Newton's method on all columns together. With S(w, t) the length that a column's devices cover in time t,
    S + S_w dw + S_t dt = length in each column, and the widths of a sheet sum to its own: one unknown dt per sheet.
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
        gain = np.maximum(-slope_t / slope_w, 1e-12)
        missing = sheets.width - np.add.reduceat(width + step, layout.sheet_starts)
        dt = np.clip(missing / np.add.reduceat(gain, layout.sheet_starts), -0.3 * deadline, 0.5 * deadline)
        deadline += dt
        width = np.maximum(width + np.clip(step + gain * dt[sheet], -0.6 * width, width), 1e-3)
        if np.abs(dt / deadline).max() < _PRECISION / 2:
            break
    width = _scale_to(width, layout, sheets.width)
    each = reach(entries, deadline[sheet][column], width[column], thickness, sheets.frame)
    total = np.add.reduceat(each, layout.column_starts)
    short = np.minimum.reduceat(total / sheets.length[sheet], layout.sheet_starts) < 1 - _CLOSE
    crowded = np.bincount(sheet) > sheets.width  # columns cannot be narrower than one
    return width, np.where(short | crowded, np.inf, deadline)


def widths_within(
    unit: UnitCosts, devices: Ints, column: Ints, sheets: Sheets, deadline_s: float, widths: Floats
) -> Floats:
    """Widest that each column of one sheet can be for its devices to cover the length in time; 0 if they cannot."""
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
    """Round real widths to whole numbers: the best rounding of each column, then the best lengths in it.

    Returns the width of each column, the length of each entry and the finish of each column; None if a sheet has more
    columns than its width, or a column's devices can never hold its length. A coarser precision is three times as fast
    and rounds by largest remainder.
    """
    sheet = layout.sheet
    low = np.maximum(np.floor(widths * _ROUNDING_SLACK), 1.0)
    spare = sheets.width - np.add.reduceat(low, layout.sheet_starts)
    while (spare < 0).any():  # the minimum of one exceeded the width
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
    each = _whole_lengths(
        unit.take(layout.devices),
        times[layout.column],
        low[layout.column],
        thickness,
        sheets.frame,
        needs[layout.column],
    )
    return low.astype(np.int64), trim_surplus(each, layout.column_starts, layout.column, needs), times


def column_times(
    unit: UnitCosts, layout: Layout, sheets: Sheets, widths: Floats, start_s: Floats, precision: float
) -> Floats:
    """Earliest finish of each column with whole lengths; infinite if memory does not suffice."""
    column = layout.column
    entries, width, thickness = (
        unit.take(layout.devices),
        widths[column],
        sheets.thickness[layout.sheet][column],
    )
    needs = sheets.length[layout.sheet]
    most = needs[column]

    def lengths(deadline: Floats) -> Floats:
        return _whole_lengths(entries, deadline[column], width, thickness, sheets.frame, most)

    guess = np.where(np.isfinite(start_s), start_s, 1.0)[layout.sheet]
    return least_times(lengths, layout.column_starts, needs, guess, precision)


def least_times(
    counts: Callable[[Floats], Floats], starts: Ints, needs: Floats, guess_s: Floats, precision: float
) -> Floats:
    """Least time at which the counts of each group add up to its need; infinite if they never do.

    `counts` maps times per group to counts per entry; groups begin at `starts`.
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


def trim_surplus(counts: Floats, starts: Ints, group: Ints, needs: Floats) -> Ints:
    """Cut the surplus off the end of each group, where the weakest devices are."""
    ends = np.cumsum(counts)
    ends = np.minimum(ends - (ends - counts)[starts][group], needs[group])
    before = np.concatenate([[0.0], ends[:-1]])
    before[starts] = 0.0
    return (ends - before).astype(np.int64)


def _whole_lengths(
    entries: UnitCosts, deadline: Floats, width: Floats, thickness: Floats, frame: Frame, most: Floats
) -> Floats:
    return np.floor(np.minimum(reach(entries, deadline, width, thickness, frame), most) * _ROUNDING_SLACK)


def rank_within(values: Floats, group: Ints, starts: Ints) -> Ints:
    """Rank of each value within its group, smallest first."""
    order = np.lexsort((values, group))
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order)) - starts[group[order]]
    return rank


def _scale_to(widths: Floats, layout: Layout, width: Floats) -> Floats:
    return widths * (width / np.add.reduceat(widths, layout.sheet_starts))[layout.sheet]


def _starts(group: Ints) -> Ints:
    """Start of each group in an ascending array of group numbers 0, 1, 2, ..."""
    return np.searchsorted(group, np.arange(int(group[-1]) + 1))
