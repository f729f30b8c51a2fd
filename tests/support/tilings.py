"""Exact coverage of a set of blocks, by the signed corners of their indicator function."""

from __future__ import annotations

from itertools import product

import numpy as np

from cleave.core.fleet.profiles import Ints
from cleave.core.model.gemms import Gemm
from cleave.core.plan.gemm.tiling import Tiling

Corners = tuple[Ints, Ints]


def corners(rows: Ints, cols: Ints, inner: Ints) -> Corners:
    """Positions and values where the mixed difference of the sum of the blocks' indicator functions is not zero.

    Summing it up gives the function back, so two sets of blocks cover every element equally often if and only if
    their corners are equal. Each block has eight, of sign (-1)^(number of ends); inner corners cancel.
    """
    points: list[Ints] = []
    signs: list[Ints] = []
    for r, c, k in product((0, 1), repeat=3):
        points.append(np.stack([rows[:, r], cols[:, c], inner[:, k]], axis=1))
        signs.append(np.full(len(rows), (-1) ** (r + c + k)))
    distinct, which = np.unique(np.concatenate(points), axis=0, return_inverse=True)
    total = np.zeros(len(distinct), dtype=np.int64)
    np.add.at(total, which.ravel(), np.concatenate(signs))
    return distinct[total != 0], total[total != 0]


def same(one: Corners, other: Corners) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(one, other, strict=True))


def corners_of(tiling: Tiling) -> Corners:
    return corners(tiling.rows, tiling.cols, tiling.inner)


def corners_of_whole(gemm: Gemm) -> Corners:
    return corners(np.array([[0, gemm.m]]), np.array([[0, gemm.n]]), np.array([[0, gemm.k]]))


def covers_once(tiling: Tiling, gemm: Gemm) -> bool:
    """Whether every (row, column, inner) element of the gemm is in exactly one block, and no block is empty."""
    return all((x[:, 0] < x[:, 1]).all() for x in (tiling.rows, tiling.cols, tiling.inner)) and same(
        corners_of(tiling), corners_of_whole(gemm)
    )
