"""Alpa: stages on meshes of devices, each stage cut among its mesh by tensor and data parallelism.

Source: Zheng et al., 2022, arXiv:2201.12023; alpa-projects/alpa, pipeline_parallel/stage_construction.py. Layers are
clustered and go to meshes of 1, 2, 4, ... like devices; B micro-batches through stages of t seconds take

    T = sum of t + (B - 1) max t

and a dynamic programme over the largest t (`hybrid`) finds the stages. Inside a mesh of n = d x k devices the batch is
cut d ways and every product k ways (Megatron's cut: two all-reduces of a layer's output forward, two backward, two more
if activations are computed again), whichever d and k are fastest. An all-reduce among n devices of V bytes takes
latency + 2 (n - 1) / n x V / link. Shards are equal, so the slowest device and link of a mesh pace it; Alpa knows
meshes of equal devices only, and sorting the fleet makes them nearly so. Unlike in the published sum, activations
between stages cross links (each device its part, while it computes), and gradients are reduced after the last
micro-batch.
Memory per device: weights and gradients / k, optimizer state / n (the gradients' all-reduce is cut into
reduce-scatter and all-gather), activations in flight / k, on average those of half the model's layers (1F1B).
Knobs: micro-batch, least size of a mesh, least memory of its devices, recomputation. Recovery: restart from a
checkpoint.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import ceil, inf
from typing import Final

import numpy as np

from cleave.core.cost.resident import effective_flops_per_s
from cleave.core.cost.terms import RUNTIME_BYTES
from cleave.core.fleet.profiles import Floats, Ints
from cleave.core.plan.rivals.case import TRAINED_BYTES, WEIGHT_BYTES, Case, plural, too_small
from cleave.core.plan.rivals.reduction import byte_s
from cleave.core.plan.rivals.stages import Placement
from cleave.sim.baselines import recovery
from cleave.sim.baselines.hybrid import EVERY_END, Ends, Partition, Stage, Table, neighbors, orders, runs, search
from cleave.sim.baselines.work import case_of, unfit
from cleave.sim.setting import Outcome, Setting

NAME: Final = "alpa"
_CLUSTERS = 96
"""Layers are clustered into this many at most: into ones for every known model."""
_UNITS = 256
_STEP = 2
"""Factor between the least meshes, and between the micro-batches, that are tried."""
_CUTS = (1, 2, 4, 8)
"""Devices are tried that hold one of so many parts of a layer; smaller ones would limit their mesh."""
_GRADIENT_BYTES = 2
"""Of the 14 bytes of a trained parameter besides its weight, those that data parallelism does not cut."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Use:
    """Meshes of `data` x `tensor` devices with stages, by items (one, two, ...) and first unit."""

    data: int
    tensor: int
    path_s: Floats
    """With the reduction of gradients, if there is a single micro-batch."""
    pace_s: Floats
    """With a part of the reduction, so that all micro-batches but one have all of it."""
    held_bytes: Floats
    """Per device, by items; the same for `moved_bytes`, which is per batch and way."""
    moved_bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Meshed:
    meshes: Meshes
    partition: Partition
    step_s: float


def alpa(setting: Setting) -> Outcome:
    case = case_of(setting)
    found = fastest(case)
    if found is None:
        return unfit(NAME, _why_not(case))
    meshes, stages = found.meshes, found.partition.stages
    uses = [meshes.best_use(stage) for stage in stages]
    groups = [meshes.members(stage) for stage in stages]
    count = [len(members) for members in groups]
    places = np.repeat(np.arange(len(stages)), count)
    layers = [float(meshes.layers_of(stage.layers)) for stage in stages]
    placed = Placement(
        devices=np.concatenate(groups),
        # a device's part of its stage, which is what a successor needs
        layers=np.repeat([number / use.tensor for number, use in zip(layers, uses, strict=True)], count),
        has_table=places == 0,
        has_head=places == len(stages) - 1,
    )
    loss = recovery.loss_of(case, placed, found.step_s, found.partition.path_s)
    tensor, data = max(use.tensor for use in uses), max(use.data for use in uses)
    moved = max(float(use.moved_bytes[stage.items - 1]) for use, stage in zip(uses, stages, strict=True))
    return Outcome(
        system=NAME,
        fits=True,
        reason=f"{plural(len(stages), 'stage')} on meshes of up to {plural(max(count), 'device')}, "
        + (f"products cut up to {tensor} ways, " if tensor > 1 else "")
        + (f"data up to {data} ways, " if data > 1 else "")
        + f"micro-batches of {plural(meshes.micro_batch, 'sequence')}"
        + (", recomputing activations" if meshes.recompute else ""),
        batch_s=found.step_s,
        down_bytes=moved,
        up_bytes=moved,
        memory_bytes=max(float(use.held_bytes[stage.items - 1]) for use, stage in zip(uses, stages, strict=True)),
        devices_used=len(placed.devices),
        recovery_s=recovery.checkpoint_restart(loss),
        detail={
            "stages": len(stages),
            "tensor_ways": tensor,
            "data_ways": data,
            "micro_batch": meshes.micro_batch,
            "recomputes": int(meshes.recompute),
            "recovery": "restart",
        },
    )


def fastest(case: Case) -> Meshed | None:
    """The best micro-batch, least mesh and use of memory; None if nothing fits."""
    best: Meshed | None = None
    for recompute, order in product((False, True), _orders(case)):
        per_unit = 1
        while per_unit <= len(order):
            count = min(len(order) // per_unit, _UNITS)
            units = order[: count * per_unit].reshape(count, per_unit)
            micro_batch, last_s = 1, inf
            while micro_batch <= case.sequences:
                below_s = best.step_s if best else inf
                meshes = Meshes(case, units, micro_batch, below_s, recompute=recompute)
                found = _partition(case, meshes, below_s) if meshes.least_s < below_s else None
                if found is not None and found.step_s < below_s:
                    best = found
                found_s = found.step_s if found else inf
                if last_s < inf and found_s >= last_s:  # larger ones only get slower
                    break
                last_s = found_s
                micro_batch *= _STEP
            per_unit *= _STEP
    return best


def _orders(case: Case) -> list[Ints]:
    """Devices by the pace of a layer, by speed, and by pace those that hold a layer cut in so many ways."""
    by_speed, by_pace = orders(case)
    cluster = ceil(case.shape.layers / _CLUSTERS)
    held_bytes = cluster * case.layer.state_bytes
    held_bytes += case.activation_bytes(case.shape.layers / 2, case.sequence, recompute=True)
    found = [by_pace, by_speed]
    for ways in _CUTS:
        able = by_pace[case.profiles.memory_bytes[by_pace] >= RUNTIME_BYTES + held_bytes / ways]
        if len(able) < len(by_pace):
            found.append(able)
    return found


def _partition(case: Case, meshes: Meshes, below_s: float) -> Meshed | None:
    tables: dict[Ends, Table] = {ends: meshes.table(ends) for ends in EVERY_END}
    found = search(tables, meshes.sizes, meshes.clusters + 2, meshes.batches, below_s)
    if found is None:
        return None
    moved = np.zeros(len(case.profiles))
    for stage in found.stages:
        moved[meshes.members(stage)] = 2 * meshes.best_use(stage).moved_bytes[stage.items - 1]
    return Meshed(meshes=meshes, partition=found, step_s=max(found.step_s, case.medium_s(moved)))


class Meshes:
    """What stages on meshes of consecutive units take, for one size of micro-batch in sequences."""

    def __init__(self, case: Case, units: Ints, micro_batch: int, below_s: float = inf, *, recompute: bool) -> None:
        self._case, self._units, self.micro_batch, self.recompute = case, units, micro_batch, recompute
        self.batches = case.sequences / micro_batch
        self._longest_s = below_s / max(self.batches - 1, 1)
        self._cluster = ceil(case.shape.layers / _CLUSTERS)
        self.clusters = ceil(case.shape.layers / self._cluster)
        self.sizes = 2 ** np.arange(int(np.log2(len(units))) + 1)
        profiles = case.profiles
        speed = effective_flops_per_s(profiles.flops_per_s, case.sequence, case.terms)
        self._speed = runs(speed[units].min(axis=1), self.sizes, np.minimum, 1.0)
        self._byte_s = runs(byte_s(profiles)[units].max(axis=1), self.sizes, np.maximum, 0.0)
        self._latency_s = runs(profiles.latency_s[units].max(axis=1), self.sizes, np.maximum, 0.0)
        self._memory = runs(profiles.memory_bytes[units].min(axis=1), self.sizes, np.minimum, -inf)

    def members(self, stage: Stage) -> Ints:
        return self._units[stage.unit : stage.unit + stage.units].ravel()

    def layers_of(self, clusters: int) -> int:
        """Layers in so many clusters; the last one may have fewer."""
        return min(clusters * self._cluster, self._case.shape.layers)

    def _layers(self, ends: Ends) -> Floats:
        """Layers of a stage by items, of which the ends have none."""
        clusters = np.arange(1.0, self.clusters + 3 - neighbors(ends)) - 2 + neighbors(ends)
        return np.minimum(clusters * self._cluster, self._case.shape.layers)

    @property
    def least_s(self) -> float:
        """A lower bound: all FLOPs over the speed of all."""
        speeds = self._speed[:, 0].sum() * self._units.shape[1]
        return sum(self._case.step_flops(recompute=self.recompute)) / float(speeds)

    def table(self, ends: Ends) -> Table:
        shape = len(self._layers(ends)), len(self._units), len(self.sizes)
        path_s, pace_s = np.full(shape, inf), np.full(shape, inf)
        for place in range(len(self.sizes)):
            best_s = np.full(shape[:2], inf)
            for use in self.uses_of(place, ends):
                most = len(use.held_bytes)
                step_s = use.path_s + (self.batches - 1) * use.pace_s
                better = (step_s < best_s[:most]) & (use.held_bytes[:, None] <= self._memory[:, place])
                best_s[:most][better] = step_s[better]
                path_s[:most, :, place][better], pace_s[:most, :, place][better] = (
                    use.path_s[better],
                    use.pace_s[better],
                )
        return Table(path_s=path_s, pace_s=pace_s)

    def best_use(self, stage: Stage) -> Use:
        """How a stage is cut on its mesh."""
        place, row = int(np.flatnonzero(self.sizes == stage.units)[0]), stage.items - 1
        uses = [
            use
            for use in self.uses_of(place, stage.ends)
            if row < len(use.held_bytes) and use.held_bytes[row] <= self._memory[stage.unit, place]
        ]
        return min(
            uses, key=lambda use: use.path_s[row, stage.unit] + (self.batches - 1) * float(use.pace_s[row, stage.unit])
        )

    def uses_of(self, place: int, ends: Ends) -> list[Use]:
        """All ways to cut stages on meshes of that size."""
        devices = int(self.sizes[place]) * self._units.shape[1]
        found: list[Use] = []
        tensor = 1
        while tensor <= min(devices, self._case.shape.heads):
            if devices % tensor == 0 and devices // tensor <= self.micro_batch:
                use = self._use(place, ends, devices // tensor, tensor)
                if use is not None:
                    found.append(use)
            tensor *= 2
        return found

    def _use(self, place: int, ends: Ends, data: int, tensor: int) -> Use | None:
        """For as many clusters as a mesh of that size holds and computes in time; None if not even for one."""
        case, speed = self._case, self._speed[:, place]
        byte_s, latency_s = self._byte_s[:, place], self._latency_s[:, place]
        rows = ceil(self.micro_batch / data) * case.sequence
        held_bytes, gradient_bytes = self._held(ends, rows, data, tensor)
        again = case.layer.forward_flops if self.recompute else 0.0
        output_bytes, around, shared = rows * case.row_bytes, 2 * (tensor - 1) / tensor, 2 * (data - 1) / data
        once_s = (tensor > 1) * (latency_s + around * output_bytes * byte_s)
        backwards = 4 if self.recompute else 2
        layer_s = rows * case.layer.forward_flops / tensor / speed + 2 * once_s
        layer_back_s = rows * (case.layer.backward_flops + again) / tensor / speed + backwards * once_s
        fits = held_bytes <= self._memory[:, place].max()
        most = int((fits & (self._layers(ends) * (layer_s + layer_back_s).min() <= self._longest_s)).sum())
        if most == 0:
            return None
        held_bytes, gradient_bytes = held_bytes[:most], gradient_bytes[:most]
        layers, head = self._layers(ends)[:most, None], ends in ("head", "both")
        forward_s = layers * layer_s + rows * head * case.head.forward_flops / tensor / speed
        backward_s = layers * layer_back_s + rows * head * case.head.backward_flops / tensor / speed
        link_s = output_bytes / tensor * byte_s * (neighbors(ends) > 0)
        path_s = forward_s + backward_s + neighbors(ends) * (link_s + latency_s)
        pace_s = np.maximum(forward_s, link_s) + np.maximum(backward_s, link_s)
        reduce_s = shared * gradient_bytes[:, None] * byte_s
        if self.batches > 1:
            pace_s = pace_s + reduce_s / (self.batches - 1)
        else:
            path_s = path_s + reduce_s
        passed = neighbors(ends) * output_bytes / tensor + (2 + backwards) * layers[:, 0] * around * output_bytes
        return Use(
            data=data,
            tensor=tensor,
            path_s=path_s,
            pace_s=pace_s,
            held_bytes=held_bytes,
            moved_bytes=self.batches * passed + shared * gradient_bytes,
        )

    def _held(self, ends: Ends, rows: int, data: int, tensor: int) -> tuple[Floats, Floats]:
        """By items: bytes that a device holds, and those of its gradients."""
        case, layers = self._case, self._layers(ends)
        head = ends in ("head", "both")
        parts = {"neither": (), "table": (case.table,), "head": (case.head,), "both": (case.table, case.head)}[ends]
        params = layers * case.layer.params + sum(part.params for part in parts)
        trained = layers * case.layer.trained + sum(part.trained for part in parts)
        if ends == "both":  # a table that is also the head counts once
            params, trained = layers * 0 + case.whole.params, layers * 0 + case.whole.trained
        state = WEIGHT_BYTES * params + _GRADIENT_BYTES * trained
        state += (TRAINED_BYTES - _GRADIENT_BYTES) * trained / data
        one, two = (case.activation_bytes(count, rows, recompute=self.recompute) for count in (1, 2))
        flying = one + (two - one) * (np.maximum(layers, case.shape.layers / 2) - 1)
        held = RUNTIME_BYTES + (state + flying + head * case.logit_bytes(rows)) / tensor
        return held, case.terms.gradient_bytes * trained / tensor


def _why_not(case: Case) -> str:
    """The smallest stage, cut in as many ways as Alpa can."""
    cluster = ceil(case.shape.layers / _CLUSTERS)
    ways = 1 << (min(case.shape.heads, len(case.profiles)).bit_length() - 1)
    state = cluster * case.layer.state_bytes
    needed = (
        RUNTIME_BYTES + (state + case.activation_bytes(case.shape.layers / 2, case.sequence, recompute=True)) / ways
    )
    what = f"a stage of {plural(cluster, 'layer')}, cut {ways} ways,"
    if case.profiles.memory_bytes.max() < needed:
        return too_small(what, needed, case.profiles)
    together = case.profiles.memory_bytes.sum() / 1e9
    return (
        f"{case.shape.layers} layers need {case.whole.state_bytes / 1e9:,.3g} GB with their optimizer, and no meshes "
        f"of {plural(len(case.profiles), 'device')} with {together:,.3g} GB together hold them"
    )
