"""A channel within one process: for devices inside the server's process, and for tests without ports."""

from __future__ import annotations

import asyncio

from cleave.errors import ConnectionLost
from cleave.protocol.frames import Buffer
from cleave.transport.base import Channel

_QUEUE_LENGTH = 16  # byte strings in flight before a sender waits


class MemoryChannel(Channel):
    def __init__(
        self, incoming: asyncio.Queue[bytes | None], outgoing: asyncio.Queue[bytes | None], *, guarded: bool = False
    ) -> None:
        super().__init__(guarded=guarded)
        self._incoming, self._outgoing = incoming, outgoing
        self._peer: MemoryChannel | None = None
        self._closed = asyncio.Event()
        self._reason = ""

    async def _send(self, data: Buffer) -> None:
        if self._closed.is_set():
            raise ConnectionLost(self._reason)
        copy = bytes(data)  # the sender may reuse its buffer, as with a socket
        put = asyncio.ensure_future(self._outgoing.put(copy))
        closed = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait([put, closed], return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
            if not put.done():
                put.cancel()
        if not put.done():
            raise ConnectionLost(self._reason)

    async def _receive(self) -> Buffer:
        while self._incoming.empty() and not self._closed.is_set():
            get = asyncio.ensure_future(self._incoming.get())
            closed = asyncio.ensure_future(self._closed.wait())
            try:
                await asyncio.wait([get, closed], return_when=asyncio.FIRST_COMPLETED)
            finally:
                closed.cancel()
                if not get.done():
                    get.cancel()
            if get.done() and not get.cancelled():
                data = get.result()
                if data is not None:
                    return data
        if not self._incoming.empty():
            data = self._incoming.get_nowait()
            if data is not None:
                return data
        raise ConnectionLost(self._reason)

    async def _close(self, reason: str) -> None:
        for end in (self, self._peer):
            if end is not None and not end._closed.is_set():
                end._reason = reason or "closed"
                end._closed.set()


def memory_pair(*, guarded: bool = False) -> tuple[MemoryChannel, MemoryChannel]:
    """Return the server's end, guarded on request as over a network, and the device's end."""
    up: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE_LENGTH)
    down: asyncio.Queue[bytes | None] = asyncio.Queue(_QUEUE_LENGTH)
    server, device = MemoryChannel(up, down, guarded=guarded), MemoryChannel(down, up)
    server._peer, device._peer = device, server  # pyright: ignore[reportPrivateUsage]
    return server, device
