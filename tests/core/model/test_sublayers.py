"""Laws of sublayers: they have the sizes of the decoder they describe, and slices of one add up to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.stacks import Builder, decoders

from cleave.core.model.decoder import Decoder, weights_of
from cleave.core.model.gemms import (
    attention_products,
    decoder_attention_flops,
    decoder_linears,
    step_flops,
)
from cleave.core.model.shapes import named
from cleave.core.model.shard import Shard, most_slices
from cleave.core.model.sublayers import sublayers, sublayers_of

steady = settings(max_examples=60, deadline=None, derandomize=True)


@steady
@given(decoders())
def test_sublayers_have_the_sizes_of_their_weights(model: Decoder) -> None:
    attention, mlp, head = sublayers(model)
    assert [one.kind for one in (attention, mlp, head)] == ["attention", "mlp", "head"]
    for number, one in enumerate((attention, mlp, head)):
        views = Shard(first=number, count=1).views(model)
        assert one.params == sum(view.area for view in views)
        assert one.trained == sum(view.area for view in views if model.parameters[view.parameter].is_trained)
        assert one.slices == most_slices(model, number)
        assert one.products == sum(view.area for view in views) - _vectors(model, number)
    assert (mlp.kv_width, head.kv_width) == (0, 0)
    assert (attention.kv_width,) == Shard(first=0, count=1).kv_widths(model)


def _vectors(model: Decoder, sublayer: int) -> int:
    """Number of elements in norms and biases, which take part in no product."""
    one = model.sublayers[sublayer]
    numbers = [] if one.norm is None else [one.norm.weight, one.norm.bias]
    numbers += [weight.bias for weight in weights_of(one)]
    return sum(model.views[number].area for number in numbers if number is not None)


@steady
@given(decoders(), st.data())
def test_slices_add_up_except_for_parameters_each_holds_in_full(model: Decoder, data: st.DataObject) -> None:
    for number, whole in enumerate(sublayers(model)):
        of = data.draw(st.integers(1, whole.slices))
        slices = [sublayers(model, Shard(first=number, count=1, index=index, of=of))[0] for index in range(of)]
        assert sum(one.inner for one in slices) == whole.inner
        assert sum(one.kv_width for one in slices) == whole.kv_width
        divided = whole.params - whole.undivided
        assert divided == sum(one.params - one.undivided for one in slices)
        assert all(one.undivided <= whole.undivided for one in slices)
        assert slices[0].undivided == whole.undivided


@steady
@given(decoders(), st.booleans())
def test_a_forward_only_pass_trains_nothing(model: Decoder, is_trained: bool) -> None:
    for one in sublayers(model, is_trained=is_trained):
        assert is_trained or one.trained == one.gradient_products == one.undivided_trained == 0


def test_a_decoders_gemms_are_those_of_its_sublayers() -> None:
    shape, tokens = named("llama-2-7b"), 4096
    products = sum(one.products for one in sublayers_of(shape))
    gemms = step_flops(shape, tokens, 1024) - sum(one.flops for one in attention_products(shape, tokens, 1024))
    assert gemms == 3 * 2 * tokens * products


@steady
@given(decoders(), st.integers(1, 5), st.integers(1, 9))
def test_linear_layers_multiply_every_weight_once_per_role(model: Decoder, sequences: int, sequence: int) -> None:
    tokens = sequences * sequence
    linears = list(decoder_linears(model, tokens))
    weights = sum(linear.in_width * linear.out_width for linear in linears)
    assert sum(linear.gemms["forward"].flops for linear in linears) == 2 * tokens * weights
    forward = list(decoder_linears(model, tokens, is_trained=False))
    assert all(linear.roles == ("forward",) for linear in forward)
    scores = decoder_attention_flops(model, sequences, sequence)
    assert scores == 3 * decoder_attention_flops(model, sequences, sequence, is_trained=False)


def test_attention_costs_the_same_from_a_shape_and_from_a_decoder() -> None:
    shape = named("opt-125m")
    builder = Builder(shape.hidden, np.random.default_rng(0))
    parts = [builder.attention(shape.kv_heads, 1, shape.head_dim)]
    one = decoder_attention_flops(builder.decoder(parts, None), 2, 64)
    assert shape.layers * one == sum(product.flops for product in attention_products(shape, 128, 64))


def test_named_models_have_the_parameter_counts_of_their_shapes() -> None:
    shape = named("llama-2-7b")
    assert sum(one.params for one in sublayers_of(shape)) == pytest.approx(shape.params - shape.vocab * shape.embed_dim)
