# pyright: standard
"""What crossed the borders of leased stages since this process last had their weights: enough to do it all again.

Per pass and leased stage, the input and the gradient of the output, as they were on the wire; between passes, the
updates. From old weights and this log, the present ones follow exactly. The log is in memory up to a budget, then in a
temporary file up to another; when both are used up, LogFullError tells the caller to fetch the weights instead.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np

from cleave.core.cost.lease import LIVE_LOG_BYTES
from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Batch, Matrix
from cleave.core.model.shard import Shard
from cleave.core.model.update_rule import Rule
from cleave.protocol.numbers import Codec, Encoded

MEMORY_BYTES = 256 << 20


class LogFullError(Exception):
    """There is no room for another pass; the reason in words."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """An encoded matrix, in memory or at a place in the file."""

    rows: int
    cols: int
    format: WireFormat
    encoded: Encoded | None
    place: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedPass:
    batch: Batch[Any]
    """Without numbers of its own but targets, scales, mask and positions."""
    factor: float
    """What its gradients were multiplied by."""
    borders: Mapping[Shard, tuple[_Stored, _Stored | None]]
    parameters: Mapping[int, _Stored]
    """Those that changed without an update in this log."""


@dataclass(frozen=True, slots=True)
class LoggedUpdate:
    rules: Mapping[int, tuple[Rule, float]]
    """Parameter -> rule, and what gradients were multiplied by besides the factors of their passes."""


class BoundaryLog:
    def __init__(
        self, codec: Codec, format: WireFormat, *, memory_bytes: int = MEMORY_BYTES, disk_bytes: float = LIVE_LOG_BYTES
    ) -> None:
        self._codec, self._memory_bytes, self._disk_bytes = codec, memory_bytes, disk_bytes
        self._format: WireFormat = format
        self.records: list[LoggedPass | LoggedUpdate] = []
        self._file: IO[bytes] | None = None
        self._in_memory = self._on_disk = 0

    @property
    def bytes(self) -> int:
        return self._in_memory + self._on_disk

    @property
    def open_passes(self) -> list[LoggedPass]:
        """Passes since the last update."""
        last = max((i for i, one in enumerate(self.records) if isinstance(one, LoggedUpdate)), default=-1)
        return [one for one in self.records[last + 1 :] if isinstance(one, LoggedPass)]

    @property
    def finished(self) -> list[LoggedPass | LoggedUpdate]:
        """Everything up to the last update."""
        return self.records[: len(self.records) - len(self.open_passes)]

    def add_pass(
        self,
        batch: Batch[Any],
        factor: float,
        borders: Iterable[tuple[Shard, Matrix, Matrix | None]],
        parameters: Mapping[int, tuple[Matrix, WireFormat]],
    ) -> None:
        """Keep a pass; LogFullError if there is no room for it."""
        wire = self._format
        kept = {
            shard: (self._store(x, wire), None if dy is None else self._store(dy, wire)) for shard, x, dy in borders
        }
        changed = {number: self._store(*given) for number, given in parameters.items()}
        bare = replace(batch, x=np.empty((0, batch.x.shape[1]), np.float32), operands=())
        self.records.append(LoggedPass(batch=bare, factor=factor, borders=kept, parameters=changed))

    def add_update(self, rules: Mapping[int, tuple[Rule, float]]) -> None:
        self.records.append(LoggedUpdate(dict(rules)))

    def border(self, one: LoggedPass, shard: Shard) -> tuple[Matrix, Matrix | None]:
        """Return the input of a stage in a pass, and the gradient of its output if the stage has no head."""
        x, dy = one.borders[shard]
        return self._load(x), None if dy is None else self._load(dy)

    def parameter(self, one: LoggedPass, number: int) -> tuple[Matrix, WireFormat]:
        """Return a parameter as it was in a pass, and the format it was sent in."""
        return self._load(one.parameters[number]), one.parameters[number].format

    def forget_finished(self) -> None:
        """Drop everything up to the last update: the weights that followed from it are here."""
        waiting = self.open_passes
        self.records = list(waiting)
        if not waiting:
            self._in_memory = self._on_disk = 0
            if self._file is not None:
                self._file.close()
                self._file = None

    def close(self) -> None:
        self.records = []
        self.forget_finished()

    def _store(self, matrix: Matrix, format: WireFormat) -> _Stored:
        encoded = self._codec.encode(np.ascontiguousarray(matrix), format)
        if encoded.base is not None:  # fp32 is not copied, and its numbers will change
            encoded = encoded.copy()
        rows, cols = matrix.shape
        if self._in_memory + len(encoded) <= self._memory_bytes:
            self._in_memory += len(encoded)
            return _Stored(rows, cols, format, encoded)
        if self._on_disk + len(encoded) > self._disk_bytes:
            raise LogFullError(f"it has reached its limit of {self._disk_bytes / 1e9:.3g} GB")
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile()  # noqa: SIM115
            first = self._file.seek(0, 2)
            self._file.write(encoded.data)
            self._file.flush()
        except OSError as fault:
            raise LogFullError(f"{fault.strerror or fault}") from fault
        self._on_disk += len(encoded)
        return _Stored(rows, cols, format, None, (first, len(encoded)))

    def _load(self, stored: _Stored) -> Matrix:
        encoded = stored.encoded
        if encoded is None:
            assert self._file is not None, "else it is in memory"
            self._file.seek(stored.place[0])
            encoded = np.frombuffer(self._file.read(stored.place[1]), dtype=np.uint8)
        values = np.empty((stored.rows, stored.cols), dtype=np.float32)
        self._codec.decode_into(encoded.data, stored.format, values)
        return values
