"""Move bytes over one plain TCP connection and say when they arrived. Standard library only: it runs in namespaces.

`python transfer.py listen ADDRESS PORT` serves until it is killed. `python transfer.py down ADDRESS PORT BYTES` gets
that many bytes from it, `up` sends them; with a further number N, once N transfers wait. Both print what the receiver
saw, as JSON: a list of moments, in seconds of the clock that all processes of a machine share, and of bytes so far.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time
from typing import Final

_CHUNK: Final = bytes(1 << 16)
_REQUEST: Final = struct.Struct("!?QI")
_PATIENCE_S: Final = 10.0
_RECORD_S: Final = 1e-3
Arrivals = list[tuple[float, int]]


def listen(address: str, port: int) -> None:
    listener = socket.create_server((address, port), backlog=64)
    print("listening", flush=True)
    starts: dict[int, threading.Barrier] = {}
    while True:
        connection, _ = listener.accept()
        down, count, together = _REQUEST.unpack(_exactly(connection, _REQUEST.size))
        start = starts.setdefault(together, threading.Barrier(together))
        threading.Thread(target=_serve, args=(connection, down, count, start), daemon=True).start()


def _serve(connection: socket.socket, down: bool, count: int, start: threading.Barrier) -> None:
    with connection:
        start.wait()
        if down:
            _send(connection, count)
            connection.recv(1)
        else:
            connection.sendall(b"!")
            connection.sendall(json.dumps(_receive(connection, count)).encode())


def _exactly(connection: socket.socket, count: int) -> bytes:
    got = b""
    while len(got) < count:
        got += connection.recv(count - len(got))
    return got


def move(way: str, address: str, port: int, count: int, together: int = 1) -> Arrivals:
    """Receive (`down`) or send (`up`) bytes once so many transfers wait; return when they arrived at their end."""
    with socket.create_connection((address, port), timeout=_PATIENCE_S) as connection:
        connection.settimeout(None)
        connection.sendall(_REQUEST.pack(way == "down", count, together))
        if way == "down":
            return _receive(connection, count)
        connection.recv(1)
        _send(connection, count)
        connection.shutdown(socket.SHUT_WR)
        said = b"".join(iter(lambda: connection.recv(1 << 16), b""))
    return [(seconds, count) for seconds, count in json.loads(said)]


def _send(connection: socket.socket, count: int) -> None:
    left = count
    while left:
        left -= connection.send(_CHUNK[: min(left, len(_CHUNK))])


def _receive(connection: socket.socket, count: int) -> Arrivals:
    into = bytearray(1 << 18)
    arrivals: Arrivals = []
    got = 0
    while got < count:
        size = connection.recv_into(into)
        if size == 0:
            break
        got += size
        now_s = time.monotonic()
        if not arrivals or now_s - arrivals[-1][0] > _RECORD_S or got == count:
            arrivals.append((now_s, got))
    return arrivals


def sustained_bytes_per_s(arrivals: Arrivals) -> float:
    """The rate from the first fifth of the bytes to the last byte: without the start and its burst."""
    end_s, total = arrivals[-1]
    begin_s, got = next((seconds, count) for seconds, count in arrivals if count >= total / 5)
    return (total - got) / (end_s - begin_s) if end_s > begin_s else float("inf")


def let_through_bytes(arrivals: Arrivals, bytes_per_s: float) -> float:
    """Bytes ahead of the rate, at most, since the first arrival: the bucket, and what a late reader found waiting."""
    first_s = arrivals[0][0]
    return max(count - bytes_per_s * (seconds - first_s) for seconds, count in arrivals)


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        listen(sys.argv[2], int(sys.argv[3]))
    print(json.dumps(move(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))))
