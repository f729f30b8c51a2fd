"""Local search over groups: move a device into another group, or swap two, where that lets the groups cover more.

Groups are the columns of a sheet, or the sheets of a pile. At a fixed moment each can be of a certain size (a column's
width, a sheet's thickness), a move changes only two of them, and sizes add up: so thousands of moves are judged at
once by the groups they would make, and those that touch different groups are made together.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cleave.core.fleet.profiles import Floats, Ints

Sizes = Callable[[Ints, Ints, Ints], Floats]
"""(entries, set of each entry, the group each set would replace) -> the possible size of each set; sets ascend"""

_MOST_ENTRIES = 30_000
_ALONE = 11


def improved(group: Ints, sizes: Sizes, least_gain: float) -> Ints:
    """Assignments worth trying, a row each: the best moves made together, then each of the best few alone.

    A number beyond the last group opens a new one. Sizes are estimates: what is tried is to be balanced and compared.
    """
    entries, groups = len(group), int(group.max()) + 1
    everyone = np.arange(entries)
    crowd = np.bincount(group)
    slot = _slots(group)
    members = np.full((groups + 1, int(crowd.max()) + 1), -1)
    members[group, slot] = everyone

    moved, target = np.repeat(everyone, groups + 1), np.tile(np.arange(groups + 1), entries)
    few = entries * entries * (entries / groups) <= _MOST_ENTRIES  # else swapping two of many changes next to nothing
    one, two = (np.repeat(everyone, entries), np.tile(everyone, entries)) if few else (everyone[:0], everyone[:0])
    without = members[group]
    without[everyone, slot] = -1
    joined = members[target]
    joined[:, -1] = moved
    swapped = members[group[one]]
    swapped[np.arange(len(one)), slot[one]] = two
    size = _sizes(
        np.concatenate([members, without, joined, swapped]),
        np.concatenate([np.arange(groups + 1), group, target, group[one]]),
        sizes,
    )
    now, left, grown, exchanged = np.split(size, np.cumsum([groups + 1, entries, len(moved)]))
    back = exchanged.reshape(entries, -1).T.ravel() if few else exchanged
    move_gain = left[moved] + grown - now[group[moved]] - now[target]
    swap_gain = exchanged + back - now[group[one]] - now[group[two]]
    move_gain[target == group[moved]] = -np.inf
    swap_gain[group[one] == group[two]] = -np.inf
    return _made(
        group,
        np.concatenate([move_gain, swap_gain]),
        np.concatenate([moved, one]),
        np.concatenate([np.full(len(moved), -1), two]),
        np.concatenate([target, group[two]]),
        least_gain,
    )


def _made(group: Ints, gains: Floats, one: Ints, two: Ints, target: Ints, least_gain: float) -> Ints:
    """Moves best first, together as far as no group is touched twice; `two` goes the other way, if it is not -1."""
    best = np.argsort(-gains)[: 4 * len(group)]
    best = best[gains[best] > least_gain]
    rows = [group.copy()]
    touched: set[int] = set()
    for k in best:
        home, away = int(group[one[k]]), int(target[k])
        apart = not touched & {home, away}
        alone = [group.copy()] if len(rows) <= _ALONE else []
        for row in [*alone, *(rows[:1] if apart else [])]:
            row[one[k]] = away
            if two[k] >= 0:
                row[two[k]] = home
        rows += alone
        touched |= {home, away} if apart else set()
    return np.stack(rows)


def _sizes(members: Ints, like: Ints, sizes: Sizes) -> Floats:
    """The size of each row of `members` (-1: nobody); an empty one has none."""
    filled = np.flatnonzero((members >= 0).any(axis=1))
    which, slot = np.nonzero(members[filled] >= 0)
    found = np.zeros(len(members))
    found[filled] = sizes(members[filled][which, slot], which, like[filled])
    return found


def _slots(group: Ints) -> Ints:
    """The place of each entry among those of its group."""
    order = np.argsort(group, kind="stable")
    place = np.empty(len(group), dtype=np.int64)
    first = np.cumsum(np.bincount(group)) - np.bincount(group)
    place[order] = np.arange(len(group)) - first[group[order]]
    return place
