"""Laws of resident cost: parts add up to the whole, and each kind of column moves the bytes its table says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.core.cost.resident import ShardCosts, SublayerSums, shard_costs, sum_up
from cleave.core.cost.terms import lean_terms, live_terms
from cleave.core.model.gemms import step_flops
from cleave.core.model.shapes import named
from cleave.core.model.sublayers import sublayers_of

SHAPE = named("llama-2-7b")
H, S = SHAPE.hidden, 1024


def whole(trained: bool = True, live: bool = False) -> SublayerSums:
    terms = live_terms("bf16") if live else lean_terms("bf16")
    return sum_up(sublayers_of(SHAPE, trained=trained), hidden=H, sequence=S, terms=terms)


def one(of: SublayerSums, first: int, count: int, slices: int = 1, chunk: int = 64) -> ShardCosts:
    return shard_costs(of, *(np.array([x]) for x in (first, count, slices)), chunk=chunk)


@given(st.integers(0, 63), st.integers(1, 64))
def test_adjacent_runs_add_up_to_the_combined_run(first: int, count: int) -> None:
    count = min(count, 65 - first)
    cut = max(count // 2, 1)
    if cut == count:
        return
    of = whole()
    both, left, right = one(of, first, count), one(of, first, cut), one(of, first + cut, count - cut)
    for field in ("params", "trained", "flops_per_row", "sync_down_bytes", "sync_up_bytes"):
        assert getattr(both, field) == pytest.approx(getattr(left, field) + getattr(right, field))
    inside = left.up_bytes_per_row + right.up_bytes_per_row - both.up_bytes_per_row
    assert inside == pytest.approx(2 * H * 2), "activations inside a column never cross a link"


@given(st.integers(0, 64), st.sampled_from([2, 4, 8, 16, 32]))
def test_slices_add_up_to_the_whole_though_each_sees_every_row(first: int, slices: int) -> None:
    of = whole()
    slice_, all_of_it = one(of, first, 1, slices), one(of, first, 1)
    assert slices * slice_.flops_per_row == pytest.approx(all_of_it.flops_per_row)
    twice = (slices - 1) * of.sublayers[first].undivided  # norms
    assert slices * slice_.params == pytest.approx(all_of_it.params + twice)
    assert slices * slice_.sync_up_bytes == pytest.approx(all_of_it.sync_up_bytes + 2 * twice)
    assert slice_.down_bytes_per_row == all_of_it.down_bytes_per_row
    assert slice_.up_bytes_per_row == all_of_it.up_bytes_per_row
    assert slice_.memory_bytes < all_of_it.memory_bytes


def test_recomputing_adds_a_third_to_the_flops_of_a_step() -> None:
    of = whole()
    rows = one(of, 0, len(of)).flops_per_row[0]
    scores = 8 * (S + 1) * SHAPE.q_width * SHAPE.layers
    plain = step_flops(SHAPE, S, S) / S
    full_scores = 6 * 2 * S * SHAPE.q_width * SHAPE.layers
    assert rows - scores == pytest.approx((plain - full_scores) * 4 / 3)


def test_frozen_weights_are_not_synced_and_need_no_gradient() -> None:
    frozen, trained = one(whole(trained=False), 0, 2), one(whole(), 0, 2)
    assert frozen.sync_down_bytes == frozen.sync_up_bytes == 0
    assert trained.memory_bytes - frozen.memory_bytes == pytest.approx(2 * trained.params)
    products = sum(sublayer.products for sublayer in whole().sublayers[:2])
    assert trained.flops_per_row - frozen.flops_per_row == pytest.approx(2 * products)


def test_the_head_returns_eight_bytes_per_row_forward() -> None:
    head, mlp = one(whole(), 64, 1), one(whole(), 63, 1)
    assert mlp.up_bytes_per_row - head.up_bytes_per_row == 2 * H - 8
    assert mlp.down_bytes_per_row - head.down_bytes_per_row == 2 * H - 12


def test_live_memory_counts_parameters_open_keys_and_values_and_kept_inputs() -> None:
    of = whole(live=True)
    more = one(of, 0, 3).memory_bytes - one(of, 0, 2).memory_bytes
    attention = of.sublayers[0]
    entering = 4 * 64 * H  # the input of one more sublayer is kept for backward
    assert more == pytest.approx(8 * attention.params + 16 * S * attention.kv_width + entering)


def test_attention_gets_whole_sequences_and_whole_heads() -> None:
    of = whole()
    assert one(of, 0, 1).takes_sequences
    assert not one(of, 1, 1).takes_sequences
    attention, mlp, _ = of.sublayers[:2] + of.sublayers[-1:]
    assert attention.allows(8)
    assert not attention.allows(3)
    assert mlp.allows(3)
