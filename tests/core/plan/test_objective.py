"""Plans for less energy or carbon, and what plans take of each device."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.api.planning import plan as make_plan
from cleave.api.planning import sample_fleet
from cleave.core.carbon.bill import fleet_power
from cleave.core.cost.rates import Server
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.gemms import Gemm
from cleave.core.model.objective import OBJECTIVES, Objective
from cleave.core.model.shapes import ModelShape, named
from cleave.core.plan.gemm.product import GemmPlan, plan_gemm
from cleave.core.plan.objective import Chosen, choose_devices
from cleave.core.plan.resident.large_fleet import ModelPlan
from cleave.core.plan.rivals.products import GROUPED
from cleave.core.plan.step import StepChoice, StepPlan, choose_step, plan_step
from cleave.core.plan.usage import plan_flops, use_of
from cleave.facts.carbon import carbon_facts

FACTS = carbon_facts()
SHAPE: ModelShape = named("opt-125m")
MIX = "phone=3,laptop=2,desktop=1"


def chosen_gemm(profiles: Profiles, objective: Objective, gemm: Gemm) -> Chosen[GemmPlan]:
    return choose_devices(objective, fleet_power(profiles, FACTS), lambda some: plan_gemm(some, gemm))


# ------------------------------------------------------------------------------------------------ use of devices


def test_a_product_on_one_device_by_hand() -> None:
    profiles = sample_fleet("laptop=1", "us", 1)
    gemm = Gemm(m=512, n=256, k=128)
    plan = plan_gemm(profiles, gemm, wire="bf16")
    use = use_of(plan, profiles)
    assert use.busy_s[0] == pytest.approx(2 * 512 * 256 * 128 / profiles.flops_per_s[0])
    assert use.down_bytes[0] == pytest.approx(2 * 128 * (512 + 256))
    assert use.up_bytes[0] == pytest.approx(2 * 512 * 256)
    assert use.wall_s == plan.makespan_s
    assert plan_flops(plan) == gemm.flops


def test_the_servers_own_block_is_no_devices_work() -> None:
    profiles = sample_fleet("phone=2", "us", 1)
    gemm = Gemm(m=512, n=512, k=512)
    plan = plan_gemm(profiles, gemm, server=Server(flops_per_s=1e12))
    assert len(profiles) in plan.tiling.device
    use = use_of(plan, profiles)
    own = plan.tiling.device < len(profiles)
    volume = (plan.tiling.heights * plan.tiling.widths * plan.tiling.depths)[own].sum()
    assert float(use.busy_s @ profiles.flops_per_s) == pytest.approx(2 * volume)
    assert use.down_bytes.sum() == pytest.approx(plan.down_bytes.sum())


def test_products_of_a_step_add_up() -> None:
    profiles = sample_fleet(MIX, "us", 2)
    plan = plan_step(profiles, SHAPE, 1024, sequence=256)
    use = use_of(plan, profiles)
    flops = sum(segment.what.count * segment.what.gemm.flops for segment in plan.segments)
    assert float(use.busy_s @ profiles.flops_per_s) == pytest.approx(flops)
    assert use.down_bytes.sum() + use.up_bytes.sum() == pytest.approx(plan.moved_bytes)


def test_attention_by_heads_is_added_to_products() -> None:
    profiles = sample_fleet(MIX, "us", 2)
    plan = plan_step(profiles, SHAPE, 1024, sequence=256)
    choice = StepChoice(
        shape=SHAPE, tokens=1024, sequence=256, wire=plan.wire, arrangement=GROUPED, step_s=9.0, plan=plan, rivals=()
    )
    use, products = use_of(choice, profiles), use_of(plan, profiles)
    more = float((use.busy_s - products.busy_s) @ profiles.flops_per_s)
    # every head of every sequence: 2 products of scores forward, 5 backward, of which causal masks leave half
    assert more == pytest.approx((2 + 5) * 256 * 256 * SHAPE.head_dim * SHAPE.layers * SHAPE.heads * 4)
    # in bf16: q, k, v down and a context up; then dy besides, with q, k, v and the context, and three gradients up
    numbers = 256 * SHAPE.head_dim * SHAPE.layers * SHAPE.heads * 4
    assert use.down_bytes.sum() - products.down_bytes.sum() == pytest.approx(2 * (3 + 5) * numbers)
    assert use.up_bytes.sum() - products.up_bytes.sum() == pytest.approx(2 * (1 + 3) * numbers)
    assert use.wall_s == 9.0


def test_columns_take_the_bytes_of_their_plan_and_at_least_its_flops() -> None:
    profiles = sample_fleet(MIX, "us", 2)
    choice = choose_step(profiles, SHAPE, 4096, sequence=512, resident_only=True)
    assert isinstance(choice.plan, ModelPlan)
    use = use_of(choice, profiles)
    assert use.down_bytes.sum() == pytest.approx(choice.plan.down_bytes)
    assert use.up_bytes.sum() == pytest.approx(choice.plan.up_bytes)
    assert use.wall_s == choice.step_s
    assert float(use.busy_s @ profiles.flops_per_s) > 0.9 * plan_flops(choice)
    assert (use.busy_s <= choice.step_s * (1 + 1e-6)).all()
    idle = np.array([name not in choice.plan.devices for name in profiles.names])
    assert not use.busy_s[idle].any()


def test_a_plan_for_part_of_a_fleet_is_charged_to_that_part() -> None:
    profiles = sample_fleet(MIX, "us", 3)
    some = np.array([4, 1])
    plan = plan_gemm(profiles.take(some), Gemm(m=300, n=200, k=100))
    use = use_of(plan, profiles)
    assert not np.delete(use.busy_s, some).any()
    alone = use_of(plan, profiles.take(some))
    assert use.busy_s[some] == pytest.approx(alone.busy_s)
    assert use.up_bytes[some] == pytest.approx(alone.up_bytes)


# ------------------------------------------------------------------------------------------------ objectives


@settings(deadline=None, max_examples=15)
@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(0, 6), st.sampled_from([64, 512, 3000]))
def test_no_objective_is_worse_at_its_aim_than_time(seed: int, phones: int, laptops: int, size: int) -> None:
    profiles = sample_fleet(f"phone={phones},laptop={laptops}", "us", seed)
    gemm = Gemm(m=size, n=size, k=size)
    time, energy, carbon = (chosen_gemm(profiles, objective, gemm) for objective in OBJECTIVES)
    assert energy.bill.footprint.energy_j <= time.bill.footprint.energy_j
    assert carbon.bill.footprint.kgco2e <= time.bill.footprint.kgco2e
    for one in (energy, carbon):
        assert one.fastest_s == time.plan_s
        assert one.fastest == time.bill.footprint
        assert {*one.profiles.names, *one.left_out} == set(profiles.names)
        assert len(one.profiles) + len(one.left_out) == len(profiles)


def two_alike(**columns: object) -> Profiles:
    alike = {name: np.full(2, 1e9) for name in ("flops_per_s", "down_bytes_per_s", "up_bytes_per_s", "memory_bytes")}
    given = {"latency_s": np.zeros(2), "device_class": ("laptop", "laptop"), "country": ("us", "us")}
    return Profiles(names=("a", "b"), **(alike | given | columns))  # pyright: ignore[reportArgumentType]


def test_energy_takes_the_device_that_draws_less() -> None:
    profiles = two_alike(watts=np.array([9000.0, 9.0]), idle_watts=np.zeros(2))
    gemm = Gemm(m=800, n=800, k=800)
    assert chosen_gemm(profiles, "time", gemm).profiles.names == ("a", "b")
    energy = chosen_gemm(profiles, "energy", gemm)
    assert energy.profiles.names == ("b",)
    assert energy.left_out.keys() == {"a"}
    assert energy.plan_s > energy.fastest_s


def test_no_number_of_devices_is_tried_twice_and_those_around_the_best_last() -> None:
    profiles = sample_fleet("phone=50", "us", 1)
    tried: list[int] = []

    def plan(some: Profiles) -> GemmPlan:
        tried.append(len(some))
        return plan_gemm(some, Gemm(m=64, n=64, k=64))

    found = choose_devices("energy", fleet_power(profiles, FACTS), plan)
    coarse, fine = tried[:6], tried[6:]
    assert coarse == sorted(coarse, reverse=True)
    assert coarse[0] == 50
    assert len(set(tried)) == len(tried) <= 10
    best = len(found.profiles)
    below, above = max([0, *(one for one in coarse if one < best)]), min([50, *(one for one in coarse if one > best)])
    assert all(below < one < above for one in fine)


def test_carbon_takes_the_device_on_the_cleaner_grid() -> None:
    profiles = two_alike(watts=np.full(2, 5000.0), idle_watts=np.zeros(2), country=("pl", "fr"))
    assert chosen_gemm(profiles, "carbon", Gemm(m=800, n=800, k=800)).profiles.names == ("b",)


@pytest.mark.parametrize("objective", ["energy", "carbon"])
def test_a_step_takes_fewer_joules_or_grams_by_columns_or_gemms(objective: Objective) -> None:
    profiles = sample_fleet(MIX, "us", 5)
    power = fleet_power(profiles, FACTS)
    for grain, kind in (("resident", StepChoice), ("gemm", StepPlan)):
        make = partial(make_plan, model=SHAPE, tokens=2048, grain=grain, lease="never")
        found = choose_devices(objective, power, make)
        assert isinstance(found.plan, kind)
        assert found.bill.footprint.energy_j > 0
        if objective == "energy":
            assert found.bill.footprint.energy_j <= found.fastest.energy_j
        else:
            assert found.bill.footprint.kgco2e <= found.fastest.kgco2e
