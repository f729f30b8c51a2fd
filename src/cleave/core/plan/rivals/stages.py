"""Place the layers of pipelines on unequal devices: contiguous layers, more of them on faster devices.

All layers are equal, so what matters is how many a device takes, not which. Given seconds for the forward and the
backward of a micro-batch and for the reduction of gradients, every device has a largest number of layers: what it
computes in time, what it holds, what it reduces in time; none if its links do not carry a micro-batch in time. The
first device of a pipeline holds the tables and the last one the head, and each has a single neighbor, so slow links
belong there. Those ends go where they cost the fewest layers; then the strongest devices are taken until the layers of
all pipelines are covered. With several pipelines only their total is covered, as if a device could serve two, which
favors them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cleave.core.cost.terms import RUNTIME_BYTES
from cleave.core.fleet.profiles import Bools, Floats, Ints
from cleave.core.plan.rivals.case import Case
from cleave.core.plan.rivals.reduction import byte_s

_UNABLE = -1e9
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Most seconds for a stage: a micro-batch forward, backward, and its gradients once over the slower link."""

    forward_s: float
    backward_s: float
    reduction_s: float
    strong_ends: bool = False
    """give the ends of the model to the strongest devices, which makes for fewer stages"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placement:
    """Stages of all pipelines: first ones, inner ones, last ones; then devices that are a pipeline by themselves."""

    devices: Ints
    layers: Floats
    has_table: Bools
    has_head: Bools

    @property
    def is_whole(self) -> Bools:
        return self.has_table & self.has_head


class Stages:
    """Costs of a stage on every device, for micro-batches of `rows` tokens."""

    def __init__(self, case: Case, rows: int, *, recompute: bool) -> None:
        self._case, self.rows, self.recompute = case, rows, recompute
        profiles = case.profiles
        self.forward_s, self.backward_s = case.compute_s(case.layer, rows, recompute=recompute)
        self.head_forward_s, self.head_backward_s = case.compute_s(case.head, rows, recompute=False)
        moved = rows * case.row_bytes
        self.send_s, self.receive_s = moved / profiles.up_bytes_per_s, moved / profiles.down_bytes_per_s
        self.reduce_s = case.terms.gradient_bytes * byte_s(profiles)
        """per trained parameter, once over the slower link"""
        self._link_s = np.maximum(self.send_s, self.receive_s)
        tied = case.whole.trained - case.shape.layers * case.layer.trained
        self._trained = {"table": case.table.trained, "head": case.head.trained, "both": tied, "neither": 0.0}
        ends = case.whole.state_bytes - case.shape.layers * case.layer.state_bytes
        logits = case.logit_bytes(rows)
        self._head_bytes, self._both_bytes = case.head.state_bytes + logits, ends + logits
        self._room = {
            "neither": self._rooms(0.0),
            "table": self._rooms(case.table.state_bytes),
            "head": self._rooms(self._head_bytes),
            "both": self._rooms(self._both_bytes),
        }

    def stage_bytes(self, layers: float) -> float:
        """Memory of a stage: optimizer state, activations in flight, and the layer at work.

        1F1B (Narayanan et al., 2021, arXiv:2104.04473) keeps one micro-batch in the last stage and as many as there are
        stages in the first: on average those of half the model's layers, and not less than its own.
        """
        flying = max(layers, self._case.shape.layers / 2)
        return RUNTIME_BYTES + layers * self._case.layer.state_bytes + self._kept(flying)

    def held_bytes(self, placed: Placement) -> Floats:
        """Memory per stage, ends of the model included."""
        ends = placed.has_table * self._case.table.state_bytes + placed.has_head * self._head_bytes
        ends[placed.is_whole] = self._both_bytes
        return np.array([self.stage_bytes(layers) for layers in placed.layers.tolist()]) + ends

    def _kept(self, layers: float) -> float:
        return self._case.activation_bytes(layers, self.rows, recompute=self.recompute)

    def _rooms(self, ends_bytes: float) -> Floats:
        """Layers that fit per device beside an end of the model; below 0 where not even that fits."""
        half = self._case.shape.layers / 2
        free = self._case.profiles.memory_bytes - RUNTIME_BYTES - ends_bytes - self._kept(0)
        each, state = self._kept(1) - self._kept(0), self._case.layer.state_bytes
        few = (free - each * half) / state
        return np.floor(np.where(few <= half, few, np.maximum(free / (state + each), half)) + _ROUNDING)

    def place(self, pipelines: int, limits: Limits) -> Placement | None:
        """Stages for so many pipelines within these limits; None if they do not fit."""
        layers = self._case.shape.layers
        inner = np.maximum(self._most(limits, "neither"), 0.0)
        inner[self._link_s > min(limits.forward_s, limits.backward_s)] = 0.0
        # one pipeline on one device is no pipeline; several are replicas among others
        whole = np.flatnonzero(self._most(limits, "both") >= layers)[: pipelines if pipelines > 1 else 0]
        left = pipelines - len(whole)
        taken = np.zeros(len(inner), dtype=np.bool_)
        taken[whole] = True
        if left == 0:
            return _placed(whole[:0], whole[:0], whole[:0], whole, np.full(len(whole), float(layers)))
        lasts, firsts = self._most(limits, "head"), self._most(limits, "table")
        lasts[(self.receive_s > limits.forward_s) | (self.send_s > limits.backward_s)] = _UNABLE
        firsts[(self.send_s > limits.forward_s) | (self.receive_s > limits.backward_s)] = _UNABLE
        instead = 0 * inner if limits.strong_ends else inner
        last = _cheapest(lasts, instead, taken, left)
        first = _cheapest(firsts, instead, taken, left)
        if len(last) < left or len(first) < left:
            return None
        inner[taken] = 0.0
        needed = left * layers - float(lasts[last].sum() + firsts[first].sum())
        if needed > inner.sum():
            return None
        rest = np.argsort(-inner, kind="stable")
        covered = np.cumsum(inner[rest])
        rest = rest[: int(np.searchsorted(covered, needed)) + 1 if needed > 0 else 0]
        held = np.concatenate([firsts[first], inner[rest], lasts[last], np.full(len(whole), float(layers))])
        return _placed(first, rest, last, whole, held)

    def _most(self, limits: Limits, ends: str) -> Floats:
        """Most layers per device within the limits, beside an end of the model; below 0 where not even that fits."""
        forward_s, backward_s = np.asarray(limits.forward_s), np.asarray(limits.backward_s)
        if ends in ("head", "both"):
            forward_s, backward_s = forward_s - self.head_forward_s, backward_s - self.head_backward_s
        timely = np.minimum(forward_s / self.forward_s, backward_s / self.backward_s)
        if limits.reduction_s < np.inf:
            reducible = limits.reduction_s / self.reduce_s - self._trained[ends]
            timely = np.minimum(timely, reducible / self._case.layer.trained)
        return np.minimum(np.minimum(np.floor(timely + _ROUNDING), self._room[ends]), self._case.shape.layers)


def _placed(first: Ints, inner: Ints, last: Ints, whole: Ints, layers: Floats) -> Placement:
    devices = np.concatenate([first, inner, last, whole])
    places, alone = np.arange(len(devices)), len(devices) - len(whole)
    return Placement(
        devices=devices,
        layers=layers,
        has_table=(places < len(first)) | (places >= alone),
        has_head=places >= len(first) + len(inner),
    )


def _cheapest(end: Floats, inner: Floats, taken: Bools, count: int) -> Ints:
    """Devices on which an end of the model costs the fewest layers; marks them as taken."""
    able = np.flatnonzero((end >= 0) & ~taken)
    chosen = able[np.argsort(inner[able] - end[able], kind="stable")][:count]
    taken[chosen] = True
    return chosen
