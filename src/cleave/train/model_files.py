# pyright: standard
"""Check the files of a model before transformers opens them, as they may come from anyone.

transformers reads whatever it finds: a pipe that never ends, a config.json whose billion layers fill the memory,
weights in a format that can carry code, names of code to fetch. This module looks first and refuses with one sentence.
It loads nothing itself.
"""

from __future__ import annotations

import json
import re
import reprlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from transformers import CONFIG_MAPPING

from cleave.disk import read_whole
from cleave.errors import ModelError
from cleave.printable import printable
from cleave.train.causes import cause_of

_MOST_CONFIG_BYTES: Final = 1 << 24
_MOST_TEXT_BYTES: Final = 1 << 27
"""Bytes of a tokenizer or an index; the largest known tokenizers have some 35 MB."""
_TEXTS: Final = frozenset({".json", ".txt", ".jinja", ".model", ".bpe", ".tiktoken"})
_PICKLES: Final = frozenset({".bin", ".pt", ".pth", ".ckpt", ".pkl"})
_COUNTS: Final = re.compile(r"layers?$|layers?_|labels$")
"""Fields of a config that say how often something is repeated; transformers makes lists of that length."""
_MOST_PARTS: Final = 4096
_IMPLEMENTATIONS: Final = ("attn_implementation", "experts_implementation")


def check_files(directory: Path) -> None:
    """Raise ModelError unless transformers can open config and tokenizer without waiting or running code."""
    if (directory / "adapter_config.json").exists():
        raise ModelError(
            f"{directory} holds an adapter (adapter_config.json), and cleave train loads whole models; merge it with "
            "merge_and_unload of PEFT, and save that"
        )
    try:
        for entry in directory.iterdir():
            if entry.exists() and not entry.is_file() and not entry.is_dir():
                raise ModelError(f"{printable(str(entry))} is a pipe or a device, not a file; remove it")
            if entry.suffix in _TEXTS and entry.is_file() and entry.stat().st_size > _MOST_TEXT_BYTES:
                raise ModelError(f"{printable(str(entry))} has more than {_MOST_TEXT_BYTES:,} bytes; check that file")
    except OSError as fault:
        raise ModelError(f"cannot read {directory}: {fault.strerror}; make it readable") from None
    _check_config(directory)


def check_weights(directory: Path) -> None:
    """Raise ModelError if the weights are pickled, which can carry code, or lie outside the directory."""
    index = directory / "model.safetensors.index.json"
    pickled = sorted(path.name for path in directory.iterdir() if path.suffix in _PICKLES)
    if pickled and not index.exists() and not any(directory.glob("*.safetensors")):
        raise ModelError(
            f"expected weights as .safetensors in {directory}, got only {printable(pickled[0])}, a format that can "
            "carry code; convert a model you trust with AutoModelForCausalLM.from_pretrained(OLD).save_pretrained(NEW)"
        )
    if index.exists():
        names = _read_object(index, _MOST_TEXT_BYTES).get("weight_map")
        for name in set(names.values() if isinstance(names, dict) else [None]):
            if not isinstance(name, str) or Path(name).name != name or not (directory / name).is_file():
                raise ModelError(
                    f"{index} names {printable(str(name))}, which is no file beside it; complete the files"
                )


def _check_config(directory: Path) -> None:
    config = _read_object(directory / "config.json", _MOST_CONFIG_BYTES)
    family = config.get("model_type")
    if config.get("auto_map") and not (isinstance(family, str) and family in CONFIG_MAPPING):
        raise ModelError(
            f"{directory} brings its own code (auto_map in config.json), which Cleave never runs; use a model of a "
            "family that transformers knows"
        )
    for key, value in _fields(config):
        if _COUNTS.search(key) and isinstance(value, int | float) and value > _MOST_PARTS:
            raise ModelError(
                f"expected {printable(key)} in {directory / 'config.json'} to be at most {_MOST_PARTS:,}, got "
                f"{reprlib.repr(value)}; correct that field"
            )
        if key.lstrip("_").startswith(_IMPLEMENTATIONS) and "/" in str(value):
            raise ModelError(
                f"{directory / 'config.json'} names code to fetch ({printable(key)}), which Cleave never runs; "
                "remove that field"
            )


def _fields(config: dict[str, object]) -> Iterator[tuple[str, object]]:
    """Yield every field of a config and of the configs and lists in it."""
    waiting: list[tuple[str, object]] = list(config.items())
    while waiting:
        key, value = waiting.pop()
        yield key, value
        if isinstance(value, dict):
            waiting += value.items()
        elif isinstance(value, list):
            waiting += ((key, item) for item in value if isinstance(item, dict | list))


def _read_object(file: Path, most_bytes: int) -> dict[str, object]:
    try:
        value = json.loads(read_whole(file, most_bytes))
    except (OSError, ValueError, RecursionError) as fault:
        raise ModelError(f"cannot read {file}: {cause_of(fault)}; check that file") from None
    if not isinstance(value, dict):
        raise ModelError(f"expected an object in {file}, got a {type(value).__name__}; check that file")
    return value
