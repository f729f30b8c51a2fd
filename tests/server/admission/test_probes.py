"""The cost of measuring newcomers' links is bounded, however many there are."""

from __future__ import annotations

from cleave.server.admission.handshake import ProbeBudget


def test_a_small_fleet_is_measured_exactly_and_a_flood_only_roughly() -> None:
    budget = ProbeBudget()
    large = budget.take(100.0)
    assert [budget.take(100.0) for _ in range(15)] == [large] * 15
    flood = [budget.take(100.0 + number / 30) for number in range(3000)]  # 100 s
    assert sum(size == large for size in flood) <= 51
    assert sum(flood) < 0.3 * large * len(flood)
    assert budget.take(500.0) == large, "later newcomers are measured again"
