"""The head of a model: last norm, vocabulary and loss, forward and backward; logits are made in bands and never kept.

The vocabulary may be a slice: the server adds up the exponentials of all slices and sends back their logarithm, so that
each slice gives its own share of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator

from cleave.device.programs.kernels import Array
from cleave.device.programs.linear import (
    Unit,
    add_gradients,
    apply,
    forward_products,
    gradient_products,
    input_gradient,
    normalize,
    normalize_back,
    out_width,
)
from cleave.protocol.programs import Head

LOGITS_BYTES = 32 << 20
"""What the logits of a band may take."""


def forward(unit: Unit, head: Head, x: Array) -> Array:
    """rows x 2: logsumexp over this vocabulary, and the target's logit, 0 where it is not in it."""
    ops = unit.kernel.ops
    normed = x if head.norm is None else normalize(unit, head.norm, x).y
    result = unit.kernel.allocate(unit.rows, 2)
    for rows in _bands(unit, head):
        logits = apply(unit, head.weight, normed[rows])
        at, is_here = _targets(unit, head, rows)
        result[rows, 1] = logits[at] * is_here
        most = ops.amax(logits, axis=1, keepdims=True)
        logits -= most
        ops.exp(logits, out=logits)
        result[rows, 0] = ops.log(logits.sum(axis=1)) + most[:, 0]
        del logits  # before the next are made
    return result


def backward(unit: Unit, head: Head, x: Array, dy: Array) -> Array:
    """dx, with dy the logsumexp over the whole vocabulary and dloss: d logits = (softmax - target) dloss."""
    ops = unit.kernel.ops
    normed = None if head.norm is None else normalize(unit, head.norm, x)
    entering = x if normed is None else normed.y
    dx = unit.kernel.allocate(*x.shape)
    for rows in _bands(unit, head):
        logits = apply(unit, head.weight, entering[rows])
        at, is_here = _targets(unit, head, rows)
        logits -= dy[rows, :1]
        ops.exp(logits, out=logits)
        logits[at] -= is_here * 1.0
        logits *= dy[rows, 1:]
        add_gradients(unit, head.weight, entering[rows], logits)
        dx[rows] = input_gradient(unit, head.weight, logits)
        del logits
    return dx if head.norm is None or normed is None else normalize_back(unit, head.norm, normed, dx)


def forward_flops(unit: Unit, head: Head) -> float:
    return 2.0 * unit.rows * forward_products(unit, head.weight)


def backward_flops(unit: Unit, head: Head) -> float:
    return 2.0 * unit.rows * (2 * forward_products(unit, head.weight) + gradient_products(unit, head.weight))


def workspace_elements(unit: Unit, head: Head) -> int:
    words = out_width(unit, head.weight)
    return max(words, min(LOGITS_BYTES // 4, unit.rows * words))


def _bands(unit: Unit, head: Head) -> Iterator[slice]:
    height = max(1, LOGITS_BYTES // (4 * out_width(unit, head.weight)))
    for top in range(0, unit.rows, height):
        yield slice(top, min(top + height, unit.rows))


def _targets(unit: Unit, head: Head, rows: slice) -> tuple[tuple[Array, Array], Array]:
    """Where the targets' logits are, and whether they are there at all."""
    assert unit.targets is not None
    words = unit.kernel.integers(unit.targets[rows, 0]) - head.first
    nearest = unit.kernel.ops.clip(words, 0, out_width(unit, head.weight) - 1)
    index = unit.kernel.integers(unit.kernel.positions(0, rows.stop - rows.start))
    return (index, nearest), words == nearest
