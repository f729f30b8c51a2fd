"""Laws of the work in a step: the gemms listed add up to what the model's parameters require."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.core.model.gemms import (
    Gemm,
    Role,
    StepGemm,
    attention_products,
    step_flops,
    step_gemms,
    step_segments,
)
from cleave.core.model.shapes import PRESET_NAMES, ModelShape, named
from cleave.errors import InputError


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    """Shapes with any combination of options, small so that failures are easy to read."""
    size = st.integers(1, 40)
    kv_heads, hidden = draw(st.integers(1, 4)), draw(size)
    return ModelShape(
        name="drawn",
        family="llama",
        layers=draw(size),
        hidden=hidden,
        ffn=draw(size),
        heads=kv_heads * draw(st.integers(1, 4)),
        kv_heads=kv_heads,
        head_dim=draw(size),
        vocab=draw(size),
        max_positions=draw(size),
        tied_embeddings=draw(st.booleans()),
        embed_dim=draw(st.just(hidden) | size),
        position_rows=draw(st.integers(0, 40)),
        gated_mlp=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        out_bias=draw(st.booleans()),
        mlp_bias=draw(st.booleans()),
        norm_vectors=draw(st.integers(0, 2)),
        final_norm=draw(st.booleans()),
    )


models = st.sampled_from([named(name) for name in PRESET_NAMES]) | shapes()
token_counts = st.integers(1, 10**7)
sequence_counts = st.integers(1, 10**4)


def gemm_weights(shape: ModelShape) -> int:
    return shape.layers * shape.gemm_params_per_layer + shape.head_gemm_params


def gemm_of(gemms: tuple[StepGemm, ...], segment: str, role: Role) -> Gemm:
    (found,) = (entry.gemm for entry in gemms if (entry.segment, entry.role) == (segment, role))
    return found


@given(shape=models, tokens=token_counts, grouped=st.booleans())
def test_linear_flops_are_six_per_gemm_weight_and_token(shape: ModelShape, tokens: int, grouped: bool) -> None:
    gemms = step_gemms(shape, tokens, grouped)
    assert sum(gemm.flops for gemm in gemms) == 6 * gemm_weights(shape) * tokens


@given(shape=models, sequences=sequence_counts, sequence=st.integers(1, 4096))
def test_attention_flops_are_twelve_per_layer_position_width_and_token(
    shape: ModelShape, sequences: int, sequence: int
) -> None:
    tokens = sequences * sequence
    products = attention_products(shape, tokens, sequence)
    width = shape.heads * shape.head_dim
    assert sum(product.flops for product in products) == 12 * shape.layers * sequence * width * tokens


@given(shape=models, sequences=sequence_counts, sequence=st.integers(1, 4096))
def test_step_flops_are_linear_flops_plus_attention_flops(shape: ModelShape, sequences: int, sequence: int) -> None:
    tokens = sequences * sequence
    attention = 12 * shape.layers * sequence * shape.heads * shape.head_dim * tokens
    assert step_flops(shape, tokens, sequence) == 6 * gemm_weights(shape) * tokens + attention


@given(shape=models, tokens=token_counts, grouped=st.booleans())
def test_the_three_roles_of_a_linear_layer_permute_the_same_three_widths(
    shape: ModelShape, tokens: int, grouped: bool
) -> None:
    gemms = step_gemms(shape, tokens, grouped)
    assert len({(entry.segment, entry.role) for entry in gemms}) == len(gemms)
    for segment in {entry.segment for entry in gemms}:
        forward = gemm_of(gemms, segment, "forward")
        assert forward.m == tokens
        assert gemm_of(gemms, segment, "grad_input") == Gemm(m=tokens, n=forward.k, k=forward.n)
        assert gemm_of(gemms, segment, "grad_weight") == Gemm(m=forward.n, n=forward.k, k=tokens)


@given(shape=models, tokens=token_counts)
def test_a_grouped_forward_gemm_is_as_wide_as_its_members(shape: ModelShape, tokens: int) -> None:
    grouped, alone = step_gemms(shape, tokens), step_gemms(shape, tokens, grouped=False)
    for entry in grouped:
        if entry.role == "forward":
            members = [gemm_of(alone, member, "forward") for member in entry.members]
            assert entry.gemm.n == sum(member.n for member in members)
            assert {member.k for member in members} == {entry.gemm.k}
    assert sum(len(entry.members) for entry in grouped) == len(alone)


# The only widths a token count can equal, which would merge shapes.
LLAMA_2_13B_WIDTHS = (5120, 3 * 5120, 13824, 2 * 13824, 32000)


@given(tokens=token_counts.filter(lambda tokens: tokens not in LLAMA_2_13B_WIDTHS))
def test_llama_2_13b_has_fourteen_distinct_grouped_gemms(tokens: int) -> None:
    gemms = step_gemms(named("llama-2-13b"), tokens)
    # Five linear layers in three roles; forward and grad_input of the square `out` are the same shape.
    assert len(gemms) == 15
    assert len({entry.gemm for entry in gemms}) == 14


def test_grouped_query_attention_narrows_keys_and_values() -> None:
    shape, tokens = named("llama-2-70b"), 4096
    gemms = step_gemms(shape, tokens)
    assert gemm_of(gemms, "qkv", "forward") == Gemm(m=4096, n=8192 + 2 * 1024, k=8192)
    assert gemm_of(gemms, "qkv", "grad_input") == Gemm(m=4096, n=8192, k=8192 + 2 * 1024)
    assert gemm_of(gemms, "qkv", "grad_weight") == Gemm(m=8192 + 2 * 1024, n=8192, k=4096)
    alone = step_gemms(shape, tokens, grouped=False)
    assert gemm_of(alone, "k", "forward") == gemm_of(alone, "v", "forward") == Gemm(m=4096, n=1024, k=8192)


@pytest.mark.parametrize(
    ("name", "grouped", "segments"),
    [
        ("llama-2-7b", True, ["qkv", "out", "gate_up", "down", "head"]),
        ("llama-2-7b", False, ["q", "k", "v", "out", "gate", "up", "down", "head"]),
        ("opt-125m", True, ["qkv", "out", "up", "down", "head"]),
        ("opt-125m", False, ["q", "k", "v", "out", "up", "down", "head"]),
        ("opt-350m", True, ["qkv", "out", "up", "down", "project_in", "project_out", "head"]),
    ],
)
def test_a_step_has_the_linear_layers_of_its_family(name: str, grouped: bool, segments: list[str]) -> None:
    gemms = step_gemms(named(name), 2048, grouped)
    assert list(dict.fromkeys(entry.segment for entry in gemms)) == segments


def test_layer_gemms_count_once_per_layer_and_the_head_once() -> None:
    shape = named("opt-350m")
    for entry in step_gemms(shape, 2048):
        outside = entry.segment in ("project_in", "project_out", "head")
        assert entry.count == (1 if outside else shape.layers)


def test_opt_350m_projects_between_embedding_and_hidden_width() -> None:
    gemms = step_gemms(named("opt-350m"), 2048)
    assert gemm_of(gemms, "project_in", "forward") == Gemm(m=2048, n=1024, k=512)
    assert gemm_of(gemms, "project_out", "forward") == Gemm(m=2048, n=512, k=1024)
    assert gemm_of(gemms, "head", "forward") == Gemm(m=2048, n=50272, k=512)


def test_attention_products_are_those_of_softmax_attention() -> None:
    products = attention_products(named("opt-125m"), tokens=4 * 2048, sequence=2048)
    scores, values = Gemm(m=2048, n=2048, k=64), Gemm(m=2048, n=64, k=2048)
    assert {product.name: (product.role, product.gemm) for product in products} == {
        "scores": ("forward", scores),
        "context": ("forward", values),
        "grad_probabilities": ("grad_input", scores),
        "grad_value": ("grad_input", values),
        "grad_query": ("grad_input", values),
        "grad_key": ("grad_input", values),
    }
    assert {product.count for product in products} == {12 * 12 * 4}


@given(shape=models, sequences=sequence_counts, sequence=st.integers(1, 4096), grouped=st.booleans())
def test_segments_contain_every_gemm_and_product_once(
    shape: ModelShape, sequences: int, sequence: int, grouped: bool
) -> None:
    tokens = sequences * sequence
    segments = step_segments(shape, tokens, sequence, grouped)
    assert [segment.kind for segment in segments] == ["attention", "mlp", "head"]
    gemms = tuple(gemm for segment in segments for gemm in segment.gemms)
    products = tuple(product for segment in segments for product in segment.products)
    assert gemms == step_gemms(shape, tokens, grouped)
    assert products == attention_products(shape, tokens, sequence)


@given(shape=models)
def test_segments_contain_every_parameter_except_the_lookup_tables(shape: ModelShape) -> None:
    held = sum(segment.count * segment.params for segment in step_segments(shape, 8, 8))
    token_table = 0 if shape.tied_embeddings else shape.vocab * shape.embed_dim
    assert held == shape.params - token_table - shape.position_rows * shape.hidden


@pytest.mark.parametrize(("tokens", "sequence"), [(100, 64), (0, 64), (-64, 64), (64, 0), (64, -8), (32, 64)])
def test_a_batch_is_a_whole_number_of_sequences(tokens: int, sequence: int) -> None:
    shape = named("opt-125m")
    for call in (attention_products, step_segments, step_flops):
        with pytest.raises(InputError, match=r"^expected "):
            call(shape, tokens, sequence)


@pytest.mark.parametrize("tokens", [0, -1])
def test_a_step_without_tokens_is_refused(tokens: int) -> None:
    with pytest.raises(InputError, match=f"got {tokens};"):
        step_gemms(named("opt-125m"), tokens)
