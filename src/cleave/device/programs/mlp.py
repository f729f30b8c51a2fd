"""The MLP of a layer, gated or not, forward and backward. Every activation has the form x s(x) with 0 <= s <= 1."""

from __future__ import annotations

import math

from cleave.core.model.decoder import Activation, Mlp, Weight
from cleave.device.kernels import Array, Kernel
from cleave.device.programs.linear import (
    Inside,
    Scope,
    add_gradients,
    apply,
    forward_macs,
    gradient_macs,
    in_width,
    input_gradient,
    normalize,
    normalize_back,
)

_TANH_SCALE, _TANH_CUBE = 2 * math.sqrt(2 / math.pi), 0.044715  # gelu_tanh is x sigmoid(scale (x + cube x^3))


def forward(scope: Scope, part: Mlp, x: Array, *, keeps: bool = False) -> tuple[Array, Inside]:
    """Compute f(norm(x)); return it and, if asked, the products that backward would recompute."""
    normed = normalize(scope, part.norm, x).y
    gating, up = _products(scope, part, normed)
    inner = _gain(scope.kernel, part.activation, gating)
    inner *= gating
    if up is not None:
        inner *= up
    kept = (gating,) if up is None else (gating, up)
    return apply(scope, part.down, inner), kept if keeps else ()


def backward(scope: Scope, part: Mlp, x: Array, dy: Array, kept: Inside = ()) -> Array:
    """Return dx of f(norm(x)), recomputing the inner activations unless they were kept; `kept` is used up."""
    normed = normalize(scope, part.norm, x)
    inner, *others = kept or _products(scope, part, normed.y)
    gain = _gain(scope.kernel, part.activation, inner)
    slope = _derivative(scope.kernel, part.activation, inner, gain)
    inner *= gain
    d_inner = input_gradient(scope, part.down, dy)
    slope *= d_inner
    d_normed = None
    if part.gate is not None:
        (up,) = others
        d_inner *= inner
        slope *= up
        inner *= up
        add_gradients(scope, part.up, normed.y, d_inner)
        d_normed = input_gradient(scope, part.up, d_inner)
    add_gradients(scope, part.down, inner, dy)
    gating = _gating(part)
    add_gradients(scope, gating, normed.y, slope)
    return normalize_back(scope, part.norm, normed, input_gradient(scope, gating, slope, d_normed))


def _products(scope: Scope, part: Mlp, normed: Array) -> tuple[Array, Array | None]:
    """The product that the activation is applied to and, with a gate, the other one."""
    return apply(scope, _gating(part), normed), None if part.gate is None else apply(scope, part.up, normed)


def _gating(part: Mlp) -> Weight:
    return part.up if part.gate is None else part.gate


def forward_flops(scope: Scope, part: Mlp) -> float:
    return 2.0 * scope.rows * sum(forward_macs(scope, weight) for weight in _weights(part))


def backward_flops(scope: Scope, part: Mlp, *, is_kept: bool = False) -> float:
    """FLOPs of both gradients, plus recomputing everything before `down` unless it was kept."""
    macs = sum(forward_macs(scope, weight) + gradient_macs(scope, weight) for weight in _weights(part))
    if not is_kept:
        macs += sum(forward_macs(scope, weight) for weight in _weights(part)) - forward_macs(scope, part.down)
    return 2.0 * scope.rows * macs


def kept_numbers(scope: Scope, part: Mlp) -> int:
    """Numbers per row that can be kept for backward."""
    return (1 if part.gate is None else 2) * in_width(scope, part.down)


def workspace_elements(scope: Scope, part: Mlp) -> int:
    return 6 * scope.rows * in_width(scope, part.down)


def _weights(part: Mlp) -> tuple[Weight, ...]:
    return (part.up, part.down) if part.gate is None else (part.gate, part.up, part.down)


def _gain(kernel: Kernel, activation: Activation, x: Array) -> Array:
    """Return s(x)."""
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
            gain = kernel.erf(x * math.sqrt(0.5))
            gain += 1
            gain *= 0.5
            return gain
        case "relu":
            return kernel.ops.clip(kernel.ops.sign(x), 0, 1)


def _derivative(kernel: Kernel, activation: Activation, x: Array, gain: Array) -> Array:
    """Return the derivative of x s(x): s + x s'."""
    match activation:
        case "silu":
            slope = x * gain
            slope *= 1 - gain
        case "gelu_tanh":
            slope = x * x
            slope *= 3 * _TANH_CUBE
            slope += 1
            slope *= x
            slope *= _TANH_SCALE
            slope *= gain
            slope *= 1 - gain
        case "gelu":
            slope = x * x
            slope *= -0.5
            kernel.ops.exp(slope, out=slope)
            slope *= x
            slope *= 1 / math.sqrt(2 * math.pi)
        case "relu":
            return gain * 1
    slope += gain
    return slope


def _sigmoid(kernel: Kernel, x: Array) -> Array:
    out = -x
    kernel.ops.exp(out, out=out)
    out += 1
    kernel.ops.reciprocal(out, out=out)
    return out
