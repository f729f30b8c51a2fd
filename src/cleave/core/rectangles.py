"""Half-open rectangles of a block: what is missing, what came, what is left."""

from __future__ import annotations

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
        return self.rows * self.cols

    def holds(self, other: Rectangle) -> bool:
        return (
            self.top <= other.top < other.bottom <= self.bottom and self.left <= other.left < other.right <= self.right
        )


def subtract(missing: list[Rectangle], part: Rectangle) -> list[Rectangle] | None:
    """What is missing without `part`; None unless all of `part` was missing."""
    rest: list[Rectangle] = []
    covered = 0
    for whole in missing:
        top, bottom = max(whole.top, part.top), min(whole.bottom, part.bottom)
        left, right = max(whole.left, part.left), min(whole.right, part.right)
        if top >= bottom or left >= right:
            rest.append(whole)
            continue
        covered += (bottom - top) * (right - left)
        around = (
            Rectangle(whole.top, top, whole.left, whole.right),
            Rectangle(bottom, whole.bottom, whole.left, whole.right),
            Rectangle(top, bottom, whole.left, left),
            Rectangle(top, bottom, right, whole.right),
        )
        rest.extend(piece for piece in around if piece.area > 0)
    return rest if covered == part.area > 0 else None
