"""Emulated devices keep leased weights: with true numbers, or with none at all and in the same time."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from tests.device.test_worker import Script
from tests.support.device_bench import Bench, Journey
from tests.support.emulation import FAST
from tests.support.one_layer import PLAIN
from tests.support.plain_parts import Maker
from tests.support.virtual import run

from cleave.core.cost.rates import thin_effort
from cleave.core.cost.update import ROWS, copy_flops, square_sum_flops, update_flops
from cleave.core.model.batch import Matrix
from cleave.core.model.update_rule import Adam
from cleave.device.worker import Contribution, Offer, Worker
from cleave.emulate.arithmetic import SharedThreads, Zeros
from cleave.emulate.pacing import KeepingUp, PacedProcessor
from cleave.protocol import messages
from cleave.protocol.programs import Collect, Copy, Leased, Program, SquareSum, Update
from cleave.transport.memory import memory_pair

HIDDEN = 6
RULE = Adam(rate=0.125, beta1=0.5, beta2=0.5, eps=1e-3, step=1)
SLOW = replace(FAST, flops_per_s=1e3)


async def step(arithmetic: Zeros | SharedThreads) -> tuple[list[Matrix], list[Matrix], Contribution, int]:
    """Take a weight through a step on an emulated device; return what it and a plain device answer."""
    bench = Bench()
    maker = Maker(bench, HIDDEN, 0)
    mlp = maker.mlp(4, "rms", "relu", gated=False, **PLAIN)
    weight, accumulator, copy = mlp.up.weight, bench.number(), bench.number()
    matrix = bench.operands[weight]
    rows, cols = matrix.shape
    states = tuple(bench.put(np.zeros_like(matrix)) for _ in range(2))
    x, dy = maker.normal(5, HIDDEN), maker.normal(5, HIDDEN)
    units = Journey(bench=bench, parts=(mlp,)).backward(x, dy, 5, {weight: accumulator}, bench.number())
    programs: list[Program] = [
        *units,
        SquareSum(accumulators=(accumulator,)),
        Copy(copies=((weight, copy),)),
        Update(rule=RULE, weights=(Leased(weight, accumulator, states),)),
        *(Collect(accumulator=number, rows=rows, cols=cols) for number in (weight, copy, *states)),
    ]
    sent = dict(bench.operands)
    expected = [bench.done(program) for program in programs]
    server, device = memory_pair()
    offer = Offer(name="e", token="", flops_per_s=1.0, memory_bytes=1 << 20)
    processor = PacedProcessor(SLOW, arithmetic, KeepingUp())
    worker = Worker(device, arithmetic.kernel, offer, Contribution(), processor=processor)
    contribution = worker._contribution  # pyright: ignore[reportPrivateUsage]
    running = asyncio.ensure_future(worker.run())
    script = Script(server, worker, contribution, running)
    for number, each in sent.items():
        await script.store(number, each)
    found: list[Matrix] = []
    for task, (program, result) in enumerate(zip(programs, expected, strict=True)):
        await server.send(messages.RunTask(task=task, priority=1, program=program, format="fp32"))
        found.append(await script.results(task, result.shape))  # pyright: ignore[reportArgumentType]
    await script.goodbye()
    arithmetic.close()
    return found, expected, contribution, rows * cols


def test_emulated_devices_update_as_real_ones_do() -> None:
    found, expected, *_ = run(step(SharedThreads(1)), limit_s=1e4)
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_devices_that_compute_nothing_answer_every_program_in_the_shape_asked_for() -> None:
    found, *_ = run(step(Zeros()), limit_s=1e4)
    for result in found:
        np.testing.assert_array_equal(result, 0)


@pytest.mark.parametrize("computes", [True, False])
def test_leases_take_the_time_of_the_cost_law(computes: bool) -> None:
    _, _, contribution, numbers = run(step(SharedThreads(1) if computes else Zeros()), limit_s=1e4)
    flops = update_flops(RULE, numbers) + square_sum_flops(numbers) + copy_flops(numbers)
    assert contribution.compute_s >= flops * float(thin_effort(ROWS)) / SLOW.flops_per_s
    assert contribution.flops > flops
