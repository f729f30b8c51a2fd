"""The MLP of a layer, gated or not, forward and backward. Every activation is x s(x), with s between 0 and 1."""

from __future__ import annotations

import math

from cleave.device.programs.kernels import Array, Kernel
from cleave.device.programs.linear import (
    Unit,
    add_gradients,
    apply,
    forward_products,
    gradient_products,
    in_width,
    input_gradient,
    normalize,
    normalize_back,
)
from cleave.protocol.programs import Activation, Mlp, Weight

_TANH_SCALE, _TANH_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715  # gelu_tanh is x sigmoid(scale (x + cube x^3))


def forward(unit: Unit, part: Mlp, x: Array) -> Array:
    """f(norm(x))"""
    normed = normalize(unit, part.norm, x).y
    inner = apply(unit, part.up if part.gate is None else part.gate, normed)
    inner *= _share(unit.kernel, part.activation, inner)
    if part.gate is not None:
        inner *= apply(unit, part.up, normed)
    return apply(unit, part.down, inner)


def backward(unit: Unit, part: Mlp, x: Array, dy: Array) -> Array:
    """dx of f(norm(x)); what is inside is made again."""
    normed = normalize(unit, part.norm, x)
    acted = part.up if part.gate is None else part.gate
    inner = apply(unit, acted, normed.y)
    share = _share(unit.kernel, part.activation, inner)
    slope = _slope(unit.kernel, part.activation, inner, share)
    inner *= share
    d_inner = input_gradient(unit, part.down, dy)
    slope *= d_inner
    d_normed = None
    if part.gate is not None:
        up = apply(unit, part.up, normed.y)
        d_inner *= inner
        slope *= up
        inner *= up
        add_gradients(unit, part.up, normed.y, d_inner)
        d_normed = input_gradient(unit, part.up, d_inner)
    add_gradients(unit, part.down, inner, dy)
    add_gradients(unit, acted, normed.y, slope)
    return normalize_back(unit, part.norm, normed, input_gradient(unit, acted, slope, d_normed))


def forward_flops(unit: Unit, part: Mlp) -> float:
    return 2.0 * unit.rows * sum(forward_products(unit, weight) for weight in _weights(part))


def backward_flops(unit: Unit, part: Mlp) -> float:
    """Back through all, and all but the last made again."""
    products = sum(2 * forward_products(unit, weight) + gradient_products(unit, weight) for weight in _weights(part))
    return 2.0 * unit.rows * (products - forward_products(unit, part.down))


def workspace_elements(unit: Unit, part: Mlp) -> int:
    return 6 * unit.rows * in_width(unit, part.down)


def _weights(part: Mlp) -> tuple[Weight, ...]:
    return (part.up, part.down) if part.gate is None else (part.gate, part.up, part.down)


def _share(kernel: Kernel, activation: Activation, x: Array) -> Array:
    """s(x)"""
    match activation:
        case "silu":
            return _sigmoid(kernel, x)
        case "gelu_tanh":
            inner = x * x
            inner *= _TANH_CUBE
            inner += 1
            inner *= x
            inner *= _TANH_SCALE
            return _sigmoid(kernel, inner)
        case "gelu":
            share = kernel.erf(x * math.sqrt(0.5))
            share += 1
            share *= 0.5
            return share
        case "relu":
            return kernel.ops.clip(kernel.ops.sign(x), 0, 1)


def _slope(kernel: Kernel, activation: Activation, x: Array, share: Array) -> Array:
    """The derivative of x s(x), which is s + x s'."""
    match activation:
        case "silu":
            slope = x * share
            slope *= 1 - share
        case "gelu_tanh":
            slope = x * x
            slope *= 3 * _TANH_CUBE
            slope += 1
            slope *= x
            slope *= _TANH_SCALE
            slope *= share
            slope *= 1 - share
        case "gelu":
            slope = x * x
            slope *= -0.5
            kernel.ops.exp(slope, out=slope)
            slope *= x
            slope *= 1 / math.sqrt(2 * math.pi)
        case "relu":
            return share * 1
    slope += share
    return slope


def _sigmoid(kernel: Kernel, x: Array) -> Array:
    out = -x
    kernel.ops.exp(out, out=out)
    out += 1
    kernel.ops.reciprocal(out, out=out)
    return out
