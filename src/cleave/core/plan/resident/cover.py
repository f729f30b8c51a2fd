"""Columns for many devices: the shortest prefix of a sorted fleet that covers all sublayers within given times.

Given seconds for activations and for synchronization, each device has a maximum number of rows for each kind of column.
Devices are sorted by the largest rows x weights they can take; then f[p] is the fewest of them, from the front, that
carry sublayers 0..p, the last column being k whole sublayers or one sublayer in c slices. `search` chooses the times,
the chunk and the devices; the actual time of a cover is computed from its rows, not from the times requested.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from cleave.core.cost.rates import Server
from cleave.core.cost.resident import ShardCosts, SublayerSums, compute_s_per_row, shard_costs
from cleave.core.fleet.profiles import Bools, Floats, Ints, Profiles
from cleave.core.plan.resident.pace import most_kept
from cleave.core.plan.resident.stages import ColumnLimit

SLICES = (2, 3, 4, 6, 8, 10, 16, 20, 32, 40)
_COUNTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160)
_BUCKETS = 6
"""Later columns have more time to synchronize, in this many levels."""
_PREFERENCE = 1.001
_Run = tuple[int, int, int]
"""First sublayer, count, slices."""
_USABLE = 0.9
"""Usable share of the time that late columns are idle while the pipeline fills and drains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """The parameters of a cover: enough to repeat the search when the fleet has changed a little."""

    chunk: int = 64
    sync_share: float = 0.5
    """share of the step, without fill, for weights and gradients"""
    least_count: int = 0
    """minimum number of sublayers per column; 0 also allows slices"""
    selected: float = 1.0
    """share of the fleet to use, most capable devices first"""
    order: Literal["work", "weights"] = "work"
    """sort devices by rows x weights, or by the weights that suit them best"""
    slack_s: float = 0.0
    """extra time for the last columns to synchronize, as they start after the first ones and finish before them"""
    kept_sequences: int = 0
    """devices keep the activations of open sequences for backward if they have room for so many; 0: none keeps any"""


class Group(NamedTuple):
    """Indices of the devices that share the rows of a shard."""

    devices: Ints
    rows: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageCover:
    """Sublayers [first, first + count) with one group of devices, or one group per slice."""

    first: int
    count: int
    kind: int
    groups: tuple[Group, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cover:
    stages: tuple[StageCover, ...]
    activation_s: float
    synchronisation_s: float
    """beyond what late columns do while the pipeline fills and drains"""
    fill_s: float
    down_bytes: float
    up_bytes: float
    limit: ColumnLimit
    keeps: Ints
    """[kind, device]: index into KEEPINGS"""

    @property
    def seconds(self) -> float:
        return self.activation_s + self.synchronisation_s + self.fill_s


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Everything about a fleet and a stack of sublayers that does not depend on the requested times."""

    sums: SublayerSums
    profiles: Profiles
    rows: int
    chunk: int
    of: ShardCosts
    """one entry per kind of column"""
    whole: tuple[tuple[tuple[int, int], ...], ...]
    """per sublayer: (count, kind) of the columns that may start there"""
    sliced: tuple[tuple[tuple[int, int], ...], ...]
    """per sublayer: (slices, kind)"""
    row_s: Floats
    """[kind, device]: seconds per row whose x is kept"""
    down_s: Floats
    """[kind, device]: seconds of downloads per row if x is sent twice"""
    gained_s: Floats
    """[kind, device]: seconds saved by keeping as many x as fit"""
    fits: Bools
    sync_s: Floats
    """[device]: seconds per trained number"""
    compute_s: Floats
    """[kind, device]: seconds of compute per row"""
    times: int
    """how often weights are sent per step"""
    kept_sequences: int
    """as in the recipe"""
    slots: Floats
    """[kind, device]: sequences that a device can have open at once, with the activations it keeps of them, if any"""
    keeps: Ints
    """[kind, device]: index into KEEPINGS"""

    def kind(self, first: int, count: int, slices: int) -> int:
        """Kind of one of the columns a cover may use."""
        options = self.whole[first] if slices == 1 else self.sliced[first]
        return next(kind for size, kind in options if size == (count if slices == 1 else slices))


def make_table(
    profiles: Profiles,
    sums: SublayerSums,
    rows: int,
    chunk: int,
    *,
    is_held: bool,
    kept_sequences: int = 0,
    only: Collection[tuple[int, int, int]] | None = None,
) -> Table:
    """With `is_held`, weights stay on devices from forward to backward; otherwise they and every x are sent twice.

    `kept_sequences` is as in a recipe; of weights that do not stay, nothing is kept. `only` limits the table to columns
    of these first sublayers, counts and slices, where those are known.
    """
    length = len(sums)
    counts = sorted({count for count in (*_COUNTS, length) if count <= length} | {count for _, count, _ in only or ()})
    lengths = [
        [
            (first, count, 1)
            for count in counts
            if first + count <= length and (only is None or (first, count, 1) in only)
        ]
        for first in range(length)
    ]
    parts = [
        [
            (first, 1, slices)
            for slices in (SLICES if only is None else sorted({slices for _, _, slices in only if slices > 1}))
            if sums.sublayers[first].allows(slices) and (only is None or (first, 1, slices) in only)
        ]
        for first in range(length)
    ]
    runs, kinds = _kinds(sums, [run for of_one in (*lengths, *parts) for run in of_one])
    whole = tuple(tuple((run[1], kinds[run]) for run in of_one) for of_one in lengths)
    sliced = tuple(tuple((run[2], kinds[run]) for run in of_one) for of_one in parts)
    first, count, slices = np.array(runs, dtype=np.int64).T
    of = shard_costs(sums, first, count, slices, chunk=chunk)
    down, up = profiles.down_bytes_per_s, profiles.up_bytes_per_s
    free = profiles.memory_bytes - of.memory_bytes[:, None]
    kept_sequences = min(kept_sequences, rows // sums.sequence) if is_held and sums.is_trained else 0
    keeps, slots = _keeps(of, free, kept_sequences, sums.sequence)
    # a device keeps x where it keeps anything, else as many as fit
    kept = np.where(keeps > 0, rows, np.maximum(free, 0.0) / of.kept_bytes_per_row[:, None]) if is_held else 0.0
    compute_s = compute_s_per_row(of, profiles, chunk, sums.terms, keeps)
    row_s = np.maximum(of.up_bytes_per_row[:, None] / up, compute_s)
    times = 1 if is_held else 2
    return Table(
        sums=sums,
        profiles=profiles,
        rows=rows,
        chunk=chunk,
        of=of,
        whole=whole,
        sliced=sliced,
        row_s=np.maximum(row_s, of.down_bytes_per_row[:, None] / down),
        down_s=(of.down_bytes_per_row + of.again_bytes_per_row)[:, None] / down,
        gained_s=kept * of.again_bytes_per_row[:, None] / down,
        fits=free >= 0,
        sync_s=sums.terms.gradient_bytes / up + times * sums.terms.weight_bytes / down,  # before rows, and after them
        compute_s=compute_s,
        times=times,
        kept_sequences=kept_sequences,
        slots=slots,
        keeps=keeps,
    )


def _kinds(sums: SublayerSums, runs: list[_Run]) -> tuple[list[_Run], dict[_Run, int]]:
    """The first run of each kind, and the kind of each run: those of one kind cost the same, as layers repeat."""
    first, count, slices = np.array(runs, dtype=np.int64).T
    traits: list[list[float]] = np.vstack([sums.traits(first, count), slices]).T.tolist()
    numbers: dict[tuple[float, ...], int] = {}
    kinds = {
        run: numbers.setdefault(tuple(its_traits), len(numbers)) for run, its_traits in zip(runs, traits, strict=True)
    }
    firsts: dict[int, _Run] = {}
    for run, kind in kinds.items():
        firsts.setdefault(kind, run)
    return list(firsts.values()), kinds


def _keeps(of: ShardCosts, free: Floats, sequences: int, sequence: int) -> tuple[Ints, Floats]:
    """[kind, device]: what devices keep if they can do so for that many sequences, and for how many they can."""
    states = of.state_bytes[:, None]
    bare = 1 + np.floor(free / np.maximum(states, 1.0))
    if not sequences:
        return np.zeros(free.shape, dtype=np.int64), bare
    x_bytes = sequence * of.kept_bytes_per_row[:, None]
    each = np.full((len(of), 1), float(sequences))
    keeps, kept_bytes = most_kept(of, free, each, (sequences - 1) * states + sequences * x_bytes)
    slots = np.floor((free + states) / (states + x_bytes + kept_bytes / sequences))
    return keeps, np.where(keeps > 0, slots, bare)


def cover(table: Table, recipe: Recipe, seconds: float) -> tuple[StageCover, ...] | None:
    """The columns that need the fewest devices to finish in `seconds` (without fill); None if the fleet cannot."""
    activation_s, sync_s = seconds * (1 - recipe.sync_share), seconds * recipe.sync_share
    rows = _most_rows(table, activation_s)
    order = _sorted(table, recipe, rows, sync_s)
    if len(order) == 0:
        return None
    sums = _row_sums(table, recipe, rows[:, order], order, sync_s)
    goal = table.rows * (1 - 1e-9)

    def reach(kind: int, used: int, sublayer: int) -> int:
        """How many devices are used once another column of that kind is covered."""
        if used > most:
            return used
        found = sums(kind, sublayer)
        return int(found.searchsorted(float(found[used]) + goal))

    length, most = len(table.sums), len(order)
    nobody = most + 1
    needed, choice = [0] + [nobody] * length, [(0, 0, 0)] * (length + 1)
    for first in range(length):
        used = needed[first]
        if used >= nobody:
            continue
        for count, kind in table.whole[first]:
            until = first + count
            if count < recipe.least_count and until < length:
                continue
            if needed[until] <= used + 1:  # a column takes one more device at least
                continue
            after = reach(kind, used, first)
            if after < needed[until]:
                needed[until], choice[until] = after, (first, kind, 1)
        if recipe.least_count:
            continue
        for slices, kind in table.sliced[first]:
            after = used
            for left in range(slices, 0, -1):
                if after + left >= needed[first + 1]:  # each slice takes one more device at least
                    break
                after = reach(kind, after, first)
            else:
                if after < needed[first + 1]:
                    needed[first + 1], choice[first + 1] = after, (first, kind, slices)
    if needed[length] >= nobody:
        return None
    return _traced(table, order, choice, needed, sums, reach)


def _most_rows(table: Table, activation_s: float) -> Floats:
    rows = np.minimum(activation_s / table.row_s, (activation_s + table.gained_s) / table.down_s)
    whole = table.of.takes_sequences
    sequence = table.sums.sequence
    rows[whole] = np.floor(rows[whole] / sequence + 1e-6) * sequence
    return np.where(table.fits, np.minimum(rows, table.rows), 0.0)


def _sorted(table: Table, recipe: Recipe, rows: Floats, sync_s: float) -> Ints:
    timely = np.multiply.outer(table.of.trained, table.sync_s) <= sync_s
    work = np.where(timely, rows, 0.0) * table.of.params[:, None]
    most = work.max(axis=0)
    usable = np.flatnonzero(most > 0)
    by_work = usable[np.argsort(-most[usable], kind="stable")][: max(round(recipe.selected * len(most)), 1)]
    if recipe.order == "work":
        return by_work
    best = np.argmax(work * _PREFERENCE > most, axis=0)
    weights = table.of.params[best] * (1 + 1e-3 * most / max(float(most.max()), 1e-300))
    return by_work[np.argsort(-weights[by_work], kind="stable")]


def _row_sums(table: Table, recipe: Recipe, rows: Floats, order: Ints, sync_s: float) -> Callable[[int, int], Floats]:
    """(kind, sublayer) -> rows that the first 0, 1, 2, ... devices can take in a column of that kind there."""
    length, number_s = len(table.sums), table.sync_s[order]
    buckets = [_BUCKETS * sublayer // length for sublayer in range(length)]
    sums: list[dict[int, Floats]] = [{} for _ in range(_BUCKETS)]

    def found(kind: int, sublayer: int) -> Floats:
        bucket = buckets[sublayer] if recipe.slack_s else 0
        known = sums[bucket].get(kind)
        if known is None:
            within_s = sync_s + recipe.slack_s * bucket / _BUCKETS
            known = np.zeros(rows.shape[1] + 1)
            np.where(number_s * table.of.trained[kind] <= within_s, rows[kind], 0.0).cumsum(out=known[1:])
            sums[bucket][kind] = known
        return known

    return found


def _traced(
    table: Table,
    order: Ints,
    choice: list[tuple[int, int, int]],
    needed: list[int],
    sums: Callable[[int, int], Floats],
    reach: Callable[[int, int, int], int],
) -> tuple[StageCover, ...]:
    stages: list[StageCover] = []
    until = len(table.sums)
    while until > 0:
        first, kind, slices = choice[until]
        used = needed[first]
        groups: list[Group] = []
        for _ in range(slices):
            after = reach(kind, used, first)
            taken = _trimmed(table, kind, np.diff(sums(kind, first)[used : after + 1]))
            groups.append(Group(order[used:after][taken > 0], taken[taken > 0]))
            used = after
        stages.append(StageCover(first=first, count=until - first, kind=kind, groups=tuple(groups)))
        until = first
    return tuple(reversed(stages))


def _trimmed(table: Table, kind: int, most: Floats) -> Floats:
    """Trim rows to the exact total, each device giving up its share of the surplus; whole sequences where required."""
    rows = most * (table.rows / most.sum())
    if not table.of.takes_sequences[kind]:
        return rows
    sequence = table.sums.sequence
    pieces = np.floor(rows / sequence + 1e-9)
    left = round(table.rows / sequence - pieces.sum())
    pieces[np.argsort(pieces - rows / sequence, kind="stable")[:left]] += 1
    return pieces * sequence


def share_by_pace(table: Table, kind: int, devices: Ints, pace: Floats) -> Group:
    """Divide a column's rows among devices in proportion to their pace, in whole sequences where required.

    Those that are left without any are no part of the group.
    """
    rows = _trimmed(table, kind, pace)
    return Group(devices[rows > 0], rows[rows > 0])


def weigh(table: Table, stages: tuple[StageCover, ...], server: Server) -> Cover:
    """The actual time of these columns: the busiest device, the fill, and what synchronization adds."""
    of, profiles, sequence = table.of, table.profiles, table.sums.sequence
    groups = [group for stage in stages for group in stage.groups]
    devices, rows = np.concatenate([one.devices for one in groups]), np.concatenate([one.rows for one in groups])
    slices, sizes = np.array([len(one.groups) for one in stages]), np.array([len(one.rows) for one in groups])
    stage_starts, group_starts = slices.cumsum() - slices, sizes.cumsum() - sizes
    stage_kind = np.array([one.kind for one in stages])
    group_kind = np.repeat(stage_kind, slices)
    kind = np.repeat(group_kind, sizes)
    latency_s, down_rate, up_rate = (
        rates[devices] for rates in (profiles.latency_s, profiles.down_bytes_per_s, profiles.up_bytes_per_s)
    )
    compute_s, gained_s = table.compute_s[kind, devices], table.gained_s[kind, devices]

    busy_s = np.maximum(table.row_s[kind, devices] * rows, table.down_s[kind, devices] * rows - gained_s)
    link_s = 2 * table.sums.hidden * table.sums.terms.activation_bytes * (1 / down_rate + 1 / up_rate)
    chunk_s = table.chunk * (link_s + compute_s) + 2 * latency_s
    hops_s = np.maximum.reduceat(np.add.reduceat(chunk_s * rows, group_starts), stage_starts) / table.rows
    open_sequences = np.minimum(table.slots[kind, devices], rows / sequence)
    at_once = min(float(np.add.reduceat(open_sequences, group_starts).min()), float(table.rows))
    number_s = np.maximum.reduceat(table.sync_s[devices], group_starts[stage_starts])
    fill_s, activation_s = float(hops_s.sum()), float(busy_s.max())
    idle_s = _USABLE * (hops_s.cumsum() - hops_s)
    sync_s = max(float((number_s * of.trained[stage_kind] - idle_s).max()), 0.0)

    again_bytes = of.again_bytes_per_row[kind]
    again = float((np.maximum(rows - gained_s * down_rate / again_bytes, 0.0) * again_bytes).sum())
    down = float(of.down_bytes_per_row[group_kind].sum()) * table.rows + again
    up = float(of.up_bytes_per_row[group_kind].sum()) * table.rows
    sync_down = table.times * float(of.sync_down_bytes[group_kind] @ sizes)
    sync_up = float(of.sync_up_bytes[group_kind] @ sizes)
    spent_s: dict[ColumnLimit, float] = {
        "up": float(rows @ (of.up_bytes_per_row[kind] / up_rate)),
        "down": float(rows @ (of.down_bytes_per_row[kind] / down_rate)),
        "compute": float(rows @ compute_s),
    }
    flowing_s = max(down / server.down_bytes_per_s, up / server.up_bytes_per_s) - fill_s
    journey_s = fill_s + (-(-sequence // table.chunk) - 1) * float(hops_s.max())
    in_turn_s = journey_s * table.rows / sequence / at_once - fill_s
    renewing_s = max(sync_down / server.down_bytes_per_s, sync_up / server.up_bytes_per_s)
    limit: ColumnLimit = max(spent_s, key=lambda name: spent_s[name])
    if fill_s > activation_s + sync_s:
        limit = "latency"
    if in_turn_s > max(activation_s, flowing_s):
        limit = "memory"
    return Cover(
        stages=stages,
        activation_s=max(activation_s, flowing_s, in_turn_s),
        synchronisation_s=max(sync_s, renewing_s),
        fill_s=fill_s,
        down_bytes=down + sync_down,
        up_bytes=up + sync_up,
        limit="server" if flowing_s > max(activation_s, in_turn_s) or renewing_s > sync_s else limit,
        keeps=table.keeps,
    )
