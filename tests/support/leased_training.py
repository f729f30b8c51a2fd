"""Training with weights that devices keep, beside plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.support.decoders import make, tokens
from tests.support.doomed import Moment
from tests.support.in_process import ROOMY, InProcess
from tests.support.plans import leased
from torch import nn, optim
from torch.nn.utils import clip_grad_norm_

from cleave.events import AnyEvent, Note
from cleave.train.offload import decoder as stack
from cleave.train.offload.distribute import distribute, undistribute
from cleave.train.offload.leased_tensors import LeasedParameter

STEPS = 5
ROOM = (ROOMY,) * 3
EPS = 1e-4  # the gradient of a key bias is pure rounding, which Adam would scale up to the size of any other
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "adamw": lambda parameters: optim.AdamW(parameters, lr=1e-2, eps=EPS),
    "fused": lambda parameters: optim.AdamW(parameters, lr=1e-2, eps=EPS, fused=True),
    "adam": lambda parameters: optim.Adam(parameters, lr=1e-2, eps=EPS, weight_decay=0.1),
    "sgd": lambda parameters: optim.SGD(parameters, lr=1e-2),
    "momentum": lambda parameters: optim.SGD(parameters, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1),
    "nesterov": lambda parameters: optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True),
    "groups": lambda parameters: _two_groups(list(parameters)),
}
Act = Callable[[int, nn.Module, optim.Optimizer], None]


def _two_groups(parameters: list[nn.Parameter]) -> optim.Optimizer:
    matrices = [one for one in parameters if one.dim() > 1]
    vectors = [one for one in parameters if one.dim() == 1]
    return optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 3e-3}], lr=1e-2, eps=EPS)


def train(
    model: nn.Module,
    optimizer: optim.Optimizer,
    *,
    steps: int = STEPS,
    passes: int = 1,
    clip: float = 1.0,
    after_step: Act = lambda step, model, optimizer: None,
    after_backward: Act = lambda step, model, optimizer: None,
) -> list[float]:
    """Losses per pass, with a schedule, clipping and micro-batches."""
    schedule = optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses: list[float] = []
    for step in range(steps):
        optimizer.zero_grad()
        for number in range(passes):
            batch = tokens(step * passes + number, 3)
            loss = model(input_ids=batch, labels=batch).loss
            (loss / passes).backward()
            losses.append(loss.item())
        after_backward(step, model, optimizer)
        if clip:
            clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        after_step(step, model, optimizer)
    return losses


class Told:
    """What the fleet's owner hears."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def __call__(self, event: AnyEvent) -> None:
        if isinstance(event, Note):
            self.notes.append(event.text)

    def has(self, words: str) -> bool:
        return any(words in note for note in self.notes)


@contextmanager
def on_devices(told: Told, dooms: dict[int, Moment] | None = None, **options: Any) -> Iterator[InProcess]:
    arrange = leased(options.pop("counts", (1, 2, 2)), every=options.pop("every", 1000))
    memory_bytes = options.pop("memory_bytes", ROOM)
    with InProcess(memory_bytes, arrange=arrange, dooms=dooms, listener=told, **options) as fleet:
        yield fleet


def leased_count(model: nn.Module) -> int:
    return sum(isinstance(one, LeasedParameter) for one in model.parameters())


def check_same(model: nn.Module, plain: nn.Module, tolerance: float = 1e-3) -> None:
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), other.detach(), rtol=tolerance, atol=tolerance)


def compare(
    told: Told,
    *,
    family: str = "llama",
    optimizer: str = "adamw",
    dooms: dict[int, Moment] | None = None,
    plain_act: Act | None = None,
    wire: Any = "fp32",
    every: int = 1000,
    memory_bytes: Sequence[int] = ROOM,
    make: Callable[[str], nn.Module] = make,
    tolerance: float = 1e-4,
    **options: Any,
) -> int:
    """Train with and without leases, and compare losses and weights; return how many parameters were leased."""
    plain = make(family)
    plain_options = dict(options)
    if plain_act is not None:
        plain_options["after_step"] = plain_act
    expected = train(plain, OPTIMIZERS[optimizer](plain.parameters()), **plain_options)
    counts: list[int] = []
    given = options.pop("after_step", lambda step, model, optimizer: None)

    def after_step(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
        counts.append(leased_count(model))
        given(step, model, optimizer)

    with on_devices(told, dooms, wire=wire, every=every, memory_bytes=memory_bytes) as fleet:
        model = distribute(make(family), fleet.cluster, offload="always", tell=told, grain="resident")
        own = OPTIMIZERS[optimizer](model.parameters())
        stack.know(model, own)
        assert train(model, own, after_step=after_step, **options) == pytest.approx(expected, abs=tolerance)
        undistribute(model)
        assert leased_count(model) == 0
        check_same(model, plain, max(1e-3, tolerance))
        names = {"exp_avg", "exp_avg_sq", "momentum_buffer"}
        for parameter in model.parameters():
            assert all(value.shape == parameter.shape for name, value in own.state[parameter].items() if name in names)
    return max(counts)
