"""Training on a fleet is the same training: the losses of plain torch, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.grids import sample_and_rest
from tests.support.models import make, tokens
from torch import nn

from cleave import Fleet, distribute
from cleave.core.cost.wire import WireFormat
from cleave.protocol.numbers import NumpyCodec

STEPS = 20


def losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    seen: list[float] = []
    for step in range(STEPS):
        batch = tokens(step % 4, 8, 96)  # large enough that sharing it pays
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return losses(make("wide-llama"))


@pytest.fixture(scope="module")
def over() -> Callable[[WireFormat], list[float]]:
    """Losses with products on two devices over a wire; one run for all that ask."""

    @cache
    def run(wire: WireFormat) -> list[float]:
        with Fleet.local(2, wire=wire, offload="always") as fleet:
            return losses(distribute(make("wide-llama"), fleet, grain="gemm"))

    return run


@pytest.mark.parametrize("devices", sample_and_rest([3], [1, 7]))
def test_losses_over_fp32_equal_plain_torch(devices: int, plain: list[float]) -> None:
    with Fleet.local(devices, wire="fp32", offload="always") as fleet:
        ours = losses(distribute(make("wide-llama"), fleet, grain="gemm"))
        busy = sum(member.tasks > 0 for member in fleet.cluster.members())
        assert busy >= min(devices, 2)  # not always all: the slowest may be left out
    assert plain[-1] < 0.9 * plain[0], "the model must really learn"
    assert max(abs(a - b) for a, b in zip(ours, plain, strict=True)) < 1e-4


@pytest.mark.parametrize(
    ("wire", "share"), [("bf16", 0.01), pytest.param("fp16", 0.01, marks=pytest.mark.slow), ("q8", 0.01)]
)
def test_losses_stay_close_over_a_narrower_wire(
    wire: WireFormat, share: float, plain: list[float], over: Callable[[WireFormat], list[float]]
) -> None:
    assert abs(over(wire)[-1] - plain[-1]) < share * plain[-1]


@pytest.mark.parametrize("wire", ["q8", "int8"])
def test_losses_of_resident_layers_stay_close_over_8_bits(wire: Any, plain: list[float]) -> None:
    with Fleet.local(2, wire=wire, offload="always") as fleet:
        ours = losses(distribute(make("wide-llama"), fleet, grain="resident"))
    assert abs(ours[-1] - plain[-1]) < 0.01 * plain[-1]


def test_losses_over_q8_are_those_of_rounding_every_operand_and_result(
    plain: list[float], over: Callable[[WireFormat], list[float]]
) -> None:
    """As `benchmarks/wire_losses.py` simulates it; slices of a product may fall on other blocks than the whole does."""
    model = make("wide-llama")
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear):
            module.__class__ = _RoundedLinear
            module.dy_format = "bf16" if name == "lm_head" else "q8"  # type: ignore[assignment]
    simulated = losses(model)
    assert simulated != plain
    assert max(abs(a - b) / b for a, b in zip(over("q8"), simulated, strict=True)) < 0.003


def _rounded(tensor: torch.Tensor, format: WireFormat) -> torch.Tensor:
    matrix = tensor.detach().reshape(-1, tensor.shape[-1]).contiguous().numpy()
    codec, out = NumpyCodec(), np.empty_like(matrix)
    codec.decode_into(codec.encode(matrix, format).data, format, out)
    return torch.from_numpy(out).view(tensor.shape)


class _RoundedProducts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, dy_format: WireFormat) -> torch.Tensor:
        x, weight = _rounded(x, "q8"), _rounded(weight, "q8")
        ctx.save_for_backward(x, weight)
        ctx.dy_format = dy_format
        return _rounded(x @ weight.T, "q8")

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        dy = _rounded(grad, ctx.dy_format)
        return _rounded(dy @ weight, "q8"), _rounded(dy.flatten(0, 1).T @ x.flatten(0, 1), "q8"), None


class _RoundedLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _RoundedProducts.apply(x, self.weight, self.dy_format)  # type: ignore[no-any-return]


def test_micro_batches_in_threads_give_the_same_gradients() -> None:
    from concurrent.futures import ThreadPoolExecutor

    reference = make("wide-llama")
    model = copy.deepcopy(reference)
    with Fleet.local(2, offload="always") as fleet, ThreadPoolExecutor(2) as pool:
        distribute(model, fleet, grain="gemm")

        def work(one: nn.Module, index: int) -> None:
            batch = tokens(index)
            one(input_ids=batch, labels=batch).loss.backward()

        for _ in range(2):
            model.zero_grad()
            list(pool.map(lambda index: work(model, index), range(4)))
    for index in range(4):
        work(reference, index)
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
