"""Hand-made small decoders: a stack, numbers for its parameters, and a batch, without torch.

Parts have the features that make slicing hard: grouped heads, biases of every kind, matrices fused into one parameter
or transposed, adapters, norms with and without a bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from cleave.core.model.batch import Batch, Matrix
from cleave.core.model.decoder import Attention, Decoder, Head, Mlp, Norm, Parameter, Part, View, Weight


@dataclass
class Builder:
    """Adds parameters and views as parts need them."""

    hidden: int
    rng: np.random.Generator
    is_frozen: bool = False
    """Whether all parameters except adapters are frozen."""
    weights: list[Matrix] = field(default_factory=lambda: list[Matrix]())
    parameters: list[Parameter] = field(default_factory=lambda: list[Parameter]())
    views: list[View] = field(default_factory=lambda: list[View]())

    def parameter(self, rows: int, cols: int, *, is_trained: bool | None = None, around: float = 0.0) -> int:
        """Add a parameter and return the number of a view of all of it."""
        trained = not self.is_frozen if is_trained is None else is_trained
        self.parameters.append(Parameter(rows, cols, trained))
        self.weights.append((around + self.rng.normal(0, cols**-0.5, (rows, cols))).astype(np.float32))
        return self.view(len(self.parameters) - 1, (0, rows), (0, cols))

    def view(self, parameter: int, rows: tuple[int, int], cols: tuple[int, int]) -> int:
        self.views.append(View(parameter, rows, cols))
        return len(self.views) - 1

    def norm(self, kind: str = "rms", *, bias: bool = False) -> Norm:
        return Norm(
            kind="layer" if kind == "layer" else "rms",
            eps=1e-5,
            weight=self.parameter(1, self.hidden, around=1.0),
            bias=self.parameter(1, self.hidden) if bias else None,
        )

    def linear(self, out: int, into: int, *, bias: bool = False, is_transposed: bool = False, rank: int = 0) -> Weight:
        shape = (into, out) if is_transposed else (out, into)
        return Weight(
            weight=self.parameter(*shape),
            is_transposed=is_transposed,
            bias=self.parameter(1, out) if bias else None,
            adapter=(self.parameter(rank, into, is_trained=True), self.parameter(out, rank, is_trained=True))
            if rank
            else None,
            scale=0.5 if rank else 0.0,
        )

    def side_by_side(self, widths: Sequence[int], into: int) -> list[Weight]:
        """Weights fused into one matrix and one bias, like GPT-2's q, k and v."""
        whole = sum(widths)
        matrix = self.views[self.parameter(into, whole)].parameter
        bias = self.views[self.parameter(1, whole)].parameter
        found: list[Weight] = []
        for index, width in enumerate(widths):
            cols = (sum(widths[:index]), sum(widths[:index]) + width)
            found.append(
                Weight(
                    weight=self.view(matrix, (0, into), cols), is_transposed=True, bias=self.view(bias, (0, 1), cols)
                )
            )
        return found

    def attention(self, kv_heads: int, group: int, head_dim: int, *, beside: bool = False, **how: Any) -> Attention:
        width, narrow = kv_heads * group * head_dim, kv_heads * head_dim
        norm = self.norm(how.pop("norm", "rms"), bias=how.get("bias", False))
        window = how.pop("window", None)
        if beside:
            q, k, v = self.side_by_side([width, narrow, narrow], self.hidden)
        else:
            q, k, v = (self.linear(out, self.hidden, **how) for out in (width, narrow, narrow))
        return Attention(
            norm=norm,
            q=q,
            k=k,
            v=v,
            o=self.linear(self.hidden, width, **how),
            head_dim=head_dim,
            scale=head_dim**-0.5,
            window=window,
        )

    def mlp(self, inner: int, *, gated: bool = True, **how: Any) -> Mlp:
        return Mlp(
            norm=self.norm(how.pop("norm", "rms"), bias=how.get("bias", False)),
            gate=self.linear(inner, self.hidden, **how) if gated else None,
            up=self.linear(inner, self.hidden, **how),
            down=self.linear(self.hidden, inner, **how),
            activation="silu",
        )

    def head(self, words: int, *, bias: bool = False) -> Head:
        return Head(norm=self.norm(), weight=self.linear(words, self.hidden, bias=bias))

    def decoder(self, parts: Sequence[Part], head: Head | None) -> Decoder:
        return Decoder(
            hidden=self.hidden,
            parts=tuple(parts),
            head=head,
            parameters=tuple(self.parameters),
            views=tuple(self.views),
        )


@dataclass(frozen=True)
class SmallDecoder:
    decoder: Decoder
    weights: tuple[Matrix, ...]
    words: int

    def batch(self, cluster: Any, *, seed: int = 0, sequences: int = 4, sequence: int = 6, **options: Any) -> Batch:
        """A random batch in which some rows have no target; `cluster` supplies the tensors."""
        rng, tokens = np.random.default_rng(seed), sequences * sequence
        operands = [cluster.tensor(*matrix.shape, "fp32") for matrix in self.weights]
        for operand, matrix in zip(operands, self.weights, strict=True):
            operand.bind(matrix)
        targets = rng.integers(-1, self.words, (tokens, 1)).astype(np.float32)
        losses = {"targets": targets, "scales": np.where(targets < 0, 0, 1 / tokens).astype(np.float32)}
        return Batch(
            x=rng.normal(0, 1, (tokens, self.decoder.hidden)).astype(np.float32),
            sequences=sequences,
            sequence=sequence,
            operands=tuple(operands),
            **(losses if self.decoder.head is not None else {}),
            **options,
        )


def decoder(
    *,
    hidden: int = 8,
    head_dim: int = 4,
    inner: int = 12,
    layers: int = 2,
    words: int = 11,
    has_head: bool = True,
    rank: int = 0,
) -> SmallDecoder:
    """A decoder with grouped heads and biases; with `rank`, only adapters are trained."""
    builder = Builder(hidden, np.random.default_rng(7), is_frozen=rank > 0)
    parts: list[Part] = []
    for _ in range(layers):
        parts += [builder.attention(2, 2, head_dim, bias=True, rank=rank), builder.mlp(inner, rank=rank)]
    head = builder.head(words) if has_head else None
    return SmallDecoder(builder.decoder(parts, head), tuple(builder.weights), words)


@st.composite
def decoders(draw: st.DrawFn) -> Decoder:
    """Decoders with one part of each kind, in every variant a model may have."""
    builder = Builder(draw(st.integers(1, 3)) * 2, np.random.default_rng(0), is_frozen=draw(st.booleans()))
    how = {
        "bias": draw(st.booleans()),
        "is_transposed": draw(st.booleans()),
        "rank": draw(st.integers(0, 2)),
        "norm": draw(st.sampled_from(["rms", "layer"])),
    }
    attention = builder.attention(
        draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 2)) * 2, beside=draw(st.booleans()), **how
    )
    mlp = builder.mlp(draw(st.integers(1, 9)), gated=draw(st.booleans()), **how)
    return builder.decoder([attention, mlp], builder.head(draw(st.integers(1, 9)), bias=draw(st.booleans())))
