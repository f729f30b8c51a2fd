"""A batch of sequences for a decoder, and the gradients that come back, as plain matrices."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float32]
Direction = Literal["forward", "backward"]
Operand_co = TypeVar("Operand_co", covariant=True)
"""A parameter's numbers, in the form known to the fleet that runs the batch."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch(Generic[Operand_co]):
    """Sequences of equal length (padded if needed), one after another in `x`."""

    x: Matrix
    """tokens x hidden"""
    sequences: int
    sequence: int
    """tokens per sequence"""
    operands: tuple[Operand_co, ...]
    """One per parameter of the decoder."""
    mask: Matrix | None = None
    """sequences x sequence: 0 where a key is padding"""
    rotary: Matrix | None = None
    """(sequence, or tokens if each sequence has its own) x 2 head_dim: cosines next to sines"""
    targets: Matrix | None = None
    """tokens x 1, with a head: index of the target word, negative where there is none"""
    scales: Matrix | None = None
    """tokens x 1, with a head: gradient of the loss per row, 0 where there is no target"""
    is_trained: bool = True
    """Whether backward will follow."""
    wants_dx: bool = True
    is_piecemeal: bool = False
    """Whether gradients are handed out one by one as they complete; those are final, whatever happens next."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gradients:
    dx: Matrix | None
    parameters: tuple[Matrix | None, ...]
    """None where a parameter is not trained."""
