"""Constantly killing devices changes nothing: the losses are those of plain torch, step by step.

Real processes over real sockets. Lifetimes are exponential, drawn with a seed, and counted in moments of the training
loop (each layer forward, each layer backward), not in seconds. A victim first stops answering and is killed a little
later, so that it dies in the middle of a product on any machine.
"""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

from cleave import Fleet, distribute, events
from cleave.device.kernels import NumpyKernel
from cleave.device.worker import Contribution, Offer, Worker
from cleave.errors import ConnectionLost
from cleave.transport.address import parse_address
from cleave.transport.faulty import Fault, FaultyChannel
from cleave.transport.websocket import dial

DEVICES, AT_LEAST = 3, 2
LIFE_STEPS = 8.0
"""Mean lifetime of a device: it takes part in a few steps and dies."""
VOCABULARY, WIDTH, LAYERS, TOKENS = 64, 64, 3, 256
MOMENTS = 2 * (LAYERS + 1)
NEAR = 1e-3
LAST_BREATH_S = 0.1
"""How long a victim has stopped answering when it is killed: long enough to be sent a task."""


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.gelu(self.linear(self.norm(x)))


def model() -> nn.Sequential:
    torch.manual_seed(1)
    layers = [Residual() for _ in range(LAYERS)]
    return nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), *layers, nn.Linear(WIDTH, VOCABULARY))


def losses(trained: nn.Sequential, steps: int, before_step: Callable[[], None] = lambda: None) -> list[float]:
    """Losses of training to predict each token's successor under a fixed rule, which can be learned."""
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(2)
    seen: list[float] = []
    for _ in range(steps):
        before_step()
        tokens = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
        loss = nn.functional.cross_entropy(trained(tokens), (5 * tokens + 3) % VOCABULARY)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


class Killer:
    """Kills each device after its own random lifetime, and starts another in its place."""

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self._fleet, self._rng = fleet, np.random.default_rng(seed)
        self._left: dict[int, int] = {}
        self.kills = 0

    def start(self, count: int) -> None:
        for pid in self._fleet.start_devices(count):
            self._left[pid] = 1 + int(self._rng.exponential(LIFE_STEPS * MOMENTS))

    def strike(self, *_: object) -> None:
        """Let a moment pass. Devices that have not joined yet age too: some die while joining."""
        for pid in [*self._left]:
            self._left[pid] -= 1
            if self._left[pid] == 0:
                os.kill(pid, signal.SIGSTOP)
                threading.Timer(LAST_BREATH_S, os.kill, (pid, signal.SIGKILL)).start()
                del self._left[pid]
                self.kills += 1
                self.start(1)

    def haunt(self, haunted: nn.Sequential) -> None:
        for layer in list(haunted)[1:]:
            layer.register_forward_pre_hook(self.strike)
            layer.register_full_backward_pre_hook(self.strike)


def furthest(ours: list[float], plain: list[float]) -> float:
    return max(abs(one - other) for one, other in zip(ours, plain, strict=True))


@pytest.mark.slow  # the next one kills processes too
def test_a_fleet_whose_devices_die_every_few_steps_trains_like_one_machine() -> None:
    steps = 50
    plain = losses(model(), steps)
    assert plain[-1] < 0.2 * plain[0], "the model must really learn"

    with Fleet.local(DEVICES, offload="always") as fleet:
        undisturbed = losses(distribute(model(), fleet), steps)
        assert fleet.cluster.totals().products >= 3 * steps

    told: list[events.AnyEvent] = []
    with Fleet("127.0.0.1:0", offload="always", listener=told.append) as fleet:
        killer = Killer(fleet, seed=3)
        killer.start(DEVICES)
        fleet.wait(DEVICES)
        disturbed_model = distribute(model(), fleet)
        killer.haunt(disturbed_model)
        disturbed = losses(disturbed_model, steps, before_step=lambda: fleet.wait(AT_LEAST))

    left = [event for event in told if isinstance(event, events.DeviceLeft)]
    assert killer.kills > steps * DEVICES / LIFE_STEPS / 2
    assert len(left) > killer.kills / 2, "some die before they have joined, but not most"
    assert all(event.reason for event in left)
    assert any(event.lost_tasks > 0 for event in left), "some died with unfinished tasks"
    drift, calm_drift = furthest(disturbed, plain), furthest(undisturbed, plain)
    assert drift < NEAR
    assert drift < max(10 * calm_drift, 1e-4)


def test_killing_two_of_six_devices_mid_step_changes_no_loss_and_restarts_no_step() -> None:
    plain = losses(model(), steps=6)
    told: list[events.AnyEvent] = []
    with Fleet("127.0.0.1:0", offload="always", listener=told.append) as fleet:
        victims = fleet.start_devices(6)[:2]
        fleet.wait(6)
        disturbed_model = distribute(model(), fleet)
        passes = 0

        def strike(*_: object) -> None:
            nonlocal passes
            passes += 1
            if passes == 3:
                for pid in victims:
                    os.kill(pid, signal.SIGKILL)

        disturbed_model[2].register_forward_pre_hook(strike)
        disturbed = losses(disturbed_model, steps=6)
        assert fleet.cluster.devices == 4
    assert passes == 6, "no step was restarted"
    assert furthest(disturbed, plain) < 1e-4
    left = [event for event in told if isinstance(event, events.DeviceLeft)][:2]
    assert len({event.device for event in left}) == 2
    recovered = [event for event in told if isinstance(event, events.Recovered)]
    assert any(event.lost_tasks for event in left) == bool(recovered), "a recovery of lost work is reported"


def test_a_liar_is_caught_and_the_devices_that_follow_it_train_like_one_machine() -> None:
    """It joins first, so that it is certain to get work; four honest devices join once it is caught."""
    plain = losses(model(), steps=8)
    told: list[events.AnyEvent] = []
    caught = threading.Event()

    def listen(event: events.AnyEvent) -> None:
        told.append(event)
        if isinstance(event, events.ResultRefused):
            caught.set()

    with Fleet("127.0.0.1:0", listener=listen) as fleet:
        lying = threading.Thread(target=lambda: asyncio.run(_lie_to(fleet.url)))
        lying.start()
        fleet.wait(1)
        following = threading.Thread(target=lambda: caught.wait() and fleet.start_devices(4))
        following.start()
        ours = losses(distribute(model(), fleet, grain="gemm"), steps=8)
        following.join()
    lying.join()
    assert furthest(ours, plain) < 1e-4
    assert {event.device for event in told if isinstance(event, events.ResultRefused)} == {"liar"}


async def _lie_to(url: str) -> None:
    """Join as a liar, in a manner drawn for each result, until disconnected."""
    channel = FaultyChannel(
        await dial(parse_address(url).url), (Fault(kind="lie", phase="joining"),), np.random.default_rng(0)
    )
    offer = Offer(name="liar", token="", flops_per_s=5e10, memory_bytes=64_000_000)
    worker = Worker(channel, NumpyKernel(), offer, Contribution())
    await worker.join()
    with suppress(ConnectionLost):
        await worker.run()
    await channel.close()
