"""Laws of the plan of one gemm: coverage, cost, quality, and that a better fleet gets a better plan."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.support import fleets, tilings
from tests.support.grids import examples

from cleave.api.planning import sample_fleet
from cleave.core.cost.bound import bound_2d, bound_3d
from cleave.core.cost.gemm import block_memory_bytes, finish_s, transfers_bytes, unit_costs
from cleave.core.cost.rates import Server
from cleave.core.cost.wire import WireFormat
from cleave.core.fleet.profiles import Floats, Profiles
from cleave.core.model.gemms import Gemm
from cleave.core.plan.gemm.product import SERVER, GemmPlan, Split, plan_gemm
from cleave.errors import InfeasibleError

QUICK = (Phase.explicit, Phase.reuse, Phase.generate)  # a fleet is (kind, count, seed): shrinking explains nothing
SPLITS: tuple[Split, ...] = ("auto", "2d", "3d")
ROOMY: tuple[fleets.Kind, ...] = ("usual", "wild", "narrow", "twins", "mixed")
wires, splits = st.sampled_from(fleets.WIRES), st.sampled_from(SPLITS)
tiny = st.integers(1, 6)


def check(plan: GemmPlan, fleet: Profiles, server: Server) -> None:
    """Check everything that holds for any plan, recomputed from its blocks."""
    tiling, gemm = plan.tiling, plan.gemm
    unit = unit_costs(fleet, plan.wire, server)
    blocks = unit.take(tiling.device)
    assert tilings.covers_once(tiling, gemm)
    assert plan.names == (*fleet.names, SERVER) if server.flops_per_s else plan.names == fleet.names
    held = block_memory_bytes(blocks, tiling.heights, tiling.widths, tiling.depths)
    assert (held <= blocks.memory_bytes).all()
    if plan.split == "2d":
        assert (tiling.depths == gemm.k).all()

    finish = finish_s(blocks, tiling.heights, tiling.widths, tiling.depths)
    down, up = transfers_bytes(blocks, tiling.heights, tiling.widths, tiling.depths)
    assert plan.finish_s == pytest.approx(finish)
    assert plan.down_bytes == pytest.approx(down)
    assert plan.up_bytes == pytest.approx(up)
    assert set(tiling.round.tolist()) == set(range(plan.rounds))
    total_s = 0.0
    for number in range(plan.rounds):
        now = tiling.round == number
        assert len(np.unique(tiling.device[now])) == now.sum(), "a device has one block per round"
        total_s += max(
            finish[now].max(),
            down[now].sum() / server.down_bytes_per_s,
            up[now].sum() / server.up_bytes_per_s,
        )
    assert plan.makespan_s == pytest.approx(total_s, rel=1e-9)
    assert plan.makespan_s >= plan.bound_s * (1 - 1e-6)

    used = {plan.names[i] for i in tiling.device.tolist()}
    assert used.isdisjoint(plan.left_out)
    assert used | set(plan.left_out) == set(plan.names)
    assert all(plan.left_out.values()), "every device left out has a reason"


@settings(phases=QUICK, max_examples=examples(40))
@given(fleets.fleets(most=32), fleets.gemms(), wires, splits, fleets.servers)
def test_any_plan_is_sound(fleet: Profiles, gemm: Gemm, wire: WireFormat, split: Split, server: Server) -> None:
    check(plan_gemm(fleet, gemm, wire=wire, server=server, split=split), fleet, server)


@settings(phases=QUICK, max_examples=examples(20))
@given(fleets.fleets(most=60), fleets.gemms(tiny), wires, splits, fleets.servers)
def test_more_devices_than_elements_still_plan_soundly(
    fleet: Profiles, gemm: Gemm, wire: WireFormat, split: Split, server: Server
) -> None:
    check(plan_gemm(fleet, gemm, wire=wire, server=server, split=split), fleet, server)


@settings(phases=QUICK, max_examples=examples(15))
@given(fleets.fleets(most=1), fleets.gemms(), wires, splits)
def test_a_single_device_does_the_whole_gemm(fleet: Profiles, gemm: Gemm, wire: WireFormat, split: Split) -> None:
    plan = plan_gemm(fleet, gemm, wire=wire, split=split)
    check(plan, fleet, Server())
    if plan.rounds == 1:
        assert len(plan.tiling) == 1


@settings(phases=QUICK, max_examples=examples(6))
@given(fleets.fleets(most=20, kinds=ROOMY), fleets.gemms(), splits)
def test_a_server_far_faster_than_its_link_computes_alone(fleet: Profiles, gemm: Gemm, split: Split) -> None:
    server = Server(down_bytes_per_s=1.0, up_bytes_per_s=1.0, flops_per_s=1e16)
    plan = plan_gemm(fleet, gemm, server=server, split=split)
    check(plan, fleet, server)
    assert plan.makespan_s <= gemm.flops / 1e16 * (1 + 1e-6)


LARGE: list[tuple[fleets.Kind, int, Gemm, Split, Server]] = [
    ("wild", 1024, Gemm(m=8191, n=5120, k=5120), "auto", Server()),
    ("mixed", 1024, Gemm(m=1, n=30_011, k=1), "2d", Server()),
    ("cramped", 1024, Gemm(m=2048, n=4096, k=1024), "2d", Server(down_bytes_per_s=1e9, flops_per_s=1e12)),
    ("usual", 8192, Gemm(m=13_824, n=5120, k=131_072), "3d", Server()),
    ("wild", 8192, Gemm(m=131_072, n=5120, k=13_824), "2d", Server(down_bytes_per_s=2.5e10, up_bytes_per_s=2.5e10)),
    ("usual", 8192, Gemm(m=53, n=61, k=7), "2d", Server()),
]


@pytest.mark.parametrize(("kind", "count", "gemm", "split", "server"), LARGE)
def test_plans_of_large_fleets_are_sound(
    kind: fleets.Kind, count: int, gemm: Gemm, split: Split, server: Server
) -> None:
    fleet = fleets.build(kind, count, 77)
    check(plan_gemm(fleet, gemm, split=split, server=server), fleet, server)


@settings(phases=QUICK, max_examples=examples(10))
@given(fleets.fleets(most=25), fleets.gemms(), wires, fleets.servers)
def test_auto_is_never_slower_than_2d(fleet: Profiles, gemm: Gemm, wire: WireFormat, server: Server) -> None:
    auto = plan_gemm(fleet, gemm, wire=wire, server=server)
    flat = plan_gemm(fleet, gemm, wire=wire, server=server, split="2d")
    assert auto.makespan_s <= flat.makespan_s * (1 + 1e-9)


@settings(phases=QUICK, max_examples=examples(6))
@given(fleets.fleets(most=12), fleets.gemms(), splits)
def test_the_same_request_gives_the_same_plan(fleet: Profiles, gemm: Gemm, split: Split) -> None:
    one, two = (plan_gemm(fleet, gemm, split=split) for _ in range(2))
    assert one.makespan_s == two.makespan_s
    assert np.array_equal(one.tiling.rows, two.tiling.rows)
    assert np.array_equal(one.tiling.device, two.tiling.device)


@settings(phases=QUICK, max_examples=examples(8))
@given(fleets.fleets(most=25), fleets.gemms(), wires, splits, fleets.servers)
def test_no_plan_is_faster_than_its_bound(
    fleet: Profiles, gemm: Gemm, wire: WireFormat, split: Split, server: Server
) -> None:
    """Ignoring memory, the 3D bound holds for every plan and the 2D bound for plans with a whole inner dimension."""
    plan = plan_gemm(fleet, gemm, wire=wire, split=split, server=server)
    unit = unit_costs(fleet, wire, server).with_boundless_memory()
    assert plan.makespan_s >= bound_3d(unit, gemm, server) * (1 - 1e-5)
    if plan.split == "2d":
        assert plan.makespan_s >= bound_2d(unit, gemm, server) * (1 - 1e-5)


# -------------------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("split", SPLITS)
def test_little_memory_forces_rounds(split: Split) -> None:
    fleet = fleets.usual(6, 3)
    small = fleets.of(fleet.flops_per_s, fleet.down_bytes_per_s, fleet.up_bytes_per_s, fleet.latency_s, np.full(6, 2e6))
    plan = plan_gemm(small, Gemm(m=3001, n=2003, k=700), split=split)
    assert plan.rounds > 1
    check(plan, small, Server())


@settings(phases=QUICK, max_examples=examples(10))
@given(
    st.integers(1, 6),
    st.floats(3.8, 5.5),
    fleets.gemms(st.integers(1, 300)),
    wires,
    splits,
    st.integers(0, 2**31),
)
def test_with_kilobytes_of_memory_blocks_still_cover_the_output_once(
    count: int, log_memory: float, gemm: Gemm, wire: WireFormat, split: Split, seed: int
) -> None:
    fleet = fleets.wild(count, seed)
    memory = np.full(count, 10.0**log_memory)
    small = fleets.of(fleet.flops_per_s, fleet.down_bytes_per_s, fleet.up_bytes_per_s, fleet.latency_s, memory)
    check(plan_gemm(small, gemm, wire=wire, split=split), small, Server())


@pytest.mark.parametrize("split", SPLITS)
def test_the_error_when_nothing_fits_says_what_would(split: Split) -> None:
    with pytest.raises(InfeasibleError, match=r"no plan fits.* needs \d+ bytes.* offers 900 bytes; add"):
        plan_gemm(fleets.one(memory=900.0), Gemm(m=64, n=64, k=4096), split=split)


# -------------------------------------------------------------------------------------------------- quality


SHAPES = [
    Gemm(m=131_072, n=15_360, k=5120),
    Gemm(m=131_072, n=5120, k=13_824),
    Gemm(m=13_824, n=5120, k=131_072),
    Gemm(m=4096, n=4096, k=4096),
    Gemm(m=16_384, n=2048, k=8192),
    Gemm(m=2048, n=50_257, k=1024),
]


def sampled(count: int, seed: int) -> Profiles:
    phones, laptops = count * 5 // 8, count // 4
    return sample_fleet(
        f"phone={phones},laptop={laptops},desktop={count - phones - laptops}", ("us", "fr", "in")[seed % 3], seed
    )


def ratios(counts: list[int], seeds: range, shapes: list[Gemm], split: Split) -> Floats:
    found = [
        plan_gemm(build(count, 9000 + seed), shapes[(seed + i) % len(shapes)], split=split).ratio
        for count in counts
        for seed in seeds
        for i, build in enumerate((fleets.usual, sampled))
    ]
    return np.array(found)


def test_2d_plans_come_close_to_the_bound() -> None:
    found = ratios([32, 100, 256], range(9), SHAPES, "2d")
    found = np.append(found, ratios([1024], range(2), SHAPES, "2d"))
    assert found.max() <= 1.05
    assert np.quantile(found, 0.95) <= 1.03


def test_2d_plans_of_eight_devices_come_close_to_the_bound() -> None:
    assert ratios([8], range(12), SHAPES, "2d").max() <= 1.08


@pytest.mark.parametrize(("count", "worst", "seeds"), [(32, 1.30, 4), (128, 1.20, 3), (1024, 1.12, 1)])
def test_3d_plans_come_close_to_the_bound(count: int, worst: float, seeds: int) -> None:
    assert ratios([count], range(seeds), SHAPES, "3d").max() <= worst


@pytest.mark.parametrize("seed", range(4))
def test_capped_plans_come_close_to_the_bound(seed: int) -> None:
    """The cap is set where it binds: a third of the whole fleet's bandwidth."""
    fleet, gemm = (fleets.usual, sampled)[seed % 2](512, 9100 + seed), SHAPES[seed]
    free = plan_gemm(fleet, gemm, split="2d")
    server = Server(down_bytes_per_s=free.down_bytes.sum() / free.makespan_s / 3)
    plan = plan_gemm(fleet, gemm, split="2d", server=server)
    check(plan, fleet, server)
    assert len(plan.tiling) >= 32
    assert plan.makespan_s > free.makespan_s
    assert plan.ratio <= 1.02


# -------------------------------------------------------------------------------------------------- sense


sense_shapes = fleets.gemms(st.floats(1.8, 4.3).map(lambda x: int(10**x)))
sense_fleets = fleets.fleets(most=64, least=2, kinds=("usual", "wild", "narrow", "mixed"))


def scaled(fleet: Profiles, factors: Floats | float) -> Profiles:
    up = np.broadcast_to(np.asarray(factors, dtype=np.float64), (5, len(fleet)))
    return fleets.of(
        fleet.flops_per_s * up[0],
        fleet.down_bytes_per_s * up[1],
        fleet.up_bytes_per_s * up[2],
        fleet.latency_s / up[3],
        fleet.memory_bytes * up[4],
    )


@settings(phases=QUICK, max_examples=examples(8))
@given(sense_fleets, sense_shapes, splits, st.integers(0, 2**31))
def test_a_better_fleet_never_gets_a_slower_plan(fleet: Profiles, gemm: Gemm, split: Split, seed: int) -> None:
    rng = np.random.default_rng(seed)
    few = rng.random((5, len(fleet))) < rng.random()  # from hardly any to all of the values
    better = scaled(fleet, np.where(few, rng.uniform(1, 1.5, few.shape), 1.0))
    before, after = (plan_gemm(x, gemm, split=split).makespan_s for x in (fleet, better))
    assert after <= before * 1.01


@settings(phases=QUICK, max_examples=examples(8))
@given(sense_fleets, sense_shapes, splits)
def test_one_more_device_never_gives_a_slower_plan(fleet: Profiles, gemm: Gemm, split: Split) -> None:
    fewer = fleet.take(np.arange(len(fleet) - 1))
    before, after = (plan_gemm(x, gemm, split=split).makespan_s for x in (fewer, fleet))
    assert after <= before * 1.01


@settings(phases=QUICK, max_examples=examples(8))
@given(sense_fleets, sense_shapes, splits, st.floats(1.5, 10))
def test_time_scales_inversely_with_the_rates(fleet: Profiles, gemm: Gemm, split: Split, factor: float) -> None:
    """With all rates f times higher and all latencies f times lower, everything is f times faster."""
    faster = scaled(fleet, np.array([factor, factor, factor, factor, 1.0])[:, None])
    before, after = (plan_gemm(x, gemm, split=split).makespan_s for x in (fleet, faster))
    assert after * factor == pytest.approx(before, rel=0.01)


@settings(phases=QUICK, max_examples=examples(8))
@given(sense_fleets, sense_shapes, wires, splits)
def test_the_order_of_devices_does_not_matter(fleet: Profiles, gemm: Gemm, wire: WireFormat, split: Split) -> None:
    backwards = fleet.take(np.arange(len(fleet))[::-1])
    before, after = (plan_gemm(x, gemm, wire=wire, split=split).makespan_s for x in (fleet, backwards))
    assert after == pytest.approx(before, rel=0.01)
