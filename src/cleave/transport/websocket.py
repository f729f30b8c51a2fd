"""Channels over WebSockets: the device's end dials with `websockets`, the server's end is what Starlette accepted.

No compression (ten times slower, and floats hardly shrink), sizes explicit, pings by the libraries, so that a peer
that vanished without a word is noticed.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from cleave.errors import ConnectionLost, InputError
from cleave.transport.base import Channel
from cleave.wire.frame import MESSAGE_BYTES, Buffer

if TYPE_CHECKING:
    from starlette.websockets import WebSocket

PING_S = 20.0
_OPEN_S = 10.0
_CLOSE_S = 2.0
_ADDRESS = "expected the address of a server such as ws://192.168.1.20:7077, got {}"


class DialledChannel(Channel):
    def __init__(self, connection: ClientConnection) -> None:
        super().__init__()
        self._connection = connection

    async def _send(self, data: Buffer) -> None:
        try:
            await self._connection.send(data)
        except ConnectionClosed as fault:
            raise ConnectionLost(_why(fault)) from None

    async def _receive(self) -> Buffer:
        try:
            return await self._connection.recv(decode=False)
        except ConnectionClosed as fault:
            raise ConnectionLost(_why(fault)) from None

    async def _close(self, reason: str) -> None:
        await self._connection.close(reason=_fitting(reason))


async def dial(url: str) -> DialledChannel:
    """Connect to a server; ConnectionLost if it cannot be reached now, InputError if the URL can never work."""
    try:
        connection = await connect(
            url,
            compression=None,
            max_size=MESSAGE_BYTES,
            max_queue=8,
            write_limit=MESSAGE_BYTES,
            open_timeout=_OPEN_S,
            close_timeout=_CLOSE_S,
            ping_interval=PING_S,
            ping_timeout=PING_S,
            proxy=None,
        )
    except InvalidURI:
        raise InputError(_ADDRESS.format(url)) from None
    except InvalidHandshake as fault:
        raise ConnectionLost(f"{url} answers, but not as a Cleave server: {fault}") from None
    except TimeoutError:
        raise ConnectionLost(f"no answer from {url} within {_OPEN_S:.0f} s") from None
    except OSError as fault:
        raise ConnectionLost(f"cannot reach {url}: {fault.strerror or fault}") from None
    except ValueError:  # a port or a host name that cannot be
        raise InputError(_ADDRESS.format(url)) from None
    return DialledChannel(connection)


class AcceptedChannel(Channel):
    def __init__(self, socket: WebSocket) -> None:
        super().__init__()
        self._socket = socket

    async def _send(self, data: Buffer) -> None:
        try:
            await self._socket.send({"type": "websocket.send", "bytes": data})
        except _closed_errors() as fault:
            raise ConnectionLost(str(fault) or "the connection closed") from None

    async def _receive(self) -> Buffer:
        try:
            event = await self._socket.receive()
        except _closed_errors() as fault:
            raise ConnectionLost(str(fault) or "the connection closed") from None
        if event["type"] != "websocket.receive":
            raise ConnectionLost(event.get("reason") or f"the connection closed (code {event.get('code', '?')})")
        data = event.get("bytes")
        return data if data is not None else event["text"].encode()

    async def _close(self, reason: str) -> None:
        with suppress(*_closed_errors()):
            await self._socket.close(reason=_fitting(reason))


def _closed_errors() -> tuple[type[Exception], ...]:
    """What Starlette raises on a connection that is over."""
    from starlette.websockets import WebSocketDisconnect

    return (OSError, RuntimeError, WebSocketDisconnect)


def _fitting(reason: str) -> str:
    """As much of a reason as a close frame can carry: 123 bytes."""
    return reason.encode(errors="replace")[:123].decode(errors="ignore")


def _why(fault: ConnectionClosed) -> str:
    received = fault.rcvd
    return (received.reason if received and received.reason else "") or "the connection closed"
