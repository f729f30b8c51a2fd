"""A decoder stack and a batch through it, as training describes them to the server.

Parts and head name their weights by the number of a `View`: a rectangle of a parameter, so that projections stored
side by side in one matrix (GPT-2's q, k, v) are told apart. Knows no torch and no devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from cleave.protocol.numbers import Matrix
from cleave.protocol.programs import Head, Part

Range = tuple[int, int]


class Parameter(NamedTuple):
    """A matrix of the model; vectors are 1 x n."""

    rows: int
    cols: int
    is_trained: bool


class View(NamedTuple):
    parameter: int
    rows: Range
    cols: Range

    @property
    def height(self) -> int:
        return self.rows[1] - self.rows[0]

    @property
    def width(self) -> int:
        return self.cols[1] - self.cols[0]

    @property
    def area(self) -> int:
        return self.height * self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    hidden: int
    parts: tuple[Part, ...]
    head: Head | None
    parameters: tuple[Parameter, ...]
    views: tuple[View, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Sequences of equal length, padded where they are not, one after another in `x`."""

    x: Matrix
    """tokens x hidden"""
    sequences: int
    sequence: int
    operands: tuple[Any, ...]
    """What `tensor` gave for each parameter of the stack, numbers bound."""
    mask: Matrix | None = None
    """sequences x sequence: 0 where a key is padding"""
    rotary: Matrix | None = None
    """(sequence, or tokens if each sequence has its own) x 2 head_dim: cosines beside sines"""
    targets: Matrix | None = None
    """tokens x 1, with a head: the right word's number, negative where there is none"""
    scales: Matrix | None = None
    """tokens x 1, with a head: dloss of each row, 0 where there is no target"""
    is_trained: bool = True
    """Whether `backward` will be asked for."""
    wants_dx: bool = True
    is_piecemeal: bool = False
    """Whether gradients are taken from `arrivals` one by one; what came so is final, whatever happens then."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Gradients:
    dx: Matrix | None
    parameters: tuple[Matrix | None, ...]
    """None where a parameter is not trained."""


class Pass(Protocol):
    """A batch on its way through a stack."""

    @property
    def outputs(self) -> Future[Matrix]:
        """tokens x hidden; with a head tokens x 1: the loss of each row, 0 where there is no target."""
        ...

    def backward(self, dy: Matrix | None) -> Future[Gradients]:
        """`dy` is tokens x hidden; with a head None, as `scales` were given before and it has long begun."""
        ...

    def arrivals(self) -> Iterator[tuple[int, Matrix]]:
        """Gradients of a piecemeal batch, each when all of it is there, while others are still computed; not always
        of all parameters: `backward` has every one."""
        ...

    def publish(self, parameter: int, operand: Any) -> None:
        """New numbers of a parameter, for the devices that hold it: they will need them next."""
        ...
