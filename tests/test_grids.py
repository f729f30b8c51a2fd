"""Laws of the sample that represents a grid of test cases."""

from __future__ import annotations

from itertools import combinations, product

from hypothesis import given
from hypothesis import strategies as st
from tests.support.grids import covering_sample


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_a_sample_contains_every_combination_of_the_given_strength(sizes: list[int], strength: int) -> None:
    axes = [[(f"axis {axis}", value) for value in range(size)] for axis, size in enumerate(sizes)]
    cases = [dict(case) for case in product(*axes)]
    sample = covering_sample(cases, strength)
    assert sample == sorted(set(sample))
    for chosen in combinations(axes, min(strength, len(axes))):
        for values in product(*chosen):
            assert any(dict(values).items() <= cases[index].items() for index in sample)


def test_a_sample_of_a_large_grid_is_a_small_part_of_it() -> None:
    cases = [{str(axis): value for axis, value in enumerate(case)} for case in product(range(4), repeat=4)]
    assert len(covering_sample(cases, 1)) == 4
    assert len(covering_sample(cases, 2)) < len(cases) / 8
