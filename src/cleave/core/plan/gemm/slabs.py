"""3D plans: the inner dimension is split too. Sheets are stacked in any dimension; the server adds partial results.

Splitting the inner dimension pays off where downloads are the bottleneck: a device receives less for a larger area. The
method is that for columns, one level up: sort devices by the thickness that suits each, cut them into sheets of equal
face, cut every sheet into columns, balance all of them together, and move thickness from late sheets to early ones. The
best dimension to stack in depends on the shape, so all are tried. A pile is one candidate stack of sheets.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from cleave.core.cost.gemm import Frame, UnitCosts, area_within, best_inner
from cleave.core.fleet.profiles import Floats, Ints
from cleave.core.plan.gemm.exchange import Sizes, propose_exchanges
from cleave.core.plan.gemm.sheets import Layout, Sheets, balance, cut, settle
from cleave.core.plan.gemm.tiling import Tiling, from_columns

_FRAMES: tuple[Frame, ...] = ("inner-side-side", "side-inner-side", "side-side-inner")
_SMALL = 512
_EFFORT = ((16, 6, 2), (64, 6, 1), (128, 2, 1), (float("inf"), 3, 1))
"""(up to this many devices, nestings to search, sheet counts to start from in each)."""
_SEARCHED = 128
_REINFORCED = 2048
_SEARCH_TURNS = 6
_SIZE_TURNS = 5
_GOOD_ENOUGH = 1.02
_LATE = 1.01  # a sheet this far behind the others needs help
_HELPERS = 16
_BALANCE_TURNS = 8
_FEW_BLOCKS = 2.5


@dataclass(frozen=True, slots=True)
class _BestSlabs:
    """The block that suits each device best, in the axes of a frame."""

    thickness: Floats
    width: Floats
    length: Floats


@dataclass(frozen=True, slots=True)
class _FramedGemm:
    """A gemm in the axes of a frame: thickness is divided by sheets, width by columns, length by devices."""

    frame: Frame
    thickness: int
    width: int
    length: int


@dataclass(frozen=True, slots=True)
class _Piles:
    """Candidates side by side: entries belong to sheets, sheets to piles; both ascending."""

    devices: Ints
    sheet: Ints
    """Sheet of each entry."""
    pile: Ints
    """Pile of each sheet."""
    shift: Ints
    """Extra columns of each sheet beyond the natural number."""


@dataclass(frozen=True, slots=True)
class _Balanced:
    layout: Layout
    sheets: Sheets
    widths: Floats
    sheet_s: Floats
    pile_s: Floats


@dataclass(frozen=True, slots=True)
class _Trial:
    gemm: _FramedGemm
    best_slabs: _BestSlabs
    piles: _Piles
    balanced: _Balanced


def plan_slabs(unit: UnitCosts, rows: int, cols: int, inner: int, target_s: float) -> tuple[Tiling, float] | None:
    """Return the best 3D tiling found and its finish. The search starts at the bound `target_s`."""
    trials: list[tuple[float, bool, _Trial]] = []
    for frame, transposed in _nestings(unit, rows, cols, inner, target_s):
        gemm, best_slabs = _frame_gemm(
            unit, *((cols, rows) if transposed else (rows, cols)), inner, frame, target_s * 1.03
        )
        piles = _cut_piles(gemm, best_slabs)
        balanced = _balance(unit, gemm, best_slabs, piles, target_s * 1.03)
        trials.append((float(balanced.pile_s.min()), transposed, _Trial(gemm, best_slabs, piles, balanced)))
    trials.sort(key=lambda t: t[0])
    best: tuple[Tiling, float] | None = None
    frames, starts = next(effort[1:] for effort in _EFFORT if len(unit) <= effort[0])
    for _, transposed, found in trials[:frames]:
        for start in _starts(found, starts):
            settled = _settle(unit, _search(unit, start, target_s) if len(unit) <= _REINFORCED else start)
            if settled and (best is None or settled[1] < best[1]):
                best = (settled[0].transposed() if transposed else settled[0], settled[1])
    return best


def _starts(found: _Trial, count: int) -> list[_Trial]:
    """Choose where to search from: the best piles with different numbers of sheets."""
    sheets = np.bincount(found.piles.pile)
    starts: dict[int, _Trial] = {}
    for pile in np.argsort(found.balanced.pile_s):
        if sheets[pile] not in starts and len(starts) < count:
            only = np.full(len(sheets), np.inf)
            only[pile] = found.balanced.pile_s[pile]
            starts[int(sheets[pile])] = replace(found, balanced=replace(found.balanced, pile_s=only))
    return list(starts.values())


def _nestings(unit: UnitCosts, rows: int, cols: int, inner: int, target_s: float) -> list[tuple[Frame, bool]]:
    """List frames to try: all, except that devices divide the inner dimension only if it takes a few blocks."""
    deep = best_inner(unit, target_s, float(min(rows, cols)), float(max(rows, cols)), inner)
    blocks = inner / float(np.median(deep))
    frames: list[Frame] = [frame for frame in _FRAMES if frame != "side-side-inner" or blocks >= _FEW_BLOCKS]
    return list(product(frames, (False, True) if rows != cols else (False,)))


def _frame_gemm(
    unit: UnitCosts, rows: int, cols: int, inner: int, frame: Frame, deadline_s: float
) -> tuple[_FramedGemm, _BestSlabs]:
    sides = float(min(rows, cols)), float(max(rows, cols))
    deep = best_inner(unit, deadline_s, *sides, inner)
    area = area_within(unit, deadline_s, *sides, deep)
    wide = np.clip(np.sqrt(area), 1e-3, cols)
    long = np.clip(area / wide, 1e-6, rows)
    match frame:
        case "inner-side-side":
            return _FramedGemm(frame, inner, cols, rows), _BestSlabs(deep, wide, long)
        case "side-inner-side":
            return _FramedGemm(frame, cols, inner, rows), _BestSlabs(wide, deep, long)
        case "side-side-inner":
            return _FramedGemm(frame, cols, rows, inner), _BestSlabs(wide, long, deep)


def _cut_piles(gemm: _FramedGemm, best_slabs: _BestSlabs) -> _Piles:
    """Cut piles with about as many sheets as the devices' best faces fill."""
    face = best_slabs.width * best_slabs.length
    devices = np.flatnonzero(face > 1e-3)
    devices = devices[np.lexsort((-face[devices], -best_slabs.thickness[devices]))]
    natural = face[devices].sum() / (float(gemm.width) * gemm.length)
    small = len(face) <= _SMALL
    counts = natural + np.arange(-3, 4) if small else natural * np.array([0.94, 0.97, 1.0, 1.03, 1.06])
    few: list[int] = np.unique(np.clip(np.rint(counts), 1, min(gemm.thickness, len(devices)))).astype(int).tolist()
    return _piles(
        devices,
        [(_equal_runs(face[devices], count), shift) for count in few for shift in ((-1, 0, 1) if small else (0,))],
    )


def _equal_runs(sizes: Floats, count: int) -> Ints:
    """Cut a sequence into `count` runs of about equal sums; each cut is placed from what is left to divide."""
    ends = np.append(0.0, np.cumsum(sizes))
    run = np.zeros(len(sizes), dtype=np.int64)
    first = 0
    for number in range(count - 1):
        target = float(ends[first] + (ends[-1] - ends[first]) / (count - number))
        last = int(np.searchsorted(ends, target))
        last -= int(2 * target < float(ends[last - 1] + ends[last]))
        first = min(max(last, first + 1), len(sizes) - (count - number - 1))
        run[first:] = number + 1
    return run


def _piles(devices: Ints, candidates: list[tuple[Ints, int]]) -> _Piles:
    """Build one pile per candidate: the sheet of each device, and the shift of its sheets."""
    key = np.concatenate([candidate + number * (len(devices) + 1) for number, (candidate, _) in enumerate(candidates)])
    order = np.argsort(key, kind="stable")
    present, sheet = np.unique(key[order], return_inverse=True)
    pile = present // (len(devices) + 1)
    return _Piles(
        np.tile(devices, len(candidates))[order], sheet, pile, np.array([shift for _, shift in candidates])[pile]
    )


def _balance(unit: UnitCosts, gemm: _FramedGemm, best_slabs: _BestSlabs, piles: _Piles, start_s: float) -> _Balanced:
    """Cut every sheet into columns, then move thickness until the sheets of a pile finish together."""
    sheet_starts = np.searchsorted(piles.sheet, np.arange(len(piles.pile)))
    pile_starts = np.searchsorted(piles.pile, np.arange(int(piles.pile[-1]) + 1))

    def stacked(thickness: Floats) -> Sheets:
        scale = gemm.thickness / np.add.reduceat(thickness, pile_starts)
        return Sheets.alike(gemm.frame, gemm.length, gemm.width, thickness * scale[piles.pile])

    best_thickness = best_slabs.thickness[piles.devices]
    sheets = stacked(
        np.add.reduceat(best_thickness, sheet_starts) / np.diff(np.append(sheet_starts, len(best_thickness)))
    )
    length, width = best_slabs.length[piles.devices], best_slabs.width[piles.devices]
    layout, widths = cut(sheets, piles.devices, piles.sheet, length, width, piles.shift)
    sheet_s = np.full(layout.sheets, start_s)
    found_s = now_s = sheet_s
    stiffness, change = np.full(layout.sheets, 0.8), np.zeros(layout.sheets)
    for turn in range(_BALANCE_TURNS):
        widths, found_s = balance(unit, layout, sheets, sheet_s, widths, 4 if turn else 10)
        now_s = np.where(np.isfinite(found_s), found_s, sheet_s * 1.2)
        if turn == _BALANCE_TURNS - 1:
            break
        mean = np.add.reduceat(now_s * sheets.thickness, pile_starts) / gemm.thickness
        if turn:  # sensitivity of a sheet's finish to its thickness, from the last change
            sensitivity = np.log(now_s / sheet_s) / np.where(np.abs(change) > 1e-4, change, np.inf)
            stiffness = np.where(sensitivity > 0, np.clip(sensitivity, 0.2, 1.2), stiffness)
        before, sheet_s = sheets, now_s
        sheets = stacked(sheets.thickness * np.exp(np.clip(np.log(mean[piles.pile] / now_s) / stiffness, -0.5, 0.4)))
        change = np.log(sheets.thickness / before.thickness)
    crowded = np.bincount(piles.pile) > gemm.thickness  # sheets cannot be thinner than one
    pile_s = np.where(crowded, np.inf, np.maximum.reduceat(found_s, pile_starts))
    return _Balanced(layout, sheets, widths, now_s, pile_s)


def _settle(unit: UnitCosts, found: _Trial) -> tuple[Tiling, float] | None:
    """Round the best pile to whole thicknesses, widths and lengths."""
    gemm, balanced = found.gemm, found.balanced
    members = np.flatnonzero(found.piles.pile == balanced.pile_s.argmin())
    if len(members) > gemm.thickness:
        return None
    layout, columns = balanced.layout.only(members[0], members[-1] + 1)
    thickness = _round_parts(balanced.sheets.thickness[members], gemm.thickness)
    sheets = Sheets.alike(gemm.frame, gemm.length, gemm.width, thickness.astype(np.float64))
    widths, sheet_s = balance(unit, layout, sheets, balanced.sheet_s[members], balanced.widths[columns], 6)
    sheet_s = np.where(np.isfinite(sheet_s), sheet_s, balanced.sheet_s[members])
    whole = settle(unit, layout, sheets, widths, sheet_s)
    if whole is None:
        return None
    return from_columns(layout, gemm.frame, *whole[:2], thickness), float(whole[2].max())


def _round_parts(parts: Floats, total: int) -> Ints:
    """Round parts to integers of at least one, by largest remainder."""
    whole = np.maximum(np.floor(parts), 1.0).astype(np.int64)
    while (spare := total - int(whole.sum())) < 0:
        whole[np.argmax(whole)] -= 1
    whole[np.argsort(whole - parts, kind="stable")[:spare]] += 1
    return whole


def _search(unit: UnitCosts, found: _Trial, target_s: float) -> _Trial:
    """Exchange devices between sheets, or reinforce a late one, while that shortens the best pile."""
    for _ in range(_SEARCH_TURNS):
        piles, balanced = found.piles, found.balanced
        best = int(balanced.pile_s.argmin())
        reached = float(balanced.pile_s[best])
        members = np.flatnonzero(piles.pile == best)
        if len(members) == 1 or not target_s * _GOOD_ENOUGH < reached < np.inf:
            break
        span = slice(*np.searchsorted(piles.sheet, [members[0], members[-1] + 1]))
        current, shift = piles.sheet[span] - members[0], int(piles.shift[members[0]])
        candidates: list[Ints] = []
        if len(current) <= _SEARCHED:
            thickness = balanced.sheets.thickness[members]
            sizes = _thickness_of(unit, found, piles.devices[span], thickness, shift, reached)
            candidates.extend(propose_exchanges(current, sizes, 1e-4 * found.gemm.thickness))
        if reached > float(np.median(balanced.sheet_s[members])) * _LATE:
            candidates.extend(_reinforcements(current, int(balanced.sheet_s[members].argmax())))
        if not candidates:
            break
        shifts = (shift - 1, shift, shift + 1) if len(current) <= _SEARCHED else (shift,)
        tried = _piles(piles.devices[span], [(candidate, s) for candidate in [current, *candidates] for s in shifts])
        again = _balance(unit, found.gemm, found.best_slabs, tried, reached)
        if again.pile_s.min() > reached * (1 - 5e-4):
            break
        found = _Trial(found.gemm, found.best_slabs, tried, again)
    return found


def _thickness_of(
    unit: UnitCosts, found: _Trial, devices: Ints, thickness: Floats, shift: int, deadline_s: float
) -> Sizes:
    """Return a function that estimates how thick a sheet of given devices can be to finish at the deadline."""
    gemm, best_slabs = found.gemm, found.best_slabs

    def sizes(entries: Ints, sheet: Ints, like: Ints) -> Floats:
        chosen = devices[entries]
        thick = np.append(thickness, thickness.mean())[like]
        sheets = Sheets.alike(gemm.frame, gemm.length, gemm.width, thick)
        shifts = np.full(len(thick), shift)
        layout, widths = cut(sheets, chosen, sheet, best_slabs.length[chosen], best_slabs.width[chosen], shifts)
        times = found_s = np.full(len(thick), deadline_s)
        for turn in range(_SIZE_TURNS):
            widths, found_s = balance(unit, layout, sheets, times, widths, 3 if turn else 6)
            times = np.where(np.isfinite(found_s), found_s, times * 1.2)
            if turn < _SIZE_TURNS - 1:
                thick = np.minimum(thick * np.clip(deadline_s / times, 0.6, 1.6) ** 1.3, gemm.thickness)
                sheets = Sheets.alike(gemm.frame, gemm.length, gemm.width, thick)
        return np.where(np.isfinite(found_s) & (times <= deadline_s * 1.02), thick * deadline_s / times, 0.0)

    return sizes


def _reinforcements(sheet: Ints, late: int) -> Ints:
    """Propose assignments in which a device of a nearby sheet moves to the late one."""
    nearby = np.flatnonzero((np.abs(sheet - late) <= 3) & (sheet != late))
    helpers = nearby[np.linspace(0, len(nearby) - 1, min(len(nearby), _HELPERS)).astype(np.int64)]
    moved = np.tile(sheet, (len(helpers), 1))
    moved[np.arange(len(helpers)), helpers] = late
    return moved
