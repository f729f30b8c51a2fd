"""Channels over WebSockets: a device dials, a server accepts what uvicorn hands over.

No compression (ten times slower, and floats hardly shrink), sizes explicit, pings by `stream.py`, so that a peer that
vanished without a word is noticed. The handshake is the `websockets` library's, so browsers and other clients fit.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Callable
from typing import cast

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidURI
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.uri import parse_uri

from cleave.errors import ConnectionLost, InputError
from cleave.transport.base import Channel
from cleave.transport.stream import Stream
from cleave.wire.frame import Buffer

_OPEN_S = 10.0
_ADDRESS = "expected the address of a server such as ws://192.168.1.20:7077, got {}"


class WebSocketChannel(Channel):
    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    async def _send(self, data: Buffer) -> None:
        await self._stream.send(data)

    async def _receive(self) -> Buffer:
        return await self._stream.receive()

    async def _close(self, reason: str) -> None:
        await self._stream.close(reason)


# ------------------------------------------------------------------------------------------------ the device's end


async def dial(url: str) -> WebSocketChannel:
    """Connect to a server; ConnectionLost if it cannot be reached now, InputError if the URL can never work."""
    try:
        uri = parse_uri(url)
    except (InvalidURI, ValueError):
        raise InputError(_ADDRESS.format(url)) from None
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_OPEN_S):
            _, stream = await loop.create_connection(
                lambda: _Dialling(ClientProtocol(uri)),
                uri.host,
                uri.port,
                ssl=ssl.create_default_context() if uri.secure else None,
            )
            await stream.opened
    except InvalidHandshake as fault:
        raise ConnectionLost(f"{url} answers, but not as a Cleave server: {fault}") from None
    except TimeoutError:
        raise ConnectionLost(f"no answer from {url} within {_OPEN_S:.0f} s") from None
    except OSError as fault:
        why = os.strerror(fault.errno) if fault.errno and fault.errno > 0 else fault.strerror or fault
        raise ConnectionLost(f"cannot reach {url}: {why}") from None
    except UnicodeError:  # a name no host can have
        raise InputError(_ADDRESS.format(url)) from None
    return WebSocketChannel(stream)


class _Dialling(Stream):
    """A stream that begins with the client's half of the handshake."""

    def __init__(self, handshake: ClientProtocol) -> None:
        super().__init__(is_client=True)
        self._handshake: ClientProtocol | None = handshake
        self.opened: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _send_at_once(transport)
        assert self._handshake is not None
        assert self._transport is not None
        self._handshake.send_request(self._handshake.connect())
        self._transport.write(b"".join(self._handshake.data_to_send()))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self.opened.done():
            self.opened.set_exception(InvalidHandshake("it closed the connection"))

    def _parse(self) -> None:
        if self._handshake is None:
            super()._parse()
            return
        end = self._scratch.find(b"\r\n\r\n", 0, self._end)
        if end < 0:
            if self._end == len(self._scratch):
                self._reject(InvalidHandshake("its answer has no end"))
            return
        handshake, self._handshake = self._handshake, None
        handshake.receive_data(bytes(self._scratch[: end + 4]))
        self._start = end + 4
        if handshake.state is not State.OPEN:  # also where the rest of a refusal, a page say, has yet to come
            self._reject(handshake.handshake_exc or InvalidHandshake("it does not speak WebSocket there"))
            return
        self.opened.set_result(None)
        super()._parse()

    def _reject(self, fault: Exception) -> None:
        if not self.opened.done():
            self.opened.set_exception(fault if isinstance(fault, InvalidHandshake) else InvalidHandshake(str(fault)))
        if self._transport is not None:
            self._transport.abort()


# ------------------------------------------------------------------------------------------------ the server's end


class Accepting(Stream):
    """A stream that begins with the server's half of the handshake, in the shape uvicorn wants (`Config.ws`).

    uvicorn has read the request already and passes it to `data_received`; from then on the connection is ours.
    """

    def __init__(self, path: str, accepted: Callable[[Channel], None]) -> None:
        super().__init__(is_client=False)
        self._path, self._accepted = path, accepted

    def data_received(self, data: bytes) -> None:
        handshake = ServerProtocol()
        handshake.receive_data(data)
        request = next((event for event in handshake.events_received() if isinstance(event, Request)), None)
        transport = cast("asyncio.Transport", self._transport)
        if request is None or request.path.partition("?")[0] != self._path:
            handshake.send_response(handshake.reject(404, f"devices join at {self._path}\n"))
        else:
            handshake.send_response(handshake.accept(request))
        transport.write(b"".join(handshake.data_to_send()))
        if request is None or handshake.handshake_exc is not None or handshake.close_expected():
            transport.close()
            return
        _send_at_once(transport)
        self._accepted(WebSocketChannel(self))


def _send_at_once(transport: asyncio.BaseTransport) -> None:
    """A header is its own small message; it must not wait for more to send."""
    raw: socket.socket | None = transport.get_extra_info("socket")
    if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
