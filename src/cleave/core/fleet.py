"""Profiles of a fleet's devices, as columns of numbers.

A profile says what a device can do: FLOP/s, bytes/s down and up, latency, usable memory. Everything downstream (cost,
bound, planner, simulator) works on whole columns, so a fleet is one struct of arrays and not a list of objects. This
module checks profiles and reads and writes the fleet CSV as text; it opens no file and draws no number (`sampling`
does).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Profiles:
    """One entry per device in every column; rates are sustained, memory is what may be used."""

    names: tuple[str, ...]
    flops_per_s: Floats
    down_bytes_per_s: Floats
    up_bytes_per_s: Floats
    latency_s: Floats
    memory_bytes: Floats

    def __len__(self) -> int:
        return len(self.names)
