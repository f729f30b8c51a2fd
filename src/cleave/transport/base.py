"""A channel: byte strings in order, both ways, until one side closes; and messages over it.

Implementations give three verbs (`_send`, `_receive`, `_close`); framing, limits and the clock of a link are here,
once. A channel is used from one event loop: any number of senders, one receiver. A server's end begins guarded: who has
not yet said who it is may send headers and nothing else, so a stranger costs no more memory than a header has.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

from cleave.errors import ConnectionLost
from cleave.protocol import messages
from cleave.protocol.frames import PAYLOAD_BYTES, Assembler, Buffer, parts
from cleave.protocol.messages import AnyMessage


@dataclass(frozen=True, slots=True)
class Received:
    message: AnyMessage
    payload: Buffer
    link_s: float
    """From the header's arrival to the payload's end: how long the link was busy with it."""


class Channel(ABC):
    """`send` waits while the other side is slow; `receive` raises ConnectionLost when it is over."""

    def __init__(self, *, guarded: bool = False, address: str = "") -> None:
        self.address = address
        """Where the other side is, as the network tells; empty within a process."""
        self._assembler = Assembler(0 if guarded else PAYLOAD_BYTES)
        self._heard_s: float | None = None
        self._sending = asyncio.Lock()
        self._torn = False
        self.sent_bytes = 0
        self.received_bytes = 0

    async def send(self, message: AnyMessage, payload: Buffer = b"") -> None:
        """Send a message; its payload may be read until it has arrived, so it must not change before."""
        assert message.payload == len(payload), "a message announces just what it carries"
        header = messages.encode(message)
        async with self._sending:
            if self._torn:
                raise ConnectionLost("a message was cut short")
            self._torn = True  # unless all of it goes out, nothing more can
            await self._send(header)
            for part in parts(payload):
                await self._send(part)
            self._torn = False
        self.sent_bytes += len(header) + len(payload)

    async def receive(self) -> Received:
        started = 0.0
        while True:
            data = await self._receive()
            self._heard_s = asyncio.get_running_loop().time()
            self.received_bytes += len(data)
            if not self._assembler.waits_for_payload:
                started = time.perf_counter()
            whole = self._assembler.feed(data)
            if whole is not None:
                return Received(whole[0], whole[1], time.perf_counter() - started)

    async def close(self, reason: str = "") -> None:
        await self._close(reason)

    def allow(self, payload_bytes: int) -> None:
        """From now on take payloads of at most so many bytes; a guarded channel takes none before."""
        self._assembler.most_payload = payload_bytes

    @property
    def silent_s(self) -> float:
        """Seconds since the other side's last sign of life."""
        now_s = asyncio.get_running_loop().time()
        if self._heard_s is None:
            self._heard_s = now_s
        return now_s - self._heard_s

    @property
    def moved_bytes(self) -> int:
        """Both ways so far, parts of messages under way included where they can be seen."""
        return self.sent_bytes + self.received_bytes

    @abstractmethod
    async def _send(self, data: Buffer) -> None: ...

    @abstractmethod
    async def _receive(self) -> Buffer: ...

    @abstractmethod
    async def _close(self, reason: str) -> None: ...
