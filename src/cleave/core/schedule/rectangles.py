"""Half-open rectangles of a block, and sets of disjoint ones: what is missing, what arrived, what is left."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Rectangle(NamedTuple):
    top: int
    bottom: int
    left: int
    right: int

    @property
    def rows(self) -> int:
        return self.bottom - self.top

    @property
    def cols(self) -> int:
        return self.right - self.left

    @property
    def area(self) -> int:
        return (self.bottom - self.top) * (self.right - self.left)

    def moved(self, down: int, right: int) -> Rectangle:
        if down == right == 0:
            return self
        return Rectangle(self.top + down, self.bottom + down, self.left + right, self.right + right)


def common(one: Rectangle, other: Rectangle) -> Rectangle | None:
    """Intersection of two rectangles; None if it is empty."""
    if one == other and one.top < one.bottom and one.left < one.right:  # most results come whole
        return one
    top, bottom = max(one.top, other.top), min(one.bottom, other.bottom)
    left, right = max(one.left, other.left), min(one.right, other.right)
    return Rectangle(top, bottom, left, right) if top < bottom and left < right else None


def within(pieces: Iterable[Rectangle], frame: Rectangle) -> list[Rectangle]:
    """Cut disjoint pieces down to the part inside the frame."""
    return [shared for piece in pieces if (shared := common(piece, frame)) is not None]


def without(pieces: Iterable[Rectangle], hole: Rectangle) -> list[Rectangle]:
    """Cut a hole out of disjoint pieces; the result is disjoint."""
    rest: list[Rectangle] = []
    for piece in pieces:
        cut = common(piece, hole)
        if cut is None:
            rest.append(piece)
            continue
        if cut == piece:
            continue
        around = (
            Rectangle(piece.top, cut.top, piece.left, piece.right),
            Rectangle(cut.bottom, piece.bottom, piece.left, piece.right),
            Rectangle(cut.top, cut.bottom, piece.left, cut.left),
            Rectangle(cut.top, cut.bottom, cut.right, piece.right),
        )
        rest.extend(part for part in around if part.area > 0)
    return rest


def total(pieces: Iterable[Rectangle]) -> int:
    """Area of disjoint pieces."""
    return sum(piece.area for piece in pieces)
