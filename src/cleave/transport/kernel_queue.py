"""How many bytes the system still holds for a peer that has not received them.

A transport's own buffer empties into that of the system, which holds megabytes on fast machines: without this, bytes
would count as carried long before a slow link has carried them.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import sys

try:
    import fcntl
    import termios
except ImportError:  # Windows
    fcntl = termios = None

_SO_NWRITE = 0x1024  # macOS


def unacknowledged_bytes(transport: asyncio.BaseTransport) -> int:
    """Bytes written to a transport's socket that the peer's system has not acknowledged; 0 where that is unknown."""
    raw: socket.socket | None = transport.get_extra_info("socket")
    if raw is None:
        return 0
    try:
        if sys.platform == "darwin":
            return raw.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
        if fcntl is None or termios is None:
            return 0
        return struct.unpack("i", fcntl.ioctl(raw.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
    except (OSError, ValueError):  # not a network, or closed
        return 0
