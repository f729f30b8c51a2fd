"""One step of an optimizer on a weight, in place: the arithmetic of torch.optim in fp32, operation by operation.

Numbers that are the same for all entries (bias corrections, step sizes) are Python floats, as in torch. torch's kernels
round once where a product is added, numpy twice, so numpy differs from torch in the last bit. Entries are taken in
bands, so that temporaries stay in cache. Knows arrays, neither the store nor the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cleave.core.model.update_rule import Adam, Rule, Sgd
from cleave.device.kernels import Array, Kernel


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A weight with its gradient and states: arrays of one shape, all contiguous."""

    weight: Array
    gradient: Array
    states: tuple[Array, ...]


def scratch_numbers(kernel: Kernel, largest: int) -> int:
    """Entries of one of the two temporaries of `update` if the largest weight has so many."""
    return min(kernel.tile_elements, largest)


def update(kernel: Kernel, rule: Rule, scale: float, steps: list[Step]) -> None:
    """Change weights and states by gradients times `scale`.

    Temporaries are allocated before anything is written, so that a lack of memory changes nothing.
    """
    size = scratch_numbers(kernel, max(_numbers(step.weight) for step in steps))
    scratch = kernel.allocate(2, size)
    with np.errstate(all="ignore"):  # nonfinite numbers stay what they are, as in torch
        for step in steps:
            flat = [array.reshape(-1) for array in (step.weight, step.gradient, *step.states)]
            for first in range(0, len(flat[0]), size):
                weight, gradient, *states = (array[first : first + size] for array in flat)
                band = _Band(kernel, weight, tuple(states), scratch[0][: len(weight)], scratch[1][: len(weight)])
                kernel.ops.multiply(gradient, -scale if rule.is_ascent else scale, out=band.gradient)
                match rule:
                    case Sgd():
                        _sgd(band, rule)
                    case Adam():
                        _adam(band, rule)


def square_sum(kernel: Kernel, array: Array) -> float:
    """Sum the squares of all entries in double precision."""
    flat, total = array.reshape(-1), 0.0
    size = scratch_numbers(kernel, len(flat))
    scratch = kernel.allocate(1, size)[0]
    with np.errstate(all="ignore"):
        for first in range(0, len(flat), size):
            band = flat[first : first + size]
            total += kernel.total(kernel.ops.multiply(band, band, out=scratch[: len(band)]))
    return total


class _Band(NamedTuple):
    """Some entries of a weight and its states; `gradient` is a temporary, and may be overwritten."""

    kernel: Kernel
    weight: Array
    states: tuple[Array, ...]
    gradient: Array
    scratch: Array


def _sgd(band: _Band, rule: Sgd) -> None:
    kernel, weight, states, gradient, scratch = band
    if rule.weight_decay:
        kernel.add_scaled(gradient, weight, rule.weight_decay, scratch)
    if rule.momentum:
        (mean,) = states
        if rule.is_first:
            mean[...] = gradient
        else:
            mean *= rule.momentum
            kernel.add_scaled(mean, gradient, 1 - rule.dampening, scratch)
        if rule.is_nesterov:
            kernel.add_scaled(gradient, mean, rule.momentum, scratch)
        else:
            gradient = mean
    kernel.add_scaled(weight, gradient, -rule.rate, scratch)


def _adam(band: _Band, rule: Adam) -> None:
    kernel, weight, (mean, square), gradient, scratch = band
    if rule.weight_decay and rule.is_decoupled:
        weight *= 1 - rule.rate * rule.weight_decay
    elif rule.weight_decay:
        kernel.add_scaled(gradient, weight, rule.weight_decay, scratch)
    kernel.interpolate(mean, gradient, 1 - rule.beta1, scratch)
    square *= rule.beta2
    kernel.add_scaled_product(square, gradient, gradient, 1 - rule.beta2, scratch)
    denominator = kernel.ops.sqrt(square, out=gradient)
    denominator /= (1 - rule.beta2**rule.step) ** 0.5
    denominator += rule.eps
    kernel.add_scaled_quotient(weight, mean, denominator, -rule.rate / (1 - rule.beta1**rule.step), scratch)


def _numbers(array: Array) -> int:
    rows, cols = array.shape
    return rows * cols
