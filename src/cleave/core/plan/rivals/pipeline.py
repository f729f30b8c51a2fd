"""GPipe times data parallel: layers stay on devices with their optimizer; activations go from device to device.

Sources: GPipe (Huang et al., 2019, arXiv:1811.06965) and torch.distributed.pipelining for the schedule, DT-FM (Yuan et
al., 2022, arXiv:2206.01288; DS3Lab/DT-FM) for pipelines times data parallel over slow links. With M micro-batches, f
and b the seconds of a stage forward and backward, and e those of a link (bytes of a micro-batch over the sender's
uplink or the receiver's downlink, whichever is slower):

    flow = sum of all f, b, e and latencies on the way + (M - 1) (largest f or e + largest b or e)

With equal stages and fast links that has the known bubble (S - 1) / (M + S - 1). It is exact for GPipe, whose forwards
all precede its backwards. 1F1B takes as long: a stage has no more micro-batches under way than there are stages behind
it, so where links bind it waits for round trips. It holds fewer activations, though, so its memory is assumed.
With R pipelines each takes 1 / R of the sequences, and the gradients of a layer are reduced among its R holders (see
`reduction`). A stage can begin with that while earlier ones finish backward, and the one with most to reduce is granted
the last place. The number of pipelines, their devices and recomputation are chosen, `stages` places the layers; a
micro-batch is one sequence, as more and smaller ones are never slower here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from math import inf

import numpy as np

from cleave.core.fleet.profiles import Floats
from cleave.core.plan.rivals.case import Case, Rival, plural, too_small
from cleave.core.plan.rivals.reduction import MANNERS, reduced
from cleave.core.plan.rivals.stages import Limits, Placement, Stages

PIPELINES = "GPipe x data parallel"
_SKEWS, _FINE_SKEWS = (1.0, 1.7, 3.0), (0.25, 0.5, 1.0, 1.3, 2.0, 3.0, 5.0)
"""Seconds allowed for backward per second for forward; more of them for one pipeline of few devices: ends matter."""
_SMALL = 32
_SLACKS = (1.0, 1.2, 1.6, 2.5)
"""With more time than the least, fewer stages suffice."""
_REDUCTION_SLACKS = (1.0, 1.6, 3.0, inf)
_REPLICAS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_PATIENCE = 3
"""Give up after so many numbers of pipelines in a row that were no faster."""
_HALVINGS, _RANGE = 10, 1e-3
_HOPELESS = 1.3
"""Limits this much above those that would tie with the best may still give a faster step, as stages stay below them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Seconds of a step, and of its parts."""

    step_s: float
    path_s: float
    """a micro-batch through all stages and back"""
    busiest_s: float
    """a micro-batch in the busiest stage or link forward, plus the same backward"""
    reduction_s: float
    manner: str
    moved_bytes: Floats
    """per device, both ways together, each of which has half"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arranged:
    """Pipelines with their devices, and what a step takes."""

    stages: Stages
    placed: Placement
    pipelines: int
    flow: Flow

    @property
    def spares(self) -> str:
        """What it does not pay for and Cleave does."""
        if self.pipelines == 1:
            return "neither weights nor gradients cross links"
        return f"gradients are reduced among {self.pipelines} replicas, and weights cross no link"

    def in_words(self, sequences: float) -> str:
        held = self.placed.layers[self.placed.layers > 0]
        fewest, most = round(held.min()) if len(held) else 0, round(held.max()) if len(held) else 0
        layers = plural(most, "layer") if fewest == most else f"{fewest} to {most} layers"
        about = "" if self.pipelines == 1 else "about "
        stages = plural(len(self.placed.devices) / self.pipelines, "stage")
        return (
            f"{plural(self.pipelines, 'pipeline')} of {about}{stages} with {layers}, "
            f"{sequences / self.pipelines:,.0f} micro-batches"
            + (", recomputing activations" if self.stages.recompute else "")
            + (f", gradients reduced {self.flow.manner}" if self.pipelines > 1 else "")
        )


def arranged(case: Case) -> Arranged | None:
    """The fastest arrangement found; None if none fits."""
    searches = [_Search(case, recompute=recompute) for recompute in (False, True)]
    return min(searches, key=lambda search: search.step_s).best


def pipelines(case: Case) -> Rival:
    """The fastest arrangement found in words, or why none fits."""
    found = arranged(case)
    if found is None:
        return Rival(name=PIPELINES, step_s=inf, arrangement=why_not(case))
    return Rival(
        name=PIPELINES,
        step_s=found.flow.step_s,
        arrangement=found.in_words(case.sequences),
        spares=found.spares,
    )


def weigh(case: Case, stages: Stages, placed: Placement, pipelines: int) -> Flow:
    """Seconds of a step with these stages."""
    devices, layers = placed.devices, placed.layers
    forward_s = layers * stages.forward_s[devices] + placed.has_head * stages.head_forward_s[devices]
    backward_s = layers * stages.backward_s[devices] + placed.has_head * stages.head_backward_s[devices]
    send_s, receive_s = stages.send_s[devices], stages.receive_s[devices]
    to_next, to_previous = ~placed.has_head, ~placed.has_table
    busiest_s = max(forward_s.max(), (to_next * send_s).max(), (to_previous * receive_s).max())
    busiest_s += max(backward_s.max(), (to_previous * send_s).max(), (to_next * receive_s).max())

    several = ~placed.is_whole
    lanes = max(pipelines - int(placed.is_whole.sum()), 1)
    chain = np.flatnonzero(several) if several.any() else np.arange(1)
    here, there = chain[:-1], chain[1:]
    # the chain runs through all pipelines: as many links too many as there are further pipelines
    share = (len(chain) - lanes) / max(len(chain) - 1, 1) / lanes
    latency_s = case.profiles.latency_s[devices]
    back_s = float((np.maximum(send_s[there], receive_s[here]) + (latency_s[here] + latency_s[there]) / 2).sum())
    links_s = back_s + float(
        (np.maximum(send_s[here], receive_s[there]) + (latency_s[here] + latency_s[there]) / 2).sum()
    )
    returning_s = float(backward_s[chain].sum()) / lanes + share * back_s
    path_s = float((forward_s + backward_s)[chain].sum()) / lanes + share * links_s

    batches = case.sequences / pipelines
    trained = _trained(case, placed)
    total = case.terms.gradient_bytes * case.whole.trained
    reduction = reduced(float((trained * stages.reduce_s[devices]).max()), total, pipelines, case.server)
    reduction_s = float(reduction.seconds)
    moved = np.zeros(len(case.profiles))
    moved[devices] = 2.0 * case.row_bytes * stages.rows * batches * (to_next.astype(float) + to_previous)
    moved[devices] += case.terms.gradient_bytes * trained * float(reduction.moved)
    flow_s = path_s + max(batches - 1, 0.0) * busiest_s
    return Flow(
        step_s=max(float(flow_s) + max(reduction_s - returning_s, 0.0), case.medium_s(moved)),
        path_s=path_s,
        busiest_s=float(busiest_s),
        reduction_s=reduction_s,
        manner=MANNERS[bool(reduction.is_ring)],
        moved_bytes=moved,
    )


def _trained(case: Case, placed: Placement) -> Floats:
    """Trained parameters per stage; a table that is also the head counts once where both are."""
    ends = placed.has_head * case.head.trained + placed.has_table * case.table.trained
    both = case.whole.trained - case.shape.layers * case.layer.trained
    return placed.layers * case.layer.trained + np.where(placed.is_whole, both, ends)


class _Search:
    """The best stages so far."""

    def __init__(self, case: Case, *, recompute: bool) -> None:
        self._case, self._stages = case, Stages(case, case.sequence, recompute=recompute)
        self._is_small = len(case.profiles) <= _SMALL
        self.step_s = inf
        self.best: Arranged | None = None
        stages = self._stages
        longest = case.shape.layers * stages.backward_s + stages.head_backward_s
        self._longest_s = float(max(longest.max(), stages.send_s.max(), stages.receive_s.max()))
        idle = 0
        for count in _REPLICAS:
            before_s = self.step_s
            if count > min(len(case.profiles), case.sequences) or idle > _PATIENCE or not self._try(count):
                break
            idle = 0 if self.step_s < before_s else idle + 1

    def _try(self, count: int) -> bool:
        """Vary the limits for so many pipelines; False if memory cannot hold them."""
        stages = self._stages

        def roomy(reduction_s: float) -> Placement | None:
            return stages.place(count, _limits(self._longest_s, 1.0, reduction_s))

        if roomy(inf) is None:
            return False
        if count == 1:
            self._vary(count, inf)
            return True
        most_s = float(self._case.whole.trained * stages.reduce_s.max())
        while roomy(most_s * _RANGE) is not None:
            most_s *= _RANGE
        least_s = _least(roomy, most_s)
        for slack in _REDUCTION_SLACKS:
            self._vary(count, least_s * slack)
        return True

    def _vary(self, count: int, reduction_s: float) -> None:
        is_fine = self._is_small and count == 1
        for skew, strong_ends in product(_FINE_SKEWS if is_fine else _SKEWS, (False, True) if is_fine else (False,)):

            def timely(seconds: float, skew: float = skew, strong_ends: bool = strong_ends) -> Placement | None:
                limits = _limits(seconds, skew, reduction_s)
                return self._stages.place(count, replace(limits, strong_ends=strong_ends))

            most_s = self._longest_s * max(1.0, 1 / skew)
            if self._case.sequences > count:
                tie_s = self.step_s / (self._case.sequences / count - 1) / (1 + skew)
                most_s = min(most_s, _HOPELESS * tie_s)
            if timely(most_s) is None:
                continue
            least_s = _least(timely, most_s)
            for slack in _SLACKS:
                placed = timely(least_s * slack)
                if placed is not None:
                    self._keep(count, _trimmed(placed, self._stages, count * self._case.shape.layers, count))

    def _keep(self, count: int, placed: Placement) -> None:
        flow = weigh(self._case, self._stages, placed, count)
        if flow.step_s >= self.step_s:
            return
        self.step_s = flow.step_s
        self.best = Arranged(stages=self._stages, placed=placed, pipelines=count, flow=flow)


def _limits(forward_s: float, skew: float, reduction_s: float) -> Limits:
    return Limits(forward_s=forward_s, backward_s=skew * forward_s, reduction_s=reduction_s)


def _least(place: Callable[[float], Placement | None], most_s: float) -> float:
    """The least seconds in which stages can be placed, up to `most_s`, by bisection."""
    low, high = most_s * _RANGE, most_s
    for _ in range(_HALVINGS):
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if place(middle) is not None else (middle, high)
    return high


def _trimmed(placed: Placement, stages: Stages, total: int, pipelines: int) -> Placement:
    """Give back surplus layers: one by one from the busiest stage, or everybody's share where only totals count."""
    layers = placed.layers.copy()
    if pipelines > 1:
        several = ~placed.is_whole
        wanted = total - float(layers[placed.is_whole].sum())
        if several.any() and layers[several].sum() > wanted:
            layers[several] *= wanted / float(layers[several].sum())
        return replace(placed, layers=layers)
    layer_s = (stages.forward_s + stages.backward_s)[placed.devices]
    ends_s = placed.has_head * (stages.head_forward_s + stages.head_backward_s)[placed.devices]
    for _ in range(round(layers.sum() - total)):
        layers[np.where(layers > 0, layers * layer_s + ends_s, -1.0).argmax()] -= 1
    stay = np.flatnonzero((layers > 0) | placed.has_head | placed.has_table)
    return Placement(
        devices=placed.devices[stay],
        layers=layers[stay],
        has_table=placed.has_table[stay],
        has_head=placed.has_head[stay],
    )


def why_not(case: Case) -> str:
    if len(case.profiles) < 2:
        return "takes two devices at least"
    stages = Stages(case, case.sequence, recompute=True)
    memory = case.profiles.memory_bytes
    if memory.max() < stages.stage_bytes(1):
        return too_small("a layer with its optimizer", stages.stage_bytes(1), case.profiles)
    ends = max(case.head.state_bytes + case.logit_bytes(case.sequence), case.table.state_bytes) + stages.stage_bytes(0)
    if memory.max() < ends:
        return too_small("the head or the token table with its optimizer", ends, case.profiles)
    return (
        f"{case.shape.layers} layers of {case.layer.state_bytes / 1e9:.3g} GB with their optimizer, the head and the "
        f"token table do not fit into {len(case.profiles):,} devices of {memory.sum() / 1e9:.3g} GB together"
    )
