"""A plan of columns as a tiling of the plane tokens x parameters, and the value of one more device.

Parameters run along one side in the order of the sublayers (a slice is a part of its sublayer), tokens along the other;
a device's unit is a rectangle of whole tokens. For reports, pictures and tests: no search, no cost formulas.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cleave.core.cost.resident import sum_up
from cleave.core.cost.terms import lean_terms
from cleave.core.fleet.profiles import DeviceId, Floats, Ints, Profiles
from cleave.core.model.sublayers import sublayers_of
from cleave.core.plan.resident.large_fleet import ModelPlan
from cleave.core.plan.resident.search import area_bound_s

_FINE = 1e-8
_QUARTERS = ("slowest quarter", "second quarter", "third quarter", "fastest quarter")


class Tile(NamedTuple):
    """The work of one device in one round."""

    device: DeviceId
    stage: int
    part: int
    """index of the slice in the stage"""
    params: tuple[float, float]
    tokens: tuple[int, int]


def tiles(plan: ModelPlan) -> tuple[Tile, ...]:
    """One tile per device and round, column by column."""
    sizes = [sublayer.params for sublayer in sublayers_of(plan.shape)]
    begins = np.concatenate([[0], np.cumsum(sizes)])
    found: list[Tile] = []
    for number, stage in enumerate(plan.stages):
        left, right = float(begins[stage.first]), float(begins[stage.first + stage.count])
        width = (right - left) / len(stage.columns)
        for part, column in enumerate(stage.columns):
            sequences = np.cumsum([holding.sequences for holding in column.holdings])
            ends = np.rint(sequences * plan.sequence).astype(np.int64).tolist()
            sides = left + part * width, left + (part + 1) * width
            for holding, top, bottom in zip(column.holdings, [0, *ends[:-1]], ends, strict=True):
                found.append(Tile(holding.device, number, part, sides, (top, bottom)))
    return tuple(found)


def worth_of_one_more(plan: ModelPlan, profiles: Profiles) -> dict[str, float]:
    """Seconds that one more device of each kind would save: the typical one of a class, or of a quartile by uplink.

    Scaled from the drop of the fluid bound: a plan of a thousand devices changes in steps coarser than one device.
    """
    shape = plan.shape
    whole = sum_up(sublayers_of(shape), hidden=shape.hidden, sequence=plan.sequence, terms=lean_terms(plan.wire))
    is_held = len(plan.rounds) == 1

    def bound_s(fleet: Profiles) -> float:
        return area_bound_s(fleet, whole, plan.tokens, is_held=is_held, lease_states=plan.lease_states, tolerance=_FINE)

    now_s = bound_s(profiles)
    return {
        kind: plan.step_s * (1 - bound_s(_with_one_more(profiles, members)) / now_s)
        for kind, members in _kinds(profiles).items()
    }


def _kinds(profiles: Profiles) -> dict[str, Ints]:
    classes = np.array(profiles.device_class)
    if (classes != "").any():
        return {str(name): np.flatnonzero(classes == name) for name in dict.fromkeys(classes.tolist()) if name}
    order = np.argsort(profiles.up_bytes_per_s, kind="stable")
    quarters = zip(_QUARTERS, np.array_split(order, len(_QUARTERS)), strict=True)
    return {name: members for name, members in quarters if len(members)}


def _with_one_more(profiles: Profiles, members: Ints) -> Profiles:
    def column(values: Floats) -> Floats:
        return np.append(values, np.median(values[members]))

    return Profiles(
        names=tuple(map(str, range(len(profiles) + 1))),
        flops_per_s=column(profiles.flops_per_s),
        down_bytes_per_s=column(profiles.down_bytes_per_s),
        up_bytes_per_s=column(profiles.up_bytes_per_s),
        latency_s=column(profiles.latency_s),
        memory_bytes=column(profiles.memory_bytes),
    )
