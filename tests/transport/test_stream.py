"""Laws of a server's end of a WebSocket: a stranger costs it little, and is disconnected for misbehaving."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.channels import SOON_S, filled, strip

from cleave.errors import ConnectionLost, ProtocolError
from cleave.protocol import messages
from cleave.protocol.frames import HEADER_BYTES, MESSAGE_BYTES, Buffer
from cleave.protocol.messages import Failed
from cleave.transport.base import Channel
from cleave.transport.memory import memory_pair
from cleave.transport.stream import IDLE_FRAMES, Stream
from cleave.transport.websocket import WebSocketChannel


class Wire(asyncio.Transport):
    """A transport without a network: keeps what is written, and sends only when told to."""

    def __init__(self, peer: tuple[object, ...] | None = None) -> None:
        super().__init__({} if peer is None else {"peername": peer})
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
    """A server's end, which must expect anything."""
    stream, wire = Stream(is_client=False), Wire()
    stream.connection_made(wire)
    return stream, wire


def feed(stream: Stream, data: bytes) -> None:
    """Feed bytes as the network does: as many at a time as there is room for."""
    view = memoryview(data)
    while view and stream._lost is None:
        room = stream.get_buffer(-1)
        size = min(len(room), len(view))
        room[:size] = view[:size]
        stream.buffer_updated(size)
        view = view[size:]


def frame(first: int, data: bytes = b"", announced: int | None = None) -> bytes:
    """A client's frame, masked with zeros."""
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
async def test_a_guarded_end_takes_only_headers_until_more_is_allowed(kind: str) -> None:
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
async def test_a_message_that_is_too_long_is_refused_before_memory_is_reserved(
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


async def test_fragments_are_joined_up_to_the_message_limit(server: tuple[Stream, Wire]) -> None:
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
async def test_a_flood_of_control_frames_ends_the_connection(server: tuple[Stream, Wire], flood: bytes) -> None:
    stream, wire = server
    for _ in range(3):  # as many as allowed, repeatedly, with a message in between
        feed(stream, flood * (IDLE_FRAMES - 1) + frame(MESSAGE, b"a word"))
    assert not wire.over
    feed(stream, flood * (IDLE_FRAMES + 1))
    assert close_code(wire) == 1008


async def test_a_peers_reason_for_closing_is_printable(server: tuple[Stream, Wire]) -> None:
    stream, _ = server
    feed(stream, frame(0x88, b"\x03\xe8gone\x1b[2J\r\nroot joined\xe2\x80\xae\xff"))
    with pytest.raises(ConnectionLost) as lost:
        await stream.receive()
    assert str(lost.value) == "gone?[2J??root joined?\ufffd"


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


async def test_pongs_do_not_pile_up_for_a_peer_that_does_not_read(server: tuple[Stream, Wire]) -> None:
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
async def test_an_invalid_client_frame_ends_the_connection(server: tuple[Stream, Wire], data: bytes) -> None:
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
async def test_a_trickling_peer_is_disconnected_and_a_merely_slow_one_is_not(
    server: tuple[Stream, Wire], side: str
) -> None:
    stream, wire = server

    def move(size: int) -> None:
        if side == "writer":
            feed(stream, bytes(size))
        else:
            feed(stream, frame(PING))  # it sends, but does not read
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


async def test_silence_is_counted_from_the_last_byte_received_or_accepted(
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
    assert channel.silent_s == 5  # not accepted yet
    await stream.send(bytes(1000))
    wire.unsent_bytes = 1000
    assert channel.silent_s == 5
    now[0] += 3
    wire.unsent_bytes = 400
    assert channel.silent_s == 0
    now[0] += 9
    assert channel.silent_s == 9
    channel.allow(0)  # only a peer that is admitted may send several messages in a row
    for _ in range(3):
        feed(stream, frame(MESSAGE, bytes(HEADER_BYTES - 1)) * 50)
    assert wire.paused
    now[0] += 100
    assert channel.silent_s == 0  # we are the ones not reading


async def test_an_in_process_channel_counts_silence_from_the_last_message() -> None:
    near, far = memory_pair()
    assert far.address == ""
    assert far.silent_s == 0
    before = asyncio.get_running_loop().time()
    await near.send(Failed(task=1, reason=""))
    await far.receive()
    assert 0 <= far.silent_s <= asyncio.get_running_loop().time() - before


@pytest.mark.parametrize(
    ("peer", "is_hidden"),
    [(("127.0.0.1", 7077), True), (("::1", 7077, 0, 0), True), (("192.168.1.20", 7077), False)],
)
async def test_a_client_masks_bytes_that_others_could_see(peer: tuple[object, ...], is_hidden: bool) -> None:
    stream, wire = Stream(is_client=True), Wire(peer)
    stream.connection_made(wire)
    data = filled(1000)
    await stream.send(data)
    stream._flush()
    assert (data in wire.written) is is_hidden
    receiver = Stream(is_client=False)
    receiver.connection_made(Wire())
    feed(receiver, bytes(wire.written))
    assert bytes(await receiver.receive()) == data
