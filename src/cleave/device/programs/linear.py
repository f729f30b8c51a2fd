"""Linear maps and norms, forward and backward: the building blocks of every sublayer.

`Scope` is all that the numerics see of a task: kernel, arrays by operand number, gradient accumulators. Only gradients
with an accumulator are computed. Knows no store and no wire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cleave.core.model.decoder import Norm, Weight
from cleave.device.kernels import Array, Kernel

Inside = tuple[Array, ...]
"""What a sublayer's forward may keep for its backward; empty if it kept nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """Some rows of one sequence, and the arrays they meet."""

    kernel: Kernel
    values: Mapping[int, Array]
    """Operands by number."""
    gradients: Mapping[int, Array]
    """Gradient accumulators, by the number of the operand they belong to."""
    rows: int
    first_row: int = 0
    mask: Array | None = None
    rotary: Array | None = None
    """rows x 2 head_dim, for these rows only."""
    targets: Array | None = None


def out_width(scope: Scope, weight: Weight) -> int:
    return scope.values[weight.weight].shape[1 if weight.is_transposed else 0]


def in_width(scope: Scope, weight: Weight) -> int:
    return scope.values[weight.weight].shape[0 if weight.is_transposed else 1]


# ------------------------------------------------------------------------------------------------ linear maps


def apply(scope: Scope, weight: Weight, x: Array) -> Array:
    stored = scope.values[weight.weight]
    y = scope.kernel.ops.matmul(x, stored if weight.is_transposed else stored.T)
    if weight.bias is not None:
        y += scope.values[weight.bias]
    if weight.adapter is not None:
        scope.kernel.add_product(y, _project(scope, weight, x), scope.values[weight.adapter[1]].T)
    return y


def input_gradient(scope: Scope, weight: Weight, dy: Array, into: Array = None) -> Array:
    """Return dx, added to `into` if given."""
    kernel, stored = scope.kernel, scope.values[weight.weight]
    matrix = stored.T if weight.is_transposed else stored
    if into is None:
        into = kernel.ops.matmul(dy, matrix)
    else:
        kernel.add_product(into, dy, matrix)
    if weight.adapter is not None:
        kernel.add_product(into, _project_gradient(scope, weight, dy), scope.values[weight.adapter[0]])
    return into


def add_gradients(scope: Scope, weight: Weight, x: Array, dy: Array) -> None:
    kernel, gradients = scope.kernel, scope.gradients
    if (total := gradients.get(weight.weight)) is not None:
        kernel.add_product(total, *((x.T, dy) if weight.is_transposed else (dy.T, x)))
    if weight.bias is not None and (total := gradients.get(weight.bias)) is not None:
        total += dy.sum(axis=0, keepdims=True)
    if weight.adapter is not None:
        a, b = weight.adapter
        if (total := gradients.get(a)) is not None:
            kernel.add_product(total, _project_gradient(scope, weight, dy).T, x)
        if (total := gradients.get(b)) is not None:
            kernel.add_product(total, dy.T, _project(scope, weight, x))


def forward_macs(scope: Scope, weight: Weight) -> int:
    """Multiply-adds per row; the input gradient takes as many."""
    return out_width(scope, weight) * in_width(scope, weight) + (sum(_adapter_macs(scope, weight)))


def gradient_macs(scope: Scope, weight: Weight) -> int:
    """Multiply-adds per row for the weight gradients that have an accumulator."""
    total = out_width(scope, weight) * in_width(scope, weight) if weight.weight in scope.gradients else 0
    trained = sum(operand in scope.gradients for operand in weight.adapter or ())
    return total + trained * sum(_adapter_macs(scope, weight))


def _project(scope: Scope, weight: Weight, x: Array) -> Array:
    """Project rows to the adapter's rank, scaled."""
    assert weight.adapter is not None
    projected = scope.kernel.ops.matmul(x, scope.values[weight.adapter[0]].T)
    projected *= weight.scale
    return projected


def _project_gradient(scope: Scope, weight: Weight, dy: Array) -> Array:
    assert weight.adapter is not None
    projected = scope.kernel.ops.matmul(dy, scope.values[weight.adapter[1]])
    projected *= weight.scale
    return projected


def _adapter_macs(scope: Scope, weight: Weight) -> tuple[int, int]:
    if weight.adapter is None:
        return 0, 0
    rank, width = scope.values[weight.adapter[0]].shape
    return rank * width, rank * out_width(scope, weight)


# ------------------------------------------------------------------------------------------------ norms


class Normalized(NamedTuple):
    y: Array
    unscaled: Array
    inverse: Array
    """rows x 1: reciprocal of the standard deviation (layer norm) or root mean square."""


def normalize(scope: Scope, norm: Norm, x: Array) -> Normalized:
    if norm.kind == "layer":
        x = x - x.mean(axis=1, keepdims=True)
    inverse = 1.0 / scope.kernel.ops.sqrt((x * x).mean(axis=1, keepdims=True) + norm.eps)
    unscaled = x * inverse
    y = unscaled * scope.values[norm.weight]
    if norm.bias is not None:
        y += scope.values[norm.bias]
    return Normalized(y, unscaled, inverse)


def normalize_back(scope: Scope, norm: Norm, forward: Normalized, dy: Array) -> Array:
    """Return dx; add the gradients of weight and bias to their accumulators."""
    if (total := scope.gradients.get(norm.weight)) is not None:
        total += (dy * forward.unscaled).sum(axis=0, keepdims=True)
    if norm.bias is not None and (total := scope.gradients.get(norm.bias)) is not None:
        total += dy.sum(axis=0, keepdims=True)
    dx = dy * scope.values[norm.weight]
    dx -= forward.unscaled * (dx * forward.unscaled).mean(axis=1, keepdims=True)
    if norm.kind == "layer":
        dx -= dx.mean(axis=1, keepdims=True)
    dx *= forward.inverse
    return dx
