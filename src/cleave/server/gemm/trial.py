"""A product whose result nobody needs, to measure a device that has not worked yet before a plan relies on it.

A claim, or a probe of half a second, may be far off: a processor slows down when it gets warm, or has a quota. The same
two matrices are multiplied again and again and the products added up, so that few bytes make much work. The result is
checked like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from cleave.core.plan.gemm.layer import Block
from cleave.core.schedule.tasks import DeviceId
from cleave.server.gemm.product import Product
from cleave.server.operands import Tensor

ROUNDS_S = 0.03, 0.06, 0.08, 0.08
"""Seconds of work per round, at the speed believed when the round begins; the first is too short to be late."""
_ROWS, _COLS, _INNER = 256, 256, 512
_MOST_TERMS = 256


def trial(
    device: DeviceId, flops_per_s: float, seconds: float, tensor: Callable[[int, int], Tensor]
) -> tuple[Product, tuple[Block, ...]]:
    """Return a product that takes a device `seconds` at `flops_per_s`, and the block that it is.

    `tensor` creates an identity for a matrix with the given rows and columns.
    """
    terms = min(max(math.ceil(seconds * flops_per_s / (2 * _ROWS * _COLS * _INNER)), 1), _MOST_TERMS)
    rng = np.random.default_rng(0)
    a, b = tensor(_ROWS, _INNER), tensor(_INNER, _COLS)
    for factor in (a, b):
        factor.bind(rng.standard_normal((factor.rows, factor.cols), dtype=np.float32))
    product = Product("grad_input", (a,) * terms, (b,) * terms)
    return product, (Block(device, (0, _ROWS), (0, _COLS), (0, product.gemm.k)),)
