"""A channel that misbehaves on purpose: what real devices do wrong, by script, for tests and chaos runs.

It stands between an honest worker and its channel. From the messages that pass it knows what the device is doing, and
when a fault of its script is due, it strikes: from then on the server sees a device that lies, stalls or is cut off,
while the worker notices nothing. The script and the generator of random numbers decide everything, so a run can be
repeated. It knows channels and messages; what a server should make of all this is none of its business.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cleave.errors import InputError
from cleave.protocol import messages
from cleave.protocol.frames import Buffer, parts
from cleave.protocol.messages import AnyMessage, Cancel, Drop, Failed, Hello, Probed, Result, Run, Store
from cleave.protocol.numbers import NumpyCodec
from cleave.protocol.programs import Backward, Collect, Forward, Gemm, Hold, Program, operands
from cleave.transport.base import Channel, Received

Kind = Literal[
    "vanish",  # the connection ends without a word
    "stall",  # nothing is sent for `seconds`; what comes is still received
    "slow",  # each message, either way, is `seconds` late
    "corrupt",  # one bit of each message is flipped
    "lie",  # the numbers of each result are others
    "replay",  # the result before, or where none was the hello, is sent again with each message
    "duplicate",  # each message is sent twice
    "flood",  # thousands of messages nobody asked for, at once
    "half-open",  # nothing is sent or received any more, and the connection stays open
    "torn-frame",  # a header and some of its payload, and nothing after that
]
Phase = Literal[
    "joining",  # until the first task or operand arrives
    "receiving",  # a task or a strip of an operand has arrived
    "computing",  # a task's operands are all there, just now
    "returning",  # a result is about to be sent
    "idle",  # every task is answered
]
MANNERS: dict[Kind, tuple[str, ...]] = {
    "corrupt": ("header", "payload"),
    "lie": ("random", "one", "scaled", "flipped", "zeros", "stale"),
    "replay": ("instead", "besides"),
    "flood": ("probed", "result", "failed"),
    "torn-frame": ("silent", "closed"),
}
"""The ways to commit a fault, where there are several."""
_FLOOD_MESSAGES = 3000
_NOBODYS = 1 << 50  # a task no server ever made
_UNASKED: dict[str, tuple[AnyMessage, bytes]] = {
    "probed": (Probed(down_s=0.0), b""),
    "failed": (Failed(task=_NOBODYS, reason="made up"), b""),
    "result": (
        Result(
            task=_NOBODYS, first_row=0, rows=4, first_col=0, cols=4, format="fp32", flops=0.0, compute_s=0.0,
            down_bytes=0, down_s=0.0, payload=64,
        ),
        bytes(64),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    kind: Kind
    phase: Phase
    after: int = 0
    """How often the phase is seen, message by message, before the fault strikes."""
    seconds: float = math.inf
    manner: str = ""
    """One of MANNERS; if empty, drawn when it strikes."""

    def __post_init__(self) -> None:
        if self.manner not in ("", *MANNERS.get(self.kind, ())):
            raise InputError(f"expected a manner of {self.kind}, {MANNERS.get(self.kind, ())}, got {self.manner!r}")


Script = tuple[Fault, ...]


class FaultyChannel(Channel):
    """Another channel, with faults; without any, just that channel."""

    def __init__(self, inner: Channel, script: Script, rng: np.random.Generator) -> None:
        super().__init__()
        self._inner, self._rng = inner, rng
        self._due = list(script)
        self.struck: list[Fault] = []
        """The faults so far, in order."""
        self._watch = _Watch()
        self._seen: Counter[Phase] = Counter()
        self._habits: dict[Kind, str] = {}
        self._earlier: tuple[AnyMessage, Buffer] | None = None
        self._silent_until_s, self._late_s = -math.inf, 0.0
        self._is_deaf = False

    async def send(self, message: AnyMessage, payload: Buffer = b"") -> None:
        await self._pass(self._watch.sent(message), message, payload)
        await self._hold()
        if self._habits:
            for header, body in self._spoiled(message, payload):
                await self._write(header, body)
        else:
            await super().send(message, payload)
        if isinstance(message, Hello | Result) and (self._due or self._habits):
            self._earlier = message, bytes(payload)
        if self._watch.rests():
            await self._pass("idle")

    async def receive(self) -> Received:
        received = await super().receive()
        await self._pass(self._watch.received(received.message))
        await asyncio.sleep(self._late_s)
        if self._is_deaf:
            await _for_ever()
        return received

    async def _send(self, data: Buffer) -> None:
        await self._inner._send(data)

    async def _receive(self) -> Buffer:
        return await self._inner._receive()

    async def _close(self, reason: str) -> None:
        await self._inner.close(reason)

    # -------------------------------------------------------------------------------------------- striking

    async def _pass(self, phase: Phase, message: AnyMessage | None = None, payload: Buffer = b"") -> None:
        """A moment of a phase; `message` is what is about to be sent, if anything is."""
        self._seen[phase] += 1
        for fault in [due for due in self._due if due.phase == phase and due.after < self._seen[phase]]:
            self._due.remove(fault)
            self.struck.append(fault)
            await self._strike(fault, message, payload)

    async def _strike(self, fault: Fault, message: AnyMessage | None, payload: Buffer) -> None:
        manner = fault.manner or str(self._rng.choice(MANNERS.get(fault.kind, ("",))))
        match fault.kind:
            case "vanish":
                await self._inner.close()
            case "stall":
                self._silent_until_s = asyncio.get_running_loop().time() + fault.seconds
            case "slow":
                self._late_s = fault.seconds
            case "half-open":
                self._silent_until_s, self._is_deaf = math.inf, True
            case "flood":
                for _ in range(_FLOOD_MESSAGES):
                    await super().send(*_UNASKED[manner])
            case "torn-frame":
                torn, body = (message, payload) if message and payload else _UNASKED["result"]
                await self._write(messages.encode(torn), memoryview(body)[: self._rng.integers(len(body))])
                self._silent_until_s = math.inf
                if manner == "closed":
                    await self._inner.close()
            case "corrupt" | "lie" | "replay" | "duplicate":
                self._habits[fault.kind] = manner

    async def _hold(self) -> None:
        """As long as a silence lasts, and then as long as each message is late."""
        silent_s = self._silent_until_s - asyncio.get_running_loop().time()
        if silent_s == math.inf:
            await _for_ever()
        await asyncio.sleep(max(silent_s, 0.0) + self._late_s)

    # -------------------------------------------------------------------------------------------- spoiling

    def _spoiled(self, message: AnyMessage, payload: Buffer) -> Iterator[tuple[bytes, Buffer]]:
        """Headers and payloads to send instead of an honest message."""
        if isinstance(message, Result) and "lie" in self._habits:
            payload = self._lied(message, payload)
        outgoing = [(message, payload)]
        if "replay" in self._habits and self._earlier is not None:
            outgoing = [self._earlier, *(outgoing if self._habits["replay"] == "besides" else ())]
        for each, body in outgoing * (2 if "duplicate" in self._habits else 1):
            header = messages.encode(each)
            if "corrupt" in self._habits:
                flips_payload = self._habits["corrupt"] == "payload" and len(body) > 0
                header, body = (header, self._flipped(body)) if flips_payload else (self._flipped(header), body)
            yield header, body

    def _lied(self, message: Result, payload: Buffer) -> Buffer:
        codec, values = NumpyCodec(), np.empty((message.rows, message.cols), dtype=np.float32)
        codec.decode_into(payload, message.format, values)
        size = float(values.std()) or 1.0
        match self._habits["lie"]:
            case "one":
                values.flat[self._rng.integers(values.size)] += 3 * size
            case "scaled":
                values *= 1.1
            case "flipped":
                values = -values
            case "zeros":
                values[:] = 0
            case "stale":  # what another rectangle was; or the right numbers, each one place too far
                if self._earlier is not None and len(self._earlier[1]) == len(payload):
                    return self._earlier[1]
                values = np.roll(values, 1)
            case _:
                values = self._rng.standard_normal(values.shape, dtype=np.float32) * np.float32(size)
        return codec.encode(values, message.format).data

    def _flipped(self, data: Buffer) -> bytes:
        flipped = bytearray(data)
        flipped[self._rng.integers(len(flipped))] ^= 1 << int(self._rng.integers(8))
        return bytes(flipped)

    async def _write(self, header: bytes, payload: Buffer) -> None:
        """Like `send`, but whatever it is."""
        async with self._sending:
            for data in (header, *parts(payload)):
                await self._send(data)
        self.sent_bytes += len(header) + len(payload)


class _Watch:
    """What a device is doing, as far as its messages tell; `received` and `sent` say the phase a message finds."""

    def __init__(self) -> None:
        self._phase: Phase = "joining"
        self._missing_rows: dict[int, int] = {}  # of operands on their way
        self._shapes: dict[int, tuple[int, int]] = {}
        self._waiting: dict[int, set[int]] = {}  # task -> its operands, until they are all there
        self._owed: dict[int, Program] = {}  # task -> what it is to return
        self._returned: Counter[int] = Counter()  # task -> entries of its result that were returned

    def received(self, message: AnyMessage) -> Phase:
        match message:
            case Store(operand=operand, rows=rows, cols=cols, strip_rows=strip_rows):
                self._shapes[operand] = rows, cols
                self._missing_rows[operand] = self._missing_rows.get(operand, rows) - strip_rows
            case Run(task=task, program=program):
                self._waiting[task] = set(operands(program))
                self._owed[task] = program
            case Drop(operands=dropped):
                for operand in dropped:
                    self._missing_rows.pop(operand, None)
            case Cancel(tasks=tasks):
                self._forget(*tasks)
            case _:
                pass
        if isinstance(message, Store | Run):
            there = {operand for operand, missing in self._missing_rows.items() if missing <= 0}
            ready = [task for task, awaited in self._waiting.items() if awaited <= there]
            for task in ready:
                del self._waiting[task]
            self._phase = "computing" if ready else "receiving"
        return self._phase

    def sent(self, message: AnyMessage) -> Phase:
        if isinstance(message, Failed):
            self._forget(message.task)
        elif isinstance(message, Result):
            self._phase = "returning"
            self._returned[message.task] += message.rows * message.cols
            program = self._owed.get(message.task)
            if program is None or self._returned[message.task] >= _entries(program, self._shapes):
                self._forget(message.task)
        return self._phase

    def rests(self) -> bool:
        """Whether the result just sent was the last that is owed."""
        if self._phase == "returning" and not self._owed:
            self._phase = "idle"
            return True
        return False

    def _forget(self, *tasks: int) -> None:
        for task in tasks:
            self._waiting.pop(task, None)
            self._owed.pop(task, None)
            self._returned.pop(task, None)


def _entries(program: Program, shapes: dict[int, tuple[int, int]]) -> int:
    """Of the result."""
    match program:
        case Gemm() | Collect():
            return program.rows * program.cols
        case Forward(is_silent=True) | Backward(wants_dx=False) | Hold():
            return 1
        case Forward() | Backward():
            rows, cols = shapes.get(program.x, (1, 1))
            return rows * (2 if isinstance(program, Forward) and program.head is not None else cols)


async def _for_ever() -> None:
    await asyncio.get_running_loop().create_future()
