"""Laws of a link's rate: it is the usual one, whatever stalls there were, and follows a link that really changes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.core.schedule.link_rate import LinkRate

RATE = 12.5e6


def work(rate: LinkRate, true: float, *, steps: int, stalls: int = 0) -> None:
    """Steps that download 1.5 MB each in ten pieces; the process stops for 0.2 s in the first pieces of the last."""
    for step in range(steps):
        for piece in range(10):
            is_stalled = step == steps - 1 and piece < stalls
            rate.add(150e3, 150e3 / true + (0.2 if is_stalled else 0.0))


@pytest.mark.parametrize("claim", [0.5 * RATE, 0.74 * RATE, 1.35 * RATE, 4 * RATE])
def test_a_rate_is_within_ten_percent_after_three_steps_whatever_a_probe_said(claim: float) -> None:
    rate = LinkRate(claim)
    work(rate, RATE, steps=3)
    assert rate.value == pytest.approx(RATE, rel=0.1)


def test_a_process_that_stops_for_a_moment_does_not_make_its_link_look_slow() -> None:
    rate = LinkRate(RATE)
    work(rate, RATE, steps=8, stalls=1)
    assert rate.value == pytest.approx(RATE, rel=0.02)


def test_a_process_that_stops_thrice_while_little_is_sent_does_not_make_its_link_look_slow() -> None:
    rate = LinkRate(RATE)
    work(rate, RATE, steps=8)
    for _ in range(3):
        rate.add(50e3, 50e3 / RATE + 0.3)
    assert rate.value == pytest.approx(RATE, rel=0.05)


def test_messages_of_a_few_bytes_that_wait_do_not_make_a_link_look_slow() -> None:
    """The device with the head: forward it returns two numbers a row, backward whole rows."""
    rate = LinkRate(RATE)
    for _ in range(10):
        for size_bytes in (1e3, 64e3) * 16:
            rate.add(size_bytes, size_bytes / RATE + (4e-3 if size_bytes < 2e3 else 0.0))
    assert rate.value == pytest.approx(RATE, rel=0.1)


def test_one_measurement_of_a_whole_step_with_a_stall_in_it_is_outvoted() -> None:
    rate = LinkRate(0.74 * RATE)
    for _ in range(4):
        rate.add(1.5e6, 1.5e6 / RATE)
    rate.add(1.5e6, 1.5e6 / RATE + 0.2)
    assert rate.value == pytest.approx(RATE, rel=0.1)


@pytest.mark.parametrize("factor", [0.1, 0.5, 3.0])
def test_a_rate_follows_a_link_that_changed_for_good(factor: float) -> None:
    rate = LinkRate(RATE)
    work(rate, RATE, steps=30)
    seconds = 0.0
    while not 0.9 < rate.value / (factor * RATE) < 1.1:
        rate.add(50e3, 50e3 / (factor * RATE))
        seconds += 50e3 / (factor * RATE)
        assert seconds < 4.0


@given(st.lists(st.tuples(st.floats(allow_nan=True), st.floats(allow_nan=True)), max_size=50))
def test_a_rate_stays_usable_whatever_is_reported(reports: list[tuple[float, float]]) -> None:
    rate = LinkRate(RATE)
    for size_bytes, seconds in reports:
        before = rate.value
        rate.add(size_bytes, seconds)
        assert 0.999e3 <= rate.value <= 20.001e9
        assert rate.value >= before / 4.001
        assert math.isfinite(rate.value)


def test_a_lie_of_any_size_is_forgotten_after_two_seconds_of_traffic() -> None:
    rate = LinkRate(RATE)
    work(rate, RATE, steps=10)
    rate.add(1e18, 1e-9)
    work(rate, RATE, steps=2)
    assert rate.value == pytest.approx(RATE, rel=0.02)
