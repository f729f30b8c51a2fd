"""Laws of a lying device: it falsifies what its lie is about, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from cleave.core.model.update_rule import Sgd
from cleave.protocol.messages import Result, RunTask
from cleave.protocol.programs import Copy, Leased, Program, SquareSum, Update
from cleave.transport.lying import Lie, LyingChannel, Manner
from cleave.transport.memory import memory_pair

UPDATE = Update(rule=Sgd(rate=0.1), weights=(Leased(1, 7),), scale=0.5)


async def exchanged(lie: Lie, program: Program, numbers: list[float]) -> tuple[Program, list[float]]:
    """What the device behind the lie is asked for, and what the server gets when it answers with those numbers."""
    server, inner = memory_pair()
    device = LyingChannel(inner, lie)
    await server.send(RunTask(task=1, priority=1, program=program, format="fp32"))
    received = await device.receive()
    assert isinstance(received.message, RunTask)
    values = np.array(numbers, dtype=np.float32)
    result = Result(
        task=1, first_row=0, rows=1, first_col=0, cols=len(values), format="fp32", flops=0.0, compute_s=0.0,
        down_bytes=0, down_s=0.0, payload=values.nbytes,
    )  # fmt: skip
    await device.send(result, values.tobytes())
    return received.message.program, np.frombuffer((await server.receive()).payload, dtype=np.float32).tolist()


@pytest.mark.parametrize(("manner", "scale"), [("scaled", 1.0), ("flipped", -0.5), ("zeros", 0.0)])
async def test_a_lie_about_updates_changes_the_scale_of_the_gradient(manner: Manner, scale: float) -> None:
    lie = Lie(("update",), manner, factor=2.0)
    program, numbers = await exchanged(lie, UPDATE, [0.0])
    assert isinstance(program, Update)
    assert (program.scale, numbers, lie.told) == (scale, [0.0], 1)


@pytest.mark.parametrize("numbers", [[3.0], [3.0, 4.0]])
async def test_a_lie_about_square_sums_falsifies_even_a_single_one(numbers: list[float]) -> None:
    lie = Lie(("square_sum",), "scaled", factor=2.0)
    program = SquareSum(accumulators=tuple(range(len(numbers))))
    asked, found = await exchanged(lie, program, numbers)
    assert asked == program
    assert found == [2 * number for number in numbers]


@pytest.mark.parametrize("program", [UPDATE, Copy(copies=((1, 9),)), SquareSum(accumulators=(7,))])
async def test_other_kinds_of_results_stay_true(program: Program) -> None:
    lie = Lie(("forward", "backward", "collect", "product"), "scaled", factor=2.0)
    assert await exchanged(lie, program, [3.0]) == (program, [3.0])
    assert lie.told == 0
