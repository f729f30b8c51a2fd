"""Seconds from rates: of a device, and of the server's links and core."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cleave.core.fleet.profiles import Floats

Real = Floats | float

_CLEARLY = 1.5
THIN_ROWS = 40
"""Rows that take as long to multiply as their weights take to read. Blocks of a Llama in numpy, hidden 512: 16 rows at
a time ran at 20 GFLOP/s, 64 at 45, 256 at 60."""
_FAST_FLOPS_PER_S = 1.3e12
_READ_BYTES_PER_S = 20e9
"""Rate at which a device reads its weights; twice that from `_FAST_FLOPS_PER_S` up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Rates of the server; its links are shared by all devices."""

    down_bytes_per_s: float = np.inf
    """egress: everything sent to devices"""
    up_bytes_per_s: float = np.inf
    """ingress: everything received from devices"""
    flops_per_s: float = 0.0
    """0: the server computes no blocks itself"""
    task_s: float = 0.0
    """core seconds per task of a device: scheduling, sending, taking its result"""
    byte_s: float = 0.0
    """core seconds per byte that passes between a device and a task: encoding, copying, decoding, adding"""

    @property
    def is_capped(self) -> bool:
        return bool(np.isfinite(self.down_bytes_per_s) or np.isfinite(self.up_bytes_per_s))


class Pace(NamedTuple):
    """A device's rates, as last measured."""

    flops_per_s: float
    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float
    task_s: float = 0.0

    def is_clearly_faster(self, other: Pace) -> bool:
        pairs = zip(self[:3], other[:3], strict=True)
        return any(ours > _CLEARLY * theirs for ours, theirs in pairs)

    def seconds(self, down_bytes: int, flops: float, up_bytes: int) -> float:
        """Seconds of one task by itself without overlap: the most it should take."""
        moving_s = down_bytes / self.down_bytes_per_s + up_bytes / self.up_bytes_per_s
        return self.latency_s + self.task_s + moving_s + flops / self.flops_per_s


def thin_effort(rows: Real) -> Real:
    """Seconds per operation on few rows relative to many: reading the weights is amortized over fewer rows."""
    return 1 + THIN_ROWS / rows


def read_bytes_per_s(flops_per_s: Floats) -> Floats:
    """Rate at which a device of that speed passes over its memory: an assumption, as profiles do not say."""
    return np.where(flops_per_s > _FAST_FLOPS_PER_S, 2 * _READ_BYTES_PER_S, _READ_BYTES_PER_S)
