"""Reference parts of a model in plain torch ops and float64, for whole sequences at once.

Resident parts must agree with them. Also makes random parts on a bench, and slices of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from tests.support.device_bench import Bench
from torch import Tensor
from torch.nn import functional as F

from cleave.core.model.batch import Matrix
from cleave.core.model.decoder import Attention, Head, Mlp, Norm, Part, Weight

ACTIVATIONS: dict[str, Any] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


class Plain:
    """The operands of a bench in float64; after `backward` each has its gradient."""

    def __init__(self, bench: Bench) -> None:
        self.values = {
            number: torch.from_numpy(matrix).double().requires_grad_() for number, matrix in bench.operands.items()
        }

    def gradient(self, number: int) -> Matrix:
        value = self.values[number]
        return (torch.zeros_like(value) if value.grad is None else value.grad).float().numpy()

    def linear(self, weight: Weight, x: Tensor) -> Tensor:
        stored = self.values[weight.weight]
        y = x @ (stored if weight.is_transposed else stored.T)
        if weight.bias is not None:
            y = y + self.values[weight.bias]
        if weight.adapter is not None:
            a, b = (self.values[number] for number in weight.adapter)
            y = y + weight.scale * (x @ a.T) @ b.T
        return y

    def norm(self, norm: Norm | None, x: Tensor) -> Tensor:
        if norm is None:
            return x
        if norm.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        y = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + norm.eps) * self.values[norm.weight]
        return y if norm.bias is None else y + self.values[norm.bias]

    def part(self, part: Part, x: Tensor, mask: Matrix | None, rotary: Matrix | None) -> Tensor:
        """Output of a part, f(norm(x))."""
        normed = self.norm(part.norm, x)
        if isinstance(part, Mlp):
            up = self.linear(part.up, normed)
            act = ACTIVATIONS[part.activation]
            return self.linear(part.down, act(up) if part.gate is None else act(self.linear(part.gate, normed)) * up)
        q, k, v = (
            self.linear(weight, normed).reshape(len(x), -1, part.head_dim).transpose(0, 1)
            for weight in (part.q, part.k, part.v)
        )
        if part.is_rotary:
            assert rotary is not None
            cos, sin = torch.from_numpy(rotary).double().chunk(2, -1)
            q, k = (
                each * cos + torch.cat((-(each.chunk(2, -1)[1]), each.chunk(2, -1)[0]), -1) * sin for each in (q, k)
            )
        k, v = (each.repeat_interleave(len(q) // len(each), 0) for each in (k, v))
        rows, keys = torch.arange(len(x))[:, None], torch.arange(len(x))[None]
        seen = (keys <= rows) & (keys > rows - (part.window or len(x)))
        if mask is not None:
            seen = seen & (torch.from_numpy(mask) > 0)
        weights = torch.exp(part.scale * q @ k.transpose(1, 2)) * seen
        context = (weights / weights.sum(-1, keepdim=True).clamp(min=1e-300)) @ v
        return self.linear(part.o, context.transpose(0, 1).reshape(len(x), -1))

    def logits(self, head: Head, x: Tensor) -> Tensor:
        return self.linear(head.weight, self.norm(head.norm, x))


class Maker:
    """Random parts whose weights are on a bench; `trained` lists all their operand numbers."""

    def __init__(self, bench: Bench, hidden: int, seed: int) -> None:
        self.bench, self.hidden, self.rng = bench, hidden, np.random.default_rng(seed)
        self.trained: list[int] = []

    def normal(self, rows: int, cols: int) -> Matrix:
        return self.rng.standard_normal((rows, cols), dtype=np.float32)

    def put(self, matrix: Matrix) -> int:
        self.trained.append(self.bench.put(matrix))
        return self.trained[-1]

    def weight(self, width: int, out: int, *, bias: bool, adapter: bool, is_transposed: bool) -> Weight:
        matrix = self.normal(out, width) / np.float32(np.sqrt(width))
        return Weight(
            weight=self.put(matrix.T if is_transposed else matrix),
            is_transposed=is_transposed,
            bias=self.put(self.normal(1, out)) if bias else None,
            adapter=(self.put(self.normal(3, width) / 4), self.put(self.normal(out, 3) / 4)) if adapter else None,
            scale=1.5 if adapter else 0.0,
        )

    def norm(self, kind: Any) -> Norm:
        bias = self.put(self.normal(1, self.hidden)) if kind == "layer" else None
        return Norm(kind=kind, eps=1e-5, weight=self.put(1 + self.normal(1, self.hidden) / 4), bias=bias)

    def attention(self, heads: int, key_heads: int, head_dim: int, kind: Any, **how: Any) -> Attention:
        extra = {key: how.pop(key) for key in ("window", "is_rotary") if key in how}
        q, k, v, o = (
            self.weight(width, out, **how)
            for width, out in (
                (self.hidden, heads * head_dim),
                (self.hidden, key_heads * head_dim),
                (self.hidden, key_heads * head_dim),
                (heads * head_dim, self.hidden),
            )
        )
        norm = self.norm(kind)
        return Attention(norm=norm, q=q, k=k, v=v, o=o, head_dim=head_dim, scale=head_dim**-0.5, **extra)

    def mlp(self, inner: int, kind: Any, activation: Any, *, gated: bool, **how: Any) -> Mlp:
        return Mlp(
            norm=self.norm(kind),
            up=self.weight(self.hidden, inner, **how),
            gate=self.weight(self.hidden, inner, **how) if gated else None,
            down=self.weight(inner, self.hidden, **how),
            activation=activation,
        )

    def head(self, words: int, kind: Any, **how: Any) -> Head:
        norm = None if kind is None else self.norm(kind)
        return Head(norm=norm, weight=self.weight(self.hidden, words, **how))

    # ------------------------------------------------------------------------------------------------ slices

    def cut(self, weight: Weight, out: slice = slice(None), width: slice = slice(None)) -> Weight:
        """Slice a weight by outputs or inputs; the bias goes with the outputs, or with the first inputs."""
        stored = self.bench.operands[weight.weight]
        bias = None
        if weight.bias is not None and width.start in (None, 0):
            bias = self.put(self.bench.operands[weight.bias][:, out])
        matrix = stored[width, out] if weight.is_transposed else stored[out, width]
        adapter = None
        if weight.adapter is not None:
            a, b = (self.bench.operands[number] for number in weight.adapter)
            adapter = self.put(a[:, width]), self.put(b[out])
        return Weight(
            weight=self.put(matrix), is_transposed=weight.is_transposed, bias=bias, adapter=adapter, scale=weight.scale
        )


KINDS = st.sampled_from(["rms", "layer"])
HOW = st.fixed_dictionaries({"bias": st.booleans(), "adapter": st.booleans(), "is_transposed": st.booleans()})


def attentions(maker: Maker, head_dim: int) -> st.SearchStrategy[Attention]:
    return st.builds(
        lambda share, key_heads, kind, window, is_rotary, how: maker.attention(
            share * key_heads, key_heads, head_dim, kind, window=window, is_rotary=is_rotary, **how
        ),
        st.integers(1, 3),
        st.integers(1, 3),
        KINDS,
        st.none() | st.integers(1, 9),
        st.booleans(),
        HOW,
    )


def mlps(maker: Maker) -> st.SearchStrategy[Mlp]:
    return st.builds(
        lambda inner, kind, activation, gated, how: maker.mlp(inner, kind, activation, gated=gated, **how),
        st.integers(1, 13),
        KINDS,
        st.sampled_from(sorted(ACTIVATIONS)),
        st.booleans(),
        HOW,
    )


def rotary_table(rows: int, head_dim: int) -> Matrix:
    angles = np.arange(rows)[:, None] * 0.7 ** np.arange(head_dim // 2)[None]
    angles = np.concatenate([angles, angles], axis=1)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
