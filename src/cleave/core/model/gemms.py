"""The work of a training step: its gemms, its attention products, and the segments they form.

A linear layer Y = X W^T gives three gemms a step, one per role, each of 2 x tokens x weights operations.
Projections that read the same X (q, k, v; gate and up) are grouped into one wider gemm, so X travels once.
Layers are equal, so an entry stands for `count` equal ones. The module knows no devices, bytes or seconds
(`core/cost`) and not the order within a step; `core/plan` cuts what is listed here into units.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from cleave.core.model.decoder import Attention, Decoder, Head, Mlp
from cleave.core.model.shapes import ModelShape
from cleave.core.model.sublayers import SublayerKind
from cleave.errors import InputError

Role = Literal["forward", "grad_input", "grad_weight"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemm:
    """One matrix product C[m,n] = A[m,k] B[k,n]."""

    m: int
    n: int
    k: int

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """One linear layer, or several that read the same X side by side: Y = X W^T."""

    tokens: int
    in_width: int
    out_width: int
    roles: tuple[Role, ...] = ("forward", "grad_input", "grad_weight")
    """The roles to compute, in order."""
    is_head: bool = False
    """Whether Y are logits: their gradients may travel in a format of their own."""

    @property
    def gemms(self) -> dict[Role, Gemm]:
        m, n, k = self.tokens, self.out_width, self.in_width
        gemms: dict[Role, Gemm] = {
            "forward": Gemm(m=m, n=n, k=k),  # Y = X W^T
            "grad_input": Gemm(m=m, n=k, k=n),  # dX = dY W
            "grad_weight": Gemm(m=n, n=k, k=m),  # dW = dY^T X
        }
        return {role: gemms[role] for role in self.roles}

    @property
    def flops(self) -> int:
        return sum(gemm.flops for gemm in self.gemms.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class StepGemm:
    """A gemm with weights, and how often it occurs in a step."""

    segment: str
    """The linear layer: qkv, out, gate_up or up, down, head; q, k, v and gate separately if not grouped."""
    role: Role
    gemm: Gemm
    count: int
    members: tuple[str, ...]
    """Projections side by side in the wide operand, in order."""

    @property
    def flops(self) -> int:
        return self.count * self.gemm.flops


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionProduct:
    """A product of two activations, for one head of one sequence, and how often it occurs in a step."""

    name: str
    role: Literal["forward", "grad_input"]
    gemm: Gemm
    count: int

    @property
    def flops(self) -> int:
        return self.count * self.gemm.flops


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """`count` equal parts of the model, with the work of all of them."""

    kind: SublayerKind
    count: int
    params: int
    """Parameters per part: weights, biases, norm. A tied token table counts as the head's."""
    gemms: tuple[StepGemm, ...]
    products: tuple[AttentionProduct, ...]

    @property
    def flops(self) -> int:
        return sum(gemm.flops for gemm in self.gemms) + sum(product.flops for product in self.products)


def step_gemms(shape: ModelShape, tokens: int, grouped: bool = True) -> tuple[StepGemm, ...]:
    """Every gemm with weights in a step over `tokens` tokens, one entry per linear layer and role.

    The first layer's grad_input counts too: the token table is trained. With adapters no weight has a gradient, and the
    small products of the adapters are left out.
    """
    return (
        *_attention_gemms(shape, tokens, grouped),
        *_mlp_gemms(shape, tokens, grouped),
        *_head_gemms(shape, tokens),
    )


def attention_products(shape: ModelShape, tokens: int, sequence: int) -> tuple[AttentionProduct, ...]:
    """The six products of attention in a step of `tokens` tokens in sequences of `sequence`.

    With scores = Q K^T, probabilities P = softmax(scores) and context = P V, per head and sequence.
    Counted without a mask: a causal one could save up to half.
    """
    if sequence < 1 or tokens < 1 or tokens % sequence != 0:
        raise InputError(
            "expected tokens to be a positive multiple of the sequence length, "
            f"got {tokens} tokens in sequences of {sequence}; make the batch a whole number of sequences"
        )
    square = Gemm(m=sequence, n=sequence, k=shape.head_dim)
    tall = Gemm(m=sequence, n=shape.head_dim, k=sequence)
    count = shape.layers * shape.heads * (tokens // sequence)
    return (
        AttentionProduct(name="scores", role="forward", gemm=square, count=count),
        AttentionProduct(name="context", role="forward", gemm=tall, count=count),
        AttentionProduct(name="grad_probabilities", role="grad_input", gemm=square, count=count),  # dC V^T
        AttentionProduct(name="grad_value", role="grad_input", gemm=tall, count=count),  # P^T dC
        AttentionProduct(name="grad_query", role="grad_input", gemm=tall, count=count),  # dS K
        AttentionProduct(name="grad_key", role="grad_input", gemm=tall, count=count),  # dS^T Q
    )


def decoder_linears(decoder: Decoder, tokens: int, *, is_trained: bool = True) -> Iterator[Linear]:
    """The linear layers of a decoder in order, head last; layers that read the same rows are merged into one."""
    for sublayer in decoder.sublayers:
        match sublayer:
            case Attention(q=q, k=k, v=v, o=o):
                groups = ((q, k, v), (o,))
            case Mlp(gate=gate, up=up, down=down):
                groups = ((up,) if gate is None else (gate, up), (down,))
            case Head(weight=weight):
                groups = ((weight,),)
        for group in groups:
            trained = any(decoder.parameters[decoder.views[one.weight].parameter].is_trained for one in group)
            roles: tuple[Role, ...] = ("forward", "grad_input", "grad_weight") if trained else ("forward", "grad_input")
            yield Linear(
                tokens=tokens,
                in_width=decoder.in_width(group[0]),
                out_width=sum(decoder.out_width(weight) for weight in group),
                roles=roles if is_trained else ("forward",),
                is_head=isinstance(sublayer, Head),
            )


def decoder_attention_flops(decoder: Decoder, sequences: int, sequence: int, *, is_trained: bool = True) -> int:
    """FLOPs of the six products of attention, or of forward's two. Counted without a mask."""
    width = sum(decoder.out_width(part.q) for part in decoder.parts if isinstance(part, Attention))
    return (6 if is_trained else 2) * sequences * Gemm(m=sequence, n=sequence, k=width).flops


def step_segments(shape: ModelShape, tokens: int, sequence: int, grouped: bool = True) -> tuple[Segment, ...]:
    """The step as attention, MLP and head: together exactly `step_gemms` and `attention_products`.

    OPT-350M's projection after the token table is listed with the head, which has its counterpart.
    """
    return (
        Segment(
            kind="attention",
            count=shape.layers,
            params=shape.attention_params,
            gemms=_attention_gemms(shape, tokens, grouped),
            products=attention_products(shape, tokens, sequence),
        ),
        Segment(
            kind="mlp",
            count=shape.layers,
            params=shape.mlp_params,
            gemms=_mlp_gemms(shape, tokens, grouped),
            products=(),
        ),
        Segment(
            kind="head",
            count=1,
            params=shape.head_gemm_params + shape.final_norm_params,
            gemms=_head_gemms(shape, tokens),
            products=(),
        ),
    )


def step_flops(shape: ModelShape, tokens: int, sequence: int) -> int:
    """Operations of a step in gemms and attention products; norms, activations and loss are not counted."""
    return sum(segment.flops for segment in step_segments(shape, tokens, sequence))


def _attention_gemms(shape: ModelShape, tokens: int, grouped: bool) -> tuple[StepGemm, ...]:
    readers = {"q": shape.q_width, "k": shape.kv_width, "v": shape.kv_width}
    return _with_gradients(
        shape,
        *_sharing_input("qkv", readers, shape.hidden, tokens, shape.layers, grouped),
        *_linear("out", ("out",), shape.hidden, shape.q_width, tokens, shape.layers),
    )


def _mlp_gemms(shape: ModelShape, tokens: int, grouped: bool) -> tuple[StepGemm, ...]:
    readers = {"gate": shape.ffn, "up": shape.ffn} if shape.gated_mlp else {"up": shape.ffn}
    return _with_gradients(
        shape,
        *_sharing_input("_".join(readers), readers, shape.hidden, tokens, shape.layers, grouped),
        *_linear("down", ("down",), shape.hidden, shape.ffn, tokens, shape.layers),
    )


def _head_gemms(shape: ModelShape, tokens: int) -> tuple[StepGemm, ...]:
    head = _linear("head", ("head",), shape.vocab, shape.embed_dim, tokens, 1)
    if shape.embed_dim == shape.hidden:
        return _with_gradients(shape, *head)
    return _with_gradients(
        shape,
        *_linear("project_in", ("project_in",), shape.hidden, shape.embed_dim, tokens, 1),
        *_linear("project_out", ("project_out",), shape.embed_dim, shape.hidden, tokens, 1),
        *head,
    )


def _with_gradients(shape: ModelShape, *gemms: StepGemm) -> tuple[StepGemm, ...]:
    """Leave out gradients of frozen weights."""
    return tuple(gemm for gemm in gemms if not (shape.adapter_rank and gemm.role == "grad_weight"))


def _sharing_input(
    segment: str, out_widths: dict[str, int], in_width: int, tokens: int, count: int, grouped: bool
) -> tuple[StepGemm, ...]:
    if grouped:
        return _linear(segment, tuple(out_widths), sum(out_widths.values()), in_width, tokens, count)
    return tuple(
        gemm
        for name, out_width in out_widths.items()
        for gemm in _linear(name, (name,), out_width, in_width, tokens, count)
    )


def _linear(
    segment: str, members: tuple[str, ...], out_width: int, in_width: int, tokens: int, count: int
) -> tuple[StepGemm, ...]:
    if tokens < 1:
        raise InputError(f"expected a positive number of tokens, got {tokens}; give the tokens of a batch")
    linear = Linear(tokens=tokens, in_width=in_width, out_width=out_width)
    return tuple(
        StepGemm(segment=segment, role=role, gemm=gemm, count=count, members=members)
        for role, gemm in linear.gemms.items()
    )
