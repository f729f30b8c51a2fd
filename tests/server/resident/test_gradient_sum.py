"""The law of a sum of rectangles: in any order and however they overlap, it is what adding them to zeros gives."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.core.schedule.rectangles import Rectangle
from cleave.server.resident.results import GradientSum

ROWS, COLS = 7, 5
ranges = st.tuples(st.integers(0, ROWS - 1), st.integers(1, ROWS), st.integers(0, COLS - 1), st.integers(1, COLS))
parts = ranges.map(lambda r: Rectangle(r[0], min(r[0] + r[1], ROWS), r[2], min(r[2] + r[3], COLS)))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(parts, max_size=8), st.integers(0, 8))
def test_a_sum_of_rectangles_is_what_adding_them_to_zeros_gives(added: list[Rectangle], looked_after: int) -> None:
    total, expected = GradientSum(ROWS, COLS), np.zeros((ROWS, COLS), dtype=np.float32)
    for number, part in enumerate(added, start=1):
        values = np.full((part.rows, part.cols), 2.0**number, dtype=np.float32)
        total.add(part, values)
        expected[part.top : part.bottom, part.left : part.right] += values
        if number == looked_after:
            np.testing.assert_array_equal(total.complete(), expected)
    np.testing.assert_array_equal(total.complete(), expected)
