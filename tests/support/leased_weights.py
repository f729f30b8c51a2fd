"""Golden conversations about leased weights, for `make_vectors.py`: two steps of an optimizer on the device.

Expected results are those of torch.optim in float64, rounded to fp32. The second gradient is that of updated weights,
so a device that keeps the old ones is found out even before its weights are read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.support.frames import Json
from tests.support.plain_parts import Plain
from tests.support.resident_parts import ROWS, Talk
from torch import Tensor

from cleave.core.model.update_rule import Adam, Rule, Sgd
from cleave.protocol.programs import Backward, Collect, Copy, Hold, Leased, SquareSum, Update

SCALE = 0.5
_BETAS: dict[str, Any] = {"beta1": 0.75, "beta2": 0.875, "eps": 0.0078125}
_TORCH_BETAS: dict[str, Any] = {"betas": (0.75, 0.875), "eps": 0.0078125}


def leases() -> dict[str, Json]:
    made = (lease_adam, lease_adamw, lease_momentum, lease_pieces)
    return {name: {"name": name, **make()} for make in made for name in (make.__name__.replace("_", "-"),)}


def lease_adam() -> Json:
    """Decay is added to the gradient."""
    return two_steps(
        6,
        lambda step: Adam(rate=0.125, step=step, weight_decay=0.25, **_BETAS),
        lambda given: torch.optim.Adam(given, lr=0.125, weight_decay=0.25, **_TORCH_BETAS),
        {"exp_avg": 0.0, "exp_avg_sq": 0.0},
    )


def lease_adamw() -> Json:
    return two_steps(
        7,
        lambda step: Adam(rate=0.125, step=step, weight_decay=0.25, is_decoupled=True, **_BETAS),
        lambda given: torch.optim.AdamW(given, lr=0.125, weight_decay=0.25, **_TORCH_BETAS),
        {"exp_avg": 0.0, "exp_avg_sq": 0.0},
    )


def lease_momentum() -> Json:
    """What the buffer holds before the first step does not matter."""
    return two_steps(
        8,
        lambda step: Sgd(rate=0.125, momentum=0.75, dampening=0.25, weight_decay=0.0625, is_first=step == 1),
        lambda given: torch.optim.SGD(given, lr=0.125, momentum=0.75, dampening=0.25, weight_decay=0.0625),
        {"momentum_buffer": 7.0},
    )


def lease_pieces() -> Json:
    """A weight is read in pieces of whole rows, the last one smaller."""
    talk = Talk(9)
    matrix = talk.draw()
    number = talk.bench.put(matrix)
    talk.run(Hold(operands=(number,)), [[0]])
    for first in range(0, ROWS, 2):
        piece = matrix[first : first + 2]
        rows, cols = piece.shape
        talk.run(Collect(accumulator=number, rows=rows, cols=cols, first_row=first), piece)
    talk.drop(number)
    return talk.told()


def two_steps(
    seed: int,
    rule: Callable[[int], Rule],
    optimizer_of: Callable[[list[Tensor]], torch.optim.Optimizer],
    states: dict[str, float],
) -> Json:
    """Train an MLP; `states` are torch's names of what the optimizer keeps, with what the server sends at first."""
    talk = Talk(seed)
    how = {"bias": True, "adapter": False, "is_transposed": False}
    mlp, bench = talk.maker.mlp(3, "rms", "silu", gated=False, **how), talk.bench
    x, dy, trained = talk.draw(), talk.draw(), talk.maker.trained
    plain = Plain(bench)
    values = [plain.values[number] for number in trained]
    optimizer = optimizer_of(values)
    leased = tuple(
        Leased(
            number,
            bench.number(),
            tuple(bench.put(np.full_like(bench.operands[number], first)) for first in states.values()),
        )
        for number in trained
    )
    accumulators = tuple(one.accumulator for one in leased)
    unit: dict[str, Any] = {"parts": (mlp,), "state": bench.number(), "first_row": 0, "sequence": ROWS}
    pairs = tuple((one.weight, one.accumulator) for one in leased)
    unit |= {"x": bench.put(x), "dy": bench.put(dy), "accumulators": pairs}
    copied = [leased[1].weight, leased[1].states[-1]]
    copies = [bench.number() for _ in copied]
    before: list[Tensor] = []
    for step in (1, 2):
        entering = torch.from_numpy(x).double().requires_grad_()
        (entering + plain.part(mlp, entering, None, None)).backward(torch.from_numpy(dy).double())
        assert entering.grad is not None
        talk.run(Backward(**unit), entering.grad.numpy())
        talk.run(SquareSum(accumulators=accumulators), [[float((_gradient(value) ** 2).sum()) for value in values]])
        for value in values:
            value.grad = _gradient(value) * SCALE
        optimizer.step()
        talk.run(Update(rule=rule(step), weights=leased, scale=SCALE), [[0]])
        optimizer.zero_grad()
        talk.drop(*accumulators)
        if step == 1:
            before = [each.detach().clone() for each in (values[1], optimizer.state[values[1]][list(states)[-1]])]
            talk.run(Copy(copies=tuple(zip(copied, copies, strict=True))), [[0]])
    for number, tensor in zip(copies, before, strict=True):
        read(talk, number, tensor)
    for one, value in zip(leased, values, strict=True):
        read(talk, one.weight, value.detach())
        for number, name in zip(one.states, states, strict=True):
            read(talk, number, optimizer.state[value][name])
    talk.drop(*copies)
    return talk.told()


def read(talk: Talk, number: int, expected: Tensor) -> None:
    rows, cols = expected.shape
    talk.run(Collect(accumulator=number, rows=rows, cols=cols), expected.numpy())


def _gradient(value: Tensor) -> Tensor:
    assert value.grad is not None
    return value.grad
