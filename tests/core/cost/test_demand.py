"""Laws of a shard's demand on a device: as many open sequences as fit, and slices that share the work."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.stacks import decoder

from cleave.core.cost.demand import ShardDemand, shard_demand
from cleave.core.model.shard import Shard, most_slices

steady = settings(max_examples=80, deadline=None, derandomize=True)
MODELS = {"whole": decoder().decoder, "adapters": decoder(rank=2).decoder, "no head": decoder(has_head=False).decoder}
SEQUENCES, SEQUENCE = 4, 6


@st.composite
def demands(draw: st.DrawFn) -> ShardDemand:
    model = MODELS[draw(st.sampled_from(sorted(MODELS)))]
    first = draw(st.integers(0, len(model.sublayers) - 1))
    if draw(st.booleans()):
        shard = Shard(first=first, count=draw(st.integers(1, len(model.sublayers) - first)))
    else:
        of = draw(st.integers(1, min(4, most_slices(model, first))))
        shard = Shard(first=first, count=1, index=draw(st.integers(0, of - 1)), of=of)
    return shard_demand(model, shard, SEQUENCE, is_trained=draw(st.booleans()))


@steady
@given(demands(), st.integers(0, 300_000), st.integers(1, 8), st.integers(0, 1000))
def test_a_device_opens_as_many_sequences_as_fit_and_no_more(
    demand: ShardDemand, memory_bytes: int, chunk: int, tables_bytes: int
) -> None:
    count = demand.sequences_within(memory_bytes, chunk, tables_bytes, SEQUENCES)
    assert 0 <= count <= SEQUENCES
    if count:
        assert demand.memory_bytes(chunk, count, tables_bytes) <= memory_bytes
    if count < SEQUENCES:
        assert demand.memory_bytes(chunk, count + 1, tables_bytes) > memory_bytes


@steady
@given(demands(), st.integers(0, 300_000), st.integers(1, 8), st.integers(2, 3))
def test_shards_on_one_device_share_its_room_for_sequences(
    demand: ShardDemand, memory_bytes: int, chunk: int, shards: int
) -> None:
    alone = demand.sequences_within(memory_bytes, chunk, 0, 1 << 20)
    shared = demand.sequences_within(memory_bytes, chunk, 0, 1 << 20, shards=shards)
    assert shared == (alone // shards if demand.state_bytes() else alone)


@pytest.mark.parametrize("sublayer", range(5))
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_slices_split_the_flops_of_the_whole_sublayer(sublayer: int, direction: str) -> None:
    model = MODELS["whole"]
    assert direction in ("forward", "backward")
    whole = shard_demand(model, Shard(first=sublayer, count=1), SEQUENCE).flops(direction, 2, 4)  # type: ignore[arg-type]
    for of in range(2, 1 + min(4, most_slices(model, sublayer))):
        slices = (Shard(first=sublayer, count=1, index=index, of=of) for index in range(of))
        parts = [shard_demand(model, one, SEQUENCE).flops(direction, 2, 4) for one in slices]  # type: ignore[arg-type]
        assert sum(parts) == pytest.approx(whole)


def test_a_silent_forward_computes_only_keys_and_values() -> None:
    """Nothing after the last attention, and nothing at all without attention."""
    model = MODELS["whole"]
    attention, mlp = (shard_demand(model, Shard(first=number, count=1), SEQUENCE) for number in (0, 1))
    layer = shard_demand(model, Shard(first=0, count=2), SEQUENCE)
    assert mlp.flops("forward", 0, 6, is_silent=True) == 0
    assert layer.flops("forward", 0, 6, is_silent=True) == attention.flops("forward", 0, 6, is_silent=True)
    assert 0 < attention.flops("forward", 0, 6, is_silent=True) < attention.flops("forward", 0, 6)


def test_a_silent_forward_that_keeps_something_computes_all_but_the_logits() -> None:
    model = MODELS["whole"]
    whole, body = (shard_demand(model, Shard(first=0, count=count), SEQUENCE) for count in (5, 4))
    assert len(model.sublayers) == 5, "the last one is the head"
    for keeps in ("inputs", "all"):
        assert whole.flops("forward", 0, 6, is_silent=True, keeps=keeps) == body.flops("forward", 0, 6)


def test_without_training_no_gradient_is_held_or_computed() -> None:
    model, shard = MODELS["whole"], Shard(first=0, count=5)
    trained, frozen = (shard_demand(model, shard, SEQUENCE, is_trained=is_trained) for is_trained in (True, False))
    assert frozen.trained_bytes == 0 < trained.trained_bytes
    less = trained.memory_bytes(4, 1, 0) - frozen.memory_bytes(4, 1, 0)
    assert less == trained.trained_bytes
    assert frozen.flops("backward", 0, 6) < trained.flops("backward", 0, 6)
