"""Stages on groups of devices: the dynamic programme that Alpa and Asteroid have in common.

Devices are sorted and cut into units; a stage takes consecutive units and consecutive layers. A table says for every
stage what a micro-batch spends in it (`path_s`) and how long until the next one can enter (`pace_s`). With B
micro-batches a batch takes

    T = sum of path_s + (B - 1) max pace_s

Alpa enumerates the largest pace and finds the shortest path within it (alpa/pipeline_parallel/stage_construction.py);
here the next limit is always a tenth below the pace just found, until no stages meet it or none could be faster.
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
_TIGHTER = 0.9


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Table:
    """Seconds of a micro-batch by layers (one, two, ...), first unit, and number of units as in `sizes`."""

    path_s: Floats
    pace_s: Floats
    """infinite where a stage does not fit"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    layers: int
    unit: int
    units: int
    ends: Ends


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
    tables: Mapping[Ends, Table], sizes: Ints, layers: int, batches: float, below_s: float = inf
) -> Partition | None:
    """The fastest partition found; None if none fits, or none could be faster than `below_s`."""
    best: Partition | None = None
    limit_s = inf
    while True:
        found = _shortest(tables, sizes, layers, limit_s, batches)
        if found is None:
            return best
        if best is None or found.step_s < best.step_s:
            best = found
        if batches <= 1 or found.path_s >= min(best.step_s, below_s):
            return best
        limit_s = found.pace_s * _TIGHTER


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
    tables: Mapping[Ends, Table], sizes: Ints, layers: int, limit_s: float, batches: float
) -> Partition | None:
    """The shortest path through stages that keep within the limit."""
    most, units, _ = tables["neither"].path_s.shape
    within = {ends: np.where(table.pace_s <= limit_s, table.path_s, inf) for ends, table in tables.items()}
    length = np.full((layers + 1, units + int(sizes.max()) + 1), inf)
    length[layers] = 0.0
    choice = np.zeros((layers, units, 2), dtype=np.int64)
    after = np.add.outer(np.arange(units, dtype=np.int64), sizes)
    for done in range(layers - 1, -1, -1):
        for count in range(1, min(most, layers - done) + 1):
            ways = within[_ends(done, count, layers)][count - 1] + length[done + count][after]
            place = ways.argmin(axis=1)
            shortest = ways[np.arange(units), place]
            better = shortest < length[done, :units]
            length[done, :units][better] = shortest[better]
            choice[done][better] = np.stack([np.full(units, count), place], axis=1)[better]
        if done == 0:
            break
        # units may stay idle: whoever starts later may also start here
        for unit in range(units - 2, -1, -1):
            if length[done, unit + 1] < length[done, unit]:
                length[done, unit] = length[done, unit + 1]
                choice[done, unit] = (0, 0)
    unit = int(length[0, :units].argmin())
    if length[0, unit] == inf:
        return None
    stages: list[Stage] = []
    done = 0
    while done < layers:
        count, place = (int(number) for number in choice[done, unit])
        if count == 0:
            unit += 1
            continue
        stages.append(Stage(layers=count, unit=unit, units=int(sizes[place]), ends=_ends(done, count, layers)))
        done, unit = done + count, unit + int(sizes[place])
    paces = [_at(tables, sizes, stage).pace_s for stage in stages]
    path_s, pace_s = sum(_at(tables, sizes, stage).path_s for stage in stages), max(paces)
    return Partition(stages=tuple(stages), step_s=path_s + max(batches - 1, 0.0) * pace_s, path_s=path_s, pace_s=pace_s)


@dataclass(frozen=True, slots=True)
class _Cost:
    path_s: float
    pace_s: float


def _at(tables: Mapping[Ends, Table], sizes: Ints, stage: Stage) -> _Cost:
    place = int(np.flatnonzero(sizes == stage.units)[0])
    table, where = tables[stage.ends], (stage.layers - 1, stage.unit, place)
    return _Cost(float(table.path_s[where]), float(table.pace_s[where]))


def _ends(done: int, count: int, layers: int) -> Ends:
    if done == 0:
        return "both" if count == layers else "table"
    return "head" if done + count == layers else "neither"
