"""Laws of rectangles, checked by painting cells: intersection, inside, outside, area."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cleave.core.schedule.rectangles import Rectangle, common, total, within, without

SIDE, MARGIN = 12, 2
WHOLE = Rectangle(0, SIDE, 0, SIDE)
Cells = NDArray[np.int64]


@st.composite
def any_rectangles(draw: st.DrawFn) -> Rectangle:
    """Rectangles as they may come off the wire: empty, inside out, or reaching outside the plane."""
    ends = st.integers(-MARGIN, SIDE + MARGIN)
    return Rectangle(draw(ends), draw(ends), draw(ends), draw(ends))


@st.composite
def parts_of(draw: st.DrawFn, whole: Rectangle) -> Rectangle:
    top = draw(st.integers(whole.top, whole.bottom - 1))
    left = draw(st.integers(whole.left, whole.right - 1))
    return Rectangle(top, draw(st.integers(top + 1, whole.bottom)), left, draw(st.integers(left + 1, whole.right)))


@st.composite
def disjoint_pieces(draw: st.DrawFn) -> list[Rectangle]:
    """Disjoint pieces, painted one by one where the plane is empty, without the functions under test."""
    free = np.ones((SIDE, SIDE), dtype=np.bool_)
    pieces: list[Rectangle] = []
    for part in draw(st.lists(parts_of(WHOLE), max_size=8)):
        cells = free[part.top : part.bottom, part.left : part.right]
        if cells.all():
            cells[:] = False
            pieces.append(part)
    return pieces


def painted(pieces: list[Rectangle]) -> Cells:
    """Number of pieces covering each cell of a plane that contains them all."""
    cells = np.zeros((SIDE + 2 * MARGIN, SIDE + 2 * MARGIN), dtype=np.int64)
    for part in pieces:
        cells[part.top + MARGIN : part.bottom + MARGIN, part.left + MARGIN : part.right + MARGIN] += 1
    return cells


def are_proper(pieces: list[Rectangle]) -> bool:
    return all(piece.rows > 0 and piece.cols > 0 for piece in pieces)


@settings(max_examples=200)
@given(any_rectangles(), any_rectangles())
def test_the_intersection_has_the_cells_of_both(one: Rectangle, other: Rectangle) -> None:
    both = painted([one]) * painted([other])
    shared = common(one, other)
    assert (shared is None) == (not both.any()), "an empty intersection is None, not an empty rectangle"
    if shared is not None:
        np.testing.assert_array_equal(painted([shared]), both)
    assert shared == common(other, one)


@settings(max_examples=200)
@given(disjoint_pieces(), any_rectangles())
def test_inside_and_outside_partition_the_pieces(pieces: list[Rectangle], frame: Rectangle) -> None:
    before, inside, outside = painted(pieces), within(pieces, frame), without(pieces, frame)
    np.testing.assert_array_equal(painted(inside), before * painted([frame]))
    np.testing.assert_array_equal(painted(outside), before * (1 - painted([frame])))
    assert are_proper(inside)
    assert are_proper(outside)
    assert total(inside) + total(outside) == total(pieces)


@given(disjoint_pieces())
def test_the_total_is_the_number_of_cells(pieces: list[Rectangle]) -> None:
    assert total(pieces) == painted(pieces).sum()
    assert total(reversed(pieces)) == total(pieces)


@settings(max_examples=150)
@given(st.data())
def test_removing_every_piece_in_any_order_leaves_nothing(data: st.DataObject) -> None:
    missing = data.draw(disjoint_pieces())
    for part in data.draw(st.permutations(missing)):
        assert total(within(missing, part)) == part.area, "all of the piece is left"
        missing = without(missing, part)
        assert within(missing, part) == [], "nothing is taken twice"
    assert missing == []


@settings(max_examples=150)
@given(st.data())
def test_the_result_does_not_depend_on_how_an_area_is_cut(data: st.DataObject) -> None:
    column = data.draw(st.integers(1, SIDE - 1))
    halves = [WHOLE._replace(right=column), WHOLE._replace(left=column)]
    part = data.draw(any_rectangles())
    np.testing.assert_array_equal(painted(without(halves, part)), painted(without([WHOLE], part)))
    assert total(within(halves, part)) == total(within([WHOLE], part))


@settings(max_examples=150)
@given(st.lists(any_rectangles(), max_size=5))
def test_holes_may_overlap_and_come_in_any_order(holes: list[Rectangle]) -> None:
    rest, other = [WHOLE], [WHOLE]
    for hole, last in zip(holes, reversed(holes), strict=True):
        rest, other = without(rest, hole), without(other, last)
    np.testing.assert_array_equal(painted(rest), painted([WHOLE]) * (painted(holes) == 0))
    np.testing.assert_array_equal(painted(rest), painted(other))


@given(any_rectangles(), st.integers(-50, 50), st.integers(-50, 50))
def test_moving_there_and_back_changes_nothing(one: Rectangle, down: int, right: int) -> None:
    moved = one.moved(down, right)
    assert moved.moved(-down, -right) == one
    assert (moved.rows, moved.cols, moved.area) == (one.rows, one.cols, one.area)
    assert (moved.top, moved.left) == (one.top + down, one.left + right)
