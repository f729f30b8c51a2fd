"""A run's event log as a stream: all of it, then what is appended, line by line, until listener or server stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

CONTENT_TYPE = "application/x-ndjson"

_LOOK_S = 0.5
_SILENCE_S = 10.0
_CHUNK_BYTES = 1 << 20


async def follow(path: Path, stopping: asyncio.Event) -> AsyncIterator[bytes]:
    """Yield whole lines, and an empty one now and then, so that a proxy does not take silence for death."""
    torn, quiet_s, at = b"", 0.0, 0
    while True:
        read = await asyncio.to_thread(_read, path, at)
        at += len(read)
        lines, ended, torn = (torn + read).rpartition(b"\n")
        if ended:
            quiet_s = 0.0
            yield lines + ended
        if len(read) == _CHUNK_BYTES:
            continue
        if stopping.is_set():
            return
        with suppress(TimeoutError):
            await asyncio.wait_for(stopping.wait(), _LOOK_S)
        quiet_s += _LOOK_S
        if quiet_s >= _SILENCE_S:
            quiet_s = 0.0
            yield b"\n"


def _read(path: Path, at: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(at)
            return file.read(_CHUNK_BYTES)
    except FileNotFoundError:  # nothing has happened yet
        return b""
