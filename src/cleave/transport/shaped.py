"""Emulate a link of given rate and latency on top of any channel, for networks this machine does not have.

Wraps either end: the server's, or those of devices that one process emulates, so that one process holds what devices
share, such as a Wi-Fi medium. Bytes sent are delayed before the inner channel sees them, bytes received after; nothing
is lost or reordered. `send` returns once the bytes have left, and a full window makes it wait. Times follow the event
loop's clock: exact in virtual time, else as good as its timers, with one timer's lateness made up by the next. Knows
byte strings only.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from cleave.errors import ConnectionLost, InputError
from cleave.protocol.frames import Buffer
from cleave.transport.base import Channel, Flow, Received

_SLICE_BYTES = 64 << 10
"""Bytes one direction of one channel sends before others get their turn ..."""
_SLICE_S = 1e-3  # ... or what the link carries in this time, if more: for shorter slices timers dominate
_WINDOW_BYTES = 8 << 20  # in flight or not yet consumed, before the sender waits
_PIECE_S = 0.5
"""Longest time in which no byte reaches the peer: a part of a payload that takes longer is sent in several, as peers
take a device that moves nothing for stalled."""
_BACK_TO_BACK_S = 5e-3  # bytes that follow this closely were queued behind the ones before
_CLOSE_S = 1.0

End = Literal["server", "device"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """The connection of each device to its server."""

    down_bytes_per_s: float = math.inf
    up_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    """One way."""
    medium_bytes_per_s: float = math.inf
    """Capacity shared by all devices and both directions, such as one Wi-Fi network."""

    def __post_init__(self) -> None:
        rates = (self.down_bytes_per_s, self.up_bytes_per_s, self.medium_bytes_per_s)
        if not (all(rate > 0 for rate in rates) and 0 <= self.latency_s < math.inf):
            raise InputError(f"expected rates above 0 and a latency from 0 up, got {self}; give bytes/s and seconds")


class Medium:
    """A medium shared by several links: one of them sends at a time, in either direction."""

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_s = -math.inf

    def take_turn(self, size_bytes: int, earliest_s: float) -> tuple[float, float]:
        """Reserve the next free slot; return when it begins and ends."""
        begin_s = max(earliest_s, self._free_s)
        self._free_s = begin_s + size_bytes / self.bytes_per_s
        return begin_s, self._free_s


def shaping(link: Link) -> Callable[[Channel], Channel]:
    """Return a wrapper that puts each channel behind such a link, all on one medium."""
    medium = Medium(link.medium_bytes_per_s)
    return lambda channel: Shaped(channel, link, medium)


class Shaped(Channel):
    """One end of a channel as seen over a link, by default the server's and with a medium of its own."""

    def __init__(self, inner: Channel, link: Link, medium: Medium | None = None, *, end: End = "server") -> None:
        super().__init__(address=inner.address)
        self._inner, self._latency_s = inner, link.latency_s
        self._assembler = inner._assembler  # shared, so both are guarded alike
        self._closed = asyncio.Event()
        self._reason = ""
        medium = medium or Medium(link.medium_bytes_per_s)
        down = _Direction(link.down_bytes_per_s, medium, self._closed)
        up = _Direction(link.up_bytes_per_s, medium, self._closed)
        self._out, self._in = (down, up) if end == "server" else (up, down)
        self._delivering: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._header_s = self._arrived_s = 0.0

    async def receive(self) -> Received:
        while True:
            is_header = not self._assembler.waits_for_payload
            data = await self._receive()
            self.received_bytes += len(data)
            self._meter.arrived(len(data), self._arrived_s, is_continued=not is_header)
            if is_header:
                self._header_s = self._arrived_s
            complete = self._assembler.feed(data)
            if complete is not None:
                return Received(*complete, self._arrived_s - self._header_s, self._meter.take())

    def allow(self, payload_bytes: int) -> None:
        self._inner.allow(payload_bytes)

    @property
    def silent_s(self) -> float:
        """Seconds since the peer's last sign of life, or since the link was last busy, as that delays any sign."""
        idle_s = asyncio.get_running_loop().time() - max(self._out.busy_until_s, self._in.busy_until_s)
        return max(0.0, min(idle_s, self._inner.silent_s))

    @property
    def flow(self) -> Flow:
        return Flow(self._out.moved_bytes, self._out.busy_s, self._in.moved_bytes, self._in.busy_s)

    async def _send(self, data: Buffer) -> None:
        self._start_fetching()  # also notices that the peer is gone
        for piece in self._out.pieces(data):
            await self._out.wait_for_room()
            left_s = math.inf if self._closed.is_set() else await self._out.transmit(len(piece))
            if self._closed.is_set():
                raise ConnectionLost(self._reason)
            self._out.put(left_s + self._latency_s, piece)
            if self._delivering is None or self._delivering.done():
                self._delivering = asyncio.get_running_loop().create_task(self._deliver())

    async def _receive(self) -> Buffer:
        self._start_fetching()
        first = await self._in.first()
        if first is None:
            raise ConnectionLost(self._reason)
        self._arrived_s, data = first
        self._in.drop_first()
        return data

    async def _close(self, reason: str) -> None:
        """Wake local waiters at once; bytes already sent still arrive if the peer takes them within _CLOSE_S."""
        self._end(reason or "closed")
        try:
            if self._delivering is not None:
                await asyncio.wait([self._delivering], timeout=_CLOSE_S)
        finally:
            for task in (self._delivering, self._fetching):
                if task is not None:
                    task.cancel()
            await self._inner.close(reason)

    # -------------------------------------------------------------------------------------------- the inner channel

    async def _deliver(self) -> None:
        """Deliver sent bytes to the inner channel when due, until none are in flight."""
        try:
            while self._out.is_busy and (first := await self._out.first()) is not None:
                await self._inner._send(first[1])
                self._out.drop_first()
        except ConnectionLost as fault:
            self._end(str(fault))

    def _start_fetching(self) -> None:
        if self._fetching is None and not self._closed.is_set():
            self._fetching = asyncio.get_running_loop().create_task(self._fetch())

    async def _fetch(self) -> None:
        """Take bytes from the inner channel while the window has room."""
        try:
            while True:
                await self._in.wait_for_room()
                data = await self._inner._receive()
                self._in.put(await self._in.transmit(len(data)) + self._latency_s, data)
        except ConnectionLost as fault:
            self._end(str(fault))

    def _end(self, reason: str) -> None:
        if not self._closed.is_set():
            self._reason = reason
            self._closed.set()
            self._out.changed.set()
            self._in.changed.set()


class _Direction:
    """One direction of a link: bytes leave slice by slice and are then in flight until due.

    Once `closed` is set, nothing waits and everything in flight is due at once.
    """

    def __init__(self, bytes_per_s: float, medium: Medium, closed: asyncio.Event) -> None:
        self._bytes_per_s, self._medium, self._closed = bytes_per_s, medium, closed
        fastest = min(bytes_per_s, medium.bytes_per_s)
        self._slice_bytes = int(min(max(_SLICE_BYTES, fastest * _SLICE_S), _WINDOW_BYTES))
        self._piece_bytes = int(min(max(_SLICE_BYTES, fastest * _PIECE_S), _WINDOW_BYTES))
        self._late_s = 0.0
        self._in_flight: deque[tuple[float, Buffer]] = deque()
        self._in_flight_bytes = 0
        self.changed = asyncio.Event()
        self.busy_until_s = -math.inf
        self.moved_bytes = 0
        self._busy_s, self._began_s = 0.0, 0.0

    @property
    def busy_s(self) -> float:
        """Seconds in which bytes were leaving or waited for the medium."""
        is_sending = self.busy_until_s == math.inf
        return self._busy_s + (asyncio.get_running_loop().time() - self._began_s if is_sending else 0.0)

    @property
    def is_busy(self) -> bool:
        return bool(self._in_flight)

    def pieces(self, data: Buffer) -> Iterator[Buffer]:
        """Cut what takes long into parts that the peer sees one by one; headers are short and stay whole."""
        if len(data) <= self._piece_bytes:
            yield data
            return
        view = memoryview(data)
        for start in range(0, len(view), self._piece_bytes):
            yield view[start : start + self._piece_bytes]

    async def transmit(self, size_bytes: int) -> float:
        """Wait until `size_bytes` have left; return when that was."""
        now_s = asyncio.get_running_loop().time()
        at_s = now_s - self._late_s if now_s - self.busy_until_s < _BACK_TO_BACK_S else now_s
        self.busy_until_s, self._began_s = math.inf, now_s
        try:
            for start in range(0, size_bytes, self._slice_bytes):
                slice_bytes = min(self._slice_bytes, size_bytes - start)
                begin_s, end_s = self._medium.take_turn(slice_bytes, at_s)
                at_s = max(end_s, begin_s + slice_bytes / self._bytes_per_s)
                await self._wait_until(at_s)
                if self._closed.is_set():
                    break
                self.moved_bytes += slice_bytes
        finally:
            self.busy_until_s = asyncio.get_running_loop().time()
            self._busy_s += self.busy_until_s - self._began_s
            self._late_s = self.busy_until_s - at_s
        return at_s

    def put(self, due_s: float, data: Buffer) -> None:
        self._in_flight.append((due_s, data))
        self._in_flight_bytes += len(data)
        self.changed.set()

    async def first(self) -> tuple[float, Buffer] | None:
        """Wait until the first bytes in flight are due and return (due time, bytes); None when no more can come."""
        while not self._in_flight:
            if self._closed.is_set():
                return None
            self.changed.clear()
            await self.changed.wait()
        await self._wait_until(self._in_flight[0][0])
        return self._in_flight[0]

    def drop_first(self) -> None:
        self._in_flight_bytes -= len(self._in_flight.popleft()[1])
        self.changed.set()

    async def wait_for_room(self) -> None:
        while self._in_flight_bytes > _WINDOW_BYTES and not self._closed.is_set():
            self.changed.clear()
            await self.changed.wait()

    async def _wait_until(self, moment_s: float) -> None:
        if moment_s > asyncio.get_running_loop().time() and not self._closed.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout_at(moment_s):
                    await self._closed.wait()
