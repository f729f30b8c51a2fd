"""Laws of rivals: times computed by hand, bounds that hold for them, and the pipeline that was measured."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import permutations
from math import inf

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tests.support import fleets
from tests.support.grids import examples

from cleave.core.cost.rates import Server
from cleave.core.cost.wire import WIRE_FORMATS
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.shapes import ModelShape, from_config, named
from cleave.core.plan.rivals.alone import alone
from cleave.core.plan.rivals.case import Case, Rival
from cleave.core.plan.rivals.pipeline import pipelines, weigh
from cleave.core.plan.rivals.products import layer_groups
from cleave.core.plan.rivals.reduction import reduced
from cleave.core.plan.rivals.replicas import data_parallel
from cleave.core.plan.rivals.sharded import fsdp
from cleave.core.plan.rivals.stages import Limits, Placement, Stages

QUICK = (Phase.explicit, Phase.reuse, Phase.generate)
MBIT = 1e6 / 8
RIVALS = (pipelines, data_parallel, fsdp, alone)

# The demo: 4 layers, hidden 256, ffn 768, 256 words. Per row, a layer has 4 x 256 x 256 + 3 x 256 x 768 = 851,968
# multiply-adds with weights and 256 x 128.5 = 32,896 in each of the products with keys, of which forward has 2 and
# backward 4; the head has 256 x 256.
DEMO = from_config(
    {
        "model_type": "llama",
        "num_hidden_layers": 4,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_attention_heads": 4,
        "vocab_size": 256,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
    },
    "demo",
)
S = 256
LAYER_FORWARD, LAYER_BACKWARD = 2 * (851_968 + 2 * 32_896), 2 * (2 * 851_968 + 4 * 32_896)
HEAD_FORWARD, HEAD_BACKWARD = 2 * 65_536, 4 * 65_536
PARAMS = 4 * (851_968 + 2 * 256) + 2 * 65_536 + 256


def case(profiles: Profiles, tokens: int = 8 * S, shape: ModelShape = DEMO, server: Server | None = None) -> Case:
    return Case(profiles=profiles, shape=shape, tokens=tokens, sequence=S, wire="bf16", server=server or Server())


def speed(flops_per_s: float) -> float:
    """FLOP/s with 2 bytes of each weight read at 20 GB/s once per sequence, for the 2 S operations on it."""
    return 1 / (1 / flops_per_s + 2 / 20e9 / (2 * S))


def alike(count: int, *, flops: float = 1e11, down: float = 1e7, up: float = 2e6, memory: float = 4e9) -> Profiles:
    same = np.ones(count)
    return fleets.of(flops * same, down * same, up * same, 0 * same, memory * same)


def test_one_device_takes_six_operations_per_weight_and_token_and_two_more_for_attention() -> None:
    flops = 8 * S * (4 * (LAYER_FORWARD + LAYER_BACKWARD) + HEAD_FORWARD + HEAD_BACKWARD)
    assert alone(case(alike(1))).step_s == pytest.approx(flops / speed(1e11))


def test_one_device_without_room_for_all_activations_computes_forward_twice() -> None:
    # 16 bytes a parameter; 34 x 256 bytes a row and layer to keep all, or 2 x 256 and all of one layer
    state, logits, runtime = 16 * PARAMS, 4 * 256 * S, 16e6
    all_kept, inputs_kept = 34 * 256 * S * 4, 2 * 256 * S * 4 + 34 * 256 * S
    flops = 8 * S * (4 * (2 * LAYER_FORWARD + LAYER_BACKWARD) + HEAD_FORWARD + HEAD_BACKWARD)
    tight = alike(1, memory=state + logits + runtime + (all_kept + inputs_kept) / 2)
    assert alone(case(tight)).step_s == pytest.approx(flops / speed(1e11))
    none = alone(case(alike(1, memory=state + logits + runtime + inputs_kept - 1)))
    assert none.step_s == inf


def test_two_replicas_halve_the_tokens_and_reduce_all_gradients_during_backward() -> None:
    flops = 8 * S * (4 * (LAYER_FORWARD + LAYER_BACKWARD) + HEAD_FORWARD + HEAD_BACKWARD)
    forward = 8 * S * (4 * LAYER_FORWARD + HEAD_FORWARD)
    # a ring of two: 2 x 1/2 of 2 bytes a parameter over the uplink, 2 MB/s
    reduction_s = 2 * PARAMS / 2e6
    slow = data_parallel(case(alike(2)))
    assert slow.step_s == pytest.approx(forward / 2 / speed(1e11) + reduction_s)
    fast = data_parallel(case(alike(2, down=1e12, up=1e12)))
    assert fast.step_s == pytest.approx(flops / 2 / speed(1e11))


def test_two_shards_gather_all_weights_twice_and_scatter_gradients_once() -> None:
    # each of two devices sends half of 2 bytes a parameter, three times, over 2 MB/s
    assert fsdp(case(alike(2))).step_s == pytest.approx(3 * PARAMS / 2e6)
    flops = 8 * S * (4 * (LAYER_FORWARD + LAYER_BACKWARD) + HEAD_FORWARD + HEAD_BACKWARD)
    assert fsdp(case(alike(2, down=1e12, up=1e12))).step_s == pytest.approx(flops / 2 / speed(1e11))


def test_a_pipeline_of_two_takes_its_path_once_and_its_busiest_stages_for_every_further_micro_batch() -> None:
    # two layers and an end each; 256 x 256 x 2 bytes over 2 MB/s, forward from the first, backward from the second
    link_s = 2 * 256 * S / 2e6
    first_forward_s, first_backward_s = (S * 2 * x / speed(1e11) for x in (LAYER_FORWARD, LAYER_BACKWARD))
    last_forward_s = first_forward_s + S * HEAD_FORWARD / speed(1e11)
    last_backward_s = first_backward_s + S * HEAD_BACKWARD / speed(1e11)
    path_s = first_forward_s + first_backward_s + last_forward_s + last_backward_s + 2 * link_s
    assert link_s > last_backward_s
    placed = Placement(
        devices=np.arange(2),
        layers=np.array([2.0, 2.0]),
        has_table=np.array([True, False]),
        has_head=np.array([False, True]),
    )
    stages = Stages(case(alike(2)), S, recompute=False)
    assert weigh(case(alike(2)), stages, placed, 1).step_s == pytest.approx(path_s + 7 * 2 * link_s)
    fast = case(alike(2, down=1e15, up=1e15))
    found = weigh(fast, Stages(fast, S, recompute=False), placed, 1).step_s
    assert found == pytest.approx(path_s - 2 * link_s + 7 * (last_forward_s + last_backward_s))


def test_equal_stages_have_the_known_bubble() -> None:
    shape = replace(DEMO, layers=8, vocab=1)  # a head of next to nothing
    fast = case(alike(4, down=1e15, up=1e15), tokens=16 * S, shape=shape)
    stages = Stages(fast, S, recompute=True)
    placed = Placement(
        devices=np.arange(4),
        layers=np.full(4, 2.0),
        has_table=np.array([True, False, False, False]),
        has_head=np.array([False, False, False, True]),
    )
    busy_s = 16 * 2 * float(stages.forward_s[0] + stages.backward_s[0])
    assert 1 - busy_s / weigh(fast, stages, placed, 1).step_s == pytest.approx((4 - 1) / (16 + 4 - 1), rel=1e-3)


def test_gradients_are_reduced_by_a_ring_or_centrally_whichever_is_faster() -> None:
    free, thin = Server(), Server(down_bytes_per_s=1e6, up_bytes_per_s=1e6)
    assert reduced(6.0, 3e6, 1, free).seconds == 0
    assert reduced(6.0, 3e6, 4, free).seconds == pytest.approx(6.0)  # once each way instead of 2 x 3/4 of that
    assert reduced(6.0, 3e6, 4, thin).seconds == pytest.approx(2 * 3 / 4 * 6.0)  # 4 x 3 MB through 1 MB/s take longer
    assert reduced(6.0, 3e6, 2, free).seconds == pytest.approx(6.0)


def test_the_formula_agrees_with_the_pipeline_that_was_measured() -> None:
    """torch GPipe on these links and this model, 8 micro-batches of 256 tokens, bf16: 1.60 s, median of an afternoon.

    Devices were about 40 GFLOP/s each. A micro-batch is 131,072 bytes: 52 ms on 20 Mbit/s, 26 ms on 40, 105 ms on 10.
    Forward, the uplinks of the first two devices bind (52 ms); backward that of the last (105 ms); on the way there are
    52 + 52 + 26 ms of links forward, 105 + 26 + 52 back, and some 0.14 s of compute: 0.46 + 7 x 0.157 = 1.56 s.
    """
    down, up = np.array([100, 100, 200, 50]) * MBIT, np.array([20, 20, 40, 10]) * MBIT
    four = case(fleets.of(np.full(4, 40e9), down, up, np.zeros(4), np.full(4, 4e9)))
    placed = Placement(
        devices=np.arange(4),
        layers=np.ones(4),
        has_table=np.array([True, False, False, False]),
        has_head=np.array([False, False, False, True]),
    )
    flow = weigh(four, Stages(four, S, recompute=False), placed, 1)
    assert flow.busiest_s == pytest.approx(0.0524 + 0.1049, rel=1e-2)
    assert flow.step_s == pytest.approx(1.56, abs=0.01)
    assert flow.step_s == pytest.approx(1.60, rel=0.1), "measured"
    assert pipelines(four).step_s <= flow.step_s, "a better arrangement of the same devices is found"


@settings(phases=QUICK, max_examples=examples(15))
@given(fleets.fleets(least=2, most=12, kinds=("usual", "narrow", "twins", "wild")), st.integers(2, 24))
def test_no_rival_computes_faster_than_all_devices_together(fleet: Profiles, sequences: int) -> None:
    of = case(fleet, sequences * S)
    least_s = sum(of.step_flops(recompute=False)) / fleet.flops_per_s.sum()
    for rival in RIVALS:
        found = rival(of)
        assert found.step_s >= least_s * (1 - 1e-9)
        assert found.fits or "GB" in found.arrangement or "two" in found.arrangement


@settings(phases=QUICK, max_examples=examples(10))
@given(fleets.fleets(least=2, most=8, kinds=("usual", "narrow", "wild")), st.floats(1.1, 10))
def test_more_bandwidth_slows_no_rival(fleet: Profiles, times: float) -> None:
    faster = replace(
        fleet, down_bytes_per_s=fleet.down_bytes_per_s * times, up_bytes_per_s=fleet.up_bytes_per_s * times
    )
    for rival, tolerance in ((pipelines, 1.03), (data_parallel, 1.0), (fsdp, 1.0), (alone, 1.0)):  # pipelines: a search
        before, after = rival(case(fleet)).step_s, rival(case(faster)).step_s
        assert after <= before * tolerance * (1 + 1e-9)


def test_a_shared_medium_carries_every_byte_twice() -> None:
    fleet = alike(2, down=1e9, up=1e9)
    shared = replace(fleet, medium=("wifi", "wifi"), medium_bytes_per_s=np.full(2, 1e6))
    # a ring of two: each sends and receives 2 bytes a parameter
    assert data_parallel(case(shared)).step_s == pytest.approx(2 * 2 * 2 * PARAMS / 1e6)


@pytest.mark.parametrize("rival", [pipelines, data_parallel, fsdp, alone])
def test_a_model_too_large_does_not_fit_and_says_how_much_is_missing(rival: Callable[[Case], Rival]) -> None:
    cramped = Case(
        profiles=alike(3, memory=2e9),
        shape=named("llama-2-7b"),
        tokens=8 * S,
        sequence=S,
        wire="bf16",
        server=Server(),
    )
    found = rival(cramped)
    assert not found.fits
    assert "needs" in found.arrangement
    assert "2 GB" in found.arrangement


def test_optimizer_state_of_sixteen_bytes_a_parameter_limits_the_layers_of_a_stage() -> None:
    layer = 851_968 + 2 * 256
    # three layers, and activations of one sequence in flight: inputs of half the model's layers at least
    memory = 16e6 + 3 * 16 * layer + 34 * 256 * S + 2 * 256 * S * 3
    shape = replace(DEMO, layers=6)
    stages = Stages(case(alike(4, memory=memory + 1), shape=shape), S, recompute=True)
    assert stages.stage_bytes(3) == pytest.approx(memory)
    placed = stages.place(1, Limits(forward_s=1e9, backward_s=1e9, reduction_s=inf))
    assert placed is not None
    assert placed.layers[~(placed.has_head | placed.has_table)].max() == 3
    assert stages.place(1, Limits(forward_s=1e9, backward_s=1e-9, reduction_s=inf)) is None


def test_with_adapters_only_their_gradients_are_reduced_and_frozen_weights_take_two_bytes() -> None:
    adapted = replace(DEMO, adapter_rank=8)
    # 8 x (4 x 256 + 4 x 256) beside q, k, v, o and 3 x 8 x (256 + 768) beside the MLP, per layer
    adapters = 4 * (8 * 2048 + 3 * 8 * 1024)
    of = case(alike(2, down=1e4, up=1e4), shape=adapted)
    assert of.whole.trained == adapters
    assert of.whole.state_bytes == 2 * (PARAMS + adapters) + 14 * adapters
    forward_s = 4 * S * (4 * LAYER_FORWARD + HEAD_FORWARD + 2 * adapters) / speed(1e11)
    assert data_parallel(of).step_s == pytest.approx(forward_s + 2 * adapters / 1e4)
    whole, part = case(alike(2)), case(alike(2), shape=adapted)
    assert pipelines(part).step_s <= pipelines(whole).step_s


@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_a_few_devices_is_much_faster_than_the_pipeline_found(seed: int) -> None:
    rng = np.random.default_rng(seed)
    fleet = fleets.of(
        rng.uniform(3e9, 4e10, 4),
        rng.uniform(2e6, 4e7, 4),
        rng.uniform(1e6, 1e7, 4),
        rng.uniform(0, 0.02, 4),
        np.full(4, 8e9),
    )
    of = case(fleet)
    stages = Stages(of, S, recompute=False)
    best = min(weigh(of, stages, placed, 1).step_s for placed in every_pipeline(4, 4))
    assert best * (1 - 1e-9) <= pipelines(of).step_s <= best * 1.05


def every_pipeline(devices: int, layers: int) -> Iterator[Placement]:
    for count in range(2, devices + 1):
        for order in permutations(range(devices), count):
            for cut in compositions(layers, count):
                ends = np.arange(count)
                yield Placement(
                    devices=np.array(order),
                    layers=np.array(cut, dtype=np.float64),
                    has_table=ends == 0,
                    has_head=ends == count - 1,
                )


def compositions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Every way to write a total as so many numbers of at least 0."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in compositions(total - first, parts - 1):
            yield (first, *rest)


def test_rivals_send_sixteen_bits_whatever_wire_cleave_uses() -> None:
    ours = case(alike(4))
    for wire in WIRE_FORMATS:
        for rival in (pipelines, data_parallel, fsdp, layer_groups):
            assert rival(replace(ours, wire=wire)).step_s == rival(ours).step_s
