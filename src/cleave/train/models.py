# pyright: standard
"""Models by name: tiny presets, the named shapes of `core/model/shapes.py`, a directory, or a Hugging Face name.

Presets and named shapes get random weights drawn from the seed; the others bring their own, as safetensors. No code
that a model brings along is ever run, and nobody is asked whether to. The result is a plain Hugging Face causal
language model on the CPU. `export` writes a trained one, `generate_text` samples from it. Knows nothing of devices,
batches or steps.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import RepositoryNotFoundError
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedModel
from transformers.utils import logging as transformers_logging

from cleave import disk, memory
from cleave.core.model.shapes import PRESET_NAMES, ModelShape, named
from cleave.errors import ModelError
from cleave.train.causes import cause_of
from cleave.train.model_files import check_files, check_weights
from cleave.train.tokens import Tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Dtype = Literal["fp32", "bf16"]

TORCH_DTYPES: Final[dict[Dtype, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_STATES: Final = 4
"""Copies of each parameter while training: its value, its gradient, and AdamW's two moments."""
_MOST_MODULES: Final = 100_000
"""Modules of a model, a hundred times the usual number: stops a forged config before its modules fill the memory."""
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "tokenizer.model",
    "chat_template.jinja",
)

transformers_logging.disable_progress_bar()  # they would garble the live view of a run


def build_model(
    name: str, dtype: Dtype, seed: int, dropout: float | None = None
) -> tuple[PreTrainedModel, Path | None]:
    """Build or load a model, with its KV cache disabled; also return its directory, if any, for the tokenizer.

    `dropout` replaces every dropout probability; by default it is 0 for fresh weights, and a loaded model's own. Raises
    ModelError before any work if the model cannot be trained in this machine's memory.
    """
    fields = _config_fields(name)
    if fields is not None:
        config = AutoConfig.for_model(**fields)  # pyright: ignore[reportArgumentType]
        _set_dropout(config, dropout or 0.0)
        _check_memory(name, config, dtype)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=TORCH_DTYPES[dtype], trust_remote_code=False)
        directory = None
    else:
        model, directory = _load(name, dtype, dropout)
    model.config.use_cache = False
    return model, directory


def load_directory(directory: Path, dtype: Dtype | None = None, dropout: float | None = None) -> PreTrainedModel:
    """Load a model written by `save_pretrained` or a checkpoint, in its own dtype by default."""
    with _loading(str(directory)):
        check_files(directory)
        check_weights(directory)
    torch_dtype = "auto" if dtype is None else TORCH_DTYPES[dtype]
    return _from_pretrained(str(directory), torch_dtype, dropout=dropout, local_files_only=True)


def export(model: PreTrainedModel, tokenizer: Tokenizer, target: Path) -> Path:
    """Write the finished model and its tokenizer, atomically: a crash leaves all or nothing."""
    partial = target.with_name(f".partial-{target.name}")
    disk.remove(partial)
    model.config.use_cache = True
    model.save_pretrained(partial)
    tokenizer.save(partial)
    disk.remove(target)
    return partial.rename(target)


def generate_text(model: PreTrainedModel, tokenizer: Tokenizer, prompt: str, length: int, seed: int) -> str:
    """Sample up to `length` tokens after the prompt, at a fixed temperature, from the seed."""
    start = torch.tensor([tokenizer.encode(prompt).tolist() or [tokenizer.separator]])
    limit = min(length, positions(model) - start.shape[1])
    if limit < 1:
        return ""
    settings = GenerationConfig(
        do_sample=True,
        temperature=0.8,
        max_new_tokens=limit,
        pad_token_id=tokenizer.separator,
        eos_token_id=getattr(model.generation_config, "eos_token_id", None),
        use_cache=True,
    )
    model.generation_config = settings  # what a model brings along may ask for a billion beams
    model.eval()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        mask = torch.ones_like(start)
        tokens = model.generate(start, attention_mask=mask, generation_config=settings)  # pyright: ignore[reportCallIssue]
    assert isinstance(tokens, torch.Tensor)
    generated = tokens[0, start.shape[1] :]
    # A model may know more tokens than its tokenizer, such as a named shape trained on bytes.
    return tokenizer.decode(generated[generated < tokenizer.vocab_size].numpy())


def positions(model: PreTrainedModel) -> int:
    """Longest sequence the model declares."""
    positions = getattr(model.config, "max_position_embeddings", None)
    return positions if isinstance(positions, int) and positions > 0 else 1 << 40


def _config_fields(name: str) -> Mapping[str, object] | None:
    """Return the fields of config.json for a preset or named shape; None for other names."""
    key = name.lower()
    if key in _TINY:
        return _TINY[key]
    return _shape_fields(named(key)) if key in PRESET_NAMES else None


_BYTE_VOCABULARY: Final[Mapping[str, object]] = {
    "vocab_size": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def _byte_llama(hidden: int, ffn: int, layers: int, heads: int) -> Mapping[str, object]:
    return {
        **_BYTE_VOCABULARY,
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": 1024,
        # A model this narrow learns visibly faster in its first hundred steps than with the usual 0.02.
        "initializer_range": 0.05,
    }


_TINY: Final[Mapping[str, Mapping[str, object]]] = {
    "demo": _byte_llama(hidden=256, ffn=768, layers=4, heads=4),
    "tiny-llama": _byte_llama(hidden=64, ffn=192, layers=2, heads=2),
    "tiny-opt": {
        **_BYTE_VOCABULARY,
        "model_type": "opt",
        "hidden_size": 64,
        "word_embed_proj_dim": 64,
        "ffn_dim": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 1024,
    },
    "tiny-gpt2": {
        **_BYTE_VOCABULARY,
        "model_type": "gpt2",
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 1024,
    },
}

MODEL_NAMES: Final[tuple[str, ...]] = (*_TINY, *PRESET_NAMES)


def _shape_fields(shape: ModelShape) -> Mapping[str, object]:
    common = {
        "model_type": shape.family,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": shape.max_positions,
        "tie_word_embeddings": shape.tied_embeddings,
    }
    match shape.family:
        case "llama":
            specific = {"intermediate_size": shape.ffn, "num_key_value_heads": shape.kv_heads, "rms_norm_eps": 1e-5}
        case "opt":
            specific = {
                "ffn_dim": shape.ffn,
                "word_embed_proj_dim": shape.embed_dim,
                "do_layer_norm_before": shape.final_norm,
            }
        case _:
            raise AssertionError(f"no named shape is of the family {shape.family}")
    return common | specific


def _load(name: str, dtype: Dtype, dropout: float | None) -> tuple[PreTrainedModel, Path]:
    path = _existing_directory(name)
    if path is not None:
        if not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json, so it is not a Hugging Face model directory; correct --model")
        return load_directory(path, dtype, dropout), path
    try:
        patterns = ["config.json", "adapter_config.json", *_TOKENIZER_FILES]
        files = Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError) as fault:
        raise ModelError(_unknown_model_message(name, fault)) from None
    with _loading(name):
        check_files(files)
    return _from_pretrained(name, TORCH_DTYPES[dtype], dropout=dropout), files


def _existing_directory(name: str) -> Path | None:
    try:
        path = Path(name).expanduser()
        return path if path.is_dir() else None
    except (OSError, RuntimeError):  # no path at all, or the home of nobody
        return None


def _from_pretrained(
    source: str,
    dtype: torch.dtype | Literal["auto"],
    *,
    dropout: float | None = None,
    local_files_only: bool = False,
) -> PreTrainedModel:
    with _loading(source):
        config = AutoConfig.from_pretrained(source, local_files_only=local_files_only, trust_remote_code=False)
        if isinstance(dtype, torch.dtype):  # to be trained
            _check_memory(source, config, next(key for key, value in TORCH_DTYPES.items() if value == dtype))
        if dropout is not None and not _set_dropout(config, dropout) and dropout > 0:
            raise ModelError(f"{source} has no dropout to set, but --dropout is {dropout:g}; leave it out")
        return AutoModelForCausalLM.from_pretrained(
            source,
            config=config,
            dtype=dtype,
            local_files_only=local_files_only,
            trust_remote_code=False,
            use_safetensors=True,
        )


@contextmanager
def _loading(source: str) -> Iterator[None]:
    """Turn whatever a damaged or forged model causes into one sentence about it."""
    try:
        yield
    except (ModelError, KeyboardInterrupt):
        raise
    except BaseException as fault:  # parsers on a stranger's files raise anything, those in Rust no Exception
        missing = "it has no weights as .safetensors, the only format that is read"
        cause = missing if "use_safetensors" in str(fault) else cause_of(fault)
        raise ModelError(f"cannot load a causal language model from {source}: {cause}; check its files") from fault


def _set_dropout(config: Any, probability: float) -> bool:
    """Set every dropout probability in a config and its parts, whatever a family calls it; return if there was any."""
    fields: dict[str, Any] = config if isinstance(config, dict) else vars(config)
    found = False
    for name, value in list(fields.items()):
        if isinstance(value, dict) or hasattr(value, "to_dict"):
            found |= _set_dropout(value, probability)
        elif type(value) in (int, float) and ("dropout" in str(name) or str(name).endswith("_pdrop")):
            fields[name] = probability
            found = True
    return found


def _check_memory(name: str, config: PreTrainedConfig, dtype: Dtype) -> None:
    """Refuse a model whose training state does not fit into this machine's memory, before it swaps or is killed."""
    if torch.get_default_device().type == "meta":
        return
    with torch.device("meta"), _few_modules(name):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    count = sum(parameter.numel() for parameter in model.parameters())
    needed = count * _STATES * TORCH_DTYPES[dtype].itemsize + sum(buffer.nbytes for buffer in model.buffers())
    free = memory.available_bytes()
    if needed > free:
        smaller = ", --dtype bf16 for half of it" if dtype == "fp32" else ""
        raise ModelError(
            f"{name} needs {needed / 1e9:.3g} GB on the server for weights, gradients and AdamW's two moments of "
            f"{count / 1e9:.3g} G parameters in {dtype}, and {free / 1e9:.3g} GB are free; choose a smaller model"
            f"{smaller}, or a server with more memory"
        )


@contextmanager
def _few_modules(name: str) -> Iterator[None]:
    """Raise ModelError once a model under construction has too many modules: even without data they take memory."""
    modules = 0

    def count(*_: object) -> None:
        nonlocal modules
        modules += 1
        if modules > _MOST_MODULES:
            raise ModelError(f"{name} has more than {_MOST_MODULES:,} modules; correct its config.json")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    finally:
        hook.remove()


def _unknown_model_message(name: str, fault: Exception) -> str:
    close = difflib.get_close_matches(name.lower(), MODEL_NAMES, n=3, cutoff=0.6)
    presets = f"similar ones: {', '.join(close)}" if close else f"presets: {', '.join(MODEL_NAMES)}"
    if isinstance(fault, ValueError):
        elsewhere = "not a valid Hugging Face name"
    elif isinstance(fault, RepositoryNotFoundError):
        elsewhere = "not a public model on Hugging Face"
    else:
        elsewhere = "not in Hugging Face's local cache, and Hugging Face cannot be reached (offline?)"
    return (
        f"there is no model {reprlib.repr(name)}: it is not a preset ({presets}), not a directory, and {elsewhere}; "
        "correct --model"
    )
