"""Messages for tests: a hypothesis strategy over every kind, and byte strings that are nearly messages."""

from __future__ import annotations

import random
from typing import get_args

import msgspec
from hypothesis import strategies as st

from cleave.core.cost.wire import WireFormat
from cleave.core.model.decoder import Activation, Attention, Head, Mlp, Norm, Weight
from cleave.core.model.update_rule import Adam, Sgd
from cleave.printable import printable
from cleave.protocol import messages
from cleave.protocol.frames import PAYLOAD_BYTES
from cleave.protocol.messages import AnyMessage
from cleave.protocol.programs import (
    Backward,
    Collect,
    Copy,
    Forward,
    GemmProgram,
    Hold,
    Layout,
    Leased,
    Program,
    SquareSum,
    Update,
)

KINDS: tuple[type[AnyMessage], ...] = get_args(AnyMessage)
FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

integers = st.integers(-(2**63), 2**64 - 1)
texts = st.text(max_size=30).map(printable)

numbers = st.floats(allow_nan=False)
maybe = st.none() | integers
pairs = st.lists(st.tuples(integers, integers), max_size=4).map(tuple)

gemms = st.builds(GemmProgram, layout=st.sampled_from(LAYOUTS), terms=pairs, rows=integers, cols=integers)
weights = st.builds(
    Weight,
    weight=integers,
    is_transposed=st.booleans(),
    bias=maybe,
    adapter=st.none() | st.tuples(integers, integers),
    scale=numbers,
)
norms = st.builds(Norm, kind=st.sampled_from(["rms", "layer"]), eps=numbers, weight=integers, bias=maybe)
attentions = st.builds(
    Attention,
    norm=norms,
    q=weights,
    k=weights,
    v=weights,
    o=weights,
    head_dim=integers,
    scale=numbers,
    is_rotary=st.booleans(),
    window=maybe,
)
mlps = st.builds(
    Mlp,
    norm=norms,
    up=weights,
    down=weights,
    activation=st.sampled_from(get_args(Activation)),
    gate=st.none() | weights,
)
heads = st.builds(Head, weight=weights, norm=st.none() | norms, first=integers)
_unit = {
    "parts": st.lists(attentions | mlps, max_size=2).map(tuple),
    "head": st.none() | heads,
    **dict.fromkeys(("x", "state", "first_row", "sequence", "rotary_row"), integers),
    **dict.fromkeys(("mask", "rotary", "targets"), maybe),
    "is_slice": st.booleans(),
}
several = st.lists(integers, max_size=5).map(tuple)
_rule = {"rate": numbers, "weight_decay": numbers, "is_ascent": st.booleans()}
rules = st.one_of(
    st.builds(
        Sgd,
        **_rule,
        **dict.fromkeys(("momentum", "dampening"), numbers),
        **dict.fromkeys(("is_nesterov", "is_first"), st.booleans()),
    ),
    st.builds(
        Adam,
        **_rule,
        **dict.fromkeys(("beta1", "beta2", "eps"), numbers),
        step=integers,
        is_decoupled=st.booleans(),
    ),
)
leases = st.lists(st.builds(Leased, integers, integers, several), max_size=3).map(tuple)
programs: st.SearchStrategy[Program] = st.one_of(
    gemms,
    st.builds(Forward, **_unit, is_silent=st.booleans()),
    st.builds(Backward, **_unit, dy=integers, accumulators=pairs, wants_dx=st.booleans()),
    st.builds(Collect, accumulator=integers, rows=integers, cols=integers, below=several),
    st.builds(Hold, operands=several),
    st.builds(SquareSum, accumulators=several),
    st.builds(Update, rule=rules, weights=leases, scale=numbers),
    st.builds(Copy, copies=pairs),
)

_BY_TYPE: dict[object, st.SearchStrategy[object]] = {
    int: integers,
    float: numbers,
    float | msgspec.UnsetType: st.one_of(numbers, st.just(msgspec.UNSET)),
    str: texts,
    bool: st.booleans(),
    WireFormat: st.sampled_from(FORMATS),
    Program: programs,
    tuple[int, ...]: several,
}


def of_kind(kind: type[AnyMessage], payload: st.SearchStrategy[int]) -> st.SearchStrategy[AnyMessage]:
    fields = {field.name: _BY_TYPE[field.type] for field in msgspec.structs.fields(kind)}
    return st.builds(kind, **{**fields, "payload": payload})


def anything(payload: st.SearchStrategy[int] | None = None) -> st.SearchStrategy[AnyMessage]:
    sizes = payload if payload is not None else st.integers(0, PAYLOAD_BYTES)
    return st.one_of([of_kind(kind, sizes) for kind in KINDS])


HOSTILE_TEXTS = (
    "\x1b[2J\x1b]0;owned\x07",
    "left\r\nroot joined: forged",
    "\u202egnirts\u2066x\u2069\u200b",
    "\x00\x7f\x9b31m\u2028\ud7ff",
    "[/x] [bold red]not markup[/] [link=file:///etc/passwd]here[/link]",
    "long " * 10_000,
)
"""What a peer may send where people read: escapes, forged lines, overrides of direction, markup, novels."""

ONE_OF_EACH: tuple[AnyMessage, ...] = (
    messages.Hello(
        version=messages.VERSION, name="phône", token="t", flops_per_s=1e9, memory_bytes=1 << 30, kernel="numpy"
    ),
    messages.Probed(down_s=0.25, payload=3),
    messages.Result(
        task=7, first_row=0, rows=1, first_col=2, cols=3, format="bf16", flops=6.0, compute_s=1e-6, down_bytes=9,
        down_s=1e-3, payload=6,
    ),
    messages.Failed(task=7, reason="no memory"),
    messages.Leaving(reason="stopped by its owner"),
    messages.Welcome(version=messages.VERSION, name="phône-2"),
    messages.Refused(reason="wrong token"),
    messages.Probe(answer=16, payload=64, done_flops=3e9, verified_flops=1e9),
    messages.Store(operand=300, rows=2, cols=3, format="q8", first_row=0, strip_rows=2, payload=10),
    messages.RunTask(
        task=7,
        priority=1,
        program=GemmProgram(layout="nt", terms=((1, 2), (300, 70_000)), rows=2, cols=2),
        format="fp16",
    ),
    messages.Drop(operands=(1, 2, 300)),
    messages.CancelTasks(tasks=(7,)),
    messages.Idle(reason="too slow"),
    messages.Bye(reason="done", rejoin=False),
)  # fmt: skip


def mutated(header: bytes, rng: random.Random) -> bytes:
    """A header with a few bytes changed, removed, inserted or repeated."""
    data = bytearray(header)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0 if at < len(data):
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randint(1, 8)]
            case 2:
                data[at:at] = rng.randbytes(rng.randint(1, 8))
            case 3:
                data[at:at] = data[at : at + rng.randint(1, 16)]
            case _ if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case _:
                pass
    return bytes(data)
