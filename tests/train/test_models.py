"""A model's name gives the same model every time, and a wrong name gives a helpful message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, LlamaConfig

from cleave import memory
from cleave.core.model.shapes import named
from cleave.errors import ModelError
from cleave.train.models import _set_dropout, build_model, load_directory
from cleave.train.offload import families
from cleave.train.offload.families import Description

TINY = ("tiny-llama", "tiny-opt", "tiny-gpt2")


@pytest.mark.parametrize("name", ["opt-125m", "opt-350m", "llama-2-7b", "llama-2-70b"])
def test_a_named_model_has_the_parameters_of_its_shape(name: str) -> None:
    with torch.device("meta"):
        model, directory = build_model(name, "bf16", seed=1)
    assert directory is None
    assert sum(parameter.numel() for parameter in model.parameters()) == named(name).params


@pytest.mark.parametrize("name", TINY)
def test_the_seed_alone_determines_the_weights(name: str) -> None:
    torch.manual_seed(5)
    first = build_model(name, "fp32", seed=1)[0].state_dict()
    drawn = torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1)), "building a model must not touch the global random state"
    again, other = build_model(name, "fp32", seed=1)[0].state_dict(), build_model(name, "fp32", seed=2)[0].state_dict()
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", TINY)
def test_tiny_models_take_bytes_have_no_dropout_and_keep_no_cache(name: str) -> None:
    model, _ = build_model(name.upper(), "fp32", seed=1)
    model.train()
    tokens = torch.arange(256).view(2, 128)
    first, again = model(input_ids=tokens), model(input_ids=tokens)
    assert first.logits.shape == (2, 128, 256)
    assert torch.equal(first.logits, again.logits)
    assert first.past_key_values is None


def test_the_demo_is_small_and_parameters_have_the_requested_dtype() -> None:
    model, _ = build_model("demo", "bf16", seed=1)
    assert 3e6 < sum(parameter.numel() for parameter in model.parameters()) < 4e6
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_a_model_directory_loads_with_its_weights_and_is_returned_for_its_tokenizer(tmp_path: Path) -> None:
    model, _ = build_model("tiny-llama", "fp32", seed=3)
    model.save_pretrained(tmp_path)
    loaded, directory = build_model(str(tmp_path), "fp32", seed=1)
    assert directory == tmp_path
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in model.state_dict().items())
    assert build_model(str(tmp_path), "bf16", seed=1)[0].dtype == torch.bfloat16
    assert load_directory(tmp_path).dtype == torch.float32


def test_a_directory_without_a_valid_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config\.json"):
        build_model(str(tmp_path), "fp32", seed=1)
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1}')
    with pytest.raises(ModelError, match=f"cannot load a causal language model from {tmp_path}"):
        build_model(str(tmp_path), "fp32", seed=1)


@pytest.mark.parametrize(
    ("name", "said"),
    [("opt-125n", "similar ones: opt-125m"), ("no such model!", "presets: demo, tiny-llama, .*llama-2-70b")],
)
def test_an_unknown_name_is_refused_with_similar_names_and_the_path_tried(name: str, said: str) -> None:
    with pytest.raises(ModelError, match=f"'{name}': .* not a preset .{said}.*not a directory.*Hugging Face"):
        build_model(name, "fp32", seed=1)


@pytest.mark.parametrize("name", ["tiny-opt", "tiny-gpt2"])
def test_fresh_weights_have_no_dropout_unless_asked_for_so_that_layers_can_stay_on_devices(name: str) -> None:
    usual, _ = build_model(name, "bf16", seed=1)
    asked, _ = build_model(name, "bf16", seed=1, dropout=0.1)
    for model, resident in ((usual, True), (asked, False)):
        (place,) = families.find(model.train())
        assert isinstance(families.describe(place), Description) == resident


@pytest.mark.parametrize("asked", [None, 0.1])
def test_a_model_of_a_named_size_has_the_dropout_asked_for_or_none(asked: float | None) -> None:
    with torch.device("meta"):
        config = build_model("opt-125m", "bf16", seed=1, dropout=asked)[0].config
    assert (config.dropout, config.attention_dropout) == (asked or 0.0, asked or 0.0)


def test_a_loaded_model_keeps_its_dropout_unless_told_otherwise(tmp_path: Path) -> None:
    build_model("tiny-opt", "fp32", seed=1, dropout=0.3)[0].save_pretrained(tmp_path)
    assert build_model(str(tmp_path), "fp32", seed=1)[0].config.dropout == 0.3
    loaded = build_model(str(tmp_path), "fp32", seed=1, dropout=0.0)[0].config
    assert (loaded.dropout, loaded.attention_dropout) == (0.0, 0.0)


def test_dropout_is_set_in_every_part_of_a_config_and_never_silently_ignored(tmp_path: Path) -> None:
    config = GPT2Config(attn_pdrop=0.1, resid_pdrop=0.2)
    config.part = LlamaConfig(attention_dropout=0.3)
    config.table = {"dropout": 0.4, "use_dropout": True, 0: "LABEL_0"}
    assert _set_dropout(config, 0.0)
    assert (config.attn_pdrop, config.resid_pdrop, config.part.attention_dropout) == (0.0, 0.0, 0.0)
    assert config.table == {"dropout": 0.0, "use_dropout": True, 0: "LABEL_0"}
    assert not _set_dropout({"hidden_size": 8}, 0.5)


def test_a_model_too_large_for_the_server_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 1_000_000_000)
    with pytest.raises(ModelError, match=r"opt-125m needs 2 GB .* 1 GB are free.*bf16"):
        build_model("opt-125m", "fp32", seed=1)
    with pytest.raises(ModelError, match=r"opt-125m needs 1 GB"):
        build_model("opt-125m", "bf16", seed=1)
    build_model("tiny-llama", "fp32", seed=1)[0].save_pretrained(tmp_path)
    monkeypatch.setattr(memory, "available_bytes", lambda: 1_000_000)
    with pytest.raises(ModelError, match=r"needs 0\.002\d* GB"):
        build_model(str(tmp_path), "fp32", seed=1)
