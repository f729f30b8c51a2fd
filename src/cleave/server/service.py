"""The server's only port: WebSockets of devices at /ws, the page that makes a browser a device at /join, the
dashboard at / and, for administrators, what it shows (/api/status, /api/plan, /api/activity, /api/advice, /api/events),
orders to devices (/api/orders), and /metrics for Prometheus.

Runs an event loop in its own thread, so that training in other threads continues undisturbed. Connections have passed
`admission/gate.py`; answers to strangers reveal nothing about the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import cast

import msgspec
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from cleave.core.plan.advice import Advice
from cleave.descriptors import descriptors
from cleave.errors import InputError
from cleave.server import event_stream, process_settings, tiling
from cleave.server.admission.certificate import Certificate
from cleave.server.admission.doorkeeper import WITHIN_S
from cleave.server.admission.gate import Entrance, Limits, Say, fitting, is_loopback, objection_to, place_of
from cleave.server.admission.tokens import Keys
from cleave.server.cluster import Cluster
from cleave.server.metrics import CONTENT_TYPE, as_metrics
from cleave.server.orders import obey
from cleave.server.pages import page_routes
from cleave.transport.base import Channel
from cleave.transport.websocket import Accepting

_ADVISED_S = 30.0
_STOP_S = 5.0
_PATIENCE_S = 2.0  # for goodbyes to devices, and for responses in flight
_ADMIN_ONLY = "expected an admin token (Authorization: Bearer ...); cleave token add --role admin prints one"
_BUSY = "too many tokens are being checked; try again later"

Answer = Callable[[Request], Awaitable[Response]]
Wrap = Callable[[Channel], Channel]
"""Wraps each connection before the server talks to a device."""


class Service:
    """A cluster behind a port; `start` returns once devices can join."""

    def __init__(
        self,
        listen: str,
        make_cluster: Callable[[asyncio.AbstractEventLoop], Cluster],
        *,
        keys: Keys | None = None,
        certificate: Certificate | None = None,
        limits: Limits | None = None,
        wrap: Wrap | None = None,
        say: Say = lambda text: None,
        events: Path | None = None,
    ) -> None:
        """`events` is the log of the run, for /api/events, if it has one."""
        self._events = events
        self._keys, self._certificate, self._limits, self._say = keys or Keys(), certificate, limits, say
        self._wrap = wrap
        self._socket = bind(listen)
        host, port = self._socket.getsockname()[:2]
        self.host, self.port = str(host), int(port)
        self.is_local = is_loopback(self.host)
        self._loop = _new_loop()
        self.cluster = make_cluster(self._loop)
        self._stopping = asyncio.Event()
        self._advised_at, self._advice_given = -_ADVISED_S, tuple[Advice, ...]()
        self._stays: set[asyncio.Task[None]] = set()
        self._started = threading.Event()
        self._is_stopped = False
        self._thread = threading.Thread(target=self._run, name="cleave-server", daemon=True)

    @property
    def address(self) -> str:
        """HOST:PORT it listens on."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def start(self) -> None:
        process_settings.acquire()
        self._thread.start()
        self._started.wait()

    def stop(self, reason: str, *, rejoin: bool) -> None:
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._thread.is_alive():
            closing = asyncio.run_coroutine_threadsafe(self.cluster.close(reason, rejoin=rejoin), self._loop)
            with contextlib.suppress(TimeoutError):
                closing.result(_STOP_S)
            self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join(_STOP_S)
        process_settings.release()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
            self._loop.run_until_complete(asyncio.sleep(0))  # for work submitted just now, which fails as closed
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        config = uvicorn.Config(
            Starlette(routes=self._routes()),
            http="h11",
            ws=cast("type[asyncio.Protocol]", self._upgrade),
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        tls = self._certificate.context if self._certificate is not None else None
        limits = fitting(self._limits or Limits(), *descriptors())
        entrance = Entrance(self._socket, config, tls=tls, limits=limits, say=self._say)
        self._started.set()
        await self._stopping.wait()
        await entrance.stop(_PATIENCE_S)
        if self._stays:
            await asyncio.wait(self._stays, timeout=_PATIENCE_S)
        for stay in self._stays:
            stay.cancel()
        await asyncio.gather(*self._stays, return_exceptions=True)

    def _routes(self) -> list[Route]:
        return [
            Route("/healthz", _healthy),
            Route("/api/status", self._for_admins(self._status)),
            Route("/api/plan", self._for_admins(self._plan)),
            Route("/api/activity", self._for_admins(self._activity)),
            Route("/api/advice", self._for_admins(self._advice)),
            Route("/api/orders", self._for_admins(self._order, with_token=True), methods=["POST"]),
            Route("/api/events", self._for_admins(self._follow)),
            Route("/metrics", self._for_admins(self._metrics)),
            *page_routes(),
        ]

    def _upgrade(self, config: uvicorn.Config, server_state: ServerState, app_state: object) -> Accepting:
        """Take a WebSocket from uvicorn: the connection goes to the cluster, bypassing ASGI and its copies."""
        place = place_of(app_state)
        return Accepting("/ws", self._join, objection=self._objection, admitted=place.admit, ended=place.leave)

    def _objection(self, origins: list[str], hosts: list[str]) -> str:
        return objection_to(origins, hosts, open_here=self._is_open_here)

    @property
    def _is_open_here(self) -> bool:
        """Whether only this machine can connect, and no token is required."""
        return self.is_local and self._keys.is_open

    def _join(self, channel: Channel) -> None:
        wrapped = channel if self._wrap is None else self._wrap(channel)
        stay = self._loop.create_task(self.cluster.serve(wrapped))
        self._stays.add(stay)
        stay.add_done_callback(self._stays.discard)

    def _for_admins(self, answer: Answer, *, with_token: bool = False) -> Answer:
        """Require an admin token; unless `with_token`, a run without any key answers this machine's own programs."""

        async def checked(request: Request) -> Response:
            why = self._objection(request.headers.getlist("origin"), request.headers.getlist("host"))
            if why:
                return PlainTextResponse(f"{why}\n", 403)
            is_nobodys = self.is_local and self._keys.is_bare and not with_token
            try:
                is_allowed = is_nobodys or await self._is_admin(request)
            except TimeoutError:
                return PlainTextResponse(f"{_BUSY}\n", 503)
            if is_allowed:
                return await answer(request)
            return PlainTextResponse(f"{_ADMIN_ONLY}\n", 401, {"WWW-Authenticate": "Bearer"})

        return checked

    async def _is_admin(self, request: Request) -> bool:
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        address = request.client.host if request.client is not None else ""
        async with asyncio.timeout(WITHIN_S):
            return scheme.lower() == "bearer" and await self.cluster.administers(token.strip(), address)

    async def _status(self, request: Request) -> Response:
        return _json(self.cluster.status())

    async def _plan(self, request: Request) -> Response:
        plan, product = self.cluster.plan(), self.cluster.product
        return _json(
            {
                "pass": None if plan is None else tiling.of_pass(plan),
                "product": None if product is None or plan is not None else tiling.of_product(product),
            }
        )

    async def _activity(self, request: Request) -> Response:
        return _json(self.cluster.activity())

    async def _advice(self, request: Request) -> Response:
        """Plan for other fleets, off the loop and not more often than needed."""
        now = self._loop.time()
        if now - self._advised_at > _ADVISED_S:
            self._advised_at = now
            self._advice_given = await asyncio.to_thread(self.cluster.planning.advice)
        return _json(self._advice_given)

    async def _order(self, request: Request) -> Response:
        try:
            obey(await request.body(), self.cluster, self._keys)
        except InputError as fault:
            return PlainTextResponse(f"{fault}\n", 400)
        return Response(status_code=204)

    async def _follow(self, request: Request) -> Response:
        if self._events is None:
            return PlainTextResponse("this run keeps no events\n", 404)
        return StreamingResponse(
            event_stream.follow(self._events, self._stopping), media_type=event_stream.CONTENT_TYPE
        )

    async def _metrics(self, request: Request) -> Response:
        return Response(as_metrics(self.cluster.status()), headers={"Content-Type": CONTENT_TYPE})


def _json(what: object) -> Response:
    """Encode fast, as thousands of devices must not stall the event loop; what is not finite is null."""
    return Response(msgspec.json.encode(what), media_type="application/json")


async def _healthy(request: Request) -> Response:
    """Say that the event loop runs: for load balancers and service managers."""
    return PlainTextResponse("ok\n")


def bind(listen: str) -> socket.socket:
    """Listen on HOST:PORT, or raise InputError."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise InputError(f"expected --listen HOST:PORT such as 0.0.0.0:7077, got {listen!r}")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, int(port)))
    except OSError as fault:
        bound.close()
        raise InputError(f"cannot listen on {listen}: {fault.strerror}; choose another --listen HOST:PORT") from None
    bound.listen(1024)
    bound.setblocking(False)
    return bound


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.SelectorEventLoop()  # even where another is the default: the gate watches bare sockets
    return uvloop.new_event_loop()
