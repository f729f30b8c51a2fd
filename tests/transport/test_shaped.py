"""Laws of a shaped link, in virtual time: how long bytes take, which messages wait, and that all else is unchanged.

`ours` is the end with the link, the server's unless said otherwise; `theirs` has none of its own and sees only that
link.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from tests.support.virtual import run
from tests.support.world import World, layer

from cleave.api.fleet import Fleet
from cleave.errors import ConnectionLost, InputError, ProtocolError
from cleave.protocol import messages
from cleave.protocol.frames import PART_BYTES, Buffer
from cleave.protocol.messages import Failed, Store
from cleave.transport.base import Channel, Received
from cleave.transport.memory import MemoryChannel, memory_pair
from cleave.transport.shaped import End, Link, Medium, Shaped, shaping

RATE = 1e6
LATENCY_S = 0.25
SLOW = Link(down_bytes_per_s=RATE, up_bytes_per_s=2 * RATE, latency_s=LATENCY_S)
SLICE_S = (64 << 10) / RATE
NEARLY = 1e-4
"""Tolerance in seconds: each reading of the clock takes a microsecond (virtual.py)."""
SIZES = [0, 1, 1000, PART_BYTES, 2 * PART_BYTES + 3]


def strip(number: int, payload: Buffer) -> Store:
    return Store(operand=number, rows=1, cols=1, format="fp32", first_row=0, strip_rows=1, payload=len(payload))


def whole_bytes(payload: Buffer) -> int:
    return len(messages.encode(strip(0, payload))) + len(payload)


def shaped_pair(link: Link = SLOW, medium: Medium | None = None, end: End = "server") -> tuple[Shaped, MemoryChannel]:
    ours, theirs = memory_pair()
    return Shaped(ours, link, medium, end=end), theirs


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def crossing(
    sender: Channel, receiver: Channel, payload: bytes, number: int = 0
) -> tuple[float, float, Received]:
    """Send a message; return when sending was done, when it arrived, and what arrived."""
    receiving = asyncio.ensure_future(timed(receiver.receive()))
    _, sent_s = await timed(sender.send(strip(0, payload), payload))
    received, arrived_s = await receiving
    return sent_s, arrived_s, received


async def timed(verb: Coroutine[Any, Any, Any]) -> tuple[Any, float]:
    result = await verb
    return result, now_s()


def law(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run(main(), limit_s=1000)


# ------------------------------------------------------------------------------------------------ timing


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("way", ["down", "up"])
@pytest.mark.parametrize("end", ["server", "device"])
def test_a_message_takes_its_bytes_over_the_rate_and_the_latency(end: End, way: str, size: int) -> None:
    async def main() -> None:
        ours, theirs = shaped_pair(end=end)
        is_sent = (way == "down") == (end == "server")
        sender, receiver = (ours, theirs) if is_sent else (theirs, ours)
        rate = RATE if way == "down" else 2 * RATE
        payload = bytes(size)
        sent_s, arrived_s, received = await crossing(sender, receiver, payload)
        alone_s = whole_bytes(payload) / rate
        assert arrived_s == pytest.approx(alone_s + LATENCY_S, abs=NEARLY)
        assert received.link_s == pytest.approx(size / rate, abs=NEARLY)
        if is_sent:
            assert sent_s == pytest.approx(alone_s, abs=NEARLY), "sending is done when the bytes have left"

    law(main)


@pytest.mark.parametrize("way", ["down", "up"])
def test_back_to_back_messages_pay_the_latency_once(way: str) -> None:
    async def main() -> None:
        ours, theirs = shaped_pair()
        sender, receiver, rate = (ours, theirs, RATE) if way == "down" else (theirs, ours, 2 * RATE)
        payload = bytes(5000)

        async def send() -> None:
            for _ in range(50):
                await sender.send(strip(0, payload), payload)

        sending = asyncio.ensure_future(send())
        for _ in range(50):
            await receiver.receive()
        await sending
        assert now_s() == pytest.approx(50 * whole_bytes(payload) / rate + LATENCY_S, abs=2 * NEARLY)

    law(main)


def test_an_idle_link_saves_up_no_capacity() -> None:
    async def main() -> None:
        ours, theirs = shaped_pair()
        payload = bytes(100_000)
        for rest_s in (0.0, 0.003, 0.1, 60.0):
            await asyncio.sleep(rest_s)
            started_s = now_s()
            _, arrived_s, _ = await crossing(ours, theirs, payload)
            assert arrived_s - started_s == pytest.approx(whole_bytes(payload) / RATE + LATENCY_S, abs=NEARLY)

    law(main)


def test_the_two_directions_of_a_link_are_independent() -> None:
    async def main() -> None:
        ours, theirs = shaped_pair(Link(down_bytes_per_s=RATE, up_bytes_per_s=RATE))
        payload = bytes(1_000_000)
        await asyncio.gather(crossing(ours, theirs, payload), crossing(theirs, ours, payload))
        assert now_s() == pytest.approx(whole_bytes(payload) / RATE, abs=2 * NEARLY)

    law(main)


# ------------------------------------------------------------------------------------------------ shared medium


@pytest.mark.parametrize("ways", [("down", "down"), ("up", "up"), ("down", "up")])
def test_two_messages_on_one_medium_take_as_long_as_their_sum(ways: tuple[str, str]) -> None:
    async def main() -> None:
        wrap = shaping(Link(medium_bytes_per_s=RATE, latency_s=LATENCY_S))
        payload = bytes(3_000_000)
        crossings: list[Coroutine[Any, Any, tuple[float, float, Received]]] = []
        for way in ways:
            inner, theirs = memory_pair()
            ours = wrap(inner)
            crossings.append(crossing(*((ours, theirs) if way == "down" else (theirs, ours)), payload))
        arrivals = [arrived_s for _, arrived_s, _ in await asyncio.gather(*crossings)]
        together_s = 2 * whole_bytes(payload) / RATE + LATENCY_S
        assert max(arrivals) == pytest.approx(together_s, abs=2 * NEARLY)
        assert min(arrivals) > together_s - 2 * SLICE_S, "they take turns"

    law(main)


def test_a_small_message_does_not_wait_for_another_links_large_one() -> None:
    async def main() -> None:
        medium = Medium(RATE)
        channels = [shaped_pair(Link(), medium) for _ in range(4)]
        large = [asyncio.ensure_future(crossing(*pair, bytes(5_000_000))) for pair in channels[1:]]
        await asyncio.sleep(1.0)
        _, arrived_s, _ = await crossing(*channels[0], b"")
        assert arrived_s - 1.0 < 4 * SLICE_S
        await asyncio.gather(*large)

    law(main)


def test_a_slow_link_leaves_the_medium_to_others() -> None:
    async def main() -> None:
        medium = Medium(RATE)
        slow, fast = shaped_pair(Link(down_bytes_per_s=RATE / 10), medium), shaped_pair(Link(), medium)
        small, large = bytes(100_000), bytes(900_000)
        arrivals = await asyncio.gather(crossing(*slow, small), crossing(*fast, large))
        assert [arrived_s for _, arrived_s, _ in arrivals] == pytest.approx([1.0, 1.0], abs=2 * SLICE_S)

    law(main)


# ------------------------------------------------------------------------------------------------ measurements


@pytest.mark.parametrize("late_s", [0.0, 5.0])
def test_a_late_reader_still_measures_the_links_own_time(late_s: float) -> None:
    async def main() -> None:
        ours, theirs = shaped_pair()
        payload = bytes(1_000_000)
        await theirs.send(Failed(task=1, reason=""))
        await theirs.send(strip(0, payload), payload)
        await ours.receive()
        await asyncio.sleep(late_s)
        assert (await ours.receive()).link_s == pytest.approx(0.5, abs=NEARLY)

    law(main)


@pytest.mark.parametrize(
    ("link", "down", "up", "least"),
    [
        (Link(down_bytes_per_s=4e6, up_bytes_per_s=1e6, latency_s=0.02), 4e6, 1e6, 0.99),
        (Link(medium_bytes_per_s=37.5e6, latency_s=0.002), 37.5e6, 37.5e6, 0.5),
    ],
    ids=["own", "medium"],
)
def test_a_server_measures_the_rates_of_the_link(link: Link, down: float, up: float, least: float) -> None:
    """At work as well as when probed; on a shared medium, operands and results get at least half each."""

    async def main() -> None:
        world = Shapely(link)
        await world.join("device")
        (member,) = world.cluster.here()
        assert member.down.value == pytest.approx(down, rel=0.01)
        assert member.up.value == pytest.approx(up, rel=0.01)
        assert 2 * link.latency_s <= member.latency_s < 2 * link.latency_s + 0.001
        for seed in range(3):
            await world.products(layer(seed, tokens=2000))
        assert least * down < member.down.value < 1.01 * down
        assert least * up < member.up.value < 1.01 * up
        await world.close()

    law(main)


def test_a_fleet_gives_its_devices_the_links_it_is_given() -> None:
    """The real network can only be slower; without a link it would be a hundred times as fast."""
    with Fleet.local(1, links=Link(up_bytes_per_s=4e6, medium_bytes_per_s=8e6, latency_s=0.01)) as fleet:
        (member,) = fleet.cluster.here()
        assert fleet.medium_bytes_per_s == 8e6
        assert member.up.value < 1.01 * 4e6
        assert member.down.value < 2 * 8e6
        assert member.latency_s > 0.015
        identity = np.eye(300, dtype=np.float32)
        np.testing.assert_array_equal(fleet.matmul(identity, 3 * identity), 3 * identity)


class Shapely(World):
    """A world whose devices have links."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._wrap = shaping(link)

    def connect(self) -> MemoryChannel:
        ours, theirs = memory_pair()
        self._stays.append(self.loop.create_task(self.cluster.serve(self._wrap(ours)), name="connection"))
        return theirs


def test_bytes_count_as_they_move_and_silence_counts_once_they_stop() -> None:
    async def main() -> None:
        ours, theirs = shaped_pair()
        payload = bytes(4_000_000)
        crossed = asyncio.ensure_future(crossing(theirs, ours, payload))
        for moment_s in (0.5, 1.0, 1.5):
            await asyncio.sleep(0.5)
            assert ours.moved_bytes == pytest.approx(moment_s * 2 * RATE, abs=64 << 10)
            assert ours.silent_s == 0
        await crossed
        assert ours.moved_bytes == ours.received_bytes == theirs.sent_bytes == whole_bytes(payload)
        await asyncio.sleep(7.0)
        assert ours.silent_s == pytest.approx(7.0 + LATENCY_S, abs=NEARLY)

    law(main)


@pytest.mark.parametrize("end", ["server", "device"])
def test_a_peer_sees_a_long_payload_advance(end: End) -> None:
    async def main() -> None:
        ours, theirs = shaped_pair(Link(down_bytes_per_s=RATE, up_bytes_per_s=RATE), end=end)
        crossed = asyncio.ensure_future(crossing(ours, theirs, bytes(4_000_000)))
        seen: list[int] = []
        while not crossed.done():
            await asyncio.wait([crossed], timeout=1.0)
            seen.append(theirs.moved_bytes)
        assert all(after > before for before, after in pairwise(seen))
        assert len(seen) >= 4

    law(main)


# ------------------------------------------------------------------------------------------------ channel contract


def test_messages_from_many_senders_of_many_sizes_keep_their_order() -> None:
    async def main() -> None:
        rng = random.Random(1)
        medium = Medium(3 * RATE)
        payloads = [[rng.randbytes(rng.choice((0, 10, 70_000, 300_000))) for _ in range(30)] for _ in range(4)]

        async def one_way(sender: Channel, receiver: Channel, sent: list[bytes]) -> None:
            async def send() -> None:
                for number, payload in enumerate(sent):
                    await sender.send(strip(number, payload), payload)

            sending = asyncio.ensure_future(send())
            for number, payload in enumerate(sent):
                received = await receiver.receive()
                assert (received.message, bytes(received.payload)) == (strip(number, payload), payload)
            await sending

        pairs = [shaped_pair(SLOW, medium) for _ in range(2)]
        ways = [way for ours, theirs in pairs for way in ((ours, theirs), (theirs, ours))]
        await asyncio.gather(*(one_way(*way, sent) for way, sent in zip(ways, payloads, strict=True)))

    law(main)


@pytest.mark.parametrize("way", ["down", "up"])
def test_a_peer_that_does_not_read_makes_the_sender_wait(way: str) -> None:
    async def main() -> None:
        ours, theirs = shaped_pair(Link())
        sender, receiver = (ours, theirs) if way == "down" else (theirs, ours)
        payload = bytes(1_000_000)

        async def flood() -> None:
            for _ in range(200):
                await sender.send(strip(0, payload), payload)

        await theirs.send(Failed(task=1, reason=""))
        await ours.receive()
        flooding = asyncio.ensure_future(flood())
        await asyncio.wait([flooding], timeout=100)
        assert not flooding.done()
        assert sender.sent_bytes < 40e6
        for _ in range(200):
            await receiver.receive()
        await flooding

    law(main)


@pytest.mark.parametrize("listens", [True, False])
@pytest.mark.parametrize("who", ["ours", "theirs"])
def test_a_close_ends_waiting_senders_and_receivers_at_once(who: str, listens: bool) -> None:
    async def main() -> None:
        ours, theirs = shaped_pair()
        payload = bytes(60_000_000)
        waiting = [
            asyncio.ensure_future(timed(ours.send(strip(0, payload), payload))),
            asyncio.ensure_future(timed(ours.send(Failed(task=1, reason="")))),
            *([asyncio.ensure_future(timed(ours.receive()))] if listens else []),
        ]
        await asyncio.wait(waiting, timeout=1.0)
        await (ours if who == "ours" else theirs).close("enough")
        for verb in waiting:
            with pytest.raises(ConnectionLost):
                await verb
        assert now_s() == pytest.approx(1.0, abs=NEARLY)
        assert ours.moved_bytes <= RATE

    law(main)


def test_bytes_that_left_before_a_close_still_arrive() -> None:
    async def main() -> None:
        ours, theirs = shaped_pair()
        payload = bytes(100_000)
        await ours.send(strip(0, payload), payload)
        closing = asyncio.ensure_future(ours.close("done"))
        assert (await theirs.receive()).payload == payload
        with pytest.raises(ConnectionLost, match="done"):
            await theirs.receive()
        await closing

    law(main)


def test_a_close_does_not_wait_for_a_peer_that_does_not_read() -> None:
    async def main() -> None:
        ours, _ = shaped_pair(Link(latency_s=LATENCY_S))
        flooding = asyncio.ensure_future(asyncio.wait_for(_flood(ours), 10.0))
        with pytest.raises(TimeoutError):
            await flooding
        started_s = now_s()
        await ours.close()
        assert now_s() - started_s < 2.0

    law(main)


async def _flood(channel: Channel) -> None:
    while True:
        await channel.send(Failed(task=1, reason=""))
        await asyncio.sleep(0.01)


def test_a_deadline_ends_a_receive_on_time_and_loses_nothing() -> None:
    async def main() -> None:
        ours, theirs = shaped_pair()
        payload = bytes(1_000_000)
        await theirs.send(strip(0, payload), payload)
        for moment_s in (0.1, 0.2, 0.3, 0.4):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout_at(moment_s):
                    await ours.receive()
            assert now_s() == pytest.approx(moment_s, abs=NEARLY)
        received = await ours.receive()
        assert received.payload == payload
        assert received.link_s == pytest.approx(0.5, abs=NEARLY)
        assert now_s() == pytest.approx(whole_bytes(payload) / 2 / RATE + LATENCY_S, abs=NEARLY)

    law(main)


def test_a_cancelled_send_ends_on_time_and_the_link_is_free() -> None:
    async def main() -> None:
        medium = Medium(RATE)
        (ours, _), other = shaped_pair(Link(), medium), shaped_pair(Link(), medium)
        payload = bytes(60_000_000)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout_at(1.0):
                await ours.send(strip(0, payload), payload)
        assert now_s() == pytest.approx(1.0, abs=NEARLY)
        _, arrived_s, _ = await crossing(*other, b"")
        assert arrived_s < 1.0 + 2 * SLICE_S
        with pytest.raises(ConnectionLost, match="cut short"):
            await ours.send(Failed(task=1, reason=""))

    law(main)


def test_a_guarded_end_refuses_payloads_until_they_are_allowed() -> None:
    async def main() -> None:
        for allowed in (None, 1000):
            inner, theirs = memory_pair(guarded=True)
            ours, payload = Shaped(inner, SLOW), bytes(1000)
            if allowed is not None:
                ours.allow(allowed)
            await theirs.send(strip(0, payload), payload)
            if allowed is None:
                with pytest.raises(ProtocolError, match="at most 0 bytes, got 1000"):
                    await ours.receive()
            else:
                assert (await ours.receive()).payload == payload
            await ours.close()  # its task would be garbage once the name is bound anew

    law(main)


@pytest.mark.parametrize(
    "wrong",
    [
        {"down_bytes_per_s": 0.0},
        {"up_bytes_per_s": -1.0},
        {"medium_bytes_per_s": math.nan},
        {"latency_s": -0.1},
        {"latency_s": math.inf},
    ],
)
def test_an_impossible_link_is_an_input_error(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match="expected rates above 0"):
        Link(**wrong)
