"""The server's one port: WebSockets of devices at /ws, and its state as JSON at /api/status.

Runs an event loop in a thread of its own, so that training in other threads goes on undisturbed.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Callable
from typing import cast

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from uvicorn.server import ServerState

from cleave.errors import InputError
from cleave.server.cluster import Cluster
from cleave.transport.allocation import keep_freed_memory
from cleave.transport.base import Channel
from cleave.transport.websocket import Accepting

_SWITCH_S = 5e-4  # a busy training thread then leaves the event loop waiting 0.2 ms instead of 6
_STOP_S = 5.0


class Service:
    """A cluster behind a port; `start` returns once devices can join."""

    def __init__(self, listen: str, make_cluster: Callable[[asyncio.AbstractEventLoop], Cluster]) -> None:
        self._socket = _bind(listen)
        host, port = self._socket.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._loop = _new_loop()
        self.cluster = make_cluster(self._loop)
        self._server: uvicorn.Server | None = None
        self._stays: set[asyncio.Task[None]] = set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cleave-server", daemon=True)

    def start(self) -> None:
        sys.setswitchinterval(_SWITCH_S)
        keep_freed_memory()
        self._thread.start()
        self._started.wait()

    def stop(self, reason: str, *, rejoin: bool) -> None:
        if not self._thread.is_alive():
            return
        closing = asyncio.run_coroutine_threadsafe(self.cluster.close(reason, rejoin=rejoin), self._loop)
        with contextlib.suppress(TimeoutError):
            closing.result(_STOP_S)
        assert self._server is not None
        self._server.should_exit = True
        self._thread.join(_STOP_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._loop.close()

    async def _serve(self) -> None:
        config = uvicorn.Config(
            Starlette(routes=[Route("/api/status", self._status)]),
            ws=cast("type[asyncio.Protocol]", self._upgrade),
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=2,
        )
        self._server = uvicorn.Server(config)
        self._loop.call_soon(self._started.set)
        await self._server.serve(sockets=[self._socket])

    def _upgrade(self, config: uvicorn.Config, server_state: ServerState, app_state: object) -> Accepting:
        """What uvicorn calls for a WebSocket: the connection goes to the cluster, past ASGI and its copies."""
        return Accepting("/ws", self._join)

    def _join(self, channel: Channel) -> None:
        stay = self._loop.create_task(self.cluster.serve(channel))
        self._stays.add(stay)
        stay.add_done_callback(self._stays.discard)

    async def _status(self, request: Request) -> JSONResponse:
        totals = self.cluster.totals()
        return JSONResponse(
            {
                "devices": [
                    {
                        "device": member.name,
                        "flops_per_s": member.flops.value,
                        "down_bytes_per_s": member.down.value,
                        "up_bytes_per_s": member.up.value,
                        "latency_s": member.latency_s,
                        "memory_bytes": member.memory_bytes,
                        "tasks": member.tasks,
                        "flops": member.flops_done,
                    }
                    for member in self.cluster.here()
                ],
                "down_bytes": totals.down_bytes,
                "up_bytes": totals.up_bytes,
                "products": totals.products,
            }
        )


def _bind(listen: str) -> socket.socket:
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
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
