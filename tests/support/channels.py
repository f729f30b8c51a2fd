"""Both ends of a channel as transport tests drive them, each from the test's own event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

from cleave.protocol.frames import PAYLOAD_BYTES, Buffer
from cleave.protocol.messages import AnyMessage, Store
from cleave.transport.base import Channel, Received

SOON_S = 120.0
"""Deadline far longer than anything here takes, so that a hanging channel fails instead of blocking the suite."""

Result = TypeVar("Result")


class End(Protocol):
    """Either end of a channel as a test sees it."""

    @property
    def sent_bytes(self) -> int: ...

    @property
    def received_bytes(self) -> int: ...

    async def send(self, message: AnyMessage, payload: Buffer = b"") -> None: ...

    async def receive(self) -> Received: ...

    async def close(self, reason: str = "") -> None: ...

    async def send_raw(self, data: bytes) -> None: ...


class Here:
    """A channel in the test's own event loop."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.send, self.receive, self.close = channel.send, channel.receive, channel.close

    @property
    def sent_bytes(self) -> int:
        return self.channel.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self.channel.received_bytes

    async def send_raw(self, data: bytes) -> None:
        await self.channel._send(data)


class Abroad:
    """A channel in another event loop; each call runs there and is awaited here."""

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        self.channel, self._loop = channel, loop

    @property
    def sent_bytes(self) -> int:
        return self.channel.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self.channel.received_bytes

    async def send(self, message: AnyMessage, payload: Buffer = b"") -> None:
        await self._there(self.channel.send(message, payload))

    async def receive(self) -> Received:
        return await self._there(self.channel.receive())

    async def close(self, reason: str = "") -> None:
        await self._there(self.channel.close(reason))

    async def send_raw(self, data: bytes) -> None:
        await self._there(self.channel._send(data))

    async def _there(self, verb: Coroutine[Any, Any, Result]) -> Result:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(verb, self._loop))


class Doorman:
    """Stand-in for a cluster: hands out incoming channels, and keeps each open until told to close."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._come: asyncio.Queue[tuple[Channel, asyncio.Event]] = asyncio.Queue()

    async def serve(self, channel: Channel) -> None:
        channel.allow(PAYLOAD_BYTES)
        over = asyncio.Event()
        await self._come.put((channel, over))
        await over.wait()
        await channel.close()

    async def next(self) -> tuple[Channel, asyncio.Event]:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._come.get(), self.loop))

    async def close(self, reason: str, *, rejoin: bool) -> None:
        pass


Pair = tuple[End, End]


def filled(size: int, seed: int = 0) -> bytes:
    """Bytes whose values reveal their position."""
    pattern = bytes((i * 7 + seed) % 251 for i in range(251))
    return (pattern * (size // 251 + 1))[:size]


def strip(number: int, payload: Buffer) -> Store:
    return Store(operand=number, rows=1, cols=1, format="fp32", first_row=0, strip_rows=1, payload=len(payload))


async def send_all(end: End, payloads: list[bytes]) -> None:
    for number, payload in enumerate(payloads):
        await end.send(strip(number, payload), payload)


async def receive_all(end: End, payloads: list[bytes]) -> None:
    for number, payload in enumerate(payloads):
        received = await end.receive()
        assert received.message == strip(number, payload)
        assert received.payload == payload
        assert received.link_s >= 0
