"""The numbers between stages: what enters each, what comes back, and the loss.

A batch's rows lie sequence after sequence; a chunk is a run of rows of one sequence. Every stage's input and the
gradient of its output are kept until the pass is over, so that whatever a device takes with it can be made again;
beyond a budget they lie on disk. Slices of a stage are summed here in fp32, the residual included. Staged tensors of
chunks come and go; the numbers stay.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from typing import Literal

import numpy as np

from cleave.core.cost.gemm import WireFormat
from cleave.protocol.decoder import Batch
from cleave.protocol.numbers import Matrix
from cleave.server.operands import Staging, Tensor

BUDGET_BYTES = 4 << 30
Side = Literal["x", "dy"]


class Boundaries:
    """`slices` of each stage; with `has_head` the last one gives losses and takes none but the batch's scales."""

    def __init__(
        self,
        batch: Batch,
        slices: Sequence[int],
        *,
        chunk: int,
        has_head: bool,
        staging: Staging,
        format: WireFormat,
        budget_bytes: int = BUDGET_BYTES,
    ) -> None:
        self._batch, self._slices, self._chunk, self._has_head = batch, tuple(slices), chunk, has_head
        self._staging, self._left_bytes = staging, budget_bytes
        self._format: WireFormat = format
        self.chunks = -(-batch.sequence // chunk)
        tokens, hidden = batch.x.shape
        last = len(slices)
        self._x: dict[int, Matrix] = {0: batch.x}
        """Stage -> what enters it; after the last one without a head, what the stack gives."""
        self._dy: dict[int, Matrix] = {}
        """Stage -> gradient of what it gives; -1: of the batch's x."""
        for stage in range(1, last if has_head else last + 1):
            self._x[stage] = self._room(tokens, hidden)
        if has_head:
            self._seen = np.zeros((slices[-1], tokens, 2), dtype=np.float32)
            """Of each slice of the vocabulary: logsumexp, and the target's logit where it has it."""
            self.losses = np.zeros((tokens, 1), dtype=np.float32)
            self._dy[last - 1] = np.zeros((tokens, 2), dtype=np.float32)
        self._begun: set[tuple[Side, int, int, int]] = set()
        self._tensors: dict[tuple[str, int, int, int], Tensor] = {}
        self._rotary = None if batch.rotary is None else staging.table(batch.rotary)

    # -------------------------------------------------------------------------------------------- rows

    def rows(self, sequence: int, chunk: int) -> tuple[int, int]:
        """Of the batch."""
        first = sequence * self._batch.sequence
        return first + chunk * self._chunk, first + min((chunk + 1) * self._chunk, self._batch.sequence)

    @property
    def outputs(self) -> Matrix:
        return self.losses if self._has_head else self._x[len(self._slices)]

    @property
    def dx(self) -> Matrix:
        return self._dy[-1]

    def expect_gradients(self, dy: Matrix | None) -> None:
        """Backward begins, from this gradient of what the stack gives if there is no head."""
        tokens, hidden = self._batch.x.shape
        last = len(self._slices) - 1
        self._begun = {key for key in self._begun if key[0] == "x"}  # those of a backward that did not end
        self._tensors = {key: tensor for key, tensor in self._tensors.items() if key[0] != "dy"}
        if dy is not None:
            self._dy[last] = dy
        for stage in range(-1 if self._batch.wants_dx else 0, last):
            self._dy[stage] = self._room(tokens, hidden)

    # -------------------------------------------------------------------------------------------- results

    def put_forward(self, stage: int, part: int, sequence: int, chunk: int, values: Matrix) -> None:
        rows = slice(*self.rows(sequence, chunk))
        if self._has_head and stage == len(self._slices) - 1:
            self._seen[part, rows] = values
        else:
            self._add("x", stage + 1, sequence, chunk, values, residual=self._x[stage], parts=self._slices[stage])

    def put_backward(self, stage: int, sequence: int, chunk: int, values: Matrix) -> None:
        if stage - 1 not in self._dy:
            return  # nobody wants the batch's dx
        parts = self._slices[stage]
        is_head = self._has_head and stage == len(self._slices) - 1
        residual = None if is_head else self._dy[stage]
        self._add("dy", stage - 1, sequence, chunk, values, residual=residual, parts=parts)

    def close_loss(self, sequence: int, chunk: int) -> None:
        """Every slice of the vocabulary has been seen: loss = logsumexp - the target's logit."""
        rows = slice(*self.rows(sequence, chunk))
        assert self._batch.targets is not None
        assert self._batch.scales is not None
        seen = self._seen[:, rows]
        whole = np.logaddexp.reduce(seen[:, :, 0], axis=0)
        loss = np.where(self._batch.targets[rows, 0] >= 0, whole - seen[:, :, 1].sum(axis=0), 0.0)
        self.losses[rows, 0] = loss
        dy = self._dy[len(self._slices) - 1]
        dy[rows, 0], dy[rows, 1] = whole, self._batch.scales[rows, 0]

    def _add(
        self, side: Side, stage: int, sequence: int, chunk: int, values: Matrix, *, residual: Matrix | None, parts: int
    ) -> None:
        rows = slice(*self.rows(sequence, chunk))
        target = (self._x if side == "x" else self._dy)[stage][rows]
        key = (side, stage, sequence, chunk)
        if parts == 1:
            np.copyto(target, values)
        elif key in self._begun:
            np.add(target, values, out=target)
        else:
            self._begun.add(key)
            if residual is None:
                np.copyto(target, values)
            else:
                np.add(residual[rows], values, out=target)

    # -------------------------------------------------------------------------------------------- operands

    def x(self, stage: int, sequence: int, chunk: int) -> Tensor:
        return self._tensor("x", stage, sequence, chunk, self._x[stage], self._format)

    def dy(self, stage: int, sequence: int, chunk: int) -> Tensor:
        is_head = self._has_head and stage == len(self._slices) - 1
        return self._tensor("dy", stage, sequence, chunk, self._dy[stage], "fp32" if is_head else self._format)

    def targets(self, sequence: int, chunk: int) -> Tensor | None:
        targets = self._batch.targets
        return None if targets is None else self._tensor("targets", 0, sequence, chunk, targets, "fp32")

    def mask(self, sequence: int) -> Tensor | None:
        mask = self._batch.mask
        if mask is None:
            return None
        key = ("mask", 0, sequence, 0)
        if key not in self._tensors:
            found = self._staged(mask[sequence : sequence + 1], "fp32")
            assert found is not None
            self._tensors[key] = found
        return self._tensors[key]

    def rotary(self, sequence: int, chunk: int) -> tuple[Tensor, int] | None:
        """The table of positions, and where a chunk's begin."""
        if self._rotary is None:
            return None
        first = self.rows(sequence, chunk)[0]
        is_shared = self._rotary.rows == self._batch.sequence
        return self._rotary, first - sequence * self._batch.sequence if is_shared else first

    def release(self, stage: int, sequence: int) -> None:
        """Devices need nothing more of a sequence in a stage."""
        for chunk in range(self.chunks):
            for side in ("x", "dy"):
                self._tensors.pop((side, stage, sequence, chunk), None)

    def _tensor(self, side: str, stage: int, sequence: int, chunk: int, matrix: Matrix, format: WireFormat) -> Tensor:
        key = (side, stage, sequence, chunk)
        found = self._tensors.get(key)
        if found is None:
            found = self._staged(matrix[slice(*self.rows(sequence, chunk))], format)
            assert found is not None
            self._tensors[key] = found
        return found

    def _staged(self, matrix: Matrix | None, format: WireFormat) -> Tensor | None:
        if matrix is None:
            return None
        tensor = self._staging.tensor(matrix.shape[0], matrix.shape[1], format)
        tensor.bind(np.ascontiguousarray(matrix, dtype=np.float32))
        return tensor

    def _room(self, rows: int, cols: int) -> Matrix:
        size = rows * cols * 4
        if size <= self._left_bytes:
            self._left_bytes -= size
            return np.empty((rows, cols), dtype=np.float32)
        with tempfile.TemporaryFile() as file:  # the map has a handle of its own, with which the file goes
            return np.memmap(file, dtype=np.float32, mode="w+", shape=(rows, cols))
