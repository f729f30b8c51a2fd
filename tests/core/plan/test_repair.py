"""Laws of a repair: it covers the lost blocks exactly, on connected devices that can hold them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.support import fleets, tilings
from tests.support.grids import examples

from cleave.core.cost.gemm import finish_s, unit_costs
from cleave.core.cost.rates import Server
from cleave.core.cost.wire import WireFormat
from cleave.core.fleet.profiles import Floats, Profiles
from cleave.core.model.gemms import Gemm
from cleave.core.plan.gemm.product import SERVER, GemmPlan, Split, plan_gemm
from cleave.core.plan.gemm.repair import Repair, repair
from cleave.core.plan.gemm.tiling import COLS
from cleave.errors import InfeasibleError, InputError

QUICK = (Phase.explicit, Phase.reuse, Phase.generate)  # a fleet is (kind, count, seed): shrinking explains nothing
wires = st.sampled_from(fleets.WIRES)
splits: st.SearchStrategy[Split] = st.sampled_from(["auto", "2d", "3d"])
ROOMY: tuple[fleets.Kind, ...] = ("usual", "wild", "narrow", "twins", "mixed")
seeds = st.integers(0, 2**31)


def check(mended: Repair, plan: GemmPlan, lost: set[str], now: Profiles, server: Server) -> None:
    """Check everything that holds for any repair, recomputed from its blocks."""
    names = np.array(plan.names)
    missing = plan.tiling.take(np.flatnonzero(np.isin(names[plan.tiling.device], list(lost))))
    blocks = mended.blocks
    assert mended.lost_blocks == len(missing)
    if not len(missing):
        assert len(blocks) == mended.recovery_s == 0
        return
    assert all((x[:, 0] < x[:, 1]).all() for x in (blocks.rows, blocks.cols, blocks.inner))
    assert tilings.same(tilings.corners_of(blocks), tilings.corners_of(missing))
    assert lost.isdisjoint({mended.names[i] for i in blocks.device.tolist()})
    unit = unit_costs(now, plan.wire, server)
    assert (blocks.memory_bytes(unit) <= unit.memory_bytes[blocks.device]).all()
    assert mended.by_mates in (0, len(missing))
    busy_s = [recomputed_s(mended, now, plan.wire, server, wave) for wave in np.unique(blocks.round)]
    assert 0 < mended.recovery_s < np.inf
    # At least the time of the busiest device; at most the sum over waves of each wave's slowest device.
    assert np.sum(busy_s, axis=0).max() <= mended.recovery_s * 1.03
    assert mended.recovery_s <= sum(wave_s.max() for wave_s in busy_s) * 1.03


def recomputed_s(mended: Repair, now: Profiles, wire: WireFormat, server: Server, wave: int) -> Floats:
    """Seconds per device in a wave: mates stream lines of their strip, others receive blocks as in any plan."""
    unit = unit_costs(now, wire, server)
    blocks = mended.blocks.take(np.flatnonzero(mended.blocks.round == wave))
    one = unit.take(blocks.device)
    busy = np.zeros(len(unit))
    if mended.by_mates:
        lines = np.where(blocks.along == COLS, blocks.widths, blocks.heights)
        width = np.where(blocks.along == COLS, blocks.heights, blocks.widths)
        line_s = np.maximum(one.down_s * blocks.depths, np.maximum(one.mac_s * blocks.depths, one.up_s) * width)
        np.add.at(busy, blocks.device, lines * line_s)
        busy[np.unique(blocks.device)] += unit.latency_s[np.unique(blocks.device)]
    else:
        np.add.at(busy, blocks.device, finish_s(one, blocks.heights, blocks.widths, blocks.depths))
    return busy


def some(names: tuple[str, ...], count: int, seed: int) -> set[str]:
    chosen: list[int] = np.random.default_rng(seed).choice(len(names), count, replace=False).tolist()
    return {names[i] for i in chosen}


def joined(fleet: Profiles, more: Profiles) -> Profiles:
    def both(column: str) -> Floats:
        return np.concatenate([getattr(fleet, column), getattr(more, column)])

    return Profiles(
        names=(*fleet.names, *(f"new-{name}" for name in more.names)),
        flops_per_s=both("flops_per_s"),
        down_bytes_per_s=both("down_bytes_per_s"),
        up_bytes_per_s=both("up_bytes_per_s"),
        latency_s=both("latency_s"),
        memory_bytes=both("memory_bytes"),
    )


def without(fleet: Profiles, gone: set[str]) -> Profiles:
    return fleet.take(np.array([i for i, name in enumerate(fleet.names) if name not in gone], dtype=np.int64))


@settings(phases=QUICK, max_examples=examples(25))
@given(fleets.fleets(least=2, most=40, kinds=ROOMY), fleets.gemms(), wires, splits, st.data())
def test_any_repair_is_sound(fleet: Profiles, gemm: Gemm, wire: WireFormat, split: Split, data: st.DataObject) -> None:
    plan = plan_gemm(fleet, gemm, wire=wire, split=split)
    lost = some(fleet.names, data.draw(st.integers(1, len(fleet) - 1)), data.draw(seeds))
    now = without(fleet, lost) if data.draw(st.booleans()) else fleet
    check(repair(plan, now, lost), plan, lost, now, Server())


@settings(phases=QUICK, max_examples=examples(40))
@given(st.integers(4, 50), st.floats(0.5, 3.0), seeds, st.data())
def test_repairs_stay_sound_for_any_spread_of_latencies(
    count: int, spread: float, seed: int, data: st.DataObject
) -> None:
    """Mates whose latency exceeds the recovery time take nothing; there may be many, on every scale."""
    rng = np.random.default_rng(seed)
    fast, memory = np.full(count, 1e8), np.full(count, 4e9)
    flops = np.full(count, 1e12)

    def drawn() -> Profiles:
        return fleets.of(flops, fast, fast, np.exp(rng.normal(-4.0, spread, count)), memory)

    before, now = drawn(), drawn()
    plan = plan_gemm(before, Gemm(m=20_000, n=4, k=64), split="2d")
    lost = some(tuple(before.names[i] for i in plan.tiling.device.tolist()), 1, data.draw(seeds))
    for profiles in (before, now):
        check(repair(plan, profiles, lost), plan, lost, profiles, Server())


@settings(phases=QUICK, max_examples=examples(40))
@given(st.integers(8, 50), st.integers(0, 2**31), st.floats(0.3, 0.5), fleets.gemms(st.integers(100, 4000)))
def test_lost_blocks_of_any_sizes_find_helpers(count: int, seed: int, share: float, gemm: Gemm) -> None:
    """Few large and many small blocks lost at once, with hardly more survivors than blocks."""
    wild, memory = fleets.wild(count, seed), np.full(count, 4e9)
    fleet = fleets.of(
        wild.flops_per_s * 100, wild.down_bytes_per_s * 10, wild.up_bytes_per_s * 10, wild.latency_s, memory
    )
    plan = plan_gemm(fleet, gemm, split="2d")
    lost = some(fleet.names, int(count * share), seed)
    check(repair(plan, fleet, lost), plan, lost, fleet, Server())


@pytest.mark.parametrize(("count", "split"), [(1024, "2d"), (1024, "3d"), (8192, "2d")])
def test_a_large_fleet_recovers_from_one_percent(count: int, split: Split) -> None:
    fleet = fleets.usual(count, 9200)
    plan = plan_gemm(fleet, Gemm(m=131_072, n=5120, k=13_824), split=split)
    lost = some(fleet.names, count // 100, 1)
    mended = repair(plan, fleet, lost)
    check(mended, plan, lost, fleet, Server())
    assert mended.recovery_s <= 0.2 * plan.makespan_s


def test_mates_that_help_in_several_rounds_need_the_sum_of_their_times() -> None:
    fleet = fleets.usual(5, 117)
    memory = 10 ** np.random.default_rng(117).uniform(5.5, 7, 6)[1:]
    small = fleets.of(fleet.flops_per_s, fleet.down_bytes_per_s, fleet.up_bytes_per_s, fleet.latency_s, memory)
    plan = plan_gemm(small, Gemm(m=2637, n=2905, k=421), split="2d")
    assert plan.rounds > 1
    for name in small.names:
        check(repair(plan, small, {name}), plan, {name}, small, Server())


@settings(phases=QUICK, max_examples=examples(12))
@given(st.integers(2, 12), seeds, splits, st.integers(1, 11))
def test_plans_in_rounds_on_little_memory_are_repaired_too(count: int, seed: int, split: Split, losses: int) -> None:
    fleet = fleets.usual(count, seed)
    small = fleets.of(
        fleet.flops_per_s, fleet.down_bytes_per_s, fleet.up_bytes_per_s, fleet.latency_s, np.full(count, 2e6)
    )
    plan = plan_gemm(small, Gemm(m=1500, n=1001, k=300), split=split)
    lost = some(small.names, min(losses, count - 1), seed)
    check(repair(plan, small, lost), plan, lost, small, Server())


@settings(phases=QUICK, max_examples=examples(8))
@given(fleets.fleets(least=2, most=12, kinds=ROOMY), fleets.gemms(), splits, seeds)
def test_the_server_and_new_devices_can_help_repair(fleet: Profiles, gemm: Gemm, split: Split, seed: int) -> None:
    server = Server(flops_per_s=1e12)
    plan = plan_gemm(fleet, gemm, split=split, server=server)
    lost = some(fleet.names, len(fleet) - 1, seed)
    now = joined(fleet, fleets.usual(3, seed))
    mended = repair(plan, now, lost)
    assert mended.names == (*now.names, SERVER)
    check(mended, plan, lost, now, server)


def test_new_devices_alone_can_take_over() -> None:
    fleet = fleets.usual(4, 1)
    plan = plan_gemm(fleet, Gemm(m=500, n=400, k=300))
    gone = set(fleet.names)
    now = without(joined(fleet, fleets.usual(3, 2)), gone)
    mended = repair(plan, now, gone)
    check(mended, plan, gone, now, Server())
    assert all(name.startswith("new-") for name in mended.names)


def test_lost_blocks_larger_than_any_survivor_are_cut() -> None:
    """The survivor could do the whole gemm in rounds, so it can do part of it."""
    rates = np.array([1e8, 1e8, 1e6])
    fleet = fleets.of(np.full(3, 1e12), rates, rates, np.full(3, 0.02), np.array([1e9, 1e9, 3e6]))
    gemm = Gemm(m=2000, n=2000, k=512)
    plan = plan_gemm(fleet, gemm, split="2d")
    assert plan_gemm(fleet.take(np.array([2])), gemm, split="2d").rounds > 1
    check(repair(plan, fleet, {"d0", "d1"}), plan, {"d0", "d1"}, fleet, Server())


def test_a_repair_without_losses_is_empty() -> None:
    fleet = fleets.usual(5, 1)
    mended = repair(plan_gemm(fleet, Gemm(m=90, n=80, k=70)), fleet, ())
    assert (len(mended.blocks), mended.recovery_s, mended.lost_blocks, mended.by_mates) == (0, 0.0, 0, 0)


def test_losing_a_device_without_blocks_needs_no_repair() -> None:
    fleet = fleets.usual(30, 1)
    plan = plan_gemm(fleet, Gemm(m=2, n=2, k=2), split="2d")
    idle = set(plan.left_out)
    assert idle
    assert len(repair(plan, fleet, idle).blocks) == 0


def test_a_device_absent_from_the_profiles_counts_as_lost() -> None:
    fleet = fleets.usual(5, 1)
    plan = plan_gemm(fleet, Gemm(m=900, n=800, k=70), split="2d")
    lost = {plan.names[plan.tiling.device[0]]}
    now = without(fleet, lost)
    check(repair(plan, now, ()), plan, lost, now, Server())


def test_losing_every_device_is_infeasible() -> None:
    fleet = fleets.usual(5, 1)
    plan = plan_gemm(fleet, Gemm(m=90, n=80, k=70))
    with pytest.raises(InfeasibleError, match=r"no device is left .*; wait"):
        repair(plan, fleet, fleet.names)


def test_a_lost_name_that_is_not_in_the_plan_is_an_input_error() -> None:
    fleet = fleets.usual(5, 1)
    plan = plan_gemm(fleet, Gemm(m=90, n=80, k=70))
    with pytest.raises(InputError, match="nobody"):
        repair(plan, fleet, ["nobody"])
