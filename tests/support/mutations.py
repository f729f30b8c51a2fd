"""Mutations of golden frames: cut, flipped, swapped, inflated, of wrong types, deeply nested.

Everything is drawn from a `random.Random`, so it works for seeded tests, for hypothesis and for `fuzz/` alike.
"""

from __future__ import annotations

import json
import random
import struct
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

VECTORS = Path(__file__).parents[1] / "vectors"

_DEEP = 5000
_LENGTHS = (b"\xd9\xff", b"\xda\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff",
            b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x00")  # fmt: skip
"""MessagePack markers of strings, lists, maps, bytes and extensions of maximum length."""
_NUMBERS = 80
"""Upper limit of operand, state, accumulator, row and column numbers in the golden cases."""
_FLOATS = (0.0, float("nan"), float("inf"), float("-inf"), 3e38, -3e38, 1e-45, 1e20, -1e20)
_ODD: tuple[Any, ...] = (
    0, -1, 1, 127, 128, 65536, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63),
    0.0, -0.0, 0.5, 3.0, 1e308, 5e-324, float("nan"), float("inf"), float("-inf"), True, False, None,
    "", "fp32", "q8", "nt", "x" * 70_000, "\0\u202e", b"", b"\xff" * 40,
    [], [[]], [[1, 2]] * 3000, [[2**63, -1]], {}, {"program": "gemm"}, {"a": {"b": {"c": [1]}}},
)  # fmt: skip


def golden() -> list[tuple[bytes, bytes]]:
    """(header, payload) of every frame in tests/vectors."""
    return [_bytes(frame) for folder in ("messages", "tasks", "resident", "session") for frame in _frames(folder)]


@cache
def conversations() -> list[list[tuple[bytes, bytes]]]:
    """The server's frames in each case of tests/vectors that has tasks."""
    return [
        [_bytes(frame) for frame in case["frames"] if frame["from"] == "server"]
        for folder in ("tasks", "resident", "session")
        for case in _cases(folder)
    ]


def _cases(folder: str) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((VECTORS / folder).glob("*.json"))]


def _frames(folder: str) -> list[dict[str, Any]]:
    return [frame for case in _cases(folder) for frame in case.get("frames", [case])]


def _bytes(frame: dict[str, Any]) -> tuple[bytes, bytes]:
    return bytes.fromhex(frame["header_hex"]), bytes.fromhex(frame["payload_hex"])


def damaged(data: bytes, rng: random.Random) -> bytes:
    """Bytes with a few changed, removed, inserted, repeated, or everything after them cut off."""
    found = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(7):
            case 0:
                del found[at:]
            case 1:
                del found[at : at + rng.randint(1, 8)]
            case 2:
                found[at:at] = rng.randbytes(rng.randint(1, 8))
            case 3:
                found[at:at] = found[at : at + rng.randint(1, 16)]
            case 4:
                found[at : at + 1] = rng.choice(_LENGTHS)
            case 5:
                other = rng.randrange(len(found) + 1)
                found[at : at + 4], found[other : other + 4] = found[other : other + 4], found[at : at + 4]
            case _:
                if at < len(found):
                    found[at] ^= 1 << rng.randrange(8)
    return bytes(found)


def odd(header: bytes, rng: random.Random) -> bytes:
    """A well-formed header, except for one or two fields that are odd, missing, unknown or from another message."""
    fields: dict[Any, Any] = msgspec.msgpack.decode(header)
    for _ in range(rng.randint(1, 2)):
        name = rng.choice(list(fields)) if fields else "type"
        match rng.randrange(5):
            case 0:
                fields.pop(name, None)
            case 1:
                fields[rng.choice(("type", "payload", "x", "", "\0"))] = rng.choice(_ODD)
            case _:
                fields[name] = _altered(fields.get(name), rng)
    packed = msgspec.msgpack.encode(fields)
    if rng.randrange(50) == 0 and packed[0] & 0xF0 == 0x80 and packed[0] != 0x8F:  # one more field, deeply nested
        packed = bytes([packed[0] + 1]) + packed[1:] + b"\xa1y" + b"\x91" * _DEEP + b"\x01"
    return packed


def _altered(value: Any, rng: random.Random) -> Any:
    """Replace a value, or something inside it, with an odd value or a plausible one."""
    inside: list[Any] = list(value) if isinstance(value, dict) else list(range(len(value))) if _is_list(value) else []
    if inside and rng.randrange(8):
        at = rng.choice(inside)
        changed = dict(value) if isinstance(value, dict) else list(value)
        if rng.randrange(12) == 0:
            del changed[at]
        else:
            changed[at] = _altered(changed[at], rng)
        return changed
    return rng.randrange(_NUMBERS) if rng.randrange(2) else rng.choice(_ODD)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


def other_numbers(payload: bytes, rng: random.Random) -> bytes:
    """A payload of the same length with some bytes replaced: huge, tiny or non-finite numbers."""
    found = bytearray(payload)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(found))
        if rng.randrange(2):
            at -= at % 4
            found[at : at + 4] = struct.pack("<f", rng.choice(_FLOATS))[: len(found) - at]
        else:
            found[at] ^= 1 << rng.randrange(8)
    return bytes(found)


def mutated(header: bytes, rng: random.Random) -> bytes:
    return odd(header, rng) if rng.randrange(2) else damaged(header, rng)


def websocket(data: bytes, rng: random.Random, *, first: int = 0x82, fragments: int = 1) -> bytes:
    """A byte string as a client sends it: in masked frames (RFC 6455)."""
    cut = -(-len(data) // fragments) or 1
    pieces = [data[start : start + cut] for start in range(0, len(data), cut)] or [b""]
    out = bytearray()
    for number, piece in enumerate(pieces):
        opcode = first & 0x7F if number == 0 else 0
        out.append(opcode | (0x80 if number == len(pieces) - 1 else 0))
        if len(piece) < 126:
            out.append(0x80 | len(piece))
        elif len(piece) < 1 << 16:
            out += struct.pack("!BH", 0x80 | 126, len(piece))
        else:
            out += struct.pack("!BQ", 0x80 | 127, len(piece))
        mask = rng.randbytes(4)
        key = (mask * (len(piece) // 4 + 1))[: len(piece)]
        out += mask
        out += (int.from_bytes(piece, "big") ^ int.from_bytes(key, "big")).to_bytes(len(piece), "big")
    return bytes(out)
