"""Is this the product? Checks rectangles that untrusted devices return, for a few per cent of computing them.

Freivalds' test: for a random vector r, C r = A (B r) costs three matrix-vector products. Columns are projected in
groups of `GROUP`, each row of each group is a test of its own, and its tolerance comes from rounding alone. What the
test flags, `recheck` judges: it recomputes rows and allows only what some order of summation can explain. Knows nothing
of devices, wires or time: matrices in (oriented: op(A) is [M, K], op(B) is [K, N], views will do), verdicts out.
docs/verification.md has the derivations and what was measured.

    r        draw(rng, cols)           one for all products that give the same columns, secret
    B r      project(b, r)             once for an operand slice, shared by all who multiply with it
    C r      glance(c, terms, format)  every rectangle
             check(c, terms, format)   rows that a glance leaves in doubt
    C        recheck(c, terms, rows)   rows that a check flags, and samples of those we suspect

`judge` does all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cleave.core.cost.gemm import WireFormat

Matrix = NDArray[np.float32]
Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

GROUP: Final = 128
"""Columns in one test. Rectangles begin at multiples of it, so that groups of all rectangles lie on one grid."""

_UNIT: Final = 2.0**-24
"""Half the gap above 1: how far fp32, in which all sums are made, can round."""
_ROUNDING: Final[dict[WireFormat, float]] = {"fp32": _UNIT, "bf16": 2.0**-8, "fp16": 2.0**-11, "int8": 0.0}
"""The same for results on the wire; int8 rounds by the step of its row instead."""
_FLOOR: Final[dict[WireFormat, float]] = {"fp32": 2.0**-126, "bf16": 2.0**-126, "fp16": 2.0**-25, "int8": 2.0**-106}
"""Rounding that is not relative: numbers below the normal ones, and int8's least step (1e-30 / 127)."""
_LARGEST: Final[dict[WireFormat, float]] = {
    "fp32": 3.4028234e38,
    "bf16": 3.3895e38,
    "fp16": 65504.0,
    "int8": 3.4028234e38,
}
_AT_ONCE: Final = 16
"""Rows in doubt are computed again so many at a time, until one is wrong."""
_SAMPLED_ROWS, _SAMPLED_OF = 4, 64
_SAMPLED_PEAKS: Final = 8
_TINY: Final = 1e-300
_NOTHING: Final[Floats] = np.zeros(())
_BAND: Final = 1 << 17
"""Elements that stay in cache from one pass to the next."""
_BAND_ROWS: Final = 256
_SIGMAS: Final = 8.0
"""Uniform rounding exceeds so many standard deviations once in 4e13 tests."""


class Rows:
    """Rows of op(A) as rounded for the wire, with their norms, which are computed once."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix

    @cached_property
    def norms(self) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):
            return _roots(np.einsum("ij,ij->i", self.matrix, self.matrix), self.matrix)

    def take(self, rows: slice | Ints) -> Rows:
        return Rows(self.matrix[rows])


class Projection:
    """op(B) seen through r: all a check needs to know of B."""

    def __init__(self, b: Matrix, r: Matrix, group: int) -> None:
        self._b, self.r, self.group = b, r, group
        self.s: Matrix = _fold(b, r, group, norms=False)[0]
        """op(B) r for each group of columns, [G, K]."""
        self._starts = np.arange(0, len(r), group)
        self._wholes: dict[tuple[int, int], tuple[Matrix, float]] = {}

    @cached_property
    def norms(self) -> Floats:
        """The larger of |B| (Frobenius) and |s| of each group, [G]: times |A_i|, it bounds C_i, and A_i s."""
        return np.maximum(np.sqrt(np.square(_fold(self._b, self.r, self.group)[1]).sum(axis=1)), self.sights)

    @cached_property
    def sights(self) -> Floats:
        """|s| of each group, [G]."""
        return np.sqrt(np.square(self.s, dtype=np.float64).sum(axis=1))

    def whole(self, groups: slice) -> tuple[Matrix, float]:
        """Some groups as one: op(B) r, [K], and its length."""
        found = self._wholes.get((groups.start, groups.stop))
        if found is None:
            s = self.s[groups].sum(axis=0)
            found = self._wholes[groups.start, groups.stop] = (s, sqrt(float(np.square(s, dtype=np.float64).sum())))
        return found

    @cached_property
    def lengths(self) -> Floats:
        """|r| of each group, [G]."""
        return np.sqrt(np.add.reduceat(np.square(self.r, dtype=np.float64), self._starts))

    @cached_property
    def spreads(self) -> Floats:
        """|r|_1 of each group, [G]."""
        return np.add.reduceat(np.abs(self.r, dtype=np.float64), self._starts)


Term = tuple[Rows, Projection]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a check found, in rows and groups of the rectangle."""

    rows: Ints
    """Those that are off, or not finite."""
    row: int
    group: int
    """Where error over tolerance is largest."""
    error: float
    tolerance: float
    unchecked: int
    """Tests (of rows x groups) that operands which are not finite made impossible; they count as passed."""

    @property
    def ok(self) -> bool:
        return len(self.rows) == 0

    @property
    def worst(self) -> float:
        """Error in units of tolerance; not finite for such results."""
        return self.error / self.tolerance


def draw(rng: np.random.Generator, cols: int) -> Matrix:
    """A random vector: signs times sizes uniform in [0.5, 1.5).

    A wrong element d moves its test by at least d / 2. Elements meant to cancel would do so half of the time with signs
    alone. Here r has a density of at most 1/2 everywhere, so d r + x, whatever the other elements make of x, stays
    within t with a probability of at most t / d: wrong elements escape with tolerance / d, d being the largest.
    """
    sizes = rng.random(cols, dtype=np.float32) + np.float32(0.5)
    return np.where(rng.random(cols, dtype=np.float32) < 0.5, -sizes, sizes)


def project(b: Matrix, r: Matrix, group: int = GROUP) -> Projection:
    """Reads op(B) [K, N] once. Narrower groups cost more and see more: their tolerance falls with the root."""
    return Projection(b, r, group)


def judge(
    c: Matrix,
    terms: Sequence[Term],
    exact: Callable[[], Sequence[tuple[Matrix, Matrix]]],
    format: WireFormat,
    rng: np.random.Generator,
    *,
    left: int = 0,
    harder: bool = False,
) -> Ints:
    """Rows of a rectangle that are surely wrong, or none: all of what follows, each where the one before has doubts.

    `exact` gives op(A) and op(B) of the terms, for the rectangle's rows and columns. Suspects are looked at `harder`:
    some rows are computed again whatever the check says. In int8 the elements that set the steps of some rows are, too,
    as steps can be bought.
    """
    doubt = glance(c, terms, format, left)
    if len(doubt):
        doubt = doubt[check(c[doubt], [(rows.take(doubt), seen) for rows, seen in terms], format, left).rows]
    for start in range(0, len(doubt), _AT_ONCE):
        wrong = recheck(c, exact(), doubt[start : start + _AT_ONCE], format)
        if len(wrong):
            return wrong
    if harder and rng.random() * _SAMPLED_OF < len(c):  # of a few rows only now and then: B is read whole for them
        wrong = recheck(c, exact(), rng.choice(len(c), min(_SAMPLED_ROWS, len(c)), replace=False), format)
        if len(wrong):
            return wrong
    if format == "int8":
        rows = rng.choice(len(c), min(_SAMPLED_PEAKS, len(c)), replace=False)
        cols = peaks(c, rows)
        return recheck(c[:, cols], [(a, b[:, cols]) for a, b in exact()], rows, format)
    return doubt[:0]


def glance(c: Matrix, terms: Sequence[Term], format: WireFormat, left: int = 0) -> Ints:
    """The rows that a quick look leaves in doubt; for `check` to judge. Normally there are none.

    It reads every matrix once, where norms would need a second pass: |A_i| |s| is at least |A_i s|, so T is at least
    the sum of these over terms. That is some ten times less than T, but honest errors are some hundred times less than
    the tolerance, and the few rows for which it is not enough get their norms. In fp32 all columns of a rectangle are
    one group: its tolerance is small enough.
    """
    groups = slice(left // terms[0][1].group, -(-(left + c.shape[1]) // terms[0][1].group))
    with np.errstate(over="ignore", invalid="ignore"):
        return _glance_whole(c, terms, left, groups) if format == "fp32" else _glance(c, terms, format, left, groups)


def _glance_whole(c: Matrix, terms: Sequence[Term], left: int, groups: slice) -> Ints:
    shared = terms[0][1]
    inner = sum(projection.s.shape[1] for _, projection in terms)
    units = np.float32((40 + 2 * sqrt(inner)) * _UNIT)
    floor = np.float32(shared.spreads[groups].sum() * (inner + 1) * _FLOOR["fp32"])
    error = c @ shared.r[left : left + c.shape[1]]
    below = np.zeros_like(error)
    for rows, projection in terms:
        seen = rows.matrix @ projection.whole(groups)[0]
        error -= seen
        below += np.abs(seen, out=seen)
    np.abs(error, out=error)
    doubt = np.flatnonzero(~(error <= units * below + floor))
    if len(doubt):
        exact = sum(rows.take(doubt).norms * projection.whole(groups)[1] for rows, projection in terms)
        doubt = doubt[~(error[doubt] <= float(units) * exact + float(floor))]
    return doubt


def _glance(c: Matrix, terms: Sequence[Term], format: WireFormat, left: int, groups: slice) -> Ints:
    shared = terms[0][1]
    error, sizes = _fold(c, shared.r[left : left + c.shape[1]], shared.group, norms=format != "int8")
    below = np.zeros(error.shape)
    for rows, projection in terms:
        seen = (rows.matrix @ projection.s[groups].T).T
        error -= seen
        lengths = projection.sights[groups, None]
        below += lengths * (np.abs(seen) / np.maximum(lengths, _TINY)).max(axis=0)
    np.abs(error, out=error)
    doubt = np.flatnonzero(~(error <= _tolerance(below, sizes, c, terms, format, groups)).all(axis=0))
    if len(doubt):
        exact = sum((projection.sights[groups, None] * rows.take(doubt).norms for rows, projection in terms), _NOTHING)
        tolerance = _tolerance(exact, sizes[:, doubt], c[doubt], terms, format, groups)
        doubt = doubt[~(error[:, doubt] <= tolerance).all(axis=0)]
    return doubt


def check(c: Matrix, terms: Sequence[Term], format: WireFormat, left: int = 0) -> Verdict:
    """Test every row of every group of a rectangle that begins at column `left` of what was projected.

    With T = sum over terms of |A_i| max(|B|_F, |s|), which bounds |C_i| in a group, an honest error is below

        tolerance = (40 + 2 sqrt K) 2^-24 T + R + floor
        R = 4 u min(|C_i|, T)                                                       bf16, fp16
        R = min(8 |r| / sqrt 12, 0.51 |r|_1) step, step = min(max |C_i|, T) / 127   int8

    The first part is fp32 arithmetic in any usual order: one sigma is 0.25 sqrt K units of 2^-24 for a sequential sum
    of K positive numbers, and 5 for the two projections of 128. R is rounding for the wire. The limit T and the
    triangle inequality keep a liar from buying tolerance: adding d to C_i adds at most 4 u |d| to it.
    """
    shared = terms[0][1]
    width = shared.group
    right = left + c.shape[1]
    assert left % width == 0, "rectangles begin on the grid of groups"
    assert right % width == 0 or right == len(shared.r), "and end on it, or with the block"
    assert all(projection.r is shared.r for _, projection in terms), "terms of one product share their columns"
    groups = slice(left // width, -(-right // width))
    with np.errstate(over="ignore", invalid="ignore"):
        error, sizes = _fold(c, shared.r[left:right], width, norms=format in ("bf16", "fp16"))
        bound = np.zeros(error.shape)
        for rows, projection in terms:
            seen = projection.s[groups].T
            for top in range(0, len(c), _BAND_ROWS):  # BLAS is faster so where groups are few
                band = slice(top, top + _BAND_ROWS)
                error[:, band] -= (rows.matrix[band] @ seen).T
            bound += projection.norms[groups, None] * rows.norms
        tolerance = _tolerance(bound, sizes, c, terms, format, groups)
        ratio = np.abs(error, out=error) / tolerance
    unknown = ~np.isfinite(bound)
    if unknown.any():
        if format == "int8":  # what is not finite travels in the scale of its row
            unknown |= unknown.any(axis=0)
        ratio[unknown] = error[unknown] = 0.0
        tolerance[unknown] = 1.0
    worst = ratio.max(axis=0)  # NaN if any is, and then argmax finds it
    row = int(worst.argmax())
    group = int(ratio[:, row].argmax())
    return Verdict(
        rows=np.flatnonzero(~(worst <= 1.0)),
        row=row,
        group=group,
        error=float(error[group, row]),
        tolerance=float(tolerance[group, row]),
        unchecked=int(np.count_nonzero(unknown)),
    )


def _tolerance(
    bound: Floats, sizes: Floats, c: Matrix, terms: Sequence[Term], format: WireFormat, groups: slice
) -> Floats:
    """From T (`bound`) and |C_i| (`sizes`) of each group and row."""
    shared, inner = terms[0][1], sum(projection.s.shape[1] for _, projection in terms)
    spreads = shared.spreads[groups, None]
    tolerance = (40 + 2 * sqrt(inner)) * _UNIT * bound
    tolerance += spreads * (_FLOOR[format] + inner * _FLOOR["fp32"])
    if format == "int8":
        step = np.minimum(_largest(c), bound.max(axis=0)) / 127
        tolerance += np.minimum(_SIGMAS / sqrt(12) * shared.lengths[groups, None], 0.51 * spreads) * step
    elif format != "fp32":  # there it is a small part of the first
        tolerance += 4 * _ROUNDING[format] * np.fmin(sizes, bound)
    return tolerance


def peaks(c: Matrix, rows: Ints) -> Ints:
    """The columns that set the int8 steps of some rows: `recheck` of these alone shows whether steps were bought."""
    return np.unique(np.abs(c[rows]).argmax(axis=1))


def recheck(c: Matrix, terms: Sequence[tuple[Matrix, Matrix]], rows: Ints, format: WireFormat) -> Ints:
    """Recompute some rows in fp64 and name those that no honest device can have returned.

    `c` is a whole rectangle, `terms` its op(A) [rows, K] and op(B) [K, cols]. Any order of summation in fp32 stays
    within K 2^-24 |A_i| |B_j|, to which comes half a unit of the wire: a device that computes in fp32 is never named.
    Infinity is right where the result may be too large for the wire; what operands that are not finite give is not
    judged.
    """
    inner = sum(a.shape[1] for a, _ in terms) + len(terms)
    exact = np.zeros((len(rows), c.shape[1]))
    bound = np.zeros_like(exact)
    with np.errstate(over="ignore", invalid="ignore"):
        for a, b in terms:
            a_rows = a[rows].astype(np.float64)
            lengths = np.sqrt(np.square(a_rows).sum(axis=1))[:, None]
            for start in range(0, c.shape[1], 4 * GROUP):
                b_part = b[:, start : start + 4 * GROUP].astype(np.float64)
                exact[:, start : start + 4 * GROUP] += a_rows @ b_part
                bound[:, start : start + 4 * GROUP] += lengths * np.sqrt(np.square(b_part).sum(axis=0))
        slack = 1.01 * inner * (_UNIT * bound + _FLOOR["fp32"]) + _FLOOR[format]
        if format == "int8":
            slack += 0.51 / 127 * (np.abs(exact) + slack).max(axis=1, keepdims=True)
        else:
            slack += 1.01 * _ROUNDING[format] * np.abs(exact)
        found = c[rows]
        too_large = np.abs(exact) + slack > _LARGEST[format]
        unknown = ~np.isfinite(bound)
        if format == "int8":  # what is not finite travels in the scale of its row
            unknown |= (too_large | unknown).any(axis=1, keepdims=True) & ~np.isfinite(found)
        right = np.abs(found - exact) <= slack
        right |= np.isinf(found) & too_large & (np.sign(found) == np.sign(exact))
        right |= ~np.isfinite(found) & (bound > _LARGEST["fp32"])  # sums on the way may have been too large
    return rows[~(right | unknown).all(axis=1)]


def _fold(matrix: Matrix, r: Matrix, group: int, *, norms: bool = True) -> tuple[Matrix, Floats]:
    """Groups of each row times those of r, and their norms if wanted; both [G, rows]."""
    rows, cols = matrix.shape
    groups, whole = -(-cols // group), cols - cols % group
    dots = np.empty((groups, rows), dtype=np.float32)
    sizes = np.empty((groups if norms else 0, rows))
    for start, stop, width in ((0, whole, group), (whole, cols, cols - whole)):  # whole groups, then what is left
        if start == stop:
            continue
        parts = matrix[:, start:stop].reshape(rows, -1, width).transpose(1, 0, 2)
        weights = r[start:stop].reshape(-1, width, 1)
        at = slice(start // group, -(-stop // group))
        squares = np.empty(parts.shape[:2] if norms else (0, 0), dtype=np.float32)
        height = max(1, _BAND // (stop - start)) if parts.strides[2] == parts.itemsize else rows
        with np.errstate(over="ignore", invalid="ignore"):
            for top in range(0, rows, height):
                band = parts[:, top : top + height]
                np.matmul(band, weights, out=dots[at, top : top + height, None])
                if norms:
                    squares[:, top : top + height] = np.einsum("gij,gij->gi", band, band)  # with out= it is slower
        if norms:
            sizes[at] = _roots(squares, parts)
    return dots, sizes


def _roots(squares: Matrix, parts: Matrix) -> Floats:
    """Norms from sums of squares over the last axis, which are made again in fp64 where fp32 is too narrow for them."""
    roots = np.sqrt(squares, dtype=np.float64)
    unsafe = ~((squares > 2.0**-90) & (squares < np.inf))
    if unsafe.any():
        with np.errstate(over="ignore", invalid="ignore"):
            roots[unsafe] = np.sqrt(np.square(parts[unsafe], dtype=np.float64).sum(axis=-1))
    return roots


def _largest(matrix: Matrix) -> Matrix:
    """The largest magnitude of each row."""
    height = max(1, _BAND // matrix.shape[1])
    bands = range(0, len(matrix), height)
    return np.concatenate([np.abs(matrix[top : top + height]).max(axis=1) for top in bands])
