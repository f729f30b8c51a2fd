"""Reduce gradients among replicas, each on a device of its own: by a ring, or centrally.

Ring (Patarasuk and Yuan, 2009; NCCL, gloo): a reduce-scatter and an all-gather, so every member sends and receives
2 (n - 1) / n of the bytes, and the slower direction of the slowest member paces all. Central (a parameter server;
`central_ps` of DS3Lab/DT-FM): gradients up, reduced ones down, tensor by tensor, so that both directions overlap; n
copies of everything pass through the server's link. Hivemind's weighted butterfly lies between the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cleave.core.cost.rates import Server
from cleave.core.fleet.profiles import Bools, Floats, Profiles

MANNERS = {True: "by a ring", False: "centrally"}


@dataclass(frozen=True, slots=True)
class Reduced:
    seconds: Floats
    moved: Floats
    """bytes that a member sends and receives, per byte of its gradients"""
    is_ring: Bools


def byte_s(profiles: Profiles) -> Floats:
    """Seconds per device and byte that goes both ways."""
    return 1 / np.minimum(profiles.down_bytes_per_s, profiles.up_bytes_per_s)


def reduced(
    once_s: Floats | float, total_bytes: float, replicas: NDArray[np.integer[Any]] | int, server: Server
) -> Reduced:
    """The faster manner, for any numbers of replicas.

    `once_s` are the seconds in which the slowest member moves its gradients once, both ways at the same time;
    `total_bytes` are the gradients of one replica.
    """
    count = np.asarray(replicas, dtype=np.float64)
    around = 2 * (count - 1) / count
    ring_s = around * once_s
    served_s = count * total_bytes / min(server.down_bytes_per_s, server.up_bytes_per_s)
    central_s = np.where(count > 1, np.maximum(once_s, served_s), 0.0)
    is_ring = ring_s <= central_s
    return Reduced(
        seconds=np.minimum(ring_s, central_s),
        moved=np.where(is_ring, 2 * around, 2.0),
        is_ring=is_ring,
    )
