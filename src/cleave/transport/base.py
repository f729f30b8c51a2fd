"""The channel interface: ordered byte strings in both directions until one side closes, and messages on top.

Implementations provide three verbs, `_send`, `_receive` and `_close`; framing, limits and link timing live here, once.
A channel belongs to one event loop, with any number of senders and one receiver. The server's end starts guarded: until
the peer is admitted it may send only headers, so a stranger cannot claim more memory than one header.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

from cleave.errors import ConnectionLost
from cleave.protocol import messages
from cleave.protocol.frames import PAYLOAD_BYTES, Assembler, Buffer, parts
from cleave.protocol.messages import AnyMessage
from cleave.transport.link_meter import NOTHING, TELLING_BYTES, LinkMeter, Sustained


@dataclass(frozen=True, slots=True)
class Received:
    """A message, its payload, and what receiving it says about the link."""

    message: AnyMessage
    payload: Buffer
    link_s: float
    """Seconds from the arrival of the header to the end of the payload."""
    sustained: Sustained = NOTHING
    """What its bytes say about the link's sustained rate."""

    @property
    def arrival_s(self) -> float:
        """Seconds the payload takes at the link's sustained rate, or took if that cannot be told."""
        size_bytes, seconds = self.sustained
        is_told = size_bytes >= TELLING_BYTES and seconds > 0
        return len(self.payload) * seconds / size_bytes if is_told else self.link_s


class Flow(NamedTuple):
    """Traffic of a channel so far, parts of unfinished messages included where the transport can tell."""

    sent_bytes: int
    sending_s: float
    """Seconds in which bytes waited to leave all the time; 0 where the transport cannot tell. The same below."""
    received_bytes: int
    receiving_s: float


class Channel(ABC):
    """One end of a connection. `send` waits for a slow peer; both raise ConnectionLost once it is closed."""

    def __init__(self, *, guarded: bool = False, address: str = "") -> None:
        self.address = address
        """The peer's network address; empty within a process."""
        self._assembler = Assembler(0 if guarded else PAYLOAD_BYTES)
        self._meter = LinkMeter()
        self._heard_s: float | None = None
        self._sending = asyncio.Lock()
        self._is_broken = False
        self.sent_bytes = 0
        self.received_bytes = 0

    async def send(self, message: AnyMessage, payload: Buffer = b"") -> None:
        """Send a message. The payload may be read until it has arrived, so the caller must not modify it."""
        assert message.payload == len(payload), "a message announces just what it carries"
        header = messages.encode(message)
        async with self._sending:
            if self._is_broken:
                raise ConnectionLost("a message was cut short")
            self._is_broken = True  # after a partial message nothing more can be sent
            await self._send(header)
            for part in parts(payload):
                await self._send(part)
            self._is_broken = False
        self.sent_bytes += len(header) + len(payload)

    async def receive(self) -> Received:
        """Return the next complete message."""
        started = 0.0
        while True:
            data = await self._receive()
            self._heard_s = asyncio.get_running_loop().time()
            self.received_bytes += len(data)
            if not self._assembler.waits_for_payload:
                started = time.perf_counter()
            complete = self._assembler.feed(data)
            if complete is not None:
                return Received(*complete, time.perf_counter() - started, self._meter.take())

    async def close(self, reason: str = "") -> None:
        await self._close(reason)

    def allow(self, payload_bytes: int) -> None:
        """Accept payloads of up to `payload_bytes` from now on; a guarded channel accepts none before."""
        self._assembler.max_payload_bytes = payload_bytes

    @property
    def silent_s(self) -> float:
        """Seconds since the peer's last sign of life."""
        now_s = asyncio.get_running_loop().time()
        if self._heard_s is None:
            self._heard_s = now_s
        return now_s - self._heard_s

    @property
    def flow(self) -> Flow:
        return Flow(self.sent_bytes, 0.0, self.received_bytes, 0.0)

    @property
    def moved_bytes(self) -> int:
        """Bytes sent and received, including parts of unfinished messages where the transport can tell."""
        flow = self.flow
        return flow.sent_bytes + flow.received_bytes

    @abstractmethod
    async def _send(self, data: Buffer) -> None: ...

    @abstractmethod
    async def _receive(self) -> Buffer: ...

    @abstractmethod
    async def _close(self, reason: str) -> None: ...
