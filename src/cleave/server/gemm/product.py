"""Products of tensors, cut into pieces: which part of which output, from which slices of which tensors.

Layers that read the same X are one product: their weights are concatenated without being copied. Along that axis a
plan's ranges run through the members, one after another:

    forward      Y_i = X W_i^T           members side by side in the output's columns
    grad_input   dX  = sum_i dY_i W_i    members end to end in the inner dimension
    grad_weight  dW_i = dY_i^T X         members stacked in the output's rows
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from cleave.core.model.gemms import Gemm, Role
from cleave.core.plan.gemm.layer import Extent
from cleave.protocol.programs import Layout
from cleave.server.operands import Cut, Range, Tensor

LAYOUTS: dict[Role, Layout] = {"forward": "nt", "grad_input": "nn", "grad_weight": "tn"}


@dataclass(frozen=True, slots=True)
class Piece:
    """One task: a rectangle of one output, as a sum of products of slices."""

    output: int
    rows: Range
    cols: Range
    inner: Range
    terms: tuple[tuple[Cut, Cut], ...]
    is_partial: bool
    """Covers only part of the inner dimension, so its result is added to those of other pieces."""


@dataclass(frozen=True, slots=True)
class Product:
    role: Role
    a: tuple[Tensor, ...]
    b: tuple[Tensor, ...]

    @property
    def gemm(self) -> Gemm:
        """The product as one gemm over all members."""
        match self.role:
            case "forward":
                return Gemm(m=self.a[0].rows, n=sum(w.rows for w in self.b), k=self.a[0].cols)
            case "grad_input":
                return Gemm(m=self.a[0].rows, n=self.b[0].cols, k=sum(w.rows for w in self.b))
            case "grad_weight":
                return Gemm(m=sum(dy.cols for dy in self.a), n=self.b[0].cols, k=self.b[0].rows)

    @property
    def outputs(self) -> list[tuple[int, int]]:
        """Shapes of the outputs."""
        match self.role:
            case "forward":
                return [(self.a[0].rows, w.rows) for w in self.b]
            case "grad_input":
                return [(self.a[0].rows, self.b[0].cols)]
            case "grad_weight":
                return [(dy.cols, self.b[0].cols) for dy in self.a]

    def pieces(self, extent: Extent) -> Iterator[Piece]:
        rows, cols, inner = extent
        partial = inner != (0, self.gemm.k)
        match self.role:
            case "forward":
                x = Cut(self.a[0], rows, inner)
                for member, part in _members([w.rows for w in self.b], cols):
                    yield Piece(member, rows, part, inner, ((x, Cut(self.b[member], part, inner)),), partial)
            case "grad_input":
                terms = tuple(
                    (Cut(self.a[member], rows, part), Cut(self.b[member], part, cols))
                    for member, part in _members([w.rows for w in self.b], inner)
                )
                yield Piece(0, rows, cols, inner, terms, partial)
            case "grad_weight":
                x = Cut(self.b[0], inner, cols)
                for member, part in _members([dy.cols for dy in self.a], rows):
                    yield Piece(member, part, cols, inner, ((Cut(self.a[member], inner, part), x),), partial)

    def extent(self, piece: Piece, rows: Range, cols: Range) -> Extent:
        """Map a part of a piece, in the piece's coordinates, to an extent of the whole product."""
        top, left = piece.rows[0], piece.cols[0]
        if self.role == "forward":
            left += sum(w.rows for w in self.b[: piece.output])
        elif self.role == "grad_weight":
            top += sum(dy.cols for dy in self.a[: piece.output])
        return Extent((top + rows[0], top + rows[1]), (left + cols[0], left + cols[1]), piece.inner)


def _members(widths: Sequence[int], whole: Range) -> Iterator[tuple[int, Range]]:
    """Yield the members that a range over all of them touches, each with its own part of the range."""
    for member, (end, width) in enumerate(zip(accumulate(widths), widths, strict=True)):
        start = end - width
        first, last = max(whole[0], start), min(whole[1], end)
        if first < last:
            yield member, (first - start, last - start)
