"""Selects the cases that represent a test: from each grid, a sample that covers every combination of a few values.

Faults that need three particular values at once are rare compared to those that need two, and a grid of four axes has
far more triples than pairs. So `make test` and CI run a sample of each grid, of seeds and of generated examples, and
`make test-exhaustive` runs all of them.
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


def sample_and_rest(sample: Iterable[Any], rest: Iterable[Any]) -> list[Any]:
    """Values of a parameter; only `make test-exhaustive` runs the rest."""
    return [*sample, *(pytest.param(value, marks=pytest.mark.exhaustive) for value in rest)]


def examples(count: int) -> int:
    """Return how many examples of a costly property to try: all in `make test-exhaustive`, else a third."""
    return count if is_exhaustive() else -(-count // 3)


def is_exhaustive() -> bool:
    """Whether to run every case, as `make test-exhaustive` does."""
    return os.environ.get("CLEAVE_TESTS") == "exhaustive"
