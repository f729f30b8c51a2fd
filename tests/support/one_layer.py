"""One layer and a journey through it: the usual case in tests of resident tasks."""

from __future__ import annotations

from typing import Any

import msgspec
from tests.support.device_bench import Bench, Journey
from tests.support.plain_parts import Maker, rotary_table

from cleave.core.model.decoder import Part
from cleave.protocol.programs import Backward, Forward

HIDDEN, HEAD_DIM, ROWS, CHUNK = 12, 4, 12, 4
KEY_WIDTH = 2 * HEAD_DIM
PLAIN = {"bias": False, "adapter": False, "is_transposed": False}


class Layer:
    """A layer whose programs are for `ROWS` rows in chunks of `CHUNK`."""

    def __init__(self, memory_bytes: int = 1 << 24) -> None:
        self.bench = Bench(memory_bytes=memory_bytes)
        self.maker = Maker(self.bench, HIDDEN, 1)
        self.attention = self.maker.attention(4, 2, HEAD_DIM, "rms", is_rotary=True, **PLAIN)
        self.mlp = self.maker.mlp(9, "rms", "silu", gated=True, **PLAIN)
        self.x, self.dy = self.maker.normal(ROWS, HIDDEN), self.maker.normal(ROWS, HIDDEN)
        self.state = self.bench.number()
        self.journey = self.through(self.attention, self.mlp)

    def through(self, *parts: Part) -> Journey:
        return Journey(bench=self.bench, parts=parts, rotary=rotary_table(ROWS, HEAD_DIM))

    def forward(self, **changed: Any) -> list[Forward]:
        return [msgspec.structs.replace(unit, **changed) for unit in self.journey.forward(self.x, CHUNK, self.state)]

    def backward(self, accumulators: dict[int, int] | None = None) -> list[Backward]:
        return list(self.journey.backward(self.x, self.dy, CHUNK, accumulators or {}, self.state))
