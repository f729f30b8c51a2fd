"""Laws of resident units: parts add up to the whole, and each kind of column moves what its table says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.core.cost.resident import Stack, Units, lean_terms, live_terms, stack, sublayers_of, units
from cleave.core.model.gemms import step_flops
from cleave.core.model.shapes import named

SHAPE = named("llama-2-7b")
H, S = SHAPE.hidden, 1024


def whole(trained: bool = True, live: bool = False) -> Stack:
    terms = live_terms("bf16") if live else lean_terms("bf16")
    return stack(sublayers_of(SHAPE, trained=trained), hidden=H, sequence=S, terms=terms)


def one(of: Stack, first: int, count: int, slices: int = 1, chunk: int = 64) -> Units:
    return units(of, *(np.array([x]) for x in (first, count, slices)), chunk=chunk)


@given(st.integers(0, 63), st.integers(1, 64))
def test_neighbouring_runs_add_up_to_the_run_of_both(first: int, count: int) -> None:
    count = min(count, 65 - first)
    cut = max(count // 2, 1)
    if cut == count:
        return
    of = whole()
    both, left, right = one(of, first, count), one(of, first, cut), one(of, first + cut, count - cut)
    for field in ("params", "trained", "flops_per_row", "forward_flops_per_row", "sync_down_bytes", "sync_up_bytes"):
        assert getattr(both, field) == pytest.approx(getattr(left, field) + getattr(right, field))
    inside = left.up_bytes_per_row + right.up_bytes_per_row - both.up_bytes_per_row
    assert inside == pytest.approx(2 * H * 2), "what happens inside a column never crosses a link"


@given(st.integers(0, 64), st.sampled_from([2, 4, 8, 16, 32]))
def test_slices_add_up_to_the_whole_but_each_sees_every_row(first: int, slices: int) -> None:
    of = whole()
    slice_, all_of_it = one(of, first, 1, slices), one(of, first, 1)
    for field in ("params", "flops_per_row", "sync_up_bytes"):
        assert slices * getattr(slice_, field) == pytest.approx(getattr(all_of_it, field))
    assert slice_.down_bytes_per_row == all_of_it.down_bytes_per_row
    assert slice_.up_bytes_per_row == all_of_it.up_bytes_per_row
    assert slice_.memory_bytes < all_of_it.memory_bytes


def test_a_step_costs_a_third_more_flops_than_without_recomputing() -> None:
    of = whole()
    rows = one(of, 0, len(of)).flops_per_row[0]
    scores = 4 * 2 * S * SHAPE.q_width * SHAPE.layers
    norms = SHAPE.params - SHAPE.layers * SHAPE.gemm_params_per_layer - SHAPE.embedding_params
    plain = step_flops(SHAPE, S, S) / S
    full_scores = 6 * 2 * S * SHAPE.q_width * SHAPE.layers
    assert rows - scores - 8 * norms == pytest.approx((plain - full_scores) * 4 / 3)


def test_frozen_weights_do_not_travel_and_need_no_gradient() -> None:
    frozen, trained = one(whole(trained=False), 0, 2), one(whole(), 0, 2)
    assert frozen.sync_down_bytes == frozen.sync_up_bytes == 0
    assert trained.memory_bytes - frozen.memory_bytes == pytest.approx(2 * trained.params)
    assert frozen.flops_per_row - trained.flops_per_row == pytest.approx(-2 * trained.params)


def test_the_head_returns_eight_bytes_a_row_forward() -> None:
    head, mlp = one(whole(), 64, 1), one(whole(), 63, 1)
    assert mlp.up_bytes_per_row - head.up_bytes_per_row == 2 * H - 8
    assert mlp.down_bytes_per_row - head.down_bytes_per_row == 2 * H - 12


def test_live_devices_hold_eight_bytes_of_a_trained_number_and_sixteen_of_an_open_k() -> None:
    of = whole(live=True)
    more = one(of, 0, 3).memory_bytes - one(of, 0, 2).memory_bytes
    attention = of.sublayers[0]
    entering = 4 * 64 * H  # what enters one sublayer more is kept on the way back
    assert more == pytest.approx(8 * attention.params + 16 * S * attention.kv_width + entering)


def test_attention_comes_in_whole_sequences_and_heads_stay_whole() -> None:
    of = whole()
    assert one(of, 0, 1).takes_sequences
    assert not one(of, 1, 1).takes_sequences
    attention, mlp, _ = of.sublayers[:2] + of.sublayers[-1:]
    assert attention.allows(8)
    assert not attention.allows(3)
    assert mlp.allows(3)
