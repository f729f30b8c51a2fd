"""A device that meets its fate at a given moment of a pass: when it is assigned a kind of unit, or returns its result.

`FaultyChannel` counts messages; this channel distinguishes them by their task, so that a test can say "while the second
rectangle of a gradient is in transit". The fate is whatever the test supplies, for this device or for others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cleave.protocol.frames import Buffer
from cleave.protocol.messages import AnyMessage, Failed, Result, RunTask
from cleave.protocol.programs import Backward, Collect, Copy, Forward, Hold, Program, SquareSum, Update
from cleave.transport.base import Channel, Received
from cleave.transport.faulty import FaultyChannel

Kind = Literal["forward", "backward", "collect", "gemm", "hold", "square_sum", "update", "copy"]
When = Literal["told", "returning", "returned"]


@dataclass(frozen=True, slots=True)
class Moment:
    """The n-th time, from 0, that a device is assigned such a unit, is about to return its result, or has done so."""

    kind: Kind
    when: When
    number: int = 0


class DoomedChannel(FaultyChannel):
    """Awaits `meet` at the moment; if it returns False, that result becomes a failure."""

    def __init__(self, inner: Channel, moment: Moment, meet: Callable[[], Awaitable[bool]]) -> None:
        super().__init__(inner, (), np.random.default_rng(0))
        self._moment, self._meet = moment, meet
        self._kinds: dict[int, Kind] = {}
        self._count: Counter[tuple[Kind, When]] = Counter()
        self.is_met = False

    async def receive(self) -> Received:
        received = await super().receive()
        if isinstance(received.message, RunTask):
            self._kinds[received.message.task] = _kind(received.message.program)
            await self._come("told", received.message.task)
        return received

    async def send(self, message: AnyMessage, payload: Buffer = b"") -> None:
        if not isinstance(message, Result):
            await super().send(message, payload)
            return
        if await self._come("returning", message.task):
            await super().send(message, payload)
            await self._come("returned", message.task)
        else:
            await super().send(Failed(task=message.task, reason="it was to be so"))

    async def _come(self, when: When, task: int) -> bool:
        kind = self._kinds[task]
        self._count[kind, when] += 1
        if self.is_met or self._moment != Moment(kind, when, self._count[kind, when] - 1):
            return True
        self.is_met = True
        return await self._meet()

    async def end(self) -> None:
        """Close the connection, like a device that is switched off."""
        await self._inner.close()

    def stall(self, until_s: float) -> None:
        """Send nothing until the given time."""
        self._silent_until_s = until_s

    def delay(self, seconds: float) -> None:
        """Delay each message from now on."""
        self._late_s = seconds


def _kind(program: Program) -> Kind:
    match program:
        case Forward():
            return "forward"
        case Backward():
            return "backward"
        case Collect():
            return "collect"
        case Hold():
            return "hold"
        case SquareSum():
            return "square_sum"
        case Update():
            return "update"
        case Copy():
            return "copy"
        case _:
            return "gemm"
