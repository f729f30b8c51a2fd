"""Audits by recomputation: whether two results agree, and whether numbers are plausible at all.

Products are verified by projection (`products.py`); the output of several layers can only be recomputed. Two results of
the same program over the same operands, both rounded for the wire, may differ only as far as the summation order in
fp32 explains. Knows no devices and no programs, which `server/resident/audits.py` runs. docs/verification.md has the
derivation and measurements.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Matrix
from cleave.core.verify.blocks import LEAST_STEP, STEPS, largest_of_block

Floats = NDArray[np.float64]

_ABSURD: Final = 1e12
"""Magnitude that no model in training reaches, and from which the next layers would overflow."""
_ARITHMETIC: Final = 1e-4
"""Allowed fp32 error of an element relative to its row's RMS; honest errors are about 1e-6."""
_MIN_ROW_SHARE: Final = 0.1
"""Rows below this share of the overall RMS are judged as if they were that large."""
_MIN_TENSOR_SHARE: Final = 0.1
"""The same for a gradient among those of its account: some, such as that of a key bias, are zero up to rounding."""
_ALLOWED_FLIPS: Final = 16.0
"""Elements that may round the other way, anywhere."""
_STEP: Final[dict[WireFormat, float]] = {"fp32": 0.0, "bf16": 2.0**-7, "fp16": 2.0**-10, "q8": 1 / STEPS}
"""Gap between neighboring wire values relative to the number; for q8, to the largest of its block."""
_MIN_STEP: Final[dict[WireFormat, float]] = {"fp32": 0.0, "bf16": 2.0**-133, "fp16": 2.0**-24, "q8": LEAST_STEP}
_NEARLY_OVERFLOWING: Final[dict[WireFormat, float]] = {"fp32": 3.3e38, "bf16": 3.3e38, "fp16": 65000.0, "q8": 3.3e38}
_TINY: Final = 1e-37
_BAND: Final = 1 << 18
"""Elements compared at a time, to stay in cache."""


def is_plausible(values: Matrix) -> bool:
    """Whether all numbers are finite and of a magnitude that a model may have."""
    if values.flags.c_contiguous:  # one pass, where comparing needs two
        flat = values.reshape(-1)
        with np.errstate(over="ignore", invalid="ignore"):
            if float(flat @ flat) < _ABSURD:  # then so is every square, and _ABSURD is larger than 1
                return True
    return bool(values.max() < _ABSURD) and bool(values.min() > -_ABSURD)  # NaN compares as neither


def disagreement(found: Matrix, expected: Matrix, format: WireFormat, *, least: float = 0.0) -> float:
    """Return how far a result is off, in its worst row or overall; an honest one stays below 1.

    Both are rounded for the wire. Let a be the arithmetic error allowed for an element of row i and s the gap between
    its neighbors on the wire. An honest pair differs by about a, or by s where rounding went the other way, which
    happens with probability a / s. So with

        a = 1e-4 max(rms of row i, 0.1 rms of all rows, `least`)
        z = (found - expected) / (a + s)            e = a / (a + s)

    the sum of z^2 stays below the sum of e (+ 16), in every row and overall. Rows whose expected values are not finite,
    or almost too large for the wire, are skipped.
    """
    rows, cols = expected.shape
    least = max(least, _MIN_ROW_SHARE * sqrt(_mean_square(expected, format)))
    height = max(1, _BAND // cols)
    errors_sum, allowed_sum, worst = 0.0, _ALLOWED_FLIPS, 0.0
    for top in range(0, rows, height):
        errors, allowed = _row_errors(found[top : top + height], expected[top : top + height], format, least)
        errors_sum, allowed_sum = errors_sum + float(errors.sum()), allowed_sum + float(allowed.sum())
        worst = max(worst, float((errors / (allowed + _ALLOWED_FLIPS)).max()))
    return max(worst, errors_sum / allowed_sum)


def _row_errors(found: Matrix, expected: Matrix, format: WireFormat, least: float) -> tuple[Floats, Floats]:
    """Return the sums of z^2 and of e per row; an error that is NaN counts as infinite."""
    judgeable, is_judgeable = _judgeable(expected, format)
    sizes = np.abs(judgeable)
    arithmetic = _ARITHMETIC * np.maximum(np.sqrt(np.square(judgeable).mean(axis=1, keepdims=True)), least) + _TINY
    steps = _STEP[format] * (largest_of_block(sizes) if format == "q8" else sizes) + _MIN_STEP[format]
    widths = arithmetic + steps
    with np.errstate(over="ignore", invalid="ignore"):
        errors = np.where(is_judgeable, np.square((found - judgeable) / widths), 0.0).sum(axis=1)
    return np.where(np.isfinite(errors), errors, np.inf), np.broadcast_to(arithmetic / widths, judgeable.shape).sum(
        axis=1
    )


def _judgeable(expected: Matrix, format: WireFormat) -> tuple[Floats, NDArray[np.bool_]]:
    """Return the expected values with rows that cannot be judged zeroed, and which rows can."""
    is_judgeable = np.less(np.abs(expected).max(axis=1, keepdims=True), _NEARLY_OVERFLOWING[format])
    return np.where(is_judgeable, expected, 0.0).astype(np.float64), is_judgeable


def _mean_square(matrix: Matrix, format: WireFormat) -> float:
    height = max(1, _BAND // matrix.shape[1])
    bands = (_judgeable(matrix[top : top + height], format)[0] for top in range(0, len(matrix), height))
    return sum(float(np.square(band).sum()) for band in bands) / matrix.size


def least_of(gradients: Iterable[Matrix], format: WireFormat) -> float:
    """Return `least` for the gradients of one account."""
    return _MIN_TENSOR_SHARE * sqrt(max((_mean_square(gradient, format) for gradient in gradients), default=0.0))
