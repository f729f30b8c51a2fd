"""Every message between server and device, as tagged structs; nothing else is ever decoded from the wire.

Headers are MessagePack maps with a `type`; numbers of matrices are never in them but in the raw payload that follows
(`wire/frame.py`). `payload` is that payload's length in bytes. A task names a program (`wire/programs.py`) and operands
by identity. docs/protocol.md explains all.
"""

from __future__ import annotations

import msgspec

from cleave.core.cost.gemm import WireFormat
from cleave.errors import ProtocolError
from cleave.protocol.programs import Program

VERSION = 3

_QUOTED = 160

CHECKED_COLUMNS = 128
"""Rectangles of a result begin and end at multiples of this, or at the block's last column: they are checked so."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower, forbid_unknown_fields=False):
    payload: int = 0


# ------------------------------------------------------------------------------------------------ device to server


class Hello(Message, frozen=True, kw_only=True):
    """The first message of a device."""

    version: int
    name: str
    token: str = ""
    flops_per_s: float
    memory_bytes: int
    """What operands and results together may take on the device."""
    kernel: str
    """`numpy`, `torch-cpu`, `torch-cuda`, ...: for people, not for decisions."""


class Probed(Message, frozen=True, kw_only=True):
    """The answer to `Probe`: how long its payload took to arrive, and as payload what was asked for."""

    down_s: float


class Result(Message, frozen=True, kw_only=True):
    """A rectangle of a task's output, in the block's own coordinates; rectangles of a task never overlap."""

    task: int
    first_row: int
    rows: int
    first_col: int
    cols: int
    format: WireFormat
    flops: float
    compute_s: float
    """What this rectangle took to compute: together with `flops`, the device's speed."""
    down_bytes: int
    down_s: float
    """What arrived since the last result, and how long the link was busy with it."""


class Failed(Message, frozen=True, kw_only=True):
    """The device could not do a task; it stays, the task goes elsewhere."""

    task: int
    reason: str


class Leaving(Message, frozen=True, kw_only=True):
    reason: str


# ------------------------------------------------------------------------------------------------ server to device


class Welcome(Message, frozen=True, kw_only=True):
    """The answer to `Hello`: the device's name, made unique."""

    version: int
    name: str


class Refused(Message, frozen=True, kw_only=True):
    """The answer to a `Hello` that is not welcome; the connection closes."""

    reason: str


class Probe(Message, frozen=True, kw_only=True):
    """Measures the link: the payload goes down, `answer` bytes shall come up."""

    answer: int


class Store(Message, frozen=True, kw_only=True):
    """Rows of an operand. The first strip makes room for all of it; strips come in order, without gaps."""

    operand: int
    rows: int
    cols: int
    format: WireFormat
    first_row: int
    strip_rows: int


class Run(Message, frozen=True, kw_only=True):
    """A task: its operands are there, or follow. Lower `priority` first; results in `format`."""

    task: int
    priority: int
    program: Program
    format: WireFormat


class Drop(Message, frozen=True, kw_only=True):
    """Forget operands."""

    operands: tuple[int, ...]


class Cancel(Message, frozen=True, kw_only=True):
    """Forget tasks: others were faster. A result already on its way is refused, and nobody is blamed."""

    tasks: tuple[int, ...]


class Idle(Message, frozen=True, kw_only=True):
    """There is no work for the device now, and why; it may stay in reserve."""

    reason: str


class Bye(Message, frozen=True, kw_only=True):
    """The server ends the connection; with `rejoin` the device should try again later."""

    reason: str
    rejoin: bool


FromDevice = Hello | Probed | Result | Failed | Leaving
FromServer = Welcome | Refused | Probe | Store | Run | Drop | Cancel | Idle | Bye
AnyMessage = FromDevice | FromServer

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    return _encoder.encode(message)


def decode(header: bytes | bytearray | memoryview) -> AnyMessage:
    try:
        return _decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise ProtocolError(f"expected a message of protocol version {VERSION}, but {_plain(fault)}") from None


def _plain(fault: Exception) -> str:
    """In one short line: what a decoder complains of may quote a stranger."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(fault)[:_QUOTED])
