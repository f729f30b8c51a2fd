"""DT-FM: pipelines of equal stages times data parallel, arranged by a scheduler for slow links of different speed.

Source: Yuan et al., 2022, arXiv:2206.01288; DS3Lab/DT-FM. `dtfm_schedule` decides who computes what; a batch then takes
what GPipe's flush takes with these devices and links (see `core/plan/rivals/pipeline.py`; here every pipeline is
followed device by device): for a pipeline of M micro-batches of one sequence

    flow = sum of all f, b, e and delays on the way + (M - 1) (largest f or e + largest b or e)

A group reduces its gradients once its last micro-batch has passed backward, in the seconds of the data cost.
Memory: 16 bytes a parameter; activations are recomputed layer by layer, so every micro-batch keeps the inputs of the
stage's layers, and DT-FM allocates M inputs and M gradients of outputs on top; one layer is at work.
Knobs: layers per stage, number of pipelines. Candidates take the fastest devices that hold a stage; those that are
fastest with devices as they come are handed to the scheduler, whose result counts if it is faster: its score knows no
compute and no overlap, so it may not be. Its search has the published budget or less
(`budget_for`), so that it takes seconds; the seed decides all draws.
Recovery: Varuna's, which its authors point to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Final

import numpy as np

from cleave.core.cost.terms import RUNTIME_BYTES
from cleave.core.fleet.profiles import Bools, Floats, Ints
from cleave.core.plan.rivals.case import Case, plural, too_small
from cleave.core.plan.rivals.stages import Placement, Stages
from cleave.sim.baselines import recovery
from cleave.sim.baselines.dtfm_schedule import (
    Budget,
    Links,
    Traffic,
    access_links,
    ends_of,
    evolve,
    has_long_matchings,
    reduction_s,
    schedule,
)
from cleave.sim.baselines.work import case_of, fact, unfit
from cleave.sim.setting import Outcome, Setting

NAME: Final = "dtfm"
_PIPELINES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_FINALISTS = 2
_WORK = 4e7
"""Pairs of devices that the scheduler may look at per candidate: one or two seconds of a core."""
_PUBLISHED_DEVICES = 64
_MATCHED_PAIRS = 7000
"""What a matching by augmenting paths counts as."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """Devices in groups, a row per stage, first as they come."""

    groups: Ints
    movable: Bools
    layers: Floats
    """Per stage."""

    @property
    def pipelines(self) -> int:
        return self.groups.shape[1]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timed:
    step_s: float
    path_s: float
    reduction_s: float
    moved_bytes: Floats
    """Like the groups: what each device receives, and sends as well."""


def dtfm(setting: Setting) -> Outcome:
    case = case_of(setting)
    stages, links = Stages(case, case.sequence, recompute=True), access_links(case.profiles)
    candidates = _candidates(case, stages, links)
    if not candidates:
        return unfit(NAME, _why_not(case))
    rng = np.random.default_rng(setting.seed)
    found = [scheduled(case, stages, candidate, links, rng) for candidate in candidates[:_FINALISTS]]
    best, took = min(found, key=lambda one: one[1].step_s)
    budget = budget_for(best.groups.shape)
    count = len(best.groups)
    placed = Placement(
        devices=best.groups.ravel(),
        layers=np.repeat(best.layers, best.pipelines),
        has_table=np.repeat(np.arange(count) == 0, best.pipelines),
        has_head=np.repeat(np.arange(count) == count - 1, best.pipelines),
    )
    most_bytes = float(took.moved_bytes.max())
    return Outcome(
        system=NAME,
        fits=True,
        reason=f"{plural(best.pipelines, 'pipeline')} of {plural(count, 'stage')} with up to "
        f"{plural(best.layers.max(), 'layer')}, {case.sequences / best.pipelines:,.0f} micro-batches, "
        "recomputing activations",
        batch_s=took.step_s,
        down_bytes=most_bytes,
        up_bytes=most_bytes,
        memory_bytes=max(
            held_bytes(case, float(layers), best.pipelines, has_table=stage == 0, has_head=stage == count - 1)
            for stage, layers in enumerate(best.layers)
        ),
        devices_used=best.groups.size,
        recovery_s=recovery.varuna(recovery.loss_of(case, placed, took.step_s, took.path_s)),
        detail={
            "pipelines": best.pipelines,
            "stages": count,
            "reduction_s": took.reduction_s,
            "search_population": budget.population,
            "search_trials": budget.trials,
            "recovery": "varuna",
        },
    )


def scheduled(
    case: Case, stages: Stages, candidate: Candidate, links: Links, rng: np.random.Generator
) -> tuple[Candidate, Timed]:
    """The devices as they come, ordered and matched, or evolved: whichever makes a batch fastest."""
    traffic, budget = traffic_of(case, candidate), budget_for(candidate.groups.shape)
    ordered = schedule(candidate.groups, links, traffic, ends_of(candidate.movable))
    evolved = evolve(candidate.groups, candidate.movable, links, traffic, budget, rng)
    arranged = [replace(candidate, groups=one.groups) for one in (ordered, evolved)]
    ways = [(one, timed(case, stages, one, links)) for one in (candidate, *arranged)]
    return min(ways, key=lambda way: way[1].step_s)


def budget_for(shape: tuple[int, ...]) -> Budget:
    """The published budget, which was for 64 devices: in proportion for fewer, and what `_WORK` allows for more."""
    stages, pipelines = shape
    if min(stages, pipelines) < 2:  # all partitions are alike
        return Budget(population=1, trials=0)
    matched = stages**2 * (_MATCHED_PAIRS / 2 if has_long_matchings(pipelines) else 24 * pipelines)
    published = fact("dtfm_trials") * min(stages * pipelines / _PUBLISHED_DEVICES, 1.0)
    trials = int(min(_WORK / (matched + 5 * stages * pipelines**2), published))
    return Budget(population=max(min(int(fact("dtfm_population")), trials // 4), 2), trials=trials)


def traffic_of(case: Case, candidate: Candidate) -> Traffic:
    """Bytes that the scheduler counts with: gradients of the largest stage, activations of a pipeline's batch."""
    trained = candidate.layers * case.layer.trained
    trained[0] += case.table.trained
    trained[-1] += case.head.trained
    return Traffic(
        gradient_bytes=case.terms.gradient_bytes * float(trained.max()),
        activation_bytes=case.tokens / candidate.pipelines * case.row_bytes,
    )


def held_bytes(case: Case, layers: float, pipelines: int, *, has_table: bool, has_head: bool) -> float:
    """Memory of a device with so many layers."""
    batches, rows, width = ceil(case.sequences / pipelines), case.sequence, 2 * case.shape.hidden
    ends = has_table * case.table.state_bytes + has_head * case.head.state_bytes
    state = case.whole.state_bytes if has_table and has_head else layers * case.layer.state_bytes + ends
    inputs = batches * rows * width * (layers + 2)
    at_work = case.activation_bytes(0, rows, recompute=True) + has_head * case.logit_bytes(rows)
    return RUNTIME_BYTES + state + inputs + at_work


def timed(case: Case, stages: Stages, candidate: Candidate, links: Links) -> Timed:
    """Follow every pipeline: seconds of a batch."""
    groups, layers, count = candidate.groups, candidate.layers[:, None], len(candidate.groups)
    last = np.arange(count)[:, None] == count - 1
    forward_s = layers * stages.forward_s[groups] + last * stages.head_forward_s[groups]
    backward_s = layers * stages.backward_s[groups] + last * stages.head_backward_s[groups]
    delay_s, byte_s = links.between(groups[:-1], groups[1:])
    link_s = case.sequence * case.row_bytes * byte_s
    path_s = forward_s.sum(axis=0) + backward_s.sum(axis=0) + 2 * (link_s + delay_s).sum(axis=0)
    slowest_link_s = link_s.max(axis=0, initial=0.0)
    busiest_s = np.maximum(forward_s.max(axis=0), slowest_link_s) + np.maximum(backward_s.max(axis=0), slowest_link_s)
    batches = case.sequences / candidate.pipelines
    flow_s = path_s + max(batches - 1, 0.0) * busiest_s
    # stage s is through once its last backward is done; that of earlier stages follows
    after_s = np.zeros(groups.shape)
    after_s[1:] = np.cumsum(backward_s[:-1] + link_s + delay_s, axis=0)
    trained = candidate.layers * case.layer.trained
    ends = np.zeros(count)
    ends[0] += case.table.trained
    ends[-1] += case.head.trained
    gradients = case.terms.gradient_bytes * (trained + ends)
    reduce_s = np.array(
        [reduction_s(groups[number : number + 1], links, gradients[number]).max() for number in range(count)]
    )
    done_s = (flow_s - after_s).max(axis=1) + reduce_s
    neighbors = np.full((count, 1), 2.0)
    neighbors[0] -= 1
    neighbors[-1] -= 1
    around = 2 * (candidate.pipelines - 1) / candidate.pipelines
    moved = (
        neighbors * (batches * case.sequence * case.row_bytes) + around * gradients[:, None] + np.zeros(groups.shape)
    )
    everything = np.zeros(len(case.profiles))
    everything[groups] = 2 * moved
    return Timed(
        step_s=max(float(done_s.max()), float(flow_s.max()), case.medium_s(everything)),
        path_s=float(path_s.mean()),
        reduction_s=float(reduce_s.max()),
        moved_bytes=moved,
    )


# ------------------------------------------------------------------------------------------------------ candidates


def _candidates(case: Case, stages: Stages, links: Links) -> list[Candidate]:
    """All that fit, fastest as they come first."""
    found: list[tuple[float, int, Candidate]] = []
    for most in sorted({ceil(case.shape.layers / count) for count in range(1, case.shape.layers + 1)}):
        for pipelines in _PIPELINES:
            candidate = _picked(case, stages, most, pipelines) if pipelines <= case.sequences else None
            if candidate is not None:
                found.append((timed(case, stages, candidate, links).step_s, len(found), candidate))
    return [candidate for _, _, candidate in sorted(found, key=lambda one: one[:2])]


def _picked(case: Case, stages: Stages, most: int, pipelines: int) -> Candidate | None:
    """The fastest devices that hold a stage of so many layers, or an end of the model; None if there are too few."""
    count = ceil(case.shape.layers / most)
    layers = np.diff(np.linspace(0, case.shape.layers, count + 1).round())
    memory = case.profiles.memory_bytes
    needs = [
        held_bytes(case, float(layers[stage]), pipelines, has_table=stage == 0, has_head=stage == count - 1)
        for stage in (0, min(1, count - 1), count - 1)
    ]
    per_s = np.maximum(most * (stages.forward_s + stages.backward_s), 2 * np.maximum(stages.send_s, stages.receive_s))
    reducing_s = 2 * most * case.layer.trained * stages.reduce_s if pipelines > 1 else 0.0
    cost_s = case.sequences / pipelines * per_s + reducing_s
    order = np.argsort(np.where(memory >= min(needs), cost_s, inf), kind="stable")
    order = order[: int((memory >= min(needs)).sum())]
    if len(order) < count * pipelines:
        return None
    fastest = order[: count * pipelines]
    if (memory[fastest] >= max(needs)).all():
        return Candidate(
            groups=fastest.reshape(count, pipelines),
            movable=np.ones((count, pipelines), dtype=np.bool_),
            layers=layers,
        )
    rows: list[Ints] = []
    left = order
    for stage in (count - 1, 0) if count > 1 else (0,):
        able = left[memory[left] >= needs[2 if stage == count - 1 else 0]][:pipelines]
        if len(able) < pipelines:
            return None
        rows.append(able)
        left = left[~np.isin(left, able)]
    inner = left[memory[left] >= needs[1]][: (count - 2) * pipelines] if count > 2 else left[:0]
    if len(inner) < max(count - 2, 0) * pipelines:
        return None
    groups = np.vstack([rows[-1][None], inner.reshape(-1, pipelines), *([rows[0][None]] if count > 1 else [])])
    movable = np.ones(groups.shape, dtype=np.bool_)
    movable[[0, -1]] = False
    return Candidate(groups=groups, movable=movable, layers=layers)


def _why_not(case: Case) -> str:
    """The number of pipelines that comes closest to fitting, with one layer per stage."""
    memory, count = case.profiles.memory_bytes, case.shape.layers
    tried: list[tuple[float, int, float, int]] = []
    for pipelines in _PIPELINES:
        needed = held_bytes(case, 1.0, pipelines, has_table=False, has_head=count == 1)
        able = int((memory >= needed).sum())
        tried.append((able / (count * pipelines), -pipelines, needed, able))
    _, minus, needed, able = max(tried)
    if able == 0:
        return too_small("a layer with its optimizer and the inputs of its micro-batches", needed, case.profiles)
    return (
        f"{plural(-minus, 'pipeline')} of {count} stages with a layer each need {-minus * count:,} devices with "
        f"{needed / 1e9:.3g} GB, more at the ends of the model, and the fleet has {able:,} of those, the largest with "
        f"{memory.max() / 1e9:.3g} GB"
    )
