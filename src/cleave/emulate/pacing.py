"""Make a device's processor take the time its profile says, whatever this machine is.

`ProcessorClock` is the law, without a clock of its own: a task has a fixed cost, operations take longer on few rows,
and every byte received or sent is handled by the same processor, so whatever one device does queues up.
`PacedProcessor` holds results back until then, and `KeepingUp` counts how often the real time was longer: then this
machine set the pace, not the profile.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

from cleave.core.cost.rates import thin_effort
from cleave.core.cost.wire import WireFormat, encoded_bytes
from cleave.device.processor import Encoded
from cleave.device.programs.gemm import Chunk
from cleave.emulate.devices import DeviceProfile

_BACK_TO_BACK_S = 5e-3
"""A chunk that follows this closely was waiting for the one before; only a timer was late."""
_TOLERANCE_S = 5e-3
"""Lateness of timers, which the next chunk makes up for."""
_FEW_CHUNKS = 20
_MANY_LATE = 0.05


class ProcessorClock:
    """When a device's processor is busy, in seconds of whatever clock the caller uses."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile
        self._free_s = -math.inf
        self._handling_s = 0.0
        """Spent on bytes received since the last chunk."""

    def received(self, payload_bytes: int, now_s: float) -> None:
        spent_s = payload_bytes * self._profile.byte_s
        self._free_s = self._begin_s(now_s) + spent_s
        self._handling_s += spent_s

    def reserve(self, chunk: Chunk, sent_bytes: int, now_s: float, *, begins: bool) -> tuple[float, float]:
        """Queue a chunk; return when it ends, and the seconds it takes with the bytes received before it."""
        profile = self._profile
        took_s = (profile.task_s if begins else 0.0) + sent_bytes * profile.byte_s
        took_s += chunk.flops * float(thin_effort(chunk.rows)) / profile.flops_per_s
        self._free_s = self._begin_s(now_s) + took_s
        took_s, self._handling_s = took_s + self._handling_s, 0.0
        return self._free_s, took_s

    def delay(self, until_s: float) -> None:
        """Count the processor as busy until then."""
        self._free_s = max(self._free_s, until_s)

    def _begin_s(self, now_s: float) -> float:
        return self._free_s if now_s - self._free_s < _BACK_TO_BACK_S else now_s


class KeepingUp:
    """How often results were ready later than the profile says, and by how much."""

    def __init__(self, warn: Callable[[str], None] = lambda text: None) -> None:
        self._warn, self._has_warned = warn, False
        self.chunks = self.late = 0
        self.late_s = self.worst_s = 0.0
        self.paced_s = 0.0
        """Processor seconds of all devices, by their profiles."""

    def count(self, took_s: float, late_s: float) -> None:
        self.chunks += 1
        self.paced_s += took_s
        if late_s <= _TOLERANCE_S:
            return
        self.late += 1
        self.late_s += late_s
        self.worst_s = max(self.worst_s, late_s)
        if not (self._has_warned or self.keeps_up):
            self._has_warned = True
            self._warn(
                f"this machine is too slow for these profiles: {self.late} of {self.chunks} results were late, by up "
                f"to {self.worst_s:.2g} s; emulate fewer or slower devices, or measured times are not theirs"
            )

    @property
    def keeps_up(self) -> bool:
        return self.chunks < _FEW_CHUNKS or self.late <= _MANY_LATE * self.chunks


class Arithmetic(Protocol):
    """What answers for all emulated devices."""

    async def answer(self, chunk: Chunk, format: WireFormat) -> Encoded | None:
        """Return the result of a chunk, None if it has none to send."""
        ...


class PacedProcessor:
    """A device's processor, at the speed of its profile."""

    def __init__(self, profile: DeviceProfile, arithmetic: Arithmetic, keeping_up: KeepingUp) -> None:
        self._clock, self._arithmetic, self._keeping_up = ProcessorClock(profile), arithmetic, keeping_up
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Future[Encoded | None] | None = None

    async def run(self, chunk: Chunk, format: WireFormat, *, begins: bool) -> tuple[Encoded | None, float]:
        sent_bytes = 0 if chunk.part is None else encoded_bytes(format, chunk.part.rows, chunk.part.cols)
        end_s, took_s = self._clock.reserve(chunk, sent_bytes, self._loop.time(), begins=begins)
        self._answer = asyncio.ensure_future(self._arithmetic.answer(chunk, format))
        encoded = await asyncio.shield(self._answer)  # a product cannot be interrupted, only awaited
        late_s = self._loop.time() - end_s
        self._keeping_up.count(took_s, late_s)
        if late_s < 0:
            await asyncio.sleep(-late_s)
        elif late_s > _TOLERANCE_S:
            self._clock.delay(self._loop.time())
        return encoded, took_s

    def received(self, payload_bytes: int) -> None:
        self._clock.received(payload_bytes, self._loop.time())

    async def close(self) -> None:
        if self._answer is not None:
            await asyncio.gather(self._answer, return_exceptions=True)
