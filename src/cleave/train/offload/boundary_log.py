# pyright: standard
"""What crossed the borders of leased stages since this process last had their weights: enough to replay it.

A step of the log is the passes since the update before, and the update: per pass and leased stage, the input and the
gradient of the output, as they were on the wire. From the weights before a step and the log from there on, the present
ones follow exactly. Each stage is forgotten by itself, up to where its weights are here. The log has budgets
(`spool.py`); when they are used up, LogFullError tells the caller to fetch the weights instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from cleave.core.cost.lease import LIVE_LOG_BYTES
from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Batch, Matrix
from cleave.core.model.shard import Shard
from cleave.core.model.update_rule import Rule
from cleave.protocol.numbers import Codec
from cleave.train.offload.spool import Spool, SpoolFullError, Stored

MEMORY_BYTES = 256 << 20

Rules = Mapping[int, tuple[Rule, float]]
"""Parameter -> rule, and what gradients were multiplied by besides the factors of their passes."""


class LogFullError(Exception):
    """There is no room for another pass; the reason in words."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoggedPass:
    batch: Batch[Any]
    """The batch, without numbers except for targets, scales, mask and positions."""
    factor: float
    """Factor by which its gradients were multiplied."""
    borders: dict[Shard, tuple[Stored, Stored | None]]
    """Input and output gradient of each stage that is not forgotten."""
    parameters: Mapping[int, Stored]
    """Parameters that changed without an update in this log."""


@dataclass(slots=True, eq=False)
class LoggedStep:
    passes: list[LoggedPass] = field(default_factory=list)
    rules: Rules = field(default_factory=dict)


class BoundaryLog:
    def __init__(
        self, codec: Codec, format: WireFormat, *, memory_bytes: int = MEMORY_BYTES, disk_bytes: float = LIVE_LOG_BYTES
    ) -> None:
        self._codec, self._spool = codec, Spool(memory_bytes=memory_bytes, disk_bytes=disk_bytes)
        self._format: WireFormat = format
        self._steps: list[LoggedStep] = []
        """Those that ended with an update."""
        self._first = 0
        """Position of the first of them."""
        self._open = LoggedStep()

    @property
    def bytes(self) -> int:
        return self._spool.bytes

    @property
    def position(self) -> int:
        """Updates so far."""
        return self._first + len(self._steps)

    @property
    def open_passes(self) -> list[LoggedPass]:
        """Passes since the last update."""
        return self._open.passes

    def steps(self, position: int) -> list[LoggedStep]:
        """Steps from a position on, up to the last update."""
        assert position >= self._first, "later steps alone are here"
        return self._steps[position - self._first :]

    def add_pass(
        self,
        batch: Batch[Any],
        factor: float,
        borders: Iterable[tuple[Shard, Matrix, Matrix | None]],
        parameters: Mapping[int, tuple[Matrix, WireFormat]],
    ) -> None:
        """Keep a pass; LogFullError if there is no room for it."""
        stored: list[Stored] = []

        def store(matrix: Matrix, format: WireFormat) -> Stored:
            stored.append(self._store(matrix, format))
            return stored[-1]

        wire = self._format
        try:
            kept = {shard: (store(x, wire), None if dy is None else store(dy, wire)) for shard, x, dy in borders}
            changed = {number: store(*given) for number, given in parameters.items()}
        except SpoolFullError as full:
            for one in stored:
                self._spool.free(one)
            raise LogFullError(str(full)) from full
        bare = replace(batch, x=np.empty((0, batch.x.shape[1]), np.float32), operands=())
        self._open.passes.append(LoggedPass(batch=bare, factor=factor, borders=kept, parameters=changed))

    def add_update(self, rules: Rules) -> None:
        self._open.rules = dict(rules)
        self._steps.append(self._open)
        self._open = LoggedStep()

    def border(self, one: LoggedPass, shard: Shard) -> tuple[Matrix, Matrix | None]:
        """Return the input of a stage in a pass, and the gradient of its output if the stage has no head."""
        x, dy = one.borders[shard]
        return self._load(x), None if dy is None else self._load(dy)

    def parameter(self, one: LoggedPass, number: int) -> tuple[Matrix, WireFormat]:
        """Return a parameter as it was in a pass, and the format it was sent in."""
        return self._load(one.parameters[number]), one.parameters[number].format

    def forget(self, shard: Shard, position: int) -> None:
        """Drop a stage's log before a position whose weights are here, and steps that no stage needs any more."""
        for step in self._steps[: position - self._first]:
            for one in step.passes:
                for stored in one.borders.pop(shard, ()):
                    self._free(stored)
        while self._steps and not any(one.borders for one in self._steps[0].passes):
            self._drop(self._steps.pop(0))
            self._first += 1

    def forget_open(self) -> None:
        """Drop passes since the last update: their gradients were given up."""
        self._drop(self._open)
        self._open = LoggedStep()

    def close(self) -> None:
        """Drop everything."""
        for step in (*self._steps, self._open):
            self._drop(step)
        self._first, self._steps, self._open = self.position, [], LoggedStep()

    def _drop(self, step: LoggedStep) -> None:
        for one in step.passes:
            for stored in (*one.parameters.values(), *(each for pair in one.borders.values() for each in pair)):
                self._free(stored)

    def _free(self, stored: Stored | None) -> None:
        if stored is not None:
            self._spool.free(stored)

    def _store(self, matrix: Matrix, format: WireFormat) -> Stored:
        encoded = self._codec.encode(np.ascontiguousarray(matrix), format)
        if encoded.base is not None:  # fp32 is not copied, and its numbers will change
            encoded = encoded.copy()
        rows, cols = matrix.shape
        return self._spool.store(encoded, rows, cols, format)

    def _load(self, stored: Stored) -> Matrix:
        values = np.empty((stored.rows, stored.cols), dtype=np.float32)
        self._codec.decode_into(self._spool.load(stored).data, stored.format, values)
        return values
