"""A tiling as arrays: the device, output rectangle and inner range of every block."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cleave.core.cost.gemm import Frame, UnitCosts, block_memory_bytes, finish_s, transfers_bytes
from cleave.core.fleet.profiles import Floats, Ints
from cleave.core.plan.gemm.sheets import Layout

ROWS, COLS, INNER = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """One entry per block in every column; ranges are half-open, [start, end). Blocks of a round run concurrently."""

    device: Ints
    rows: Ints
    """Shape (blocks, 2), as are cols and inner."""
    cols: Ints
    inner: Ints
    round: Ints
    mates: Ints
    """Blocks with equal numbers form a column: they hold the same strip of one operand."""
    along: Ints
    """Axis that mates divide: ROWS, COLS or INNER."""

    def __len__(self) -> int:
        return len(self.device)

    @property
    def heights(self) -> Floats:
        return (self.rows[:, 1] - self.rows[:, 0]).astype(np.float64)

    @property
    def widths(self) -> Floats:
        return (self.cols[:, 1] - self.cols[:, 0]).astype(np.float64)

    @property
    def depths(self) -> Floats:
        return (self.inner[:, 1] - self.inner[:, 0]).astype(np.float64)

    def finish_s(self, unit: UnitCosts) -> Floats:
        """Finish of each block, from the start of its round."""
        return finish_s(unit.take(self.device), self.heights, self.widths, self.depths)

    def transfers_bytes(self, unit: UnitCosts) -> tuple[Floats, Floats]:
        return transfers_bytes(unit.take(self.device), self.heights, self.widths, self.depths)

    def memory_bytes(self, unit: UnitCosts) -> Floats:
        return block_memory_bytes(unit.take(self.device), self.heights, self.widths, self.depths)

    def take(self, blocks: Ints) -> Tiling:
        return Tiling(
            device=self.device[blocks],
            rows=self.rows[blocks],
            cols=self.cols[blocks],
            inner=self.inner[blocks],
            round=self.round[blocks],
            mates=self.mates[blocks],
            along=self.along[blocks],
        )

    def transposed(self) -> Tiling:
        return replace(
            self,
            rows=self.cols,
            cols=self.rows,
            along=np.where(self.along == INNER, INNER, COLS - self.along),
        )

    def by(self, devices: Ints) -> Tiling:
        """Assign the same blocks to these devices."""
        return replace(self, device=devices)

    def narrowed(self, start: Ints, end: Ints) -> Tiling:
        """Cut a part out of each block along the axis its mates divide, or along rows if that is the inner one."""
        across = self.along == COLS
        part = np.stack([start, end], axis=1)
        rows = np.where(across[:, None], self.rows, self.rows[:, :1] + part)
        cols = np.where(across[:, None], self.cols[:, :1] + part, self.cols)
        return replace(self, rows=rows, cols=cols)

    def placed_in(self, blocks: Tiling, which: Ints) -> Tiling:
        """Move blocks into those of another tiling, `which` giving the block that each lies in."""
        return replace(
            self,
            rows=self.rows + blocks.rows[which, :1],
            cols=self.cols + blocks.cols[which, :1],
            inner=self.inner + blocks.inner[which, :1],
        )

    def of_devices(self, devices: Ints) -> Tiling:
        """Renumber devices: i becomes devices[i]."""
        return replace(self, device=devices[self.device])

    def shifted(self, rows: int, cols: int, round_: int) -> Tiling:
        """Move blocks within the output and to a later round."""
        return replace(self, rows=self.rows + rows, cols=self.cols + cols, round=self.round + round_)


def from_columns(layout: Layout, frame: Frame, widths: Ints, lengths: Ints, thickness: Ints) -> Tiling:
    """Build the blocks of settled columns; entries without length are dropped."""
    column, sheet = layout.column, layout.sheet
    right = np.cumsum(widths)
    right -= (right - widths)[layout.sheet_starts][sheet]
    bottom = np.cumsum(lengths)
    bottom -= (bottom - lengths)[layout.column_starts][column]
    used = np.flatnonzero(lengths > 0)
    long = _ranges(bottom, lengths)[used]
    wide = _ranges(right, widths)[column[used]]
    thick = _ranges(np.cumsum(thickness), thickness)[sheet[column[used]]]
    match frame:
        case "inner-side-side":
            rows, cols, inner, along = long, wide, thick, ROWS
        case "side-inner-side":
            rows, cols, inner, along = long, thick, wide, ROWS
        case "side-side-inner":
            rows, cols, inner, along = wide, thick, long, INNER
    return Tiling(
        device=layout.devices[used],
        rows=rows,
        cols=cols,
        inner=inner,
        round=np.zeros(len(used), dtype=np.int64),
        mates=column[used],
        along=np.full(len(used), along),
    )


def join(tilings: list[Tiling]) -> Tiling:
    """Concatenate tilings; their columns stay separate."""
    offsets = np.cumsum([0] + [int(t.mates.max(initial=-1)) + 1 for t in tilings])
    return Tiling(
        device=np.concatenate([t.device for t in tilings]),
        rows=np.concatenate([t.rows for t in tilings]),
        cols=np.concatenate([t.cols for t in tilings]),
        inner=np.concatenate([t.inner for t in tilings]),
        round=np.concatenate([t.round for t in tilings]),
        mates=np.concatenate([t.mates + o for t, o in zip(tilings, offsets, strict=False)]),
        along=np.concatenate([t.along for t in tilings]),
    )


def _ranges(ends: Ints, lengths: Ints) -> Ints:
    return np.stack([ends - lengths, ends], axis=1)
