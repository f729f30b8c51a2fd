"""Laws of leases: memory, the update, and how often snapshots are taken."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.core.cost.lease import (
    LEAST_EVERY,
    MOST_EVERY,
    is_worth_leasing,
    lease_bytes,
    most_steps_logged,
    snapshot_bytes,
    snapshot_every,
    update_s,
)
from cleave.core.cost.terms import lean_terms, live_terms

STATES = st.integers(0, 2)


@given(STATES)
def test_a_leased_weight_takes_fp32_weight_gradient_and_states(states: int) -> None:
    live, lean = live_terms("bf16"), lean_terms("bf16")
    trained = live.resident_bytes + live.accumulator_bytes
    assert trained + lease_bytes(live, 1, states) == 4 + 4 + 4 * states
    assert lean.resident_bytes + lean.accumulator_bytes + lease_bytes(lean, 1, states) == 4 + 2 + 4 * states


@given(STATES)
def test_an_update_reads_and_writes_everything_once(states: int) -> None:
    slow, fast = update_s(np.array([1e9, 1e9]), states, np.array([1e12, 2e12])).tolist()
    assert slow == pytest.approx((3 + 2 * states) * 4e9 / 20e9)
    assert fast == pytest.approx(slow / 2)


@given(STATES, st.floats(1e-3, 1e6), st.floats(1e-3, 1e6), st.floats(1, MOST_EVERY))
def test_snapshots_take_a_twentieth_of_the_time_unless_a_bound_says_otherwise(
    states: int, snapshot_s: float, busy_s: float, most_steps: float
) -> None:
    most = np.floor(np.array([most_steps]))
    (every,) = snapshot_every(np.array([snapshot_s]), np.array([busy_s]), most).tolist()
    assert min(LEAST_EVERY, most[0]) <= every <= most[0]
    if every < most[0]:
        assert snapshot_s / every <= 0.05 * busy_s * (1 + 1e-9)
    if every > LEAST_EVERY:
        assert snapshot_s / (every - 1) >= 0.05 * busy_s * (1 - 1e-9)


def test_the_log_bounds_the_steps_between_snapshots() -> None:
    assert most_steps_logged(1e9, np.array([1e8, 3e8, 2e9, 1.0])).tolist() == [10, 3, 0, MOST_EVERY]


@given(STATES, st.integers(0, MOST_EVERY))
def test_a_lease_never_sends_up_more_than_gradients_would(states: int, most_steps: int) -> None:
    terms, one = live_terms("bf16"), np.ones(1)
    (worth,) = is_worth_leasing(one, one, np.array([float(most_steps)]), states, terms).tolist()
    assert worth == (most_steps > 0 and snapshot_bytes(1.0, states) / most_steps <= terms.gradient_bytes)


def test_a_column_of_which_hardly_anything_can_be_leased_is_synchronized() -> None:
    lent = np.array([0.0, 5.0, 50.0])
    assert is_worth_leasing(lent, np.full(3, 100.0), np.full(3, 99.0), 2, live_terms("bf16")).tolist() == [
        False,
        False,
        True,
    ]
