"""Two ends of a channel within one process: for devices in the server's own process, and for tests without ports."""

from __future__ import annotations

import asyncio

from cleave.errors import ConnectionLost
from cleave.protocol.frames import Buffer
from cleave.transport.base import Channel

_ROOM = 16  # byte strings on their way before a sender waits


class MemoryChannel(Channel):
    def __init__(
        self, incoming: asyncio.Queue[bytes | None], outgoing: asyncio.Queue[bytes | None], *, guarded: bool = False
    ) -> None:
        super().__init__(guarded=guarded)
        self._incoming, self._outgoing = incoming, outgoing
        self._other: MemoryChannel | None = None
        self._closed = asyncio.Event()
        self._reason = ""

    async def _send(self, data: Buffer) -> None:
        if self._closed.is_set():
            raise ConnectionLost(self._reason)
        copy = bytes(data)  # the sender may reuse its buffer, as with a socket
        putting = asyncio.ensure_future(self._outgoing.put(copy))
        closing = asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait([putting, closing], return_when=asyncio.FIRST_COMPLETED)
        finally:
            closing.cancel()
            if not putting.done():
                putting.cancel()
        if not putting.done():
            raise ConnectionLost(self._reason)

    async def _receive(self) -> Buffer:
        while self._incoming.empty() and not self._closed.is_set():
            getting = asyncio.ensure_future(self._incoming.get())
            closing = asyncio.ensure_future(self._closed.wait())
            try:
                await asyncio.wait([getting, closing], return_when=asyncio.FIRST_COMPLETED)
            finally:
                closing.cancel()
                if not getting.done():
                    getting.cancel()
            if getting.done() and not getting.cancelled():
                data = getting.result()
                if data is not None:
                    return data
        if not self._incoming.empty():
            data = self._incoming.get_nowait()
            if data is not None:
                return data
        raise ConnectionLost(self._reason)

    async def _close(self, reason: str) -> None:
        for end in (self, self._other):
            if end is not None and not end._closed.is_set():
                end._reason = reason or "closed"
                end._closed.set()


def memory_pair(*, guarded: bool = False) -> tuple[MemoryChannel, MemoryChannel]:
    """The server's end, guarded as over a network if so wished, and the device's."""
    one: asyncio.Queue[bytes | None] = asyncio.Queue(_ROOM)
    two: asyncio.Queue[bytes | None] = asyncio.Queue(_ROOM)
    left, right = MemoryChannel(one, two, guarded=guarded), MemoryChannel(two, one)
    left._other, right._other = right, left  # pyright: ignore[reportPrivateUsage]
    return left, right
