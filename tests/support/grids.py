"""Selects the test cases `make test` runs: from each grid, a sample that covers every combination of a few values.

Faults that need three particular values at once are rare compared to those that need two, and a grid of four axes has
far more triples than pairs. So `make test` runs a sample of each grid, and `make test-all` the whole grid.
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pytest

Case = Mapping[str, Hashable]
Combination = frozenset[tuple[str, Hashable]]


def covering_sample(cases: Sequence[Case], strength: int = 2) -> list[int]:
    """Ordered indices of cases, chosen greedily, that cover every combination of `strength` values in any case."""
    shown = [_combinations(case, strength) for case in cases]
    missing = set[Combination]().union(*shown)
    chosen: list[int] = []
    while missing:
        best = max(range(len(cases)), key=lambda index: len(shown[index] & missing))
        chosen.append(best)
        missing -= shown[best]
    return sorted(chosen)


def _combinations(case: Case, strength: int) -> set[Combination]:
    return {frozenset(values) for values in combinations(case.items(), min(strength, len(case)))}


def fast_and_slow(fast: Iterable[Any], slow: Iterable[Any]) -> list[Any]:
    """Values of a parameter; only `make test-all` runs the slow ones."""
    return [*fast, *(pytest.param(value, marks=pytest.mark.slow) for value in slow)]


def examples(count: int) -> int:
    """Return how many examples of a costly property to try: a third in `make test`, all in `make test-all`."""
    return count if os.environ.get("CLEAVE_TESTS") == "all" else -(-count // 3)
