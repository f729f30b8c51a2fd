"""Updating weights one by one, while other gradients are still being computed: same training, nothing sent twice."""

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
EPS = 1e-4  # the gradient of a key bias is pure rounding, which Adam would scale up to the size of any other
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
    """Losses per step; `left` receives the number of gradients backward leaves to the optimizer's own step."""
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
def test_updating_weights_one_by_one_trains_the_same(fleet: Fleet, family: str, name: str) -> None:
    plain = make(family)
    expected = train(plain, OPTIMIZERS[name](plain.parameters()))
    model = cleave.distribute(make(family), fleet, grain="resident")
    optimizer = OPTIMIZERS[name](model.parameters())
    assert cleave.overlap(model, optimizer) is None
    left: list[int] = []
    assert train(model, optimizer, left) == pytest.approx(expected, abs=1e-4)
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert min(left) < len(list(model.parameters())) / 2, "most weights were updated in backward"
    cleave.undistribute(model)


def test_weights_sent_ahead_are_not_sent_again(fleet: Fleet) -> None:
    def traffic(*, overlapped: bool) -> list[int]:
        model = cleave.distribute(make("llama"), fleet, grain="resident", lease="never")
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
    plan = fleet.cluster.planning.latest
    assert plan is not None
    copies = max(len(column.holdings) for stage in plan.stages for column in stage.columns)
    weights = 4 * sum(one.numel() for one in make("llama").parameters())
    extra = sum(ahead) - sum(usual)  # sent again, they would cost STEPS x copies x weights
    assert extra < (copies + 1) * weights, "at most for a next step that never came, and for a copy that moved"


def test_overlap_refuses_an_optimizer_that_needs_all_parameters(fleet: Fleet) -> None:
    model = cleave.distribute(make("llama"), fleet, grain="resident")
    reason = cleave.overlap(model, optim.LBFGS(model.parameters()))
    assert reason is not None
    assert "LBFGS" in reason
    cleave.undistribute(model)


def test_overlap_refuses_a_model_distributed_by_gemms(fleet: Fleet) -> None:
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
        if next(steps) == 8:  # amid the updates of the first backward
            fleet.cluster.disconnect(fleet.cluster.here()[0].name, "a test", rejoin=True)

    hook = optimizer.register_step_post_hook(part)
    assert train(model, optimizer) == pytest.approx(expected, abs=1e-4)
    hook.remove()
    cleave.undistribute(model)
    fleet.wait(3)
