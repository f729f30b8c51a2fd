"""Laws of a link emulated on a socket: no byte is faster than the link, in either direction, whatever the machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import cast

import pytest
from tests.support.channels import SOON_S, Doorman
from tests.support.virtual import run

from cleave.errors import ConnectionLost
from cleave.protocol.frames import Buffer
from cleave.protocol.messages import Failed, Store
from cleave.server.service import Service
from cleave.transport.base import Channel, Received
from cleave.transport.paced import Lane, PacedTransport
from cleave.transport.shaped import Link, Medium
from cleave.transport.stream import Stream
from cleave.transport.websocket import dial

RATE = 4e6
SIZE = 2_000_000


def strip(payload: Buffer) -> Store:
    return Store(operand=0, rows=1, cols=1, format="fp32", first_row=0, strip_rows=1, payload=len(payload))


# ------------------------------------------------------------------------------------------------ a lane


def test_slices_follow_each_other_at_the_rate_of_the_lane() -> None:
    lane = Lane(1e6, Medium())
    assert lane.reserve(1000, 10.0) == pytest.approx(10.001)
    lane.carried(10.0035)  # a late timer
    assert lane.reserve(1000, 10.004) == pytest.approx(10.002), "the next slice makes up for it"
    lane.carried(10.004)
    assert lane.reserve(1000, 20.0) == pytest.approx(20.001), "an idle lane saves up nothing"


def test_lanes_of_one_medium_take_turns() -> None:
    medium = Medium(1e6)
    lanes = [Lane(1e9, medium) for _ in range(3)]
    assert [lane.reserve(1000, 0.0) for lane in lanes] == pytest.approx([0.001, 0.002, 0.003])


@pytest.mark.parametrize("rate", [1e3, 1e6, 1e8, 1e11])
def test_a_slice_is_a_few_milliseconds_of_the_lane_within_bounds(rate: float) -> None:
    assert 4 << 10 <= Lane(rate, Medium()).slice_bytes <= 256 << 10


# ------------------------------------------------------------------------------------------------ a socket


@pytest.fixture
async def far(service: Service) -> Callable[[Link, Medium | None], object]:
    """Dial over a link; return both ends and a way to call the far one."""

    async def connect(link: Link, medium: Medium | None = None) -> tuple[Channel, Channel, asyncio.Event]:
        doorman = cast("Doorman", service.cluster)
        here = await dial(f"ws://{service.address}/ws", link, medium)
        there, over = await doorman.next()
        there.allow(64 << 20)
        return here, there, over

    return connect


def on(service: Service, coroutine: object) -> asyncio.Future[Received]:
    loop = cast("Doorman", service.cluster).loop
    return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, loop))  # type: ignore[arg-type]


@pytest.mark.parametrize("way", ["down", "up"])
@pytest.mark.parametrize("limit", ["own", "medium"])
async def test_no_payload_is_faster_than_the_link(service: Service, far: Callable, way: str, limit: str) -> None:
    link = Link(down_bytes_per_s=RATE, up_bytes_per_s=RATE) if limit == "own" else Link()
    here, there, over = await far(link, Medium(RATE) if limit == "medium" else None)
    payload = bytes(SIZE)
    started_s = time.perf_counter()
    async with asyncio.timeout(SOON_S):
        if way == "down":
            sending = on(service, there.send(strip(payload), payload))
            received = await here.receive()
            await sending
        else:
            receiving = on(service, there.receive())
            await here.send(strip(payload), payload)
            received = await receiving
    assert time.perf_counter() - started_s > 0.97 * SIZE / RATE
    assert bytes(received.payload) == payload
    assert received.sustained.seconds > 0.5 * SIZE / RATE, "the bytes came one by one, not all at the end"
    cast("Doorman", service.cluster).loop.call_soon_threadsafe(over.set)
    await here.close()


async def test_an_answer_takes_the_latency_of_both_ways(service: Service, far: Callable) -> None:
    here, there, over = await far(Link(latency_s=0.1))

    async def echo() -> None:
        await there.send((await there.receive()).message)

    started_s = time.perf_counter()
    async with asyncio.timeout(SOON_S):
        echoing = on(service, echo())
        await here.send(Failed(task=1, reason=""))
        await here.receive()
        await echoing
    assert time.perf_counter() - started_s > 0.19
    cast("Doorman", service.cluster).loop.call_soon_threadsafe(over.set)
    await here.close()


class Closed(asyncio.Transport):
    """A socket that the server closed a moment ago."""

    def is_closing(self) -> bool:
        return True

    def get_write_buffer_size(self) -> int:
        return 0

    def write(self, data: Buffer) -> None:
        raise RuntimeError("the handler is closed")


def test_bytes_on_their_way_to_a_socket_that_was_closed_are_dropped() -> None:
    async def main() -> None:
        paced = PacedTransport(Closed(), Stream(is_client=True), Lane(1e6, Medium()), 0.0, lambda reads: None)
        paced.write(bytes(20_000))
        await asyncio.sleep(1.0)
        assert paced.get_write_buffer_size() == 0

    run(main(), limit_s=10)  # in virtual time; fails if a callback raises


async def test_a_lost_connection_ends_a_sender_that_waits_for_the_link(service: Service, far: Callable) -> None:
    here, _, over = await far(Link(up_bytes_per_s=1e5))
    payload = bytes(50_000_000)
    sending = asyncio.ensure_future(here.send(strip(payload), payload))
    cast("Doorman", service.cluster).loop.call_soon_threadsafe(over.set)
    async with asyncio.timeout(SOON_S):
        with pytest.raises(ConnectionLost):
            await sending
    await here.close()


async def test_what_the_link_has_not_carried_does_not_count_as_sent(service: Service, far: Callable) -> None:
    here, there, over = await far(Link(down_bytes_per_s=RATE, up_bytes_per_s=RATE), None)
    payload = bytes(SIZE)
    async with asyncio.timeout(SOON_S):
        sending = on(service, there.send(strip(payload), payload))
        await sending
        on_the_way = there.flow.sent_bytes
        await here.receive()
        while there.flow.sent_bytes < SIZE:  # the last acknowledgment
            await asyncio.sleep(0)
    assert on_the_way < SIZE, "the system holds what the link has not carried yet"
    cast("Doorman", service.cluster).loop.call_soon_threadsafe(over.set)
    await here.close()
