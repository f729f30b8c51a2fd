"""Columns for the few devices of a live server: which device holds which sublayers, searched nearly exhaustively.

Devices are put into a few natural orders; along each, a dynamic program finds, for every number of stages and devices,
the cut of the sublayers whose busiest column finishes first. Each such arrangement is then judged as a whole (fill,
server, medium), so that data parallel, a pipeline, slices and everything in between compete on equal terms. The best
are played through (`timeline.py`) with chunks of every size, and the winner's cuts are moved while that helps. Devices
keep what they hold unless another arrangement is clearly faster. Knows neither shapes nor sockets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import inf

import numpy as np

from cleave.core.cost.resident import shard_costs
from cleave.core.fleet.profiles import Bools, Floats, Ints, Profiles
from cleave.core.plan.resident.problem import Problem
from cleave.core.plan.resident.search import Search
from cleave.core.plan.resident.stages import (
    Draft,
    ResidentPlan,
    drafts,
    is_cramped,
    judge,
    paces,
    share_rows,
)
from cleave.core.plan.resident.timeline import PLAYED_SEQUENCES
from cleave.errors import InfeasibleError, InputError

CHUNKS = (16, 32, 64, 128, 256)

_WORTH_MOVING = 0.7  # another arrangement must take less than this share: rates fluctuate, and weights must be sent
_WORTH_LEASING = 0.95  # only optimizer states must be sent
_STEPS_PER_E = 4  # rates within about a quarter count as equal when devices are sorted
_FINALISTS = 5
_MOST_UNITS = 20_000  # in one timeline: half a second
_MOST_MOVES = 12  # cuts tried after the best arrangement is found
_FEW = 5
_MANY = 24  # beyond this many devices the dynamic program would take seconds
_USUAL_CHUNK = 64
_LIKELY_CHUNKS = 3


def plan_columns(
    problem: Problem, *, chunks: Sequence[int] = CHUNKS, previous: ResidentPlan | None = None
) -> ResidentPlan:
    """The fastest arrangement found; or `previous`, if it still fits and the new one saves less than 30%.

    Each device is in at most one column, and in none if it would only slow the step down.
    """
    if min(chunks) < 1:
        raise InputError(f"expected chunks of 1 token or more, got {tuple(chunks)}; change them")
    sizes = sorted({min(chunk, problem.sums.sequence) for chunk in chunks})
    standing = _standing(problem, previous)
    found = [plan for one in _ways(problem) if (plan := _roomy_or_lean(one, sizes)) is not None]
    if not found:
        raise InfeasibleError(_why_not(problem, sizes[0]))
    best = min(found, key=lambda plan: plan.step_s)
    if standing is not None and best.step_s > standing.step_s * _WORTH_MOVING:
        return standing
    return best


def judge_again(problem: Problem, plan: ResidentPlan) -> ResidentPlan | None:
    """The same arrangement with the time it takes on this fleet; None if a device is gone or too small."""
    stages = _drafted(problem, plan)
    return None if stages is None else _played(problem, stages, min(plan.chunk, problem.sums.sequence))


def _ways(problem: Problem) -> Iterator[Problem]:
    """The problem with leases, and without: state takes memory that activations may need more."""
    yield problem
    if problem.leasing is not None:
        yield replace(problem, leasing=None)


def _roomy_or_lean(problem: Problem, chunks: Sequence[int]) -> ResidentPlan | None:
    best = _best(problem, chunks)
    if best is None or not is_cramped(problem, drafts(best.stages, problem.profiles.names) or [], best.chunk):
        return best
    # what devices keep leaves room for fewer sequences: that may not pay
    lean = _best(replace(problem, may_keep=False), chunks)
    return best if lean is None else min(best, lean, key=lambda plan: plan.step_s)


def _standing(problem: Problem, previous: ResidentPlan | None) -> ResidentPlan | None:
    """The previous arrangement on this fleet, with more of its columns leased if that pays: no weights need move."""
    stages = None if previous is None else _drafted(problem, previous)
    if previous is None or stages is None:
        return None
    chunk = min(previous.chunk, problem.sums.sequence)
    standing, leased = (
        _played(problem, one, chunk) for one in (stages, [replace(stage, may_lease=True) for stage in stages])
    )
    if standing is None or (leased is not None and leased.step_s < standing.step_s * _WORTH_LEASING):
        return leased
    return standing


def _drafted(problem: Problem, plan: ResidentPlan) -> list[Draft] | None:
    """The stages of a plan on this fleet, leased as in the plan; None if a device is gone or the model is another."""
    stages = drafts(plan.stages, problem.profiles.names)
    if stages is None or sum(stage.count for stage in stages) != len(problem.sums):
        return None
    leased = [stage.columns[0].is_leased for stage in plan.stages]
    return [replace(stage, may_lease=may_lease) for stage, may_lease in zip(stages, leased, strict=True)]


def _played(problem: Problem, stages: Sequence[Draft], chunk: int) -> ResidentPlan | None:
    """Judge an arrangement by its timeline, unless that is too long."""
    shards = sum(len(stage.members) for stage in stages)
    units = 2 * shards * min(problem.sequences, PLAYED_SEQUENCES) * -(-problem.sums.sequence // chunk)
    return judge(problem, stages, chunk, is_played=units <= _MOST_UNITS)


def _best(problem: Problem, chunks: Sequence[int]) -> ResidentPlan | None:
    if len(problem.profiles) > _MANY:
        return _best_of_many(problem, chunks)
    usual = min(chunks, key=lambda chunk: abs(chunk - _USUAL_CHUNK))
    for chunk in dict.fromkeys((usual, chunks[0])):
        found: list[ResidentPlan] = []
        for order in _orders(problem.profiles):
            for bound_s, stages in _arrangements(problem, order, chunk):
                if len(found) >= _FINALISTS and bound_s >= found[_FINALISTS - 1].step_s:
                    break
                plan = judge(problem, stages(), chunk)
                if plan is not None:
                    found.append(plan)
                    found.sort(key=lambda plan: plan.step_s)
        if found:
            simple = [plan for stages in _simple(problem) if (plan := judge(problem, stages, chunk)) is not None]
            return _refined(problem, _best_played(problem, [*found[:_FINALISTS], *simple], chunks))
    return None


def _simple(problem: Problem) -> Iterator[list[Draft]]:
    """The whole model on one device, and on all of them: what a plan must beat."""
    everyone, length = range(len(problem.profiles)), len(problem.sums)
    yield from ([Draft(0, length, ((device,),))] for device in everyone)
    yield [Draft(0, length, (tuple(everyone),))]


def _best_played(problem: Problem, plans: Sequence[ResidentPlan], chunks: Sequence[int]) -> ResidentPlan:
    """The fastest of some arrangements by their timelines, with chunks of any size.

    The chunk of each is chosen by the formula, and its neighbors are played too.
    """
    best: ResidentPlan | None = None
    for plan in plans:
        stages = drafts(plan.stages, problem.profiles.names) or []
        judged = [(found.step_s, size) for size in chunks if (found := judge(problem, stages, size)) is not None]
        likely = sorted(judged)[:_LIKELY_CHUNKS]
        for played in (_played(problem, stages, size) for _, size in likely):
            if played is not None and (best is None or played.step_s < best.step_s):
                best = played
    assert best is not None, "every arrangement given was feasible"
    return best


def _refined(problem: Problem, plan: ResidentPlan) -> ResidentPlan:
    """Move cuts between neighboring stages, a sublayer at a time, while that makes the timeline shorter."""
    tried = 0
    has_changed = True
    while has_changed and tried < _MOST_MOVES:
        has_changed = False
        stages = drafts(plan.stages, problem.profiles.names) or []
        for number, shift in itertools.product(range(len(stages) - 1), (1, -1)):
            left, right = stages[number], stages[number + 1]
            if min(left.count + shift, right.count - shift) < 1 or max(len(left.members), len(right.members)) > 1:
                continue
            moved = list(stages)
            moved[number] = replace(left, count=left.count + shift)
            moved[number + 1] = replace(right, first=right.first + shift, count=right.count - shift)
            tried += 1
            found = _played(problem, moved, plan.chunk)
            if found is not None and found.step_s < plan.step_s:
                plan, has_changed = found, True
                break
    return plan


def _best_of_many(problem: Problem, chunks: Sequence[int]) -> ResidentPlan | None:
    """Search as for large fleets, with the terms of live devices; the medium counts only once columns are found."""
    search = Search(problem.profiles, problem.sums, problem.rows, problem.server, is_held=True)
    found = search.best()
    if found is None:
        return None
    stages = [
        Draft(one.first, one.count, tuple(tuple(group.devices.tolist()) for group in one.groups))
        for one in found.cover.stages
    ]
    plans = [plan for chunk in chunks if (plan := judge(problem, stages, chunk)) is not None]
    return _best_played(problem, plans[:1], chunks) if plans else None


def _orders(profiles: Profiles) -> list[Ints]:
    """Orders, strongest first: by compute x uplink, by memory and, in small fleets, by each rate; ties keep order."""
    worth, memory = profiles.flops_per_s * profiles.up_bytes_per_s, profiles.memory_bytes
    keys = [worth, memory, profiles.flops_per_s, profiles.up_bytes_per_s]
    orders = [
        np.argsort(-np.round(np.log(key) * _STEPS_PER_E), kind="stable")
        for key in (keys if len(profiles) <= _FEW else keys[:2])
    ]
    return [np.array(order) for order in dict.fromkeys(tuple(order.tolist()) for order in orders)]


def _arrangements(problem: Problem, order: Ints, chunk: int) -> list[tuple[float, Callable[[], list[Draft]]]]:
    """The best cut for every number of stages and devices, strongest first or last; sorted by the busiest column.

    f[g, i, p] = min over j, q of max(f[g-1, j, q], seconds of devices j..i with sublayers q..p). With the strongest
    last, the same runs from the last sublayer to the first.
    """
    seconds, slices = _column_seconds(problem, order, chunk)
    found: list[tuple[float, Callable[[], list[Draft]]]] = []
    for is_reversed in (False, True):
        table = seconds[:, :, ::-1, ::-1].swapaxes(2, 3) if is_reversed else seconds
        choices: list[Ints] = []
        reached = np.full((len(order) + 1, table.shape[-1]), inf)
        reached[0, 0] = 0.0
        for count in range(1, min(len(order), len(problem.sums)) + 1):
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
        first, count = length - until if is_reversed else since, until - since
        parts = int(slices[before, last - 1, first]) if count == 1 else 1
        members = order[before:last].tolist()
        stages.append(Draft(first, count, tuple(tuple(members[part::parts]) for part in range(parts))))
        last, until = before, since
    return stages if is_reversed else stages[::-1]


def _column_seconds(problem: Problem, order: Ints, chunk: int) -> tuple[Floats, Ints]:
    """[j, i, q, p]: seconds of devices order[j..i] for sublayers q..p; [j, i, q]: slices, if that is one sublayer."""
    devices, length = len(order), len(problem.sums)
    j, i = np.triu_indices(devices)
    place = np.argsort(order)
    members = (place >= j[:, None]) & (place <= i[:, None])
    first, last = np.triu_indices(length)
    runs, kind = problem.sums.kinds(first, last - first + 1)
    ends = _seconds(problem, first[runs], last[runs] - first[runs] + 1, np.ones(len(j), dtype=np.int64), members, chunk)
    seconds = np.full((devices, devices, length + 1, length + 1), inf)
    seconds[j[:, None], i[:, None], first, last + 1] = ends[:, kind]
    slices = np.ones((devices, devices, length), dtype=np.int64)
    group, parts = np.nonzero((i - j + 1)[:, None] % np.arange(1, devices + 1) == 0)
    group, parts = group[parts > 0], parts[parts > 0] + 1
    if len(group) == 0:
        return seconds, slices
    begins = np.cumsum(parts) - parts
    part = np.arange(int(parts.sum())) - np.repeat(begins, parts)
    group_of, parts_of = np.repeat(group, parts), np.repeat(parts, parts)
    dealt = members[group_of] & ((place - j[group_of, None]) % parts_of[:, None] == part[:, None])
    single = np.arange(length)
    runs, kind = problem.sums.kinds(single, np.ones_like(single))
    ends = _seconds(problem, runs, np.ones_like(runs), parts_of, dealt, chunk)
    slowest = np.maximum.reduceat(ends, begins, axis=0)[:, kind]
    allowed = np.array([[sublayer.allows(c) for sublayer in problem.sums.sublayers] for c in range(devices + 1)])
    for number, (before, until) in enumerate(zip(j[group].tolist(), i[group].tolist(), strict=True)):
        whole = seconds[before, until, single, single + 1]
        better = single[(slowest[number] < whole) & allowed[parts[number]]]
        seconds[before, until, better, better + 1] = slowest[number, better]
        slices[before, until, better] = parts[number]
    return seconds, slices


def _seconds(problem: Problem, first: Ints, count: Ints, slices: Ints, members: Bools, chunk: int) -> Floats:
    """[column, run]: seconds of each column's members for each run of sublayers, as one of `slices` slices."""
    columns, runs = len(members), len(first)
    shards = np.tile(first, columns), np.tile(count, columns), np.repeat(slices, runs)
    of = shard_costs(problem.sums, *shards, chunk=chunk)
    pace = paces(problem, of, np.repeat(members, runs, axis=0), chunk)
    ends, _ = share_rows(pace, problem.sequences, problem.sums.sequence, of.takes_sequences)
    return ends.reshape(columns, runs)


def _why_not(problem: Problem, chunk: int) -> str:
    one = np.arange(len(problem.sums))
    parts = np.minimum([s.slices for s in problem.sums.sublayers], len(problem.profiles))
    least = shard_costs(problem.sums, one, np.ones_like(one), np.maximum(parts, 1), chunk=chunk).memory_bytes
    whole = shard_costs(problem.sums, *(np.array([x]) for x in (0, len(one), 1)), chunk=chunk).memory_bytes[0]
    memory = problem.profiles.memory_bytes
    return (
        f"no columns fit: the model takes {whole / 1e9:.3g} GB on devices and its largest sublayer "
        f"{least.max() / 1e9:.3g} GB on each even when sliced, but {len(memory)} devices offer "
        f"{memory.sum() / 1e9:.3g} GB, the largest {memory.max() / 1e9:.3g} GB; add devices "
        "or memory, or train fewer of the weights"
    )
