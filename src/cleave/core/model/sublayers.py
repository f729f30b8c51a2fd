"""Sublayers as the cost model sees them: only sizes, from a model's shape or a decoder's description.

Numbers are counted in elements, products in multiply-adds per row. A slice of a sublayer has the same fields, so the
cost of a shard is that of its sublayers or its slice.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from cleave.core.model.decoder import Attention, Decoder, Head, Mlp, View, Weight, weights_of
from cleave.core.model.shapes import ModelShape
from cleave.core.model.shard import Shard, most_slices

SublayerKind = Literal["attention", "mlp", "head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sublayer:
    kind: SublayerKind
    params: int
    """resident numbers: weights, biases, norm, adapters"""
    trained: int
    """the part of `params` that is sent again each step and whose gradient comes back"""
    kv_width: int
    """attention: width of K (and of V); else 0"""
    inner: int
    """widest inner activation per row: q width, ffn, vocabulary"""
    slices: int
    """maximum number of slices: kv heads, ffn, vocabulary"""
    products: int
    """multiply-adds of a row with all weights"""
    gradient_products: int
    """multiply-adds of a row for the gradients of trained weights"""
    rebuilt_products: int
    """part of `products` recomputed inside backward: all but the last map, whose output is not needed"""
    passed_products: int
    """part of `products` recomputed to get the next sublayer's input, given K and V; 0 for the head"""
    undivided: int = 0
    """part of `params` that every slice holds in full: norms, biases of summed outputs"""
    undivided_trained: int = 0
    unleased: int = 0
    """part of `trained` that the server must update itself: a head that is also the token table"""
    inside: int = 0
    """numbers per row that, if kept, spare `rebuilt_products`: queries and contexts, both sides of a gate; 0 for the
    head, whose logits are too many to keep"""
    window: int | None = None
    """attention: maximum number of keys a row sees"""

    def allows(self, slices: int) -> bool:
        """Whether it can be cut that often: heads are few, so they must divide evenly; columns and words need not."""
        return self.slices % slices == 0 if self.kind == "attention" and slices else slices <= self.slices


def sublayers_of(shape: ModelShape, *, trained: bool = True) -> tuple[Sublayer, ...]:
    """Attention and MLP of every layer, then the head; the token table stays on the server.

    With adapters, only those are trained, and every slice holds one side of each in full.
    """
    share, lora = int(trained and not shape.adapter_rank), int(trained) * shape.adapter_rank * shape.hidden
    query, key = shape.hidden * shape.q_width, shape.hidden * shape.kv_width
    norm = shape.norm_vectors * shape.hidden
    adapters, products = shape.attention_adapter_params, 2 * query + 2 * key
    attention = Sublayer(
        kind="attention",
        params=shape.attention_params + adapters,
        trained=share * shape.attention_params + int(trained) * adapters,
        kv_width=shape.kv_width,
        inner=shape.q_width,
        slices=shape.kv_heads,
        products=products + adapters,
        gradient_products=share * products + int(trained) * adapters,
        rebuilt_products=query,
        passed_products=2 * query,
        inside=2 * shape.q_width,
        undivided=norm + shape.hidden * shape.out_bias + 4 * shape.adapter_rank * shape.hidden,
        undivided_trained=share * (norm + shape.hidden * shape.out_bias) + 4 * lora,
    )
    side, maps = shape.hidden * shape.ffn, 3 if shape.gated_mlp else 2
    adapters, products = shape.mlp_adapter_params, maps * shape.hidden * shape.ffn
    mlp = Sublayer(
        kind="mlp",
        params=shape.mlp_params + adapters,
        trained=share * shape.mlp_params + int(trained) * adapters,
        kv_width=0,
        inner=shape.ffn,
        slices=shape.ffn,
        products=products + adapters,
        gradient_products=share * products + int(trained) * adapters,
        rebuilt_products=products - side,
        passed_products=products + adapters,
        inside=(maps - 1) * shape.ffn,
        undivided=norm + shape.hidden * shape.mlp_bias + maps * shape.adapter_rank * shape.hidden,
        undivided_trained=share * (norm + shape.hidden * shape.mlp_bias) + maps * lora,
    )
    head_params = shape.head_gemm_params + shape.final_norm_params
    head = Sublayer(
        kind="head",
        params=head_params,
        trained=share * head_params,
        unleased=share * shape.head_gemm_params if shape.tied_embeddings else 0,
        kv_width=0,
        inner=shape.vocab,
        slices=shape.vocab,
        products=shape.head_gemm_params,
        gradient_products=share * shape.head_gemm_params,
        rebuilt_products=shape.head_gemm_params,
        passed_products=0,
        inside=0,
        undivided=shape.final_norm_params,
        undivided_trained=share * shape.final_norm_params,
    )
    return (attention, mlp) * shape.layers + (head,)


def sublayers(
    decoder: Decoder,
    shard: Shard | None = None,
    *,
    is_trained: bool = True,
    unleased: Collection[int] = (),
) -> tuple[Sublayer, ...]:
    """The sublayers of a decoder, or of a shard of it; without `is_trained`, no gradients are computed.

    `unleased` are numbers of parameters that the server must update itself, whoever holds them.
    """
    shard = shard or Shard(first=0, count=len(decoder.sublayers))
    return tuple(
        _sublayer(decoder, Shard(first=number, count=1, index=shard.index, of=shard.of), is_trained, unleased)
        for number in range(shard.first, shard.stop)
    )


def _sublayer(decoder: Decoder, shard: Shard, is_trained: bool, unleased: Collection[int]) -> Sublayer:
    views: list[View] = []

    def name(view: View) -> int:
        views.append(view)
        return len(views) - 1

    parts, head = shard.cut(decoder, name)
    sublayer = head or parts[0]
    trained = [is_trained and decoder.parameters[view.parameter].is_trained for view in views]
    counted = _Counted(views, trained)
    weights = weights_of(sublayer)
    match sublayer:
        case Attention():
            kind, widest, summed, kept = "attention", sublayer.q, sublayer.o, 2
            rebuilt, passed = counted.products(sublayer.q), counted.products(sublayer.q) + counted.products(sublayer.o)
        case Mlp():
            kind, widest, summed, kept = "mlp", sublayer.up, sublayer.down, len(weights) - 1
            rebuilt, passed = sum(counted.products(w) for w in weights[:-1]), sum(counted.products(w) for w in weights)
        case Head():
            kind, widest, summed, kept = "head", sublayer.weight, None, 0
            rebuilt, passed = counted.products(sublayer.weight), 0
    undivided = counted.undivided(sublayer, summed)
    distinct = {view: number for number, view in enumerate(views)}.values()
    return Sublayer(
        kind=kind,
        params=sum(views[number].area for number in distinct),
        trained=sum(views[number].area for number in distinct if trained[number]),
        unleased=sum(
            views[number].area for number in distinct if trained[number] and views[number].parameter in unleased
        ),
        kv_width=sum(shard.kv_widths(decoder)),
        inner=counted.out_width(widest),
        slices=most_slices(decoder, shard.first) if shard.of == 1 else 1,
        products=sum(counted.products(weight) for weight in weights),
        gradient_products=sum(counted.gradient_products(weight) for weight in weights),
        rebuilt_products=rebuilt,
        passed_products=passed,
        inside=kept * counted.out_width(widest),
        undivided=sum(views[number].area for number in undivided),
        undivided_trained=sum(views[number].area for number in undivided if trained[number]),
        window=sublayer.window if isinstance(sublayer, Attention) else None,
    )


class _Counted:
    """Counts products of weights that refer to `views`."""

    def __init__(self, views: Sequence[View], trained: Sequence[bool]) -> None:
        self._views, self._trained = views, trained

    def out_width(self, weight: Weight) -> int:
        view = self._views[weight.weight]
        return view.width if weight.is_transposed else view.height

    def products(self, weight: Weight) -> int:
        return self._views[weight.weight].area + self._adapter(weight)

    def gradient_products(self, weight: Weight) -> int:
        whole = self._views[weight.weight].area if self._trained[weight.weight] else 0
        return whole + sum(self._trained[number] for number in weight.adapter or ()) * self._adapter(weight)

    def undivided(self, sublayer: Attention | Mlp | Head, summed: Weight | None) -> list[int]:
        """Norms, the bias of a summed output, and the side of each adapter that a cut does not divide."""
        norm = sublayer.norm
        numbers = [] if norm is None else [norm.weight, norm.bias]
        for weight in weights_of(sublayer):
            if weight is summed:
                numbers.append(weight.bias)
            if weight.adapter is not None:
                numbers.append(weight.adapter[1 if weight is summed else 0])
        return [number for number in numbers if number is not None]

    def _adapter(self, weight: Weight) -> int:
        return sum(self._views[number].area for number in weight.adapter or ())
