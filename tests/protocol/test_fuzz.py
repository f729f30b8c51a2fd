"""Laws of decoding hostile input: it gives a message, a ProtocolError or a closed connection, and nothing worse.

Nothing worse means: no other exception, no endless loop, no more memory than the peer has sent bytes. The decoders see
mutated frames of tests/vectors (`mutations.py`); `make fuzz` explores further, guided by coverage.
"""

from __future__ import annotations

import asyncio
import os
import random
import tracemalloc
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import mutations, obedient
from tests.support.connection import Connection, through
from tests.support.grids import sample_and_rest

from cleave.errors import ProtocolError
from cleave.protocol import messages
from cleave.protocol.frames import HEADER_BYTES, MESSAGE_BYTES, PAYLOAD_BYTES, Assembler
from cleave.protocol.messages import AnyMessage

FRAMES = mutations.golden()
randoms = st.randoms(use_true_random=False)


def survives(header: bytes) -> bool:
    """Whether a header is a message; anything but a ProtocolError escapes and fails the test."""
    try:
        message = messages.decode(header)
    except ProtocolError:
        return False
    assert isinstance(message, AnyMessage)
    assert messages.decode(messages.encode(message)) == message or "nan" in repr(message)
    return True


def assembled(stream: list[bytes]) -> bool:
    """Whether a stream of byte strings was accepted to its end, each payload as long as announced."""
    assembler = Assembler()
    try:
        for data in stream:
            whole = assembler.feed(data)
            assert whole is None or len(whole[1]) == whole[0].payload <= PAYLOAD_BYTES
    except ProtocolError:
        return False
    return True


# ------------------------------------------------------------------------------------------------ headers, framing


@settings(max_examples=500)
@given(st.sampled_from(FRAMES), randoms)
def test_a_mutated_header_is_a_message_or_a_protocol_error(frame: tuple[bytes, bytes], rng: random.Random) -> None:
    survives(mutations.mutated(frame[0], rng))


junk = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
NAMES = sorted({field.name for kind in messages.AnyMessage.__args__ for field in msgspec.structs.fields(kind)})
TYPES = [kind.type_name() for kind in messages.AnyMessage.__args__]


@settings(max_examples=150)
@given(st.sampled_from(TYPES), st.dictionaries(st.sampled_from([*NAMES, "program", "terms"]), junk, max_size=12))
def test_any_map_is_a_message_or_a_protocol_error(kind: str, fields: dict[str, object]) -> None:
    survives(msgspec.msgpack.encode({**fields, "type": kind}))


@settings(max_examples=300)
@given(st.lists(st.sampled_from(FRAMES), min_size=1, max_size=4), randoms)
def test_a_mutated_stream_of_frames_gives_whole_messages_or_a_protocol_error(
    frames: list[tuple[bytes, bytes]], rng: random.Random
) -> None:
    stream = [data for frame in frames for data in frame if data]
    at = rng.randrange(len(stream))
    match rng.randrange(4):
        case 0:
            stream[at] = mutations.mutated(frames[0][0], rng)
        case 1:
            stream[at] = mutations.damaged(stream[at], rng)
        case 2:
            rng.shuffle(stream)
        case _:
            stream.insert(at, rng.randbytes(rng.randrange(64)))
    assembled(stream)


@pytest.mark.parametrize("odd", ["x" * 60_000, "\x1b[2J" * 10_000, "\n" * 100], ids=["long", "screen", "lines"])
def test_the_reason_for_refusing_any_header_is_one_short_line(odd: str) -> None:
    """It goes into logs, events and the close frame, where a stranger must not write as much as it likes."""
    for fields in ({"type": odd}, {"type": "run", "format": odd}, {"type": "probed", "down_s": odd}):
        with pytest.raises(ProtocolError) as refused:
            messages.decode(msgspec.msgpack.encode(fields))
        assert len(str(refused.value)) < 500
        assert str(refused.value).isprintable()


def test_an_announced_payload_costs_no_memory_until_it_arrives() -> None:
    """A header of 30 bytes must not make a server allocate 64 MB."""
    tracemalloc.start()
    try:
        assemblers = [Assembler() for _ in range(100)]
        for assembler in assemblers:
            assembler.feed(messages.encode(messages.Probed(down_s=0.0, payload=PAYLOAD_BYTES)))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------------ WebSocket frames


@settings(max_examples=200)
@given(st.lists(st.binary(max_size=400), max_size=4), st.integers(1, 5), st.integers(1, 64), randoms)
async def test_messages_arrive_whole_however_they_are_fragmented_and_cut(
    sent: list[bytes], fragments: int, step: int, rng: random.Random
) -> None:
    data = b"".join(mutations.websocket(message, rng, fragments=fragments) for message in sent)
    assert through(data, step) == sent


@settings(max_examples=500)
@given(st.lists(st.sampled_from(FRAMES), min_size=1, max_size=3), st.integers(1, 64), randoms)
async def test_mutated_frames_give_messages_or_end_the_connection(
    frames: list[tuple[bytes, bytes]], step: int, rng: random.Random
) -> None:
    parts = [data for frame in frames for data in frame]
    data = b"".join(mutations.websocket(part, rng, fragments=rng.randint(1, 3)) for part in parts)
    through(mutations.damaged(data, rng), step)


@settings(max_examples=300)
@given(st.binary(max_size=300), st.integers(1, 64))
async def test_noise_gives_messages_or_ends_the_connection(data: bytes, step: int) -> None:
    through(data, step)


@pytest.mark.parametrize("length", [1 << 16, MESSAGE_BYTES + 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1])
async def test_a_frame_costs_at_most_one_message_of_memory_whatever_it_announces(length: int) -> None:
    head = b"\x82\xff" + length.to_bytes(8, "big") + b"mask"
    tracemalloc.start()
    try:
        connection = Connection()
        is_open = connection.feed(head)
        assert is_open == (length <= MESSAGE_BYTES)
        assert tracemalloc.get_traced_memory()[1] < MESSAGE_BYTES + (1 << 20)
        connection.end()
    finally:
        tracemalloc.stop()


async def test_fragments_never_add_up_to_more_than_the_message_limit() -> None:
    rng = random.Random(0)
    piece = mutations.websocket(bytes(1 << 18), rng, first=0x02)
    first, later = bytes([piece[0] & 0x7F]) + piece[1:], bytes([0x00]) + piece[1:]
    connection = Connection()
    taken = sum(connection.feed(first if number == 0 else later) for number in range(64))
    assert taken << 18 <= MESSAGE_BYTES
    assert not list(connection.received())
    connection.end()


# ------------------------------------------------------------------------------------------------ devices


def test_a_device_obeys_golden_conversations_to_the_end() -> None:
    for conversation in mutations.conversations():
        device = obedient.Device()
        assert device.obey(data for frame in conversation for data in frame if data)
        runs = sum(isinstance(messages.decode(header), messages.RunTask) for header, _ in conversation)
        assert device.results >= runs
        assert not device.failures


@settings(max_examples=400)
@given(randoms)
def test_a_device_obeys_or_refuses_a_broken_server_within_its_memory(rng: random.Random) -> None:
    obedient.Device().obey(obedient.mishap(rng))


@pytest.mark.parametrize("mishaps", sample_and_rest([600], [3000]))
def test_hundreds_of_broken_servers_crash_no_device_and_leak_nothing(mishaps: int) -> None:
    rng = random.Random(3)
    went_well = sum(obedient.Device().obey(obedient.mishap(rng)) for _ in range(mishaps))
    assert mishaps // 20 < went_well < mishaps  # both outcomes occur
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(mishaps // 10):
            obedient.Device().obey(obedient.mishap(rng))
        held, most = tracemalloc.get_traced_memory()
        assert held - before < 100_000
        assert most - before < obedient.MEMORY_BYTES + (8 << 20), "intermediate results stay small too"
    finally:
        tracemalloc.stop()


# ------------------------------------------------------------------------------------------------ endurance


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def one_mutation(rng: random.Random) -> tuple[bool, bool, bool]:
    """Whether each decoder accepted one mutated frame."""
    header, payload = rng.choice(FRAMES)
    bad = mutations.mutated(header, rng)
    stream = [bad, payload] if payload and rng.randrange(2) else [bad]
    framed = b"".join(mutations.websocket(data[:HEADER_BYTES], rng) for data in stream)
    if rng.randrange(2):
        framed = mutations.damaged(framed, rng)
    received = through(framed)
    return survives(bad), assembled(stream), assembled(received)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
@pytest.mark.parametrize("mutated", sample_and_rest([20_000], [100_000]))
async def test_thousands_of_mutated_frames_crash_nothing_and_leak_nothing(mutated: int) -> None:
    rng = random.Random(20260)

    async def mutate(count: int) -> list[int]:
        """Number of frames each decoder accepted."""
        taken = [0, 0, 0]
        for number in range(count):
            for decoder, took in enumerate(one_mutation(rng)):
                taken[decoder] += took
            if number % 100 == 0:
                await asyncio.sleep(0)  # lets the event loop forget the timers of closed streams
        return taken

    await mutate(1000)  # fills permanent caches
    before = resident_bytes()
    taken = await mutate(mutated)
    assert resident_bytes() - before < 32 << 20
    assert all(mutated // 50 < count < mutated for count in taken), taken  # both outcomes occur
    tracemalloc.start()
    try:
        await mutate(500)
        held = tracemalloc.get_traced_memory()[0]
        await mutate(2000)
        looks = list[int]()  # buffers of closed streams come and go, as the event loop forgets timers by the hundred
        for _ in range(5):
            await mutate(30)
            looks.append(tracemalloc.get_traced_memory()[0])
        assert min(looks) - held < 100_000
    finally:
        tracemalloc.stop()
