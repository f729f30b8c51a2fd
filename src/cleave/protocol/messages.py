"""Every message between server and device, as tagged structs; nothing else is ever decoded from the wire.

Headers are MessagePack maps with a `type`. Matrices are never in them but in the raw payload that follows
(`protocol/frames.py`); `payload` is its length in bytes. A task names a program (`protocol/programs.py`) and its
operands by number. docs/protocol.md is the specification.

What a peer says in words (names, kernels, reasons) ends on terminals and in logs, so `decode` makes it printable and
bounds its length, here and for all who read it. Tokens stay as they are: they are compared, never shown.
"""

from __future__ import annotations

from typing import get_args

import msgspec

from cleave.core.cost.wire import WireFormat
from cleave.errors import ProtocolError
from cleave.printable import LINE_CHARACTERS, NAME_CHARACTERS, printable
from cleave.protocol.programs import Program

VERSION = 4
SCALE_TEST_VERSION = 1004
"""Stated by a device that returns zeros instead of computing. Servers refuse it like any other version, unless they
were started for a test of their scale."""

_QUOTED_CHARACTERS = 160

CHECKED_COLUMNS = 128
"""Rectangles of a result begin and end at multiples of this or at the block's last column, as verification requires."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=str.lower, forbid_unknown_fields=False):
    payload: int = 0

    @classmethod
    def type_name(cls) -> str:
        """The message's `type` on the wire."""
        return str(cls.__struct_config__.tag)


# ------------------------------------------------------------------------------------------------ device to server


class Hello(Message, frozen=True, kw_only=True):
    """Introduce a device; its first message."""

    version: int
    name: str
    token: str = ""
    flops_per_s: float
    memory_bytes: int
    """Limit for operands and results together."""
    kernel: str
    """`numpy`, `torch-cpu`, `torch-cuda`, ...: for display only."""


class Probed(Message, frozen=True, kw_only=True):
    """Answer a `Probe`: report how long its payload takes to arrive, and return as many bytes as requested."""

    down_s: float
    """At the link's sustained rate, if enough bytes arrived to tell it."""


class Result(Message, frozen=True, kw_only=True):
    """A rectangle of a task's output, in coordinates of the block. Rectangles of a task never overlap."""

    task: int
    first_row: int
    rows: int
    first_col: int
    cols: int
    format: WireFormat
    flops: float
    compute_s: float
    """Seconds spent computing this rectangle; with `flops`, the device's speed."""
    down_bytes: int
    down_s: float
    """Seconds the link was busy with `down_bytes` of those received since the last result, bursts left out."""


class Failed(Message, frozen=True, kw_only=True):
    """Report a task the device could not run. The device stays connected; the task is reassigned."""

    task: int
    reason: str


class Leaving(Message, frozen=True, kw_only=True):
    """Announce a disconnect."""

    reason: str


# ------------------------------------------------------------------------------------------------ server to device


class Welcome(Message, frozen=True, kw_only=True):
    """Admit a device and give it a unique name."""

    version: int
    name: str


class Refused(Message, frozen=True, kw_only=True):
    """Reject a device; the connection closes."""

    reason: str


class Probe(Message, frozen=True, kw_only=True):
    """Measure the link: send a payload down and request `answer` bytes back."""

    answer: int
    done_flops: float | msgspec.UnsetType = msgspec.UNSET
    """Operations of results accepted from this device so far, as the server counts them; its owner may want to know."""
    verified_flops: float | msgspec.UnsetType = msgspec.UNSET
    """Those of them that were verified on arrival."""


class Store(Message, frozen=True, kw_only=True):
    """Rows of an operand. The first strip allocates all of it; strips come in order, without gaps."""

    operand: int
    rows: int
    cols: int
    format: WireFormat
    first_row: int
    strip_rows: int


class RunTask(Message, frozen=True, kw_only=True, tag="run"):
    """Run a task whose operands were sent or will follow. Lower `priority` goes first; results come in `format`."""

    task: int
    priority: int
    program: Program
    format: WireFormat


class Drop(Message, frozen=True, kw_only=True):
    """Free operands."""

    operands: tuple[int, ...]


class CancelTasks(Message, frozen=True, kw_only=True, tag="cancel"):
    """Abandon tasks that other devices finished first. Results already in flight are discarded without blame."""

    tasks: tuple[int, ...]


class Idle(Message, frozen=True, kw_only=True):
    """Tell a device that it has no work now, and why; it may stay in reserve."""

    reason: str


class Bye(Message, frozen=True, kw_only=True):
    """End the connection; with `rejoin` the device should reconnect later."""

    reason: str
    rejoin: bool


FromDevice = Hello | Probed | Result | Failed | Leaving
FromServer = Welcome | Refused | Probe | Store | RunTask | Drop | CancelTasks | Idle | Bye
AnyMessage = FromDevice | FromServer

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode(message: AnyMessage) -> bytes:
    return _encoder.encode(message)


def decode(header: bytes | bytearray | memoryview) -> AnyMessage:
    try:
        message = _decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:  # may quote untrusted bytes
        quoted = printable(str(fault), _QUOTED_CHARACTERS)
        raise ProtocolError(f"expected a message of protocol version {VERSION}, but {quoted}") from None
    for field, most in _WORDS.get(type(message), ()):
        msgspec.structs.force_setattr(message, field, printable(getattr(message, field), most))
    return message


def _words(kind: type[Message]) -> tuple[tuple[str, int], ...]:
    """Fields of a message that people read, with the most characters each may have."""
    names = [field.name for field in msgspec.structs.fields(kind) if field.type is str and field.name != "token"]
    return tuple((name, LINE_CHARACTERS if name == "reason" else NAME_CHARACTERS) for name in names)


_WORDS = {kind: words for kind in get_args(AnyMessage) if (words := _words(kind))}
