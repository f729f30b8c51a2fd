"""Laws of framing: however it is cut, a payload arrives whole; anything that does not fit is a ProtocolError."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import samples

from cleave.errors import ProtocolError
from cleave.protocol import messages
from cleave.protocol.frames import HEADER_BYTES, MESSAGE_BYTES, PART_BYTES, PAYLOAD_BYTES, Assembler, Buffer, parts
from cleave.protocol.messages import AnyMessage, Leaving, Probe


def announced(size: int) -> bytes:
    return messages.encode(Probe(answer=0, payload=size))


@st.composite
def cut_payloads(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A payload, and the same payload in pieces."""
    payload = draw(st.binary(min_size=1, max_size=300))
    cuts = sorted(draw(st.sets(st.integers(1, len(payload)), max_size=6)) | {len(payload)})
    return payload, [payload[start:end] for start, end in zip([0, *cuts], cuts, strict=False)]


@settings(max_examples=60)
@given(st.lists(st.tuples(samples.anything(payload=st.just(0)), cut_payloads()), min_size=1, max_size=4))
def test_messages_arrive_whole_and_in_order_however_their_payloads_are_cut(
    sent: list[tuple[AnyMessage, tuple[bytes, list[bytes]]]],
) -> None:
    assembler = Assembler()
    for template, (payload, pieces) in sent:
        bare = assembler.feed(messages.encode(template))
        assert bare is not None
        assert bare == (template, b"")
        assert not assembler.waits_for_payload
        message = messages.decode(announced(len(payload)))
        assert assembler.feed(messages.encode(message)) is None
        for piece in pieces[:-1]:
            assert assembler.waits_for_payload
            assert assembler.feed(piece) is None
        whole = assembler.feed(pieces[-1])
        assert whole is not None
        assert (whole[0], bytes(whole[1])) == (message, payload)
        assert not assembler.waits_for_payload


@pytest.mark.parametrize(
    "size",
    [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES, 3 * PART_BYTES + 17],
)
def test_parts_are_views_that_cover_the_payload_in_order(size: int) -> None:
    payload = bytearray(random.Random(size).randbytes(size))
    cut = list(parts(payload))
    assert b"".join(cut) == payload
    assert [len(part) for part in cut[:-1]] == [PART_BYTES] * (len(cut) - 1)
    assert len(cut) == -(-size // PART_BYTES)
    if size:
        payload[-1] ^= 1
        assert cut[-1][-1] == payload[-1]  # no copy


def test_parts_are_measured_in_bytes_whatever_the_payload_type() -> None:
    numbers = memoryview(bytearray(8 * 5)).cast("d")
    assert [len(part) for part in parts(numbers)] == [40]


def test_a_payload_of_one_part_is_handed_out_as_it_came() -> None:
    assembler, payload = Assembler(), bytes(1000)
    assembler.feed(announced(1000))
    whole = assembler.feed(payload)
    assert whole is not None
    assert whole[1] is payload


def test_two_payloads_never_share_memory() -> None:
    assembler, seen = Assembler(), list[Buffer]()
    for fill in (b"a", b"b"):
        assembler.feed(announced(4))
        assembler.feed(fill * 2)
        whole = assembler.feed(fill * 2)
        assert whole is not None
        seen.append(whole[1])
    assert seen == [b"aaaa", b"bbbb"]


def padded(size: int) -> bytes:
    """A valid header of exactly that length."""
    around = len(messages.encode(Leaving(reason="x" * 1000))) - 1000
    return messages.encode(Leaving(reason="x" * (size - around)))


def test_a_header_may_be_as_long_as_the_limit_and_no_longer() -> None:
    longest = padded(HEADER_BYTES)
    assert len(longest) == HEADER_BYTES
    assert Assembler().feed(longest) is not None
    with pytest.raises(ProtocolError, match=f"a header of at most {HEADER_BYTES} bytes, got {HEADER_BYTES + 1}"):
        Assembler().feed(padded(HEADER_BYTES + 1))


def test_a_payload_may_be_as_long_as_the_limit_and_no_longer() -> None:
    assert Assembler().feed(announced(PAYLOAD_BYTES)) is None
    for size in (PAYLOAD_BYTES + 1, 2**63, -1):
        with pytest.raises(ProtocolError, match=f"a payload of at most {PAYLOAD_BYTES} bytes, got {size}"):
            Assembler().feed(announced(size))


@given(st.integers(1, 200), st.integers(0, 200), st.integers(1, 50))
def test_more_bytes_than_announced_are_refused(size: int, first: int, excess: int) -> None:
    assembler, first = Assembler(), min(first, size - 1)
    assembler.feed(announced(size))
    if first:
        assembler.feed(bytes(first))
    with pytest.raises(ProtocolError, match=f"expected {size - first} more bytes of payload"):
        assembler.feed(bytes(size - first + excess))


def test_an_empty_part_is_refused() -> None:
    assembler = Assembler()
    assembler.feed(announced(10))
    with pytest.raises(ProtocolError, match="expected 10 more bytes of payload, got 0"):
        assembler.feed(b"")


def test_the_limits_on_sending_are_within_those_on_receiving() -> None:
    assert HEADER_BYTES <= PART_BYTES <= MESSAGE_BYTES <= PAYLOAD_BYTES


@pytest.mark.parametrize("seed", range(4))
def test_damaged_streams_give_messages_or_a_protocol_error(seed: int) -> None:
    """About 4000 streams of headers and parts: mutated, reordered, cut short or pure noise."""
    rng = random.Random(seed)
    refused = 0
    for _ in range(1000):
        stream = list[bytes]()
        for message in rng.choices(samples.ONE_OF_EACH, k=3):
            stream.append(messages.encode(message))
            if message.payload:
                cut = rng.randrange(message.payload)
                stream += [bytes(cut), bytes(message.payload - cut)] if cut else [bytes(message.payload)]
        at = rng.randrange(len(stream))
        match rng.randrange(4):
            case 0:
                stream[at] = samples.mutated(stream[at], rng)
            case 1:
                rng.shuffle(stream)
            case 2:
                del stream[at]
            case _:
                stream.insert(at, rng.randbytes(rng.randrange(100)))
        assembler = Assembler()
        try:
            for data in stream:
                whole = assembler.feed(data)
                assert whole is None or len(whole[1]) == whole[0].payload
        except ProtocolError:
            refused += 1
    assert 300 < refused < 1000  # both outcomes occur
