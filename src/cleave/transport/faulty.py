"""Scripted fault injection: a channel that reproduces what real devices do wrong, for tests and chaos runs.

Sits between an honest worker and its channel. It infers the device's phase from passing messages and injects each fault
of its script when due: from then on the server sees a device that lies, stalls or is cut off, while the worker notices
nothing. The script and the random generator decide everything, so runs are repeatable. It knows channels and messages,
not how a server should react.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import msgspec
import numpy as np

from cleave.errors import InputError
from cleave.protocol import messages
from cleave.protocol.frames import Buffer, parts
from cleave.protocol.messages import AnyMessage, CancelTasks, Drop, Failed, Hello, Probed, Result, RunTask, Store
from cleave.protocol.numbers import NumpyCodec
from cleave.protocol.programs import (
    Backward,
    Collect,
    Copy,
    Forward,
    GemmProgram,
    Hold,
    Program,
    SquareSum,
    Update,
    operands,
)
from cleave.transport.base import Channel, Received

Kind = Literal[
    "vanish",  # the connection closes without a message
    "stall",  # nothing is sent for `seconds`; receiving goes on
    "slow",  # every message, in both directions, is `seconds` late
    "corrupt",  # every message has one bit flipped
    "lie",  # every result carries wrong numbers
    "replay",  # every message resends the previous result, or the hello before there is one
    "duplicate",  # every message is sent twice
    "flood",  # thousands of unsolicited messages at once
    "half-open",  # sending and receiving stop, but the connection stays open
    "torn-frame",  # a header and part of its payload, then nothing
    "withhold",  # heartbeats are answered, but no result is sent
    "drip",  # every result, or every row of it, is `seconds` late
    "misreport",  # every result claims absurd durations
    "deaf",  # receiving stops; sending goes on
]
Phase = Literal[
    "joining",  # until the first task or operand arrives
    "receiving",  # a task or a strip of an operand arrived
    "computing",  # the last missing operand of a task arrived
    "returning",  # a result is about to be sent
    "idle",  # no result is outstanding
]
MANNERS: dict[Kind, tuple[str, ...]] = {
    "corrupt": ("header", "payload"),
    "lie": ("random", "one", "scaled", "flipped", "zeros", "stale"),
    "replay": ("instead", "besides"),
    "flood": ("probed", "result", "failed"),
    "torn-frame": ("silent", "closed"),
    "withhold": ("bare", "padded"),
    "drip": ("rows", "whole"),
    "misreport": ("slow", "fast", "zero", "negative", "nan", "inf"),
}
"""Variants of a fault, where there are several."""
_FLOOD_MESSAGES = 3000
_PADDING = bytes(100_000)  # enough between two heartbeats to look like progress
_CLAIMED_S = {"slow": 1e30, "fast": 1e-30, "zero": 0.0, "negative": -1.0, "nan": math.nan, "inf": math.inf}
_UNKNOWN_TASK = 1 << 50  # no server issues this task
_UNSOLICITED: dict[str, tuple[AnyMessage, bytes]] = {
    "probed": (Probed(down_s=0.0), b""),
    "failed": (Failed(task=_UNKNOWN_TASK, reason="made up"), b""),
    "result": (
        Result(
            task=_UNKNOWN_TASK, first_row=0, rows=4, first_col=0, cols=4, format="fp32", flops=0.0, compute_s=0.0,
            down_bytes=0, down_s=0.0, payload=64,
        ),
        bytes(64),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One entry of a script: what goes wrong, and when."""

    kind: Kind
    phase: Phase
    after: int = 0
    """Messages of that phase to let pass before the fault is injected."""
    seconds: float = math.inf
    manner: str = ""
    """One of MANNERS; drawn at random if empty."""

    def __post_init__(self) -> None:
        if self.manner not in ("", *MANNERS.get(self.kind, ())):
            raise InputError(f"expected a manner of {self.kind}, {MANNERS.get(self.kind, ())}, got {self.manner!r}")


Script = tuple[Fault, ...]


class FaultyChannel(Channel):
    """Wrap a channel and inject the faults of a script."""

    def __init__(self, inner: Channel, script: Script, rng: np.random.Generator) -> None:
        super().__init__()
        self._inner, self._rng = inner, rng
        self._due = list(script)
        self.struck: list[Fault] = []
        """Faults injected so far, in order."""
        self._tracker = _PhaseTracker()
        self._phase_counts: Counter[Phase] = Counter()
        self._lasting: dict[Kind, str] = {}
        self._previous: tuple[AnyMessage, Buffer] | None = None
        self._silent_until_s, self._late_s, self._drip_s = -math.inf, 0.0, 0.0
        self._is_deaf = False

    async def send(self, message: AnyMessage, payload: Buffer = b"") -> None:
        await self._enter(self._tracker.sent(message), message, payload)
        await self._delay()
        if self._lasting:
            for header, body in self._tampered(message, payload):
                await asyncio.sleep(self._drip_s if isinstance(message, Result) else 0.0)
                await self._write(header, body)
        else:
            await super().send(message, payload)
        if isinstance(message, Hello | Result) and (self._due or self._lasting):
            self._previous = message, bytes(payload)
        if self._tracker.becomes_idle():
            await self._enter("idle")

    async def receive(self) -> Received:
        received = await super().receive()
        await self._enter(self._tracker.received(received.message))
        await asyncio.sleep(self._late_s)
        if self._is_deaf:
            await _forever()
        return received

    async def _send(self, data: Buffer) -> None:
        await self._inner._send(data)

    async def _receive(self) -> Buffer:
        return await self._inner._receive()

    async def _close(self, reason: str) -> None:
        await self._inner.close(reason)

    # -------------------------------------------------------------------------------------------- injection

    async def _enter(self, phase: Phase, message: AnyMessage | None = None, payload: Buffer = b"") -> None:
        """Inject the faults due in this phase; `message` is the one about to be sent, if any."""
        self._phase_counts[phase] += 1
        for fault in [due for due in self._due if due.phase == phase and due.after < self._phase_counts[phase]]:
            self._due.remove(fault)
            self.struck.append(fault)
            await self._inject(fault, message, payload)

    async def _inject(self, fault: Fault, message: AnyMessage | None, payload: Buffer) -> None:
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
                    await super().send(*_UNSOLICITED[manner])
            case "torn-frame":
                torn, body = (message, payload) if message and payload else _UNSOLICITED["result"]
                await self._write(messages.encode(torn), memoryview(body)[: self._rng.integers(len(body))])
                self._silent_until_s = math.inf
                if manner == "closed":
                    await self._inner.close()
            case "deaf":
                self._is_deaf = True
            case "corrupt" | "lie" | "replay" | "duplicate" | "withhold" | "drip" | "misreport":
                self._drip_s = fault.seconds if fault.kind == "drip" else self._drip_s
                self._lasting[fault.kind] = manner

    async def _delay(self) -> None:
        """Wait out a stall, and the delay of each message."""
        silent_s = self._silent_until_s - asyncio.get_running_loop().time()
        if silent_s == math.inf:
            await _forever()
        await asyncio.sleep(max(silent_s, 0.0) + self._late_s)

    # -------------------------------------------------------------------------------------------- tampering

    def _tampered(self, message: AnyMessage, payload: Buffer) -> Iterator[tuple[bytes, Buffer]]:
        """Yield the headers and payloads to send in place of an honest message."""
        if isinstance(message, Result) and "lie" in self._lasting:
            payload = self._falsified(message, payload)
        if isinstance(message, Result) and "misreport" in self._lasting:
            claimed_s = _CLAIMED_S[self._lasting["misreport"]]
            message = msgspec.structs.replace(message, compute_s=claimed_s, down_s=claimed_s)
        if "withhold" in self._lasting:
            if isinstance(message, Result):
                return
            if isinstance(message, Probed) and self._lasting["withhold"] == "padded":
                message, payload = Probed(down_s=0.0, payload=len(_PADDING)), _PADDING
        outgoing = [(message, payload)]
        if isinstance(message, Result) and self._lasting.get("drip") == "rows":
            outgoing = list(_rows(message, payload))
        if "replay" in self._lasting and self._previous is not None:
            outgoing = [self._previous, *(outgoing if self._lasting["replay"] == "besides" else ())]
        for each, body in outgoing * (2 if "duplicate" in self._lasting else 1):
            header = messages.encode(each)
            if "corrupt" in self._lasting:
                flips_payload = self._lasting["corrupt"] == "payload" and len(body) > 0
                header, body = (header, self._flipped(body)) if flips_payload else (self._flipped(header), body)
            yield header, body

    def _falsified(self, message: Result, payload: Buffer) -> Buffer:
        codec, values = NumpyCodec(), np.empty((message.rows, message.cols), dtype=np.float32)
        codec.decode_into(payload, message.format, values)
        size = float(values.std()) or 1.0
        match self._lasting["lie"]:
            case "one":
                values.flat[self._rng.integers(values.size)] += 3 * size
            case "scaled":
                values *= 1.1
            case "flipped":
                values = -values
            case "zeros":
                values[:] = 0
            case "stale":  # an earlier rectangle, or the right numbers shifted by one
                if self._previous is not None and len(self._previous[1]) == len(payload):
                    return self._previous[1]
                values = np.roll(values, 1)
            case _:
                values = self._rng.standard_normal(values.shape, dtype=np.float32) * np.float32(size)
        return codec.encode(values, message.format).data

    def _flipped(self, data: Buffer) -> bytes:
        flipped = bytearray(data)
        flipped[self._rng.integers(len(flipped))] ^= 1 << int(self._rng.integers(8))
        return bytes(flipped)

    async def _write(self, header: bytes, payload: Buffer) -> None:
        """Send raw bytes, well-formed or not."""
        async with self._sending:
            for data in (header, *parts(payload)):
                await self._send(data)
        self.sent_bytes += len(header) + len(payload)


class _PhaseTracker:
    """Infer a device's phase from its messages; `received` and `sent` return the phase at each message."""

    def __init__(self) -> None:
        self._phase: Phase = "joining"
        self._missing_rows: dict[int, int] = {}  # of operands still arriving
        self._shapes: dict[int, tuple[int, int]] = {}
        self._waiting: dict[int, set[int]] = {}  # task -> operands, until all have arrived
        self._unanswered: dict[int, Program] = {}  # tasks without a complete result
        self._returned: Counter[int] = Counter()  # task -> elements returned so far

    def received(self, message: AnyMessage) -> Phase:
        match message:
            case Store(operand=operand, rows=rows, cols=cols, strip_rows=strip_rows):
                self._shapes[operand] = rows, cols
                self._missing_rows[operand] = self._missing_rows.get(operand, rows) - strip_rows
            case RunTask(task=task, program=program):
                self._waiting[task] = set(operands(program))
                self._unanswered[task] = program
            case Drop(operands=dropped):
                for operand in dropped:
                    self._missing_rows.pop(operand, None)
            case CancelTasks(tasks=tasks):
                self._forget(*tasks)
            case _:
                pass
        if isinstance(message, Store | RunTask):
            arrived = {operand for operand, missing in self._missing_rows.items() if missing <= 0}
            ready = [task for task, awaited in self._waiting.items() if awaited <= arrived]
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
            program = self._unanswered.get(message.task)
            if program is None or self._returned[message.task] >= _result_elements(program, self._shapes):
                self._forget(message.task)
        return self._phase

    def becomes_idle(self) -> bool:
        """Whether the result just sent was the last outstanding one."""
        if self._phase == "returning" and not self._unanswered:
            self._phase = "idle"
            return True
        return False

    def _forget(self, *tasks: int) -> None:
        for task in tasks:
            self._waiting.pop(task, None)
            self._unanswered.pop(task, None)
            self._returned.pop(task, None)


def _result_elements(program: Program, shapes: dict[int, tuple[int, int]]) -> int:
    """Elements of the result."""
    match program:
        case GemmProgram() | Collect():
            return program.rows * program.cols
        case SquareSum(accumulators=accumulators):
            return len(accumulators)
        case Forward(is_silent=True) | Backward(wants_dx=False) | Hold() | Update() | Copy():
            return 1
        case Forward() | Backward():
            rows, cols = shapes.get(program.x, (1, 1))
            return rows * (2 if isinstance(program, Forward) and program.head is not None else cols)


def _rows(message: Result, payload: Buffer) -> Iterator[tuple[AnyMessage, Buffer]]:
    """Yield a result as one message per row."""
    values, codec = np.empty((message.rows, message.cols), dtype=np.float32), NumpyCodec()
    codec.decode_into(payload, message.format, values)
    for row in range(message.rows):
        body = codec.encode(values[row : row + 1], message.format).data
        first_row, size = message.first_row + row, len(body)
        yield msgspec.structs.replace(message, first_row=first_row, rows=1, payload=size), body


async def _forever() -> None:
    await asyncio.get_running_loop().create_future()
