"""The decoder of a model that is known by its shape alone, so that the engine can run it without its weights."""

from __future__ import annotations

from cleave.core.model.decoder import Activation, Attention, Decoder, Head, Mlp, Norm, Parameter, View, Weight
from cleave.core.model.shapes import Family, ModelShape

_ACTIVATIONS: dict[Family, Activation] = {
    "llama": "silu",
    "mistral": "silu",
    "qwen2": "silu",
    "opt": "relu",
    "gpt2": "gelu_tanh",
    "gpt_neox": "gelu",
}


def can_describe(shape: ModelShape) -> bool:
    """Whether the model has nothing that a decoder cannot: no projections around the stack, norms with weights."""
    return shape.embed_dim == shape.hidden and shape.norm_vectors > 0 and shape.final_norm


def decoder_of(shape: ModelShape, *, has_head: bool = True) -> Decoder:
    """Describe all sublayers; every weight is a parameter of its own, of which only sizes matter here."""
    parameters: list[Parameter] = []

    def parameter(rows: int, cols: int, *, is_trained: bool = not shape.adapter_rank) -> int:
        parameters.append(Parameter(rows, cols, is_trained))
        return len(parameters) - 1

    def norm() -> Norm:
        weight = parameter(1, shape.hidden)
        if shape.norm_vectors == 1:
            return Norm(kind="rms", eps=1e-6, weight=weight)
        return Norm(kind="layer", eps=1e-5, weight=weight, bias=parameter(1, shape.hidden))

    def linear(rows: int, cols: int, *, has_bias: bool) -> Weight:
        rank = shape.adapter_rank
        return Weight(
            weight=parameter(rows, cols),
            bias=parameter(1, rows) if has_bias else None,
            adapter=(parameter(rank, cols, is_trained=True), parameter(rows, rank, is_trained=True)) if rank else None,
            scale=1.0 if rank else 0.0,
        )

    parts: list[Attention | Mlp] = []
    for _ in range(shape.layers):
        attention = Attention(
            norm=norm(),
            q=linear(shape.q_width, shape.hidden, has_bias=shape.qkv_bias),
            k=linear(shape.kv_width, shape.hidden, has_bias=shape.qkv_bias),
            v=linear(shape.kv_width, shape.hidden, has_bias=shape.qkv_bias),
            o=linear(shape.hidden, shape.q_width, has_bias=shape.out_bias),
            head_dim=shape.head_dim,
            scale=shape.head_dim**-0.5,
        )
        mlp = Mlp(
            norm=norm(),
            gate=linear(shape.ffn, shape.hidden, has_bias=shape.mlp_bias) if shape.gated_mlp else None,
            up=linear(shape.ffn, shape.hidden, has_bias=shape.mlp_bias),
            down=linear(shape.hidden, shape.ffn, has_bias=shape.mlp_bias),
            activation=_ACTIVATIONS[shape.family],
        )
        parts += [attention, mlp]
    head = Head(weight=Weight(weight=parameter(shape.vocab, shape.hidden)), norm=norm()) if has_head else None
    return Decoder(
        hidden=shape.hidden,
        parts=tuple(parts),
        head=head,
        parameters=tuple(parameters),
        views=tuple(View(number, (0, one.rows), (0, one.cols)) for number, one in enumerate(parameters)),
    )
