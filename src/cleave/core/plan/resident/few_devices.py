"""Plan a named model on few devices as the live server would: by its search, in the terms of plans for named models.

The search for large fleets (`large_fleet`) fills columns greedily, which may leave a handful of devices unbalanced.
Here the nearly exhaustive search of `small_fleet` does the same work, and `step` takes the faster of the two plans.
"""

from __future__ import annotations

import numpy as np

from cleave.core.cost.rates import Server
from cleave.core.cost.resident import sum_up
from cleave.core.cost.terms import lean_terms
from cleave.core.cost.wire import WireFormat
from cleave.core.fleet.profiles import Ints, Profiles
from cleave.core.model.shapes import ModelShape
from cleave.core.model.sublayers import sublayers_of
from cleave.core.plan.resident.cover import Recipe
from cleave.core.plan.resident.large_fleet import ModelPlan, Round
from cleave.core.plan.resident.problem import Leasing, Problem, pose
from cleave.core.plan.resident.search import area_bound_s
from cleave.core.plan.resident.small_fleet import plan_columns
from cleave.core.plan.resident.stages import Column, ResidentPlan

FEW = 16
_CHUNKS = (16, 64, 256, 1024)


def plan_few(
    profiles: Profiles,
    shape: ModelShape,
    tokens: int,
    *,
    sequence: int,
    wire: WireFormat,
    server: Server,
    leasing: Leasing | None = None,
) -> ModelPlan:
    """A plan for the strongest `FEW` devices; InfeasibleError if their memory does not hold the model at once."""
    everyone, profiles = profiles, profiles.take(_strongest(profiles))
    lease_states = None if leasing is None else leasing.states
    problem = pose_model(profiles, shape, tokens, sequence=sequence, wire=wire, server=server, leasing=leasing)
    plan = plan_columns(problem, chunks=_CHUNKS)
    return ModelPlan(
        lease_states=lease_states,
        shape=shape,
        tokens=tokens,
        sequence=sequence,
        wire=wire,
        rounds=(
            Round(
                plan=plan,
                recipe=Recipe(chunk=plan.chunk),
                synchronisation_s=min(_synchronisation_s(problem, plan), plan.busiest_s),
            ),
        ),
        bound_s=min(area_bound_s(profiles, problem.sums, tokens, is_held=True, lease_states=lease_states), plan.step_s),
        left_out={
            name: "speed: the step would take longer with it" for name in everyone.names if name not in plan.devices
        },
    )


def pose_model(
    profiles: Profiles,
    shape: ModelShape,
    tokens: int,
    *,
    sequence: int,
    wire: WireFormat,
    server: Server,
    leasing: Leasing | None = None,
) -> Problem:
    """The problem of a step of a named model."""
    return pose(
        profiles,
        sublayers_of(shape),
        hidden=shape.hidden,
        sequences=tokens // sequence,
        sequence=sequence,
        terms=lean_terms(wire),
        wants_dx=not shape.adapter_rank,  # adapters leave the token table as it is
        server=server,
        medium_bytes_per_s=profiles.common_medium_bytes_per_s,
        leasing=leasing,
    )


def least_few_s(
    profiles: Profiles, shape: ModelShape, tokens: int, sequence: int, wire: WireFormat, leasing: Leasing
) -> float:
    """A lower bound on the step of `plan_few`."""
    sums = sum_up(sublayers_of(shape), hidden=shape.hidden, sequence=sequence, terms=lean_terms(wire))
    few = profiles.take(_strongest(profiles))
    return area_bound_s(few, sums, tokens, is_held=True, lease_states=leasing.states)


def _strongest(profiles: Profiles) -> Ints:
    """The `FEW` devices with the most compute x uplink, in their order."""
    strength = profiles.flops_per_s * profiles.up_bytes_per_s
    return np.sort(np.argsort(-strength, kind="stable")[:FEW])


def _synchronisation_s(problem: Problem, plan: ResidentPlan) -> float:
    """Seconds that the busiest device spends on weights and gradients; the rest is rows."""
    profiles, terms = problem.profiles, problem.sums.terms
    links_s = terms.weight_bytes / profiles.down_bytes_per_s + terms.gradient_bytes / profiles.up_bytes_per_s
    number_s = dict(zip(profiles.names, links_s.tolist(), strict=True))
    return max(
        number_s[holding.device] * _synchronised(problem, column)
        for stage in plan.stages
        for column in stage.columns
        for holding in column.holdings
    )


def _synchronised(problem: Problem, column: Column) -> float:
    """Trained numbers of a column that cross its holders' links in a step."""
    held = problem.sums.sublayers[column.shard.first : column.shard.stop]
    return sum(one.unleased if column.is_leased else one.trained / column.shard.of for one in held)
