"""Measure what this machine can offer, within a second: FLOP/s and usable memory. Links are probed by the server."""

from __future__ import annotations

import time

import numpy as np
import psutil

from cleave import memory
from cleave.device.kernels import Kernel
from cleave.errors import InputError

_SIDE = 768
_DURATION_S = 0.4
_MIN_BYTES = 16 << 20
_TRANSIT_BYTES = 48 << 20
"""Messages in flight: buffers of what is being received, encoded and sent, beyond operands and results."""
_DEFAULT_SHARE = 0.25  # of the memory free now, if the user set no limit


def measure_flops_per_s(kernel: Kernel) -> float:
    """Time repeated products on an otherwise idle machine and return the best rate."""
    rng = np.random.default_rng(0)
    a, b = (_load(kernel, rng.standard_normal((_SIDE, _SIDE), dtype=np.float32)) for _ in range(2))
    kernel.encode(kernel.multiply("nt", [(a, b)]), "fp32")
    best_s = float("inf")
    stop = time.perf_counter() + _DURATION_S
    while time.perf_counter() < stop:
        started = time.perf_counter()
        kernel.encode(kernel.multiply("nt", [(a, b)]), "fp32")  # encoding waits for a GPU to finish
        best_s = min(best_s, time.perf_counter() - started)
    return 2.0 * _SIDE**3 / best_s


def usable_memory_bytes(limit_bytes: int | None, setting: str = "--memory") -> int:
    """Bytes available to operands and results so that the whole process stays within `limit_bytes`.

    `setting` is what set the limit. Subtracts the resident size of the process, so call it once numpy is loaded and
    its buffers are touched.
    """
    if limit_bytes is None:
        return int(memory.available_bytes() * _DEFAULT_SHARE)
    if limit_bytes > (total := memory.total_bytes()):
        raise InputError(
            f"this machine has {total / 1e9:.3g} GB of memory, so --memory can be at most {total / 1e9:.3g} GB, but is "
            f"{limit_bytes / 1e9:.3g} GB; lend less"
        )
    in_use = psutil.Process().memory_info().rss
    usable = limit_bytes - in_use - _TRANSIT_BYTES
    if usable < _MIN_BYTES:
        minimum = in_use + _TRANSIT_BYTES + _MIN_BYTES
        found = f"{limit_bytes / 1e6:.0f} MB; allow more"
        if limit_bytes < 1e6:
            found = f"{limit_bytes:,} bytes; give a unit, as in 2GB"
        raise InputError(
            f"{setting} must be at least {minimum / 1e6:.0f} MB, as the program itself takes {in_use / 1e6:.0f} MB, "
            f"but is {found}"
        )
    return usable


def _load(kernel: Kernel, matrix: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> object:
    array = kernel.allocate(*matrix.shape)
    kernel.write(array, matrix.reshape(-1).view(np.uint8).data, "fp32")
    return array
