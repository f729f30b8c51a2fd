"""Fit a device's profile to measured tasks: seconds are a fixed cost, operations, and bytes handled. Pure.

    seconds = task_s + flops (1 + thin_rows / rows) / flops_per_s + byte_s bytes

is linear in task_s, 1 / flops_per_s, thin_rows / flops_per_s and byte_s, so least squares finds them. Errors count
relative to what was measured, as tasks differ by orders of magnitude, and no cost is negative.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import cast

import numpy as np

from cleave.core.cost.rates import thin_effort
from cleave.core.fleet.profiles import Floats, Profiles
from cleave.errors import CleaveError


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What one task of a kind took a device."""

    label: str
    rows: float
    """Rows that share each reading of the weights; infinite where that does not matter."""
    flops: float
    size_bytes: int
    """Received and sent."""
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A profile, and how well it explains the samples."""

    task_s: float
    flops_per_s: float
    """With few rows slower by `thin_effort`, as everywhere in the cost model."""
    byte_s: float
    thin_rows: float
    """Rows that take as long to multiply as their weights take to read, by these samples alone."""
    predicted_s: tuple[float, ...]
    """For each sample."""
    median_error: float
    """Relative to what was measured."""
    worst_error: float


def fit(samples: Sequence[Sample]) -> Fit:
    """Fit a profile; raises CleaveError if the samples say nothing about its speed."""
    measured = np.array([sample.seconds for sample in samples])
    flops = np.array([sample.flops for sample in samples])
    rows = np.array([sample.rows for sample in samples])
    size_bytes = np.array([sample.size_bytes for sample in samples], dtype=np.float64)
    fixed = np.ones(len(samples))
    free = _least_squares(np.column_stack([fixed, flops, flops / rows, size_bytes]), measured)
    columns = np.column_stack([fixed, flops * thin_effort(rows), size_bytes])
    task_s, flop_s, byte_s = _least_squares(columns, measured)
    if flop_s <= 0:
        raise CleaveError("the measured times do not grow with the work; measure again on an idle machine")
    predicted = columns @ np.array([task_s, flop_s, byte_s])
    errors = np.abs(predicted - measured) / measured
    return Fit(
        task_s=task_s,
        flops_per_s=1 / flop_s,
        byte_s=byte_s,
        thin_rows=free[2] / free[1] if free[1] > 0 else 0.0,
        predicted_s=tuple(predicted.tolist()),
        median_error=float(np.median(errors)),
        worst_error=float(errors.max()),
    )


def profile_of(
    found: Fit, *, name: str, memory_bytes: int, down_bytes_per_s: float, up_bytes_per_s: float, latency_s: float
) -> Profiles:
    """Return a fleet of this one device; links come from elsewhere."""
    return Profiles(
        names=(name,),
        flops_per_s=np.array([found.flops_per_s]),
        down_bytes_per_s=np.array([down_bytes_per_s]),
        up_bytes_per_s=np.array([up_bytes_per_s]),
        latency_s=np.array([latency_s]),
        memory_bytes=np.array([float(memory_bytes)]),
        task_s=np.array([found.task_s]),
        byte_s=np.array([found.byte_s]),
    )


def _least_squares(columns: Floats, measured: Floats) -> list[float]:
    """Solve for costs of at least 0 that minimize relative errors: the best of all choices of columns that stay."""
    scaled = columns / measured[:, None]
    norms = np.maximum(np.linalg.norm(scaled, axis=0), 1e-300)
    best, best_error = np.zeros(columns.shape[1]), np.inf
    for count in range(1, columns.shape[1] + 1):
        for chosen in combinations(range(columns.shape[1]), count):
            part = scaled[:, chosen] / norms[list(chosen)]
            costs = cast("Floats", np.linalg.lstsq(part, np.ones(len(measured)), rcond=None)[0])
            error = float(((part @ costs - 1) ** 2).sum())
            if (costs >= 0).all() and error < best_error - 1e-12:
                best_error = error
                best = np.zeros(columns.shape[1])
                best[list(chosen)] = costs / norms[list(chosen)]
    return best.tolist()
