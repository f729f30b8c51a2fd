"""Seconds from rates: what a device can do, what the server's links and its core allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cleave.core.fleet.profiles import Floats

Real = Floats | float

SERVER_DOWN_BYTES_PER_S, SERVER_UP_BYTES_PER_S = 2.7e9, 0.93e9
"""Measured for messages of 4 MB through uvicorn: 0.37 and 1.07 s of a core for each GB."""
THIN_ROWS = 40
"""Rows that take as long to multiply as their weights take to read. Blocks of a Llama in numpy, hidden 512: 16 rows at
a time ran at 20 GFLOP/s, 64 at 45, 256 at 60."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """Rates of the server; its links are shared by all devices."""

    down_bytes_per_s: float = np.inf
    """egress: everything that goes down to devices"""
    up_bytes_per_s: float = np.inf
    """ingress: everything that comes up from devices"""
    flops_per_s: float = 0.0
    """0: the server computes no block itself"""

    @property
    def is_capped(self) -> bool:
        return bool(np.isfinite(self.down_bytes_per_s) or np.isfinite(self.up_bytes_per_s))


class Pace(NamedTuple):
    """What a device can do, as last measured."""

    flops_per_s: float
    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float

    def seconds(self, down_bytes: int, flops: float, up_bytes: int) -> float:
        """Seconds of one task by itself, nothing overlapping: what it should take at most."""
        moving_s = down_bytes / self.down_bytes_per_s + up_bytes / self.up_bytes_per_s
        return self.latency_s + moving_s + flops / self.flops_per_s


def handling_s(down_bytes: float, up_bytes: float) -> float:
    """Seconds of the server's core for sending and receiving so many bytes, over sockets and with results checked."""
    return down_bytes / SERVER_DOWN_BYTES_PER_S + up_bytes / SERVER_UP_BYTES_PER_S


def thin_effort(rows: Real) -> Real:
    """Seconds of an operation on so few rows, relative to one on many: weights are read for them alone."""
    return 1 + THIN_ROWS / rows
