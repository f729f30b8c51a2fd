"""One contract for every Channel, from either end: order, wholeness, back-pressure, and how it ends.

Ends are named by what they do: `near` sends, `far` receives, until a law needs both. The WebSocket's server end is the
real `server.http.Service`, in its own thread and event loop; only the cluster behind it is replaced, by one that hands
out the channels it is given. A test drives that end across the two loops (`Abroad`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Coroutine, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import pytest

from cleave.errors import CleaveError, ConnectionLost, InputError, ProtocolError
from cleave.protocol import messages
from cleave.protocol.frames import HEADER_BYTES, MESSAGE_BYTES, PART_BYTES, PAYLOAD_BYTES, Buffer
from cleave.protocol.messages import AnyMessage, Bye, Failed, Probe, Store
from cleave.server.admission import certificate
from cleave.server.admission.certificate import Certificate
from cleave.server.cluster import Cluster
from cleave.server.service import Service
from cleave.transport.base import Channel, Received
from cleave.transport.faulty import FaultyChannel
from cleave.transport.memory import memory_pair
from cleave.transport.shaped import Link, Shaped, shaping
from cleave.transport.stream import IDLE_FRAMES, Stream
from cleave.transport.websocket import WebSocketChannel, dial

SOON_S = 60.0  # far longer than anything here takes; a hanging channel fails instead of blocking the suite
WAITING_S = 0.8
FLOOD = 200  # messages of 1 MB each
ROOM_BYTES = 64 << 20
"""What both ends and the kernel may hold of a flood that nobody reads: well under the flood, well over any buffer."""

T = TypeVar("T")


class End(Protocol):
    """What a test sees of either end."""

    @property
    def sent_bytes(self) -> int: ...

    @property
    def received_bytes(self) -> int: ...

    async def send(self, message: AnyMessage, payload: Buffer = b"") -> None: ...

    async def receive(self) -> Received: ...

    async def close(self, reason: str = "") -> None: ...

    async def send_raw(self, data: bytes) -> None: ...


class Here:
    """A channel of the test's own event loop."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.send, self.receive, self.close = channel.send, channel.receive, channel.close

    @property
    def sent_bytes(self) -> int:
        return self.channel.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self.channel.received_bytes

    async def send_raw(self, data: bytes) -> None:
        await self.channel._send(data)


class Abroad:
    """A channel of another event loop; each verb runs there and is awaited here."""

    def __init__(self, channel: Channel, loop: asyncio.AbstractEventLoop) -> None:
        self.channel, self._loop = channel, loop

    @property
    def sent_bytes(self) -> int:
        return self.channel.sent_bytes

    @property
    def received_bytes(self) -> int:
        return self.channel.received_bytes

    async def send(self, message: AnyMessage, payload: Buffer = b"") -> None:
        await self._there(self.channel.send(message, payload))

    async def receive(self) -> Received:
        return await self._there(self.channel.receive())

    async def close(self, reason: str = "") -> None:
        await self._there(self.channel.close(reason))

    async def send_raw(self, data: bytes) -> None:
        await self._there(self.channel._send(data))

    async def _there(self, verb: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(verb, self._loop))


class Doorman:
    """In place of a cluster: hands out the channels that come, and keeps each open until told."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._come: asyncio.Queue[tuple[Channel, asyncio.Event]] = asyncio.Queue()

    async def serve(self, channel: Channel) -> None:
        channel.allow(PAYLOAD_BYTES)
        over = asyncio.Event()
        await self._come.put((channel, over))
        await over.wait()
        await channel.close()

    async def next(self) -> tuple[Channel, asyncio.Event]:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self._come.get(), self.loop))

    async def close(self, reason: str, *, rejoin: bool) -> None:
        pass


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


Pair = tuple[End, End]


OVER_MEMORY = ["memory", "faulty", "shaped-to-memory", "memory-to-shaped"]
WAYS = ["device-to-server", "server-to-device"]
OVER_WEBSOCKETS = [f"{kind}{way}" for kind in ("", "tls-", "shaped-") for way in WAYS]


@pytest.fixture(params=OVER_MEMORY + OVER_WEBSOCKETS)
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    if request.param in OVER_MEMORY:
        left, right = memory_pair()
        if request.param == "faulty":  # without a fault, just another channel
            yield Here(_faultless(left)), Here(_faultless(right))
        elif request.param == "memory":
            yield Here(left), Here(right)
        else:
            shaped, plain = Here(Shaped(left, GENEROUS)), Here(right)
            yield (shaped, plain) if request.param == "shaped-to-memory" else (plain, shaped)
        await left.close()
        return
    secure = request.param.startswith("tls-")
    named = {"tls": "secure_service", "shaped": "shaped_service"}
    service: Service = request.getfixturevalue(named.get(request.param.partition("-")[0], "service"))
    pin = f"#sha256:{request.getfixturevalue('own').fingerprint}" if secure else ""
    doorman = cast(Doorman, service.cluster)
    dialled = await dial(f"{'wss' if secure else 'ws'}://{service.address}/ws{pin}")
    channel, over = await doorman.next()
    device, server = Here(dialled), Abroad(channel, doorman.loop)
    yield (device, server) if request.param.endswith("device-to-server") else (server, device)
    doorman.loop.call_soon_threadsafe(over.set)
    async with asyncio.timeout(SOON_S):
        with contextlib.suppress(ConnectionLost):
            while True:  # what nobody read; else closing waits for it in vain
                await dialled._receive()
    await dialled.close()


def _faultless(channel: Channel) -> FaultyChannel:
    return FaultyChannel(channel, (), np.random.default_rng(0))


def filled(size: int, seed: int = 0) -> bytes:
    """Bytes that tell their place."""
    pattern = bytes((i * 7 + seed) % 251 for i in range(251))
    return (pattern * (size // 251 + 1))[:size]


def strip(number: int, payload: Buffer) -> Store:
    return Store(operand=number, rows=1, cols=1, format="fp32", first_row=0, strip_rows=1, payload=len(payload))


async def send_all(end: End, payloads: list[bytes]) -> None:
    for number, payload in enumerate(payloads):
        await end.send(strip(number, payload), payload)


async def receive_all(end: End, payloads: list[bytes]) -> None:
    for number, payload in enumerate(payloads):
        received = await end.receive()
        assert received.message == strip(number, payload)
        assert received.payload == payload
        assert received.link_s >= 0


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


async def test_senders_at_once_never_mix_a_header_with_a_foreign_payload(pair: Pair) -> None:
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
    for sender in range(senders):  # each sender's own in order
        assert [number for number in seen if number // each == sender] == [sender * each + i for i in range(each)]


# ------------------------------------------------------------------------------------------------ back-pressure


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def flood(end: End, payload: bytes) -> None:
    for _ in range(FLOOD):
        await end.send(strip(1, payload), payload)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
async def test_a_receiver_that_does_not_read_makes_the_sender_wait(pair: Pair) -> None:
    near, _ = pair
    payload = filled(PART_BYTES)
    before = resident_bytes()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(WAITING_S):
            await flood(near, payload)
    assert near.sent_bytes < ROOM_BYTES
    assert resident_bytes() - before < 2 * ROOM_BYTES


async def test_a_sender_that_waited_goes_on_when_the_receiver_reads(pair: Pair) -> None:
    near, far = pair
    payload = filled(PART_BYTES)
    async with asyncio.timeout(SOON_S):
        sending = asyncio.ensure_future(flood(near, payload))
        await asyncio.wait([sending], timeout=0.2)
        assert not sending.done()
        for _ in range(FLOOD):
            assert len((await far.receive()).payload) == PART_BYTES
        await sending
    assert near.sent_bytes == far.received_bytes


async def test_a_waiting_sender_does_not_stop_the_other_direction(pair: Pair) -> None:
    near, far = pair
    async with asyncio.timeout(SOON_S):
        sending = asyncio.ensure_future(flood(near, filled(PART_BYTES)))
        await asyncio.wait([sending], timeout=0.2)
        assert not sending.done()
        await asyncio.gather(send_all(far, [filled(1000)] * 3), receive_all(near, [filled(1000)] * 3))
        sending.cancel()
        await asyncio.wait([sending])


# ------------------------------------------------------------------------------------------------ how it ends


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
        await asyncio.sleep(0)  # sending alone may never let the event loop look at what came


async def test_a_close_ends_the_other_sides_sending(pair: Pair) -> None:
    """Also of one that never receives; a few sends may go to nobody before the news is there."""
    near, far = pair
    async with asyncio.timeout(SOON_S):
        await near.close()
        with pytest.raises(ConnectionLost):
            await send_for_ever(far)


async def test_what_was_sent_before_the_close_still_arrives(pair: Pair) -> None:
    near, far = pair
    payloads = [filled(size) for size in (0, 1000, PART_BYTES + 1)]
    async with asyncio.timeout(SOON_S):
        await send_all(near, payloads)
        closing = asyncio.ensure_future(near.close("done"))
        await receive_all(far, payloads)
        with pytest.raises(ConnectionLost, match="done"):
            await far.receive()
        await closing


async def test_a_close_ends_a_sender_that_waits(pair: Pair) -> None:
    near, far = pair
    async with asyncio.timeout(SOON_S):
        sending = asyncio.ensure_future(flood(near, filled(PART_BYTES)))
        await asyncio.wait([sending], timeout=0.2)
        assert not sending.done()
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
async def test_a_reason_of_any_length_and_script_can_be_given(pair: Pair, reason: str) -> None:
    near, far = pair
    async with asyncio.timeout(SOON_S):
        closing = asyncio.ensure_future(near.close(reason))
        with pytest.raises(ConnectionLost, match=reason[:30]):
            await far.receive()
        await closing


# ------------------------------------------------------------------------------------------------ what must not come


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
async def test_what_is_no_message_is_a_protocol_error(pair: Pair, data: bytes) -> None:
    near, far = pair
    async with asyncio.timeout(SOON_S):
        await near.send_raw(data)
        with pytest.raises(ProtocolError):
            await far.receive()


async def test_a_byte_string_beyond_the_limit_is_never_handed_out(pair: Pair) -> None:
    near, far = pair
    async with asyncio.timeout(SOON_S):
        await near.send(Bye(reason="before", rejoin=True))
        sending = asyncio.ensure_future(near.send_raw(bytes(MESSAGE_BYTES + 1)))
        assert (await far.receive()).message == Bye(reason="before", rejoin=True)
        with pytest.raises(CleaveError):
            await far.receive()
        with contextlib.suppress(ConnectionLost):
            await sending


# ------------------------------------------------------------------------------------------------ dialling


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:7077",
        "http://127.0.0.1:7077/ws",
        "ws:///ws",
        "ws://127.0.0.1:99999/ws",
        "ws://127.0.0.1:port/ws",
        "ws://[::1/ws",
        "ws://a..b:7077/ws",
        "ws://127.0.0.1:7077/ws#there",
    ],
)
async def test_an_address_that_can_never_work_is_an_input_error(url: str) -> None:
    with pytest.raises(InputError, match=r"expected the address of a server such as ws://192\.168\.1\.20:7077, got"):
        await dial(url)


async def test_nobody_there_is_a_lost_connection_with_a_sentence() -> None:
    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(ConnectionLost, match=f"cannot reach ws://127.0.0.1:{port}/ws: .+"):
        await dial(f"ws://127.0.0.1:{port}/ws")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x00\x01\x02\x03",
        b"",
    ],
    ids=["200", "404", "101-without-key", "ssh", "binary", "hangs-up"],
)
async def test_a_server_that_is_no_cleave_is_a_lost_connection(answer: bytes) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    async with asyncio.timeout(SOON_S), await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionLost, match=f"ws://127.0.0.1:{port}/ws answers, but not as a Cleave server: .+"):
            await dial(f"ws://127.0.0.1:{port}/ws")


async def test_another_path_of_a_cleave_server_is_a_lost_connection(service: Service) -> None:
    for path in ("", "/", "/api/status", "/wss"):
        with pytest.raises(ConnectionLost, match="answers, but not as a Cleave server"):
            await dial(f"ws://{service.address}{path}")


# ------------------------------------------------------------------------------------------------ what a stranger costs


class Wire(asyncio.Transport):
    """A transport of no network: keeps what is written, and takes of it only when told."""

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()
        self.unsent_bytes = 0
        self.over = self.paused = False

    def write(self, data: Buffer) -> None:
        self.written += data

    def get_write_buffer_size(self) -> int:
        return self.unsent_bytes

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def is_closing(self) -> bool:
        return self.over

    def close(self) -> None:
        self.over = True

    abort = close

    def pause_reading(self) -> None:
        self.paused = True

    def resume_reading(self) -> None:
        self.paused = False


@pytest.fixture
async def server() -> tuple[Stream, Wire]:
    """A server's end, which has to expect anything."""
    stream, wire = Stream(is_client=False), Wire()
    stream.connection_made(wire)
    return stream, wire


def feed(stream: Stream, data: bytes) -> None:
    """As the network does: as much at a time as there is room for."""
    view = memoryview(data)
    while view and stream._lost is None:
        room = stream.get_buffer(-1)
        size = min(len(room), len(view))
        room[:size] = view[:size]
        stream.buffer_updated(size)
        view = view[size:]


def frame(first: int, data: bytes = b"", announced: int | None = None) -> bytes:
    """A frame of a client, masked with zeros."""
    length = len(data) if announced is None else announced
    short = length if length < 126 else 126 if length < 1 << 16 else 127
    wide = {126: 2, 127: 8}.get(short, 0)
    return bytes([first, 0x80 | short]) + length.to_bytes(8, "big")[8 - wide :] + bytes(4) + data


def close_code(wire: Wire) -> int:
    assert wire.over
    at = wire.written.rfind(b"\x88")
    return int.from_bytes(wire.written[at + 2 : at + 4], "big")


MESSAGE, FRAGMENT, MORE, LAST, PING, PONG = 0x82, 0x02, 0x00, 0x80, 0x89, 0x8A


@pytest.mark.parametrize("kind", ["memory", "websocket"])
async def test_a_guarded_end_takes_headers_alone_until_more_is_allowed(kind: str) -> None:
    payload = filled(1000)
    messages_of = [messages.encode(strip(0, b"")), messages.encode(strip(1, payload)), payload]

    def guarded() -> tuple[Channel, Channel]:
        if kind == "memory":
            return memory_pair(guarded=True)
        stream, wire = Stream(is_client=False), Wire()
        stream.connection_made(wire)
        feed(stream, b"".join(frame(MESSAGE, data) for data in messages_of))
        channel = WebSocketChannel(stream, guarded=True)
        return channel, channel

    async with asyncio.timeout(SOON_S):
        for allowed in (0, 999, 1000):
            ours, theirs = guarded()
            if kind == "memory":
                for data in messages_of:
                    await theirs._send(data)
            assert (await ours.receive()).message == strip(0, b"")
            if allowed:
                ours.allow(allowed)
            if allowed == 1000:
                assert (await ours.receive()).payload == payload
            else:
                with pytest.raises(ProtocolError, match=f"at most {allowed} bytes, got 1000"):
                    await ours.receive()


@pytest.mark.parametrize(
    ("allowed", "most"), [(None, HEADER_BYTES), (1000, HEADER_BYTES), (1 << 20, 1 << 20), (1 << 30, MESSAGE_BYTES)]
)
async def test_a_message_that_is_too_long_is_refused_before_there_is_room_for_it(
    server: tuple[Stream, Wire], allowed: int | None, most: int
) -> None:
    stream, wire = server
    channel = WebSocketChannel(stream, guarded=True)
    if allowed is not None:
        channel.allow(allowed)
    feed(stream, frame(MESSAGE, bytes(most)))
    assert not wire.over
    feed(stream, frame(MESSAGE, announced=most + 1))
    assert close_code(wire) == 1009
    assert len(stream.get_buffer(-1)) <= 16 << 10
    assert len(await stream.receive()) == most
    with pytest.raises(ConnectionLost, match=f"at most {most} bytes, got {most + 1}"):
        await stream.receive()


async def test_fragments_are_joined_and_together_no_longer_than_a_message(server: tuple[Stream, Wire]) -> None:
    stream, wire = server
    feed(stream, frame(FRAGMENT, b"one ") + frame(PING, b"?") + frame(MORE, b"and ") + frame(LAST, b"all"))
    assert await stream.receive() == b"one and all"
    assert wire.written == b"\x8a\x01?"
    half = bytes(MESSAGE_BYTES // 2)
    feed(stream, frame(FRAGMENT, half) + frame(MORE, half) + frame(LAST, b"!"))
    assert close_code(wire) == 1009


@pytest.mark.parametrize(
    "flood",
    [frame(PING, b"?"), frame(PONG), frame(PING, bytes(125))],
    ids=["pings", "pongs", "long-pings"],
)
async def test_a_flood_of_frames_that_say_nothing_ends_the_connection(
    server: tuple[Stream, Wire], flood: bytes
) -> None:
    stream, wire = server
    for _ in range(3):  # as many as are allowed, again and again, with a word in between
        feed(stream, flood * (IDLE_FRAMES - 1) + frame(MESSAGE, b"a word"))
    assert not wire.over
    feed(stream, flood * (IDLE_FRAMES + 1))
    assert close_code(wire) == 1008


async def test_a_message_of_countless_fragments_is_cut_off(server: tuple[Stream, Wire]) -> None:
    stream, wire = server
    feed(stream, frame(FRAGMENT, b"x") + frame(MORE, b"x") * IDLE_FRAMES)
    assert close_code(wire) == 1008


async def test_pings_at_their_usual_pace_never_end_a_connection(server: tuple[Stream, Wire]) -> None:
    stream, wire = server
    for _ in range(3):
        feed(stream, frame(PING) * (IDLE_FRAMES - 1))
        stream._check_silence()
    assert not wire.over


async def test_answers_to_pings_do_not_pile_up_for_who_does_not_read(server: tuple[Stream, Wire]) -> None:
    stream, wire = server
    stream.pause_writing()
    feed(stream, frame(PING, bytes(125)) * 1000)
    assert not wire.written
    stream.resume_writing()
    feed(stream, frame(PING, b"?"))
    assert wire.written == b"\x8a\x01?"


@pytest.mark.parametrize(
    "data",
    [
        frame(PING, bytes(126)),
        frame(0x09, b"?"),
        frame(0x88, bytes(126)),
        frame(MORE, b"of what?"),
        frame(FRAGMENT, b"begun") + frame(MESSAGE, b"another"),
        frame(FRAGMENT, b""),
        frame(0xC2, b"compressed"),
        frame(0x83, b"unknown"),
        b"\x82\x01x",
    ],
    ids=[
        "long-ping",
        "cut-ping",
        "long-close",
        "no-beginning",
        "two-at-once",
        "empty",
        "extension",
        "kind",
        "unmasked",
    ],
)
async def test_what_is_no_frame_of_a_client_ends_the_connection(server: tuple[Stream, Wire], data: bytes) -> None:
    stream, wire = server
    feed(stream, data)
    assert close_code(wire) == 1002
    with pytest.raises(ConnectionLost):
        await stream.receive()


async def test_countless_tiny_messages_make_their_sender_wait(server: tuple[Stream, Wire]) -> None:
    stream, wire = server
    sent = 0
    while not wire.paused:
        feed(stream, frame(MESSAGE, b"x"))
        sent += 1
        assert sent < 100_000
    for _ in range(sent):
        await stream.receive()
    assert not wire.paused
    assert not wire.over


@pytest.mark.parametrize("side", ["writer", "reader"])
async def test_who_only_trickles_is_let_go_and_who_is_merely_slow_is_not(
    server: tuple[Stream, Wire], side: str
) -> None:
    stream, wire = server

    def move(size: int) -> None:
        if side == "writer":
            feed(stream, bytes(size))
        else:
            feed(stream, frame(PING))  # it talks, but does not take what is for it
            wire.unsent_bytes -= size

    if side == "writer":
        feed(stream, frame(MESSAGE, announced=MESSAGE_BYTES))
    else:
        await stream.send(bytes(MESSAGE_BYTES))
        wire.unsent_bytes = MESSAGE_BYTES
        stream.pause_writing()
    for size in (10_000, 10_000, 1, 10_000, 10_000, 1):
        stream._check_silence()
        assert not wire.over
        move(size)
    stream._check_silence()
    assert not wire.over
    move(1)
    stream._check_silence()
    assert wire.over
    with pytest.raises(ConnectionLost, match="less than"):
        await stream.receive()


async def test_silence_is_counted_from_the_last_byte_that_came_or_was_taken(
    server: tuple[Stream, Wire], monkeypatch: pytest.MonkeyPatch
) -> None:
    stream, wire = server
    channel, now = WebSocketChannel(stream, guarded=True, address="192.0.2.7"), [stream._heard]
    monkeypatch.setattr(stream._loop, "time", lambda: now[0])
    assert (channel.address, channel.silent_s) == ("192.0.2.7", 0.0)
    now[0] += 7
    assert channel.silent_s == 7
    feed(stream, frame(PONG))
    assert channel.silent_s == 0
    now[0] += 5
    await stream.send(b"into the kernel")
    assert channel.silent_s == 5  # nobody took it yet
    await stream.send(bytes(1000))
    wire.unsent_bytes = 1000
    assert channel.silent_s == 5
    now[0] += 3
    wire.unsent_bytes = 400
    assert channel.silent_s == 0
    now[0] += 9
    assert channel.silent_s == 9
    for _ in range(3):
        feed(stream, frame(MESSAGE, bytes(HEADER_BYTES - 1)) * 50)
    assert wire.paused
    now[0] += 100
    assert channel.silent_s == 0  # it is we who do not listen


async def test_a_channel_within_a_process_counts_silence_from_the_last_word() -> None:
    near, far = memory_pair()
    assert far.address == ""
    assert far.silent_s == 0
    before = asyncio.get_running_loop().time()
    await near.send(Failed(task=1, reason=""))
    await far.receive()
    assert 0 <= far.silent_s <= asyncio.get_running_loop().time() - before
