"""Linear maps and norms of rows, and what goes back through them: what every part of a model is made of.

`Unit` is what the numerics see of a task: its kernel, arrays by operand number, and where gradients are added up. Only
gradients that have an accumulator are computed. It knows no store and no wire; arrays are the kernel's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from cleave.device.programs.kernels import Array, Kernel
from cleave.protocol.programs import Norm, Weight


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """Some rows of one sequence."""

    kernel: Kernel
    values: Mapping[int, Array]
    """operand -> its numbers"""
    gradients: Mapping[int, Array]
    """operand -> where its gradient is added up, if it is wanted"""
    rows: int
    first_row: int = 0
    mask: Array | None = None
    rotary: Array | None = None
    """Of these rows alone: rows x 2 head_dim."""
    targets: Array | None = None


def out_width(unit: Unit, weight: Weight) -> int:
    return unit.values[weight.weight].shape[1 if weight.is_transposed else 0]


def in_width(unit: Unit, weight: Weight) -> int:
    return unit.values[weight.weight].shape[0 if weight.is_transposed else 1]


# ------------------------------------------------------------------------------------------------ linear maps


def apply(unit: Unit, weight: Weight, x: Array) -> Array:
    stored = unit.values[weight.weight]
    y = unit.kernel.ops.matmul(x, stored if weight.is_transposed else stored.T)
    if weight.bias is not None:
        y += unit.values[weight.bias]
    if weight.adapter is not None:
        unit.kernel.add_product(y, _reduced(unit, weight, x), unit.values[weight.adapter[1]].T)
    return y


def input_gradient(unit: Unit, weight: Weight, dy: Array, into: Array = None) -> Array:
    """dx, added to `into` if there is one."""
    kernel, stored = unit.kernel, unit.values[weight.weight]
    matrix = stored.T if weight.is_transposed else stored
    if into is None:
        into = kernel.ops.matmul(dy, matrix)
    else:
        kernel.add_product(into, dy, matrix)
    if weight.adapter is not None:
        kernel.add_product(into, _reduced_gradient(unit, weight, dy), unit.values[weight.adapter[0]])
    return into


def add_gradients(unit: Unit, weight: Weight, x: Array, dy: Array) -> None:
    kernel, gradients = unit.kernel, unit.gradients
    if (total := gradients.get(weight.weight)) is not None:
        kernel.add_product(total, *((x.T, dy) if weight.is_transposed else (dy.T, x)))
    if weight.bias is not None and (total := gradients.get(weight.bias)) is not None:
        total += dy.sum(axis=0, keepdims=True)
    if weight.adapter is not None:
        a, b = weight.adapter
        if (total := gradients.get(a)) is not None:
            kernel.add_product(total, _reduced_gradient(unit, weight, dy).T, x)
        if (total := gradients.get(b)) is not None:
            kernel.add_product(total, dy.T, _reduced(unit, weight, x))


def forward_products(unit: Unit, weight: Weight) -> int:
    """Multiply-adds of a row; those of its input gradient are as many."""
    return out_width(unit, weight) * in_width(unit, weight) + (sum(_adapter_products(unit, weight)))


def gradient_products(unit: Unit, weight: Weight) -> int:
    """Multiply-adds of a row for the gradients that are wanted."""
    total = out_width(unit, weight) * in_width(unit, weight) if weight.weight in unit.gradients else 0
    trained = sum(operand in unit.gradients for operand in weight.adapter or ())
    return total + trained * sum(_adapter_products(unit, weight))


def _reduced(unit: Unit, weight: Weight, x: Array) -> Array:
    """rows x rank, scaled"""
    assert weight.adapter is not None
    reduced = unit.kernel.ops.matmul(x, unit.values[weight.adapter[0]].T)
    reduced *= weight.scale
    return reduced


def _reduced_gradient(unit: Unit, weight: Weight, dy: Array) -> Array:
    assert weight.adapter is not None
    reduced = unit.kernel.ops.matmul(dy, unit.values[weight.adapter[1]])
    reduced *= weight.scale
    return reduced


def _adapter_products(unit: Unit, weight: Weight) -> tuple[int, int]:
    if weight.adapter is None:
        return 0, 0
    rank, width = unit.values[weight.adapter[0]].shape
    return rank * width, rank * out_width(unit, weight)


# ------------------------------------------------------------------------------------------------ norms


class Normalized(NamedTuple):
    y: Array
    unscaled: Array
    inverse: Array
    """rows x 1: one over the deviation"""


def normalize(unit: Unit, norm: Norm, x: Array) -> Normalized:
    if norm.kind == "layer":
        x = x - x.mean(axis=1, keepdims=True)
    inverse = 1.0 / unit.kernel.ops.sqrt((x * x).mean(axis=1, keepdims=True) + norm.eps)
    unscaled = x * inverse
    y = unscaled * unit.values[norm.weight]
    if norm.bias is not None:
        y += unit.values[norm.bias]
    return Normalized(y, unscaled, inverse)


def normalize_back(unit: Unit, norm: Norm, forward: Normalized, dy: Array) -> Array:
    """dx; the gradients of weight and bias are added up."""
    if (total := unit.gradients.get(norm.weight)) is not None:
        total += (dy * forward.unscaled).sum(axis=0, keepdims=True)
    if norm.bias is not None and (total := unit.gradients.get(norm.bias)) is not None:
        total += dy.sum(axis=0, keepdims=True)
    dx = dy * unit.values[norm.weight]
    dx -= forward.unscaled * (dx * forward.unscaled).mean(axis=1, keepdims=True)
    if norm.kind == "layer":
        dx -= dx.mean(axis=1, keepdims=True)
    dx *= forward.inverse
    return dx
