"""Load of the server's event loop: CPU per small task, and its longest stalls.

    python benchmarks/event_loop.py [--tasks 2000] [--steps 6] [--devices 1024]

- *Per task*: CPU of the loop's thread over small products (64 x 64 x 64) on two local devices, many in flight.
- *Stall*: a timer in the loop is due every 2 ms. Its lateness is how long a device would wait. The CPU time of the
  loop's own thread in that interval is the loop's share; the rest is other threads and processes on the same cores.
  Measured during steps of the demo model, and while planning for a fleet of `--devices` idle devices.
"""

from __future__ import annotations

import argparse
import asyncio
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from cleave.api.fleet import Fleet
from cleave.api.training import distribute
from cleave.core.model.gemms import Linear
from cleave.errors import CleaveError
from cleave.protocol import messages
from cleave.protocol.numbers import Matrix
from cleave.server.cluster import Cluster
from cleave.transport.base import Channel
from cleave.transport.memory import memory_pair

_EVERY_S = 0.002
_SIDE = 64
_IN_FLIGHT = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=2000)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--devices", type=int, default=1024)
    options = parser.parse_args()
    torch.set_num_threads(1)
    small_tasks(options.tasks)
    demo_steps(options.steps)
    replan(options.devices)


# ------------------------------------------------------------------------------------------------ measuring


@dataclass
class Stalls:
    late_s: list[float]
    busy_s: list[float]

    def __str__(self) -> str:
        late, busy = np.array(self.late_s) * 1e3, np.array(self.busy_s) * 1e3
        return (
            f"timer late by at most {late.max():.1f} ms (median {np.median(late):.2f}, "
            f"p99 {np.percentile(late, 99):.1f}); loop's own CPU at a time at most {busy.max():.1f} ms"
        )


@contextmanager
def watched(cluster: Cluster) -> Generator[Stalls]:
    """Run a timer in the loop while the body runs."""
    stalls, is_over = Stalls([], []), threading.Event()

    async def beat() -> None:
        while not is_over.is_set():
            started, used = time.perf_counter(), time.thread_time()
            await asyncio.sleep(_EVERY_S)
            stalls.late_s.append(time.perf_counter() - started - _EVERY_S)
            stalls.busy_s.append(time.thread_time() - used)

    beating = asyncio.run_coroutine_threadsafe(beat(), cluster.loop)
    try:
        yield stalls
    finally:
        is_over.set()
        beating.result(10)


def loop_cpu_s(cluster: Cluster) -> float:
    async def used() -> float:
        return time.thread_time()

    return asyncio.run_coroutine_threadsafe(used(), cluster.loop).result(60)


# ------------------------------------------------------------------------------------------------ three questions


def small_tasks(count: int) -> None:
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal((_SIDE, _SIDE), dtype=np.float32) for _ in range(2))
    linear = Linear(tokens=_SIDE, in_width=_SIDE, out_width=_SIDE, roles=("forward",))
    with Fleet.local(2) as fleet:
        cluster = fleet.cluster
        weight = cluster.tensor(_SIDE, _SIDE)
        weight.bind(w)
        plan = cluster.choose_layer(linear).plan

        def submit() -> Future[list[Matrix]]:
            tensor = cluster.tensor(_SIDE, _SIDE)
            tensor.bind(x)
            return cluster.submit("forward", (tensor,), (weight,), plan)

        _all(submit, _IN_FLIGHT)
        tasks = sum(member.tasks for member in cluster.members())
        used, started = loop_cpu_s(cluster), time.perf_counter()
        _all(submit, count)
        used, taken = loop_cpu_s(cluster) - used, time.perf_counter() - started
        done = sum(member.tasks for member in cluster.members()) - tasks
        print(
            f"small tasks: {used / done * 1e3:.3f} ms of loop CPU per task, {done / taken:.0f} tasks/s ({done} tasks)"
        )


def _all(submit: Callable[[], Future[list[Matrix]]], count: int) -> None:
    flying: list[Future[list[Matrix]]] = []
    for _ in range(count):
        if len(flying) >= _IN_FLIGHT:
            flying.pop(0).result(60)
        flying.append(submit())
    for future in flying:
        future.result(60)


def demo_steps(steps: int) -> None:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    for grain in ("gemm", "resident"):
        with Fleet.local(4) as fleet:
            torch.manual_seed(0)
            model = distribute(LlamaForCausalLM(config), fleet, grain=grain)
            optimizer = torch.optim.AdamW(model.parameters())
            _step(model, optimizer)
            with watched(fleet.cluster) as stalls:
                for _ in range(steps):
                    _step(model, optimizer)
        print(f"steps of the demo model, {grain}: {stalls}")


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = torch.randint(0, 256, (8, 256), generator=torch.Generator().manual_seed(0))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def replan(devices: int) -> None:
    with Fleet("127.0.0.1:0", offload="always") as fleet:
        idle = IdleDevices(fleet.cluster)
        asyncio.run_coroutine_threadsafe(idle.join(devices), fleet.cluster.loop).result(600)
        fleet.wait(devices)
        linear = Linear(tokens=16384, in_width=4096, out_width=4096)
        fleet.cluster.choose_layer(Linear(tokens=64, in_width=64, out_width=64))  # starts the planning process
        with watched(fleet.cluster) as stalls:
            started = time.perf_counter()
            plan = fleet.cluster.choose_layer(linear).plan
            taken = time.perf_counter() - started
        assert plan is not None
        print(f"plan for {devices} devices ({taken:.2f} s, {plan.way}): {stalls}")
        asyncio.run_coroutine_threadsafe(idle.leave(), fleet.cluster.loop).result(600)


class IdleDevices:
    """Devices in this process that join, answer probes, and never get any work."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._stays: list[asyncio.Task[None]] = []
        self._lives: list[asyncio.Task[None]] = []

    async def join(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        for number in range(count):
            ours, theirs = memory_pair()
            self._stays.append(loop.create_task(self._cluster.serve(ours)))
            self._lives.append(loop.create_task(_live(theirs, number)))

    async def leave(self) -> None:
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, *self._stays, return_exceptions=True)


async def _live(channel: Channel, number: int) -> None:
    hello = messages.Hello(
        version=messages.VERSION,
        name=f"idle-{number}",
        flops_per_s=1e10 * (1 + number % 7),
        memory_bytes=4 << 30,
        kernel="none",
    )
    try:
        await channel.send(hello)
        while True:
            received = await channel.receive()
            if isinstance(received.message, messages.Probe):
                size = received.message.answer
                await channel.send(messages.Probed(down_s=1e-3, payload=size), bytes(size))
    except CleaveError:
        pass
    finally:
        await channel.close("the benchmark is over")


if __name__ == "__main__":
    main()
