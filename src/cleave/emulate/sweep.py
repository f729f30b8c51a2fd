"""Measure what tasks take this machine as a device: a real worker behind a real socket, with one kind at a time.

A device's seconds are the processor time of its event loop (messages, decoding, sending) and the time its processor
reports (computing, encoding). The server's end runs in another thread and does not count. Kinds of tasks: blocks of
products, forward and backward through small decoder blocks at several row counts, and bytes that are only received.
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np

from cleave.core.cost.wire import WireFormat, encoded_bytes
from cleave.core.model.batch import Matrix
from cleave.core.model.decoder import Attention, Mlp, Norm, Part, Weight
from cleave.device.kernels import Kernel
from cleave.device.worker import Contribution, Offer, Worker
from cleave.emulate.fit import Sample
from cleave.errors import ProtocolError
from cleave.protocol.frames import PART_BYTES
from cleave.protocol.messages import VERSION, Bye, Drop, Hello, Result, RunTask, Store, Welcome
from cleave.protocol.numbers import NumpyCodec
from cleave.protocol.programs import Backward, Forward, GemmProgram, Hold, Program
from cleave.transport.base import Channel
from cleave.transport.websocket import Accepting, dial

_BATCHES = 5
_BATCH_S = 0.05
"""Least time of a batch of equal tasks; a cell takes a few of them."""
_MOST_TASKS = 64
_MEMORY_BYTES = 1 << 30
_HEAD_DIM = 64
_GEMMS = ((256, 256, 256), (512, 512, 512), (1024, 512, 1024), (1024, 1024, 1024))
"""Rows, columns and inner side."""
_BLOCKS = (256, 512)
"""Hidden sizes of decoder blocks."""
_ROWS = (16, 64, 256)
_HANDLED = (64 << 10, 1 << 20, 4 << 20)

Step = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A kind of task: what to send before it, run it, and forget after it."""

    label: str
    rows: float
    x: tuple[Matrix, ...]
    """Sent with every task."""
    program: Callable[[int, tuple[int, ...]], Program]
    """Makes the program from a free number and the numbers of what was sent."""
    before: Callable[[int, tuple[int, ...]], Program] | None = None
    """A task that must come first and does not count, such as the forward pass of a backward one."""
    format: WireFormat = "fp32"


async def sweep(kernel: Kernel, step: Step = lambda label: None) -> list[Sample]:
    """Measure every cell; `step` hears which one is next. Takes some 15 seconds."""
    async with _device(kernel) as device:
        samples: list[Sample] = []
        for cell in await _cells(device):
            step(cell.label)
            samples.append(await device.measure(cell))
        return samples


# ------------------------------------------------------------------------------------------------ cells


async def _cells(device: _Device) -> list[Cell]:
    rng = np.random.default_rng(0)
    cells: list[Cell] = []
    for size_bytes in _HANDLED:
        for format in cast("tuple[WireFormat, ...]", ("fp32", "bf16")):
            cols = 256
            rows = size_bytes // encoded_bytes(format, 1, cols)
            cells.append(
                Cell(
                    label=f"receive {size_bytes >> 10} KiB of {format}",
                    rows=math.inf,
                    x=(np.zeros((rows, cols), dtype=np.float32),),
                    program=lambda _, sent: Hold(operands=sent),
                    format=format,
                )
            )
    for rows, cols, inner in _GEMMS:
        b = await device.put(_draw(rng, cols, inner))
        cells.append(
            Cell(
                label=f"gemm {rows} x {cols} x {inner}",
                rows=math.inf,
                x=(_draw(rng, rows, inner),),
                program=_gemm(b, rows, cols),
            )
        )
    for hidden in _BLOCKS:
        parts, weights = await _block(device, rng, hidden)
        for rows in _ROWS:
            x, dy = _draw(rng, rows, hidden), _draw(rng, rows, hidden)
            forward, backward = _forward(parts, rows), _backward(parts, rows, weights)
            cells.append(Cell(label=f"forward {rows} x {hidden}", rows=rows, x=(x,), program=forward))
            cells.append(
                Cell(label=f"backward {rows} x {hidden}", rows=rows, x=(x, dy), program=backward, before=forward)
            )
    return cells


def _gemm(b: int, rows: int, cols: int) -> Callable[[int, tuple[int, ...]], Program]:
    return lambda _, sent: GemmProgram(layout="nt", terms=((sent[0], b),), rows=rows, cols=cols)


def _forward(parts: tuple[Part, ...], rows: int) -> Callable[[int, tuple[int, ...]], Program]:
    return lambda state, sent: Forward(parts=parts, x=sent[0], state=state, first_row=0, sequence=rows)


def _backward(
    parts: tuple[Part, ...], rows: int, weights: tuple[tuple[int, int], ...]
) -> Callable[[int, tuple[int, ...]], Program]:
    return lambda state, sent: Backward(
        parts=parts, x=sent[0], dy=sent[1], state=state, first_row=0, sequence=rows, accumulators=weights
    )


async def _block(
    device: _Device, rng: np.random.Generator, hidden: int
) -> tuple[tuple[Part, ...], tuple[tuple[int, int], ...]]:
    """Send the weights of a Llama block; return its parts, and an accumulator for each weight."""
    trained: list[tuple[int, int]] = []

    async def weight(rows: int, cols: int) -> Weight:
        number = await device.put(_draw(rng, rows, cols) / math.sqrt(cols))
        trained.append((number, device.number()))
        return Weight(weight=number)

    async def norm() -> Norm:
        return Norm(kind="rms", eps=1e-5, weight=await device.put(np.ones((1, hidden), dtype=np.float32)))

    q, k, v, o = [await weight(hidden, hidden) for _ in range(4)]
    attention = Attention(norm=await norm(), q=q, k=k, v=v, o=o, head_dim=_HEAD_DIM, scale=_HEAD_DIM**-0.5)
    gate, up = [await weight(3 * hidden, hidden) for _ in range(2)]
    mlp = Mlp(norm=await norm(), gate=gate, up=up, down=await weight(hidden, 3 * hidden), activation="silu")
    return (attention, mlp), tuple(trained)


def _draw(rng: np.random.Generator, rows: int, cols: int) -> Matrix:
    return rng.standard_normal((rows, cols), dtype=np.float32)


# ------------------------------------------------------------------------------------------------ a device


@asynccontextmanager
async def _device(kernel: Kernel) -> AsyncGenerator[_Device]:
    """Serve a worker that runs in a thread and an event loop of its own."""
    joined: asyncio.Future[Channel] = asyncio.get_running_loop().create_future()
    server = await asyncio.get_running_loop().create_server(lambda: _Listening(joined.set_result), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    device_loop = asyncio.new_event_loop()
    thread = threading.Thread(target=device_loop.run_forever, name="device", daemon=True)
    thread.start()
    working = asyncio.run_coroutine_threadsafe(_work(f"ws://127.0.0.1:{port}/ws", kernel), device_loop)
    try:
        device = _Device(await joined, device_loop)
        await device.welcome()
        yield device
        await device.dismiss()
        await asyncio.wrap_future(working)
    finally:
        working.cancel()
        server.close()
        device_loop.call_soon_threadsafe(device_loop.stop)
        await asyncio.to_thread(thread.join)
        device_loop.close()


async def _work(url: str, kernel: Kernel) -> None:
    channel = await dial(url)
    worker = Worker(
        channel, kernel, Offer(name="probe", token="", flops_per_s=1.0, memory_bytes=_MEMORY_BYTES), Contribution()
    )
    try:
        await worker.join()
        await worker.run()
    finally:
        await channel.close()


class _Listening(asyncio.Protocol):
    """Read one request and hand the connection to the server's end of a WebSocket, as uvicorn does for a server."""

    def __init__(self, accepted: Callable[[Channel], None]) -> None:
        self._accepted, self._request = accepted, b""
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._request += data
        if not self._request.endswith(b"\r\n\r\n"):
            return
        assert self._transport is not None
        stream = Accepting("/ws", self._accepted, objection=_no_objection, admitted=_nothing, ended=_nothing)
        self._transport.set_protocol(stream)
        stream.connection_made(self._transport)
        stream.data_received(self._request)


def _nothing() -> None:
    pass


def _no_objection(origins: list[str], hosts: list[str]) -> str:
    return ""


class _Device:
    """The server's view of the device that is measured."""

    def __init__(self, channel: Channel, device_loop: asyncio.AbstractEventLoop) -> None:
        self._channel, self._device_loop = channel, device_loop
        self._numbers = 0
        self._codec = NumpyCodec()

    def number(self) -> int:
        self._numbers += 1
        return self._numbers

    async def welcome(self) -> None:
        hello = (await self._channel.receive()).message
        if not isinstance(hello, Hello):
            raise ProtocolError(f"expected hello, got {hello.type_name()}")
        self._channel.allow(_MEMORY_BYTES)
        await self._channel.send(Welcome(version=VERSION, name="probe"))

    async def dismiss(self) -> None:
        await self._channel.send(Bye(reason="measured", rejoin=False))

    async def put(self, matrix: Matrix, format: WireFormat = "fp32") -> int:
        """Send an operand in strips of at most one part of a message; return its number."""
        number, (rows, cols) = self.number(), matrix.shape
        height = max(1, PART_BYTES // (4 * cols))
        for first in range(0, rows, height):
            encoded = self._codec.encode(matrix[first : first + height], format)
            strip = Store(
                operand=number,
                rows=rows,
                cols=cols,
                format=format,
                first_row=first,
                strip_rows=min(height, rows - first),
                payload=len(encoded),
            )
            await self._channel.send(strip, encoded.data)
        return number

    async def measure(self, cell: Cell) -> Sample:
        """Run batches of the same task; return what one took in the fastest, which other programs disturbed least."""
        await self._batch(cell, 1)  # touches memory for the first time
        took_s, flops, size_bytes = await self._batch(cell, 1)
        per_batch = max(1, min(int(_BATCH_S / max(took_s, 1e-6)), _MOST_TASKS))
        batches = [(await self._batch(cell, per_batch))[0] for _ in range(_BATCHES)]
        return Sample(label=cell.label, rows=cell.rows, flops=flops, size_bytes=size_bytes, seconds=min(batches))

    async def _batch(self, cell: Cell, count: int) -> tuple[float, float, int]:
        """Return seconds, operations and bytes per task."""
        seconds, flops, size_bytes = 0.0, 0.0, 0
        for _ in range(count):
            made = self.number()
            if cell.before is not None:
                first = (await self.put(cell.x[0], cell.format),)
                await self._run(cell.before(made, first), cell.format)
                await self._drop(first)
            loop_s = await self._loop_s()
            sent = tuple([await self.put(matrix, cell.format) for matrix in cell.x])
            results = await self._run(cell.program(made, sent), cell.format)
            seconds += await self._loop_s() - loop_s + sum(result.compute_s for result in results)
            flops += sum(result.flops for result in results)
            size_bytes += sum(result.payload for result in results)
            size_bytes += sum(encoded_bytes(cell.format, *matrix.shape) for matrix in cell.x)
            await self._drop((*sent, made))
        return seconds / count, flops / count, size_bytes // count

    async def _run(self, program: Program, format: WireFormat) -> list[Result]:
        """Run one task; return its results, which are complete when they cover the whole block."""
        task = self.number()
        await self._channel.send(RunTask(task=task, priority=0, program=program, format=format))
        results: list[Result] = []
        missing = _result_size(program)
        while missing is None or missing > 0:
            received = (await self._channel.receive()).message
            if not isinstance(received, Result):
                raise ProtocolError(f"expected a result of {type(program).__name__}, got {received}")
            results.append(received)
            missing = (missing or 0) - received.rows * received.cols
        return results

    async def _drop(self, operands: Iterable[int]) -> None:
        await self._channel.send(Drop(operands=tuple(operands)))

    async def _loop_s(self) -> float:
        """Processor seconds of the device's event loop so far, once it has done what it was sent before."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(_thread_s(), self._device_loop))


async def _thread_s() -> float:
    return time.thread_time()


def _result_size(program: Program) -> int | None:
    """Numbers in a result; None if it comes in one piece."""
    return program.rows * program.cols if isinstance(program, GemmProgram) else None
