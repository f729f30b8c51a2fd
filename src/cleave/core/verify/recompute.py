"""Which work of a device is computed again, and whether what it returned is the same.

Products are checked by projection (`verify.py`); what comes out of several layers at once can only be recomputed. This
module has the chance of that and the comparison: two results of the same programs over the same operands, both rounded
for the wire, must agree as far as the order of sums in fp32 explains. Knows no devices and no programs; whoever runs
them is `server/audits.py`. docs/verification.md has the derivation and what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from cleave.core.cost.gemm import WireFormat
from cleave.core.verify.trust import Trust

Policy = Literal["sample", "strict", "none"]
"""Of work that cannot be checked: audit a random share of it, all of it, or none."""
Matrix = NDArray[np.float32]
Floats = NDArray[np.float64]

SAMPLED: Final = 0.02
SUSPECTED: Final = 0.25

_ARITHMETIC: Final = 1e-4
"""What fp32 may do to an element, in units of its row's root mean square; honest ones are off by some 1e-6."""
_LEAST_ROW: Final = 0.1
"""Rows smaller than so much of the root mean square of all are judged as if they were as large."""
_LEAST_TENSOR: Final = 0.1
"""The same of a gradient among those of its account: some are zero but for rounding, as that of a bias of keys is."""
_CHANCES: Final = 16.0
"""So many elements may lie on the other side of a rounding, wherever they are."""
_STEP: Final[dict[WireFormat, float]] = {"fp32": 0.0, "bf16": 2.0**-7, "fp16": 2.0**-10, "int8": 1 / 127}
"""Between neighbours on the wire, relative to a number; in int8 to the largest of its row."""
_LEAST_STEP: Final[dict[WireFormat, float]] = {"fp32": 0.0, "bf16": 2.0**-133, "fp16": 2.0**-24, "int8": 0.0}
_ALMOST_TOO_LARGE: Final[dict[WireFormat, float]] = {"fp32": 3.3e38, "bf16": 3.3e38, "fp16": 65000.0, "int8": 3.3e38}
_TINY: Final = 1e-37
_BAND: Final = 1 << 18
"""Elements judged at once."""


def chance(policy: Policy, trust: Trust, *, is_proven: bool) -> float:
    """How likely what a device does is audited.

    `is_proven`: an audit found such work of it right, and none has found it wrong since. Until then all of it is
    audited: most wrong results come from devices that are broken, and wrong always, so these never get as far as the
    optimizer.
    """
    if policy == "none":
        return 0.0
    if policy == "strict" or not is_proven:
        return 1.0
    return SUSPECTED if trust.is_suspect else SAMPLED


def disagreement(found: Matrix, expected: Matrix, format: WireFormat, *, least: float = 0.0) -> float:
    """How far a result is off in its worst row or as a whole, 1 being the most that an honest one can be.

    Both are as rounded for the wire. With a, what arithmetic may do to an element of row i, and s, the step between its
    neighbours on the wire, an honest pair differs by about a, or by a step where a rounding fell the other way, which
    it does with a probability of a / s. So with

        a = 1e-4 max(rms of row i, 0.1 rms of all rows, `least`)
        z = (found - expected) / (a + s)            e = a / (a + s)

    the sum of z^2 stays below the sum of e (+ 16), in every row and over all. Rows that should not be finite, or are
    almost too large for the wire, are not judged.
    """
    rows, cols = expected.shape
    least = max(least, _LEAST_ROW * sqrt(_mean_square(expected, format)))
    height = max(1, _BAND // cols)
    errors_sum, allowed_sum, worst = 0.0, _CHANCES, 0.0
    for top in range(0, rows, height):
        errors, allowed = _judged(found[top : top + height], expected[top : top + height], format, least)
        errors_sum, allowed_sum = errors_sum + float(errors.sum()), allowed_sum + float(allowed.sum())
        worst = max(worst, float((errors / (allowed + _CHANCES)).max()))
    return max(worst, errors_sum / allowed_sum)


def _judged(found: Matrix, expected: Matrix, format: WireFormat, least: float) -> tuple[Floats, Floats]:
    """The sums of z^2 and of e for each row; an error that is no number is infinite."""
    sure, is_known = _sure(expected, format)
    sizes = np.abs(sure)
    arithmetic = _ARITHMETIC * np.maximum(np.sqrt(np.square(sure).mean(axis=1, keepdims=True)), least) + _TINY
    steps = _STEP[format] * (sizes.max(axis=1, keepdims=True) if format == "int8" else sizes) + _LEAST_STEP[format]
    widths = arithmetic + steps
    with np.errstate(over="ignore", invalid="ignore"):
        errors = np.where(is_known, np.square((found - sure) / widths), 0.0).sum(axis=1)
    return np.where(np.isfinite(errors), errors, np.inf), np.broadcast_to(arithmetic / widths, sure.shape).sum(axis=1)


def _sure(expected: Matrix, format: WireFormat) -> tuple[Floats, NDArray[np.bool_]]:
    """What can be judged, the rest being zero, and which rows that is."""
    is_known = np.less(np.abs(expected).max(axis=1, keepdims=True), _ALMOST_TOO_LARGE[format])
    return np.where(is_known, expected, 0.0).astype(np.float64), is_known


def _mean_square(matrix: Matrix, format: WireFormat) -> float:
    height = max(1, _BAND // matrix.shape[1])
    bands = (_sure(matrix[top : top + height], format)[0] for top in range(0, len(matrix), height))
    return sum(float(np.square(band).sum()) for band in bands) / matrix.size


def least_of(gradients: Iterable[Matrix], format: WireFormat) -> float:
    """`least` for the gradients of one account."""
    return _LEAST_TENSOR * sqrt(max((_mean_square(gradient, format) for gradient in gradients), default=0.0))
