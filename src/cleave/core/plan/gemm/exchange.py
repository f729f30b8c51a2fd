"""Local search over groups: move a device to another group, or swap two, where that lets the groups cover more.

Groups are the columns of a sheet, or the sheets of a pile. For a fixed finish each group has an attainable size (a
column's width, a sheet's thickness). A move changes only two groups, and sizes are additive, so thousands of moves are
evaluated at once by the groups they would form, and moves of disjoint groups are applied together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cleave.core.fleet.profiles import Floats, Ints

Sizes = Callable[[Ints, Ints, Ints], Floats]
"""(entries, set of each entry, group that each set would replace) -> attainable size per set; sets ascend."""

_MAX_SWAP_ENTRIES = 30_000
_MAX_SINGLE_MOVES = 11


def propose_exchanges(group: Ints, sizes: Sizes, least_gain: float) -> Ints:
    """Return assignments worth trying, one per row: the best moves together, then each of the best few alone.

    A number beyond the last group opens a new one. Sizes are estimates, so the caller must balance and compare.
    """
    entries, groups = len(group), int(group.max()) + 1
    all_entries = np.arange(entries)
    counts = np.bincount(group)
    slot = _slots(group)
    members = np.full((groups + 1, int(counts.max()) + 1), -1)
    members[group, slot] = all_entries

    moved, target = np.repeat(all_entries, groups + 1), np.tile(np.arange(groups + 1), entries)
    # In large groups, swapping two devices changes next to nothing.
    with_swaps = entries * entries * (entries / groups) <= _MAX_SWAP_ENTRIES
    swappable = all_entries if with_swaps else all_entries[:0]
    first, second = np.repeat(swappable, entries), np.tile(swappable, entries)
    without = members[group]
    without[all_entries, slot] = -1
    joined = members[target]
    joined[:, -1] = moved
    swapped = members[group[first]]
    swapped[np.arange(len(first)), slot[first]] = second
    size = _sizes(
        np.concatenate([members, without, joined, swapped]),
        np.concatenate([np.arange(groups + 1), group, target, group[first]]),
        sizes,
    )
    current, left, grown, exchanged = np.split(size, np.cumsum([groups + 1, entries, len(moved)]))
    back = exchanged.reshape(entries, -1).T.ravel() if with_swaps else exchanged
    move_gain = left[moved] + grown - current[group[moved]] - current[target]
    swap_gain = exchanged + back - current[group[first]] - current[group[second]]
    move_gain[target == group[moved]] = -np.inf
    swap_gain[group[first] == group[second]] = -np.inf
    return _apply_moves(
        group,
        np.concatenate([move_gain, swap_gain]),
        np.concatenate([moved, first]),
        np.concatenate([np.full(len(moved), -1), second]),
        np.concatenate([target, group[second]]),
        least_gain,
    )


def _apply_moves(group: Ints, gains: Floats, first: Ints, second: Ints, target: Ints, least_gain: float) -> Ints:
    """Apply moves, best first, together as long as no group is touched twice; `second`, unless -1, moves back."""
    best = np.argsort(-gains)[: 4 * len(group)]
    best = best[gains[best] > least_gain]
    rows = [group.copy()]
    touched: set[int] = set()
    for k in best:
        home, away = int(group[first[k]]), int(target[k])
        is_disjoint = not touched & {home, away}
        alone = [group.copy()] if len(rows) <= _MAX_SINGLE_MOVES else []
        for row in [*alone, *(rows[:1] if is_disjoint else [])]:
            row[first[k]] = away
            if second[k] >= 0:
                row[second[k]] = home
        rows += alone
        touched |= {home, away} if is_disjoint else set()
    return np.stack(rows)


def _sizes(members: Ints, like: Ints, sizes: Sizes) -> Floats:
    """Size of each row of `members`, where -1 is no device; 0 for an empty row."""
    filled = np.flatnonzero((members >= 0).any(axis=1))
    which, slot = np.nonzero(members[filled] >= 0)
    found = np.zeros(len(members))
    found[filled] = sizes(members[filled][which, slot], which, like[filled])
    return found


def _slots(group: Ints) -> Ints:
    """Position of each entry within its group."""
    order = np.argsort(group, kind="stable")
    position = np.empty(len(group), dtype=np.int64)
    starts = np.cumsum(np.bincount(group)) - np.bincount(group)
    position[order] = np.arange(len(group)) - starts[group[order]]
    return position
