"""Laws of column plans for few devices: coverage, memory, the arrangement chosen, and stability."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.support import fleets

from cleave.core.cost.rates import Server
from cleave.core.cost.resident import compute_s_per_row, shard_costs, sum_up
from cleave.core.cost.terms import live_terms
from cleave.core.fleet.profiles import DeviceId, Profiles
from cleave.core.model.keeping import KEEPINGS
from cleave.core.model.sublayers import Sublayer, SublayerKind
from cleave.core.plan.resident.problem import Leasing, Problem, pose
from cleave.core.plan.resident.small_fleet import judge_again, plan_columns, rehouse
from cleave.core.plan.resident.stages import Draft, ResidentPlan, judge
from cleave.errors import InfeasibleError, InputError

QUICK = (Phase.explicit, Phase.reuse, Phase.generate)
H, S = 512, 128


def model(layers: int, *, trained: bool = True, vocabulary: int = 16_000) -> tuple[Sublayer, ...]:
    def sublayer(kind: SublayerKind, sides: int, kv_width: int, inner: int, slices: int) -> Sublayer:
        params, last = sides * inner * H, inner * H
        return Sublayer(
            kind=kind,
            params=params,
            trained=params if trained else params // 100,
            kv_width=kv_width,
            inner=inner,
            slices=slices,
            products=params,
            gradient_products=params if trained else params // 100,
            rebuilt_products={"attention": last, "mlp": params - last, "head": params}[kind],
            passed_products={"attention": 2 * last, "mlp": params, "head": 0}[kind],
        )

    attention, mlp = sublayer("attention", 4, H, H, 8), sublayer("mlp", 3, 0, 4 * H, 4 * H)
    return (attention, mlp) * layers + (sublayer("head", 1, 0, vocabulary, vocabulary),)


def equal(
    count: int, *, flops: float = 1e11, link: float = 1e8, memory: float = 1e9, latency: float = 1e-3
) -> Profiles:
    same = np.ones(count)
    return fleets.of(same * flops, same * link, same * link, same * latency, same * memory)


def planned(
    fleet: Profiles,
    sublayers: tuple[Sublayer, ...],
    sequences: int = 16,
    medium: float = inf,
    server: Server | None = None,
    previous: ResidentPlan | None = None,
) -> ResidentPlan:
    return plan_columns(posed(fleet, sublayers, sequences, medium, server), previous=previous)


def posed(
    fleet: Profiles,
    sublayers: tuple[Sublayer, ...],
    sequences: int = 16,
    medium: float = inf,
    server: Server | None = None,
    cores: float = inf,
    leasing: Leasing | None = None,
) -> Problem:
    return pose(
        fleet,
        sublayers,
        hidden=H,
        sequences=sequences,
        sequence=S,
        terms=live_terms("bf16"),
        server=server,
        medium_bytes_per_s=medium,
        cores=cores,
        leasing=leasing,
    )


def check(plan: ResidentPlan, fleet: Profiles, sublayers: tuple[Sublayer, ...], sequences: int) -> None:
    """Check everything that holds for any plan, recomputed from its stages."""
    ends = [0]
    for stage in plan.stages:
        assert stage.first == ends[-1]
        assert len(stage.columns) == 1 or (stage.count == 1 and sublayers[stage.first].allows(len(stage.columns)))
        ends.append(stage.first + stage.count)
    assert ends[-1] == len(sublayers), "every sublayer is in one stage"
    columns_of = Counter(device for stage in plan.stages for device in stage.devices)
    assert set(columns_of.values()) in ({1}, {2}), "stages are dealt out once, or twice"
    of = sum_up(sublayers, hidden=H, sequence=S, terms=live_terms("bf16"))
    memory = dict(zip(fleet.names, fleet.memory_bytes.tolist(), strict=True))
    for stage in plan.stages:
        shard = (np.array([x]) for x in (stage.first, stage.count, len(stage.columns)))
        held = shard_costs(of, *shard, chunk=plan.chunk)
        for column in stage.columns:
            shard, holdings = column.shard, column.holdings
            assert (shard.first, shard.count, shard.of) == (stage.first, stage.count, len(stage.columns))
            assert sum(one.sequences for one in holdings) == pytest.approx(sequences), "each row is covered once"
            assert all(one.sequences > 0 for one in holdings)
            for one in holdings:
                memory[one.device] -= held.memory_bytes[0]
            if held.takes_sequences[0]:
                assert all(one.sequences == int(one.sequences) for one in holdings)
    assert min(memory.values()) >= 0
    least = sum(s.trained for s in sublayers) * 2
    assert plan.down_bytes >= least
    assert plan.up_bytes >= least
    assert 0 < plan.step_s == pytest.approx(plan.busiest_s + plan.fill_s)


some_fleets = fleets.fleets(least=1, most=7, kinds=("usual", "wild", "narrow", "twins", "mixed"))


@settings(phases=QUICK, max_examples=40)
@given(some_fleets, st.integers(1, 4), st.booleans(), st.integers(1, 20), st.sampled_from([inf, 3e7]), fleets.servers)
def test_any_plan_is_sound(
    fleet: Profiles, layers: int, trained: bool, sequences: int, medium: float, server: Server
) -> None:
    sublayers = model(layers, trained=trained)
    try:
        plan = planned(fleet, sublayers, sequences, medium, server)
    except InfeasibleError:
        return
    check(plan, fleet, sublayers, sequences)


@settings(phases=QUICK, max_examples=15)
@given(some_fleets, st.integers(1, 3), st.integers(1, 12))
def test_neither_a_single_device_nor_data_parallelism_is_faster(fleet: Profiles, layers: int, sequences: int) -> None:
    sublayers = model(layers)
    problem = posed(fleet, sublayers, sequences)
    everyone = tuple(range(len(fleet)))
    ways = [(device,) for device in everyone] + [everyone]
    simple = [judge(problem, [Draft(0, len(sublayers), (way,))], 64, is_played=True) for way in ways]
    feasible = [plan.step_s for plan in simple if plan is not None]
    if feasible:
        assert planned(fleet, sublayers, sequences).step_s <= min(feasible) * 1.001


def test_equal_devices_on_fast_links_share_the_rows() -> None:
    plan = planned(equal(4, link=1e9), model(4))
    assert len(plan.stages) == 1
    assert [holding.sequences for holding in plan.stages[0].columns[0].holdings] == [4, 4, 4, 4]
    assert plan.limit == "compute"


def test_equal_devices_on_a_slow_medium_become_a_pipeline_when_weights_are_trained() -> None:
    fleet, sublayers = equal(4, flops=3e10), model(12)
    plan = planned(fleet, sublayers, sequences=64, medium=5e6)
    assert len(plan.stages) > 2
    assert all(len(stage.devices) == 1 for stage in plan.stages)


def test_devices_of_one_machine_are_no_faster_than_its_cores() -> None:
    def of(cores: float) -> ResidentPlan:
        return plan_columns(posed(equal(4, link=1e9), model(4), cores=cores))

    def compute_s(plan: ResidentPlan) -> float:
        of = sum_up(model(4), hidden=H, sequence=S, terms=live_terms("bf16"))
        one = np.arange(len(of))
        costs = shard_costs(of, one, np.ones_like(one), np.ones_like(one), chunk=plan.chunk)
        everything = np.full((len(of), 1), KEEPINGS.index("all"))  # devices that keep it recompute least
        return 16 * S * float(compute_s_per_row(costs, equal(1, link=1e9), plan.chunk, of.terms, everything).sum())

    assert of(4.0).step_s == of(inf).step_s
    assert of(1.0).step_s >= compute_s(of(1.0))
    assert of(2.0).step_s >= compute_s(of(2.0)) / 2
    assert of(1.0).step_s > 3 * of(inf).step_s


def test_when_memory_holds_few_sequences_they_take_turns() -> None:
    layers = sum_up(model(4, trained=False), hidden=H, sequence=S, terms=live_terms("bf16"))
    least = shard_costs(layers, np.array([0, 4]), np.array([4, 5]), np.array([1, 1]), chunk=64).memory_bytes.max()

    def of(memory: float) -> ResidentPlan:
        problem = posed(equal(2, memory=memory), model(4, trained=False))
        halves = [Draft(4 * n, 4 + n, ((n,),)) for n in (0, 1)]
        plan = judge(problem, halves, 64)
        assert plan is not None
        return plan

    roomy, tight = of(1e9), of(least)
    assert tight.limit == "memory"
    assert tight.step_s > 1.2 * roomy.step_s


def test_with_frozen_weights_rows_are_shared_even_on_a_slow_medium() -> None:
    plan = planned(equal(4), model(12, trained=False), sequences=64, medium=1e7)
    assert len(plan.devices) == 4
    assert all(len(stage.devices) > 1 for stage in plan.stages)


def test_a_model_too_large_for_one_device_is_cut() -> None:
    sublayers = model(6)
    bytes_of_all = 8 * sum(s.params for s in sublayers)
    plan = planned(equal(4, memory=bytes_of_all / 2), sublayers)
    assert len(plan.stages) > 1
    check(plan, equal(4, memory=bytes_of_all / 2), sublayers, 16)


def test_a_sublayer_too_large_for_one_device_is_sliced() -> None:
    sublayers = model(1, vocabulary=64_000)
    fleet = equal(4, memory=8 * 64_000 * H / 1.8)
    plan = planned(fleet, sublayers)
    assert len(plan.stages[-1].columns) > 1
    check(plan, fleet, sublayers, 16)


def test_a_model_that_fits_nowhere_is_refused_with_the_sizes() -> None:
    with pytest.raises(InfeasibleError, match=r"GB.*add devices or memory"):
        planned(equal(2, memory=2e7), model(8))
    with pytest.raises(InputError, match="sublayers"):
        planned(equal(2), ())


def test_plans_for_many_devices_are_sound() -> None:
    fleet, sublayers = fleets.usual(40, 2), model(6)
    plan = planned(fleet, sublayers, sequences=32)
    check(plan, fleet, sublayers, 32)
    assert plan.step_s <= planned(fleet.take(np.arange(4)), sublayers, sequences=32).step_s


def test_an_existing_plan_is_kept_while_rates_drift() -> None:
    fleet = fleets.usual(6, 3)
    sublayers = model(6)
    first = planned(fleet, sublayers)
    holders = [stage.devices for stage in first.stages]
    for seed in range(4):
        wander = np.random.default_rng(seed).uniform(0.96, 1.04, len(fleet))
        later = replace(fleet, flops_per_s=fleet.flops_per_s * wander, up_bytes_per_s=fleet.up_bytes_per_s / wander)
        plan = planned(later, sublayers, previous=first)
        assert [stage.devices for stage in plan.stages] == holders


def test_an_existing_plan_is_replaced_by_a_much_faster_one() -> None:
    fleet, sublayers = equal(4, link=1e9), model(4)
    alone = planned(equal(1, link=1e9), sublayers)
    assert len(planned(fleet, sublayers, previous=alone).stages[0].devices) == 4


def test_a_previous_plan_for_another_model_or_departed_devices_is_ignored() -> None:
    four = planned(equal(4), model(4))
    assert planned(equal(2), model(4), previous=four) == planned(equal(2), model(4))
    assert planned(equal(4), model(5), previous=four) == planned(equal(4), model(5))


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_devices_changes_nothing(seed: int) -> None:
    ladder = 2.0 ** np.arange(5)
    fleet = fleets.of(1e10 * ladder, 1e7 * ladder, 5e6 * ladder, np.full(5, 0.01), 1e8 * ladder)
    mixed = np.random.default_rng(seed).permutation(5)
    plan, other = planned(fleet, model(4)), planned(fleet.take(mixed), model(4))
    assert other.step_s == pytest.approx(plan.step_s)
    assert [sorted(stage.devices) for stage in other.stages] == [sorted(stage.devices) for stage in plan.stages]


def test_a_slower_medium_or_server_never_makes_a_step_faster() -> None:
    fleet, sublayers = fleets.usual(5, 4), model(4)
    free = planned(fleet, sublayers).step_s
    assert planned(fleet, sublayers, medium=1e7).step_s >= free
    assert planned(fleet, sublayers, server=Server(down_bytes_per_s=1e7, up_bytes_per_s=1e7)).step_s >= free


def test_latency_is_paid_for_every_hop_of_a_chunk() -> None:
    sublayers = model(3)
    memory = 8 * sum(s.params for s in sublayers) / 2
    near, far = (planned(equal(4, memory=memory, latency=latency), sublayers) for latency in (0.0, 0.5))
    assert far.fill_s >= near.fill_s + 2 * 0.5 * (len(far.stages) - 1)


# ------------------------------------------------------------------------------------------------ leases

ADAM = Leasing(states=2)


def leased(plan: ResidentPlan) -> list[bool]:
    return [column.is_leased for stage in plan.stages for column in stage.columns]


@settings(phases=QUICK, max_examples=15)
@given(some_fleets, st.integers(1, 4), st.booleans(), st.integers(1, 12), st.sampled_from([inf, 3e7]))
def test_leases_never_make_a_step_slower_and_have_one_holder_each(
    fleet: Profiles, layers: int, trained: bool, sequences: int, medium: float
) -> None:
    problem = posed(fleet, model(layers, trained=trained), sequences, medium, leasing=ADAM)
    try:
        plan, synchronized = plan_columns(problem), plan_columns(replace(problem, leasing=None))
    except InfeasibleError:
        return
    assert plan.step_s <= synchronized.step_s
    assert not any(leased(synchronized))
    for stage in plan.stages:
        for column in stage.columns:
            assert not column.is_leased or (len(column.holdings) == 1 and column.shard.of == 1)
            assert (column.snapshot_every > 0) == column.is_leased


def test_on_slow_links_every_stage_is_leased_and_only_activations_and_snapshots_travel() -> None:
    fleet, sublayers = equal(3, link=2e6), model(6)
    plan = plan_columns(posed(fleet, sublayers, leasing=ADAM))
    assert len(plan.stages) == 3
    assert all(leased(plan))
    rows = 16 * S * 2 * 2 * H * 2 + 16 * S * (2 * H + 12)  # x and dy of two stages; x, target and logsumexp of the head
    assert plan.down_bytes == pytest.approx(rows)
    trained = sum(sublayer.trained for sublayer in sublayers)
    every = [column.snapshot_every for stage in plan.stages for column in stage.columns]
    rows = 16 * S * (2 * 2 * H * 2 + 2 * H + 8)
    assert rows + 12 * trained / max(every) <= plan.up_bytes * 1.001
    assert plan.up_bytes <= rows + 12 * trained / min(every)
    assert plan.step_s < 0.4 * plan_columns(posed(fleet, sublayers)).step_s


def test_the_formula_and_the_timeline_of_a_leased_pipeline_agree() -> None:
    problem = posed(equal(3, link=2e6), model(6), leasing=ADAM)
    stages = [Draft(0, 4, ((0,),)), Draft(4, 5, ((1,),)), Draft(9, 4, ((2,),))]
    formula, timeline = (judge(problem, stages, 128, is_played=is_played) for is_played in (False, True))
    assert formula is not None
    assert timeline is not None
    assert timeline.step_s == pytest.approx(formula.step_s, rel=0.15)
    assert timeline.arrangement == formula.arrangement


def test_a_column_of_two_is_synchronized() -> None:
    problem = posed(equal(2), model(2), leasing=ADAM)
    plan = judge(problem, [Draft(0, 5, ((0, 1),))], 64)
    assert plan is not None
    assert leased(plan) == [False]
    assert plan == judge(replace(problem, leasing=None), [Draft(0, 5, ((0, 1),))], 64)


def test_slices_are_synchronized() -> None:
    plan = judge(posed(equal(2), model(2), leasing=ADAM), [Draft(0, 4, ((0,),)), Draft(4, 1, ((0,), (1,)))], 64)
    assert plan is not None
    assert leased(plan) == [True, False, False]


def test_a_device_that_may_not_lend_is_synchronized() -> None:
    leasing = Leasing(states=2, lenders=frozenset({DeviceId("d1")}))
    plan = judge(posed(equal(2), model(2), leasing=leasing), [Draft(0, 2, ((0,),)), Draft(2, 3, ((1,),))], 64)
    assert plan is not None
    assert leased(plan) == [False, True]


@pytest.mark.parametrize("states", [0, 1, 2])
def test_a_lease_takes_memory_for_the_optimizer_state(states: int) -> None:
    sublayers, stages = model(2), [Draft(0, 5, ((0,),))]
    whole = shard_costs(posed(equal(1), sublayers).sums, *np.array([[0], [5], [1]]), chunk=64).memory_bytes[0]
    needed = whole + 4 * states * sum(sublayer.trained for sublayer in sublayers)
    for memory, is_leased in ((needed, True), (needed - 1, states == 0)):
        problem = posed(equal(1, memory=memory), sublayers, leasing=Leasing(states=states))
        plan = judge(problem, stages, 64)
        if memory < whole:
            assert plan is None
            continue
        assert plan is not None
        assert leased(plan) == [is_leased]


def test_a_log_without_room_for_a_few_steps_forbids_leases() -> None:
    def of(log_bytes: float) -> ResidentPlan:
        return plan_columns(posed(equal(1), model(2), leasing=Leasing(states=2, log_bytes=log_bytes)))

    step_bytes = 16 * S * (2 * H + 12)
    assert not any(leased(of(5.9 * step_bytes)))
    plan = of(6 * step_bytes)
    assert all(leased(plan))
    assert plan.log_bytes == 6 * step_bytes
    assert of(1e9 * step_bytes).log_bytes <= 256 * step_bytes


def test_weights_that_the_server_updates_travel_even_if_the_rest_is_leased() -> None:
    *parts, head = model(2)
    tied = (*parts, replace(head, unleased=head.trained))
    free, bound = (plan_columns(posed(equal(1), sublayers, leasing=ADAM)) for sublayers in ((*parts, head), tied))
    assert leased(free) == leased(bound) == [True]
    assert bound.down_bytes == pytest.approx(free.down_bytes + 2 * head.trained)


def test_an_existing_plan_is_leased_once_that_is_allowed_and_stays_so() -> None:
    fleet, sublayers = equal(3, link=2e6), model(6)
    before = planned(fleet, sublayers)
    assert len(before.stages) > 1
    later = plan_columns(posed(fleet, sublayers, leasing=ADAM), previous=before)
    assert any(leased(later))
    again = judge_again(posed(fleet, sublayers, leasing=ADAM), later)
    assert again is not None
    assert again.arrangement == later.arrangement
    assert later.arrangement != before.arrangement
    kept = judge_again(posed(fleet, sublayers, leasing=ADAM), before)
    assert kept is not None
    assert not any(leased(kept)), "the same arrangement, as it is"


def test_where_memory_holds_activations_of_a_few_sequences_they_are_kept_a_few_at_a_time() -> None:
    inside = {"attention": 2 * H, "mlp": 8 * H, "head": 0}
    sublayers = tuple(replace(one, inside=inside[one.kind]) for one in model(8, vocabulary=1_000))
    whole = (np.array([one]) for one in (0, len(sublayers), 1))
    of = shard_costs(posed(equal(1), sublayers).sums, *whole, chunk=S)
    four = float(of.memory_bytes[0] + 4 * (of.kept_bytes[0, -1] + of.state_bytes[0]))
    several = four + 32 * S * H * 4  # x of every sequence
    cramped, roomy = (planned(equal(1, memory=memory), sublayers, 32) for memory in (several, 10 * several))
    (holding,) = cramped.stages[0].columns[0].holdings
    assert holding.keeps == "all"
    assert cramped.step_s == pytest.approx(roomy.step_s, rel=0.05)


def test_a_plan_judged_again_on_the_same_fleet_takes_as_long_where_memory_is_short_too() -> None:
    inside = {"attention": 2 * H, "mlp": 8 * H, "head": 0}
    sublayers = tuple(replace(one, inside=inside[one.kind]) for one in model(8, vocabulary=1_000))
    problem = posed(equal(1, memory=3.3e8), sublayers, 32)
    plan = plan_columns(problem)
    assert plan.kept_sequences < problem.kept_sequences
    again = judge_again(problem, plan)
    assert again is not None
    assert again.step_s == plan.step_s
    kept = plan_columns(problem, previous=plan)
    assert kept.step_s == plan.step_s


def test_gradients_go_up_after_all_rows_so_a_slow_uplink_gets_as_many_rows() -> None:
    fleet = equal(2, flops=1e9, link=1e9)
    uneven = replace(fleet, up_bytes_per_s=fleet.up_bytes_per_s * np.array([1.0, 0.01]))
    plan = judge(posed(uneven, model(1)), [Draft(0, 3, ((0, 1),))], S)
    assert plan is not None
    assert [holding.sequences for holding in plan.stages[0].columns[0].holdings] == [8, 8]


def test_a_shard_that_lost_its_device_goes_where_a_step_takes_least_and_all_others_stay() -> None:
    flops, links = np.array([1.0, 3.0, 2.0, 2.5, 0.5]) * 1e11, np.array([1.0, 1.0, 2.0, 1.0, 0.3]) * 3e6
    whole = fleets.of(flops, 4 * links, links, np.full(5, 1e-3), np.full(5, 1e9))
    stages = [Draft(0, 3, ((0,),)), Draft(3, 2, ((1,),)), Draft(5, 2, ((2,),))]
    plan = judge(posed(whole, model(3), leasing=ADAM), stages, 64)
    assert plan is not None
    assert leased(plan) == [True] * 3
    for gone in range(3):
        rest = whole.take(np.array([device for device in range(5) if device != gone]))
        problem = posed(rest, model(3), leasing=ADAM)
        found = rehouse(problem, plan, ())
        assert found is not None
        assert found.chunk == plan.chunk
        assert found.leased.keys() == plan.leased.keys()
        for number, (shard, device) in enumerate(plan.leased.items()):
            assert number == gone or found.leased[shard] == device
        ways: list[ResidentPlan | None] = []
        for device in range(len(rest)):
            at = [[rest.names.index(d)] if d in rest.names else [device] for d in plan.leased.values()]
            moved = [replace(stage, members=(tuple(one),)) for stage, one in zip(stages, at, strict=True)]
            ways.append(judge(problem, moved, 64, is_played=True))
        assert found.step_s == min(way.step_s for way in ways if way is not None)


def test_stages_are_dealt_out_twice_where_that_fills_the_pipeline_sooner() -> None:
    fleet, sublayers = equal(4), model(8)
    plan = planned(fleet, sublayers, 16)
    check(plan, fleet, sublayers, 16)
    holders = Counter(device for stage in plan.stages for device in stage.devices)
    assert max(holders.values()) == 2
    runs = (0, 5), (5, 4), (9, 5), (14, 3)
    once = [Draft(first, count, ((device,),)) for device, (first, count) in enumerate(runs)]
    for lead in (0, 1, 2):
        way = judge(replace(posed(fleet, sublayers, 16), lead=lead), once, plan.chunk, is_played=True)
        assert way is not None
        assert plan.step_s < way.step_s


def test_shards_that_share_a_device_share_its_memory() -> None:
    stages = [Draft(0, 2, ((0,),)), Draft(2, 3, ((0,),))]
    sizes = shard_costs(posed(equal(1), model(2)).sums, *np.array([[0, 2], [2, 3], [1, 1]]), chunk=64).memory_bytes
    for memory, fits in ((sizes.sum(), True), (sizes.sum() - 1, False)):
        assert (judge(posed(equal(1, memory=memory), model(2)), stages, 64) is not None) == fits


def test_a_standing_lease_outlives_a_device_of_the_plan() -> None:
    problem = posed(equal(3, link=3e6), model(4), leasing=ADAM)
    plan = judge(problem, [Draft(0, 4, ((0,),)), Draft(4, 5, ((1,),))], 64, is_played=True)
    assert plan is not None
    rest = posed(equal(3, link=3e6).take(np.array([1, 2])), model(4), leasing=ADAM)
    found = plan_columns(rest, previous=plan)
    assert list(found.leased.values()) == ["d2", "d1"]
