"""A server's end of a WebSocket without a socket: bytes go in as asyncio delivers them, messages come out at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from typing import TypeVar

from cleave.errors import ConnectionLost
from cleave.protocol.frames import MESSAGE_BYTES, Buffer
from cleave.transport.stream import Stream

Result = TypeVar("Result")


class Pipe(asyncio.Transport):
    """The far side of a stream: accepts everything written, and counts only the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.written_bytes = 0
        self.is_paused = self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written_bytes += len(data)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        self._closing = True

    abort = close

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_write_buffer_size(self) -> int:
        return 0

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass


class Connection:
    """A server's stream, fed the way asyncio does."""

    def __init__(self) -> None:
        self.pipe, self.stream = Pipe(), Stream(is_client=False)
        self.stream.connection_made(self.pipe)

    def feed(self, data: bytes, step: int = 1 << 16) -> bool:
        """Feed bytes to the stream; return False if it has closed."""
        view = memoryview(data)
        while view and not self.pipe.is_closing():
            room = self.stream.get_buffer(-1)
            assert len(room) > 0, "asyncio treats an empty buffer as an error"
            count = min(len(room), len(view), step)
            room[:count] = view[:count]
            self.stream.buffer_updated(count)
            view = view[count:]
        return not self.pipe.is_closing()

    def received(self) -> Iterator[Buffer]:
        """Messages available without waiting."""
        while (message := _at_once(self.stream.receive())) is not None:
            assert len(message) <= MESSAGE_BYTES
            yield message

    def end(self) -> None:
        self.stream.connection_lost(None)


def _at_once(waiting: Coroutine[object, object, Result]) -> Result | None:
    """A coroutine's result if available now; None if it must wait or the connection is closed."""
    try:
        waiting.send(None)
    except StopIteration as done:
        return done.value
    except ConnectionLost:
        return None
    waiting.close()
    return None


def through(data: bytes, step: int = 1 << 16) -> list[bytes]:
    """Messages decoded from bytes that arrive `step` at a time."""
    connection = Connection()
    try:
        connection.feed(data, step)
        return [bytes(message) for message in connection.received()]
    finally:
        connection.end()
