"""Stages on groups of devices: the dynamic programme that Alpa and Asteroid have in common.

Devices are sorted and cut into units; a stage takes consecutive units and consecutive items: the token table, the
layers, the head. So an end of the model may have a stage to itself. A table says for every stage what a micro-batch
spends in it (`path_s`) and how long until the next one can enter (`pace_s`). With B micro-batches a batch takes

    T = sum of path_s + (B - 1) max pace_s

Alpa enumerates the largest pace and finds the shortest path within it (alpa/pipeline_parallel/stage_construction.py);
here the next limit is 3 % below the pace just found, or what the best so far leaves to it, until no stages meet it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal

import numpy as np

from cleave.core.fleet.profiles import Floats, Ints
from cleave.core.plan.rivals.case import Case
from cleave.core.plan.rivals.reduction import byte_s

Ends = Literal["neither", "table", "head", "both"]
"""What a stage has of the model's ends."""
EVERY_END: tuple[Ends, ...] = ("neither", "table", "head", "both")
_TIGHTER = 0.97


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Seconds of a micro-batch by items (one, two, ...), first unit, and number of units as in `sizes`."""

    path_s: Floats
    pace_s: Floats
    """infinite where a stage does not fit"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    items: int
    unit: int
    units: int
    ends: Ends

    @property
    def layers(self) -> int:
        """All but the ends."""
        return self.items - 2 + neighbors(self.ends)


@dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    stages: tuple[Stage, ...]
    step_s: float
    path_s: float
    pace_s: float


def orders(case: Case) -> tuple[Ints, Ints]:
    """Devices by speed, and by the pace of a layer with its links."""
    forward_s, backward_s = case.compute_s(case.layer, case.sequence, recompute=False)
    link_s = case.sequence * case.row_bytes * byte_s(case.profiles)
    pace_s = np.maximum(forward_s, link_s) + np.maximum(backward_s, link_s)
    return np.argsort(forward_s, kind="stable"), np.argsort(pace_s, kind="stable")


def neighbors(ends: Ends) -> int:
    """Stages beside one with these ends."""
    return {"neither": 2, "table": 1, "head": 1, "both": 0}[ends]


def search(
    tables: Mapping[Ends, Table], sizes: Ints, items: int, batches: float, below_s: float = inf
) -> Partition | None:
    """The fastest partition found; None if none fits, or none could be faster than `below_s`."""
    best: Partition | None = None
    limit_s = below_s / max(batches - 1, 1)
    while True:
        found = _shortest(tables, sizes, items, limit_s, batches)
        if found is None:
            return best
        if best is None or found.step_s < best.step_s:
            best = found
        to_beat_s = min(best.step_s, below_s)
        if batches <= 1 or found.path_s >= to_beat_s:
            return best
        # with a tighter limit the path gets no shorter
        limit_s = min(found.pace_s * _TIGHTER, (to_beat_s - found.path_s) / (batches - 1))


def runs(values: Floats, sizes: Ints, combine: Callable[[Floats, Floats], Floats], none: float) -> Floats:
    """[..., unit, size]: values of so many consecutive units combined; `none` beyond the last unit."""
    units = values.shape[-1]
    total = np.full((*values.shape, len(sizes)), none)
    running = values.copy()
    covered = 1
    for place, size in enumerate(sizes.tolist()):
        while covered < min(size, units):
            running[..., : units - covered] = combine(running[..., : units - covered], values[..., covered:])
            covered += 1
        if size <= units:
            total[..., : units - size + 1, place] = running[..., : units - size + 1]
    return total


def _shortest(
    tables: Mapping[Ends, Table], sizes: Ints, items: int, limit_s: float, batches: float
) -> Partition | None:
    """The shortest path through stages that keep within the limit."""
    units = tables["neither"].path_s.shape[1]
    within: dict[Ends, Floats] = {ends: _within(table, limit_s) for ends, table in tables.items()}
    # [items done, unit]: the shortest way through the others, with this unit or later ones
    length = np.full((items + 1, units + int(sizes.max())), inf)
    length[items] = 0.0
    longest = max(1, *(paths.shape[1] for paths in within.values()))
    for done in range(items - 1, -1, -1):
        shortest = np.full(units, inf)
        inner, last = within["neither" if done else "table"], within["head" if done else "both"]
        count = min(inner.shape[1], items - done - 1)
        for place, size in enumerate(sizes.tolist()):
            if items - done <= last.shape[1]:
                np.minimum(shortest, last[place, items - done - 1], out=shortest)
            if count > 0:
                ways = inner[place, :count] + length[done + 1 : done + count + 1, size : size + units]
                np.minimum(shortest, ways.min(axis=0), out=shortest)
        # units may stay idle: whoever starts later may also start here
        length[done, :units] = np.minimum.accumulate(shortest[::-1])[::-1]
        if np.isinf(length[done : done + longest, 0]).all():  # no stage reaches further
            return None
    if length[0, 0] == inf:
        return None
    stages = _traced(within, sizes, items, length)
    costs = [_at(tables, sizes, stage) for stage in stages]
    path_s, pace_s = sum(cost.path_s for cost in costs), max(cost.pace_s for cost in costs)
    return Partition(stages=stages, step_s=path_s + max(batches - 1, 0.0) * pace_s, path_s=path_s, pace_s=pace_s)


def _within(table: Table, limit_s: float) -> Floats:
    """[size, items, unit]: paths of the stages within the limit, up to the most items that any of them has."""
    path_s = np.where(table.pace_s <= limit_s, table.path_s, inf)
    most = np.flatnonzero(np.isfinite(path_s).any(axis=(1, 2)))
    return np.ascontiguousarray(path_s[: most[-1] + 1 if len(most) else 0].transpose(2, 0, 1))


def _traced(within: Mapping[Ends, Floats], sizes: Ints, items: int, length: Floats) -> tuple[Stage, ...]:
    """The stages of the shortest path."""
    stages: list[Stage] = []
    done = unit = 0
    while done < items:
        inner, last = within["neither" if done else "table"], within["head" if done else "both"]
        count = min(inner.shape[1], items - done - 1)
        ways = np.full((items - done, len(sizes)), inf)
        ways[:count] = (inner[:, :count, unit] + length[done + 1 : done + count + 1, unit + sizes].T).T
        if items - done <= last.shape[1]:
            ways[-1] = last[:, items - done - 1, unit]
        number, place = divmod(int(ways.argmin()), len(sizes))
        if ways[number, place] > length[done, unit]:  # idle
            unit += 1
            continue
        size = int(sizes[place])
        stages.append(Stage(items=number + 1, unit=unit, units=size, ends=_ends(done, number + 1, items)))
        done, unit = done + number + 1, unit + size
    return tuple(stages)


@dataclass(frozen=True, slots=True)
class _Cost:
    path_s: float
    pace_s: float


def _at(tables: Mapping[Ends, Table], sizes: Ints, stage: Stage) -> _Cost:
    place = int(np.flatnonzero(sizes == stage.units)[0])
    table, where = tables[stage.ends], (stage.items - 1, stage.unit, place)
    return _Cost(float(table.path_s[where]), float(table.pace_s[where]))


def _ends(done: int, count: int, items: int) -> Ends:
    if done == 0:
        return "both" if count == items else "table"
    return "head" if done + count == items else "neither"
