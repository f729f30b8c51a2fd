"""The device's main loop: receive, compute and send, three stages that never block each other.

The receiver takes strips and tasks, a processor computes whatever is ready, most urgent task first, and the sender
returns results. All state belongs to the event loop; the processor sees only the arrays of one chunk. The worker knows
a Channel and a Processor but not what is behind them: in-process, emulated and real devices run this same code.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cleave.core.cost.terms import ALLOWANCE_BYTES
from cleave.device.kernels import Kernel
from cleave.device.processor import Processor, ThreadProcessor
from cleave.device.programs.gemm import Chunk
from cleave.device.programs.resident import DeviceTask, make_task
from cleave.device.store import OperandStore
from cleave.errors import CleaveError, ConnectionLost, ProtocolError
from cleave.protocol import messages
from cleave.protocol.frames import PAYLOAD_BYTES, Buffer
from cleave.protocol.messages import AnyMessage
from cleave.transport.base import Channel

_LEAVE_S = 2.0
_CANCELLED_KEPT = 64  # cancelled tasks whose results may still be queued
_URGENT = -1  # ahead of every result
_MAX_TASKS = 64  # a sane server keeps far fewer in flight
_MAX_ANSWERS = 10_000
"""Messages that may wait for the uplink before a server that asks on is given up."""
_NOTICE_S = 5.0
"""Seconds between notices: a server may repeat itself without end."""
_MAX_QUEUED_RESULTS = 3
"""Queued results beyond which finished sums are not copied out yet."""


@dataclass(slots=True)
class Contribution:
    """Totals of a device since its process started."""

    tasks: int = 0
    flops: float = 0.0
    compute_s: float = 0.0
    down_bytes: int = 0
    up_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A device's self-description when it joins."""

    name: str
    token: str
    flops_per_s: float
    memory_bytes: int
    version: int = messages.VERSION


@dataclass(slots=True)
class _ActiveTask:
    message: messages.RunTask
    task: DeviceTask
    order: int
    room_bytes: int = 0
    """Bytes reserved in the store so far."""
    has_begun: bool = False


class Refusal(CleaveError):
    """The server rejects this device; retrying is pointless."""


class Worker:
    """One connection to a server: `join`, then `run` until the server says goodbye."""

    def __init__(
        self,
        channel: Channel,
        kernel: Kernel,
        offer: Offer,
        contribution: Contribution,
        notice: Callable[[str], None] = lambda text: None,
        processor: Processor | None = None,
    ) -> None:
        """`processor` computes with `kernel`; by default a thread of its own."""
        self._channel, self._kernel, self._offer, self._notice = channel, kernel, offer, notice
        self._processor: Processor = processor or ThreadProcessor(kernel)
        self._store = OperandStore(kernel, offer.memory_bytes)
        self._contribution = contribution
        self._tasks: dict[int, _ActiveTask] = {}
        self._cancelled: deque[int] = deque(maxlen=_CANCELLED_KEPT)
        self._outgoing: asyncio.PriorityQueue[tuple[int, int, messages.FromDevice, Buffer]] = asyncio.PriorityQueue()
        self._unsent_bytes = 0
        self._work = asyncio.Event()
        self._order = 0
        self._down_bytes, self._down_s = 0, 0.0
        self._noticed_at = -_NOTICE_S
        self._limit_bytes = offer.memory_bytes + ALLOWANCE_BYTES
        """For results and what else waits for the uplink, apart from operands."""
        self.name = offer.name

    async def join(self) -> None:
        """Introduce the device. Raises Refusal if the server rejects it."""
        await self._channel.send(
            messages.Hello(
                version=self._offer.version,
                name=self._offer.name,
                token=self._offer.token,
                flops_per_s=self._offer.flops_per_s,
                memory_bytes=self._offer.memory_bytes,
                kernel=self._kernel.name,
            )
        )
        match (await self._channel.receive()).message:
            case messages.Welcome(version=version, name=name):
                if version != self._offer.version:
                    raise Refusal(
                        f"the server speaks protocol {version}, this device {self._offer.version}; use the same release"
                    )
                self.name = name
            case messages.Refused(reason=reason):
                raise Refusal(reason)
            case messages.Bye(reason=reason):
                raise ConnectionLost(reason)
            case other:
                raise ProtocolError(f"expected welcome or refused, got {other.type_name()}")

    async def run(self) -> messages.Bye:
        stages = [asyncio.ensure_future(stage) for stage in (self._receive(), self._compute(), self._send())]
        try:
            done, _ = await asyncio.wait(stages, return_when=asyncio.FIRST_COMPLETED)
            first = next(stage for stage in stages if stage in done)  # the receiver first: it has the server's reason
            goodbye = first.result()
            assert goodbye is not None, "only the receiver returns"
            return goodbye
        finally:
            for stage in stages:
                stage.cancel()
            await asyncio.gather(*stages, return_exceptions=True)
            await self._processor.close()
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
            self._down_bytes += received.sustained.size_bytes
            self._down_s += received.sustained.seconds
            self._contribution.down_bytes += len(received.payload)
            self._processor.received(len(received.payload))
            goodbye = await self._handle(received.message, received.payload, received.arrival_s)
            if goodbye is not None:
                return goodbye

    async def _handle(self, message: AnyMessage, payload: Buffer, arrival_s: float) -> messages.Bye | None:
        match message:
            case messages.Store():
                try:
                    self._store.write(message, payload)
                except MemoryError:
                    raise ProtocolError("there is less memory than was offered") from None
                self._work.set()
            case messages.RunTask():
                if len(self._tasks) >= _MAX_TASKS:
                    raise ProtocolError(f"expected at most {_MAX_TASKS} unfinished tasks, got one more")
                self._order += 1
                task = make_task(message.program, self._store, self._kernel)
                if task.room_bytes > self._limit_bytes:  # a list of its parts alone could fill this machine
                    self._fail(message.task, f"{task.room_bytes} bytes of result exceed this device's limit")
                    return None
                self._tasks[message.task] = _ActiveTask(message, task, self._order)
                self._reserve(self._tasks[message.task], task.room_bytes)
                self._work.set()
            case messages.Drop(operands=operands):
                self._store.drop(operands)
            case messages.CancelTasks(tasks=tasks):
                self._cancelled.extend(tasks)
                for task in tasks:
                    self._forget(task)
            case messages.Probe(answer=answer):
                if not 0 <= answer <= PAYLOAD_BYTES:
                    raise ProtocolError(f"expected a probe of at most {PAYLOAD_BYTES} bytes, got {answer}")
                self._answer(messages.Probed(down_s=arrival_s, payload=answer), bytes(answer))
            case messages.Idle(reason=reason):
                if time.monotonic() - self._noticed_at >= _NOTICE_S:
                    self._noticed_at = time.monotonic()
                    self._notice(f"no work for this device: {reason}")
            case messages.Bye():
                return message
            case _:
                raise ProtocolError(f"a server does not send {message.type_name()} here")
        return None

    async def _compute(self) -> messages.Bye | None:
        flops, compute_s = 0.0, 0.0
        while True:
            active, chunk = self._next_chunk()
            if active is None or chunk is None:
                self._work.clear()
                await self._work.wait()
                continue
            try:
                if active.task.room_bytes > self._limit_bytes:
                    raise MemoryError(f"{active.task.room_bytes} bytes of working memory exceed this device's limit")
                begins, active.has_begun = not active.has_begun, True
                encoded, took_s = await self._processor.run(chunk, active.message.format, begins=begins)
            except (MemoryError, RuntimeError) as fault:  # numpy and torch, respectively, when out of memory
                self._forget(active.message.task)
                self._fail(active.message.task, repr(fault)[:200])
                continue
            flops, compute_s = flops + chunk.flops, compute_s + took_s
            if encoded is not None and chunk.part is not None:
                self._queue_result(active, chunk, encoded, flops, compute_s)
                flops, compute_s = 0.0, 0.0

    async def _send(self) -> messages.Bye | None:
        while True:
            _, _, message, payload = await self._outgoing.get()
            if isinstance(message, messages.Result) and message.task in self._cancelled:
                self._unsent_bytes -= len(payload)
                continue  # another device was faster
            await self._channel.send(message, payload)
            self._unsent_bytes -= len(payload)
            self._contribution.up_bytes += message.payload
            self._work.set()

    # -------------------------------------------------------------------------------------------- tasks and results

    def _next_chunk(self) -> tuple[_ActiveTask | None, Chunk | None]:
        """Pick the most urgent chunk that is ready; none while too many bytes wait for the uplink."""
        if self._unsent_bytes > self._limit_bytes:
            return None, None
        for active in sorted(self._tasks.values(), key=lambda entry: (entry.message.priority, entry.order)):
            if active.task.only_returns and self._outgoing.qsize() >= _MAX_QUEUED_RESULTS:
                continue
            chunk = active.task.next_chunk()
            if chunk is not None:
                self._reserve(active, active.task.room_bytes)
                return active, chunk
        return None, None

    def _queue_result(
        self, active: _ActiveTask, chunk: Chunk, encoded: NDArray[np.uint8], flops: float, compute_s: float
    ) -> None:
        part = chunk.part
        assert part is not None
        self._contribution.flops += flops
        self._contribution.compute_s += compute_s
        message = messages.Result(
            task=active.message.task,
            first_row=part.top,
            rows=part.rows,
            first_col=part.left,
            cols=part.cols,
            format=active.message.format,
            flops=flops,
            compute_s=compute_s,
            down_bytes=self._down_bytes,
            down_s=self._down_s,
            payload=len(encoded),
        )
        self._down_bytes, self._down_s = 0, 0.0
        self._enqueue(active.message.priority, message, encoded.data)
        if active.task.finished:
            self._contribution.tasks += 1
            self._forget(active.message.task)

    def _fail(self, task: int, reason: str) -> None:
        self._answer(messages.Failed(task=task, reason=reason), b"")

    def _answer(self, message: messages.FromDevice, payload: Buffer) -> None:
        """Queue an answer ahead of all results, unless the server asks without taking answers."""
        if self._outgoing.qsize() >= _MAX_ANSWERS or self._unsent_bytes + len(payload) > self._limit_bytes:
            raise ProtocolError("expected the server to take answers before it asks for more; it asks on and on")
        self._enqueue(_URGENT, message, payload)

    def _enqueue(self, priority: int, message: messages.FromDevice, payload: Buffer) -> None:
        """Queue a message for the sender, so that neither receiving nor computing waits for the uplink."""
        self._order += 1
        self._unsent_bytes += len(payload)
        self._outgoing.put_nowait((priority, self._order, message, payload))

    def _forget(self, task: int) -> None:
        forgotten = self._tasks.pop(task, None)
        if forgotten is not None:
            self._reserve(forgotten, 0)

    def _reserve(self, active: _ActiveTask, room_bytes: int) -> None:
        self._store.expect_result(room_bytes - active.room_bytes)
        active.room_bytes = room_bytes
