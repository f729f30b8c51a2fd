"""What a plan takes of each device: seconds of computing and bytes, in the order of a fleet's profiles.

By the laws of `core/cost` that the planner itself uses. Totals of bytes are the plan's own; devices that share them are
charged by the rows and weights they hold.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cleave.core.carbon.energy import Use
from cleave.core.cost.gemm import compute_s, unit_costs
from cleave.core.cost.lease import update_s
from cleave.core.cost.resident import SublayerSums, compute_s_per_row, shard_costs, sum_up
from cleave.core.cost.terms import lean_terms
from cleave.core.fleet.profiles import Floats, Ints, Profiles
from cleave.core.model.gemms import step_flops
from cleave.core.model.keeping import KEEPINGS
from cleave.core.model.sublayers import sublayers_of
from cleave.core.plan.gemm.product import SERVER, GemmPlan
from cleave.core.plan.resident.large_fleet import ModelPlan
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.core.plan.rivals.case import Case
from cleave.core.plan.rivals.products import attention_use
from cleave.core.plan.step import StepChoice, StepPlan

Plan = GemmPlan | StepPlan | StepChoice


def plan_s(plan: Plan | ModelPlan) -> float:
    """Seconds of a product, or of a step."""
    return plan.makespan_s if isinstance(plan, GemmPlan) else plan.step_s


def plan_flops(plan: Plan | ModelPlan) -> int:
    """FLOPs of the model, without what devices compute twice."""
    return plan.gemm.flops if isinstance(plan, GemmPlan) else step_flops(plan.shape, plan.tokens, plan.sequence)


def use_of(plan: Plan | ModelPlan, profiles: Profiles) -> Use:
    """What a plan takes of each device of a fleet; the plan may know a part of the fleet only."""
    match plan:
        case GemmPlan():
            use = _product(plan, profiles)
        case StepPlan():
            use = _products(plan, profiles)
        case StepChoice():
            use = _choice(plan, profiles)
        case ModelPlan():
            use = _columns(plan, profiles)
    return Use(busy_s=use.busy_s, down_bytes=use.down_bytes, up_bytes=use.up_bytes, wall_s=plan_s(plan))


def _product(plan: GemmPlan, profiles: Profiles) -> Use:
    unit = unit_costs(profiles, plan.wire, plan.server, plan.a_wire)
    device = _places(plan.names, profiles)[plan.tiling.device]
    busy_s = compute_s(unit.take(device), plan.tiling.heights, plan.tiling.widths, plan.tiling.depths)

    def summed(values: Floats) -> Floats:
        return _summed(device, values, len(profiles) + 1)[:-1]

    return Use(
        busy_s=summed(busy_s),
        down_bytes=summed(plan.down_bytes),
        up_bytes=summed(plan.up_bytes),
        wall_s=plan.makespan_s,
    )


def _places(names: Sequence[str], profiles: Profiles) -> Ints:
    """Indices of devices in the fleet; the server comes after all of them."""
    places = {name: place for place, name in enumerate((*profiles.names, SERVER))}
    return np.array([places[name] for name in names], dtype=np.int64)


def _products(plan: StepPlan, profiles: Profiles) -> Use:
    total = _nothing(profiles)
    for segment in plan.segments:
        total += _product(segment.plan, profiles) * segment.what.count
    return total


def _choice(choice: StepChoice, profiles: Profiles) -> Use:
    if isinstance(choice.plan, ModelPlan):
        return _columns(choice.plan, profiles)
    gemms = _products(choice.plan, profiles)
    if choice.plan.attention_s:
        return gemms
    # devices compute attention too, by heads: see `choose_step`
    one = choice.plan.segments[0].plan
    places = _places(one.names, profiles)
    case = Case(
        profiles=profiles.take(places),
        shape=choice.shape,
        tokens=choice.tokens,
        sequence=choice.sequence,
        wire=choice.wire,
        server=one.server,
    )
    by_heads = attention_use(case)

    def spread(values: Floats) -> Floats:
        return _summed(places, values, len(profiles))

    return gemms + Use(
        busy_s=spread(by_heads.busy_s),
        down_bytes=spread(by_heads.down_bytes),
        up_bytes=spread(by_heads.up_bytes),
        wall_s=by_heads.wall_s,
    )


def _columns(plan: ModelPlan, profiles: Profiles) -> Use:
    shape = plan.shape
    sums = sum_up(sublayers_of(shape), hidden=shape.hidden, sequence=plan.sequence, terms=lean_terms(plan.wire))
    total = _nothing(profiles)
    for part in plan.rounds:
        total += _round(part.plan, sums, profiles, plan.lease_states)
    return total


def _round(plan: ResidentPlan, sums: SublayerSums, profiles: Profiles, lease_states: int | None) -> Use:
    columns = [column for stage in plan.stages for column in stage.columns]
    held = [(number, holding) for number, column in enumerate(columns) for holding in column.holdings]
    first, count, slices = np.array([(one.shard.first, one.shard.count, one.shard.of) for one in columns]).T
    traits = np.vstack([sums.traits(first, count), slices])
    _, runs, kinds = np.unique(traits, axis=1, return_index=True, return_inverse=True)
    of = shard_costs(sums, first[runs], count[runs], slices[runs], chunk=plan.chunk)
    kind = kinds.ravel()[[number for number, _ in held]]
    device = _places([holding.device for _, holding in held], profiles)
    rows = np.array([holding.sequences for _, holding in held]) * sums.sequence
    keeps = np.array([KEEPINGS.index(holding.keeps) for _, holding in held])
    leased = np.array([columns[number].is_leased for number, _ in held])
    row_s = np.stack(
        [
            compute_s_per_row(of, profiles, plan.chunk, sums.terms, np.full((len(of), len(profiles)), each))
            for each in range(len(KEEPINGS))
        ]
    )
    busy_s = rows * row_s[keeps, kind, device]
    if lease_states is not None:
        busy_s += leased * update_s(of.lent[kind], lease_states, profiles.flops_per_s[device])
    synchronised = np.where(leased, (of.trained - of.lent)[kind], of.trained[kind])
    down = of.down_bytes_per_row[kind] * rows + sums.terms.weight_bytes * synchronised
    up = of.up_bytes_per_row[kind] * rows + sums.terms.gradient_bytes * synchronised

    def summed(values: Floats) -> Floats:
        return _summed(device, values, len(profiles))

    return Use(
        busy_s=summed(busy_s),
        down_bytes=summed(down * (plan.down_bytes / down.sum())),
        up_bytes=summed(up * (plan.up_bytes / up.sum())),
        wall_s=plan.step_s,
    )


def _summed(device: Ints, values: Floats, devices: int) -> Floats:
    total = np.zeros(devices)
    np.add.at(total, device, values)
    return total


def _nothing(profiles: Profiles) -> Use:
    none = np.zeros(len(profiles))
    return Use(busy_s=none, down_bytes=none, up_bytes=none, wall_s=0.0)
