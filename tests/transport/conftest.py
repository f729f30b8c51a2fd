"""Every kind of channel, from either end.

The server end of a WebSocket is the real `Service`, in its own thread and event loop; only the cluster behind it is
replaced, by one that hands out the channels it is given.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from typing import cast

import numpy as np
import pytest
from tests.support.channels import SOON_S, Abroad, Doorman, Here, Pair

from cleave.errors import ConnectionLost
from cleave.server.admission import certificate
from cleave.server.admission.certificate import Certificate
from cleave.server.cluster import Cluster
from cleave.server.service import Service
from cleave.transport.base import Channel
from cleave.transport.faulty import FaultyChannel
from cleave.transport.memory import memory_pair
from cleave.transport.shaped import End, Link, Shaped, shaping
from cleave.transport.websocket import dial


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    service = Service("127.0.0.1:0", lambda loop: cast(Cluster, Doorman(loop)))
    service.start()
    yield service
    service.stop("done", rejoin=False)


GENEROUS = Link(down_bytes_per_s=2e9, up_bytes_per_s=2e9, latency_s=1e-3, medium_bytes_per_s=4e9)


@pytest.fixture(scope="module")
def shaped_service() -> Iterator[Service]:
    service = Service("127.0.0.1:0", lambda loop: cast(Cluster, Doorman(loop)), wrap=shaping(GENEROUS))
    service.start()
    yield service
    service.stop("done", rejoin=False)


@pytest.fixture(scope="module")
def own() -> Certificate:
    return certificate.own(None, [])


@pytest.fixture(scope="module")
def secure_service(own: Certificate) -> Iterator[Service]:
    service = Service("127.0.0.1:0", lambda loop: cast(Cluster, Doorman(loop)), certificate=own)
    service.start()
    yield service
    service.stop("done", rejoin=False)


OVER_MEMORY = [
    "memory",
    "faulty",
    "shaped-to-memory",
    "memory-to-shaped",
    "shaped-device-to-memory",
    "memory-to-shaped-device",
]
WAYS = ["device-to-server", "server-to-device"]
OVER_WEBSOCKETS = [f"{kind}{way}" for kind in ("", "tls-", "shaped-", "paced-", "tls-paced-") for way in WAYS]


@pytest.fixture(params=OVER_MEMORY + OVER_WEBSOCKETS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    if request.param in OVER_MEMORY:
        left, right = memory_pair()
        if request.param == "faulty":  # without a fault, just another channel
            yield Here(_faultless(left)), Here(_faultless(right))
        elif request.param == "memory":
            yield Here(left), Here(right)
        else:
            end: End = "device" if "device" in request.param else "server"
            shaped, plain = Here(Shaped(left, GENEROUS, end=end)), Here(right)
            yield (shaped, plain) if request.param.startswith("shaped") else (plain, shaped)
        await left.close()
        return
    secure = request.param.startswith("tls-")
    named = {"tls": "secure_service", "shaped": "shaped_service"}
    service: Service = request.getfixturevalue(named.get(request.param.partition("-")[0], "service"))
    pin = f"#sha256:{request.getfixturevalue('own').fingerprint}" if secure else ""
    doorman = cast(Doorman, service.cluster)
    link = GENEROUS if "paced" in request.param else None
    dialled = await dial(f"{'wss' if secure else 'ws'}://{service.address}/ws{pin}", link)
    channel, over = await doorman.next()
    device, server = Here(dialled), Abroad(channel, doorman.loop)
    yield (device, server) if request.param.endswith("device-to-server") else (server, device)
    doorman.loop.call_soon_threadsafe(over.set)
    async with asyncio.timeout(SOON_S):
        with contextlib.suppress(ConnectionLost):
            while True:  # drain unread messages; otherwise closing waits for them in vain
                await dialled._receive()
    await dialled.close()


def _faultless(channel: Channel) -> FaultyChannel:
    return FaultyChannel(channel, (), np.random.default_rng(0))
