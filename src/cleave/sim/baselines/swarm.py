"""SWARM: stages with any number of peers each, micro-batches routed by throughput, gradients averaged within a stage.

Source: Ryabinin et al., 2023, arXiv:2301.11913; yandex-research/swarm. A peer holds one stage of q layers and needs

    t = max(forward + backward, bytes in / downlink, bytes out / uplink)

seconds a micro-batch, activations and their gradients in 8 bits. Routing in proportion to throughput gives a stage the
sum of its peers' 1 / t, and the stage with the least paces the batch of M micro-batches of one sequence:

    step = one micro-batch through all stages and back + (M - 1) / least throughput + reduction

Adaptive rebalancing ends where stages are balanced: peers join the stage with the least throughput, fastest first. The
reduction is hivemind's, in all stages at once. Knobs: layers per stage, whether the token table and the head have
stages of their own, how many peers (those with the fastest links: a slow one delays the reduction), recomputation.
Memory: as for pipelines (`core/plan/rivals/stages.py`).
Peers send to each other here, without the trainer processes that relay in SWARM, and no micro-batch is dealt badly.
Recovery: `recovery.swarm`.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from math import ceil, inf
from typing import Final

import numpy as np

from cleave.core.fleet.profiles import Floats, Ints
from cleave.core.plan.rivals.case import Case, plural
from cleave.core.plan.rivals.pipeline import why_not
from cleave.core.plan.rivals.reduction import byte_s
from cleave.core.plan.rivals.stages import Placement, Stages
from cleave.sim.baselines import recovery
from cleave.sim.baselines.hivemind import averaging_parts, averaging_s
from cleave.sim.baselines.work import case_of, unfit
from cleave.sim.setting import Outcome, Setting

NAME: Final = "swarm"
_COMPRESSED = 0.5
"""Bytes in 8 bits per byte in 16."""
_SIZES = 24
_LEAST_S = 1e-9
"""Of a stage that does not compute, behind a link without limit."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Swarm:
    """Peers in stages, and what a batch takes."""

    placed: Placement
    stage: Ints
    """The stage of each peer."""
    per_s: Floats
    """Micro-batches a second of each peer."""
    path_s: float
    reduction_s: float
    step_s: float
    moved_bytes: Floats
    """Per peer, each way."""
    recompute: bool

    @property
    def shares(self) -> Floats:
        """The part of its stage's work that each peer does."""
        return self.per_s / np.bincount(self.stage, self.per_s)[self.stage]


def swarm(setting: Setting) -> Outcome:
    case = case_of(setting)
    found = fastest(case)
    if found is None:
        return unfit(NAME, why_not(case))
    placed = found.placed
    stages = int(found.stage.max()) + 1
    fewest, most = int(np.bincount(found.stage).min()), int(np.bincount(found.stage).max())
    peers = f"{plural(most, 'peer')} each" if fewest == most else f"{fewest:,} to {most:,} peers each"
    return Outcome(
        system=NAME,
        fits=True,
        reason=f"{plural(stages, 'stage')} of up to {plural(placed.layers.max(), 'layer')} with {peers}, "
        "activations in 8 bits" + (", recomputing activations" if found.recompute else ""),
        batch_s=found.step_s,
        down_bytes=float(found.moved_bytes.max()),
        up_bytes=float(found.moved_bytes.max()),
        memory_bytes=float(Stages(case, case.sequence, recompute=found.recompute).held_bytes(placed).max()),
        devices_used=len(placed.devices),
        recovery_s=recovery.swarm(recovery.loss_of(case, placed, found.step_s, found.path_s), found.shares),
        detail={
            "stages": stages,
            "recomputes": int(found.recompute),
            "reduction_s": found.reduction_s,
            "recovery": "swarm",
        },
    )


def fastest(case: Case) -> Swarm | None:
    """The best layers per stage, number of peers and use of memory; None if no stage fits."""
    best: Swarm | None = None
    order = np.argsort(byte_s(case.profiles), kind="stable")
    for recompute in (False, True):
        stages = Stages(case, case.sequence, recompute=recompute)
        for layers in sorted({ceil(case.shape.layers / count) for count in range(1, case.shape.layers + 1)}):
            count = ceil(case.shape.layers / layers)
            able = order[case.profiles.memory_bytes[order] >= stages.stage_bytes(layers)]
            for size in np.unique(np.geomspace(count, max(len(able), count), _SIZES).round().astype(np.int64)):
                for apart in (False, True):
                    found = weigh(case, stages, able[:size], count, apart=apart) if size <= len(able) else None
                    if found is not None and found.step_s < (best.step_s if best else inf):
                        best = found
    return best


def weigh(case: Case, stages: Stages, peers: Ints, count: int, *, apart: bool = False) -> Swarm | None:
    """Deal peers to so many stages, and a batch with them; None if a stage gets nobody.

    `apart` gives the token table and the head stages of their own, on top of those.
    """
    layers = np.diff(np.linspace(0, case.shape.layers, count + 1).round())
    if apart:
        layers = np.concatenate([[0.0], layers, [0.0]])
        count += 2
    number = np.arange(count)
    has_table, has_head = number == 0, number == count - 1
    links = _COMPRESSED * ((~has_table).astype(float) + ~has_head)
    forward_s = stages.forward_s[peers, None] * layers + stages.head_forward_s[peers, None] * has_head
    backward_s = stages.backward_s[peers, None] * layers + stages.head_backward_s[peers, None] * has_head
    moving_s = np.maximum(stages.send_s, stages.receive_s)[peers, None] * links
    per_s = 1 / np.maximum(np.maximum(forward_s + backward_s, moving_s), _LEAST_S)
    memory = case.profiles.memory_bytes[peers]
    needed = stages.held_bytes(Placement(devices=number, layers=layers, has_table=has_table, has_head=has_head))
    stage = _deal(per_s, memory[:, None] >= needed)
    used = np.flatnonzero(stage >= 0)
    if len(np.unique(stage[used])) < count:
        return None
    stage, devices = stage[used], peers[used]
    mine = used, stage
    rate = per_s[mine]
    throughput = np.bincount(stage, rate)
    # a micro-batch's time in a stage is the mean of its peers', by how often it gets there
    each_s = (forward_s + backward_s)[mine] + (stages.send_s + stages.receive_s)[devices] * links[stage]
    each_s = each_s + case.profiles.latency_s[devices] * links[stage] / _COMPRESSED
    path_s = float((np.bincount(stage, rate * each_s) / throughput).sum())
    trained = layers * case.layer.trained + has_table * case.table.trained + has_head * case.head.trained
    reduction_s, moved = _reduced(case, devices, stage, trained)
    share = rate / throughput[stage]
    moved += case.sequences * share * links[stage] * stages.rows * case.row_bytes
    flow_s = path_s + (case.sequences - 1) / float(throughput.min()) + reduction_s
    everything = np.zeros(len(case.profiles))
    everything[devices] = 2 * moved
    placed = Placement(devices=devices, layers=layers[stage], has_table=has_table[stage], has_head=has_head[stage])
    return Swarm(
        placed=placed,
        stage=stage,
        per_s=rate,
        path_s=path_s,
        reduction_s=reduction_s,
        step_s=max(flow_s, case.medium_s(everything)),
        moved_bytes=moved,
        recompute=stages.recompute,
    )


def _deal(per_s: Floats, holds: np.ndarray[tuple[int, int], np.dtype[np.bool_]]) -> Ints:
    """The stage of each peer, -1 for none: fastest first, each to the slowest stage that it can hold.

    Inner stages are alike, so a heap of them and the two ends are enough.
    """
    count = per_s.shape[1]
    ends = sorted({0, count - 1})
    heap = [(0.0, number) for number in range(1, count - 1)]
    so_far = dict.fromkeys(ends, 0.0)
    stage = np.full(len(per_s), -1)
    middle = min(1, count - 1)
    at_ends: list[list[float]] = per_s[:, ends].tolist()
    may_end: list[list[bool]] = holds[:, ends].tolist()
    inner: list[float] = per_s[:, middle].tolist()
    order: list[int] = np.argsort(-per_s[:, middle], kind="stable").tolist()
    for peer in order:
        least, chosen = heap[0] if heap else (inf, -1)
        place = -1
        for which, end in enumerate(ends):
            if may_end[peer][which] and so_far[end] < least:
                least, chosen, place = so_far[end], end, which
        if chosen < 0:
            continue
        stage[peer] = chosen
        if place >= 0:
            so_far[chosen] += at_ends[peer][place]
        else:
            heapq.heapreplace(heap, (least + inner[peer], chosen))
    return stage


def _reduced(case: Case, devices: Ints, stage: Ints, trained: Floats) -> tuple[float, Floats]:
    """Seconds of the slowest stage's averaging, and the bytes each peer moves for it, each way."""
    rates = 1 / byte_s(case.profiles)[devices]
    moved, longest_s = np.zeros(len(devices)), 0.0
    for number in range(int(stage.max()) + 1):
        members = np.flatnonzero(stage == number)
        if len(members) < 2:
            continue
        gradients = case.terms.gradient_bytes * float(trained[number])
        longest_s = max(longest_s, float(averaging_s(gradients, -np.sort(-rates[members]))[-1]))
        moved[members] = gradients * (1 + (len(members) - 2) * averaging_parts(rates[members]))
    return longest_s, moved
