"""Laws of column plans for any fleet: they tile the plane, fit in memory, and beat every single way of splitting."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.support import fleets
from tests.support.grids import examples

from cleave.core.cost.rates import Server
from cleave.core.cost.resident import shard_costs, sum_up
from cleave.core.cost.terms import lean_terms
from cleave.core.cost.wire import WireFormat
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.keeping import KEEPINGS
from cleave.core.model.shapes import named
from cleave.core.model.sublayers import sublayers_of
from cleave.core.plan.resident.cover import Cover, Table, make_table, weigh
from cleave.core.plan.resident.few_devices import plan_few
from cleave.core.plan.resident.large_fleet import ModelPlan, plan_resident
from cleave.core.plan.resident.plane import tiles, worth_of_one_more
from cleave.core.plan.resident.search import covers_of
from cleave.core.plan.rivals.case import Case
from cleave.core.plan.rivals.compare import all_rivals
from cleave.core.plan.rivals.products import attention_by_heads_s
from cleave.core.plan.step import choose_step, plan_step
from cleave.errors import InfeasibleError, InputError

QUICK = (Phase.explicit, Phase.reuse, Phase.generate)
SHAPE = replace(named("opt-125m"), layers=3, hidden=256, embed_dim=256, ffn=1024, heads=4, kv_heads=4, vocab=2000)
S = 256
some_fleets = fleets.fleets(least=2, most=24, kinds=("usual", "wild", "narrow", "twins", "mixed"))


def planned(
    fleet: Profiles,
    sequences: int = 16,
    wire: WireFormat = "bf16",
    server: Server | None = None,
    previous: ModelPlan | None = None,
) -> ModelPlan:
    return plan_resident(fleet, SHAPE, sequences * S, sequence=S, wire=wire, server=server, previous=previous)


def check(plan: ModelPlan, fleet: Profiles) -> None:
    """Check everything that holds for any plan, recomputed from its stages."""
    sublayers = sublayers_of(plan.shape)
    of = sum_up(sublayers, hidden=plan.shape.hidden, sequence=plan.sequence, terms=lean_terms(plan.wire))
    assert [stage.first for stage in plan.stages] == [
        0,
        *np.cumsum([stage.count for stage in plan.stages])[:-1].tolist(),
    ]
    found = tiles(plan)
    area = sum((tile.params[1] - tile.params[0]) * (tile.tokens[1] - tile.tokens[0]) for tile in found)
    assert area == pytest.approx(plan.tokens * sum(sublayer.params for sublayer in sublayers))
    columns: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for tile in found:
        columns.setdefault((tile.stage, tile.part), []).append(tile.tokens)
    for tokens in columns.values():
        assert [0, *(bottom for _, bottom in tokens)] == [*(top for top, _ in tokens), plan.tokens]

    places = {name: number for number, name in enumerate(fleet.names)}
    for part in plan.rounds:
        holders = [device for stage in part.plan.stages for device in stage.devices]
        assert len(holders) == len(set(holders)), "a device is in one column of a round"
        chunk, number_s = part.recipe.chunk, 0.0
        for stage in part.plan.stages:
            held = shard_costs(
                of, *(np.array([x]) for x in (stage.first, stage.count, len(stage.columns))), chunk=chunk
            )
            for holdings in (column.holdings for column in stage.columns):
                for name, sequences, keeps in holdings:
                    device, level = places[name], np.array([[KEEPINGS.index(keeps)]])
                    rows = sequences * plan.sequence
                    kept_bytes = held.state_keeping(level)[0, 0] - held.state_bytes[0]
                    x_bytes = plan.sequence * held.kept_bytes_per_row[0]
                    opened = min(part.recipe.kept_sequences, plan.tokens // plan.sequence) if level.any() else 0
                    others_bytes = max(opened - 1, 0) * held.state_bytes[0]
                    needed = held.memory_bytes[0] + opened * (kept_bytes + x_bytes) + others_bytes
                    assert needed <= fleet.memory_bytes[device] * (1 + 1e-12)
                    if held.takes_sequences[0]:
                        assert sequences == pytest.approx(round(sequences))
                    busy_s = max(
                        rows * held.down_bytes_per_row[0] / fleet.down_bytes_per_s[device],
                        rows * held.up_bytes_per_row[0] / fleet.up_bytes_per_s[device],
                        rows * held.flops_keeping(level)[0, 0] / fleet.flops_per_s[device],
                    )
                    assert busy_s <= (part.plan.busiest_s - part.synchronisation_s) * (1 + 1e-9)
                    number_s = max(number_s, float(held.sync_up_bytes[0]) / fleet.up_bytes_per_s[device])
        assert number_s <= (part.synchronisation_s + part.plan.fill_s) * (1 + 1e-9)
    used = {tile.device for tile in found}
    assert used.isdisjoint(plan.left_out)
    assert used | set(plan.left_out) == set(fleet.names)
    assert plan.step_s == pytest.approx(plan.activation_s + plan.synchronisation_s + plan.fill_s)
    assert plan.step_s >= plan.bound_s * 0.999


@settings(phases=QUICK, max_examples=examples(12))
@given(some_fleets, st.integers(1, 24), st.sampled_from(fleets.WIRES), fleets.servers)
def test_every_token_meets_every_parameter_once_within_memory(
    fleet: Profiles, sequences: int, wire: WireFormat, server: Server
) -> None:
    try:
        plan = planned(fleet, sequences, wire, server)
    except InfeasibleError:
        return
    check(plan, fleet)


def test_a_model_larger_than_the_fleets_memory_is_planned_in_rounds() -> None:
    shape = named("opt-125m")
    small = replace(fleets.narrow(6, 1), memory_bytes=np.full(6, 4 * sum(s.params for s in sublayers_of(shape)) / 6))
    plan = plan_resident(small, shape, 8 * S, sequence=S)
    assert len(plan.rounds) > 1
    check(plan, small)


def test_a_model_that_fits_nowhere_is_refused_with_the_sizes() -> None:
    with pytest.raises(InfeasibleError, match="GB"):
        planned(replace(fleets.narrow(3, 1), memory_bytes=np.full(3, 1e6)))


@pytest.mark.parametrize(
    ("kind", "count", "server"),
    [
        ("usual", 12, Server()),
        ("narrow", 4, Server(down_bytes_per_s=2e7, up_bytes_per_s=2e7, flops_per_s=1e9)),
    ],
)
def test_neither_grain_is_faster_than_the_choice(kind: fleets.Kind, count: int, server: Server) -> None:
    fleet, shape, tokens = fleets.build(kind, count, 3), SHAPE, 4 * S
    chosen = choose_step(fleet, shape, tokens, sequence=S, server=server)
    case = Case(profiles=fleet, shape=shape, tokens=tokens, sequence=S, wire="bf16", server=server)
    assert chosen.step_s <= plan_resident(fleet, shape, tokens, sequence=S, server=server).step_s
    gemms = plan_step(fleet, shape, tokens, sequence=S, server=server, split="2d")
    attention_s = 0.0 if gemms.attention_s else attention_by_heads_s(case)
    assert chosen.step_s <= gemms.step_s + attention_s
    assert chosen.step_s >= chosen.bound_s
    assert {rival.name for rival in all_rivals(case)} < {way.name for way in chosen.rivals}


def test_a_faster_rival_is_named_with_its_reason_and_never_chosen() -> None:
    fast = fleets.of(*(np.full(4, x) for x in (1e12, 1e9, 1e9, 0.5, 1e11)))
    chosen = choose_step(fast, SHAPE, 64 * S, sequence=S)
    assert chosen.faster
    for rival in chosen.faster:
        assert rival.step_s < chosen.step_s
        assert not rival.is_ours
        assert rival.spares
    assert chosen.arrangement in ("columns", "grouped gemms")
    assert chosen.step_s == min(way.step_s for way in chosen.rivals if way.name == chosen.arrangement)


def roomy() -> Profiles:
    """Devices with memory for everything, whose compute limits activations."""
    flops_per_s, rate, latency_s, memory_bytes = (np.full(12, x) for x in (1e11, 2e7, 0.002, 1e11))
    return fleets.of(flops_per_s, rate, rate, latency_s, memory_bytes)


def weighed(plan: ModelPlan, fleet: Profiles, kept_sequences: int, slots: float | None = None) -> Cover:
    """A plan's columns, with other activations kept."""
    sums = sum_up(sublayers_of(SHAPE), hidden=SHAPE.hidden, sequence=S, terms=lean_terms("bf16"))
    chunk = plan.rounds[0].recipe.chunk
    table = make_table(fleet, sums, plan.tokens, chunk, is_held=True, kept_sequences=kept_sequences)
    assert (table.slots[table.keeps > 0] >= kept_sequences).all()
    if slots is not None:
        table = replace(table, slots=np.where(table.keeps > 0, slots, np.inf))
    stages = covers_of(table, plan.stages)
    assert stages is not None
    return weigh(table, stages, Server())


def test_devices_keep_activations_where_compute_limits_and_memory_has_room() -> None:
    plan = planned(roomy(), 96)
    check(plan, roomy())
    kinds = [one.kind for one in sublayers_of(SHAPE)]
    for column in plan.columns:
        has_attention = "attention" in kinds[column.shard.first : column.shard.stop]
        assert {holding.keeps for holding in column.holdings} == {"all" if has_attention else "nothing"}
    assert plan.step_s < 0.9 * weighed(plan, roomy(), 0).seconds


def test_a_device_whose_slots_are_full_waits_for_round_trips() -> None:
    plan = planned(roomy(), 96)
    most = max(holding.sequences for column in plan.columns for holding in column.holdings)
    free, four, one = (weighed(plan, roomy(), 4, slots) for slots in (1e9, 4.0, 1.0))
    assert free.seconds <= four.seconds < one.seconds
    trips_s = one.activation_s + one.fill_s
    assert trips_s >= most * one.fill_s
    assert trips_s == pytest.approx(4 * (four.activation_s + four.fill_s)) or four.seconds == free.seconds


def test_activations_are_not_kept_in_rounds_whose_weights_leave() -> None:
    sums = sum_up(sublayers_of(SHAPE), hidden=SHAPE.hidden, sequence=S, terms=lean_terms("bf16"))
    table = make_table(roomy(), sums, 16 * S, 64, is_held=False, kept_sequences=4)
    assert not table.keeps.any()
    fits_exactly(table)


def fits_exactly(table: Table) -> None:
    """As many sequences are open as there is memory for what attention keeps of each, and none more."""
    states = table.of.state_bytes[:, None]
    used = (table.of.memory_bytes[:, None] - states) + table.slots * states
    has_state = table.of.takes_sequences
    memory = table.profiles.memory_bytes
    assert has_state.any()
    assert (used[has_state] <= memory * (1 + 1e-12)).all()
    assert ((used + states)[has_state] > memory * (1 - 1e-12)).all()


def test_without_kept_activations_too_memory_limits_the_sequences_at_once() -> None:
    plan = planned(roomy(), 96)
    sums = sum_up(sublayers_of(SHAPE), hidden=SHAPE.hidden, sequence=S, terms=lean_terms("bf16"))
    table = make_table(roomy(), sums, plan.tokens, plan.rounds[0].recipe.chunk, is_held=True)
    fits_exactly(table)
    stages = covers_of(table, plan.stages)
    assert stages is not None
    needed = max(float(table.of.memory_bytes[stage.kind]) for stage in stages)
    cramped = replace(roomy(), memory_bytes=np.full(12, needed))
    tight = make_table(cramped, sums, plan.tokens, plan.rounds[0].recipe.chunk, is_held=True)
    assert weigh(tight, stages, Server()).seconds > weigh(table, stages, Server()).seconds


def test_frozen_weights_do_not_travel_again() -> None:
    fleet, adapted = fleets.usual(12, 3), replace(SHAPE, adapter_rank=4)
    whole, adapters = (plan_resident(fleet, shape, 16 * S, sequence=S) for shape in (SHAPE, adapted))
    check(adapters, fleet)
    assert adapters.step_s < whole.step_s
    assert sum(sublayer.trained for sublayer in sublayers_of(adapted)) == 3 * (
        adapted.attention_adapter_params + adapted.mlp_adapter_params
    )


@pytest.mark.parametrize("count", [2, 4])
def test_few_devices_are_planned_no_worse_than_by_the_live_search(count: int) -> None:
    fleet = fleets.usual(count, 2)
    chosen = choose_step(fleet, SHAPE, 8 * S, sequence=S, resident_only=True)
    few = plan_few(fleet, SHAPE, 8 * S, sequence=S, wire="bf16", server=Server())
    assert chosen.step_s <= few.step_s
    assert few.step_s == pytest.approx(few.activation_s + few.synchronisation_s + few.fill_s)
    assert few.devices.isdisjoint(few.left_out)
    assert len(few.devices) + len(few.left_out) == count
    area = sum((tile.params[1] - tile.params[0]) * (tile.tokens[1] - tile.tokens[0]) for tile in tiles(few))
    assert area == pytest.approx(8 * S * sum(sublayer.params for sublayer in sublayers_of(SHAPE)))


def test_a_shared_medium_bounds_columns_by_all_their_bytes() -> None:
    fleet = fleets.usual(12, 3)
    shared = replace(fleet, medium=("wifi",) * 12, medium_bytes_per_s=np.full(12, 1e6))
    free, bound = (choose_step(one, SHAPE, 16 * S, sequence=S, resident_only=True) for one in (fleet, shared))
    assert isinstance(bound.plan, ModelPlan)
    assert bound.step_s == pytest.approx((bound.plan.down_bytes + bound.plan.up_bytes) / 1e6)
    assert bound.step_s > free.step_s


def test_joining_devices_never_slow_down_an_existing_plan() -> None:
    fleet = fleets.usual(20, 5)
    plan = planned(fleet.take(np.arange(12)))
    for count in (14, 17, 20):
        more = planned(fleet.take(np.arange(count)), previous=plan)
        assert more.step_s <= plan.step_s * (1 + 1e-9)
        plan = more


@pytest.mark.parametrize("seed", range(3))
def test_more_devices_do_not_make_a_first_plan_much_slower(seed: int) -> None:
    """The search is not exhaustive; it may lose a few percent."""
    fleet = fleets.usual(24, seed)
    assert planned(fleet).step_s <= planned(fleet.take(np.arange(18))).step_s * 1.05


def test_a_step_is_replanned_without_a_departed_device() -> None:
    fleet = fleets.usual(16, 6)
    plan = planned(fleet)
    gone = plan.stages[0].devices[0]
    rest = fleet.take(np.flatnonzero([name != gone for name in fleet.names]))
    again = planned(rest, previous=plan)
    check(again, rest)
    assert again.step_s <= planned(rest).step_s * 1.1


@pytest.mark.parametrize("seed", range(2))
def test_the_order_of_devices_changes_nothing(seed: int) -> None:
    fleet = fleets.usual(14, 9)
    mixed = np.random.default_rng(seed).permutation(14)
    plan, other = planned(fleet), planned(fleet.take(mixed))
    assert other.step_s == pytest.approx(plan.step_s, rel=1e-9)
    assert [stage.devices for stage in plan.stages] == [stage.devices for stage in other.stages]


def test_a_narrower_wire_is_faster_and_a_server_cap_is_not() -> None:
    fleet = fleets.usual(16, 7)
    free = planned(fleet).step_s
    assert planned(fleet, wire="q8").step_s < free < planned(fleet, wire="fp32").step_s
    capped = planned(fleet, server=Server(down_bytes_per_s=1e6, up_bytes_per_s=1e6))
    assert capped.step_s > free
    assert capped.limit == "server"


def test_a_better_extra_device_saves_at_least_as_much_time() -> None:
    fleet = replace(fleets.usual(30, 8), device_class=())
    worth = list(worth_of_one_more(planned(fleet), fleet).values())
    assert len(worth) == 4
    assert 0 <= worth[0] <= worth[3] < planned(fleet).step_s
    classes = tuple("ab"[number % 2] for number in range(30))
    assert set(worth_of_one_more(planned(fleet), replace(fleet, device_class=classes))) == {"a", "b"}


def test_tokens_must_be_whole_sequences() -> None:
    with pytest.raises(InputError, match="multiple"):
        choose_step(fleets.usual(4, 1), SHAPE, 1000, sequence=S)
