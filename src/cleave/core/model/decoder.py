"""The description of a decoder: its sublayers in order, its parameters, and the rectangles of them each sublayer uses.

A part is a residual sublayer, x + f(norm(x)): attention or MLP. The head is the last norm, the vocabulary and the loss.
Parts and head refer to their weights by number: of a `View` in a `Decoder`, of an operand in a task's program.
The structs are encodable as they are (`protocol/programs.py` puts them into programs); this module knows no wire, no
devices and no torch. `shard.py` cuts a decoder into pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import msgspec

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
Range = tuple[int, int]
"""Half-open: first index, and one past the last."""


class Weight(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A linear map: y = x W^T + bias + scale (x A^T) B^T."""

    weight: int
    """out x in; in x out if transposed (GPT-2)"""
    is_transposed: bool = False
    bias: int | None = None
    """1 x out"""
    adapter: tuple[int, int] | None = None
    """LoRA: A rank x in, B out x rank"""
    scale: float = 0.0


class Norm(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """RMSNorm, or LayerNorm; weight and bias are 1 x hidden."""

    kind: Literal["rms", "layer"]
    eps: float
    weight: int
    bias: int | None = None


class Attention(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="part", tag="attention"):
    """Causal attention; equal groups of q heads share a head of k and v."""

    norm: Norm
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    head_dim: int
    scale: float
    """Factor on the scores: usually 1 / sqrt(head_dim)."""
    is_rotary: bool = False
    window: int | None = None
    """Position i sees the positions after i - window."""


class Mlp(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="part", tag="mlp"):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) without a gate."""

    norm: Norm
    up: Weight
    down: Weight
    activation: Activation
    gate: Weight | None = None


class Head(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="part", tag="head"):
    """Norm, vocabulary, loss. The weight may be a slice of the vocabulary that starts at `first`."""

    weight: Weight
    norm: Norm | None = None
    first: int = 0


Part = Attention | Mlp


class Parameter(NamedTuple):
    """A matrix of the model; vectors are 1 x n."""

    rows: int
    cols: int
    is_trained: bool


class View(NamedTuple):
    """A rectangle of a parameter: tells apart projections stored side by side in one matrix (GPT-2's q, k, v)."""

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
class Decoder:
    """Sublayers are numbered: the parts in order, then the head if there is one."""

    hidden: int
    parts: tuple[Part, ...]
    head: Head | None
    parameters: tuple[Parameter, ...]
    views: tuple[View, ...]

    @property
    def sublayers(self) -> tuple[Part | Head, ...]:
        return self.parts if self.head is None else (*self.parts, self.head)

    def out_width(self, weight: Weight) -> int:
        view = self.views[weight.weight]
        return view.width if weight.is_transposed else view.height

    def in_width(self, weight: Weight) -> int:
        view = self.views[weight.weight]
        return view.height if weight.is_transposed else view.width

    def kv_heads(self, part: Attention) -> int:
        return self.out_width(part.k) // part.head_dim


def weights_of(sublayer: Part | Head) -> tuple[Weight, ...]:
    """Linear maps of a sublayer, in the order a row passes through them."""
    match sublayer:
        case Attention():
            return sublayer.q, sublayer.k, sublayer.v, sublayer.o
        case Mlp(gate=None):
            return sublayer.up, sublayer.down
        case Mlp(gate=gate):
            assert gate is not None
            return gate, sublayer.up, sublayer.down
        case Head():
            return (sublayer.weight,)
