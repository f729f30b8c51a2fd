"""A model directory from a stranger loads, or is refused with one sentence: none of its code runs, nothing hangs."""

from __future__ import annotations

import json
import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cleave.cli.main import main
from cleave.errors import InputError, ModelError
from cleave.train import models
from cleave.train.models import build_model, export, generate_text, load_directory
from cleave.train.tokens import ByteTokenizer, load_tokenizer

Forge = Callable[[Path], object]
LLAMA: dict[str, object] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 256,
}
NESTED = "[" * 100_000


class _Payload:
    """Runs code when it is unpickled."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch executed",)


@pytest.fixture(autouse=True)
def _curious(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user who says yes to everything, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a small model with a tokenizer."""
    directory = tmp_path_factory.mktemp("sound")
    model, _ = build_model("tiny-llama", "fp32", seed=1)
    export(model, ByteTokenizer(), directory / "model")
    return {file.name: file.read_bytes() for file in (directory / "model").iterdir()}


@pytest.fixture
def directory(tmp_path: Path, sound: dict[str, bytes]) -> Path:
    copy = tmp_path / "stranger"
    copy.mkdir()
    for name, raw in sound.items():
        (copy / name).write_bytes(raw)
    return copy


def _config(**fields: object) -> Forge:
    """Write a config.json with these fields instead."""
    return lambda directory: (directory / "config.json").write_text(json.dumps({**LLAMA, **fields}))


def _code(directory: Path, name: str = "modeling_x") -> None:
    (directory / f"{name}.py").write_text("from pathlib import Path\nPath('executed').touch()\nclass X: pass\n")


def _own_code(directory: Path) -> None:
    _code(directory)
    auto_map = {"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    _config(model_type="stranger", auto_map=auto_map)(directory)


def _pickled(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(_Payload()))


def _pickled_pieces(directory: Path) -> None:
    _pickled(directory)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}
    (directory / "pytorch_model.bin.index.json").write_text(json.dumps(index))


def _index(**weights: object) -> Forge:
    def forge(directory: Path) -> None:
        (directory / "model.safetensors").unlink()
        index = {"metadata": {"total_size": 1}, "weight_map": weights}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))

    return forge


def _pipe(name: str) -> Forge:
    return lambda directory: ((directory / name).unlink(missing_ok=True), os.mkfifo(directory / name))


def _write(name: str, content: str | bytes) -> Forge:
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda directory: (directory / name).write_bytes(raw)


REFUSED: dict[str, Forge] = {
    "own code": _own_code,
    "own code of another repository": _config(model_type="x", auto_map={"AutoConfig": "a/b--modeling_x.X"}),
    "own code, listed": _config(model_type="x", auto_map=["modeling_x.X"]),
    "family as a list": _config(model_type=["llama"], auto_map={"AutoConfig": "modeling_x.X"}),
    "kernels from the hub": _config(attn_implementation="stranger/kernel"),
    "kernels by another name": _config(_attn_implementation="stranger/kernel"),
    "kernels in a part": _config(part={"attn_implementation": "stranger/kernel"}),
    "pickled weights": _pickled,
    "pickled pieces": _pickled_pieces,
    "weights elsewhere": _index(a="../other.safetensors"),
    "weights by absolute path": _index(a="/etc/hostname"),
    "weights are a number": _index(a=3),
    "weights are a list": _index(a=[[]]),
    "weights have a long name": _index(a="x" * 5000),
    "weights are missing": _index(a="model-00001-of-00002.safetensors"),
    "weights are a pipe": _pipe("model.safetensors"),
    "weights are endless": lambda directory: (
        (directory / "model.safetensors").unlink(),
        (directory / "model.safetensors").symlink_to("/dev/zero"),
    ),
    "weights named elsewhere": _config(transformers_weights="../../x.safetensors"),
    "weights with an absurd header": _write("model.safetensors", struct.pack("<Q", 1 << 60)),
    "weights with a nested header": _write("model.safetensors", struct.pack("<Q", 100_000) + NESTED.encode()),
    "adapter": _write("adapter_config.json", '{"base_model_name_or_path": "/tmp", "peft_type": "LORA"}'),
    "config is a list": _write("config.json", "[]"),
    "config is empty": _write("config.json", ""),
    "config is nested": _write("config.json", NESTED),
    "config is nested objects": _write("config.json", '{"a":' * 900 + "1" + "}" * 900),
    "config is not UTF-8": _write("config.json", b'{"\xff": 1}'),
    "config is huge": lambda directory: os.truncate(directory / "config.json", 1 << 40),
    "a billion layers": _config(num_hidden_layers=10**9),
    "a billion layers as a float": _config(num_hidden_layers=1e9),
    "more layers than a float": _config(num_hidden_layers=10**400),
    "infinitely many layers": _config(num_hidden_layers=float("inf")),
    "a billion layers of Qwen": _config(model_type="qwen2", num_hidden_layers=10**9),
    "a billion layers of GPT-2": _config(model_type="gpt2", n_layer=10**9),
    "a billion layers in a part": _config(text_config={"num_hidden_layers": 10**9}),
    "a billion labels": _config(num_labels=10**9),
    "a billion experts": _config(model_type="mixtral", num_local_experts=10**9),
    "a billion tokens": _config(vocab_size=10**12),
    "absurd width": _config(hidden_size=10**30),
    "negative width": _config(hidden_size=-16),
    "width is not a number": _config(hidden_size=float("nan")),
    "width is a text": _config(hidden_size="16"),
    "no heads": _config(num_attention_heads=0),
    "unknown family": _config(model_type="stranger"),
    "family is null": _config(model_type=None),
    "pipe as generation config": _pipe("generation_config.json"),
    "pipe as tokenizer": _pipe("special_tokens_map.json"),
    "huge tokenizer": lambda directory: os.truncate(directory / "tokenizer.json", 1 << 40),
}


@pytest.mark.parametrize("forge", REFUSED.values(), ids=REFUSED)
def test_a_hostile_model_is_refused_and_its_code_never_runs(directory: Path, forge: Forge) -> None:
    forge(directory)
    with pytest.raises(ModelError) as caught:
        build_model(str(directory), "fp32", seed=1)
    assert "\n" not in str(caught.value)
    assert str(directory) in str(caught.value)
    assert "trust_remote_code" not in str(caught.value)
    assert not Path("executed").exists()


def _tokenizer(**fields: object) -> Forge:
    def forge(directory: Path) -> None:
        file = directory / "tokenizer_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))

    return forge


def _own_tokenizer(directory: Path) -> None:
    _code(directory, "tokenization_x")
    auto_map = {"AutoTokenizer": ["tokenization_x.X", "tokenization_x.X"]}
    _tokenizer(tokenizer_class="X", auto_map=auto_map)(directory)
    _config(model_type="stranger")(directory)


def _vocabulary(edit: Callable[[dict[str, Any]], object]) -> Forge:
    def forge(directory: Path) -> None:
        content = json.loads((directory / "tokenizer.json").read_text())
        edit(content)
        (directory / "tokenizer.json").write_text(json.dumps(content))

    return forge


BROKEN_TOKENIZERS: dict[str, Forge] = {
    "own code": _own_tokenizer,
    "empty": _write("tokenizer.json", ""),
    "list": _write("tokenizer.json", "[]"),
    "nested": _write("tokenizer.json", NESTED),
    "truncated": lambda directory: os.truncate(directory / "tokenizer.json", 1000),
    "not UTF-8": _write("tokenizer.json", b'{"\xff": 1}'),
    "config is a list": _write("tokenizer_config.json", "[]"),
    "config is nested": _write("tokenizer_config.json", NESTED),
    "absurd numbers": _vocabulary(lambda content: content["model"]["vocab"].update({"t": 2**40})),
    "negative numbers": _vocabulary(lambda content: content["model"]["vocab"].update({"t": -5})),
    "no vocabulary": _vocabulary(lambda content: content["model"].update({"vocab": {}})),
    "unknown model": _vocabulary(lambda content: content["model"].update({"type": "Stranger"})),
    "broken pattern": _vocabulary(
        lambda content: content.update(
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}}
        )
    ),
}


@pytest.mark.parametrize("forge", BROKEN_TOKENIZERS.values(), ids=BROKEN_TOKENIZERS)
def test_a_hostile_tokenizer_is_refused_and_its_code_never_runs(directory: Path, forge: Forge) -> None:
    forge(directory)
    with pytest.raises(InputError, match=str(directory)) as caught:
        load_tokenizer(directory)
    assert "\n" not in str(caught.value)
    assert "trust_remote_code" not in str(caught.value)
    assert not Path("executed").exists()


def test_code_beside_a_model_that_needs_none_is_ignored(directory: Path) -> None:
    for name in ("modeling_x", "tokenization_x"):
        _code(directory, name)
    (directory / "custom_generate").mkdir()
    _code(directory / "custom_generate", "generate")
    config = json.loads((directory / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "modeling_x.X", "AutoModelForCausalLM": "modeling_x.X"}
    (directory / "config.json").write_text(json.dumps(config))
    _tokenizer(auto_map={"AutoTokenizer": ["tokenization_x.X", "tokenization_x.X"]})(directory)
    (directory / "chat_template.jinja").write_text("{% for i in range(10**12) %}{{ ''.__class__ }}{% endfor %}")
    model, _ = build_model(str(directory), "fp32", seed=1)
    assert type(model).__module__.startswith("transformers.models.llama")
    assert generate_text(load_directory(directory), load_tokenizer(directory), "the ", 5, 1) is not None
    assert not Path("executed").exists()


def test_a_pickle_beside_safetensors_is_ignored(directory: Path) -> None:
    (directory / "pytorch_model.bin").write_bytes(pickle.dumps(_Payload()))
    build_model(str(directory), "fp32", seed=1)
    assert not Path("executed").exists()


def test_what_a_model_says_of_generation_does_not_decide_how_much_is_generated(directory: Path) -> None:
    settings = {"num_beams": 10**6, "num_return_sequences": 10**6, "max_length": 10**9, "eos_token_id": 0}
    (directory / "generation_config.json").write_text(json.dumps(settings))
    assert generate_text(load_directory(directory), ByteTokenizer(), "the ", 5, 1) is not None


def test_a_model_of_too_many_modules_is_stopped_while_it_is_built(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_MOST_MODULES", 100)
    _config(num_hidden_layers=50)(directory)
    with pytest.raises(ModelError, match="more than 100 modules"):
        build_model(str(directory), "fp32", seed=1)
    torch.nn.Sequential(*(torch.nn.Linear(1, 1) for _ in range(200)))  # others are not counted


def test_an_exported_model_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for name in (".partial-model", "model"):
        (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    model, _ = build_model("tiny-llama", "fp32", seed=1)
    assert export(model, ByteTokenizer(), tmp_path / "model").is_dir()
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("name", ["~nobody-of-this-name/x", "a\0b", "x" * 5000, "../" * 3000, "\udcff"])
def test_an_odd_name_is_no_model(name: str) -> None:
    with pytest.raises(ModelError):
        build_model(name, "fp32", seed=1)


@pytest.mark.parametrize("forge", [_own_code, _pickled, _pipe("config.json")], ids=["code", "pickle", "pipe"])
def test_the_command_gives_one_sentence_and_code_2(
    directory: Path, forge: Forge, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    forge(directory)
    assert main(["train", "--model", str(directory), "--out", str(tmp_path / "run")]) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("cleave train: ")
    assert "Traceback" not in said
    assert not Path("executed").exists()


@pytest.mark.parametrize("family", ["llama", "qwen2", "gpt_neox"])
def test_a_billion_layers_take_no_memory(directory: Path, family: str) -> None:
    _config(model_type=family, num_hidden_layers=10**9)(directory)
    tracemalloc.start()
    try:
        with pytest.raises(ModelError, match=r"num_hidden_layers .*1000000000"):
            build_model(str(directory), "fp32", seed=1)
        assert tracemalloc.get_traced_memory()[1] < 50e6
    finally:
        tracemalloc.stop()
