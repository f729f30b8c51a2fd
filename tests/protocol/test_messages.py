"""Laws of headers: each message round-trips, and anything else is a ProtocolError and nothing worse."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import samples

from cleave.errors import ProtocolError
from cleave.protocol import messages
from cleave.protocol.messages import AnyMessage, FromDevice, FromServer
from cleave.protocol.programs import Program, operands

pack = msgspec.msgpack.encode


def survives(header: bytes) -> bool:
    """Whether a header is a message; anything but a ProtocolError escapes and fails the test."""
    try:
        message = messages.decode(header)
    except ProtocolError:
        return False
    assert isinstance(message, FromDevice | FromServer)
    return True


@settings(max_examples=250)
@given(samples.anything())
def test_every_message_round_trips(message: AnyMessage) -> None:
    header = messages.encode(message)
    assert messages.decode(header) == message
    assert messages.decode(memoryview(bytearray(header))) == message


@pytest.mark.parametrize("text", samples.HOSTILE_TEXTS, ids=ascii)
@pytest.mark.parametrize("message", samples.ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_words_of_a_peer_are_printable_and_short_whatever_it_sends(message: AnyMessage, text: str) -> None:
    plain = msgspec.msgpack.decode(messages.encode(message))
    fixed = {"type", "token", "format"}
    spoken = [name for name, value in plain.items() if isinstance(value, str) and name not in fixed]
    decoded = messages.decode(pack({**plain, **dict.fromkeys(spoken, text)}))
    for name in spoken:
        said = getattr(decoded, name)
        assert said.isprintable()
        assert len(said) <= 500
        assert said[:60] == "".join(each if each.isprintable() else "?" for each in text[:60])


def test_a_token_is_compared_as_it_was_sent() -> None:
    hello = msgspec.structs.replace(samples.ONE_OF_EACH[0], token="nai\u0308ve \t secret " * 50)
    assert messages.decode(messages.encode(hello)) == hello


def test_there_is_a_sample_of_every_kind() -> None:
    assert [type(message) for message in samples.ONE_OF_EACH] == list(samples.KINDS)


@pytest.mark.parametrize("message", samples.ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_a_header_is_a_map_of_field_names_that_begins_with_its_type(message: AnyMessage) -> None:
    plain = msgspec.msgpack.decode(messages.encode(message))
    assert list(plain) == ["type", *(field.name for field in msgspec.structs.fields(message))]
    assert plain["type"] == message.type_name()


@pytest.mark.parametrize("message", samples.ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_the_order_of_fields_and_unknown_fields_do_not_matter(message: AnyMessage) -> None:
    plain = msgspec.msgpack.decode(messages.encode(message))
    shuffled = {"of_a_later_release": [1, {"a": None}], **dict(reversed(plain.items()))}
    assert messages.decode(pack(shuffled)) == message


@pytest.mark.parametrize("message", samples.ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_only_fields_with_a_default_may_be_left_out(message: AnyMessage) -> None:
    plain = msgspec.msgpack.decode(messages.encode(message))
    for field in msgspec.structs.fields(message):
        rest = pack({key: value for key, value in plain.items() if key != field.name})
        assert survives(rest) == (not field.required)
        assert field.required == (field.name not in {"payload", "token", "done_flops", "verified_flops"})


@pytest.mark.parametrize("message", samples.ONE_OF_EACH, ids=lambda message: type(message).__name__)
def test_a_field_of_the_wrong_type_is_refused(message: AnyMessage) -> None:
    plain = msgspec.msgpack.decode(messages.encode(message))
    for name in plain:
        for wrong in (None, b"bytes", [[]], {"a": 1}):
            assert not survives(pack({**plain, name: wrong}))


@settings(max_examples=100)
@given(samples.programs)
def test_operands_lists_all_numbers_in_a_program_except_device_made_ones(program: Program) -> None:
    named = list(numbers_in(msgspec.to_builtins(program)))
    assert sorted(operands(program)) == sorted(named)


SENT = {"weight", "bias", "x", "dy", "mask", "rotary", "targets", "adapter", "terms", "operands"}


def numbers_in(plain: dict[str, Any]) -> Iterator[int]:
    for name, value in plain.items():
        if name == "copies":
            yield from (operand for operand, _ in value)
        elif name == "weights":
            yield from (number for weight, _, states in value for number in (weight, *states))
        for each in value if isinstance(value, list | tuple) else (value,):
            if isinstance(each, dict):
                yield from numbers_in(each)
            elif name in SENT and each is not None:
                yield from each if isinstance(each, list | tuple) else (each,)


def test_integers_are_accepted_for_floats_but_not_vice_versa() -> None:
    assert messages.decode(pack({"type": "probed", "down_s": 2})) == messages.Probed(down_s=2.0)
    assert not survives(pack({"type": "probe", "answer": 2.0}))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc0",
        pack([]),
        pack({}),
        pack({"type": "eval", "code": "1"}),
        pack({"type": "Bye", "reason": "", "rejoin": True}),
        pack({"type": "run", "task": 1, "priority": 1, "format": "fp64", "program": {"program": "gemm"}}),
        pack({"type": "run", "task": 1, "priority": 1, "format": "fp32", "program": {"program": "eval"}}),
        messages.encode(messages.Leaving(reason="x")) * 2,
        b"\x82\xa4type\xa7leaving\xa6reason\xa2\xff\xfe",  # not UTF-8
        b"\x82\xa4type\xa7leaving\xa6reason\xa3\xed\xa0\x80",  # half a surrogate pair
        b"\x82\xa4type\xa4drop\xa8operands\xdd\xff\xff\xff\xff\x01",  # announces 4 Gi numbers, has one
        b"\x82\xa4type\xa7leaving\xa6reason\xdb\xff\xff\xff\xff",
        b"\x83\xa4type\xa7leaving\xa6reason\xa1x\xa1y" + b"\x91" * 60_000 + b"\x01",  # an unknown field, deeply nested
        b"\x91" * 60_000,
    ],
    ids=lambda header: header[:24].hex(),
)
def test_anything_but_a_message_is_a_protocol_error(header: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"expected a message of protocol version {messages.VERSION}, but "):
        messages.decode(header)


@given(st.binary(max_size=200))
def test_random_bytes_are_not_a_message(header: bytes) -> None:
    assert not survives(header)


def headers_gone_wrong(count: int) -> Iterator[bytes]:
    rng = random.Random(1)
    headers = [messages.encode(message) for message in samples.ONE_OF_EACH]
    for _ in range(count):
        yield samples.mutated(rng.choice(headers), rng)


def test_a_damaged_header_is_a_message_or_a_protocol_error() -> None:
    outcomes = [survives(header) for header in headers_gone_wrong(4000)]
    assert 100 < sum(outcomes) < 2000  # both outcomes occur
