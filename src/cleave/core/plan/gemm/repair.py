"""Repair a plan while its gemm is running: reassign the blocks of devices that left.

Either the mates of a lost block, which already hold the strip of one operand, divide its lines among them; or, if that
is slow or no mate is left, each lost block is planned again over any devices, newcomers included. Finished blocks are
never touched. A repair assumes that nothing of the lost blocks was done and that helpers are idle. The next gemm is
planned from scratch (`product.plan_gemm`), as patching an old plan would take as long.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from cleave.core.cost.bound import least_time
from cleave.core.cost.gemm import UnitCosts, area_within, finish_s, rows_that_fit, unit_costs
from cleave.core.fleet.profiles import Floats, Ints, Profiles
from cleave.core.model.gemms import Gemm
from cleave.core.plan.gemm.product import SERVER, GemmPlan, plan_alone
from cleave.core.plan.gemm.sheets import Sheets, balance, cut, rank_within, settle, trim_surplus
from cleave.core.plan.gemm.tiling import COLS, INNER, Tiling, from_columns, join
from cleave.errors import InfeasibleError, InputError

_FAST_ENOUGH = 0.1
_MIN_MATES, _LARGE_PLAN = 6, 1000
_HELPERS = 12
_TURNS = 5
_ROUGH_PRECISION = 5e-3
_PACKING = 1.1  # strips and small sheets waste some area


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    """Replacement for the lost blocks of a plan."""

    blocks: Tiling
    """Blocks to run in place of the lost ones, round by round; devices as in `names`."""
    names: tuple[str, ...]
    recovery_s: float
    """Time from the helpers' start to the return of the last lost element."""
    lost_blocks: int
    by_mates: int
    """Lost blocks taken over by column mates."""


def repair(plan: GemmPlan, profiles: Profiles, lost: Collection[str]) -> Repair:
    """Reassign the blocks of lost devices to the rest of `profiles`: the plan's devices as known now, and newcomers."""
    server = plan.server
    lost_names = set(lost)
    if unknown := lost_names - set(plan.names):
        raise InputError(f"expected lost devices of the plan, got {min(unknown)!r}; pass names from plan.names")
    names = (*profiles.names, SERVER) if server.flops_per_s > 0 else profiles.names
    index_of = dict(zip(names, range(len(names)), strict=True))
    is_present = np.ones(len(names), dtype=bool)
    is_present[[index_of[name] for name in lost_names if name in index_of]] = False
    same = plan.names == names
    current = np.arange(len(names)) if same else np.array([index_of.get(name, -1) for name in plan.names])
    current = np.where((current >= 0) & is_present[current], current, -1)
    owner = current[plan.tiling.device]
    missing = plan.tiling.take(np.flatnonzero(owner < 0))
    if not len(missing):
        return Repair(blocks=missing, names=names, recovery_s=0.0, lost_blocks=0, by_mates=0)
    if not is_present.any():
        raise InfeasibleError("no device is left to take over the lost blocks; wait for one to join")
    unit = unit_costs(profiles, plan.wire, server, plan.a_wire)
    best = _by_mates(unit, missing, plan.tiling, owner)
    if best[1] > plan.makespan_s * _FAST_ENOUGH:
        best = min(best, _by_helpers(unit, missing, np.flatnonzero(is_present)), key=lambda recovery: recovery[1])
    blocks, recovery_s, by_mates = best
    if not np.isfinite(recovery_s):
        raise InfeasibleError("the lost blocks fit no device that is left; wait for one with more memory to join")
    return Repair(blocks=blocks, names=names, recovery_s=recovery_s, lost_blocks=len(missing), by_mates=by_mates)


_Recovery = tuple[Tiling, float, int]
"""Blocks, the seconds they take, and how many lost blocks went to mates."""


def _by_mates(unit: UnitCosts, missing: Tiling, before: Tiling, owner: Ints) -> _Recovery:
    """Divide the lines of each lost block among its mates, so that they finish together.

    A mate already holds the strip, so it needs only the lines themselves (one row of a column, or one column of a row):
    received, multiplied and returned as a stream, at the pace of the slowest of the three.
    """
    fewest_mates = np.bincount(before.mates)[missing.mates].min()
    is_hopeless = fewest_mates < _MIN_MATES and len(before) > _LARGE_PLAN  # too slow with so few mates: skip
    if (missing.along == INNER).any() or is_hopeless:
        return missing, np.inf, 0
    columns = np.unique(missing.mates)
    is_affected = np.zeros(int(before.mates.max()) + 1, dtype=bool)
    is_affected[columns] = True
    helpers = np.flatnonzero(is_affected[before.mates] & (owner >= 0))
    helpers = helpers[np.argsort(before.mates[helpers], kind="stable")]
    mates, device = before.take(helpers), owner[helpers]
    first = np.searchsorted(mates.mates, columns)
    if (np.diff(np.append(first, len(helpers))) == 0).any():
        return missing, np.inf, 0
    column = np.searchsorted(columns, mates.mates)
    entries, depth = unit.take(device), mates.depths
    width = np.where(mates.along == COLS, mates.heights, mates.widths)
    line_s = np.maximum(entries.down_s * depth, np.maximum(entries.mac_s * depth, entries.up_s) * width)

    pieces = missing.take(np.argsort(missing.mates, kind="stable"))
    length = np.where(pieces.along == COLS, pieces.widths, pieces.heights)
    needs = np.add.reduceat(length, np.searchsorted(pieces.mates, columns))
    times = _even_finish(line_s, entries.latency_s, column, first, needs)
    lines = np.floor(np.maximum(times[column] - entries.latency_s, 0.0) / line_s)
    lines = trim_surplus(lines, first, column, needs).astype(np.float64)
    more_s = entries.latency_s + (lines + 1) * line_s  # leftover lines go to the mates that finish them first
    lines += rank_within(more_s, column, first) < (needs - np.add.reduceat(lines, first))[column]
    if (lines > rows_that_fit(entries, width, depth)).any():
        return missing, np.inf, 0
    blocks = _cut_at(pieces, length, device, lines)
    rounds_s = np.zeros(int(mates.round.max()) + 1)
    np.maximum.at(rounds_s, mates.round, np.where(lines > 0, entries.latency_s + lines * line_s, 0.0))
    return blocks, float(rounds_s.sum()), len(missing)


def _even_finish(line_s: Floats, latency_s: Floats, column: Ints, first: Ints, needs: Floats) -> Floats:
    """Finish of each column if its mates finish together: sum of (t - latency) / line_s = needs, over mates in time."""
    in_time = np.ones(len(line_s), dtype=bool)
    while True:  # dropping mates that come too late only brings the finish forward
        pace = np.add.reduceat(in_time / line_s, first)
        times = (needs + np.add.reduceat(in_time * latency_s / line_s, first)) / pace
        late = in_time & (latency_s >= times[column])
        if not late.any():
            return times
        in_time &= ~late


def _cut_at(pieces: Tiling, length: Floats, device: Ints, lines: Floats) -> Tiling:
    """Lay the pieces end to end and cut them where the lines of one device end."""
    piece_ends, device_ends = np.cumsum(length).astype(np.int64), np.cumsum(lines).astype(np.int64)
    ends = np.unique(np.concatenate([piece_ends, device_ends[lines > 0]]))
    starts = np.concatenate([[0], ends[:-1]])
    piece = np.searchsorted(piece_ends, starts, side="right")
    helper = np.searchsorted(device_ends, starts, side="right")
    offset = piece_ends[piece] - length[piece].astype(np.int64)
    return pieces.take(piece).by(device[helper]).narrowed(starts - offset, ends - offset)


def _by_helpers(unit: UnitCosts, missing: Tiling, available: Ints) -> _Recovery:
    """Plan every lost block again as a sheet of its own, with helpers in proportion to its size."""
    rows, cols, depth = missing.heights, missing.widths, missing.depths
    volume = rows * cols * depth
    side, mean_depth = float(np.sqrt((rows * cols).mean())), float(volume.sum() / (rows * cols).sum())
    sample = unit.take(available[:: len(available) // 256 + 1])
    part = np.full(len(sample), side / 4)
    scale_s = float(np.median(finish_s(sample, part, part, mean_depth)))  # a time scale for comparing helpers
    strength = area_within(unit.take(available), scale_s, side, side, mean_depth)
    count = min(_HELPERS * len(missing), max(len(missing), int((strength > 0).sum())), len(available))
    ranked = np.argpartition(-strength, count - 1)[:count]
    ranked = available[ranked[np.argsort(-strength[ranked], kind="stable")]]
    if len(ranked) < len(missing):
        return _in_waves(unit, missing, available)

    def covered(t: float) -> float:
        return float(area_within(entries, t, side, side * 4, mean_depth).sum())

    entries = unit.take(ranked)
    start_s = least_time(covered, float((rows * cols).sum()) * _PACKING, 0.05)
    sheets = Sheets("inner-side-side", rows, cols, depth)
    sheet = _deal(volume, len(ranked))
    order = np.argsort(sheet, kind="stable")
    device, sheet = ranked[order], sheet[order]
    area = area_within(unit.take(device), start_s, side, side * 4, depth[sheet])
    width = np.clip(np.sqrt(area), 1e-3, cols[sheet])
    length = np.clip(area / width, 1e-6, rows[sheet])
    layout, widths = cut(sheets, device, sheet, length, width, np.zeros(len(missing), dtype=np.int64))
    widths, sheet_s = balance(unit, layout, sheets, np.full(len(missing), start_s), widths, _TURNS)
    sheet_s = np.where(np.isfinite(sheet_s), sheet_s, start_s * 2)
    whole = settle(unit, layout, sheets, widths, sheet_s, _ROUGH_PRECISION)
    if whole is None:
        return _one_by_one(unit, missing, available)
    blocks = from_columns(layout, sheets.frame, *whole[:2], depth.astype(np.int64))
    blocks = replace(blocks, inner=blocks.inner - blocks.inner[:, :1])  # each sheet has its own inner range
    return blocks.placed_in(missing, layout.sheet[blocks.mates]), float(whole[2].max()), 0


def _deal(shares: Floats, helpers: int) -> Ints:
    """Return the block of each helper, strongest first: in proportion to `shares`, at least one each, evenly spread."""
    counts = 1 + np.floor(shares / shares.sum() * (helpers - len(shares))).astype(np.int64)
    block = np.repeat(np.arange(len(shares)), counts)
    rank = np.arange(len(block)) - np.repeat(np.cumsum(counts) - counts, counts)
    assigned = block[np.argsort((rank + 0.5) / counts[block], kind="stable")]
    return np.append(assigned, np.full(helpers - len(assigned), counts.argmax()))


def _in_waves(unit: UnitCosts, missing: Tiling, available: Ints) -> _Recovery:
    """Repair in waves if blocks outnumber helpers: as many at a time as leave two helpers each, largest first."""
    order = np.argsort(-missing.heights * missing.widths * missing.depths, kind="stable")
    size = max(len(available) // 2, 1)
    blocks: list[Tiling] = []
    total_s, rounds = 0.0, 0
    for start in range(0, len(order), size):
        tiling, wave_s, _ = _by_helpers(unit, missing.take(order[start : start + size]), available)
        blocks.append(tiling.shifted(0, 0, rounds))
        total_s, rounds = total_s + wave_s, rounds + int(tiling.round.max()) + 1
    return join(blocks), total_s, 0


def _one_by_one(unit: UnitCosts, missing: Tiling, available: Ints) -> _Recovery:
    """Plan every lost block as a gemm of its own over all devices, one after another: slow, but fits any memory."""
    some = unit.take(available)
    plans: dict[Gemm, tuple[Tiling, float] | None] = {}
    blocks: list[Tiling] = []
    total_s, rounds = 0.0, 0
    for i in range(len(missing)):
        size = missing.take(np.array([i]))
        gemm = Gemm(m=int(size.heights[0]), n=int(size.widths[0]), k=int(size.depths[0]))
        if gemm not in plans:
            plans[gemm] = plan_alone(some, gemm)
        found = plans[gemm]
        if found is None:
            return missing, np.inf, 0
        tiling = found[0].of_devices(available).shifted(0, 0, rounds)
        blocks.append(tiling.placed_in(missing, np.full(len(tiling), i)))
        total_s, rounds = total_s + found[1], int(tiling.round.max()) + 1
    return join(blocks), total_s, 0
