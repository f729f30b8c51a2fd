"""Blocks of q8 in a decoded matrix: what a check needs to know about their steps.

Only decoded numbers are needed: the largest of a block becomes byte 126 or 127, so that the step of a block is at most
its largest magnitude / 126, whether taken before rounding or after. docs/verification.md has the derivation.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from cleave.core.cost.wire import BLOCK

Floats = NDArray[np.float64]
STEPS: Final = 126
"""Largest magnitude of a block over its step, at least; it would be 127 if scales were exact."""
LEAST_STEP: Final = 2.0**-126


def starts_of(cols: int, width: int = BLOCK) -> NDArray[np.intp]:
    """Return the first column of each block, or of each run of `width`."""
    return np.arange(0, cols, width, dtype=np.intp)


def largest_of_block(values: Floats) -> Floats:
    """Replace each element by the largest of its block."""
    cols = values.shape[1]
    return np.repeat(np.maximum.reduceat(values, starts_of(cols), axis=1), BLOCK, axis=1)[:, :cols]
