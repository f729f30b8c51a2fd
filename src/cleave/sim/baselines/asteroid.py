"""Asteroid: a pipeline whose stages are groups of unequal devices that share each micro-batch.

Source: Ye et al., 2024, arXiv:2408.08015. A micro-batch of y sequences is divided within a stage in proportion to
speed, a sequence at least for each member, whatever its memory holds at most. With F and V the FLOPs of a sequence and
the FLOP/s of the group, each direction takes max(y F / V, F / slowest member), members send and receive their parts
side by side, and gradients are reduced by a ring, 2 (n - 1) / n of their bytes over the slowest link. The planner is a
dynamic programme over sorted devices and layers (`hybrid`); its largest pace counts a stage's reduction too:

    batch = sum of a micro-batch's seconds on its way + max of (B - 1) (max(f, e) + max(b, e)) + reduction

Memory: 16 bytes a parameter of the whole stage on each member; activations of its sequences for the micro-batches in
flight, on average half the model's layers (1F1B; see `core/plan/rivals/stages.py`).
Knobs: sequences per micro-batch, how finely groups are formed and so how many devices take part, recomputation.
Recovery: `recovery.asteroid`.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import inf
from typing import Final

import numpy as np

from cleave.core.cost.resident import effective_flops_per_s
from cleave.core.cost.terms import RUNTIME_BYTES
from cleave.core.fleet.profiles import Floats, Ints
from cleave.core.plan.rivals.case import Case, plural
from cleave.core.plan.rivals.pipeline import why_not
from cleave.core.plan.rivals.reduction import byte_s
from cleave.core.plan.rivals.stages import Placement
from cleave.sim.baselines import recovery
from cleave.sim.baselines.hybrid import EVERY_END, Ends, Partition, Table, neighbors, orders, runs, search
from cleave.sim.baselines.work import case_of, unfit
from cleave.sim.setting import Outcome, Setting

NAME: Final = "asteroid"
_UNITS = 128
"""Units at least; twice as many as layers, so that stages of one unit can be chosen among others."""
_SIZES = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64])
_STEP = 2
"""Factor between the sizes of units, and of micro-batches, that are tried."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Grouped:
    """Devices in units, and how they are used."""

    units: Ints
    """Shape (units, devices)."""
    micro_batch: int
    """Sequences."""
    recompute: bool
    partition: Partition
    step_s: float


def asteroid(setting: Setting) -> Outcome:
    case = case_of(setting)
    found = fastest(case)
    if found is None:
        return unfit(NAME, why_not(case))
    rooms = Rooms(case, found.units, found.micro_batch, recompute=found.recompute)
    groups = [found.units[stage.unit : stage.unit + stage.units].ravel() for stage in found.partition.stages]
    moved, held = np.zeros(len(case.profiles)), 0.0
    for stage, members in zip(found.partition.stages, groups, strict=True):
        sequences = rooms.shares(members, stage.layers, stage.ends)
        moved[members] += rooms.moved_bytes(members, sequences, stage.layers, stage.ends)
        held = max(held, float(rooms.held_bytes(sequences, stage.layers, stage.ends).max()))
    count = [len(members) for members in groups]
    layers = np.repeat([float(stage.layers) for stage in found.partition.stages], count)
    places = np.repeat(np.arange(len(groups)), count)
    placed = Placement(
        devices=np.concatenate(groups),
        layers=layers,
        has_table=places == 0,
        has_head=places == len(groups) - 1,
    )
    loss = recovery.loss_of(case, placed, found.step_s, found.partition.path_s)
    fewest, most = min(count), max(count)
    members = plural(most, "device") if fewest == most else f"{fewest} to {most} devices"
    return Outcome(
        system=NAME,
        fits=True,
        reason=f"{plural(len(groups), 'stage')} of {members} with up to {plural(layers.max(), 'layer')}, "
        f"micro-batches of {plural(found.micro_batch, 'sequence')}"
        + (", recomputing activations" if found.recompute else ""),
        batch_s=found.step_s,
        down_bytes=float(moved.max()),
        up_bytes=float(moved.max()),
        memory_bytes=held,
        devices_used=len(placed.devices),
        recovery_s=recovery.asteroid(loss, np.repeat(count, count) > 1),
        detail={
            "stages": len(groups),
            "micro_batch": found.micro_batch,
            "recomputes": int(found.recompute),
            "recovery": "asteroid",
        },
    )


def fastest(case: Case) -> Grouped | None:
    """The best micro-batch, units and use of memory; None if nothing fits."""
    best: Grouped | None = None
    most_units = max(_UNITS, 2 * case.shape.layers)
    for recompute, order in product((False, True), orders(case)):
        able = able_of(case, order, recompute=recompute)
        per_unit = 1
        while per_unit <= min(len(able), case.sequences):
            count = min(len(able) // per_unit, most_units)
            units = able[: count * per_unit].reshape(count, per_unit)
            micro_batch = per_unit
            while micro_batch <= case.sequences:
                below_s = best.step_s if best else inf
                found = partition(case, units, micro_batch, below_s, recompute=recompute)
                if found is not None and found.step_s < below_s:
                    best = found
                micro_batch *= _STEP
            per_unit *= _STEP
    return best


def able_of(case: Case, order: Ints, *, recompute: bool) -> Ints:
    """Those of some devices that hold a layer."""
    least = RUNTIME_BYTES + case.layer.state_bytes + _kept(case, 1, recompute=recompute)
    return order[case.profiles.memory_bytes[order] >= least]


def partition(
    case: Case,
    units: Ints,
    micro_batch: int,
    below_s: float = inf,
    *,
    recompute: bool,
    most_units: int = int(_SIZES[-1]),
) -> Grouped | None:
    """The best stages, of so many units at most; None if none fit, or none could be faster than `below_s`."""
    if not len(units):
        return None
    rooms = Rooms(case, units, micro_batch, recompute=recompute)
    sizes = _SIZES[: int(np.searchsorted(_SIZES, min(len(units), most_units), side="right"))]
    most = rooms.most_layers()
    if most == 0:
        return None
    tables: dict[Ends, Table] = {ends: rooms.table(sizes, most, ends) for ends in EVERY_END}
    found = search(tables, sizes, case.shape.layers + 2, rooms.batches, below_s)
    if found is None:
        return None
    moved = np.zeros(len(case.profiles))
    for stage in found.stages:
        members = units[stage.unit : stage.unit + stage.units].ravel()
        sequences = rooms.shares(members, stage.layers, stage.ends)
        moved[members] += rooms.moved_bytes(members, sequences, stage.layers, stage.ends)
    return Grouped(
        units=units,
        micro_batch=micro_batch,
        recompute=recompute,
        partition=found,
        step_s=max(found.step_s, case.medium_s(2 * moved)),
    )


def _kept(case: Case, layers: float, *, recompute: bool) -> float:
    """Bytes of a sequence's activations, for a stage of so many layers."""
    return case.activation_bytes(max(layers, case.shape.layers / 2), case.sequence, recompute=recompute)


class Rooms:
    """What stages of consecutive units hold and take, for one size of micro-batch."""

    def __init__(self, case: Case, units: Ints, micro_batch: int, *, recompute: bool) -> None:
        self._case, self._units, self._micro_batch, self._recompute = case, units, micro_batch, recompute
        self.batches = case.sequences / micro_batch
        self._speed = effective_flops_per_s(case.profiles.flops_per_s, case.sequence, case.terms)
        self._byte_s = byte_s(case.profiles)

    def most_layers(self) -> int:
        """The most layers that any device holds, for one sequence at a time."""
        free = float(self._case.profiles.memory_bytes[self._units].max()) - self.fixed_bytes(0, "neither")
        each = self._case.layer.state_bytes
        most = int((free - _kept(self._case, 0, recompute=self._recompute)) / each)
        return max(min(most, self._case.shape.layers), 0)

    def fixed_bytes(self, layers: int, ends: Ends) -> float:
        """Bytes that do not depend on the number of sequences."""
        case = self._case
        if ends == "both":
            return RUNTIME_BYTES + case.whole.state_bytes
        table, head = (ends == "table") * case.table.state_bytes, (ends == "head") * case.head.state_bytes
        return RUNTIME_BYTES + layers * case.layer.state_bytes + table + head

    def sequence_bytes(self, layers: int, ends: Ends) -> float:
        logits = self._case.logit_bytes(self._case.sequence) if ends in ("head", "both") else 0.0
        return _kept(self._case, layers, recompute=self._recompute) + logits

    def held_bytes(self, sequences: Floats, layers: int, ends: Ends) -> Floats:
        return self.fixed_bytes(layers, ends) + np.ceil(sequences) * self.sequence_bytes(layers, ends)

    def shares(self, members: Ints, layers: int, ends: Ends) -> Floats:
        """Sequences of a micro-batch per member: in proportion to speed, and what memory holds at most."""
        speed = self._speed[members]
        wanted = np.maximum(self._micro_batch * speed / speed.sum(), 1.0)
        room = self._case.profiles.memory_bytes[members] - self.fixed_bytes(layers, ends)
        return np.minimum(wanted, np.floor(room / self.sequence_bytes(layers, ends)))

    def moved_bytes(self, members: Ints, sequences: Floats, layers: int, ends: Ends) -> Floats:
        """What each member receives in a batch, and sends as well."""
        case, count = self._case, len(members)
        passed = neighbors(ends) * self.batches * sequences * case.sequence * case.row_bytes
        return passed + 2 * (count - 1) / count * self._gradient_bytes(layers, ends)

    def table(self, sizes: Ints, most: int, ends: Ends) -> Table:
        """Seconds of stages with up to `most` layers."""
        case, units = self._case, self._units
        number = np.arange(1, most + 3 - neighbors(ends)) - 2 + neighbors(ends)
        head = ends in ("head", "both")
        once = case.layer.forward_flops if self._recompute else 0.0
        rows = case.sequence
        forward = rows * (number * case.layer.forward_flops + head * case.head.forward_flops)
        backward = rows * (number * (case.layer.backward_flops + once) + head * case.head.backward_flops)
        speed = self._speed[units]
        total = runs(speed.sum(axis=1), sizes, np.add, 1.0)
        slowest = runs(speed.min(axis=1), sizes, np.minimum, 1.0)
        per_flop_s = np.maximum(self._micro_batch / total, 1 / slowest)
        link_s = self._link_s(sizes, total) * (neighbors(ends) > 0)
        latency_s = runs(case.profiles.latency_s[units].max(axis=1), sizes, np.maximum, 0.0) * neighbors(ends)
        forward_s, backward_s = forward[:, None, None] * per_flop_s, backward[:, None, None] * per_flop_s
        path_s = forward_s + backward_s + neighbors(ends) * link_s + latency_s
        pace_s = np.maximum(forward_s, link_s) + np.maximum(backward_s, link_s)
        members = sizes * units.shape[1]
        slow_byte_s = runs(self._byte_s[units].max(axis=1), sizes, np.maximum, 0.0)
        gradients = np.array([self._gradient_bytes(int(layers), ends) for layers in number])
        reduce_s = gradients[:, None, None] * np.where(members > 1, 2 * (members - 1) / members * slow_byte_s, 0.0)
        if self.batches > 1:
            pace_s = pace_s + reduce_s / (self.batches - 1)
        else:
            path_s = path_s + reduce_s
        fits = self._fits(sizes, number, ends)
        return Table(path_s=np.where(fits, path_s, inf), pace_s=np.where(fits, pace_s, inf))

    def _link_s(self, sizes: Ints, total: Floats) -> Floats:
        """Seconds in which the slowest member passes on its part of a micro-batch."""
        each_s = self._case.sequence * self._case.row_bytes * self._byte_s[self._units]
        longest_s = runs(each_s.max(axis=1), sizes, np.maximum, 0.0)
        heaviest = runs((each_s * self._speed[self._units]).max(axis=1), sizes, np.maximum, 0.0)
        return np.maximum(self._micro_batch * heaviest / total, longest_s)

    def _fits(self, sizes: Ints, number: Ints, ends: Ends) -> np.ndarray[tuple[int, ...], np.dtype[np.bool_]]:
        """Whether every member holds a sequence and all together the micro-batch."""
        memory = self._case.profiles.memory_bytes[self._units]
        fixed = np.array([self.fixed_bytes(int(layers), ends) for layers in number])[:, None, None]
        each = np.array([self.sequence_bytes(int(layers), ends) for layers in number])[:, None, None]
        room = np.floor((memory - fixed) / each)
        least = runs(room.min(axis=2), sizes, np.minimum, -inf)
        together = runs(room.sum(axis=2), sizes, np.add, -inf)
        return (least >= 1) & (together >= self._micro_batch) & (sizes * self._units.shape[1] <= self._micro_batch)

    def _gradient_bytes(self, layers: int, ends: Ends) -> float:
        case = self._case
        if ends == "both":
            return case.terms.gradient_bytes * case.whole.trained
        table, head = (ends == "table") * case.table.trained, (ends == "head") * case.head.trained
        return case.terms.gradient_bytes * (layers * case.layer.trained + table + head)
