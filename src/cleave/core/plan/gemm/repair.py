"""What to do about the blocks of devices that left, while a gemm is under way.

Two ways: the mates of a lost block, who hold the strip of one operand already, divide its lines among them; or, where
that is slow or no mate is left, each lost block is planned afresh over devices from anywhere, newcomers included.
Finished blocks are never touched. A repair is worked out as if nothing of the lost blocks had been done and the
helpers were free. The next gemm is simply planned anew (`gemm.plan_gemm`): patching an old plan would take as long.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from cleave.core.cost.bound import least_time
from cleave.core.cost.gemm import (
    UnitCosts,
    area_within,
    finish_s,
    rows_that_fit,
    unit_costs,
)
from cleave.core.fleet.profiles import Floats, Ints, Profiles
from cleave.core.model.gemms import Gemm
from cleave.core.plan.gemm.product import SERVER, GemmPlan, plan_alone
from cleave.core.plan.gemm.sheets import Sheets, balance, cut, rank_within, settle, trimmed
from cleave.core.plan.gemm.tiling import COLS, INNER, Tiling, from_columns, join
from cleave.errors import InfeasibleError, InputError

_SOON_ENOUGH = 0.1
_FEW, _MANY = 6, 1000
_HELPERS = 12
_TURNS = 5
_ROUGH = 5e-3
_PACKING = 1.1  # strips and small sheets waste some area


@dataclass(frozen=True, slots=True, kw_only=True)
class Repair:
    blocks: Tiling
    """what is to be done in place of the lost blocks, round by round; devices as in `names`"""
    names: tuple[str, ...]
    recovery_s: float
    """from the moment the helpers start until the last lost element is back"""
    lost_blocks: int
    by_mates: int
    """how many of the lost blocks are taken over by column mates"""


def repair(plan: GemmPlan, profiles: Profiles, lost: Collection[str]) -> Repair:
    """Hand the blocks of the lost devices to the rest of `profiles`: the plan's devices as known now, and newcomers."""
    server = plan.server
    gone = set(lost)
    if unknown := gone - set(plan.names):
        raise InputError(f"expected lost devices of the plan, got {min(unknown)!r}; pass names from plan.names")
    names = (*profiles.names, SERVER) if server.flops_per_s > 0 else profiles.names
    number = dict(zip(names, range(len(names)), strict=True))
    here = np.ones(len(names), dtype=bool)
    here[[number[name] for name in gone if name in number]] = False
    now = np.arange(len(names)) if plan.names == names else np.array([number.get(name, -1) for name in plan.names])
    now = np.where((now >= 0) & here[now], now, -1)
    owner = now[plan.tiling.device]
    missing = plan.tiling.take(np.flatnonzero(owner < 0))
    if not len(missing):
        return Repair(blocks=missing, names=names, recovery_s=0.0, lost_blocks=0, by_mates=0)
    if not here.any():
        raise InfeasibleError("no device is left to take over the lost blocks; wait for one to join")
    unit = unit_costs(profiles, plan.wire, server)
    best = _by_mates(unit, missing, plan.tiling, owner)
    if best[1] > plan.makespan_s * _SOON_ENOUGH:
        best = min(best, _by_helpers(unit, missing, np.flatnonzero(here)), key=lambda way: way[1])
    blocks, recovery_s, by_mates = best
    if not np.isfinite(recovery_s):
        raise InfeasibleError("the lost blocks fit no device that is left; wait for one with more memory to join")
    return Repair(blocks=blocks, names=names, recovery_s=recovery_s, lost_blocks=len(missing), by_mates=by_mates)


_Way = tuple[Tiling, float, int]
"""the blocks, the seconds they take, how many of the lost ones went to mates"""


def _by_mates(unit: UnitCosts, missing: Tiling, before: Tiling, owner: Ints) -> _Way:
    """The mates of each lost block divide its lines among them, so that all finish together.

    A mate holds its strip, so a line (one row of a column, or one column of a row) costs it only that line: received,
    multiplied and returned as a stream, at the pace of the slowest of the three.
    """
    crowd = np.bincount(before.mates)[missing.mates].min()
    if (missing.along == INNER).any() or (crowd < _FEW and len(before) > _MANY):  # the few would be slow: save the time
        return missing, np.inf, 0
    columns = np.unique(missing.mates)
    mending = np.zeros(int(before.mates.max()) + 1, dtype=bool)
    mending[columns] = True
    helps = np.flatnonzero(mending[before.mates] & (owner >= 0))
    helps = helps[np.argsort(before.mates[helps], kind="stable")]
    mates, device = before.take(helps), owner[helps]
    first = np.searchsorted(mates.mates, columns)
    if (np.diff(np.append(first, len(helps))) == 0).any():
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
    lines = trimmed(lines, first, column, needs).astype(np.float64)
    more_s = entries.latency_s + (lines + 1) * line_s  # the rest, line by line, to whoever is done with it first
    lines += rank_within(more_s, column, first) < (needs - np.add.reduceat(lines, first))[column]
    if (lines > rows_that_fit(entries, width, depth)).any():
        return missing, np.inf, 0
    blocks = _cut_at(pieces, length, device, lines)
    rounds_s = np.zeros(int(mates.round.max()) + 1)
    np.maximum.at(rounds_s, mates.round, np.where(lines > 0, entries.latency_s + lines * line_s, 0.0))
    return blocks, float(rounds_s.sum()), len(missing)


def _even_finish(line_s: Floats, latency_s: Floats, column: Ints, first: Ints, needs: Floats) -> Floats:
    """When each column is done if its mates finish together: sum (t - latency) / line = needs, over those in time."""
    taking = np.ones(len(line_s), dtype=bool)
    while True:  # leaving out whoever is not in time brings the others' finish forward, so this only shrinks
        pace = np.add.reduceat(taking / line_s, first)
        times = (needs + np.add.reduceat(taking * latency_s / line_s, first)) / pace
        late = taking & (latency_s >= times[column])
        if not late.any():
            return times
        taking &= ~late


def _cut_at(pieces: Tiling, length: Floats, device: Ints, lines: Floats) -> Tiling:
    """Lay the pieces end to end and cut them where one device's lines end and the next one's begin."""
    piece_ends, device_ends = np.cumsum(length).astype(np.int64), np.cumsum(lines).astype(np.int64)
    ends = np.unique(np.concatenate([piece_ends, device_ends[lines > 0]]))
    starts = np.concatenate([[0], ends[:-1]])
    piece = np.searchsorted(piece_ends, starts, side="right")
    helper = np.searchsorted(device_ends, starts, side="right")
    offset = piece_ends[piece] - length[piece].astype(np.int64)
    return pieces.take(piece).by(device[helper]).narrowed(starts - offset, ends - offset)


def _by_helpers(unit: UnitCosts, missing: Tiling, everyone: Ints) -> _Way:
    """Every lost block becomes a sheet of its own, with helpers in proportion to its size, and is planned afresh."""
    rows, cols, depth = missing.heights, missing.widths, missing.depths
    volume = rows * cols * depth
    side, mean_depth = float(np.sqrt((rows * cols).mean())), float(volume.sum() / (rows * cols).sum())
    few = unit.take(everyone[:: len(everyone) // 256 + 1])
    part = np.full(len(few), side / 4)
    patience_s = float(np.median(finish_s(few, part, part, mean_depth)))  # a time scale to compare helpers at
    strength = area_within(unit.take(everyone), patience_s, side, side, mean_depth)
    count = min(_HELPERS * len(missing), max(len(missing), int((strength > 0).sum())), len(everyone))
    ranked = np.argpartition(-strength, count - 1)[:count]
    ranked = everyone[ranked[np.argsort(-strength[ranked], kind="stable")]]
    if len(ranked) < len(missing):
        return _in_waves(unit, missing, everyone)

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
    whole = settle(unit, layout, sheets, widths, sheet_s, _ROUGH)
    if whole is None:
        return _one_by_one(unit, missing, everyone)
    blocks = from_columns(layout, sheets.frame, *whole[:2], depth.astype(np.int64))
    blocks = replace(blocks, inner=blocks.inner - blocks.inner[:, :1])  # each sheet has an inner range of its own
    return blocks.placed_in(missing, layout.sheet[blocks.mates]), float(whole[2].max()), 0


def _deal(shares: Floats, cards: int) -> Ints:
    """Whose each card is: everyone gets about their share, at least one, strong and weak ones spread evenly."""
    hands = 1 + np.floor(shares / shares.sum() * (cards - len(shares))).astype(np.int64)
    whose = np.repeat(np.arange(len(shares)), hands)
    turn = np.arange(len(whose)) - np.repeat(np.cumsum(hands) - hands, hands)
    dealt = whose[np.argsort((turn + 0.5) / hands[whose], kind="stable")]
    return np.append(dealt, np.full(cards - len(dealt), hands.argmax()))


def _in_waves(unit: UnitCosts, missing: Tiling, everyone: Ints) -> _Way:
    """More lost blocks than helpers: as many at a time as leave two helpers for each, largest first."""
    order = np.argsort(-missing.heights * missing.widths * missing.depths, kind="stable")
    size = max(len(everyone) // 2, 1)
    blocks: list[Tiling] = []
    taken_s, rounds = 0.0, 0
    for start in range(0, len(order), size):
        tiling, wave_s, _ = _by_helpers(unit, missing.take(order[start : start + size]), everyone)
        blocks.append(tiling.shifted(0, 0, rounds))
        taken_s, rounds = taken_s + wave_s, rounds + int(tiling.round.max()) + 1
    return join(blocks), taken_s, 0


def _one_by_one(unit: UnitCosts, missing: Tiling, everyone: Ints) -> _Way:
    """Every lost block as a gemm of its own over all who are left, one after another: slow, but it fits any memory."""
    some = unit.take(everyone)
    plans: dict[Gemm, tuple[Tiling, float] | None] = {}
    blocks: list[Tiling] = []
    taken_s, rounds = 0.0, 0
    for number in range(len(missing)):
        size = missing.take(np.array([number]))
        gemm = Gemm(m=int(size.heights[0]), n=int(size.widths[0]), k=int(size.depths[0]))
        if gemm not in plans:
            plans[gemm] = plan_alone(some, gemm)
        found = plans[gemm]
        if found is None:
            return missing, np.inf, 0
        tiling = found[0].of_devices(everyone).shifted(0, 0, rounds)
        blocks.append(tiling.placed_in(missing, np.full(len(tiling), number)))
        taken_s, rounds = taken_s + found[1], int(tiling.round.max()) + 1
    return join(blocks), taken_s, 0
