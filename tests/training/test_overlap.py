"""Weights that are updated one by one, while others are still computed: the same training, and nothing sent twice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.decoders import make, tokens
from torch import nn, optim

import cleave
from cleave import Fleet

STEPS = 5
EPS = 1e-4  # the gradient of a bias of keys is nothing but rounding, which Adam would make as large as any other
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adamw": lambda parameters: optim.AdamW(parameters, lr=1e-2, eps=EPS),
    "sgd": lambda parameters: optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
    "fused": lambda parameters: optim.AdamW(parameters, lr=1e-2, eps=EPS, fused=True),
    "groups": lambda parameters: _two_groups(list(parameters)),
}


def _two_groups(parameters: list[nn.Parameter]) -> optim.Optimizer:
    matrices = [one for one in parameters if one.dim() > 1]
    vectors = [one for one in parameters if one.dim() == 1]
    return optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}], lr=1e-2, eps=EPS)


def train(model: nn.Module, optimizer: optim.Optimizer, left: list[int] | None = None) -> list[float]:
    """Losses; `left` gets the gradients that backward leaves to the optimizer's own step."""
    schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses: list[float] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        batch = tokens(step, 3)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        if left is not None:
            left.append(sum(one.grad is not None for one in model.parameters()))
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


@pytest.mark.grid(strength=1)
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt2"])
def test_one_by_one_is_the_same_training(fleet: Fleet, family: str, name: str) -> None:
    plain = make(family)
    expected = train(plain, OPTIMIZERS[name](plain.parameters()))
    model = cleave.distribute(make(family), fleet, grain="resident")
    optimizer = OPTIMIZERS[name](model.parameters())
    assert cleave.overlap(model, optimizer) is None
    left: list[int] = []
    assert train(model, optimizer, left) == pytest.approx(expected, abs=1e-4)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert min(left) < len(list(model.parameters())) / 2, "most were updated in backward"
    cleave.undistribute(model)


def test_what_is_sent_ahead_is_not_sent_again(fleet: Fleet) -> None:
    def traffic(*, overlapped: bool) -> list[int]:
        model = cleave.distribute(make("llama"), fleet, grain="resident")
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        if overlapped:
            assert cleave.overlap(model, optimizer) is None
        down: list[int] = []
        for step in range(STEPS):
            before = fleet.cluster.totals().down_bytes
            batch = tokens(step, 3)
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            down.append(fleet.cluster.totals().down_bytes - before)
        cleave.undistribute(model)
        return down

    usual, ahead = traffic(overlapped=False), traffic(overlapped=True)
    weights = 4 * sum(one.numel() for one in make("llama").parameters())
    assert sum(ahead) < sum(usual) + 2 * weights, "at most those that were sent for a step that never came"


def test_who_looks_at_all_parameters_steps_as_a_whole(fleet: Fleet) -> None:
    model = cleave.distribute(make("llama"), fleet, grain="resident")
    reason = cleave.overlap(model, optim.LBFGS(model.parameters()))
    assert reason is not None
    assert "LBFGS" in reason
    cleave.undistribute(model)


def test_a_model_of_gemms_steps_as_a_whole(fleet: Fleet) -> None:
    model = cleave.distribute(make("llama"), fleet, grain="gemm")
    assert cleave.overlap(model, OPTIMIZERS["adamw"](model.parameters())) == "no stack of it may run on devices"
    cleave.undistribute(model)


def test_a_device_that_leaves_while_weights_are_updated_costs_nothing(fleet: Fleet) -> None:
    plain = make("llama")
    expected = train(plain, OPTIMIZERS["adamw"](plain.parameters()))
    model = cleave.distribute(make("llama"), fleet, grain="resident")
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    assert cleave.overlap(model, optimizer) is None
    steps = iter(range(10_000))

    def part(*_: object) -> None:
        if next(steps) == 8:  # in the midst of the first backward's updates
            fleet.cluster.disconnect(fleet.cluster.here()[0].name, "a test", rejoin=True)

    hook = optimizer.register_step_post_hook(part)
    assert train(model, optimizer) == pytest.approx(expected, abs=1e-4)
    hook.remove()
    cleave.undistribute(model)
    fleet.wait(3)
