"""The gate: which connections are accepted, before peers identify themselves.

Accepts connections, limits them per address and inspects their first byte: where TLS is required, a plain request is
answered with an error and closed. The rest goes to uvicorn's HTTP parser, which must receive a whole request within a
deadline; `transport/websocket.py` takes over those that become WebSockets. Knows neither tokens nor devices, except
that a connection is a stranger's until it is admitted. Few strangers fit at once, and a new one takes the place of the
oldest, so silent connections keep nobody out. What the process may open is never used up by connections: some
descriptors stay free for checkpoints, logs and other processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import math
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast
from urllib.parse import urlsplit

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

_TLS_RECORD = b"\x16"  # the first byte of a TLS handshake, and of no HTTP request
_AT_ONCE = 16  # accepted before the event loop gets its turn to close the displaced: fewer than are kept in reserve
_PAUSE_S = 0.2  # before accepting again when file descriptors have run out
_LINGER_S = 1.0
_SAY_S = 60.0
_MOST_ADDRESSES = 65_536
_PLACE = "place"
_RESERVE = 64
"""Descriptors kept free for checkpoints, logs and other processes, or a quarter of them if there are fewer than 256."""

log = logging.getLogger(__name__)

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    connections: int = 16_384
    """Open at once, in total."""
    per_address: int = 64
    """Open at once from one address; many devices may share one."""
    per_loopback: int = 4096
    strangers: int = 512
    """Open at once that have not been admitted, in total ..."""
    strangers_per_address: int = 32
    """... and from one address; eight times as many from this machine itself."""
    burst: int = 50
    """New connections from one address in a burst ..."""
    per_s: float = 20.0
    """... and sustained; this machine itself gets ten times both."""
    first_byte_s: float = 10.0
    """Deadline for the first byte of a connection."""
    request_s: float = 10.0
    """Deadline for the TLS handshake, and then again for a complete request."""


CROWDED = Limits(per_address=16_384, per_loopback=16_384, strangers_per_address=512, burst=2_000, per_s=500.0)
"""For tests of a server's scale, whose devices all come from one address."""


def fitting(limits: Limits, descriptors: float, in_use: int) -> Limits:
    """Reduce limits to what a process can open, less what it has open and a reserve for files and processes."""
    reserve = min(_RESERVE, descriptors / 4)
    connections = int(max(1, min(limits.connections, descriptors - in_use - reserve)))
    return replace(limits, connections=connections, strangers=max(1, min(limits.strangers, connections // 4)))


class Place:
    """One open connection's place in the census: a stranger's until it is admitted."""

    __slots__ = ("_census", "close", "group")

    def __init__(self, census: Census, group: str) -> None:
        self._census, self.group = census, group
        self.close: Callable[[], object] = lambda: None
        """Closes the connection, if its place goes to another."""

    def admit(self) -> None:
        """Count the connection among those that showed a token, which keep their places."""
        self._census.strangers.remove(self)

    def leave(self) -> None:
        """Free the place; safe to call twice."""
        self._census.leave(self)


class Strangers:
    """Places of connections that have not been admitted, oldest first."""

    def __init__(self) -> None:
        self._places: dict[Place, None] = {}
        self._groups: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._places)

    def count(self, group: str) -> int:
        return self._groups[group]

    def add(self, place: Place) -> None:
        self._places[place] = None
        self._groups[place.group] += 1

    def remove(self, place: Place) -> None:
        """Remove a place, if it is a stranger's."""
        if place in self._places:
            del self._places[place]
            self._groups[place.group] -= 1
            if not self._groups[place.group]:
                del self._groups[place.group]

    def oldest(self, group: str) -> Place | None:
        return next((place for place in self._places if place.group == group), None)

    def oldest_of_most(self) -> Place | None:
        """Return the oldest place of the group that has the most: a crowd from one address pays for itself first."""
        most = max(self._groups.values(), default=0)
        return next((place for place in self._places if self._groups[place.group] == most), None)


class Census:
    """Open connections and recent arrivals per address. Pure: the caller supplies the time."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._places: set[Place] = set()
        self._inside: Counter[str] = Counter()
        self._spent: dict[str, tuple[float, float]] = {}
        """Recent arrivals per group, which decay by `per_s` a second, and when they were last updated."""
        self.strangers = Strangers()

    @property
    def total(self) -> int:
        return len(self._places)

    def enter(self, address: str, now_s: float) -> Place | str:
        """Give a connection a place, a stranger's if need be; return the reason if it exceeds a limit."""
        group, limits = group_of(address), self._limits
        is_here = group == "loopback"
        scale, most = (10, limits.per_loopback) if is_here else (1, limits.per_address)
        spent, since_s = self._spent.get(group, (0.0, now_s))
        spent = max(0.0, spent - (now_s - since_s) * limits.per_s * scale)
        if spent + 1 > limits.burst * scale:
            return f"connections from {address} arrive faster than {limits.per_s * scale:.0f} a second"
        most_strangers = min(limits.strangers, limits.strangers_per_address * (8 if is_here else 1))
        if self._inside[group] >= most or self.strangers.count(group) >= most_strangers:
            why = self._evict(self.strangers.oldest(group), f"{most} connections from {address} are open")
        elif self.total >= limits.connections or len(self.strangers) >= limits.strangers:
            why = self._evict(self.strangers.oldest_of_most(), f"{limits.connections} connections are open")
        else:
            why = ""
        if why:
            return why
        self._spent.pop(group, None)  # keeps the dict ordered by last arrival
        self._spent[group] = spent + 1, now_s
        if len(self._spent) > _MOST_ADDRESSES:
            del self._spent[next(iter(self._spent))]
        place = Place(self, group)
        self._places.add(place)
        self._inside[group] += 1
        self.strangers.add(place)
        return place

    def _evict(self, stranger: Place | None, otherwise: str) -> str:
        """Free a stranger's place; return `otherwise` if there is none."""
        if stranger is None:
            return otherwise
        self.leave(stranger)
        stranger.close()
        return ""

    def leave(self, place: Place) -> None:
        if place not in self._places:
            return
        self._places.remove(place)
        self.strangers.remove(place)
        self._inside[place.group] -= 1
        if not self._inside[place.group]:
            del self._inside[place.group]


def group_of(address: str) -> str:
    """Group an address is counted in: an IPv6 subscriber owns a whole /64, and all loopback addresses are one."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv6Address):
        parsed = parsed.ipv4_mapped or parsed
    if parsed.is_loopback:
        return "loopback"
    return str(parsed) if parsed.version == 4 else str(ipaddress.ip_network((int(parsed), 64), strict=False))


def is_loopback(host: str) -> bool:
    return host == "localhost" or group_of(host) == "loopback"


def objection_to(origins: list[str], hosts: list[str], *, open_here: bool) -> str:
    """Return why a request is refused for its origin; empty if it is allowed.

    Devices send no Origin, browsers always do: a page of another site must not join in its visitor's name. Where only
    this machine can connect and no token is required (`open_here`), any other host name means DNS rebinding.
    """
    host = hosts[0].lower() if len(hosts) == 1 else ""
    if any(not _is_same_site(origin.lower(), host) for origin in origins):
        return "expected a page of this server, got one of another site; open the address the run printed"
    if open_here and not is_loopback(_hostname(host)):
        return "expected this machine's own address, got another name; use 127.0.0.1, or give the run a token"
    return ""


def _is_same_site(origin: str, host: str) -> bool:
    """Whether a page is this server's own; the scheme's default port may be omitted."""
    scheme, _, page = origin.partition("://")
    implied = {"http": ":80", "https": ":443"}.get(scheme, "")
    return bool(page) and page.removesuffix(implied) == host.removesuffix(implied)


def _hostname(host: str) -> str:
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


class Entrance:
    """Accept on a listening socket until `stop`, entirely in the running event loop."""

    def __init__(
        self,
        listening: socket.socket,
        config: uvicorn.Config,
        *,
        tls: ssl.SSLContext | None = None,
        limits: Limits | None = None,
        say: Say = lambda text: None,
    ) -> None:
        if not config.loaded:
            config.load()
        self._listening, self._config, self._tls, self._say = listening, config, tls, say
        self._limits = limits or Limits()
        self._census = Census(self._limits)
        self._loop = asyncio.get_running_loop()
        self._state = ServerState()
        self._state.default_headers = [(b"connection", b"close")]  # one request each: no second one can stall
        self._arriving: set[asyncio.Task[None]] = set()
        self._said_s = -math.inf
        self._loop.add_reader(listening, self._accept)

    @property
    def connections(self) -> int:
        return self._census.total

    async def stop(self, patience_s: float) -> None:
        """Stop accepting; responses in flight still go out if peers take them in time."""
        self._loop.remove_reader(self._listening)
        self._listening.close()
        await asyncio.sleep(0)  # a task that never started would never close its socket
        for task in self._arriving:
            task.cancel()
        for connection in list(self._state.connections):
            with contextlib.suppress(h11.ProtocolError):  # already closing after a protocol error
                connection.shutdown()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await asyncio.gather(*self._arriving, *self._state.tasks, return_exceptions=True)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                sock, peer = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as fault:
                log.error("cannot accept connections: %s", fault.strerror)
                self._loop.remove_reader(self._listening)
                self._loop.call_later(_PAUSE_S, self._accept_again)
                return
            address = str(peer[0])
            place = self._census.enter(address, self._loop.time())
            if isinstance(place, str):
                self._say_once(f"a connection from {address} was refused: {place}")
                sock.close()
                continue
            place.close = sock.close
            task = self._loop.create_task(self._admit(sock, place))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    def _accept_again(self) -> None:
        if self._listening.fileno() >= 0:
            self._loop.add_reader(self._listening, self._accept)

    def _say_once(self, text: str) -> None:
        """Log every refusal but announce at most one a minute, so that a flood of connections floods no one."""
        log.info(text)
        if self._loop.time() - self._said_s >= _SAY_S:
            self._said_s = self._loop.time()
            self._say(text)

    async def _admit(self, sock: socket.socket, place: Place) -> None:
        """Hand an accepted connection to uvicorn. Failures end this connection and nothing else."""
        task = asyncio.current_task()
        assert task is not None
        place.close = task.cancel
        try:
            sock.setblocking(False)
            async with asyncio.timeout(self._limits.first_byte_s):
                first = await self._first_byte(sock)
            if not first:
                raise ConnectionError("closed before its first byte")
            if (first == _TLS_RECORD) != (self._tls is not None):
                await _answer(sock, _PLAIN_HERE if self._tls is None else _TLS_HERE)
                raise ConnectionError("plain where TLS is required, or the reverse")
        except BaseException as fault:
            sock.close()
            place.leave()
            if not isinstance(fault, OSError | TimeoutError):
                raise
            log.debug("connection not admitted: %s", fault)
            return
        try:  # from here on the transport closes the socket
            await self._loop.connect_accepted_socket(
                lambda: _Guest(self._config, self._state, place, self._limits.request_s),
                sock,
                ssl=self._tls,
                ssl_handshake_timeout=self._limits.request_s if self._tls is not None else None,
            )
        except BaseException as fault:
            place.leave()
            if not isinstance(fault, OSError | TimeoutError):  # ssl.SSLError is an OSError
                raise
            log.debug("TLS handshake failed: %s", fault)

    async def _first_byte(self, sock: socket.socket) -> bytes:
        """Peek at the first byte, leaving it for the next reader; empty if the peer is gone."""
        readable = self._loop.create_future()
        self._loop.add_reader(sock, lambda: readable.done() or readable.set_result(None))
        try:
            await readable
        finally:
            self._loop.remove_reader(sock)
        return sock.recv(1, socket.MSG_PEEK)


def place_of(app_state: object) -> Place:
    """Return the place of a connection that becomes a WebSocket: to be admitted, and to leave once that is closed."""
    return cast("dict[str, Place]", app_state)[_PLACE]


class _Guest(H11Protocol):
    """uvicorn's HTTP protocol, with a deadline for the request to arrive."""

    def __init__(self, config: uvicorn.Config, state: ServerState, place: Place, request_s: float) -> None:
        super().__init__(config, state, {_PLACE: place})
        self._place, self._request_s = place, request_s
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        super().connection_made(transport)
        self._place.close = transport.abort
        self._deadline = self.loop.call_later(self._request_s, self._check)

    def _check(self) -> None:
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self.transport.abort()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        self._forget_deadline()
        super().handle_websocket_upgrade(event)

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget_deadline()
        self._place.leave()
        super().connection_lost(exc)

    def _forget_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()


async def _answer(sock: socket.socket, answer: bytes) -> None:
    """Send an answer and wait until it was read: closing with input unread would reset the connection and lose it."""
    loop = asyncio.get_running_loop()
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_LINGER_S):
            await loop.sock_sendall(sock, answer)
            sock.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(sock, 4096):
                pass


def _response(status: str, headers: str, sentence: str) -> bytes:
    body = f"{sentence}\n"
    head = f"HTTP/1.1 {status}\r\n{headers}Connection: close\r\nContent-Type: text/plain; charset=utf-8\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


_TLS_HERE = _response(
    "426 Upgrade Required",
    "Upgrade: TLS/1.2\r\n",
    "expected TLS, got a plain connection; use wss:// or https://, with the address the run printed",
)
_PLAIN_HERE = _response("400 Bad Request", "", "expected a plain connection, got TLS; use ws:// or http://")
