"""The numbers between stages: each stage's input, the gradient of its output, and the loss.

A batch's rows lie sequence after sequence; a chunk is a run of rows of one sequence. Every stage's input and the
gradient of its output are kept until the pass ends, so that a departed device's work can be recomputed; beyond a budget
they are on disk. Slices of a stage are summed here in fp32, including the residual. Results are put from several
threads; the tensors of chunks are staged in the engine's. Knows no devices.
"""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Sequence
from typing import Literal

import numpy as np

from cleave.core.cost.streams import stream_format
from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Batch
from cleave.protocol.numbers import Matrix
from cleave.server.operands import Operands, Tensor

BUDGET_BYTES = 4 << 30
Side = Literal["x", "dy"]
Batched = Batch[Tensor]


class Activations:
    """The matrices of one pass, with `slices` per stage. With `has_head` the last stage returns losses, and its
    gradients start from the batch's scales.
    """

    def __init__(
        self,
        batch: Batched,
        slices: Sequence[int],
        *,
        chunk: int,
        has_head: bool,
        operands: Operands,
        format: WireFormat,
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        self._batch, self._slices, self._chunk, self._has_head = batch, tuple(slices), chunk, has_head
        self._operands, self._left_bytes = operands, budget_bytes
        self._format: WireFormat = format
        self.chunks = -(-batch.sequence // chunk)
        self._last = len(slices) - 1
        self._lock = threading.Lock()
        self._x: dict[int, Matrix] = {0: batch.x}
        """Stage -> its input; after the last stage without a head, the decoder's output."""
        self._dy: dict[int, Matrix] = {}
        """Stage -> gradient of its output; -1 -> gradient of the batch's x."""
        if has_head:
            tokens = len(batch.x)
            self._logsumexps = np.zeros((slices[-1], tokens, 2), dtype=np.float32)
            """Per slice of the vocabulary: logsumexp, and the target's logit if the slice has it."""
            self.losses = np.zeros((tokens, 1), dtype=np.float32)
            self._dy[self._last] = np.zeros((tokens, 2), dtype=np.float32)
        self._sums: dict[tuple[Side, int, int, int], int] = {}
        """Slices added so far."""
        self._tensors: dict[tuple[str, int, int, int], Tensor] = {}
        self._rotary = None if batch.rotary is None else operands.table(batch.rotary)

    # -------------------------------------------------------------------------------------------- rows

    def rows(self, sequence: int, chunk: int) -> tuple[int, int]:
        """Range of a chunk's rows in the batch."""
        first = sequence * self._batch.sequence
        return first + chunk * self._chunk, first + min((chunk + 1) * self._chunk, self._batch.sequence)

    @property
    def outputs(self) -> Matrix:
        return self.losses if self._has_head else self._target("x", self._last + 1)

    @property
    def dx(self) -> Matrix:
        return self._target("dy", -1)

    def boundary(self, stage: int) -> tuple[Matrix, Matrix | None]:
        """Return a stage's input and the gradient of its output; None for a stage with the head."""
        return self._x[stage], None if self._has_head and stage == self._last else self._dy[stage]

    def expect_gradients(self, dy: Matrix | None) -> None:
        """Begin a backward pass, from this gradient of the output if there is no head."""
        self._sums = {key: count for key, count in self._sums.items() if key[0] == "x"}  # drops an aborted backward's
        self._tensors = {key: tensor for key, tensor in self._tensors.items() if key[0] != "dy"}
        if dy is not None:
            self._dy[self._last] = dy

    # -------------------------------------------------------------------------------------------- results, any thread

    def put_forward(self, stage: int, slice_: int, sequence: int, chunk: int, values: Matrix) -> None:
        if not (self._has_head and stage == self._last):
            self._add("x", stage + 1, sequence, chunk, values, residual=self._x[stage], parts=self._slices[stage])
            return
        rows = slice(*self.rows(sequence, chunk))
        self._logsumexps[slice_, rows] = values
        with self._lock:
            key = ("x", stage + 1, sequence, chunk)
            self._sums[key] = self._sums.get(key, 0) + 1
            is_complete = self._sums[key] == self._slices[stage]
        if is_complete:
            self._close_loss(rows)

    def put_backward(self, stage: int, sequence: int, chunk: int, values: Matrix) -> None:
        if stage == 0 and not self._batch.wants_dx:
            return
        is_head = self._has_head and stage == self._last
        residual = None if is_head else self._dy[stage]
        self._add("dy", stage - 1, sequence, chunk, values, residual=residual, parts=self._slices[stage])

    def _close_loss(self, rows: slice) -> None:
        """Compute loss = logsumexp - target logit, once every slice of the vocabulary has arrived."""
        assert self._batch.targets is not None
        assert self._batch.scales is not None
        parts = self._logsumexps[:, rows]
        whole = np.logaddexp.reduce(parts[:, :, 0], axis=0)
        self.losses[rows, 0] = np.where(self._batch.targets[rows, 0] >= 0, whole - parts[:, :, 1].sum(axis=0), 0.0)
        dy = self._dy[self._last]
        dy[rows, 0], dy[rows, 1] = whole, self._batch.scales[rows, 0]

    def _add(
        self, side: Side, stage: int, sequence: int, chunk: int, values: Matrix, *, residual: Matrix | None, parts: int
    ) -> None:
        rows = slice(*self.rows(sequence, chunk))
        target = self._target(side, stage)[rows]
        if parts == 1:
            np.copyto(target, values)
            return
        key = (side, stage, sequence, chunk)
        with self._lock:  # slices of a chunk may arrive concurrently
            if self._sums.get(key):
                np.add(target, values, out=target)
            elif residual is None:
                np.copyto(target, values)
            else:
                np.add(residual[rows], values, out=target)
            self._sums[key] = self._sums.get(key, 0) + 1

    def _target(self, side: Side, stage: int) -> Matrix:
        """Return the matrix for a stage's rows, allocated on first use."""
        matrices = self._x if side == "x" else self._dy
        with self._lock:
            if stage not in matrices:
                matrices[stage] = self._room(*self._batch.x.shape)
            return matrices[stage]

    # -------------------------------------------------------------------------------------------- operands

    def x(self, stage: int, sequence: int, chunk: int) -> Tensor:
        return self._tensor("x", stage, sequence, chunk, self._x.get(stage), stream_format("activation", self._format))

    def dy(self, stage: int, sequence: int, chunk: int) -> Tensor:
        is_head = self._has_head and stage == self._last
        format = stream_format("table" if is_head else "activation gradient", self._format)
        return self._tensor("dy", stage, sequence, chunk, self._dy.get(stage), format)

    def targets(self, sequence: int, chunk: int) -> Tensor | None:
        targets = self._batch.targets
        return None if targets is None else self._tensor("targets", 0, sequence, chunk, targets, "fp32")

    def mask(self, sequence: int) -> Tensor | None:
        mask = self._batch.mask
        if mask is None:
            return None
        key = ("mask", 0, sequence, 0)
        if key not in self._tensors:
            self._tensors[key] = self._staged(mask[sequence : sequence + 1], "fp32")
        return self._tensors[key]

    def rotary(self, sequence: int, chunk: int) -> tuple[Tensor, int] | None:
        """Return the table of positions, and the row at which the chunk's positions start."""
        if self._rotary is None:
            return None
        first = self.rows(sequence, chunk)[0]
        is_shared = self._rotary.rows == self._batch.sequence
        return self._rotary, first - sequence * self._batch.sequence if is_shared else first

    def release(self, stage: int, sequence: int) -> None:
        """Drop the staged tensors of a sequence that has passed a stage."""
        for chunk in range(self.chunks):
            for side in ("x", "dy"):
                self._tensors.pop((side, stage, sequence, chunk), None)

    def _tensor(
        self, side: str, stage: int, sequence: int, chunk: int, matrix: Matrix | None, format: WireFormat
    ) -> Tensor:
        """Return a chunk's tensor; in a pass without numbers it is only an identity."""
        key = (side, stage, sequence, chunk)
        found = self._tensors.get(key)
        if found is None:
            first, last = self.rows(sequence, chunk)
            if matrix is not None:
                found = self._staged(matrix[first:last], format)
            else:
                found = self._operands.tensor(last - first, self._batch.x.shape[1], format)
            self._tensors[key] = found
        return found

    def _staged(self, matrix: Matrix, format: WireFormat) -> Tensor:
        tensor = self._operands.tensor(matrix.shape[0], matrix.shape[1], format)
        tensor.bind(np.ascontiguousarray(matrix, dtype=np.float32))
        return tensor

    def _room(self, rows: int, cols: int) -> Matrix:
        size = rows * cols * 4
        if size <= self._left_bytes:
            self._left_bytes -= size
            return np.empty((rows, cols), dtype=np.float32)
        with tempfile.TemporaryFile() as file:  # the map has its own handle, and the file goes with it
            return np.memmap(file, dtype=np.float32, mode="w+", shape=(rows, cols))
