"""DT-FM's costs by hand, its scheduler against brute force, and the example of its authors."""

from __future__ import annotations

import csv
from itertools import pairwise, permutations
from math import inf
from pathlib import Path

import numpy as np
import pytest

from cleave.core.cost.rates import Server
from cleave.core.fleet.profiles import Floats, Profiles
from cleave.core.model.shapes import named
from cleave.core.plan.rivals.case import Case
from cleave.core.plan.rivals.pipeline import weigh
from cleave.core.plan.rivals.stages import Placement, Stages
from cleave.sim.baselines.dtfm import Candidate, held_bytes, scheduled, timed
from cleave.sim.baselines.dtfm_schedule import (
    Budget,
    Links,
    Schedule,
    Traffic,
    access_links,
    bottleneck,
    evolve,
    reduction_s,
    schedule,
    table_links,
    tour,
)

CITIES = ("Oregon", "Virginia", "Ohio", "Tokyo", "Seoul", "London", "Frankfurt", "Ireland")
V100_FLOPS_PER_S = 0.4 * 125e12
"""The peak of `facts/cloud.csv`, and the share of it that tensor cores sustain in `facts/measured_gemm.csv`."""


def fleet(count: int, *, flops: float = 1e12, link: float = 1e15, memory: float = 1e15) -> Profiles:
    return Profiles(
        names=tuple(f"d{number}" for number in range(count)),
        flops_per_s=np.full(count, flops),
        down_bytes_per_s=np.full(count, link),
        up_bytes_per_s=np.full(count, link),
        latency_s=np.zeros(count),
        memory_bytes=np.full(count, memory),
    )


def case_of(profiles: Profiles, *, sequences: int, sequence: int = 1024, model: str = "opt-1.3b") -> Case:
    return Case(
        profiles=profiles,
        shape=named(model),
        tokens=sequences * sequence,
        sequence=sequence,
        wire="bf16",
        server=Server(),
    )


def candidate(stages: int, pipelines: int, layers: int) -> Candidate:
    return Candidate(
        groups=np.arange(stages * pipelines).reshape(stages, pipelines),
        movable=np.ones((stages, pipelines), dtype=np.bool_),
        layers=np.full(stages, layers / stages),
    )


def random_links(count: int, seed: int) -> Links:
    rng = np.random.default_rng(seed)
    delay, rate = rng.uniform(0.001, 0.2, (count, count)), rng.uniform(1e7, 3e8, (count, count))
    return table_links((delay + delay.T) / 2, (rate + rate.T) / 2)


# ------------------------------------------------------------------------------------------------ costs by hand


def test_data_cost_pipeline_cost_and_score_are_the_published_ones() -> None:
    # Two groups of two: {0, 1} and {2, 3}. 100 bytes of gradients, 40 of activations, R = 2.
    delay = np.array([[0, 1, 2, 3], [1, 0, 4, 1], [2, 4, 0, 2], [3, 1, 2, 0]], dtype=float)
    rate = np.array([[1, 10, 20, 5], [10, 1, 4, 10], [20, 4, 1, 25], [5, 10, 25, 1]], dtype=float)
    links = table_links(delay, rate)
    # 0-1: 2 (1 + 100 / (2 x 10)) = 12; 2-3: 2 (2 + 100 / (2 x 25)) = 8; the larger one counts
    groups = np.array([[0, 1], [2, 3]])
    assert reduction_s(groups, links, 100.0).tolist() == [[12.0, 12.0], [8.0, 8.0]]
    # 0-2: 2 + 40/20 = 4, 1-3: 1 + 40/10 = 5, so max 5; 0-3: 3 + 40/5 = 11, 1-2: 4 + 40/4 = 14, so max 14
    found = schedule(groups, links, Traffic(gradient_bytes=100.0, activation_bytes=40.0))
    assert (found.data_s, found.pipe_s, found.score_s) == (12.0, 5.0, 22.0)
    assert found.groups.tolist() == [[0, 1], [2, 3]]


def test_equal_stages_on_boundless_links_have_the_known_bubble() -> None:
    # 4 stages of 6 layers, 8 micro-batches: (M + S - 1) (f + b), the last stage has the head besides
    case = case_of(fleet(4), sequences=8)
    stages = Stages(case, 1024, recompute=True)
    one_s = 6 * float((stages.forward_s + stages.backward_s)[0])
    head_s = float((stages.head_forward_s + stages.head_backward_s)[0])
    took = timed(case, stages, candidate(4, 1, 24), access_links(case.profiles))
    assert took.step_s == pytest.approx(4 * one_s + head_s + 7 * (one_s + head_s), rel=1e-6)


def test_a_single_pipeline_takes_what_the_planners_formula_says() -> None:
    profiles = fleet(4, link=2e6)
    case = case_of(profiles, sequences=8)
    stages = Stages(case, 1024, recompute=True)
    placed = Placement(
        devices=np.arange(4),
        layers=np.full(4, 6.0),
        has_table=np.array([True, False, False, False]),
        has_head=np.array([False, False, False, True]),
    )
    took = timed(case, stages, candidate(4, 1, 24), access_links(profiles))
    assert took.step_s == pytest.approx(weigh(case, stages, placed, 1).step_s, rel=1e-9)


def test_two_replicas_exchange_their_gradients_once_over_their_link() -> None:
    # 2 (R - 1) / R = 1 time 2 bytes a parameter, plus a flow of one sequence each
    case = case_of(fleet(2, link=1e6), sequences=2)
    stages = Stages(case, 1024, recompute=True)
    took = timed(case, stages, candidate(1, 2, 24), access_links(case.profiles))
    computing_s = sum(part.sum() for part in (stages.forward_s[:1], stages.backward_s[:1])) * 24
    computing_s += float((stages.head_forward_s + stages.head_backward_s)[0])
    params = case.shape.layers * case.layer.params + case.table.params + case.head.params
    assert took.reduction_s == pytest.approx(2 * params / 1e6)
    assert took.step_s == pytest.approx(computing_s + took.reduction_s)


def test_memory_has_the_state_all_inputs_and_one_layer_at_work() -> None:
    # OPT-1.3B: hidden 2048; two layers, 8 sequences of 1,024 in 2 pipelines: 4 micro-batches.
    # 16 bytes x 2 x 50,358,272; (2 layers + 2) x 4 x 1,024 x 2 x 2,048; 34 x 2,048 x 1,024 at work; 16 MB runtime
    case = case_of(fleet(4), sequences=8)
    assert case.layer.params == 50_358_272
    expected = 16 * 2 * 50_358_272 + 4 * 4 * 1024 * 4096 + 34 * 2048 * 1024 + 16e6
    assert held_bytes(case, 2.0, 2, has_table=False, has_head=False) == expected


# ------------------------------------------------------------------------------------------------ the scheduler


@pytest.mark.parametrize("seed", range(8))
def test_matchings_have_the_least_largest_cost(seed: int) -> None:
    costs: Floats = np.random.default_rng(seed).uniform(size=(6, 6)).round(1)
    value, partners = bottleneck(costs)
    assert sorted(partners.tolist()) == list(range(6))
    assert costs[np.arange(6), partners].max() == value
    assert value == min(max(costs[row, col] for row, col in enumerate(order)) for order in permutations(range(6)))


@pytest.mark.parametrize("ends", [None, (0, 3)])
@pytest.mark.parametrize("seed", range(4))
def test_short_tours_are_the_shortest(seed: int, ends: tuple[int, int] | None) -> None:
    edges = np.random.default_rng(seed).uniform(size=(7, 7))
    edges = edges + edges.T

    def length(order: tuple[int, ...] | list[int]) -> float:
        return float(sum(edges[here, there] for here, there in pairwise(order)))

    allowed = [
        order for order in permutations(range(7)) if ends is None or (order[0] == ends[0] and order[-1] == ends[1])
    ]
    assert length(tour(edges, ends)) == pytest.approx(min(map(length, allowed)))


@pytest.mark.parametrize("ends", [None, (5, 2)])
def test_long_tours_visit_everybody_and_keep_their_ends(ends: tuple[int, int] | None) -> None:
    place = np.random.default_rng(0).uniform(size=(40, 2))
    edges = np.linalg.norm(place[:, None] - place[None], axis=2)
    order = tour(edges, ends)
    assert sorted(order) == list(range(40))
    if ends is not None:
        assert (order[0], order[-1]) == ends
    shuffled = np.random.default_rng(1).permutation(40)
    length = sum(edges[here, there] for here, there in pairwise(order))
    assert length < 0.4 * sum(edges[here, there] for here, there in pairwise(shuffled))


def test_evolution_keeps_partitions_balanced_and_finds_better_ones_than_it_began_with() -> None:
    links, traffic = worldwide(), Traffic(gradient_bytes=5e8, activation_bytes=5e8)
    groups = np.random.default_rng(9).permutation(64).reshape(8, 8)
    free = np.ones((8, 8), dtype=np.bool_)

    def found(trials: int, seed: int = 0) -> Schedule:
        return evolve(groups, free, links, traffic, Budget(population=10, trials=trials), np.random.default_rng(seed))

    evolved = found(150)
    assert sorted(evolved.groups.ravel().tolist()) == list(range(64))
    assert evolved.score_s < 0.8 * found(0).score_s
    assert found(20).groups.tolist() == found(20).groups.tolist()
    assert found(20).groups.tolist() != found(20, seed=1).groups.tolist()


def test_groups_that_hold_the_ends_of_the_model_stay_there() -> None:
    links, traffic = random_links(24, seed=3), Traffic(gradient_bytes=1e8, activation_bytes=1e8)
    groups, movable = np.arange(24).reshape(6, 4), np.ones((6, 4), dtype=np.bool_)
    movable[[0, -1]] = False
    found = evolve(groups, movable, links, traffic, Budget(population=8, trials=100), np.random.default_rng(0))
    assert sorted(found.groups[0].tolist()) == [0, 1, 2, 3]
    assert sorted(found.groups[-1].tolist()) == [20, 21, 22, 23]


# ------------------------------------------------------------------------------------------------ the authors' example


def worldwide() -> Links:
    """Case 4 of DS3Lab/DT-FM's config.py: eight cities with eight cards each; 5 ms and 2 Gbit/s within a city."""
    with (Path(__file__).parent / "dtfm_wan_links.csv").open() as file:
        pairs = {row["pair"]: (float(row["delay_ms"]), float(row["bandwidth_gbps"])) for row in csv.DictReader(file)}
    delay, rate = np.full((64, 64), 5.0), np.full((64, 64), 2.0)
    for one in range(64):
        for other in range(64):
            here, there = CITIES[one // 8], CITIES[other // 8]
            if here != there:
                known = f"{here}-{there}" if f"{here}-{there}" in pairs else f"{there}-{here}"
                delay[one, other], rate[one, other] = pairs[known]
    return table_links(delay / 1e3, rate * 1e9 / 8)


def datacenter() -> Links:
    """Case 0: eight hosts with eight cards each; 100 Gbit/s within a host, 3.125 Gbit/s per card between hosts."""
    same = np.arange(64)[:, None] // 8 == np.arange(64) // 8
    return table_links(np.zeros((64, 64)), np.where(same, 100.0, 3.125) * 1e9 / 8)


def test_a_worldwide_fleet_is_as_much_slower_than_a_datacenter_as_its_authors_print() -> None:
    # GPT-3 1.3B, 64 V100, a million tokens: "only 1.7 to 2.3 times slower" (authors' summary). OPT-1.3B is its twin.
    case = case_of(fleet(64, flops=V100_FLOPS_PER_S, memory=16e9), sequences=488, sequence=2048)
    stages, eight = Stages(case, 2048, recompute=True), candidate(8, 8, 24)
    assert max(held_bytes(case, 3.0, 8, has_table=False, has_head=head) for head in (False, True)) < 16e9
    seconds = [
        scheduled(case, stages, eight, links, np.random.default_rng(0))[1].step_s
        for links in (worldwide(), datacenter())
    ]
    assert 1.7 < seconds[0] / seconds[1] < 2.3
    assert seconds[1] < inf
