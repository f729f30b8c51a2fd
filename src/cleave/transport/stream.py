"""WebSocket frames (RFC 6455) over an asyncio transport, for large binary messages.

Payloads are received in place: the kernel writes into the final buffer, which is handed out as a view. Existing
libraries copy every received byte three more times, which cost a device half as much time as its products. Supports no
extensions; takes text as bytes, joins fragments, sends and answers pings. `websocket.py` does the handshake.

No peer can make it hold more than a few megabytes: a frame's size is checked before its buffer is allocated, queued
messages count with their overhead, fragments share one buffer, and peers that flood with empty frames or trickle bytes
are disconnected.
"""

from __future__ import annotations

import asyncio
import ipaddress
import os
import struct
import sys
from collections import deque
from typing import cast

import numpy as np

try:
    from websockets.speedups import apply_mask
except ImportError:  # the pure Python version, for platforms without the compiled one
    from websockets.utils import apply_mask

from cleave.errors import ConnectionLost
from cleave.printable import printable
from cleave.protocol.frames import MESSAGE_BYTES, Buffer
from cleave.transport.base import Flow
from cleave.transport.kernel_queue import unacknowledged_bytes
from cleave.transport.link_meter import BURST_BYTES, LinkMeter

PING_S = 20.0
"""Ping after this much silence; disconnect after as much again without an answer."""
IDLE_FRAMES = 4096
"""Most pings, pongs and fragments within PING_S without a complete message; more are a flood."""

_TRICKLE_BYTES = 8 << 10  # per PING_S while a frame is in progress; less than this twice in a row is a disconnect
_OVERHEAD_BYTES = 512  # Python's cost of holding a message, however short
_CONTROL_BYTES = 125  # longest ping, pong or close (RFC 6455)
_CLOSE_S = 2.0
_SCRATCH_BYTES = 16 << 10  # for headers and small messages; payloads bypass it
_QUEUED_BYTES = 8 << 20  # received and not yet consumed, before reading pauses
_CONTINUATION, _BINARY, _CLOSE, _PING, _PONG = 0x0, 0x2, 0x8, 0x9, 0xA
_OPCODES = {_CONTINUATION, 0x1, _BINARY, _CLOSE, _PING, _PONG}  # 0x1: text, taken as bytes
_FIN, _MASKED = 0x80, 0x80
_NO_MASK = bytes(4)
_TOO_BIG, _POLICY, _PROTOCOL_FAULT, _NORMAL = 1009, 1008, 1002, 1000


class Stream(asyncio.BufferedProtocol):
    """One end of a connection. A client's end masks what it sends, as RFC 6455 requires.

    Masks protect middleboxes from bytes that somebody chose to look like another protocol. Where none can see them,
    over TLS and within a machine, the mask is 0, which leaves the bytes as they are and costs neither end a pass over
    them.
    """

    def __init__(self, *, is_client: bool) -> None:
        self.max_message_bytes = MESSAGE_BYTES
        """Largest message accepted from the peer; a server raises it once the device is admitted."""
        self.meter = LinkMeter()
        self.is_guarded = False
        """Whether only one message at a time is accepted, as from a peer that is not admitted yet."""
        self._is_client = is_client
        self._is_private = False
        """Whether nobody between the two ends sees the bytes."""
        self._gathers = True
        """Whether the transport writes several buffers without joining them first."""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._pending = bytearray()
        """Small frames that have not been written."""
        self._start = self._end = 0
        self._payload: memoryview | None = None
        self._filled = 0
        self._head = (0, b"")
        self._fragments: bytearray | None = None
        self._idle_frames = 0
        self._messages: deque[Buffer] = deque()
        self._queued_bytes = 0
        self._reading_paused = False
        self._arrived: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._lost: str | None = None
        self._closed = asyncio.Event()
        self._heard = self._loop.time()
        self._received_bytes = self._written_bytes = self._taken_bytes = self._unsent_bytes = 0
        self._last_flow, self._sending_s = (self._heard, 0, 0), 0.0
        """When it was last asked for, bytes carried and bytes waiting then."""
        self._last_check = (0, 0, False, False)
        self._slow_checks = 0
        self._keepalive: asyncio.TimerHandle | None = None

    # -------------------------------------------------------------------------------------------- channel interface

    async def send(self, data: Buffer) -> None:
        if self._lost is not None:
            raise ConnectionLost(self._lost)
        self._write_frame(_BINARY, data)
        if not self._writable.is_set():
            await self._writable.wait()
            if self._lost is not None:
                raise ConnectionLost(self._lost)

    async def receive(self) -> Buffer:
        while not self._messages:
            if self._lost is not None:
                raise ConnectionLost(self._lost)
            self._arrived = self._loop.create_future()
            await self._arrived
        message = self._messages.popleft()
        self._queued_bytes -= len(message) + _OVERHEAD_BYTES
        if self._reading_paused and self._queued_bytes <= _QUEUED_BYTES // 2:
            self._reading_paused = False
            self._heard = self._loop.time()  # the kernel buffered what the peer sent meanwhile
            if self._transport is not None and not self._transport.is_closing():
                self._transport.resume_reading()
        return message

    async def close(self, reason: str) -> None:
        """Close gracefully: queued data still goes out if the peer takes it within _CLOSE_S."""
        transport = self._transport
        if transport is None:
            return
        if not transport.is_closing():
            self._write_frame(_CLOSE, struct.pack("!H", _NORMAL) + _truncate(reason))
            transport.close()
            self._lose(reason or "closed")
        try:
            async with asyncio.timeout(_CLOSE_S):
                await self._closed.wait()
        except TimeoutError:
            transport.abort()
            await self._closed.wait()

    @property
    def silent_s(self) -> float:
        """Seconds since the peer last sent or took a byte; 0 while reading is paused on our side."""
        self._update_taken()
        return 0.0 if self._reading_paused else self._loop.time() - self._heard

    @property
    def flow(self) -> Flow:
        """Traffic so far: bytes received, and bytes sent that the peer's system has acknowledged."""
        now_s, waiting = self._loop.time(), len(self._pending)
        if self._transport is not None:
            waiting += self._transport.get_write_buffer_size() + unacknowledged_bytes(self._transport)
        carried = self._written_bytes - waiting
        before_s, were_carried, were_waiting = self._last_flow
        if were_waiting >= BURST_BYTES and 0 < carried - were_carried <= were_waiting:  # all that left had waited
            self._sending_s += now_s - before_s
        self._last_flow = (now_s, carried, waiting)
        return Flow(max(carried, 0), self._sending_s, self._received_bytes, self.meter.busy_s)

    # -------------------------------------------------------------------------------------------- asyncio protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=MESSAGE_BYTES)
        self._is_private = _is_private(transport)
        self._gathers = sys.version_info >= (3, 12) or not isinstance(transport, asyncio.Transport)  # uvloop's is none
        self._keepalive = self._loop.call_later(PING_S, self._check_silence)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose("the connection broke" if exc else "the connection closed")
        self._closed.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._payload is not None:
            return self._payload[self._filled :]
        return memoryview(self._scratch)[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self._heard = self._loop.time()
        self._received_bytes += nbytes
        self.meter.arrived(nbytes, self._heard, is_continued=self._payload is not None)
        if self._payload is not None:
            self._filled += nbytes
            if self._filled == len(self._payload):
                self._finish_payload()
            return
        self._end += nbytes
        self._parse()

    def eof_received(self) -> bool:
        return False

    # -------------------------------------------------------------------------------------------- frames in

    def _parse(self) -> None:
        """Parse frames in the scratch buffer until a payload continues past it or no complete header is left."""
        while self._payload is None and self._lost is None:
            head = self._frame_head()
            if head is None:
                break
            opcode, mask, length, size = head
            self._start += size
            self._head = (opcode, mask)
            self._payload, self._filled = np.empty(length, dtype=np.uint8).data, 0
            available = min(length, self._end - self._start)
            self._payload[:available] = memoryview(self._scratch)[self._start : self._start + available]
            self._filled, self._start = available, self._start + available
            if self._filled == length:
                self._finish_payload()
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            rest = self._scratch[self._start : self._end]
            self._scratch[: len(rest)] = rest
            self._start, self._end = 0, len(rest)

    def _frame_head(self) -> tuple[int, bytes, int, int] | None:
        """Return (first byte, mask, payload length, header length) of the next frame; None until they have arrived."""
        available = self._end - self._start
        if available < 2:
            return None
        at, scratch = self._start, self._scratch
        length, size = scratch[at + 1] & 0x7F, 2
        if length >= 126:
            extra = 2 if length == 126 else 8
            if available < 2 + extra:
                return None
            length, size = int.from_bytes(scratch[at + 2 : at + 2 + extra], "big"), 2 + extra
        masked = bool(scratch[at + 1] & _MASKED)
        if available < size + 4 * masked:
            return None
        mask = bytes(scratch[at + size : at + size + 4]) if masked else b""
        fault = self._check_frame(scratch[at], length, masked=masked)
        if fault is not None:
            self._fail(*fault)
            return None
        return scratch[at], mask, length, size + 4 * masked

    def _check_frame(self, first: int, length: int, *, masked: bool) -> tuple[int, str] | None:
        """Check a frame by its header alone, before a buffer is allocated; return close code and reason."""
        opcode = first & 0x0F
        so_far = 0 if self._fragments is None else len(self._fragments)
        if masked == self._is_client or first & 0x70 or opcode not in _OPCODES:
            return _PROTOCOL_FAULT, "expected plain frames, masked by the client alone"
        if opcode >= _CLOSE:
            if length > _CONTROL_BYTES or not first & _FIN:
                return _PROTOCOL_FAULT, f"expected control frames of at most {_CONTROL_BYTES} bytes, in one piece"
        elif (opcode == _CONTINUATION) != (self._fragments is not None):
            return _PROTOCOL_FAULT, "expected fragments of one message in a row"
        elif not length and (opcode == _CONTINUATION or not first & _FIN):
            return _PROTOCOL_FAULT, "expected no empty fragments"
        elif so_far + length > self.max_message_bytes:
            return _TOO_BIG, f"expected messages of at most {self.max_message_bytes} bytes, got {so_far + length}"
        elif self.is_guarded and self._messages:
            return _POLICY, "expected one message, then a pause for the answer, got another message"
        self._idle_frames += 1
        if self._idle_frames > IDLE_FRAMES:
            return _POLICY, f"expected a message, got {IDLE_FRAMES} pings and fragments without one"
        return None

    def _finish_payload(self) -> None:
        payload, (first, mask) = self._payload, self._head
        assert payload is not None
        self._payload = None
        if any(mask):
            _unmask(payload, mask)
        opcode = first & 0x0F
        if opcode == _PING:
            if self._writable.is_set():  # else the peer is not reading, and pongs would pile up
                self._write_frame(_PONG, payload)
        elif opcode == _CLOSE:
            self._close_received(bytes(payload))
        elif opcode != _PONG:
            self._add_message(payload, is_last=bool(first & _FIN))

    def _add_message(self, payload: memoryview, *, is_last: bool) -> None:
        message: Buffer = payload
        if self._fragments is not None or not is_last:
            self._fragments = self._fragments if self._fragments is not None else bytearray()
            self._fragments += payload
            if not is_last:
                return
            message, self._fragments = self._fragments, None
        self._idle_frames = 0
        self._messages.append(message)
        self._queued_bytes += len(message) + _OVERHEAD_BYTES
        self._wake()
        if self._queued_bytes > _QUEUED_BYTES and not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def _close_received(self, payload: bytes) -> None:
        reason = printable(payload[2:].decode(errors="replace")) or "the connection closed"
        if self._transport is not None and not self._transport.is_closing():
            self._write_frame(_CLOSE, payload[:2])
            self._transport.close()
        self._lose(reason)

    # -------------------------------------------------------------------------------------------- frames out

    def _write_frame(self, opcode: int, data: Buffer) -> None:
        assert self._transport is not None
        length = len(data)
        flag = _MASKED if self._is_client else 0
        if length < 126:
            head = struct.pack("!BB", _FIN | opcode, flag | length)
        elif length < 1 << 16:
            head = struct.pack("!BBH", _FIN | opcode, flag | 126, length)
        else:
            head = struct.pack("!BBQ", _FIN | opcode, flag | 127, length)
        if self._is_client:
            mask = _NO_MASK if self._is_private else os.urandom(4)
            head, data = head + mask, data if self._is_private else apply_mask(data, mask)
        self._written_bytes += len(head) + length
        if length < _SCRATCH_BYTES:
            if not self._pending:
                self._loop.call_soon(self._flush)
            self._pending += head + bytes(data)
            if opcode != _BINARY or len(self._pending) >= _SCRATCH_BYTES:
                self._flush()
        elif self._gathers:
            self._transport.writelines((bytes(self._pending + head), data))  # one system call, and no packet of its own
            self._pending.clear()
        else:
            self._pending += head
            self._flush()
            self._transport.write(data)

    def _flush(self) -> None:
        """Write the small frames of one turn of the loop at once: a system call costs more than they do."""
        if self._pending and self._transport is not None:
            self._transport.write(bytes(self._pending))
            self._pending.clear()

    # -------------------------------------------------------------------------------------------- closing

    def _fail(self, code: int, reason: str) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._write_frame(_CLOSE, struct.pack("!H", code) + _truncate(reason))
            self._transport.close()
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
        if self._keepalive is not None:
            self._keepalive.cancel()
        self._writable.set()
        self._wake()

    def _wake(self) -> None:
        if self._arrived is not None and not self._arrived.done():
            self._arrived.set_result(None)

    def _check_silence(self) -> None:
        """Disconnect a peer that neither sends nor takes bytes, or only trickles them; ping one that is quiet."""
        silent_s = self.silent_s
        self._slow_checks = self._slow_checks + 1 if self._trickles() else 0
        if silent_s >= 2 * PING_S or self._slow_checks == 2:
            if self._transport is not None:
                self._transport.abort()
            slow = f"less than {_TRICKLE_BYTES} bytes in {PING_S:.0f} s"
            self._lose(f"silent for {silent_s:.0f} s" if silent_s >= 2 * PING_S else slow)
            return
        self._idle_frames = 0
        if silent_s >= PING_S and self._writable.is_set():
            self._write_frame(_PING, b"")
        self._keepalive = self._loop.call_later(PING_S, self._check_silence)

    def _update_taken(self) -> None:
        """Note what the peer has taken: only bytes that had to wait and then left prove that it reads."""
        unsent = len(self._pending)
        if self._transport is not None:
            unsent += self._transport.get_write_buffer_size()
        taken = self._written_bytes - unsent
        if self._unsent_bytes and taken > self._taken_bytes:
            self._heard = self._loop.time()
        self._taken_bytes, self._unsent_bytes = taken, unsent

    def _trickles(self) -> bool:
        """Whether a frame, in or out, was in progress at both the last check and this one and hardly moved between."""
        incoming = self._payload is not None and not self._reading_paused
        before = self._last_check
        now = self._last_check = (self._received_bytes, self._taken_bytes, incoming, not self._writable.is_set())
        received, taken = now[0] - before[0], now[1] - before[1]
        return (before[2] and now[2] and received < _TRICKLE_BYTES) or (before[3] and now[3] and taken < _TRICKLE_BYTES)


def _is_private(transport: asyncio.BaseTransport) -> bool:
    peer: object = transport.get_extra_info("peername")
    if transport.get_extra_info("ssl_object") is not None or not isinstance(peer, tuple):
        return True  # encrypted, or not a network
    return ipaddress.ip_address(str(cast("tuple[object, ...]", peer)[0]).partition("%")[0]).is_loopback


def _truncate(reason: str) -> bytes:
    """Truncate a reason to what a close frame can carry, in whole characters."""
    return reason.encode(errors="replace")[:123].decode(errors="ignore").encode()


def _unmask(payload: memoryview, mask: bytes) -> None:
    """Unmask in place, eight bytes at a time, then the rest."""
    values = np.frombuffer(payload, dtype=np.uint8)
    whole = len(values) & ~7
    words = values[:whole].view(np.uint64)
    np.bitwise_xor(words, np.frombuffer(mask * 2, dtype=np.uint64)[0], out=words)
    for i in range(whole, len(values)):
        values[i] ^= mask[i & 3]
