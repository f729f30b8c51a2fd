"""Published formulas of the rivals on cases small enough to do by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import inf

import numpy as np
import pytest

from cleave.core.cost.rates import Server
from cleave.core.cost.resident import effective_flops_per_s
from cleave.core.cost.terms import RUNTIME_BYTES
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.gemms import step_flops
from cleave.core.model.shapes import named
from cleave.core.plan.rivals.case import Case
from cleave.core.plan.rivals.stages import Stages
from cleave.sim.baselines import alpa, asteroid, gpipe, swarm
from cleave.sim.baselines.cloud import cloud
from cleave.sim.baselines.hivemind import averaging_parts, averaging_s
from cleave.sim.baselines.hybrid import EVERY_END, Ends, Table, orders, search
from cleave.sim.setting import Setting

MODEL = named("opt-125m")  # 12 layers, hidden 768, 12 heads


def fleet(*speeds: float, link: float = 1e15, memory: float = 1e15) -> Profiles:
    count = len(speeds)
    return Profiles(
        names=tuple(f"d{number}" for number in range(count)),
        flops_per_s=np.array(speeds),
        down_bytes_per_s=np.full(count, link),
        up_bytes_per_s=np.full(count, link),
        latency_s=np.zeros(count),
        memory_bytes=np.full(count, memory),
    )


def case_of(profiles: Profiles, sequences: int = 8) -> Case:
    return Case(profiles=profiles, shape=MODEL, tokens=1024 * sequences, sequence=1024, wire="bf16", server=Server())


# ------------------------------------------------------------------------------------------------ hivemind


def test_balanced_averaging_takes_what_its_linear_program_says() -> None:
    # V = 8 MB, links of 4, 2 and 2 MB/s. All three: max(8 / 2, 2 x 2 x 8 / 8) = 4 s; the fastest two: 8 / 2 = 4 s.
    rates = np.array([4e6, 2e6, 2e6])
    assert averaging_s(8e6, rates).tolist() == [0.0, 4.0, 4.0]
    # T rate / V - 1 = 1, 0, 0 over n - 2 = 1: the fastest averages all of it and moves 8 (1 + 1) MB in 4 s
    assert averaging_parts(rates).tolist() == [1.0, 0.0, 0.0]
    # equal links: 2 (n - 1) / n V / link, as a ring
    assert averaging_s(8e6, np.full(4, 2e6))[-1] == 2 * 3 / 4 * 8 / 2


@pytest.mark.parametrize("seed", range(10))
def test_no_peer_needs_longer_than_the_averaging_takes(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rates = -np.sort(-rng.lognormal(size=int(rng.integers(3, 40))))
    parts = averaging_parts(rates)
    assert parts.sum() == pytest.approx(1.0)
    assert (parts >= -1e-12).all()
    seconds = (1 + (len(rates) - 2) * parts) / rates
    assert seconds.max() <= averaging_s(1.0, rates)[-1] * (1 + 1e-9)


# ------------------------------------------------------------------------------------------------ SWARM


def test_the_stage_with_the_least_throughput_paces_a_swarm() -> None:
    # Two stages of six layers. Speeds 3, 2 and 1: the head's stage is heavier. Fastest first to the emptier stage.
    case = case_of(fleet(3e12, 2e12, 1e12))
    stages = Stages(case, 1024, recompute=False)
    layer_s = stages.forward_s + stages.backward_s
    head_s = stages.head_forward_s + stages.head_backward_s
    found = swarm.weigh(case, stages, np.arange(3), 2)
    assert found is not None
    members = [found.placed.devices[found.stage == stage].tolist() for stage in (0, 1)]
    assert members == [[0], [1, 2]]
    first_s, last_s = 6 * layer_s[0], (6 * layer_s + head_s)[1:]
    throughput = min(1 / first_s, float((1 / last_s).sum()))
    path_s = first_s + 2 / float((1 / last_s).sum())  # the mean of peers by how often a micro-batch gets there
    assert found.step_s == pytest.approx(path_s + 7 / throughput + found.reduction_s, rel=1e-5)
    assert found.shares[found.placed.devices.tolist().index(0)] == 1.0


def test_a_swarm_passes_activations_in_eight_bits() -> None:
    # One byte per number each way at the border: 8 sequences x 1,024 x 768, received and sent by both peers
    case = case_of(fleet(1e12, 1e12, link=1e6))
    found = swarm.weigh(case, Stages(case, 1024, recompute=False), np.arange(2), 2)
    assert found is not None
    assert found.moved_bytes.tolist() == [8 * 1024 * 768] * 2


# ------------------------------------------------------------------------------------------------ stages and meshes


def brute_force(tables: dict[Ends, Table], sizes: list[int], layers: int, batches: int, units: int) -> float:
    """The best of all partitions, one by one."""
    best = inf

    def extend(done: int, unit: int, path_s: float, pace_s: float) -> None:
        nonlocal best
        if done == layers:
            best = min(best, path_s + (batches - 1) * pace_s)
            return
        for count, (place, size) in product(range(1, layers - done + 1), enumerate(sizes)):
            ends: Ends = "both" if count == layers else "table" if done == 0 else "neither"
            if 0 < done == layers - count:
                ends = "head"
            for first in range(unit, units - size + 1):
                where = (count - 1, first, place)
                step_s = float(tables[ends].path_s[where])
                if step_s < inf:
                    extend(done + count, first + size, path_s + step_s, max(pace_s, float(tables[ends].pace_s[where])))

    extend(0, 0, 0.0, 0.0)
    return best


@pytest.mark.parametrize("seed", range(6))
def test_the_search_is_within_three_percent_of_the_best_partition(seed: int) -> None:
    rng = np.random.default_rng(seed)
    layers, units, sizes = 4, 5, [1, 2]
    tables: dict[Ends, Table] = {}
    for ends in EVERY_END:
        path = rng.uniform(0.5, 2.0, (layers, units, 2)) * np.arange(1, layers + 1)[:, None, None]
        path[:, units - 1, 1] = inf
        path[rng.uniform(size=path.shape) < 0.2] = inf
        tables[ends] = Table(path_s=path, pace_s=path * 0.7)
    for batches in (1, 3, 20):
        least_s = brute_force(tables, sizes, layers, batches, units)
        found = search(tables, np.array(sizes), layers, batches)
        assert found is not None
        assert least_s * (1 - 1e-9) <= found.step_s <= least_s / 0.97


def test_alpa_adds_all_stages_and_the_slowest_once_per_further_micro_batch() -> None:
    # T = t1 + t2 + (B - 1) max(t1, t2), two equal devices on boundless links, six layers each and the head
    case = case_of(fleet(1e12, 1e12))
    meshes = alpa.Meshes(case, np.array([[0], [1]]), 1, recompute=False)
    stages = Stages(case, 1024, recompute=False)
    first_s = 6 * float((stages.forward_s + stages.backward_s)[0])
    last_s = first_s + float((stages.head_forward_s + stages.head_backward_s)[0])
    tables: dict[Ends, Table] = {ends: meshes.table(ends) for ends in EVERY_END}
    t1, t2 = tables["table"].path_s[6, 0, 0], tables["head"].path_s[6, 1, 0]  # six layers and an end
    assert (t1, t2) == (pytest.approx(first_s), pytest.approx(last_s))
    found = search(tables, meshes.sizes, 14, 8)
    assert found is not None
    splits = [
        tables["table"].path_s[count, 0, 0]
        + tables["head"].path_s[12 - count, 1, 0]
        + 7 * max(tables["table"].path_s[count, 0, 0], tables["head"].path_s[12 - count, 1, 0])
        for count in range(13)
    ]
    whole_s = 8 * min(tables["both"].path_s[13, 0, 0], tables["both"].path_s[13, 0, 1])
    assert found.step_s == pytest.approx(min(*splits, whole_s))


def test_alpas_tensor_cut_reduces_four_outputs_a_layer() -> None:
    # Two devices of 1 MB/s: half the FLOPs each, and 4 x 12 all-reduces of 1,024 x 768 x 2 bytes, 2 (n - 1) / n = 1
    case = case_of(fleet(1e12, 1e12, link=1e6))
    meshes = alpa.Meshes(case, np.array([[0], [1]]), 1, recompute=False)
    (use,) = (use for use in meshes.uses_of(1, "both") if use.tensor == 2)
    computing_s = sum(case.step_flops(recompute=False)) / 8 / 2
    computing_s /= float(effective_flops_per_s(np.array([1e12]), 1024, case.terms)[0])
    assert use.path_s[13, 0] == pytest.approx(computing_s + 4 * 12 * 1024 * 768 * 2 / 1e6)
    assert use.moved_bytes[13] == 8 * 4 * 12 * 1024 * 768 * 2


def test_asteroid_divides_a_micro_batch_by_speed() -> None:
    # Speeds 3 to 1 share four sequences three to one; both then need as long
    case = case_of(fleet(3e12, 1e12))
    rooms = asteroid.Rooms(case, np.array([[0, 1]]), 4, recompute=False)
    speed = effective_flops_per_s(np.array([3e12, 1e12]), 1024, case.terms)
    assert rooms.shares(np.array([0, 1]), 12, "both") == pytest.approx(4 * speed / speed.sum())
    table = rooms.table(np.array([1]), 12, "both")
    once_s = 4 * sum(case.step_flops(recompute=False)) / 8 / float(speed.sum())
    assert table.path_s[13, 0, 0] == pytest.approx(once_s)


@pytest.mark.parametrize("seed", range(3))
def test_alpa_is_no_slower_than_a_pipeline_of_single_devices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    profiles = fleet(*rng.uniform(0.3e12, 3e12, 12), link=2e6, memory=1.2e9)
    case = case_of(profiles)
    found = alpa.fastest(case)
    assert found is not None
    for recompute, order in product((False, True), orders(case)):
        alone = asteroid.partition(case, order[:, None], 1, recompute=recompute, most_units=1)
        assert alone is None or found.step_s <= alone.step_s / 0.97


def test_an_end_of_the_model_may_have_a_stage_to_itself() -> None:
    # Neither the head nor the token table fits beside a layer
    case = case_of(fleet(*[1e12] * 20, link=1e9))
    layer, ends = case.layer.state_bytes, case.table.state_bytes
    kept = case.activation_bytes(6, 1024, recompute=True)
    memory = RUNTIME_BYTES + kept + max(layer, ends) + case.logit_bytes(1024) + 0.5 * layer
    case = replace(case, profiles=replace(case.profiles, memory_bytes=np.full(20, memory)))
    found = asteroid.fastest(case)
    assert found is not None
    stages = found.partition.stages
    assert [stages[place].layers for place in (0, -1)] == [0, 0]
    assert sum(stage.layers for stage in stages) == 12
    peers = swarm.fastest(case)
    assert peers is not None
    assert peers.placed.layers[peers.placed.has_table | peers.placed.has_head].max() == 0
    pipeline = gpipe.fastest(case)
    assert pipeline is not None
    assert pipeline.placed.layers[pipeline.placed.has_head].max() == 0


def test_devices_too_small_for_any_mesh_do_not_slow_down_alpa() -> None:
    # Half a layer with half the activations fits a device of one kind; the faster ones are far smaller
    holding = case_of(fleet(*[1e12] * 32, link=1e8))
    half = RUNTIME_BYTES + 0.6 * (holding.layer.state_bytes + holding.activation_bytes(6, 1024, recompute=True))
    half = max(half, RUNTIME_BYTES + 0.6 * (holding.head.state_bytes + holding.logit_bytes(1024)))
    memory = np.repeat([half, RUNTIME_BYTES + 1e6], [32, 32])
    both = case_of(replace(fleet(*[1e12] * 32, *[2e12] * 32, link=1e8), memory_bytes=memory))
    alone, among = (
        alpa.fastest(case)
        for case in (replace(holding, profiles=replace(holding.profiles, memory_bytes=memory[:32])), both)
    )
    assert alone is not None
    assert among is not None
    assert among.step_s <= alone.step_s * 1.03


# ------------------------------------------------------------------------------------------------ the cloud


def test_cards_take_flops_over_peak_and_mfu() -> None:
    # 312 TFLOP/s at 0.47 (OPT-175B on A100), 989 at the middle of 0.38-0.43 (Llama-3 405B on H100)
    setting = Setting(model=MODEL, tokens=8192, sequence=1024, profiles=fleet(1e12))
    flops = step_flops(MODEL, 8192, 1024)
    for name, kind, count, expected in (
        ("a100", "a100", 1, 312e12 * 0.47),
        ("a100-8", "a100", 8, 8 * 312e12 * 0.47),
        ("h100", "h100", 1, 989e12 * 0.405),
        ("h100-8", "h100", 8, 8 * 989e12 * 0.405),
    ):
        found = cloud(name, kind, count)(setting)
        assert found.batch_s == pytest.approx(flops / expected)
        assert found.devices_used == count
        assert found.recovery_s == pytest.approx(45 + flops / expected / 2)


def test_what_a_card_cannot_hold_goes_to_its_host_and_is_refused_beyond() -> None:
    def on(name: str, model: str) -> tuple[bool, str]:
        setting = Setting(model=named(model), tokens=8192, sequence=1024, profiles=fleet(1e12))
        found = cloud(name, name.split("-")[0], 8 if name.endswith("-8") else 1)(setting)
        return found.fits, found.reason

    # 16 bytes x 1.3e9 = 21 GB; 16 x 13e9 = 208 GB of 80 + 155; 16 x 69e9 = 1,104 GB of 8 x 235
    assert on("a100", "opt-1.3b")[0]
    assert "host" not in on("a100", "opt-1.3b")[1]
    assert on("a100", "llama-2-13b")[0]
    assert "host" in on("a100", "llama-2-13b")[1]
    fits, why = on("a100", "llama-2-70b")
    assert not fits
    assert "235 GB" in why
    assert on("a100-8", "llama-2-70b")[0]
