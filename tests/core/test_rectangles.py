"""Laws of what is missing: subtracting is exact, leaves no overlap, and refuses what is not wholly missing."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cleave.core.rectangles import Rectangle, subtract

SIDE = 12


@st.composite
def rectangles(draw: st.DrawFn) -> Rectangle:
    """Any, also empty ones and ones turned inside out, as they may come from the wire."""
    ends = st.integers(-2, SIDE + 2)
    return Rectangle(draw(ends), draw(ends), draw(ends), draw(ends))


@st.composite
def within(draw: st.DrawFn, whole: Rectangle) -> Rectangle:
    top = draw(st.integers(whole.top, whole.bottom - 1))
    left = draw(st.integers(whole.left, whole.right - 1))
    return Rectangle(top, draw(st.integers(top + 1, whole.bottom)), left, draw(st.integers(left + 1, whole.right)))


@st.composite
def missing_parts(draw: st.DrawFn) -> list[Rectangle]:
    """What may be missing of a block: all of it without some pieces."""
    missing = [Rectangle(0, SIDE, 0, SIDE)]
    for _ in range(draw(st.integers(0, 5))):
        if not missing:
            break
        rest = subtract(missing, draw(within(draw(st.sampled_from(missing)))))
        assert rest is not None
        missing = rest
    return missing


def painted(parts: list[Rectangle]) -> NDArray[np.int64]:
    """How many of the parts cover each cell of a plane that holds them all."""
    cells = np.zeros((SIDE + 4, SIDE + 4), dtype=np.int64)
    for part in parts:
        cells[part.top + 2 : part.bottom + 2, part.left + 2 : part.right + 2] += 1
    return cells


@settings(max_examples=150)
@given(missing_parts(), rectangles())
def test_subtracting_takes_just_the_part_and_refuses_what_is_not_wholly_missing(
    missing: list[Rectangle], part: Rectangle
) -> None:
    before = painted(missing)
    assert before.max(initial=0) <= 1
    is_empty = part.rows <= 0 or part.cols <= 0
    taken = np.zeros_like(before) if is_empty else painted([part])
    rest = subtract(missing, part)
    if is_empty or (taken > before).any():
        assert rest is None
    else:
        assert rest is not None
        np.testing.assert_array_equal(painted(rest), before - taken)
        assert sum(piece.area for piece in rest) == sum(piece.area for piece in missing) - part.area


@settings(max_examples=150)
@given(st.data())
def test_taking_every_missing_part_in_any_order_leaves_nothing(data: st.DataObject) -> None:
    missing = data.draw(missing_parts())
    for part in data.draw(st.permutations(missing)):
        assert part.rows > 0
        assert part.cols > 0
        rest = subtract(missing, part)
        assert rest is not None
        assert subtract(rest, part) is None  # nothing is accepted twice
        missing = rest
    assert missing == []


@given(st.data())
def test_a_part_across_several_missing_ones_is_accepted(data: st.DataObject) -> None:
    """However the missing area happens to be cut into rectangles."""
    whole = Rectangle(0, SIDE, 0, SIDE)
    column = data.draw(st.integers(1, SIDE - 1))
    halves = [Rectangle(0, SIDE, 0, column), Rectangle(0, SIDE, column, SIDE)]
    part = data.draw(within(whole))
    rest, same = subtract(halves, part), subtract([whole], part)
    assert rest is not None
    assert same is not None
    np.testing.assert_array_equal(painted(rest), painted(same))


@given(rectangles(), rectangles())
def test_a_rectangle_holds_another_that_is_not_empty_and_within_it(one: Rectangle, other: Rectangle) -> None:
    cells = {(row, col) for row in range(other.top, other.bottom) for col in range(other.left, other.right)}
    inside = all(one.top <= row < one.bottom and one.left <= col < one.right for row, col in cells)
    assert one.holds(other) == (bool(cells) and inside)
