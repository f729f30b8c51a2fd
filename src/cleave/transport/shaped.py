"""A channel with a link of a given speed: for tests and benchmarks of networks that this machine does not have.

It stands between a server and the channel of a device, so one process holds what devices share, such as one Wi-Fi. What
goes down is held back before the inner channel gets it, what comes up after. It delays, and never loses or reorders;
`send` returns when the bytes have left, and who has no room makes the sender wait. All by the event loop's clock: in
virtual time to the microsecond, else as well as timers are, and where a timer was late the next bytes are not. It knows
byte strings alone, and nothing of what a planner makes of such a link.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from cleave.errors import ConnectionLost, InputError
from cleave.protocol.frames import Buffer
from cleave.transport.base import Channel, Received

_SLICE_BYTES = 64 << 10
"""What one way of one channel may send before others have their turn ..."""
_SLICE_S = 1e-3  # ... or as much as takes so long, as a timer costs more than the bytes would
_WINDOW_BYTES = 8 << 20  # on their way, or not yet taken by whom they are for, before the next bytes wait
_GOES_ON_S = 5e-3  # bytes that follow others so soon were waiting for them
_CLOSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How each device of a server is connected to it."""

    down_bytes_per_s: float = math.inf
    up_bytes_per_s: float = math.inf
    latency_s: float = 0.0
    """One way, for the first byte as for the last."""
    medium_bytes_per_s: float = math.inf
    """Of all devices together, both ways: what they share, such as one Wi-Fi."""

    def __post_init__(self) -> None:
        rates = (self.down_bytes_per_s, self.up_bytes_per_s, self.medium_bytes_per_s)
        if not (all(rate > 0 for rate in rates) and 0 <= self.latency_s < math.inf):
            raise InputError(f"expected rates above 0 and a latency from 0 up, got {self}; give bytes/s and seconds")


class Medium:
    """What several links share: only one of them sends at a time, in either direction."""

    def __init__(self, bytes_per_s: float = math.inf) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_s = -math.inf

    def take_turn(self, size_bytes: int, earliest_s: float) -> tuple[float, float]:
        """When a slice begins and ends, after all that asked before."""
        begin_s = max(earliest_s, self._free_s)
        self._free_s = begin_s + size_bytes / self.bytes_per_s
        return begin_s, self._free_s


def shaping(link: Link) -> Callable[[Channel], Channel]:
    """What gives each channel such a link, all of them on one medium."""
    medium = Medium(link.medium_bytes_per_s)
    return lambda channel: Shaped(channel, link, medium)


class Shaped(Channel):
    """Another channel, as a server sees it over a link; if no medium is given, over one of its own."""

    def __init__(self, inner: Channel, link: Link, medium: Medium | None = None) -> None:
        super().__init__(address=inner.address)
        self._inner, self._latency_s = inner, link.latency_s
        self._assembler = inner._assembler  # guarded as long as the inner channel is
        self._over = asyncio.Event()
        self._reason = ""
        medium = medium or Medium(link.medium_bytes_per_s)
        self._down = _Way(link.down_bytes_per_s, medium, self._over)
        self._up = _Way(link.up_bytes_per_s, medium, self._over)
        self._bringing: asyncio.Task[None] | None = None
        self._fetching: asyncio.Task[None] | None = None
        self._header_s = self._arrived_s = 0.0

    async def receive(self) -> Received:
        while True:
            is_header = not self._assembler.waits_for_payload
            data = await self._receive()
            self.received_bytes += len(data)
            if is_header:
                self._header_s = self._arrived_s
            whole = self._assembler.feed(data)
            if whole is not None:
                return Received(*whole, self._arrived_s - self._header_s)

    def allow(self, payload_bytes: int) -> None:
        self._inner.allow(payload_bytes)

    @property
    def silent_s(self) -> float:
        """Since the other side's last sign of life, or since bytes were last on the link, which nobody hears sooner."""
        idle_s = asyncio.get_running_loop().time() - max(self._down.busy_until_s, self._up.busy_until_s)
        return max(0.0, min(idle_s, self._inner.silent_s))

    @property
    def moved_bytes(self) -> int:
        return self._down.moved_bytes + self._up.moved_bytes

    async def _send(self, data: Buffer) -> None:
        self._fetch()  # also to learn that the other side is gone
        await self._down.room()
        left_s = math.inf if self._over.is_set() else await self._down.carry(len(data))
        if self._over.is_set():
            raise ConnectionLost(self._reason)
        self._down.put(left_s + self._latency_s, data)
        if self._bringing is None or self._bringing.done():
            self._bringing = asyncio.get_running_loop().create_task(self._bring())

    async def _receive(self) -> Buffer:
        self._fetch()
        first = await self._up.first()
        if first is None:
            raise ConnectionLost(self._reason)
        self._arrived_s, data = first
        self._up.drop_first()
        return data

    async def _close(self, reason: str) -> None:
        """Who waits here learns of it now; what has left still arrives, if the other side takes it in time."""
        self._end(reason or "closed")
        try:
            if self._bringing is not None:
                await asyncio.wait([self._bringing], timeout=_CLOSE_S)
        finally:
            for task in (self._bringing, self._fetching):
                if task is not None:
                    task.cancel()
            await self._inner.close(reason)

    # -------------------------------------------------------------------------------------------- the inner channel

    async def _bring(self) -> None:
        """To the inner channel what has left, each when it is due; until nothing is on its way."""
        try:
            while self._down.is_busy and (first := await self._down.first()) is not None:
                await self._inner._send(first[1])
                self._down.drop_first()
        except ConnectionLost as fault:
            self._end(str(fault))

    def _fetch(self) -> None:
        if self._fetching is None and not self._over.is_set():
            self._fetching = asyncio.get_running_loop().create_task(self._fetch_all())

    async def _fetch_all(self) -> None:
        """From the inner channel what comes, as long as there is room."""
        try:
            while True:
                await self._up.room()
                data = await self._inner._receive()
                self._up.put(await self._up.carry(len(data)) + self._latency_s, data)
        except ConnectionLost as fault:
            self._end(str(fault))

    def _end(self, reason: str) -> None:
        if not self._over.is_set():
            self._reason = reason
            self._over.set()
            self._down.news.set()
            self._up.news.set()


class _Way:
    """One direction of a link: bytes leave slice by slice, and are then on their way until they are due.

    When it is `over`, nobody waits any more, and what is on its way is due at once.
    """

    def __init__(self, bytes_per_s: float, medium: Medium, over: asyncio.Event) -> None:
        self._bytes_per_s, self._medium, self._over = bytes_per_s, medium, over
        fastest = min(bytes_per_s, medium.bytes_per_s)
        self._slice_bytes = int(min(max(_SLICE_BYTES, fastest * _SLICE_S), _WINDOW_BYTES))
        self._late_s = 0.0
        self._on_way: deque[tuple[float, Buffer]] = deque()
        self._on_way_bytes = 0
        self.news = asyncio.Event()
        self.busy_until_s = -math.inf
        self.moved_bytes = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._on_way)

    async def carry(self, size_bytes: int) -> float:
        """Wait until so many bytes have left, and say when that was."""
        now_s = asyncio.get_running_loop().time()
        at_s = now_s - self._late_s if now_s - self.busy_until_s < _GOES_ON_S else now_s
        self.busy_until_s = math.inf
        try:
            for start in range(0, size_bytes, self._slice_bytes):
                slice_bytes = min(self._slice_bytes, size_bytes - start)
                begin_s, end_s = self._medium.take_turn(slice_bytes, at_s)
                at_s = max(end_s, begin_s + slice_bytes / self._bytes_per_s)
                await self._until(at_s)
                if self._over.is_set():
                    break
                self.moved_bytes += slice_bytes
        finally:
            self.busy_until_s = asyncio.get_running_loop().time()
            self._late_s = self.busy_until_s - at_s
        return at_s

    def put(self, due_s: float, data: Buffer) -> None:
        self._on_way.append((due_s, data))
        self._on_way_bytes += len(data)
        self.news.set()

    async def first(self) -> tuple[float, Buffer] | None:
        """When the first on its way was due and what it is, at that moment; None when nothing more can come."""
        while not self._on_way:
            if self._over.is_set():
                return None
            self.news.clear()
            await self.news.wait()
        await self._until(self._on_way[0][0])
        return self._on_way[0]

    def drop_first(self) -> None:
        self._on_way_bytes -= len(self._on_way.popleft()[1])
        self.news.set()

    async def room(self) -> None:
        while self._on_way_bytes > _WINDOW_BYTES and not self._over.is_set():
            self.news.clear()
            await self.news.wait()

    async def _until(self, moment_s: float) -> None:
        if moment_s > asyncio.get_running_loop().time() and not self._over.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout_at(moment_s):
                    await self._over.wait()
