"""One contract for every channel, from either end: order, wholeness, back-pressure, and how it ends.

Ends are named by what they do: `near` sends, `far` receives, until a law needs both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from tests.support.channels import SOON_S, End, Pair, filled, receive_all, send_all, strip

from cleave.errors import CleaveError, ConnectionLost, ProtocolError
from cleave.protocol import messages
from cleave.protocol.frames import MESSAGE_BYTES, PART_BYTES, PAYLOAD_BYTES
from cleave.protocol.messages import Bye, Failed, Probe, Store

STUCK_S = 0.2
FLOOD = 100
"""Messages of 1 MB each."""
ROOM_BYTES = 64 << 20
"""Limit on what both ends and the kernel hold of an unread flood: well under the flood, well over any buffer."""


# ------------------------------------------------------------------------------------------------ order, wholeness


@pytest.mark.parametrize(
    "size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 5 * PART_BYTES + 3], ids=lambda size: f"{size}-bytes"
)
async def test_a_payload_arrives_as_it_was_sent(pair: Pair, size: int) -> None:
    near, far = pair
    async with asyncio.timeout(SOON_S):
        payload = filled(size)
        await asyncio.gather(send_all(near, [payload] * 2), receive_all(far, [payload] * 2))
    header = len(messages.encode(strip(0, payload)))
    assert near.sent_bytes == far.received_bytes == 2 * (header + size)
    assert far.sent_bytes == near.received_bytes == 0


async def test_messages_arrive_in_order_both_ways_at_once(pair: Pair) -> None:
    near, far = pair
    there = [filled(size, 1) for size in (0, 3 * PART_BYTES, 1, 0, 100, PART_BYTES) * 4]
    back = [filled(size, 2) for size in (2 * PART_BYTES + 1, 0, 7, 2 * PART_BYTES) * 4]
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(
            send_all(near, there), send_all(far, back), receive_all(near, back), receive_all(far, there)
        )
    assert near.sent_bytes == far.received_bytes > sum(map(len, there))
    assert far.sent_bytes == near.received_bytes > sum(map(len, back))


async def test_a_view_of_something_larger_arrives_alone(pair: Pair) -> None:
    near, far = pair
    large = bytearray(filled(4 * PART_BYTES))
    view = memoryview(large)[PART_BYTES : 3 * PART_BYTES]
    async with asyncio.timeout(SOON_S):
        await asyncio.gather(near.send(strip(1, view), view), (receiving := asyncio.ensure_future(far.receive())))
    assert receiving.result().payload == view


async def test_concurrent_senders_never_mix_a_header_with_anothers_payload(pair: Pair) -> None:
    near, far = pair
    senders, each = 8, 6

    async def send(sender: int) -> None:
        for number in range(each):
            payload = bytes([sender]) * (number * PART_BYTES // 2 + sender)
            await near.send(strip(sender * each + number, payload), payload)

    async def receive() -> list[int]:
        seen = list[int]()
        for _ in range(senders * each):
            received = await far.receive()
            assert isinstance(received.message, Store)
            sender, number = divmod(received.message.operand, each)
            assert received.payload == bytes([sender]) * (number * PART_BYTES // 2 + sender)
            seen.append(received.message.operand)
        return seen

    async with asyncio.timeout(SOON_S):
        *_, seen = await asyncio.gather(*(send(sender) for sender in range(senders)), receive())
    for sender in range(senders):  # each sender's messages stay in order
        assert [number for number in seen if number // each == sender] == [sender * each + i for i in range(each)]


# ------------------------------------------------------------------------------------------------ back-pressure


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def flood(end: End, payload: bytes) -> None:
    for _ in range(FLOOD):
        await end.send(strip(1, payload), payload)


async def until_stuck(end: End, sending: asyncio.Future[None]) -> None:
    """Wait until a sender whose messages nobody reads makes no more progress."""
    sent_bytes = -1
    while sent_bytes < end.sent_bytes:
        sent_bytes = end.sent_bytes
        await asyncio.wait([sending], timeout=STUCK_S)
        assert not sending.done()


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
async def test_a_receiver_that_does_not_read_makes_the_sender_wait(pair: Pair) -> None:
    near, _ = pair
    payload = filled(PART_BYTES)
    before = resident_bytes()
    async with asyncio.timeout(SOON_S):
        sending = asyncio.ensure_future(flood(near, payload))
        await until_stuck(near, sending)
        assert near.sent_bytes < ROOM_BYTES
        assert resident_bytes() - before < 2 * ROOM_BYTES
        sending.cancel()
        await asyncio.wait([sending])


async def test_a_waiting_sender_continues_when_the_receiver_reads(pair: Pair) -> None:
    near, far = pair
    payload = filled(PART_BYTES)
    async with asyncio.timeout(SOON_S):
        sending = asyncio.ensure_future(flood(near, payload))
        await until_stuck(near, sending)
        for _ in range(FLOOD):
            assert len((await far.receive()).payload) == PART_BYTES
        await sending
    assert near.sent_bytes == far.received_bytes


async def test_a_waiting_sender_does_not_stop_the_other_direction(pair: Pair) -> None:
    near, far = pair
    async with asyncio.timeout(SOON_S):
        sending = asyncio.ensure_future(flood(near, filled(PART_BYTES)))
        await until_stuck(near, sending)
        await asyncio.gather(send_all(far, [filled(1000)] * 3), receive_all(near, [filled(1000)] * 3))
        sending.cancel()
        await asyncio.wait([sending])


# ------------------------------------------------------------------------------------------------ closing


async def test_a_close_ends_the_other_sides_receive_with_its_reason(pair: Pair) -> None:
    near, far = pair
    async with asyncio.timeout(SOON_S):
        receiving = asyncio.ensure_future(far.receive())
        await asyncio.wait([receiving], timeout=0.01)
        await near.close("enough for today")
        with pytest.raises(ConnectionLost, match="enough for today"):
            await receiving
        with pytest.raises(ConnectionLost):
            await far.receive()
        with pytest.raises(ConnectionLost):
            await far.send(Failed(task=1, reason=""))


async def send_for_ever(end: End) -> None:
    while True:
        await end.send(Failed(task=1, reason=""))
        await asyncio.sleep(0)  # sending alone may never let the event loop process what arrived


async def test_a_close_ends_the_other_sides_sending(pair: Pair) -> None:
    """Even if that side never receives; a few sends may still succeed before the close is noticed."""
    near, far = pair
    async with asyncio.timeout(SOON_S):
        await near.close()
        with pytest.raises(ConnectionLost):
            await send_for_ever(far)


async def test_messages_sent_before_the_close_still_arrive(pair: Pair) -> None:
    near, far = pair
    payloads = [filled(size) for size in (0, 1000, PART_BYTES + 1)]
    async with asyncio.timeout(SOON_S):
        await send_all(near, payloads)
        closing = asyncio.ensure_future(near.close("done"))
        await receive_all(far, payloads)
        with pytest.raises(ConnectionLost, match="done"):
            await far.receive()
        await closing


async def test_a_close_ends_a_waiting_sender(pair: Pair) -> None:
    near, far = pair
    async with asyncio.timeout(SOON_S):
        sending = asyncio.ensure_future(flood(near, filled(PART_BYTES)))
        await until_stuck(near, sending)
        await far.close("too much")
        with pytest.raises(ConnectionLost):
            await sending


async def test_a_closed_end_neither_sends_nor_receives_and_may_be_closed_again(pair: Pair) -> None:
    near, _ = pair
    async with asyncio.timeout(SOON_S):
        await near.close()
        with pytest.raises(ConnectionLost):
            await near.send(Failed(task=1, reason=""))
        with pytest.raises(ConnectionLost):
            await near.receive()
        await near.close("again")


@pytest.mark.parametrize("reason", ["x" * 500, "Zurück um fünf " * 20, "🔌" * 100])
async def test_a_close_reason_may_have_any_length_and_script(pair: Pair, reason: str) -> None:
    near, far = pair
    async with asyncio.timeout(SOON_S):
        closing = asyncio.ensure_future(near.close(reason))
        with pytest.raises(ConnectionLost, match=reason[:30]):
            await far.receive()
        await closing


# ------------------------------------------------------------------------------------------------ invalid input


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 10,
        b"",
        b"\x82\xa4type\xa7leaving\xa6reason\xa2\xff\xfe",
        messages.encode(Probe(answer=0, payload=PAYLOAD_BYTES + 1)),
        bytes(PART_BYTES),
    ],
    ids=["garbage", "nothing", "no-utf-8", "too-large-a-payload", "too-long-a-header"],
)
async def test_anything_but_a_message_is_a_protocol_error(pair: Pair, data: bytes) -> None:
    near, far = pair
    async with asyncio.timeout(SOON_S):
        await near.send_raw(data)
        with pytest.raises(ProtocolError):
            await far.receive()


async def test_a_byte_string_beyond_the_limit_is_never_delivered(pair: Pair) -> None:
    near, far = pair
    async with asyncio.timeout(SOON_S):
        await near.send(Bye(reason="before", rejoin=True))
        sending = asyncio.ensure_future(near.send_raw(bytes(MESSAGE_BYTES + 1)))
        assert (await far.receive()).message == Bye(reason="before", rejoin=True)
        with pytest.raises(CleaveError):
            await far.receive()
        with contextlib.suppress(ConnectionLost):
            await sending
