"""Emulate a link on a device's own socket, byte by byte: the server sees what it would see over that link.

`Shaped` delays whole byte strings, which is exact in virtual time. A server at the other end of a socket also looks at
how the pieces of a message arrive and at when its own bytes are taken. So this sits between a protocol and its
transport: what is written leaves in slices, each when the link has carried it, and reading pauses until the link would
have delivered a slice. The system's buffers do the rest, as they do for a real link. The latency of both ways is spent
on the way up, where no answer to anything can tell the difference. Knows neither frames nor messages.
"""

from __future__ import annotations

import asyncio
import math
import socket
from collections import deque
from collections.abc import Callable
from typing import Any, cast

from cleave.protocol.frames import Buffer
from cleave.transport.shaped import Link, Medium
from cleave.transport.stream import Stream

_SLICE_S = 5e-3
"""Time in which a link carries a slice: longer than a timer is late, shorter than anything that is measured."""
_LEAST_SLICE_BYTES, _MOST_SLICE_BYTES = 4 << 10, 256 << 10
_BACK_TO_BACK_S = 5e-3
"""Bytes that follow a timer this closely were waiting for it."""
_UNREAD_BYTES = 128 << 10
"""Most bytes that the system should hold for us: more would be taken from the server sooner than over the link."""


class Lane:
    """One direction of a link. Pure: the caller supplies the time."""

    def __init__(self, bytes_per_s: float, medium: Medium) -> None:
        self._bytes_per_s, self._medium = bytes_per_s, medium
        fastest = min(bytes_per_s, medium.bytes_per_s)
        self.slice_bytes = int(min(max(fastest * _SLICE_S, _LEAST_SLICE_BYTES), _MOST_SLICE_BYTES))
        self._free_s = self._woken_s = -math.inf

    def reserve(self, size_bytes: int, now_s: float) -> float:
        """Send the next slice; return when it has been carried."""
        earliest_s = self._free_s if now_s - self._woken_s < _BACK_TO_BACK_S else now_s
        begin_s, end_s = self._medium.take_turn(size_bytes, earliest_s)
        self._free_s = max(end_s, begin_s + size_bytes / self._bytes_per_s)
        return self._free_s

    def carried(self, now_s: float) -> None:
        """Note that the slice was seen to be carried, which may be a little late: the next one makes up for it."""
        self._woken_s = now_s


class PacedTransport(asyncio.Transport):
    """What the protocol writes to; it leaves at the rate of the link."""

    def __init__(
        self, inner: asyncio.Transport, stream: Stream, lane: Lane, latency_s: float, read: Callable[[bool], None]
    ) -> None:
        """`read` is told whether the stream wants to read."""
        super().__init__()
        self._inner, self._stream, self._lane, self._latency_s, self._read = inner, stream, lane, latency_s, read
        self._loop = asyncio.get_running_loop()
        self._queue: deque[memoryview] = deque()
        self._queued_bytes = 0
        self._in_flight: deque[bytes] = deque()
        self._in_flight_bytes = 0
        self._high_bytes, self._low_bytes = 64 << 10, 16 << 10
        self._is_sending = self._has_paused = self._is_closing = self._is_lost = False

    def write(self, data: Buffer) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        if self._is_closing or not len(data):
            return
        self._queue.append(memoryview(data))
        self._queued_bytes += len(data)
        if self.get_write_buffer_size() > self._high_bytes and not self._has_paused:
            self._has_paused = True
            self._stream.pause_writing()
        if not self._is_sending:
            self._send_slice()

    def close(self) -> None:
        """Close once everything written has left."""
        self._is_closing = True
        self._close_if_empty()

    def abort(self) -> None:
        self._is_closing = True
        self._drop()
        self._inner.abort()

    def lost(self) -> None:
        """Forget what cannot be sent any more."""
        self._is_lost = True
        self._drop()

    def is_closing(self) -> bool:
        return self._is_closing or self._inner.is_closing()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high_bytes = 64 << 10 if high is None else high
        self._low_bytes = self._high_bytes // 4 if low is None else low

    def get_write_buffer_size(self) -> int:
        return self._queued_bytes + self._in_flight_bytes + self._inner.get_write_buffer_size()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._inner.get_extra_info(name, default)

    def pause_reading(self) -> None:
        self._read(False)

    def resume_reading(self) -> None:
        self._read(True)

    def _send_slice(self) -> None:
        """Take the next slice off the queue; it is carried when the lane says so, and arrives after the latency."""
        parts: list[memoryview] = []
        room = self._lane.slice_bytes
        while self._queue and room:
            first = self._queue.popleft()
            if len(first) > room:
                self._queue.appendleft(first[room:])
                first = first[:room]
            parts.append(first)
            room -= len(first)
        taken = b"".join(parts)
        self._queued_bytes -= len(taken)
        self._in_flight.append(taken)
        self._in_flight_bytes += len(taken)
        self._is_sending = True
        carried_s = self._lane.reserve(len(taken), self._loop.time())
        self._loop.call_at(carried_s, self._slice_carried)
        self._loop.call_at(carried_s + self._latency_s, self._slice_arrived)

    def _slice_carried(self) -> None:
        self._is_sending = False
        self._lane.carried(self._loop.time())
        if self._queue:
            self._send_slice()

    def _slice_arrived(self) -> None:
        if not self._in_flight:  # dropped
            return
        arrived = self._in_flight.popleft()
        self._in_flight_bytes -= len(arrived)
        if self._inner.is_closing():  # as when the server closed it meanwhile
            self._drop()
            return
        self._inner.write(arrived)
        self.drained()
        self._close_if_empty()

    def drained(self) -> None:
        """Let the stream write again if little is left to send."""
        if self._has_paused and self.get_write_buffer_size() <= self._low_bytes:
            self._has_paused = False
            self._stream.resume_writing()

    def _close_if_empty(self) -> None:
        if self._is_closing and not (self._queue or self._in_flight or self._is_lost):
            self._inner.close()

    def _drop(self) -> None:
        self._queue.clear()
        self._in_flight.clear()
        self._queued_bytes = self._in_flight_bytes = 0


class PacedProtocol(asyncio.BufferedProtocol):
    """Put a stream behind a link: the socket feeds this, and this feeds the stream."""

    def __init__(self, stream: Stream, link: Link, medium: Medium | None = None) -> None:
        self.stream = stream
        medium = medium or Medium(link.medium_bytes_per_s)
        self._down, self._up = Lane(link.down_bytes_per_s, medium), Lane(link.up_bytes_per_s, medium)
        self._latency_s = 2 * link.latency_s
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._paced: PacedTransport | None = None
        self._unseen_bytes = 0
        self._carrying: asyncio.TimerHandle | None = None
        self._stream_reads = self._is_reading = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        raw: socket.socket | None = transport.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _UNREAD_BYTES)
        self._paced = PacedTransport(self._transport, self.stream, self._up, self._latency_s, self._set_stream_reads)
        self.stream.connection_made(self._paced)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._carrying is not None:
            self._carrying.cancel()
            self._deliver()
        if self._paced is not None:
            self._paced.lost()
        self.stream.connection_lost(exc)

    def resume_writing(self) -> None:
        if self._paced is not None:
            self._paced.drained()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.stream.get_buffer(sizehint)[: self._down.slice_bytes]

    def buffer_updated(self, nbytes: int) -> None:
        """Hold bytes back, and read no others, until the link has carried them."""
        self._unseen_bytes = nbytes
        self._carrying = self._loop.call_at(self._down.reserve(nbytes, self._loop.time()), self._carried)
        self._update_reading()

    def eof_received(self) -> bool:
        return self.stream.eof_received()

    def _carried(self) -> None:
        self._down.carried(self._loop.time())
        self._deliver()
        self._update_reading()

    def _deliver(self) -> None:
        self._carrying = None
        self.stream.buffer_updated(self._unseen_bytes)

    def _set_stream_reads(self, reads: bool) -> None:
        self._stream_reads = reads
        self._update_reading()

    def _update_reading(self) -> None:
        """Read from the socket while both the link and the stream would."""
        reads = self._stream_reads and self._carrying is None
        if reads == self._is_reading or self._transport is None or self._transport.is_closing():
            return
        self._is_reading = reads
        if reads:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()
