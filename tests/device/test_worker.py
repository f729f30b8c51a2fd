"""Laws of a worker, driven by a scripted server: what it answers, what it forgets, when it ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Matrix
from cleave.core.schedule.rectangles import Rectangle, total, within, without
from cleave.device.kernels import Array, Kernel, NumpyKernel
from cleave.device.worker import Contribution, Offer, Refusal, Worker
from cleave.errors import ConnectionLost, ProtocolError
from cleave.protocol import messages
from cleave.protocol.frames import PAYLOAD_BYTES
from cleave.protocol.messages import AnyMessage
from cleave.protocol.numbers import NumpyCodec
from cleave.protocol.programs import GemmProgram, Layout
from cleave.transport.base import Received
from cleave.transport.memory import MemoryChannel, memory_pair

DEADLINE_S = 120.0
MEMORY_BYTES = 1_000_000


@dataclass
class Script:
    """The server's end, scripted by a test."""

    channel: MemoryChannel
    worker: Worker
    contribution: Contribution
    running: asyncio.Task[messages.Bye]
    seen: list[AnyMessage] = field(default_factory=list)

    async def store(self, operand: int, matrix: Matrix, strip_rows: int = 1 << 20, format: WireFormat = "fp32") -> None:
        for first in range(0, len(matrix), strip_rows):
            payload = NumpyCodec().encode(matrix[first : first + strip_rows], format)
            await self.channel.send(
                messages.Store(
                    operand=operand,
                    rows=matrix.shape[0],
                    cols=matrix.shape[1],
                    format=format,
                    first_row=first,
                    strip_rows=len(matrix[first : first + strip_rows]),
                    payload=len(payload),
                ),
                payload.data,
            )

    async def run(
        self,
        task: int,
        layout: Layout,
        terms: tuple[tuple[int, int], ...],
        shape: tuple[int, int],
        *,
        priority: int = 1,
        format: WireFormat = "fp32",
    ) -> None:
        program = GemmProgram(layout=layout, terms=terms, rows=shape[0], cols=shape[1])
        await self.channel.send(messages.RunTask(task=task, priority=priority, program=program, format=format))

    async def receive(self) -> Received:
        async with asyncio.timeout(DEADLINE_S):
            received = await self.channel.receive()
        self.seen.append(received.message)
        return received

    async def results(self, task: int, shape: tuple[int, int]) -> Matrix:
        """The block assembled from all rectangles of a task, which must be the next messages."""
        output = np.full(shape, np.nan, dtype=np.float32)
        missing: list[Rectangle] | None = [Rectangle(0, shape[0], 0, shape[1])]
        while missing:
            received = await self.receive()
            result = received.message
            assert isinstance(result, messages.Result)
            assert result.task == task
            part = Rectangle(
                result.first_row, result.first_row + result.rows, result.first_col, result.first_col + result.cols
            )
            out = output[part.top : part.bottom, part.left : part.right]
            NumpyCodec().decode_into(received.payload, result.format, out)
            assert result.flops >= 0 <= result.compute_s
            assert total(within(missing, part)) == part.area > 0
            missing = without(missing, part)
        return output

    async def still_there(self) -> None:
        """Check by a probe that the worker is alive and has processed everything sent before."""
        await self.channel.send(messages.Probe(answer=0))
        assert isinstance((await self.receive()).message, messages.Probed)

    async def goodbye(self) -> messages.Bye:
        await self.channel.send(messages.Bye(reason="done", rejoin=False))
        async with asyncio.timeout(DEADLINE_S):
            return await self.running

    async def fault(self) -> BaseException | None:
        async with asyncio.timeout(DEADLINE_S):
            await asyncio.wait([self.running])
        return self.running.exception()


def offer(name: str = "ann", memory_bytes: int = MEMORY_BYTES) -> Offer:
    return Offer(name=name, token="secret", flops_per_s=1e9, memory_bytes=memory_bytes)


@asynccontextmanager
async def joined(kernel: Kernel | None = None, memory_bytes: int = MEMORY_BYTES) -> AsyncGenerator[Script]:
    server, device = memory_pair()
    contribution = Contribution()
    worker = Worker(device, kernel or NumpyKernel(), offer(memory_bytes=memory_bytes), contribution)
    await server.send(messages.Welcome(version=messages.VERSION, name="ann-2"))
    await worker.join()
    assert isinstance((await server.receive()).message, messages.Hello)
    running = asyncio.ensure_future(worker.run())
    try:
        yield Script(server, worker, contribution, running)
    finally:
        await server.close("the test is over")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def whole(rows: int, cols: int, seed: int = 0) -> Matrix:
    """Small integers: their sums are exact in any order, and in bf16."""
    return np.random.default_rng(seed).integers(-3, 4, (rows, cols)).astype(np.float32)


# ------------------------------------------------------------------------------------------------ joining


async def test_a_worker_states_its_offer_and_takes_the_name_it_is_given() -> None:
    server, device = memory_pair()
    worker = Worker(device, NumpyKernel(), offer(), Contribution())
    joining = asyncio.ensure_future(worker.join())
    hello = (await server.receive()).message
    assert hello == messages.Hello(
        version=messages.VERSION,
        name="ann",
        token="secret",
        flops_per_s=1e9,
        memory_bytes=MEMORY_BYTES,
        kernel="numpy",
    )
    await server.send(messages.Welcome(version=messages.VERSION, name="ann-2"))
    await joining
    assert worker.name == "ann-2"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (messages.Refused(reason="wrong token"), Refusal),
        (messages.Bye(reason="not yet", rejoin=True), ConnectionLost),
        (messages.Leaving(reason="?"), ProtocolError),
    ],
)
async def test_a_worker_that_is_not_admitted_ends(answer: AnyMessage, error: type[Exception]) -> None:
    server, device = memory_pair()
    await server.send(answer)
    with pytest.raises(error):
        await Worker(device, NumpyKernel(), offer(), Contribution()).join()


# ------------------------------------------------------------------------------------------------ working


@pytest.mark.parametrize("format", ["fp32", "bf16", "fp16", "q8"])
async def test_a_block_comes_back_in_the_requested_format(format: WireFormat) -> None:
    x, w = whole(50, 8), whole(30, 8, 1)
    async with joined() as script:
        await script.run(4, "nt", ((1, 2),), (50, 30), format=format)
        for first in (1, 2):
            await script.store(first, x if first == 1 else w, strip_rows=20)
        output = await script.results(4, (50, 30))
        assert {result.format for result in script.seen if isinstance(result, messages.Result)} == {format}
        tolerance = np.abs(x @ w.T).max() / 252 if format == "q8" else 0
        np.testing.assert_allclose(output, x @ w.T, atol=tolerance)


async def test_operands_may_arrive_before_or_after_a_task_and_serve_several() -> None:
    x, w, dy = whole(40, 6), whole(20, 6, 1), whole(40, 20, 2)
    async with joined() as script:
        await script.store(1, x)
        await script.run(1, "nt", ((1, 2),), (40, 20))
        await script.store(2, w)
        np.testing.assert_array_equal(await script.results(1, (40, 20)), x @ w.T)
        await script.store(3, dy)
        await script.run(2, "nn", ((3, 2),), (40, 6))
        np.testing.assert_array_equal(await script.results(2, (40, 6)), dy @ w)
        await script.run(3, "tn", ((3, 1),), (20, 6))
        np.testing.assert_array_equal(await script.results(3, (20, 6)), dy.T @ x)
        done = script.contribution
        assert done.tasks == 3
        assert done.flops == 3 * 2.0 * 40 * 20 * 6
        assert done.down_bytes == 4 * (x.size + w.size + dy.size)
        await script.still_there()
        assert done.up_bytes == 4 * (40 * 20 + 40 * 6 + 20 * 6)


async def test_the_most_urgent_task_is_computed_first() -> None:
    x, w = whole(30, 5), whole(20, 5, 1)
    async with joined() as script:
        for task, priority in ((1, 3), (2, 0), (3, 2)):
            await script.run(task, "nt", ((1, 2),), (30, 20), priority=priority)
        await script.store(1, x)
        await script.store(2, w)
        for task in (2, 3, 1):
            np.testing.assert_array_equal(await script.results(task, (30, 20)), x @ w.T)


async def test_dropped_operands_make_room_for_others_of_the_same_identity() -> None:
    first, second = whole(100, 50), whole(100, 50, 1)
    async with joined(memory_bytes=2 * first.nbytes) as script:
        await script.store(1, first)
        await script.store(2, first)
        await script.run(1, "nt", ((1, 2),), (100, 100))
        np.testing.assert_array_equal(await script.results(1, (100, 100)), first @ first.T)
        await script.channel.send(messages.Drop(operands=(1, 2, 99)))
        await script.store(1, second)
        await script.store(2, first)
        await script.run(2, "nt", ((1, 2),), (100, 100))
        np.testing.assert_array_equal(await script.results(2, (100, 100)), second @ first.T)


async def test_a_cancelled_task_is_never_answered() -> None:
    x = whole(30, 5)
    async with joined() as script:
        await script.run(1, "nt", ((1, 1),), (30, 30))
        await script.run(2, "nt", ((1, 1),), (30, 30), priority=5)
        await script.channel.send(messages.CancelTasks(tasks=(1, 77)))
        await script.store(1, x)
        np.testing.assert_array_equal(await script.results(2, (30, 30)), x @ x.T)
        await script.still_there()
        assert script.contribution.tasks == 1


async def test_a_probe_gets_an_answer_of_the_requested_size() -> None:
    async with joined() as script:
        began_s = time.monotonic()
        await script.channel.send(messages.Probe(answer=3000, payload=70_000), bytes(70_000))
        received = await script.receive()
        assert isinstance(received.message, messages.Probed)
        assert len(received.payload) == 3000
        assert 0 <= received.message.down_s <= time.monotonic() - began_s


# ------------------------------------------------------------------------------------------------ ending


@pytest.mark.parametrize("rejoin", [True, False])
async def test_a_bye_ends_a_worker_and_frees_its_memory(rejoin: bool) -> None:
    async with joined() as script:
        await script.store(1, whole(10, 10))
        await script.run(1, "nt", ((1, 2),), (10, 10))
        bye = messages.Bye(reason="paused", rejoin=rejoin)
        await script.channel.send(bye)
        async with asyncio.timeout(DEADLINE_S):
            assert await script.running == bye
        assert script.worker._store.used_bytes == 0  # pyright: ignore[reportPrivateUsage]


async def test_a_lost_connection_ends_a_worker() -> None:
    async with joined() as script:
        await script.channel.close("the cable was cut")
        fault = await script.fault()
        assert isinstance(fault, ConnectionLost)
        assert "the cable was cut" in str(fault)


async def test_a_worker_announces_that_it_is_leaving() -> None:
    async with joined() as script:
        await script.worker.leave("stopped by its owner")
        assert (await script.receive()).message == messages.Leaving(reason="stopped by its owner")


def _store(**changed: int) -> messages.Store:
    usual = {"operand": 1, "rows": 4, "cols": 2, "first_row": 0, "strip_rows": 4, "payload": 32}
    return messages.Store(format="fp32", **{**usual, **changed})


def _run(*terms: tuple[int, int]) -> messages.RunTask:
    return messages.RunTask(
        task=1, priority=0, format="fp32", program=GemmProgram(layout="nt", terms=terms, rows=4, cols=4)
    )


VIOLATIONS: dict[str, list[AnyMessage]] = {
    "a strip out of order": [_store(first_row=1)],
    "a strip twice": [_store(), _store()],
    "more than the memory offered": [_store(rows=MEMORY_BYTES)],
    "a strip of another length": [_store(cols=3)],
    "operands that do not make the block": [
        _store(),
        _store(operand=2, rows=3, strip_rows=3, payload=24),
        _run((1, 2)),
    ],
    "a block of nothing": [_run()],
    "a second welcome": [messages.Welcome(version=messages.VERSION, name="x")],
    "a device's message": [messages.Leaving(reason="x")],
    "a probe for more than a message may carry": [messages.Probe(answer=PAYLOAD_BYTES + 1)],
    "a probe for less than nothing": [messages.Probe(answer=-1)],
}


@pytest.mark.parametrize("what", VIOLATIONS)
async def test_a_server_that_breaks_the_protocol_loses_the_device(what: str) -> None:
    async with joined() as script:
        for message in VIOLATIONS[what]:
            await script.channel.send(message, bytes(message.payload))
        assert isinstance(await script.fault(), ProtocolError)


async def test_bytes_that_are_not_a_message_end_the_connection() -> None:
    async with joined() as script:
        await script.channel._send(b"not a message")  # pyright: ignore[reportPrivateUsage]
        assert isinstance(await script.fault(), ProtocolError)


# ------------------------------------------------------------------------------------------------ failing


class Faulty(NumpyKernel):
    """A kernel whose first products fail."""

    def __init__(self, fault: Callable[[], Exception], times: int) -> None:
        super().__init__()
        self._fault, self._times = fault, times

    def multiply(self, layout: Layout, pairs: list[tuple[Array, Array]]) -> Array:
        if self._times > 0:
            self._times -= 1
            raise self._fault()
        return super().multiply(layout, pairs)


@pytest.mark.parametrize("fault", [MemoryError, lambda: RuntimeError("out of memory on the GPU")])
async def test_a_product_that_cannot_be_computed_fails_and_the_worker_continues(fault: Callable[[], Exception]) -> None:
    x = whole(30, 5)
    async with joined(Faulty(fault, 1)) as script:
        await script.store(1, x)
        await script.run(1, "nt", ((1, 1),), (30, 30))
        failed = (await script.receive()).message
        assert isinstance(failed, messages.Failed)
        assert failed.task == 1
        assert type(fault()).__name__ in failed.reason
        await script.run(2, "nt", ((1, 1),), (30, 30))
        np.testing.assert_array_equal(await script.results(2, (30, 30)), x @ x.T)
        await script.run(1, "nt", ((1, 1),), (30, 30))
        np.testing.assert_array_equal(await script.results(1, (30, 30)), x @ x.T, "the same task may come again")
        assert await script.goodbye() == messages.Bye(reason="done", rejoin=False)
        assert script.contribution.tasks == 2


# ------------------------------------------------------------------------------------------------ hostile servers


async def test_a_block_beyond_the_devices_memory_fails_at_once() -> None:
    """Before its parts are listed: those of an outer product of two long vectors would fill a machine."""
    async with joined() as script:
        await script.run(1, "nt", ((1, 2),), (1 << 40, 1 << 40))
        failed = (await script.receive()).message
        assert isinstance(failed, messages.Failed)
        assert failed.task == 1
        await script.still_there()


async def test_a_server_that_asks_without_taking_answers_is_left() -> None:
    async def ask(server: MemoryChannel) -> None:
        for _ in range(100):
            await server.send(messages.Probe(answer=PAYLOAD_BYTES // 4))

    async with joined() as script:
        asking = asyncio.ensure_future(ask(script.channel))
        assert isinstance(await script.fault(), ProtocolError)
        asking.cancel()


async def test_a_server_that_repeats_itself_fills_no_screen() -> None:
    said: list[str] = []
    server, device = memory_pair()
    worker = Worker(device, NumpyKernel(), offer(), Contribution(), said.append)
    running = asyncio.ensure_future(worker.run())
    for number in range(500):
        await server.send(messages.Idle(reason=f"reason {number}"))
    await server.send(messages.Bye(reason="done", rejoin=False))
    async with asyncio.timeout(DEADLINE_S):
        await running
    assert said == ["no work for this device: reason 0"]
