"""Channels over WebSockets: a device dials and authenticates the server; a server accepts what uvicorn hands over.

No compression (ten times slower, and floats hardly shrink) and explicit size limits. `stream.py` sends pings, so that a
peer that vanished is noticed. The `websockets` library does the handshake, so browsers and other clients work.

A server proves its identity by TLS, with a certificate signed by an authority or with its own, whose SHA-256 is part of
the address (`wss://host:port#sha256:HEX`, or its first half). Either is verified before the device sends anything.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import re
import socket
import ssl
from collections.abc import Callable
from typing import cast

from websockets.client import ClientProtocol
from websockets.exceptions import InvalidHandshake, InvalidURI
from websockets.http11 import Request
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.uri import WebSocketURI, parse_uri

from cleave.errors import ConnectionLost, InputError
from cleave.printable import printable
from cleave.protocol.frames import HEADER_BYTES, MESSAGE_BYTES, Buffer
from cleave.transport.address import PIN_BYTES
from cleave.transport.base import Channel, Flow
from cleave.transport.paced import PacedProtocol
from cleave.transport.shaped import Link, Medium
from cleave.transport.stream import Stream

_OPEN_S = 10.0
_ADDRESS = "expected the address of a server such as ws://192.168.1.20:7077, got {}"
_PIN = re.compile(rf"sha256:([0-9a-fA-F]{{{2 * PIN_BYTES},64}})")
_NOT_TLS = {
    "WRONG_VERSION_NUMBER",
    "HTTP_REQUEST",
    "UNKNOWN_PROTOCOL",
    "RECORD_LAYER_FAILURE",
    "PACKET_LENGTH_TOO_LONG",
}
"""OpenSSL's reasons for an answer that is not TLS at all."""

Objection = Callable[[list[str], list[str]], str]
"""Maps Origin and Host headers to the reason for refusing the request; empty if it is allowed."""


class WebSocketChannel(Channel):
    def __init__(
        self, stream: Stream, *, address: str = "", guarded: bool = False, admitted: Callable[[], None] = lambda: None
    ) -> None:
        """`admitted` is called when a guarded channel is allowed to carry payloads."""
        super().__init__(guarded=guarded, address=address)
        self._stream, self._admitted = stream, admitted
        self._meter = stream.meter  # which sees every piece of a message arrive
        if guarded:
            stream.max_message_bytes, stream.is_guarded = HEADER_BYTES, True

    def allow(self, payload_bytes: int) -> None:
        super().allow(payload_bytes)
        self._stream.max_message_bytes = max(HEADER_BYTES, min(payload_bytes, MESSAGE_BYTES))
        self._stream.is_guarded = False
        self._admitted()

    @property
    def silent_s(self) -> float:
        return self._stream.silent_s

    @property
    def flow(self) -> Flow:
        return self._stream.flow

    async def _send(self, data: Buffer) -> None:
        await self._stream.send(data)

    async def _receive(self) -> Buffer:
        return await self._stream.receive()

    async def _close(self, reason: str) -> None:
        await self._stream.close(reason)


# ------------------------------------------------------------------------------------------------ device


async def dial(url: str, link: Link | None = None, medium: Medium | None = None) -> WebSocketChannel:
    """Connect to a server, as if over `link` if given, on a medium that others may share.

    Raises ConnectionLost if it cannot be reached now, InputError if the URL can never work or the server's certificate
    is not the expected one.
    """
    uri, pin = _target(url)
    address = url.partition("#")[0]
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_OPEN_S):
            stream = _DialingStream(ClientProtocol(uri), pin)
            await loop.create_connection(
                lambda: stream if link is None else PacedProtocol(stream, link, medium),
                uri.host,
                uri.port,
                ssl=client_context(pinned=pin is not None) if uri.secure else None,
            )
            await stream.opened
    except _SpeaksTls:
        secure = re.sub("^ws:", "wss:", address)
        raise InputError(f"{address} speaks TLS only; use {secure}, with what the server prints after #") from None
    except InvalidHandshake as fault:
        raise ConnectionLost(f"{address} answers, but is not a Cleave server: {printable(str(fault))}") from None
    except TimeoutError:
        raise ConnectionLost(f"no answer from {address} within {_OPEN_S:.0f} s") from None
    except ssl.SSLError as fault:
        raise _tls_fault(address, fault) from None
    except OSError as fault:
        why = os.strerror(fault.errno) if fault.errno and fault.errno > 0 else fault.strerror or fault
        raise ConnectionLost(f"cannot reach {address}: {why}") from None
    except UnicodeError:  # not a valid host name
        raise InputError(_ADDRESS.format(url)) from None
    return WebSocketChannel(stream, address=uri.host)


def _target(url: str) -> tuple[WebSocketURI, str | None]:
    """Split a URL into the address to dial and the expected certificate fingerprint, if any."""
    address, _, fragment = url.partition("#")
    pin = _PIN.fullmatch(fragment)
    try:
        uri = parse_uri(address)
    except (InvalidURI, ValueError):
        raise InputError(_ADDRESS.format(url)) from None
    if fragment and pin is None:
        raise InputError(f"{_ADDRESS.format(url)}; after # comes sha256: and 64 digits of a certificate") from None
    if pin is not None and not uri.secure:
        raise InputError(f"expected wss:// before an address with a certificate's fingerprint, got {url}; use wss://")
    return uri, None if pin is None else pin[1].lower()


def client_context(*, pinned: bool) -> ssl.SSLContext:
    """TLS as a device uses it; a pinned certificate is not checked here, but by its fingerprint."""
    context = ssl.create_default_context()
    if pinned:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _tls_fault(address: str, fault: ssl.SSLError) -> InputError | ConnectionLost:
    if isinstance(fault, ssl.SSLCertVerificationError):
        return InputError(
            f"the certificate of {address} cannot be trusted ({fault.verify_message.rstrip('.')}); "
            "if the server made its own, copy the whole address it prints, with what follows #"
        )
    if fault.reason in _NOT_TLS:
        plain = re.sub("^wss:", "ws:", address)
        return InputError(f"{address} does not use TLS; use {plain}, or start the server with --tls")
    return ConnectionLost(f"TLS with {address} failed: {fault.reason or fault}")


class _SpeaksTls(InvalidHandshake):
    """The server requires TLS but was dialed without."""


class _DialingStream(Stream):
    """A stream that starts with the client's half of the handshake, after checking the pinned certificate."""

    def __init__(self, handshake: ClientProtocol, pin: str | None) -> None:
        super().__init__(is_client=True)
        self._handshake: ClientProtocol | None = handshake
        self._pin = pin
        self.opened: asyncio.Future[None] = self._loop.create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        _disable_nagle(transport)
        pin = self._pin
        actual = _fingerprint(transport)[: len(pin)] if pin is not None else ""
        if pin is not None and not hmac.compare_digest(actual, pin):
            self._reject(
                InputError(
                    f"expected the server's certificate to be sha256:{pin}, got sha256:{actual}; the connection "
                    "may be intercepted, or the run has a new certificate: ask its owner for the current address"
                )
            )
            return
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
        if self._scratch.startswith(b"\x15\x03"):  # a TLS alert: the server expected TLS
            self._reject(_SpeaksTls())
            return
        end = self._scratch.find(b"\r\n\r\n", 0, self._end)
        if end < 0:
            if self._end == len(self._scratch):
                self._reject(InvalidHandshake("its response headers never end"))
            return
        handshake, self._handshake = self._handshake, None
        head = bytes(self._scratch[: end + 4])
        if b"\r\nupgrade: tls/" in head.lower():
            self._reject(_SpeaksTls())
            return
        handshake.receive_data(head)
        self._start = end + 4
        if handshake.state is not State.OPEN:  # even if the body of the refusal has not arrived
            self._reject(handshake.handshake_exc or InvalidHandshake("it does not speak WebSocket at this address"))
            return
        if not self.opened.done():  # else nobody waits any more
            self.opened.set_result(None)
        super()._parse()

    def _reject(self, fault: Exception) -> None:
        is_expected = isinstance(fault, InvalidHandshake | InputError)
        if not self.opened.done():
            self.opened.set_exception(fault if is_expected else InvalidHandshake(str(fault)))
        if self._transport is not None:
            self._transport.abort()


# ------------------------------------------------------------------------------------------------ server


class Accepting(Stream):
    """A stream that starts with the server's half of the handshake, in the shape uvicorn expects (`Config.ws`).

    uvicorn has already read the request and passes it to `data_received`; from then on the connection is ours. The
    channel stays guarded until `allow` is called, of which `admitted` hears. `ended` is called once, when the
    connection is closed.
    """

    def __init__(
        self,
        path: str,
        accepted: Callable[[Channel], None],
        *,
        objection: Objection,
        admitted: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        super().__init__(is_client=False)
        self._path, self._accepted, self._objection = path, accepted, objection
        self._admitted, self._ended = admitted, ended

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._ended()

    def data_received(self, data: bytes) -> None:
        handshake = ServerProtocol()
        handshake.receive_data(data)
        request = next((event for event in handshake.events_received() if isinstance(event, Request)), None)
        transport = cast("asyncio.Transport", self._transport)
        if request is None or request.path.partition("?")[0] != self._path:
            handshake.send_response(handshake.reject(404, f"devices join at {self._path}\n"))
        elif why := self._objection(request.headers.get_all("Origin"), request.headers.get_all("Host")):
            handshake.send_response(handshake.reject(403, f"{why}\n"))
        else:
            handshake.send_response(handshake.accept(request))
        transport.write(b"".join(handshake.data_to_send()))
        if handshake.state is not State.OPEN:
            transport.close()
            return
        _disable_nagle(transport)
        peer: tuple[str, int] | None = transport.get_extra_info("peername")
        address = peer[0] if peer else ""
        self._accepted(WebSocketChannel(self, address=address, guarded=True, admitted=self._admitted))


def _fingerprint(transport: asyncio.BaseTransport) -> str:
    """SHA-256 of the certificate the server presented."""
    tls: ssl.SSLObject = transport.get_extra_info("ssl_object")
    return hashlib.sha256(tls.getpeercert(binary_form=True) or b"").hexdigest()


def _disable_nagle(transport: asyncio.BaseTransport) -> None:
    """Disable Nagle's algorithm: a header is a small message and must not wait for more data."""
    raw: socket.socket | None = transport.get_extra_info("socket")
    if raw is not None and raw.family in (socket.AF_INET, socket.AF_INET6):
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
