"""Columns for the few devices of a live server: which device holds which sublayers, searched nearly exhaustively.

`arrangements` proposes, for every number of stages and devices, the cut whose busiest column finishes first. Each is
judged as a whole (fill, server, medium), so that data parallel, a pipeline, slices and everything in between compete on
equal terms, leased or synchronized. The best are played through (`timeline`) with chunks of every size, and the
winner's stages are moved while that helps. Devices keep what they hold unless another arrangement is clearly faster,
what must be moved for it included (`moves`). Knows neither shapes nor sockets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from cleave.core.cost.resident import shard_costs
from cleave.core.model.shard import Shard
from cleave.core.plan.resident.arrangements import Arrangements, arrangements
from cleave.core.plan.resident.moves import cost_s
from cleave.core.plan.resident.problem import Problem
from cleave.core.plan.resident.search import Search
from cleave.core.plan.resident.stages import Draft, ResidentPlan, drafts, is_cramped, judge
from cleave.core.plan.resident.timeline import PLAYED_SEQUENCES
from cleave.errors import InfeasibleError, InputError

CHUNKS = (16, 32, 64, 128, 256)

_WORTH_CHANGING = 0.9  # another arrangement must take less than this share, its move included: rates fluctuate
_WORTH_LEASING = 0.95  # the same if it begins leases
_FINALISTS = 5
_MOST_UNITS = 20_000  # in one timeline: half a second
_MOST_CANDIDATES = 16  # to take over a shard
_MOST_MOVES = 60  # arrangements tried beside the best one found
_MOVED_UNITS = 100_000  # in their timelines together
_HOPELESS = 1.3  # the formula is seldom that much above the timeline
_REFINED = 2  # of the arrangements that were played
_MANY = 24  # beyond this many devices the dynamic program would take seconds
_KEPT_SEQUENCES = (4, 2, 0)  # where memory is short: activations of few sequences at once, or of none
_USUAL_CHUNKS = 64, 256  # what suits a device depends on them
_LIKELY_CHUNKS = 3
_LEADS = (0, 1, 2)  # orders of rows

_Way = tuple[Sequence[Draft], int]
"""Stages, and the order of their rows."""
_Tried = tuple[tuple[Draft, ...], int]
_Neighbors = Callable[[Sequence[Draft], int], Iterator[_Way]]


def plan_columns(
    problem: Problem, *, chunks: Sequence[int] = CHUNKS, previous: ResidentPlan | None = None
) -> ResidentPlan:
    """The fastest arrangement found; or `previous`, if it still fits and the new one saves too little.

    Each device is in one column, in two of a pipeline that is dealt out twice, or in none if it would only slow the
    step down.
    """
    if min(chunks) < 1:
        raise InputError(f"expected chunks of 1 token or more, got {tuple(chunks)}; change them")
    sizes = sorted({min(chunk, problem.sums.sequence) for chunk in chunks})
    standing = _standing(problem, previous)
    if previous is not None and standing is not None:
        for is_thorough in (False, True):
            found = _best(problem, sizes, is_thorough=is_thorough)
            if found is None or not _is_worth_it(problem, previous, standing, found):
                return standing
        return found
    best = _best(problem, sizes, is_thorough=True)
    if best is None:
        raise InfeasibleError(_why_not(problem, sizes[0]))
    return best


def _is_worth_it(problem: Problem, previous: ResidentPlan, standing: ResidentPlan, found: ResidentPlan) -> bool:
    """Whether to leave what `previous` arranged for another plan; where leases only begin, nothing is given up."""
    share = _WORTH_LEASING if found.has_leases and not previous.has_leases else _WORTH_CHANGING
    return cost_s(problem, previous, found) < cost_s(problem, previous, standing) * share


def judge_again(problem: Problem, plan: ResidentPlan) -> ResidentPlan | None:
    """The same arrangement with the time it takes on this fleet; None if a device is gone or too small."""
    stages = _drafted(problem, plan)
    return None if stages is None else _played_again(problem, plan, stages)


def rehouse(problem: Problem, plan: ResidentPlan, shards: Collection[Shard]) -> ResidentPlan | None:
    """The same stages with other devices for some shards, each the one with which a step takes least; None if none can.

    A device that holds another shard may keep both, if that is faster than one that holds nothing. What has lost all
    its devices is placed anew as well.
    """
    problem = replace(problem, lead=plan.lead)
    names, chunk = problem.profiles.names, min(plan.chunk, problem.sums.sequence)
    places = {name: number for number, name in enumerate(names)}
    columns = [column for stage in plan.stages for column in stage.columns]
    present = [[places[one.device] for one in column.holdings if one.device in places] for column in columns]
    homeless = [n for n, column in enumerate(columns) if column.shard in shards or not present[n]]
    homeless.sort(key=lambda number: -columns[number].shard.count)
    members = [() if n in homeless else tuple(devices) for n, devices in enumerate(present)]
    busy = np.isin(np.arange(len(names)), [device for group in members for device in group])
    candidates = np.lexsort((-problem.profiles.flops_per_s, busy))[:_MOST_CANDIDATES].tolist()
    for place, number in enumerate(homeless):
        members[number] = (candidates[place % len(candidates)],)
    best: ResidentPlan | None = None
    for number in homeless:
        best, chosen = None, members[number]
        for device in candidates:
            members[number] = (device,)
            within_s = inf if best is None else best.step_s
            found = _played(problem, _peopled(plan, members), chunk, within_s)
            if found is not None and (best is None or found.step_s < best.step_s):
                best, chosen = found, members[number]
        members[number] = chosen
    return best if homeless else _played(problem, _peopled(plan, members), chunk)


def _peopled(plan: ResidentPlan, members: Sequence[tuple[int, ...]]) -> list[Draft]:
    """The stages of a plan, leased as there, with other devices."""
    remaining = iter(members)
    return [
        Draft(stage.first, stage.count, tuple(next(remaining) for _ in stage.columns), stage.columns[0].is_leased)
        for stage in plan.stages
    ]


def _standing(problem: Problem, previous: ResidentPlan | None) -> ResidentPlan | None:
    """The previous arrangement on this fleet, with more of its columns leased if that pays: no weights need move.

    What devices kept that are gone goes to others, so that those that are here may go on with theirs.
    """
    if previous is None or sum(stage.count for stage in previous.stages) != len(problem.sums):
        return None
    stages = _drafted(problem, previous)
    if stages is None:
        return rehouse(problem, previous, ()) if previous.has_leases and problem.leasing is not None else None
    standing, leased = (
        _played_again(problem, previous, one) for one in (stages, [replace(stage, may_lease=True) for stage in stages])
    )
    if standing is None or leased is None:
        return leased or standing
    if cost_s(problem, previous, leased) < cost_s(problem, previous, standing) * _WORTH_LEASING:
        return leased
    return standing


def _played_again(problem: Problem, plan: ResidentPlan, stages: Sequence[Draft]) -> ResidentPlan | None:
    """Play stages in a plan's chunks; devices keep as many sequences as in the plan, or as the problem asks."""
    chunk = min(plan.chunk, problem.sums.sequence)
    found = [
        played
        for kept in {plan.kept_sequences, problem.kept_sequences}
        if (played := _played(replace(problem, kept_sequences=kept, lead=plan.lead), stages, chunk)) is not None
    ]
    return min(found, key=_step_s, default=None)


def _drafted(problem: Problem, plan: ResidentPlan) -> list[Draft] | None:
    """The stages of a plan on this fleet, leased as in the plan; None if a device is gone or the model is another."""
    stages = drafts(plan.stages, problem.profiles.names)
    if stages is None or sum(stage.count for stage in stages) != len(problem.sums):
        return None
    leased = [stage.columns[0].is_leased for stage in plan.stages]
    return [replace(stage, may_lease=may_lease) for stage, may_lease in zip(stages, leased, strict=True)]


def _played(problem: Problem, stages: Sequence[Draft], chunk: int, within_s: float = inf) -> ResidentPlan | None:
    """Judge an arrangement by its timeline, unless that is too long to play; None if it exceeds `within_s`."""
    is_played = _units(problem, stages, chunk) <= _MOST_UNITS
    return judge(problem, stages, chunk, is_played=is_played, within_s=within_s)


def _units(problem: Problem, stages: Sequence[Draft], chunk: int) -> int:
    """Tasks with rows in a timeline."""
    shards = sum(len(stage.members) for stage in stages)
    return 2 * shards * min(problem.sequences, PLAYED_SEQUENCES) * -(-problem.sums.sequence // chunk)


def _best(problem: Problem, chunks: Sequence[int], *, is_thorough: bool) -> ResidentPlan | None:
    """The fastest arrangement found: with leases or without, and keeping activations or not where memory is short."""
    synchronized = [replace(problem, leasing=None)] if problem.leasing is not None and is_thorough else []
    best: ResidentPlan | None = None
    for way in (problem, *synchronized):
        within_s = inf if best is None else best.step_s
        found = _searched(way, chunks, within_s, is_thorough=is_thorough)
        if found and is_cramped(way, _free(way, found[0]), found[0].chunk):
            for kept in _KEPT_SEQUENCES:
                within_s = min((plan.step_s for plan in found), default=within_s)
                less = replace(way, kept_sequences=kept)
                found += _searched(less, chunks, within_s, is_thorough=is_thorough)
        best = min((plan for plan in (best, *found) if plan is not None), key=_step_s, default=None)
    return best


def _searched(problem: Problem, chunks: Sequence[int], within_s: float, *, is_thorough: bool) -> list[ResidentPlan]:
    """The fastest few arrangements found, fastest first; none if all are clearly slower than `within_s`."""
    if len(problem.profiles) > _MANY:
        return _best_of_many(problem, chunks, within_s)
    found = _best_of_few(problem, chunks, within_s, is_thorough=is_thorough)
    tried: set[_Tried] = set()
    return sorted((_refined(problem, plan, tried) for plan in found), key=_step_s) if is_thorough else found


def _step_s(plan: ResidentPlan) -> float:
    return plan.step_s


def _best_of_few(problem: Problem, chunks: Sequence[int], within_s: float, *, is_thorough: bool) -> list[ResidentPlan]:
    usual = {min(chunks, key=lambda chunk: abs(chunk - size)) for size in _USUAL_CHUNKS[: 1 + is_thorough]}
    for sizes in (sorted(usual), chunks[:1]):
        finalists = [
            plan
            for chunk in sizes
            for found in arrangements(problem, chunk, in_any_order=is_thorough)
            for plan in _finalists(problem, found, chunk)
        ]
        if finalists:
            simple = [plan for stages in _simple(problem) if (plan := judge(problem, stages, sizes[0])) is not None]
            different = {plan.holders: plan for plan in (*finalists, *simple)}
            return _best_played(problem, list(different.values()), chunks, within_s)
    return []


def _finalists(problem: Problem, proposed: Arrangements, chunk: int) -> list[ResidentPlan]:
    """The best few of some arrangements by the formula."""
    found: list[ResidentPlan] = []
    for bound_s, stages in proposed:
        if len(found) == _FINALISTS and bound_s >= found[-1].step_s:
            break
        plan = judge(problem, stages(), chunk)
        if plan is not None:
            found = sorted([*found, plan], key=_step_s)[:_FINALISTS]
    return found


def _simple(problem: Problem) -> Iterator[list[Draft]]:
    """The whole model on one device, and on all of them: what a plan must beat."""
    everyone, length = range(len(problem.profiles)), len(problem.sums)
    yield from ([Draft(0, length, ((device,),))] for device in everyone)
    yield [Draft(0, length, (tuple(everyone),))]


def _best_played(
    problem: Problem, plans: Sequence[ResidentPlan], chunks: Sequence[int], within_s: float
) -> list[ResidentPlan]:
    """The fastest few of some arrangements by their timelines, with chunks of any size.

    The formula says which chunks to try, and what is hopeless beside them or `within_s`.
    """
    likely: list[tuple[float, int, list[Draft], int]] = []
    for number, plan in enumerate(plans):
        stages = _free(problem, plan)
        judged = [(found.step_s, size) for size in chunks if (found := judge(problem, stages, size)) is not None]
        likely += [(step_s, number, stages, size) for step_s, size in sorted(judged)[:_LIKELY_CHUNKS]]
    best: dict[int, ResidentPlan] = {}
    for step_s, number, stages, size in sorted(likely, key=lambda one: one[:2]):
        if step_s >= within_s * _HOPELESS:
            break
        slowest_s = min(within_s, best[number].step_s) if number in best else within_s
        played = _played(problem, stages, size, slowest_s)
        if played is not None:
            best[number] = played
            if len(best) >= _REFINED:
                within_s = min(within_s, sorted(plan.step_s for plan in best.values())[_REFINED - 1])
    return sorted(best.values(), key=_step_s)[:_REFINED]


def _free(problem: Problem, plan: ResidentPlan) -> list[Draft]:
    """The stages of a plan for this fleet, to be leased wherever that is allowed and fits."""
    return drafts(plan.stages, problem.profiles.names) or []


def _refined(problem: Problem, plan: ResidentPlan, tried: set[_Tried]) -> ResidentPlan:
    """Move cuts and stages while that makes the timeline shorter; then also reorder rows, and deal stages out twice.

    `tried` was played before, and was no faster.
    """
    best = _climbed(problem, plan, _moves, tried)
    stages = _free(problem, best)
    dealt = [
        found
        for twice in _dealt_twice(stages)
        if (found := _played(replace(problem, lead=1), twice, best.chunk, best.step_s * _HOPELESS)) is not None
    ]
    return min((_climbed(problem, begun, _neighbors, tried) for begun in (best, *dealt)), key=_step_s)


def _climbed(problem: Problem, plan: ResidentPlan, neighbors: _Neighbors, tried: set[_Tried]) -> ResidentPlan:
    stages = _free(problem, plan)
    left = min(_MOST_MOVES, _MOVED_UNITS // _units(problem, stages, plan.chunk))
    has_changed = True
    while has_changed and left > 0:
        has_changed = False
        for moved, lead in neighbors(stages, plan.lead):
            if (tuple(moved), lead) in tried:
                continue
            way = replace(problem, lead=lead)
            judged = judge(way, moved, plan.chunk)
            if judged is None or judged.step_s >= plan.step_s * _HOPELESS:
                continue
            left -= 1
            tried.add((tuple(moved), lead))
            found = _played(way, moved, plan.chunk, plan.step_s)
            if found is not None and found.step_s < plan.step_s:
                plan, stages, has_changed = found, moved, True
                break
            if left <= 0:
                break
    return plan


def _neighbors(stages: Sequence[Draft], lead: int) -> Iterator[_Way]:
    """An arrangement with its rows in another order, or with other stages."""
    yield from ((stages, other) for other in _LEADS if other != lead)
    yield from _moves(stages, lead)


def _dealt_twice(stages: Sequence[Draft]) -> Iterator[list[Draft]]:
    """A pipeline with two half stages on each device, one after all of the others': it fills in half of the time."""
    devices = {stage.members for stage in stages}
    if len(stages) == len(devices) > 1 and all(stage.count > 1 and len(stage.members) == 1 for stage in stages):
        halves = [(stage.count + 1) // 2 for stage in stages]
        rest = [stage.count - half for stage, half in zip(stages, halves, strict=True)]
        yield _lined_up([*halves, *rest], [*stages, *stages])


def _moves(stages: Sequence[Draft], lead: int) -> Iterator[_Way]:
    """Neighbors of an arrangement: a cut moved by a sublayer, two stages exchanged, or one joined to its neighbor."""
    for number, shift in itertools.product(range(len(stages) - 1), (1, -1)):
        left, right = stages[number], stages[number + 1]
        if min(left.count + shift, right.count - shift) >= 1 and max(len(left.members), len(right.members)) == 1:
            counts = [stage.count for stage in stages]
            counts[number : number + 2] = left.count + shift, right.count - shift
            yield _lined_up(counts, stages), lead
    for one, other in itertools.combinations(range(len(stages)), 2):
        moved = list(stages)
        moved[one], moved[other] = stages[other], stages[one]
        if max(len(stages[one].members), len(stages[other].members)) == 1:
            yield _lined_up([stage.count for stage in moved], moved), lead
    for gone, other in itertools.product(range(len(stages)), (-1, 1)):
        if 0 <= gone + other < len(stages) and len(stages[gone + other].members) == 1:
            counts = [stage.count for stage in stages]
            counts[gone + other] += counts[gone]
            yield _lined_up(counts[:gone] + counts[gone + 1 :], [*stages[:gone], *stages[gone + 1 :]]), lead


def _lined_up(counts: Sequence[int], stages: Sequence[Draft]) -> list[Draft]:
    """These stages one after another, with other numbers of sublayers."""
    firsts = itertools.accumulate(counts, initial=0)
    return [replace(one, first=first, count=count) for one, first, count in zip(stages, firsts, counts, strict=False)]


def _best_of_many(problem: Problem, chunks: Sequence[int], within_s: float) -> list[ResidentPlan]:
    """Search as for large fleets, with the terms of live devices; the medium counts only once columns are found."""
    search = Search(problem.profiles, problem.sums, problem.rows, problem.server, is_held=True)
    found = search.best()
    if found is None:
        return []
    stages = [
        Draft(one.first, one.count, tuple(tuple(group.devices.tolist()) for group in one.groups))
        for one in found.cover.stages
    ]
    plans = [plan for chunk in chunks if (plan := judge(problem, stages, chunk)) is not None]
    return _best_played(problem, plans[:1], chunks, within_s)


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
