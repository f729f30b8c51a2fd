"""Verify rectangles of a product returned by untrusted devices, for a few percent of the cost of computing them.

Freivalds' test: for a random vector r, checking C r = A (B r) takes three matrix-vector products. Columns are projected
in groups of `GROUP`; each row of each group is a separate test, whose tolerance comes from rounding alone. `recheck`
decides on rows that fail: it recomputes them and allows only what some summation order can explain. Knows nothing of
devices, wires or time: matrices in (op(A) is [M, K], op(B) is [K, N], views will do), verdicts out.
docs/verification.md has the derivations and measurements.

    r        draw(rng, cols)           one for all products with the same columns; secret
    B r      project(b, r)             once per operand slice, shared by all products with it
    C r      glance(c, terms, format)  every rectangle
             check(c, terms, format)   rows that a glance leaves in doubt
    C        recheck(c, terms, rows)   rows that a check flags, and samples from suspect devices

`judge` combines them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import sqrt
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from cleave.core.cost.wire import BLOCK, WireFormat, blocks_of
from cleave.core.model.batch import Matrix
from cleave.core.verify.blocks import LEAST_STEP, STEPS, largest_of_block, starts_of

Floats = NDArray[np.float64]
Reals = NDArray[np.floating]
Ints = NDArray[np.intp]

GROUP: Final = 128
"""Columns per test. Rectangles begin at multiples of it, so that all groups lie on one grid."""

_UNIT: Final = 2.0**-24
"""Unit roundoff of fp32, in which all sums are computed."""
_ROUNDING: Final[dict[WireFormat, float]] = {"fp32": _UNIT, "bf16": 2.0**-8, "fp16": 2.0**-11, "q8": 0.0}
"""Unit roundoff of results on the wire; q8 rounds by half the step of its block instead."""
_FLOOR: Final[dict[WireFormat, float]] = {"fp32": 2.0**-126, "bf16": 2.0**-126, "fp16": 2.0**-25, "q8": LEAST_STEP}
"""Absolute rounding errors: of subnormal numbers, and of q8's smallest step."""
_MAX_VALUE: Final[dict[WireFormat, float]] = {
    "fp32": 3.4028234e38,
    "bf16": 3.3895e38,
    "fp16": 65504.0,
    "q8": 3.38e38,
}
_ROWS_AT_ONCE: Final = 16
"""Rows in doubt are recomputed this many at a time, until one is wrong."""
_SAMPLED_ROWS, _ALWAYS_SAMPLED_ROWS = 4, 64
_SAMPLED_PEAKS: Final = 8
_LEAST_LENGTH: Final = np.float32(1e-30)
"""Of a projected operand; shorter ones count as this long, which only lowers a lower bound."""
_ZERO: Final[Floats] = np.zeros(())
_BAND_ELEMENTS: Final = 1 << 17
"""Elements that stay in cache from one pass to the next."""
_BAND_ROWS: Final = 256
_FEW_GROUPS, _UNPACKED = 8, 1 << 18
"""Groups for which bands pay, and multiply-adds of a band: OpenBLAS reads small products without packing them."""
_SIGMAS: Final = 8.0
"""Uniform rounding errors exceed this many standard deviations once in 4e13 tests."""


class Rows:
    """Rows of op(A) as rounded for the wire, with their norms, computed once."""

    def __init__(self, matrix: Matrix) -> None:
        self.matrix = matrix

    @cached_property
    def norms(self) -> Floats:
        with np.errstate(over="ignore", invalid="ignore"):
            return _roots(np.einsum("ij,ij->i", self.matrix, self.matrix), self.matrix)

    def take(self, rows: slice | Ints) -> Rows:
        return Rows(self.matrix[rows])


class Projection:
    """op(B) projected onto r: everything a check needs to know about B."""

    def __init__(self, b: Matrix, r: Matrix, group: int) -> None:
        self._b, self.r, self.group = b, r, group
        self.s: Matrix = _fold(b, r, group, "none")[0]
        """op(B) r per group of columns, [G, K]."""
        self._starts = np.arange(0, len(r), group)
        self._merged: dict[tuple[int, int], tuple[Matrix, float]] = {}

    @cached_property
    def norms(self) -> Floats:
        """max(|B|_F, |s|) per group, [G]; times |A_i| it bounds both |C_i| and |A_i s|."""
        return np.maximum(np.sqrt(np.square(_fold(self._b, self.r, self.group, "exact")[1]).sum(axis=1)), self.sights)

    @cached_property
    def sights(self) -> Floats:
        """|s| per group, [G]."""
        return np.sqrt(np.square(self.s, dtype=np.float64).sum(axis=1))

    def whole(self, groups: slice) -> tuple[Matrix, float]:
        """Merge groups into one: op(B) r, [K], and its length."""
        found = self._merged.get((groups.start, groups.stop))
        if found is None:
            s = self.s[groups].sum(axis=0)
            found = self._merged[groups.start, groups.stop] = (s, sqrt(float(np.square(s, dtype=np.float64).sum())))
        return found

    @cached_property
    def lengths(self) -> Floats:
        """|r| per group, [G]."""
        return np.sqrt(np.add.reduceat(np.square(self.r, dtype=np.float64), self._starts))

    @cached_property
    def spreads(self) -> Floats:
        """|r|_1 per group, [G]."""
        return np.add.reduceat(np.abs(self.r, dtype=np.float64), self._starts)


Term = tuple[Rows, Projection]
Norms = Literal["none", "quick", "exact"]
"""Quick ones are in fp32, which may over- or underflow."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Outcome of a check, in rows and groups of the rectangle."""

    rows: Ints
    """Rows out of tolerance or nonfinite."""
    row: int
    group: int
    """Row and group with the largest error relative to tolerance."""
    error: float
    tolerance: float
    unchecked: int
    """Tests, out of rows x groups, made impossible by nonfinite operands; they count as passed."""

    @property
    def ok(self) -> bool:
        return len(self.rows) == 0

    @property
    def worst(self) -> float:
        """Largest error relative to tolerance; nonfinite if the result is."""
        return self.error / self.tolerance


def draw(rng: np.random.Generator, cols: int) -> Matrix:
    """Draw a random vector: signs times magnitudes uniform in [0.5, 1.5).

    An element that is off by d moves its test by at least d / 2. With signs alone, errors designed to cancel would do
    so half of the time. Here the density of r is at most 1/2 everywhere, so d r + x, for any contribution x of the
    other elements, stays within t with probability at most t / d: errors escape with probability tolerance / d for the
    largest d.
    """
    sizes = rng.random(cols, dtype=np.float32) + np.float32(0.5)
    return np.where(rng.random(cols, dtype=np.float32) < 0.5, -sizes, sizes)


def project(b: Matrix, r: Matrix, group: int = GROUP) -> Projection:
    """Project op(B) [K, N], reading it once. Narrower groups cost more and detect more: tolerance ~ sqrt(width)."""
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
    """Return rows of a rectangle that are certainly wrong: `glance`, `check`, `recheck`, each on what the last doubts.

    `exact` returns op(A) and op(B) of the terms, for the rectangle's rows and columns. `harder`, for suspect devices,
    also recomputes a random sample of rows. For q8, the elements that set the steps of some blocks are recomputed too,
    as a liar could inflate a step to gain tolerance.
    """
    doubt = glance(c, terms, format, left)
    if len(doubt):
        doubt = doubt[check(c[doubt], [(rows.take(doubt), projected) for rows, projected in terms], format, left).rows]
    for start in range(0, len(doubt), _ROWS_AT_ONCE):
        wrong = recheck(c, exact(), doubt[start : start + _ROWS_AT_ONCE], format)
        if len(wrong):
            return wrong
    if harder and rng.random() * _ALWAYS_SAMPLED_ROWS < len(c):  # rarely for small rectangles, as it reads all of B
        wrong = recheck(c, exact(), rng.choice(len(c), min(_SAMPLED_ROWS, len(c)), replace=False), format)
        if len(wrong):
            return wrong
    if format == "q8":
        return recheck_peaks(c, exact(), *peaks(c, rng))
    return doubt[:0]


def glance(c: Matrix, terms: Sequence[Term], format: WireFormat, left: int = 0) -> Ints:
    """Return the rows that a quick test leaves in doubt, for `check` to decide; normally none.

    Reads every matrix once, where norms would need a second pass: |A_i| |s| >= |A_i s|, so the sum of the latter over
    terms is a lower bound of T. It is some ten times smaller than T, but honest errors are some hundred times smaller
    than the tolerance, and norms are computed for the few rows where the bound is not enough. In fp32 all columns of a
    rectangle form one group, as the tolerance is small enough.
    """
    groups = slice(left // terms[0][1].group, -(-(left + c.shape[1]) // terms[0][1].group))
    with np.errstate(over="ignore", invalid="ignore"):
        return _glance_merged(c, terms, left, groups) if format == "fp32" else _glance(c, terms, format, left, groups)


def _glance_merged(c: Matrix, terms: Sequence[Term], left: int, groups: slice) -> Ints:
    shared = terms[0][1]
    inner = sum(projection.s.shape[1] for _, projection in terms)
    units = np.float32((40 + 2 * sqrt(inner)) * _UNIT)
    floor = np.float32(shared.spreads[groups].sum() * (inner + 1) * _FLOOR["fp32"])
    error = c @ shared.r[left : left + c.shape[1]]
    lower_bound = np.zeros_like(error)
    for rows, projection in terms:
        projected = rows.matrix @ projection.whole(groups)[0]
        error -= projected
        lower_bound += np.abs(projected, out=projected)
    np.abs(error, out=error)
    doubt = np.flatnonzero(~(error <= units * lower_bound + floor))
    if len(doubt):
        exact = sum(rows.take(doubt).norms * projection.whole(groups)[1] for rows, projection in terms)
        doubt = doubt[~(error[doubt] <= float(units) * exact + float(floor))]
    return doubt


def _glance(c: Matrix, terms: Sequence[Term], format: WireFormat, left: int, groups: slice) -> Ints:
    shared = terms[0][1]
    r = shared.r[left : left + c.shape[1]]
    error, sizes = _fold(c, r, shared.group, "quick")
    if format == "q8":  # the largest of a block is at least its root mean square
        sizes *= _least_steps(r, shared.group)[:, None]
    lower_bound = np.zeros_like(error)
    for rows, projection in terms:
        projected = _multiplied(rows.matrix, projection.s[groups]).T
        error -= projected
        lengths = projection.sights[groups, None].astype(np.float32)
        np.abs(projected, out=projected)
        projected /= np.maximum(lengths, _LEAST_LENGTH)
        lower_bound += lengths * projected.max(axis=0)
    lower_bound[~(lower_bound < _MAX_VALUE["fp32"])] = 0  # overflow proves nothing: leave the row in doubt
    np.abs(error, out=error)
    doubt = np.flatnonzero(~(error <= _tolerance(lower_bound, sizes, c, terms, format, groups)).all(axis=0))
    if len(doubt):
        exact = sum((projection.sights[groups, None] * rows.take(doubt).norms for rows, projection in terms), _ZERO)
        tolerance = _tolerance(exact, sizes[:, doubt], c[doubt], terms, format, groups)
        doubt = doubt[~(error[:, doubt] <= tolerance).all(axis=0)]
    return doubt


def check(c: Matrix, terms: Sequence[Term], format: WireFormat, left: int = 0) -> Verdict:
    """Test every row of every group of a rectangle that begins at column `left` of the projected columns.

    With T = sum over terms of |A_i| max(|B|_F, |s|), which bounds |C_i| in a group, an honest error is below

        tolerance = (40 + 2 sqrt K) 2^-24 T + R + floor
        R = 4 u min(|C_i|, T)                                                                   bf16, fp16
        R = min(8 / sqrt 12, 0.51 sqrt(columns)) min(S, |r| T / 126)                            q8
        S = sqrt(sum over blocks of (|r_b| max |C_ib| / 126)^2)

    The first term covers fp32 arithmetic in any usual order: one sigma is 0.25 sqrt K units of 2^-24 for a sequential
    sum of K positive numbers, and 5 for the two projections of 128. R is rounding for the wire. The cap T and the
    triangle inequality keep a liar from gaining tolerance: adding d to C_i adds at most 4 u |d| to it.
    """
    shared = terms[0][1]
    width = shared.group
    right = left + c.shape[1]
    assert left % width == 0, "rectangles begin on the grid of groups"
    assert right % width == 0 or right == len(shared.r), "and end on it, or with the block"
    assert all(projection.r is shared.r for _, projection in terms), "terms of one product share their columns"
    groups = slice(left // width, -(-right // width))
    with np.errstate(over="ignore", invalid="ignore"):
        error, sizes = _fold(c, shared.r[left:right], width, "exact" if format in ("bf16", "fp16") else "none")
        if format == "q8":
            sizes = _steps(c, shared.r[left:right], width)
        bound = np.zeros(error.shape)
        for rows, projection in terms:
            projected = projection.s[groups].T
            for top in range(0, len(c), _BAND_ROWS):  # faster in BLAS when groups are few
                band = slice(top, top + _BAND_ROWS)
                error[:, band] -= (rows.matrix[band] @ projected).T
            bound += projection.norms[groups, None] * rows.norms
        tolerance = _tolerance(bound, sizes, c, terms, format, groups)
        ratio = np.abs(error, out=error) / tolerance
    unknown = ~np.isfinite(bound)
    if unknown.any():
        ratio[unknown] = error[unknown] = 0.0
        tolerance[unknown] = 1.0
    worst = ratio.max(axis=0)  # NaN if any is NaN; argmax then finds it
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
    bound: Reals, sizes: Reals, c: Matrix, terms: Sequence[Term], format: WireFormat, groups: slice
) -> Reals:
    """Compute tolerances from T (`bound`) and |C_i| (`sizes`) per group and row, in the precision of `bound`.

    For q8, `sizes` are the roots of sums of (|r_b| step_b)^2.
    """
    shared, inner = terms[0][1], sum(projection.s.shape[1] for _, projection in terms)
    spreads = shared.spreads[groups, None].astype(bound.dtype)
    tolerance = (40 + 2 * sqrt(inner)) * _UNIT * bound
    tolerance += spreads * (_FLOOR[format] + inner * _FLOOR["fp32"])
    if format == "q8":
        widths = np.minimum(shared.group, c.shape[1] - shared.group * np.arange(len(bound)))[:, None]
        lengths = shared.lengths[groups, None].astype(bound.dtype)
        factors = np.minimum(_SIGMAS / sqrt(12), 0.51 * np.sqrt(widths)).astype(bound.dtype)
        tolerance += factors * np.fmin(sizes, lengths * bound / STEPS)
    elif format != "fp32":  # in fp32 R is negligible compared to the first term
        tolerance += 4 * _ROUNDING[format] * np.fmin(sizes, bound)
    return tolerance


def peaks(c: Matrix, rng: np.random.Generator) -> tuple[Ints, Ints]:
    """Return rows and columns of elements that set the q8 steps of some random blocks, one in each of these rows."""
    rows = rng.choice(len(c), min(_SAMPLED_PEAKS, len(c)), replace=False)
    firsts = BLOCK * rng.integers(blocks_of(c.shape[1]), size=len(rows))
    cols = [first + np.abs(c[row, first : first + BLOCK]).argmax() for row, first in zip(rows, firsts, strict=True)]
    return rows, np.array(cols, dtype=np.intp)


def recheck_peaks(c: Matrix, terms: Sequence[tuple[Matrix, Matrix]], rows: Ints, cols: Ints) -> Ints:
    """Recompute elements that set the steps of their blocks; return the rows of those that are inflated.

    The bound is that of `recheck`. Elements that are not finite are not judged here: a neighbor may have overflowed.
    """
    found, exact, bound = c[rows, cols], np.zeros(len(rows)), np.zeros(len(rows))
    with np.errstate(over="ignore", invalid="ignore"):
        for a, b in terms:
            a_rows, b_cols = a[rows].astype(np.float64), b[:, cols].T.astype(np.float64)
            exact += np.einsum("ik,ik->i", a_rows, b_cols)
            bound += np.sqrt(np.einsum("ik,ik->i", a_rows, a_rows) * np.einsum("ik,ik->i", b_cols, b_cols))
        slack = _slack(bound, terms, "q8")
        slack += 0.51 / STEPS * (np.abs(exact) + slack)
        inflated = ~(np.abs(found - exact) <= slack) & np.isfinite(bound) & np.isfinite(found)
    return rows[inflated]


def recheck(c: Matrix, terms: Sequence[tuple[Matrix, Matrix]], rows: Ints, format: WireFormat) -> Ints:
    """Recompute some rows in fp64 and return those that no honest device can have returned.

    `c` is a whole rectangle, `terms` its op(A) [rows, K] and op(B) [K, cols]. Any summation order in fp32 stays within
    K 2^-24 |A_i| |B_j|, plus half a unit of the wire format, so a device that computes in fp32 is never accused.
    Infinity is accepted where the result may overflow the wire format; results of operands that are not finite are not
    judged.
    """
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
        slack = _slack(bound, terms, format)
        if format == "q8":
            slack += 0.51 / STEPS * largest_of_block(np.abs(exact) + slack)
        else:
            slack += 1.01 * _ROUNDING[format] * np.abs(exact)
        found = c[rows]
        too_large = np.abs(exact) + slack > _MAX_VALUE[format]
        unknown = ~np.isfinite(bound)
        if format == "q8":  # one value that is not finite spoils its block
            spoiled = (too_large | unknown).astype(np.float64)
            unknown |= (largest_of_block(spoiled) > 0) & ~np.isfinite(found)
        right = np.abs(found - exact) <= slack
        right |= np.isinf(found) & too_large & (np.sign(found) == np.sign(exact))
        right |= ~np.isfinite(found) & (bound > _MAX_VALUE["fp32"])  # partial sums may have overflowed
    return rows[~(right | unknown).all(axis=1)]


def _multiplied(matrix: Matrix, s: Matrix) -> Matrix:
    """Multiply rows by those of s, [rows, G]: a few at a time, in bands for which BLAS does not pack what it reads."""
    groups, inner = s.shape
    if groups > _FEW_GROUPS or matrix.strides[1] != matrix.itemsize:
        return matrix @ s.T
    out = np.empty((len(matrix), groups), dtype=np.float32)
    height = max(1, _UNPACKED // (groups * inner))
    for top in range(0, len(matrix), height):
        np.matmul(matrix[top : top + height], s.T, out=out[top : top + height])
    return out


def _fold(matrix: Matrix, r: Matrix, group: int, norms: Norms) -> tuple[Matrix, Reals]:
    """Multiply groups of each row by those of r; also return the groups' norms, if wanted; both [G, rows]."""
    rows, cols = matrix.shape
    groups, whole = -(-cols // group), cols - cols % group
    dots = np.empty((groups, rows), dtype=np.float32)
    sizes = np.empty((0 if norms == "none" else groups, rows), dtype=np.float64 if norms == "exact" else np.float32)
    for start, stop, width in ((0, whole, group), (whole, cols, cols - whole)):  # full groups, then the remainder
        if start == stop:
            continue
        parts = matrix[:, start:stop].reshape(rows, -1, width).transpose(1, 0, 2)
        weights = r[start:stop].reshape(-1, width)
        at = slice(start // group, -(-stop // group))
        squares = np.empty((0, 0) if norms == "none" else parts.shape[:2], dtype=np.float32)
        is_by_rows = parts.strides[2] == parts.itemsize
        height = max(1, _BAND_ELEMENTS // (stop - start)) if is_by_rows else rows
        with np.errstate(over="ignore", invalid="ignore"):
            for top in range(0, rows, height):
                band = parts[:, top : top + height]
                if is_by_rows:  # some two times as fast as the product, which suits columns
                    dots[at, top : top + height] = np.einsum("gij,gj->gi", band, weights)
                else:
                    np.matmul(band, weights[:, :, None], out=dots[at, top : top + height, None])
                if norms != "none":
                    squares[:, top : top + height] = np.einsum("gij,gij->gi", band, band)  # slower with out=
        if norms == "exact":
            sizes[at] = _roots(squares, parts)
        elif norms == "quick":
            np.sqrt(squares, out=sizes[at])
    return dots, sizes


def _roots(squares: Matrix, parts: Matrix) -> Floats:
    """Take norms from sums of squares over the last axis, recomputed in fp64 where fp32 over- or underflows."""
    roots = np.sqrt(squares, dtype=np.float64)
    unsafe = ~((squares > 2.0**-90) & (squares < np.inf))
    if unsafe.any():
        with np.errstate(over="ignore", invalid="ignore"):
            roots[unsafe] = np.sqrt(np.square(parts[unsafe], dtype=np.float64).sum(axis=-1))
    return roots


def _slack(bound: Floats, terms: Sequence[tuple[Matrix, Matrix]], format: WireFormat) -> Floats:
    """Return what any summation order in fp32 explains, given |A_i| |B_j|, and what is absolute about the wire."""
    inner = sum(a.shape[1] for a, _ in terms) + len(terms)
    return 1.01 * inner * (_UNIT * bound + _FLOOR["fp32"]) + _FLOOR[format]


# ------------------------------------------------------------------------------------------------ blocks of q8


def _steps(c: Matrix, r: Matrix, group: int) -> Floats:
    """Return the roots of sums of (|r_b| step_b)^2 per group and row, with step_b from the largest of a block."""
    starts = starts_of(c.shape[1])
    height = max(1, _BAND_ELEMENTS // c.shape[1])
    bands = (np.abs(c[top : top + height]) for top in range(0, len(c), height))
    steps = np.concatenate([np.maximum.reduceat(band, starts, axis=1) for band in bands]).astype(np.float64) / STEPS
    weights = np.add.reduceat(np.square(r, dtype=np.float64), starts)
    return np.sqrt(np.add.reduceat(np.square(steps) * weights, starts_of(len(starts), group // BLOCK), axis=1)).T


def _least_steps(r: Matrix, group: int) -> Matrix:
    """Return factors that turn |C_i| of a group into a lower bound of `_steps`, [G]."""
    starts = starts_of(len(r))
    squares = np.add.reduceat(np.square(r, dtype=np.float64), starts) / np.minimum(BLOCK, len(r) - starts)
    least = np.minimum.reduceat(squares, starts_of(len(starts), group // BLOCK))
    return (np.sqrt(least) / STEPS).astype(np.float32)
