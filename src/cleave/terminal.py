"""Standard output and standard error that never make a long-running command wait.

A stopped terminal (Ctrl-S), a pager that nobody scrolls or a hung disk blocks whoever writes. In `never_blocking`,
everything written to these streams (screens, lines, log records, tracebacks) goes through a `Sink`. While nobody
reads, the newest text is kept, up to ROOM_CHARACTERS; a line says how much was dropped. What nobody reads within
PATIENCE_S after the command has finished is lost.

Data for programs must not go through here: `cleave train --json` leaves standard output as it is.
"""

from __future__ import annotations

import io
import os
import select
import stat
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import IO, Final, TextIO

from cleave.sink import Sink

ROOM_CHARACTERS: Final = 1 << 18
PATIENCE_S: Final = 2.0
_CHUNK_BYTES: Final = 4096  # so that a slow reader's progress is seen


class QueuedStream(io.TextIOBase):
    """A text stream whose writers never wait. It writes to a file descriptor of its own, not through `stream`'s buffer:
    a thread that is stuck with the buffer's lock would keep the interpreter from ending."""

    def __init__(self, stream: TextIO, sink: Sink[tuple[QueuedStream, str]]) -> None:
        self._stream, self._sink = stream, sink
        self._file = os.dup(stream.fileno())

    @property
    def encoding(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self._stream.encoding

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str, /) -> int:
        self._sink.put((self, text))
        return len(text)

    def release(self, patience_s: float) -> None:
        """Wait for readers for so long; what is written from now on is lost."""
        if self._sink.drain(patience_s):  # else the thread still uses the file
            file, self._file = self._file, -1
            os.close(file)

    @property
    def waiting(self) -> int:
        """Pieces of text that nobody has read yet."""
        return self._sink.waiting

    def send(self, text: str) -> None:
        """Write to the file, for as long as it takes."""
        _write(self._file, text.encode(self.encoding, "backslashreplace"))


@contextmanager
def never_blocking(*names: str) -> Generator[None]:
    """Within the block, writing to `sys.stdout` and `sys.stderr`, as named, never waits.

    Streams to the same file share a queue, which keeps their order. Streams that are not files stay as they are.
    """
    found = {name: stream for name in names if _has_file(stream := getattr(sys, name))}
    outputs: dict[tuple[int, int], _Output] = {}
    queued: list[QueuedStream] = []
    for name, stream in found.items():
        stream.flush()
        status = os.fstat(stream.fileno())
        queued.append(QueuedStream(stream, outputs.setdefault((status.st_dev, status.st_ino), _Output())))
        setattr(sys, name, queued[-1])
    try:
        yield
    finally:
        for name, stream in found.items():
            setattr(sys, name, stream)
        for each in queued:
            each.release(PATIENCE_S)


def send(stream: TextIO, text: str) -> None:
    """Write to a stream from a thread that may be stuck there when the interpreter ends, past the stream's buffer."""
    if stream is sys.__stderr__ and _has_file(stream):
        _write(stream.fileno(), text.encode(stream.encoding, "backslashreplace"))
    else:  # a notebook, say
        stream.write(text)


def is_behind(stream: IO[str]) -> bool:
    """Whether text waits for a reader, so that a live view should not draw another frame."""
    return isinstance(stream, QueuedStream) and stream.waiting > 0


def is_kept(stream: IO[str]) -> bool:
    """Whether the stream goes to a regular file, where a secret would stay; not so for terminals and pipes."""
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError):
        return False


class _Output(Sink["tuple[QueuedStream, str]"]):
    """A queue of text that says where some is missing."""

    def __init__(self) -> None:
        super().__init__(self._send, name="output", room=ROOM_CHARACTERS, size=lambda piece: len(piece[1]))
        self._reported = 0

    def _send(self, piece: tuple[QueuedStream, str]) -> None:
        stream, text = piece
        if (dropped := self.dropped) > self._reported:
            stream.send(f"... {dropped - self._reported} pieces of output were dropped, as nobody read them\n")
            self._reported = dropped
        stream.send(text)


def _write(file: int, text: bytes) -> None:
    """Write to a file, for as long as it takes, until its reader is gone."""
    rest = memoryview(text)
    while rest:
        try:
            rest = rest[os.write(file, rest[:_CHUNK_BYTES]) :]
        except BlockingIOError:  # somebody made the terminal non-blocking
            select.select([], [file], [])
        except OSError:
            return


def _has_file(stream: IO[str] | None) -> bool:
    try:
        return stream is not None and stream.fileno() >= 0
    except (OSError, ValueError):
        return False
