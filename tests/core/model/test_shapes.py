"""Laws of model shapes: counts agree with the published table and with Hugging Face, and bad input is named."""

from __future__ import annotations

import csv
import string
from importlib.resources import files

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.core.model.shapes import PRESET_NAMES, ModelShape, from_config, named
from cleave.errors import ModelError

NAMES_OF_GPT2 = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"}


def config_of(
    model_type: str, layers: int, hidden: int, ffn: int, heads: int, vocab: int, **others: object
) -> dict[str, object]:
    sizes = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    if model_type == "gpt2":
        sizes = {NAMES_OF_GPT2[key]: value for key, value in sizes.items()}
    ffn_key = {"opt": "ffn_dim", "gpt2": "n_inner"}.get(model_type, "intermediate_size")
    return {"model_type": model_type, **sizes, ffn_key: ffn, "vocab_size": vocab, **others}


# Totals counted by transformers 5.22.2: unique parameters of AutoModelForCausalLM on the meta device.
COUNTED_CONFIGS: dict[str, tuple[int, dict[str, object]]] = {
    "gpt2": (
        124_439_808,
        {
            "model_type": "gpt2",
            "n_layer": 12,
            "n_embd": 768,
            "n_head": 12,
            "n_positions": 1024,
            "vocab_size": 50257,
        },
    ),
    "mistral-7b": (7_241_732_096, config_of("mistral", 32, 4096, 14336, 32, 32000, num_key_value_heads=8)),
    "mistral-nemo": (
        12_247_782_400,
        config_of("mistral", 40, 5120, 14336, 32, 131072, num_key_value_heads=8, head_dim=128),
    ),
    "qwen2-0.5b": (
        494_032_768,
        config_of("qwen2", 24, 896, 4864, 14, 151936, num_key_value_heads=2, tie_word_embeddings=True),
    ),
    "qwen2-7b": (7_615_616_512, config_of("qwen2", 28, 3584, 18944, 28, 152064, num_key_value_heads=4)),
    "pythia-160m": (162_322_944, config_of("gpt_neox", 12, 768, 3072, 12, 50304)),
    "tinyllama-1.1b": (1_100_048_384, config_of("llama", 22, 2048, 5632, 32, 32000, num_key_value_heads=4)),
    "opt-350m": (
        331_196_416,
        config_of("opt", 24, 1024, 4096, 16, 50272, word_embed_proj_dim=512, do_layer_norm_before=False),
    ),
    "galactica-125m": (
        124_909_056,
        config_of("opt", 12, 768, 3072, 12, 50000, enable_bias=False, layer_norm_elementwise_affine=False),
    ),
    # Not published models: they cover the options that those above leave at their defaults.
    "opt, untied": (
        198_216,
        config_of(
            *("opt", 2, 64, 100, 4, 50),
            word_embed_proj_dim=32,
            _remove_final_layer_norm=True,
            tie_word_embeddings=False,
        ),
    ),
    "gpt2, untied": (
        101_676,
        config_of("gpt2", 3, 64, 100, 4, 77, n_positions=33, tie_word_embeddings=False),
    ),
    "llama, biased and tied": (
        109_616,
        config_of(
            *("llama", 3, 64, 96, 8, 100),
            num_key_value_heads=2,
            head_dim=12,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    "mistral, heads not dividing hidden": (78_100, config_of("mistral", 2, 100, 30, 16, 10, head_dim=6)),
    "gpt_neox, unbiased and tied": (
        69_760,
        config_of("gpt_neox", 2, 64, 128, 4, 50, attention_bias=False, tie_word_embeddings=True),
    ),
}

TINY_LLAMA = COUNTED_CONFIGS["tinyllama-1.1b"][1]
OPTIONAL_FIELDS = (
    "model_type",
    "num_key_value_heads",
    "head_dim",
    "n_inner",
    "word_embed_proj_dim",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "enable_bias",
    "do_layer_norm_before",
    "num_local_experts",
)


def published_table() -> dict[str, dict[str, str]]:
    text = files("cleave.facts").joinpath("model_shapes.csv").read_text(encoding="utf-8")
    return {row["model"].lower(): row for row in csv.DictReader(text.splitlines())}


def table_values(shape: ModelShape) -> dict[str, str]:
    return {
        "layers": str(shape.layers),
        "hidden": str(shape.hidden),
        "ffn": str(shape.ffn),
        "heads": str(shape.heads),
        "kv_heads": str(shape.kv_heads),
        "head_dim": str(shape.head_dim),
        "vocab": str(shape.vocab),
        "max_positions": str(shape.max_positions),
        "tied_embeddings": str(shape.tied_embeddings).lower(),
        "params_per_layer_exact": str(shape.params_per_layer),
        "embedding_params": str(shape.embedding_params),
        "params_total_computed": str(shape.params),
        "gemm_weight_params_per_layer": str(shape.gemm_params_per_layer),
    }


def test_presets_are_exactly_the_models_of_the_published_table() -> None:
    assert set(PRESET_NAMES) == set(published_table())


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_dimensions_and_parameter_counts_equal_the_published_table(name: str) -> None:
    ours = table_values(named(name))
    assert ours == {column: published_table()[name][column] for column in ours}


@pytest.mark.parametrize("name", PRESET_NAMES)
def test_a_name_is_found_in_any_case(name: str) -> None:
    assert named(name.upper()) == named(name)
    assert named(name).name == name


@pytest.mark.parametrize("name", COUNTED_CONFIGS)
def test_parameter_counts_of_a_config_equal_hugging_face(name: str) -> None:
    total, config = COUNTED_CONFIGS[name]
    assert from_config(config, name).params == total


def test_a_preset_equals_its_config() -> None:
    assert named("opt-350m") == from_config(COUNTED_CONFIGS["opt-350m"][1], "opt-350m")


@pytest.mark.parametrize(
    ("model_type", "max_positions", "kv_heads", "tied"),
    [
        ("llama", 2048, 64, False),
        ("mistral", 131072, 8, False),
        ("qwen2", 32768, 32, False),
        ("opt", 2048, 64, True),
        ("gpt2", 1024, 64, True),
        ("gpt_neox", 2048, 64, False),
    ],
)
def test_absent_fields_have_the_defaults_of_hugging_face(
    model_type: str, max_positions: int, kv_heads: int, tied: bool
) -> None:
    shape = from_config(config_of(model_type, 2, 128, 500, 64, 100), "small")
    assert (shape.max_positions, shape.kv_heads, shape.tied_embeddings) == (max_positions, kv_heads, tied)
    assert (shape.head_dim, shape.embed_dim, shape.ffn) == (2, 128, 500)


def test_gpt2_without_n_inner_has_an_mlp_four_times_as_wide() -> None:
    config = COUNTED_CONFIGS["gpt2"][1]
    assert from_config(config, "gpt2").ffn == from_config(config | {"n_inner": None}, "gpt2").ffn == 3072


@pytest.mark.parametrize("family", ["mistral", "qwen2"])
def test_null_key_value_heads_default_to_the_number_of_heads(family: str) -> None:
    config = TINY_LLAMA | {"model_type": family, "num_attention_heads": 16, "num_key_value_heads": None}
    assert from_config(config, "x").kv_heads == 16


@pytest.mark.parametrize(
    ("wrong", "close"), [("lama-2-7b", "llama-2-7b"), ("OPT-13", "opt-13b"), ("opt_350m", "opt-350m")]
)
def test_an_unknown_name_suggests_the_closest_one(wrong: str, close: str) -> None:
    with pytest.raises(ModelError, match=rf"got '{wrong}'; did you mean {close}\?$"):
        named(wrong)


def test_a_name_unlike_any_other_lists_all_names() -> None:
    with pytest.raises(ModelError) as caught:
        named("!")
    assert all(name in str(caught.value) for name in PRESET_NAMES)
    assert "config.json" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "value", "shown"),
    [
        ("hidden_size", "2048", "'2048'"),
        ("hidden_size", 2048.0, "2048.0"),
        ("hidden_size", None, "None"),
        ("num_hidden_layers", True, "True"),
        ("num_hidden_layers", 0, "0"),
        ("vocab_size", -1, "-1"),
        ("vocab_size", 10**30, "1000000000000000000000000000000"),
        ("intermediate_size", [], "[]"),
        ("num_attention_heads", 33, "33"),
        ("num_attention_heads", 4096, "4096"),
        ("num_key_value_heads", 5, "5"),
        ("num_key_value_heads", 64, "64"),
        ("head_dim", 0, "0"),
        ("tie_word_embeddings", 1, "1"),
        ("attention_bias", None, "None"),
        ("model_type", "bert", "'bert'"),
        ("model_type", "mixtral", "'mixtral'"),
        ("model_type", ["llama"], "['llama']"),
        ("num_local_experts", 8, "8"),
        ("n_routed_experts", 256, "256"),
    ],
)
def test_a_malformed_field_is_named_with_its_value(field: str, value: object, shown: str) -> None:
    with pytest.raises(ModelError) as caught:
        from_config(TINY_LLAMA | {field: value}, "mine")
    message = str(caught.value)
    assert message.startswith(f"expected {field} in the config.json of mine to ")
    assert f", got {shown}; " in message


@pytest.mark.parametrize("model_type", ["llama", "opt", "gpt_neox"])
def test_heads_divide_hidden_even_where_a_head_dim_is_given(model_type: str) -> None:
    with pytest.raises(ModelError, match=r"^expected num_attention_heads .* divide hidden_size 100, got 16; "):
        from_config(config_of(model_type, 2, 100, 30, 16, 10, head_dim=6), "mine")


def test_a_default_that_does_not_fit_is_called_a_default() -> None:
    with pytest.raises(ModelError, match=r"^expected num_key_value_heads .*, got 32 by default; "):
        from_config(config_of("qwen2", 24, 896, 4864, 14, 151936), "mine")


@pytest.mark.parametrize("name", ["gpt2", "mistral-7b", "qwen2-7b", "pythia-160m", "tinyllama-1.1b", "opt-350m"])
def test_the_dimensions_that_define_a_model_are_required(name: str) -> None:
    optional = {
        *("n_positions", "tie_word_embeddings"),
        *("num_key_value_heads", "word_embed_proj_dim", "do_layer_norm_before"),
    }
    config = COUNTED_CONFIGS[name][1]
    for field in config.keys() - optional:
        with pytest.raises(ModelError, match=rf"^expected {field} in .*, got nothing; "):
            from_config({key: value for key, value in config.items() if key != field}, name)


short_texts = st.text(string.printable, max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(1, 64) | st.floats() | short_texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(short_texts, inner, max_size=3),
    max_leaves=5,
)


@given(data=st.data(), name=st.sampled_from(sorted(COUNTED_CONFIGS)))
def test_a_mutated_config_gives_a_valid_shape_or_a_model_error(data: st.DataObject, name: str) -> None:
    config = dict(COUNTED_CONFIGS[name][1])
    fields = st.sampled_from([*config, *OPTIONAL_FIELDS])
    for field in data.draw(st.lists(fields, max_size=3, unique=True), label="removed"):
        config.pop(field, None)
    config |= data.draw(st.dictionaries(fields, json_values, max_size=3), label="changed")
    try:
        shape = from_config(config, name)
    except ModelError:
        return
    assert shape.heads % shape.kv_heads == 0
    assert 0 < shape.gemm_params_per_layer <= shape.params_per_layer < shape.params


@given(config=st.dictionaries(short_texts, json_values, max_size=5))
def test_an_arbitrary_object_is_a_model_error(config: dict[str, object]) -> None:
    with pytest.raises(ModelError, match=r"^expected model_type in"):
        from_config(config, "x")
