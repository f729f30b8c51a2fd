"""Laws of an emulated processor: what a profile says is what a chunk takes, and one device does one thing at a time."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from tests.support.virtual import run

from cleave.core.cost.rates import thin_effort
from cleave.core.cost.wire import WireFormat
from cleave.core.schedule.rectangles import Rectangle
from cleave.device.processor import Encoded
from cleave.device.programs.gemm import Chunk
from cleave.emulate.devices import DeviceProfile
from cleave.emulate.pacing import KeepingUp, PacedProcessor, ProcessorClock

PROFILE = DeviceProfile(
    name="slow",
    flops_per_s=1e6,
    down_bytes_per_s=1e6,
    up_bytes_per_s=1e6,
    latency_s=0.0,
    memory_bytes=1 << 20,
    task_s=0.25,
    byte_s=1e-3,
)


def chunk(flops: float, rows: float = math.inf, part: Rectangle | None = None) -> Chunk:
    return Chunk(lambda: None, part, flops, rows)


class Slow:
    """Answers after a given time, in whatever clock the loop has."""

    def __init__(self, takes_s: float) -> None:
        self.takes_s = takes_s
        self.answered = 0

    async def answer(self, chunk: Chunk, format: WireFormat) -> Encoded | None:
        await asyncio.sleep(self.takes_s)
        self.answered += 1
        return None if chunk.part is None else np.zeros(4, dtype=np.uint8)


def test_a_chunk_takes_its_operations_its_bytes_and_once_per_task_the_fixed_cost() -> None:
    clock = ProcessorClock(PROFILE)
    first = clock.reserve(chunk(2e6), 100, 10.0, begins=True)
    assert first == pytest.approx((10 + 0.25 + 2 + 0.1, 0.25 + 2 + 0.1))
    second = clock.reserve(chunk(1e6), 0, 50.0, begins=False)
    assert second == pytest.approx((51.0, 1.0))


def test_operations_on_few_rows_take_as_much_longer_as_in_the_cost_model() -> None:
    _, took_s = ProcessorClock(PROFILE).reserve(chunk(1e6, rows=16), 0, 0.0, begins=False)
    assert took_s == pytest.approx(float(thin_effort(16)))


def test_received_bytes_keep_the_processor_busy_and_count_with_the_next_chunk() -> None:
    clock = ProcessorClock(PROFILE)
    clock.received(1000, 5.0)
    clock.received(500, 5.1)
    assert clock.reserve(chunk(1e6), 0, 5.2, begins=False) == pytest.approx((5.0 + 1.5 + 1.0, 1.5 + 1.0))
    assert clock.reserve(chunk(1e6), 0, 100.0, begins=False)[1] == pytest.approx(1.0)


def test_a_late_timer_delays_no_later_chunk_and_a_pause_saves_up_nothing() -> None:
    clock = ProcessorClock(PROFILE)
    end_s, _ = clock.reserve(chunk(1e6), 0, 0.0, begins=False)
    assert clock.reserve(chunk(1e6), 0, end_s + 0.002, begins=False)[0] == pytest.approx(end_s + 1)
    assert clock.reserve(chunk(1e6), 0, end_s + 10, begins=False)[0] == pytest.approx(end_s + 11)


@pytest.mark.parametrize(("real_s", "late"), [(0.0, 0), (0.9, 0), (1.5, 1)])
def test_an_answer_comes_when_the_profile_says_or_is_counted_as_late(real_s: float, late: int) -> None:
    async def main() -> None:
        loop, kept = asyncio.get_running_loop(), KeepingUp()
        processor = PacedProcessor(PROFILE, Slow(real_s), kept)
        encoded, took_s = await processor.run(chunk(0.75e6, part=Rectangle(0, 1, 0, 1)), "fp32", begins=True)
        assert encoded is not None
        assert took_s == pytest.approx(1.004)
        assert loop.time() == pytest.approx(max(1.004, real_s), abs=1e-3)
        assert (kept.chunks, kept.late) == (1, late)
        assert kept.late_s == pytest.approx(max(0.0, real_s - 1.004), abs=1e-3)

    run(main(), limit_s=100)


def test_closing_waits_for_a_computation_that_cannot_be_interrupted() -> None:
    async def main() -> None:
        arithmetic = Slow(5.0)
        processor = PacedProcessor(PROFILE, arithmetic, KeepingUp())
        running = asyncio.ensure_future(processor.run(chunk(1e6), "fp32", begins=True))
        await asyncio.sleep(1.0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert arithmetic.answered == 0
        await processor.close()
        assert arithmetic.answered == 1

    run(main(), limit_s=100)


def test_a_machine_that_cannot_keep_up_is_told_once_and_with_figures() -> None:
    said: list[str] = []
    kept = KeepingUp(said.append)
    for _ in range(18):
        kept.count(1.0, -0.1)
    assert kept.keeps_up
    for _ in range(20):
        kept.count(1.0, 0.5)
    assert not kept.keeps_up
    assert len(said) == 1
    assert "2 of 20" in said[0]
    assert (kept.late, kept.worst_s, kept.late_s) == (20, 0.5, pytest.approx(10.0))
