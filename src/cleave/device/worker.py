"""The device's loop: receive, compute and send as three stages that never wait for each other.

The receiver takes strips and tasks, one thread computes whatever is ready (the most urgent task first), the sender
returns results. All state is the event loop's; the compute thread sees only the arrays of one chunk. The worker knows
a Channel, not what it runs over: in-process, emulated and real devices are this same code.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cleave.device.programs.gemm import Chunk
from cleave.device.programs.kernels import Kernel
from cleave.device.programs.resident import Task, make_task
from cleave.device.store import Store
from cleave.errors import CleaveError, ConnectionLost, ProtocolError
from cleave.protocol import messages
from cleave.protocol.frames import PAYLOAD_BYTES, Buffer
from cleave.protocol.messages import AnyMessage
from cleave.transport.base import Channel

_LEAVE_S = 2.0
_WORKSPACE_BYTES = 64 << 20
"""What computing may take beyond the memory offered, which is for what is held: tiles and buffers, however small."""
_REMEMBERED = 64  # cancelled tasks whose results may be on their way
_AT_ONCE = -1  # before every result
_MOST_TASKS = 64  # a server has far fewer unfinished ones
_MOST_WAITING = 3
"""Results in the line to the server beyond which sums stay where they are."""


@dataclass(slots=True)
class Contribution:
    """What a device has done since it started."""

    tasks: int = 0
    flops: float = 0.0
    compute_s: float = 0.0
    down_bytes: int = 0
    up_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """What a device says of itself when it joins."""

    name: str
    token: str
    flops_per_s: float
    memory_bytes: int


@dataclass(slots=True)
class _Running:
    message: messages.Run
    task: Task
    order: int
    room_bytes: int = 0
    """Counted in the store, as far as is known."""


class Refusal(CleaveError):
    """The server does not want this device; trying again is of no use."""


class Worker:
    """Serves one connection; `run` returns the server's reason when it says goodbye."""

    def __init__(
        self,
        channel: Channel,
        kernel: Kernel,
        offer: Offer,
        contribution: Contribution,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._channel, self._kernel, self._offer, self._notice = channel, kernel, offer, notice
        self._store = Store(kernel, offer.memory_bytes)
        self._done = contribution
        self._tasks: dict[int, _Running] = {}
        self._cancelled: deque[int] = deque(maxlen=_REMEMBERED)
        self._outgoing: asyncio.PriorityQueue[tuple[int, int, messages.FromDevice, Buffer]] = asyncio.PriorityQueue()
        self._unsent_bytes = 0
        self._work = asyncio.Event()
        self._order = 0
        self._down_bytes, self._down_s = 0, 0.0
        self.name = offer.name

    async def join(self) -> None:
        """Introduce the device; Refusal if the server does not want it."""
        await self._channel.send(
            messages.Hello(
                version=messages.VERSION,
                name=self._offer.name,
                token=self._offer.token,
                flops_per_s=self._offer.flops_per_s,
                memory_bytes=self._offer.memory_bytes,
                kernel=self._kernel.name,
            )
        )
        match (await self._channel.receive()).message:
            case messages.Welcome(version=version, name=name):
                if version != messages.VERSION:
                    raise Refusal(
                        f"the server speaks protocol {version}, this device {messages.VERSION}; use the same release"
                    )
                self.name = name
            case messages.Refused(reason=reason):
                raise Refusal(reason)
            case messages.Bye(reason=reason):
                raise ConnectionLost(reason)
            case other:
                raise ProtocolError(f"expected welcome or refused, got {type(other).__name__.lower()}")

    async def run(self) -> messages.Bye:
        thread = ThreadPoolExecutor(1, "compute")
        stages = [asyncio.ensure_future(stage) for stage in (self._receive(), self._compute(thread), self._send())]
        try:
            done, _ = await asyncio.wait(stages, return_when=asyncio.FIRST_COMPLETED)
            first = next(stage for stage in stages if stage in done)  # the receiver's word counts most
            goodbye = first.result()
            assert goodbye is not None, "only the receiver returns"
            return goodbye
        finally:
            for stage in stages:
                stage.cancel()
            await asyncio.gather(*stages, return_exceptions=True)
            await asyncio.to_thread(thread.shutdown)  # a product ends when it ends; others may share the loop
            self._store.clear()

    async def leave(self, reason: str) -> None:
        with suppress(ConnectionLost, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._channel.send(messages.Leaving(reason=reason))
                await self._channel.close(reason)

    # -------------------------------------------------------------------------------------------- stages

    async def _receive(self) -> messages.Bye | None:
        while True:
            received = await self._channel.receive()
            self._down_bytes += len(received.payload)
            self._down_s += received.link_s
            self._done.down_bytes += len(received.payload)
            goodbye = await self._take(received.message, received.payload, received.link_s)
            if goodbye is not None:
                return goodbye

    async def _take(self, message: AnyMessage, payload: Buffer, link_s: float) -> messages.Bye | None:
        match message:
            case messages.Store():
                try:
                    self._store.write(message, payload)
                except MemoryError:
                    raise ProtocolError("there is less memory than was offered") from None
                self._work.set()
            case messages.Run():
                if len(self._tasks) >= _MOST_TASKS:
                    raise ProtocolError(f"expected at most {_MOST_TASKS} unfinished tasks, got one more")
                self._order += 1
                task = make_task(message.program, self._store, self._kernel)
                self._tasks[message.task] = _Running(message, task, self._order)
                self._expect(self._tasks[message.task], task.room_bytes)
                self._work.set()
            case messages.Drop(operands=operands):
                self._store.drop(operands)
            case messages.Cancel(tasks=tasks):
                self._cancelled.extend(tasks)
                for task in tasks:
                    self._end(task)
            case messages.Probe(answer=answer):
                if not 0 <= answer <= PAYLOAD_BYTES:
                    raise ProtocolError(f"expected a probe of at most {PAYLOAD_BYTES} bytes, got {answer}")
                self._put(_AT_ONCE, messages.Probed(down_s=link_s, payload=answer), bytes(answer))
            case messages.Idle(reason=reason):
                self._notice(reason)
            case messages.Bye():
                return message
            case _:
                raise ProtocolError(f"a server does not send {type(message).__name__.lower()} here")
        return None

    async def _compute(self, thread: ThreadPoolExecutor) -> messages.Bye | None:
        loop = asyncio.get_running_loop()
        flops, compute_s = 0.0, 0.0
        while True:
            running, chunk = self._next()
            if running is None or chunk is None:
                self._work.clear()
                await self._work.wait()
                continue
            try:
                if running.task.room_bytes > self._offer.memory_bytes + _WORKSPACE_BYTES:
                    raise MemoryError(f"{running.task.room_bytes} bytes to compute it are more than is offered in all")
                encoded, took_s = await loop.run_in_executor(thread, _timed, chunk, self._kernel, running.message)
            except (MemoryError, RuntimeError) as fault:  # what numpy and torch raise where a product cannot be made
                self._end(running.message.task)
                self._put(_AT_ONCE, messages.Failed(task=running.message.task, reason=repr(fault)[:200]), b"")
                continue
            flops, compute_s = flops + chunk.flops, compute_s + took_s
            if encoded is not None and chunk.part is not None:
                self._return(running, chunk, encoded, flops, compute_s)
                flops, compute_s = 0.0, 0.0

    async def _send(self) -> messages.Bye | None:
        while True:
            _, _, message, payload = await self._outgoing.get()
            if isinstance(message, messages.Result) and message.task in self._cancelled:
                self._unsent_bytes -= len(payload)
                continue  # others were faster
            await self._channel.send(message, payload)
            self._unsent_bytes -= len(payload)
            self._done.up_bytes += message.payload
            self._work.set()

    # -------------------------------------------------------------------------------------------- parts

    def _next(self) -> tuple[_Running | None, Chunk | None]:
        """The most urgent thing that can be computed now; nothing while too much waits for the uplink."""
        if self._unsent_bytes > self._offer.memory_bytes + _WORKSPACE_BYTES:
            return None, None
        for running in sorted(self._tasks.values(), key=lambda entry: (entry.message.priority, entry.order)):
            if running.task.only_returns and self._outgoing.qsize() >= _MOST_WAITING:
                continue
            chunk = running.task.next_chunk()
            if chunk is not None:
                self._expect(running, running.task.room_bytes)
                return running, chunk
        return None, None

    def _return(
        self, running: _Running, chunk: Chunk, encoded: NDArray[np.uint8], flops: float, compute_s: float
    ) -> None:
        part = chunk.part
        assert part is not None
        self._done.flops += flops
        self._done.compute_s += compute_s
        message = messages.Result(
            task=running.message.task,
            first_row=part.top,
            rows=part.rows,
            first_col=part.left,
            cols=part.cols,
            format=running.message.format,
            flops=flops,
            compute_s=compute_s,
            down_bytes=self._down_bytes,
            down_s=self._down_s,
            payload=len(encoded),
        )
        self._down_bytes, self._down_s = 0, 0.0
        self._put(running.message.priority, message, encoded.data)
        if running.task.finished:
            self._done.tasks += 1
            self._end(running.message.task)

    def _put(self, priority: int, message: messages.FromDevice, payload: Buffer) -> None:
        """Into the sender's queue: neither receiving nor computing waits for the uplink."""
        self._order += 1
        self._unsent_bytes += len(payload)
        self._outgoing.put_nowait((priority, self._order, message, payload))

    def _end(self, task: int) -> None:
        ended = self._tasks.pop(task, None)
        if ended is not None:
            self._expect(ended, 0)

    def _expect(self, running: _Running, room_bytes: int) -> None:
        self._store.expect_result(room_bytes - running.room_bytes)
        running.room_bytes = room_bytes


def _timed(chunk: Chunk, kernel: Kernel, message: messages.Run) -> tuple[NDArray[np.uint8] | None, float]:
    started = time.perf_counter()
    result = chunk.run()
    encoded = None if chunk.part is None else kernel.encode(result, message.format)
    return encoded, time.perf_counter() - started
