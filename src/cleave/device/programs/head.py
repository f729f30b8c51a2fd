"""The head of a model: final norm, vocabulary projection and loss, forward and backward.

Logits are computed in bands of rows and never kept. The vocabulary may be a slice: the server combines the logsumexp of
all slices and sends it back, from which each slice computes its own share of the gradient. Knows no store and no wire.
"""

from __future__ import annotations

from collections.abc import Iterator

from cleave.core.model.decoder import Head
from cleave.device.kernels import Array
from cleave.device.programs.linear import (
    Scope,
    add_gradients,
    apply,
    forward_macs,
    gradient_macs,
    input_gradient,
    normalize,
    normalize_back,
    out_width,
)

LOGITS_BYTES = 32 << 20
"""Memory for the logits of one band."""


def forward(scope: Scope, head: Head, x: Array) -> Array:
    """Return rows x 2: logsumexp over this slice of the vocabulary, and the target's logit, 0 if outside the slice."""
    ops = scope.kernel.ops
    normed = x if head.norm is None else normalize(scope, head.norm, x).y
    result = scope.kernel.allocate(scope.rows, 2)
    for rows in _bands(scope, head):
        logits = apply(scope, head.weight, normed[rows])
        index, in_slice = _targets(scope, head, rows)
        result[rows, 1] = logits[index] * in_slice
        maximum = ops.amax(logits, axis=1, keepdims=True)
        logits -= maximum
        ops.exp(logits, out=logits)
        result[rows, 0] = ops.log(logits.sum(axis=1)) + maximum[:, 0]
        del logits  # before the next band is allocated
    return result


def backward(scope: Scope, head: Head, x: Array, dy: Array) -> Array:
    """Return dx from rows x 2, logsumexp over the whole vocabulary and dloss: dlogits = (softmax - target) dloss."""
    ops = scope.kernel.ops
    normed = None if head.norm is None else normalize(scope, head.norm, x)
    entering = x if normed is None else normed.y
    dx = scope.kernel.allocate(*x.shape)
    for rows in _bands(scope, head):
        logits = apply(scope, head.weight, entering[rows])
        index, in_slice = _targets(scope, head, rows)
        logits -= dy[rows, :1]
        ops.exp(logits, out=logits)
        logits[index] -= in_slice * 1.0
        logits *= dy[rows, 1:]
        add_gradients(scope, head.weight, entering[rows], logits)
        dx[rows] = input_gradient(scope, head.weight, logits)
        del logits
    return dx if head.norm is None or normed is None else normalize_back(scope, head.norm, normed, dx)


def forward_flops(scope: Scope, head: Head) -> float:
    return 2.0 * scope.rows * forward_macs(scope, head.weight)


def backward_flops(scope: Scope, head: Head) -> float:
    return 2.0 * scope.rows * (2 * forward_macs(scope, head.weight) + gradient_macs(scope, head.weight))


def workspace_elements(scope: Scope, head: Head) -> int:
    words = out_width(scope, head.weight)
    return max(words, min(LOGITS_BYTES // 4, scope.rows * words))


def _bands(scope: Scope, head: Head) -> Iterator[slice]:
    height = max(1, LOGITS_BYTES // (4 * out_width(scope, head.weight)))
    for top in range(0, scope.rows, height):
        yield slice(top, min(top + height, scope.rows))


def _targets(scope: Scope, head: Head, rows: slice) -> tuple[tuple[Array, Array], Array]:
    """Index of each row's target logit, clipped into the slice, and whether the target lies in the slice."""
    assert scope.targets is not None
    words = scope.kernel.integers(scope.targets[rows, 0]) - head.first
    nearest = scope.kernel.ops.clip(words, 0, out_width(scope, head.weight) - 1)
    index = scope.kernel.integers(scope.kernel.positions(0, rows.stop - rows.start))
    return (index, nearest), words == nearest
