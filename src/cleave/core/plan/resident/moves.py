"""What moves when one plan follows another, by the law of `core/cost/move.py`.

A lease outlives a change of plan: only shards that another device is to keep, or that have other borders, come up as a
whole, and what changes its device goes down.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from cleave.core.cost.lease import snapshot_bytes
from cleave.core.cost.move import amortized_s, move_s
from cleave.core.fleet.profiles import DeviceId, Floats
from cleave.core.model.shard import Shard
from cleave.core.plan.resident.problem import Problem
from cleave.core.plan.resident.stages import Column, ResidentPlan

_Held = Mapping[tuple[DeviceId, object], float]
"""Numbers of weights by device, and by what they belong to."""


def cost_s(problem: Problem, before: ResidentPlan, plan: ResidentPlan) -> float:
    """Seconds of a plan's step, with its part of the move from the plan before it."""
    return amortized_s(plan.step_s, moving_s(problem, before, plan))


def moving_s(problem: Problem, before: ResidentPlan, plan: ResidentPlan) -> float:
    """Seconds that it takes once to begin a plan where devices hold what an earlier one gave them."""
    profiles, leasing = problem.profiles, problem.leasing
    frozen_before, frozen = _frozen(problem, before), _frozen(problem, plan)
    missing = {key: numbers for key, numbers in frozen.items() if key not in frozen_before}
    down = problem.sums.terms.weight_bytes * _by_device(problem, missing)
    up = np.zeros(len(profiles))
    if leasing is not None:
        there, then = before.leased, plan.leased
        leaving = {shard: device for shard, device in there.items() if then.get(shard) != device}
        held, wanted = _lent(problem, there), _lent(problem, then)
        arriving = {key: numbers for key, numbers in wanted.items() if key not in held}
        up += snapshot_bytes(_by_device(problem, _lent(problem, leaving)), leasing.states)
        down += snapshot_bytes(_by_device(problem, arriving), leasing.states)
    return move_s(up, down, profiles, problem.medium_bytes_per_s)


def _lent(problem: Problem, leased: Mapping[Shard, DeviceId]) -> _Held:
    """Weights that devices keep with their optimizer states."""
    sublayers = problem.sums.sublayers
    return {
        (device, number): float(sublayers[number].trained - sublayers[number].unleased)
        for shard, device in leased.items()
        for number in range(shard.first, shard.stop)
    }


def _frozen(problem: Problem, plan: ResidentPlan) -> _Held:
    """Weights that are not trained."""
    sublayers = problem.sums.sublayers
    return {
        (holding.device, (number, column.shard.index, column.shard.of)): (
            float(sublayers[number].params - sublayers[number].trained) / column.shard.of
        )
        for column in _columns(plan)
        for holding in column.holdings
        for number in range(column.shard.first, column.shard.stop)
    }


def _columns(plan: ResidentPlan) -> Iterator[Column]:
    return (column for stage in plan.stages for column in stage.columns)


def _by_device(problem: Problem, held: _Held) -> Floats:
    """Numbers per device of the fleet; a device that has left returns nothing."""
    places = {name: place for place, name in enumerate(problem.profiles.names)}
    total = np.zeros(len(places))
    for (device, _), numbers in held.items():
        if device in places:
            total[places[device]] += numbers
    return total
