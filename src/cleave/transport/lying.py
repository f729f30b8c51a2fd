"""A device that lies: falsify chosen results between an honest worker and its channel, for tests and benchmarks.

Unlike the faults of `faulty.py`, a lie may wait, be rare, be small, or concern one kind of result only. An update
returns nothing to falsify: a device that lies there changes its weights by a gradient of another scale.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec
import numpy as np

from cleave.core.model.batch import Matrix
from cleave.protocol.frames import Buffer
from cleave.protocol.messages import AnyMessage, Result, RunTask
from cleave.protocol.numbers import NumpyCodec
from cleave.protocol.programs import Backward, Collect, Forward, Program, SquareSum, Update
from cleave.transport.base import Channel
from cleave.transport.faulty import FaultyChannel, Received

ResultKind = Literal["product", "forward", "backward", "collect", "square_sum", "update"]
Manner = Literal["random", "scaled", "flipped", "stale", "zeros", "one row", "nan"]


@dataclass
class Lie:
    """Which results are falsified, and how. Devices with equal lies agree with each other."""

    kinds: Collection[ResultKind]
    manner: Manner = "scaled"
    factor: float = 1.1
    """What "scaled" results, and the row of "one row", are multiplied with."""
    skip: int = 0
    """Right results of these kinds before the first lie."""
    every: int = 1
    """Lie in every so many of them."""
    most: int = 1 << 30
    """Maximum number of lies."""
    is_on: bool = True
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(3))
    told: int = 0
    _seen: int = 0
    _before: dict[tuple[int, ...], Matrix] = field(default_factory=lambda: dict[tuple[int, ...], Matrix]())

    def spoil(self, values: Matrix) -> Matrix:
        """Return what the device sends instead of a right result."""
        stale, self._before[values.shape] = self._before.get(values.shape, np.roll(values, 1)), values
        self._seen += 1
        is_due = self._seen > self.skip and (self._seen - self.skip) % self.every == 0
        if not self.is_on or not is_due or self.told == self.most:
            return values
        self.told += 1
        match self.manner:
            case "random":
                return self.rng.normal(0, values.std(), values.shape).astype(np.float32)
            case "scaled":
                return values * np.float32(self.factor)
            case "flipped":
                return -values
            case "stale":
                return stale
            case "zeros":
                return np.zeros_like(values)
            case "one row":
                return np.concatenate([values[:-1], values[-1:] * np.float32(self.factor)])
            case "nan":
                spoiled = values.copy()
                spoiled[-1, -1] = np.nan
                return spoiled


class LyingChannel(FaultyChannel):
    def __init__(self, inner: Channel, lie: Lie) -> None:
        super().__init__(inner, (), np.random.default_rng(0))
        self._lie = lie
        self._kinds: dict[int, ResultKind] = {}

    async def receive(self) -> Received:
        received = await super().receive()
        if isinstance(received.message, RunTask):
            self._kinds[received.message.task] = _kind(received.message.program)
            return replace(received, message=self._misread(received.message))
        return received

    async def send(self, message: AnyMessage, payload: Buffer = b"") -> None:
        if isinstance(message, Result) and self._is_concerned(message):
            values, codec = np.empty((message.rows, message.cols), dtype=np.float32), NumpyCodec()
            codec.decode_into(payload, message.format, values)
            payload = codec.encode(self._lie.spoil(values), message.format).data
        await super().send(message, payload)

    def _is_concerned(self, result: Result) -> bool:
        kind = self._kinds.get(result.task)
        has_numbers = result.rows * result.cols > 1 or kind == "square_sum"
        return has_numbers and kind in self._lie.kinds

    def _misread(self, message: RunTask) -> RunTask:
        """Return the task that the device carries out instead."""
        program = message.program
        if not isinstance(program, Update) or "update" not in self._lie.kinds:
            return message
        scale = float(self._lie.spoil(np.array([[program.scale]], dtype=np.float32))[0, 0])
        return msgspec.structs.replace(message, program=msgspec.structs.replace(program, scale=scale))


def _kind(program: Program) -> ResultKind:
    match program:
        case Forward():
            return "forward"
        case Backward():
            return "backward"
        case Collect():
            return "collect"
        case SquareSum():
            return "square_sum"
        case Update():
            return "update"
        case _:
            return "product"
