"""Arrangements of few devices that are best by the formula: whose busiest column finishes first.

Along a few natural orders of the devices, a dynamic program finds the best cut of the sublayers for every number of
stages and devices, strongest first or last; for a handful of devices another one does so for every set of them, in any
order. A column of one device may be leased, one of several shares the rows, and a single sublayer may be sliced.
`small_fleet` judges what is found here as a whole, with fill, server and medium.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf

import numpy as np

from cleave.core.cost.resident import shard_costs
from cleave.core.fleet.profiles import Bools, Floats, Ints, Profiles
from cleave.core.plan.resident.pace import paces, share_rows
from cleave.core.plan.resident.problem import Problem
from cleave.core.plan.resident.stages import Draft

_STEPS_PER_E = 4  # rates within about a quarter count as equal when devices are sorted
_FEW = 6  # up to this many devices, all groups of them in all orders are tried

Arrangements = list[tuple[float, Callable[[], list[Draft]]]]
"""Arrangements that are made on demand, with the time of the busiest column, shortest first."""


def arrangements(problem: Problem, chunk: int, *, in_any_order: bool) -> Iterator[Arrangements]:
    """Arrangements along a few orders and, for a handful of devices if asked for, in any order."""
    for order in _orders(problem.profiles):
        yield _along(problem, order, chunk)
    if in_any_order and len(problem.profiles) <= _FEW:
        yield _all_groups(problem, chunk)


def _orders(profiles: Profiles) -> list[Ints]:
    """Orders, strongest first: by compute x uplink, and by memory; ties keep order."""
    keys = profiles.flops_per_s * profiles.up_bytes_per_s, profiles.memory_bytes
    orders = [np.argsort(-np.round(np.log(key) * _STEPS_PER_E), kind="stable") for key in keys]
    return [np.array(order) for order in dict.fromkeys(tuple(order.tolist()) for order in orders)]


def _all_groups(problem: Problem, chunk: int) -> Arrangements:
    """The best cut for every number of stages and every set of devices, in any order.

    f[g, A, p] = min over groups G of A and cuts q of max(f[g-1, A - G, q], seconds of G with sublayers q..p). Sets are
    bits of a number.
    """
    order: list[int] = _orders(problem.profiles)[0].tolist()
    groups = [
        tuple(order[place] for place in range(len(order)) if bits >> place & 1) for bits in range(1 << len(order))
    ]
    seconds, slices = _column_seconds(problem, groups[1:], chunk)
    cuts = seconds.shape[-1]
    reached = np.full((len(groups), cuts), inf)
    reached[0, 0] = 0.0
    choices: list[Ints] = []
    found: Arrangements = []
    for _ in range(min(len(order), len(problem.sums))):
        then, choice = np.full_like(reached, inf), np.zeros(reached.shape, dtype=np.int64)
        begun = np.flatnonzero(np.isfinite(reached).any(axis=1))
        for group in range(1, len(groups)):
            rest = begun[begun & group == 0]
            worst = np.maximum(reached[rest, :, None], seconds[group - 1])
            picked = worst.argmin(axis=1)
            ends = np.take_along_axis(worst, picked[:, None], axis=1)[:, 0]
            union = rest | group  # each differs, as `rest` does
            better = ends < then[union]
            then[union] = np.where(better, ends, then[union])
            choice[union] = np.where(better, group * cuts + picked, choice[union])
        reached = then
        choices.append(choice)
        for devices in np.flatnonzero(np.isfinite(reached[:, -1])).tolist():
            trace = partial(_traced_groups, groups, tuple(choices), slices, devices)
            found.append((float(reached[devices, -1]), trace))
    return sorted(found, key=lambda pair: pair[0])


def _traced_groups(
    groups: Sequence[tuple[int, ...]], choices: tuple[Ints, ...], slices: Ints, devices: int
) -> list[Draft]:
    stages: list[Draft] = []
    until = slices.shape[-1]
    for choice in reversed(choices):
        group, since = divmod(int(choice[devices, until]), slices.shape[-1] + 1)
        stages.append(_draft(since, until - since, groups[group], slices[group - 1]))
        devices, until = devices ^ group, since
    return stages[::-1]


def _along(problem: Problem, order: Ints, chunk: int) -> Arrangements:
    """The best cut for every number of stages and devices along an order, strongest first or last.

    f[g, i, p] = min over j, q of max(f[g-1, j, q], seconds of devices j..i with sublayers q..p). With the strongest
    last, the same runs from the last sublayer to the first.
    """
    devices, length = len(order), len(problem.sums)
    j, i = np.triu_indices(devices)
    groups = [tuple(order[first : last + 1].tolist()) for first, last in zip(j.tolist(), i.tolist(), strict=True)]
    of_groups, slices_of_groups = _column_seconds(problem, groups, chunk)
    seconds = np.full((devices, devices, length + 1, length + 1), inf)
    slices = np.ones((devices, devices, length), dtype=np.int64)
    seconds[j, i], slices[j, i] = of_groups, slices_of_groups
    found: Arrangements = []
    for is_reversed in (False, True):
        table = seconds[:, :, ::-1, ::-1].swapaxes(2, 3) if is_reversed else seconds
        choices: list[Ints] = []
        reached = np.full((devices + 1, length + 1), inf)
        reached[0, 0] = 0.0
        for count in range(1, min(devices, length) + 1):
            reached, choice = _one_more_stage(reached, table, count)
            choices.append(choice)
            for last in np.flatnonzero(np.isfinite(reached[:, -1])).tolist():
                trace = partial(_traced, order, tuple(choices), slices, last, is_reversed)
                found.append((float(reached[last, -1]), trace))
    return sorted(found, key=lambda pair: pair[0])


def _one_more_stage(reached: Floats, seconds: Floats, count: int) -> tuple[Floats, Ints]:
    cuts = reached.shape[1]
    then, choice = np.full_like(reached, inf), np.zeros(reached.shape, dtype=np.int64)
    for last in range(count, len(reached)):
        # each earlier stage needed at least one device
        worst = np.maximum(reached[count - 1 : last, :, None], seconds[count - 1 : last, last - 1]).reshape(-1, cuts)
        picked = worst.argmin(axis=0)
        then[last] = worst[picked, np.arange(cuts)]
        choice[last] = picked + (count - 1) * cuts
    return then, choice


def _traced(order: Ints, choices: tuple[Ints, ...], slices: Ints, last: int, is_reversed: bool) -> list[Draft]:
    stages: list[Draft] = []
    length = slices.shape[-1]
    until = length
    for choice in reversed(choices):
        before, since = divmod(int(choice[last, until]), length + 1)
        first = length - until if is_reversed else since
        stages.append(_draft(first, until - since, order[before:last].tolist(), slices[before, last - 1]))
        last, until = before, since
    return stages if is_reversed else stages[::-1]


def _draft(first: int, count: int, members: Sequence[int], slices: Ints) -> Draft:
    parts = int(slices[first]) if count == 1 else 1
    return Draft(first, count, tuple(tuple(members[part::parts]) for part in range(parts)))


def _column_seconds(problem: Problem, groups: Sequence[Sequence[int]], chunk: int) -> tuple[Floats, Ints]:
    """[group, q, p]: seconds of a group of devices for sublayers q..p; [group, q]: slices, if that is one sublayer."""
    devices, length = len(problem.profiles), len(problem.sums)
    first, last = np.triu_indices(length)
    runs, kind = problem.sums.kinds(first, last - first + 1)
    whole = np.ones(len(groups), dtype=np.int64)
    ends = _seconds(problem, first[runs], last[runs] - first[runs] + 1, whole, _members(groups, devices), chunk)
    seconds = np.full((len(groups), length + 1, length + 1), inf)
    seconds[:, first, last + 1] = ends[:, kind]
    slices = np.ones((len(groups), length), dtype=np.int64)
    cut = [
        (number, parts)
        for number, group in enumerate(groups)
        for parts in range(2, len(group) + 1)
        if len(group) % parts == 0
    ]
    if not cut:
        return seconds, slices
    dealt = _members([groups[number][part::parts] for number, parts in cut for part in range(parts)], devices)
    parts = np.array([parts for _, parts in cut])
    single = np.arange(length)
    runs, kind = problem.sums.kinds(single, np.ones_like(single))
    ends = _seconds(problem, runs, np.ones_like(runs), np.repeat(parts, parts), dealt, chunk)
    slowest = np.maximum.reduceat(ends, np.cumsum(parts) - parts, axis=0)[:, kind]
    allowed = np.array([[sublayer.allows(c) for sublayer in problem.sums.sublayers] for c in range(devices + 1)])
    for (number, parts), sliced in zip(cut, slowest, strict=True):
        better = single[(sliced < seconds[number, single, single + 1]) & allowed[parts]]
        seconds[number, better, better + 1] = sliced[better]
        slices[number, better] = parts
    return seconds, slices


def _members(groups: Sequence[Sequence[int]], devices: int) -> Bools:
    members = np.zeros((len(groups), devices), dtype=np.bool_)
    for number, group in enumerate(groups):
        members[number, list(group)] = True
    return members


def _seconds(problem: Problem, first: Ints, count: Ints, slices: Ints, members: Bools, chunk: int) -> Floats:
    """[column, run]: seconds of each column's members for each run of sublayers, as one of `slices` slices."""
    columns, runs = len(members), len(first)
    shards = np.tile(first, columns), np.tile(count, columns), np.repeat(slices, runs)
    of = shard_costs(problem.sums, *shards, chunk=chunk)
    pace = paces(problem, of, np.repeat(members, runs, axis=0), chunk)
    ends, _ = share_rows(pace, problem.sequences, problem.sums.sequence, of.takes_sequences)
    return ends.reshape(columns, runs)
