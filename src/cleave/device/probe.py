"""What this machine can do, measured within a second: how fast it multiplies, how much memory it may use."""

from __future__ import annotations

import time

import numpy as np
import psutil

from cleave.device.programs.kernels import Kernel
from cleave.errors import InputError

_SIDE = 768
_ENOUGH_S = 0.4
_LEAST_BYTES = 16 << 20
_TRANSIT_BYTES = 48 << 20
"""Messages being received, results being written and sent, beside operands and results themselves."""
_USUAL_SHARE = 0.25  # of the memory that is free now, where nothing was said


def measure_flops_per_s(kernel: Kernel) -> float:
    """The best of some products in a row: what it sustains with nothing else to do."""
    rng = np.random.default_rng(0)
    a, b = (_filled(kernel, rng.standard_normal((_SIDE, _SIDE), dtype=np.float32)) for _ in range(2))
    kernel.encode(kernel.multiply("nt", [(a, b)]), "fp32")
    best_s = float("inf")
    stop = time.perf_counter() + _ENOUGH_S
    while time.perf_counter() < stop:
        started = time.perf_counter()
        kernel.encode(kernel.multiply("nt", [(a, b)]), "fp32")  # a GPU has finished once its result is here
        best_s = min(best_s, time.perf_counter() - started)
    return 2.0 * _SIDE**3 / best_s


def usable_memory_bytes(limit_bytes: int | None) -> int:
    """What operands and results may take, so that the whole process stays within the limit given.

    Counted from what the process uses now, with numpy loaded and its buffers touched.
    """
    if limit_bytes is None:
        return int(psutil.virtual_memory().available * _USUAL_SHARE)
    own = psutil.Process().memory_info().rss
    usable = limit_bytes - own - _TRANSIT_BYTES
    if usable < _LEAST_BYTES:
        least = own + _TRANSIT_BYTES + _LEAST_BYTES
        raise InputError(
            f"expected --memory of at least {least / 1e6:.0f} MB, as the program itself takes {own / 1e6:.0f} MB, got "
            f"{limit_bytes / 1e6:.0f} MB; allow more"
        )
    return usable


def _filled(kernel: Kernel, matrix: np.ndarray[tuple[int, int], np.dtype[np.float32]]) -> object:
    held = kernel.allocate(*matrix.shape)
    kernel.write(held, matrix.reshape(-1).view(np.uint8).data, "fp32")
    return held
