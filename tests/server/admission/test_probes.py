"""Measuring newcomers' links has a bounded cost, however many there are, and a bounded error."""

from __future__ import annotations

import pytest

from cleave.server.admission.handshake import Arrival, ProbeBudget, rates


def test_a_small_fleet_is_measured_exactly_and_a_flood_only_roughly() -> None:
    budget = ProbeBudget()
    large = budget.take(100.0)
    assert [budget.take(100.0) for _ in range(15)] == [large] * 15
    flood = [budget.take(100.0 + number / 30) for number in range(3000)]  # 100 s
    assert sum(size == large for size in flood) <= 51
    assert sum(flood) < 0.3 * large * len(flood)
    assert budget.take(500.0) == large, "later newcomers are measured again"


@pytest.mark.parametrize("latency_s", [0.0, 1e-3, 0.05, 0.1, 1.0])
def test_a_latency_measured_in_a_crowd_makes_no_link_fast(latency_s: float) -> None:
    """Waiting in line, while the latency was measured, may take longer than the bytes that are sent after it."""
    size_bytes, took_s = 512 << 10, 0.07
    nothing = Arrival(0, 1e-6, 1e-6)
    found = rates(size_bytes, took_s / 2, nothing, took_s, latency_s)
    assert size_bytes / took_s <= found.down <= 2.01 * size_bytes / took_s


def test_a_probe_tells_the_rate_of_a_link_beyond_its_latency() -> None:
    latency_s, down, up, size_bytes = 0.05, 1e7, 2e6, 1 << 20
    down_s, up_s = size_bytes / down, size_bytes / up
    found = rates(size_bytes, down_s, Arrival(size_bytes, up_s, up_s), latency_s + down_s + up_s, latency_s)
    assert (found.down, found.up) == (pytest.approx(down), pytest.approx(up))
    assert found.took_s == pytest.approx(down_s + up_s)
