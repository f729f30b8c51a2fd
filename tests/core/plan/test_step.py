"""Laws of the plan of a step: all of its gemms, each as often as it occurs, with equal shapes planned once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import fleets
from tests.support.grids import examples

from cleave.core.cost.rates import Server
from cleave.core.cost.wire import WireFormat
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.gemms import attention_products, step_gemms
from cleave.core.model.shapes import named
from cleave.core.plan.gemm.product import plan_gemm
from cleave.core.plan.resident.large_fleet import ModelPlan
from cleave.core.plan.resident.problem import Leasing
from cleave.core.plan.step import ROLES, StepPlan, choose_step, plan_step

MODELS = ("opt-1.3b", "llama-2-7b", "opt-350m")
fleets_of_some = fleets.fleets(least=1, most=12, kinds=("usual", "wild", "narrow", "twins"))


@settings(max_examples=examples(4))
@given(
    fleets_of_some,
    st.sampled_from(MODELS),
    st.integers(1, 4),
    st.sampled_from(fleets.WIRES),
    st.sampled_from([0.0, 1e12]),
    st.booleans(),
)
def test_a_step_is_the_sum_of_its_gemms(
    fleet: Profiles, model: str, sequences: int, wire: WireFormat, server_flops: float, grouped: bool
) -> None:
    shape, tokens, server = named(model), 256 * sequences, Server(flops_per_s=server_flops)
    step = plan_step(fleet, shape, tokens, sequence=256, wire=wire, server=server, split="2d", grouped=grouped)
    expected = step_gemms(shape, tokens, grouped)
    assert tuple(segment.what for segment in step.segments) == expected
    assert all(segment.plan.gemm == segment.what.gemm for segment in step.segments)
    assert all(segment.plan.wire == wire for segment in step.segments)

    attention_flops = sum(product.flops for product in attention_products(shape, tokens, 256))
    assert step.attention_flops == attention_flops
    assert step.attention_s == (attention_flops / server_flops if server_flops else 0.0)
    gemms_s = sum(segment.what.count * segment.plan.makespan_s for segment in step.segments)
    assert step.step_s == pytest.approx(gemms_s + step.attention_s)
    assert sum(step.role_s(role) for role in ROLES) == pytest.approx(gemms_s)
    assert step.bound_s <= step.step_s * (1 + 1e-6)


def test_only_equal_shapes_share_a_plan() -> None:
    step = plan_step(fleets.usual(8, 5), named("opt-1.3b"), 512, sequence=256, split="2d")
    plans = {id(segment.plan): segment.what.gemm for segment in step.segments}
    assert len(plans) == len({segment.what.gemm for segment in step.segments}) < len(step.segments)


def test_each_gemm_is_planned_as_it_would_be_on_its_own() -> None:
    fleet, server = fleets.usual(6, 5), Server(down_bytes_per_s=2e7, flops_per_s=1e11)
    step = plan_step(fleet, named("opt-1.3b"), 512, sequence=256, wire="q8", server=server, split="2d")
    for segment in step.segments[:3]:
        alone = plan_gemm(fleet, segment.what.gemm, wire="q8", server=server, split="2d")
        assert segment.plan.makespan_s == alone.makespan_s


def test_only_dy_of_the_head_deviates_from_the_wire() -> None:
    step = plan_step(fleets.usual(6, 5), named("opt-1.3b"), 512, sequence=256, wire="q8", split="2d")
    deviating = {(one.what.segment, one.what.role) for one in step.segments if one.plan.a_wire != "q8"}
    assert deviating == {("head", "grad_input"), ("head", "grad_weight")}
    for one in step.segments:
        tiling, a_bytes = one.plan.tiling, 2 if one.plan.a_wire == "bf16" else 1.0625
        numbers = tiling.depths * (a_bytes * tiling.heights + 1.0625 * tiling.widths)
        assert one.plan.down_bytes.sum() == pytest.approx(numbers.sum())


def test_grouping_gemms_never_lengthens_a_step() -> None:
    fleet = fleets.usual(24, 5)

    def planned(grouped: bool) -> StepPlan:
        return plan_step(fleet, named("llama-2-7b"), 1024, sequence=256, split="2d", grouped=grouped)

    assert planned(True).step_s <= planned(False).step_s


def test_a_fleet_beyond_sixteen_leases_on_its_strongest_devices_where_that_is_faster() -> None:
    strength = np.repeat([1.0, 0.1], [4, 16])
    fleet = fleets.of(1e12 * strength, 1e7 * strength, 2.5e6 * strength, 0.02 + 0 * strength, 8e9 * strength)

    def planned(leasing: Leasing | None) -> ModelPlan:
        step = choose_step(fleet, named("opt-350m"), 4096, sequence=512, resident_only=True, leasing=leasing)
        assert isinstance(step.plan, ModelPlan)
        return step.plan

    leased, synchronized = planned(Leasing(states=2)), planned(None)
    assert any(column.is_leased for column in leased.columns)
    assert leased.step_s < synchronized.step_s
    assert set(leased.devices) | set(leased.left_out) == set(fleet.names)
