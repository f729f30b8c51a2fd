"""Framing of messages on a channel: a header, then its payload in parts, with a size limit for each.

A channel carries byte strings (WebSocket messages). A header is one of them. If it announces a payload, the next ones
are that payload, in order, each at most PART_BYTES, with nothing in between. Payloads are never copied to be sent: the
header stays separate and parts are views. A payload of one part is handed out as received.
"""

from __future__ import annotations

from collections.abc import Iterator

from cleave.errors import ProtocolError
from cleave.protocol import messages
from cleave.protocol.messages import AnyMessage

MESSAGE_BYTES = 4 << 20
"""Longest byte string; longer ones stall an event loop."""
PART_BYTES = MESSAGE_BYTES
"""Longest part sent: a payload of one part needs no reassembly."""
HEADER_BYTES = 64 << 10
PAYLOAD_BYTES = 64 << 20

Buffer = bytes | bytearray | memoryview


def parts(payload: Buffer) -> Iterator[memoryview]:
    """Yield a payload as views of at most PART_BYTES."""
    view = memoryview(payload).cast("B") if not isinstance(payload, memoryview) or payload.format != "B" else payload
    for start in range(0, len(view), PART_BYTES):
        yield view[start : start + PART_BYTES]


class Assembler:
    """Reassemble messages from the byte strings of one channel. Raises ProtocolError at the first violation."""

    def __init__(self, max_payload_bytes: int = PAYLOAD_BYTES) -> None:
        self.max_payload_bytes = max_payload_bytes
        """Limit for messages to come; 0 accepts headers only."""
        self._message: AnyMessage | None = None
        self._payload = bytearray()
        self._filled = 0

    @property
    def waits_for_payload(self) -> bool:
        return self._message is not None

    def feed(self, data: Buffer) -> tuple[AnyMessage, Buffer] | None:
        """Add one byte string; return the message and payload it completes, if any."""
        if self._message is None:
            return self._header(data)
        expected = self._message.payload
        if self._filled == 0 and len(data) == expected:
            return self._finish(data)
        if not data or self._filled + len(data) > expected:
            raise ProtocolError(f"expected {expected - self._filled} more bytes of payload, got {len(data)}")
        if self._filled == 0:
            self._payload = bytearray(expected)
        self._payload[self._filled : self._filled + len(data)] = data
        self._filled += len(data)
        return self._finish(self._payload) if self._filled == expected else None

    def _header(self, data: Buffer) -> tuple[AnyMessage, Buffer] | None:
        if len(data) > HEADER_BYTES:
            raise ProtocolError(f"expected a header of at most {HEADER_BYTES} bytes, got {len(data)}")
        message = messages.decode(data)
        limit = min(self.max_payload_bytes, PAYLOAD_BYTES)
        if not 0 <= message.payload <= limit:
            raise ProtocolError(f"expected a payload of at most {limit} bytes, got {message.payload}; cut it smaller")
        if message.payload == 0:
            return message, b""
        self._message = message
        return None

    def _finish(self, payload: Buffer) -> tuple[AnyMessage, Buffer]:
        assert self._message is not None
        message, self._message = self._message, None
        self._payload, self._filled = bytearray(), 0
        return message, payload
