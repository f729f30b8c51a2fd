"""Laws of the fit: it recovers the costs that made the samples, and never a negative one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cleave.core.cost.rates import THIN_ROWS, thin_effort
from cleave.emulate.fit import Sample, fit
from cleave.errors import CleaveError


def samples(task_s: float, flops_per_s: float, byte_s: float, noise: float = 0.0) -> list[Sample]:
    rng = np.random.default_rng(0)
    made: list[Sample] = []
    for rows in (16.0, 64.0, 256.0, math.inf):
        for flops in (0.0, 1e6, 1e8, 1e10):
            for size_bytes in (100, 100_000, 4_000_000):
                seconds = task_s + flops * float(thin_effort(rows)) / flops_per_s + byte_s * size_bytes
                seconds *= 1 + noise * rng.uniform(-1, 1)
                made.append(Sample(label="", rows=rows, flops=flops, size_bytes=size_bytes, seconds=seconds))
    return made


@pytest.mark.parametrize("task_s", [2e-4, 1e-2])
@pytest.mark.parametrize("flops_per_s", [1e9, 1e11])
@pytest.mark.parametrize("byte_s", [0.0, 1e-9])
def test_exact_samples_give_back_the_costs_that_made_them(task_s: float, flops_per_s: float, byte_s: float) -> None:
    found = fit(samples(task_s, flops_per_s, byte_s))
    assert found.task_s == pytest.approx(task_s, rel=1e-6)
    assert found.flops_per_s == pytest.approx(flops_per_s, rel=1e-6)
    assert found.byte_s == pytest.approx(byte_s, rel=1e-6, abs=1e-15)
    assert found.thin_rows == pytest.approx(THIN_ROWS, rel=1e-6)
    assert found.worst_error < 1e-6


def test_noise_shows_in_the_error_and_hardly_in_the_costs() -> None:
    found = fit(samples(1e-3, 1e10, 1e-9, noise=0.2))
    assert found.task_s == pytest.approx(1e-3, rel=0.2)
    assert found.flops_per_s == pytest.approx(1e10, rel=0.2)
    assert 0.02 < found.median_error < 0.2
    assert found.median_error <= found.worst_error < 0.5


def test_no_cost_is_negative() -> None:
    shrinking = [
        Sample(label="", rows=math.inf, flops=1e8 * i, size_bytes=1_000_000 // i, seconds=1e-3 * i) for i in range(1, 9)
    ]
    found = fit(shrinking)
    assert min(found.task_s, found.byte_s, found.thin_rows) >= 0


def test_times_that_do_not_grow_with_the_work_are_refused() -> None:
    with pytest.raises(CleaveError, match="measure again"):
        fit([Sample(label="", rows=math.inf, flops=0.0, size_bytes=1, seconds=1e-3) for _ in range(4)])
