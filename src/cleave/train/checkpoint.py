# pyright: standard
"""Checkpoints: all that a run needs to go on as if it had never stopped, and a model that Hugging Face loads.

    checkpoints/step-000120/  model.safetensors  config.json           the model, for AutoModelForCausalLM
                              optimizer.safetensors  optimizer.json    its tensors, and the tree they hang in
                              state.json                               step, data position, random states, losses
                              manifest.json                            size and checksum of each file above

A directory of that name is never half-written: its files go to a sibling, `.partial-step-000120`, are forced to disk,
and the sibling is renamed. One that makes way is renamed too before it is removed, `.replaced-` or `.removed-`. At
whatever moment a process is killed, the manifests tell which of all these are whole, and the best of them counts.

Nothing is pickled, so opening a stranger's checkpoint runs no code of theirs. Any torch model and optimizer will do;
this module knows no training loop and no devices.
"""

from __future__ import annotations

import base64
import copy
import json
import random
import re
import shutil
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig

from cleave.disk import sync
from cleave.errors import CleaveError, InputError

_FORMAT: Final = 1
_NAME: Final = re.compile(r"(?:\.(partial|replaced|removed)-)?step-(\d{6,})")
_TRUST: Final = ("removed", "replaced", "partial", None)  # of one step, which counts if several are whole: the last
_REQUIRED: Final = frozenset({"model.safetensors", "optimizer.safetensors", "optimizer.json", "state.json"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """Of torch's and Python's global generators."""

    torch_bytes: bytes
    python: tuple[int, tuple[int, ...], float | None]

    @staticmethod
    def capture() -> RandomState:
        return RandomState(torch_bytes=torch.get_rng_state().numpy().tobytes(), python=random.getstate())

    def put_back(self) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch_bytes), dtype=torch.uint8))
        random.setstate(self.python)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Where a run stands after a finished step: what it needs beside the tensors of model and optimizer."""

    step: int
    """Finished steps."""
    next_batch: int
    """Index of the first micro-batch not trained on yet."""
    losses: tuple[float, ...]
    """Of every finished step."""
    random_state: RandomState


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    path: Path
    step: int
    damaged: tuple[Path, ...] = ()
    """Newer ones that `latest` passed over."""


def path_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def save(
    run: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, position: Position, *, keep: int
) -> Checkpoint:
    """Write a checkpoint, then remove older ones until `keep` are left.

    If that fails, all that was there is still there, and the space that half of a checkpoint took is given back.
    """
    final = path_of(run, position.step)
    partial = _aside(final, "partial")
    try:
        _settle(final.parent)
        partial.mkdir(parents=True)
        _make_room(final, _bytes_needed(model, optimizer, position), keep)
        _write_files(partial, model, optimizer, position)
        sync(partial)
        if final.exists():  # damaged, or the same step again
            final.rename(_aside(final, "replaced"))
        partial.rename(final)
        sync(final.parent)
        sync(run)
    except (OSError, SafetensorError) as fault:
        with suppress(OSError):
            _settle(final.parent)
        cause = fault.strerror if isinstance(fault, OSError) and fault.strerror else fault
        raise CleaveError(f"cannot write the checkpoint {final}: {cause}; make room there") from fault
    with suppress(OSError):
        for path in _surplus(final, keep):
            _remove(path)
        _settle(final.parent)
    return Checkpoint(path=final, step=position.step)


def latest(run: Path) -> Checkpoint | None:
    """The newest checkpoint whose files are all there and have their checksums; None if there is none.

    It only looks, for another process may be writing there; `save` clears up.
    """
    passed_over: list[Path] = []
    for found in sorted(_found(run / "checkpoints"), reverse=True):
        if _is_whole(found.path):
            return Checkpoint(path=found.path, step=found.step, damaged=tuple(passed_over))
        if found.is_proper:
            passed_over.append(found.path)
    return None


def damaged(run: Path) -> list[Path]:
    """What should be checkpoints and is none, the oldest first."""
    found = sorted(one for one in _found(run / "checkpoints") if one.is_proper)
    return [one.path for one in found if not _is_whole(one.path)]


def restore(checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Position:
    """Fill model and optimizer in place. The random states come back in the position, for `put_back`."""
    path = checkpoint.path
    state = _read_json(path / "state.json")
    if state.get("format") != _FORMAT:
        found = state.get("format")
        raise InputError(f"{path} has format {found}, this Cleave reads {_FORMAT}; use the Cleave that wrote it")
    _fill(path / "model.safetensors", _unshared(model))
    with safe_open(path / "optimizer.safetensors", framework="pt") as tensors:
        tree = _unpack(_read_json(path / "optimizer.json"), tensors.get_tensor)
    try:
        optimizer.load_state_dict(tree)
    except (ValueError, KeyError) as fault:
        raise InputError(f"the optimizer in {path} is another one ({fault}); use the settings of that run") from None
    version, numbers, gauss = state["python_random"]
    return Position(
        step=state["step"],
        next_batch=state["next_batch"],
        losses=tuple(state["losses"]),
        random_state=RandomState(
            torch_bytes=base64.b64decode(state["torch_random"]), python=(version, tuple(numbers), gauss)
        ),
    )


# ---------------------------------------------------------------------------------------------------- directories


@dataclass(frozen=True, slots=True, order=True)
class _Found:
    step: int
    trust: int
    path: Path

    @property
    def is_proper(self) -> bool:
        """Not one that was being written, replaced or removed."""
        return _TRUST[self.trust] is None


def _found(directory: Path) -> list[_Found]:
    names = [(_NAME.fullmatch(path.name), path) for path in (directory.iterdir() if directory.is_dir() else ())]
    return [_Found(int(match[2]), _TRUST.index(match[1]), path) for match, path in names if match is not None]


def _aside(final: Path, why: str) -> Path:
    return final.with_name(f".{why}-{final.name}")


def _settle(directory: Path) -> None:
    """Finish what a crash or a fault broke off: a whole one without a whole namesake gets its name, the rest goes."""
    for found in sorted(_found(directory), reverse=True):
        if not found.is_proper:
            final = found.path.with_name(f"step-{found.step:06d}")
            is_best = _is_whole(found.path) and not _is_whole(final)
            if (worse := final if is_best else found.path).exists():
                shutil.rmtree(worse)
            if is_best:
                found.path.rename(final)


def _surplus(newest: Path, keep: int) -> list[Path]:
    """Only what is older than the newest: a damaged one of a later step must not push out good ones."""
    proper = sorted(found for found in _found(newest.parent) if found.is_proper)
    older = [found.path for found in proper if found.step < int(newest.name.removeprefix("step-"))]
    return older[: max(0, len(older) - (keep - 1))]


def _remove(path: Path) -> None:
    """Not in its place: half of a checkpoint should not look like a damaged one."""
    shutil.rmtree(path.rename(_aside(path, "removed")))


def _make_room(final: Path, needed_bytes: float, keep: int) -> None:
    """Where space is short, what the new one will push out goes first, but only if a whole one is left."""
    surplus = _surplus(final, keep)
    if surplus and shutil.disk_usage(final.parent).free < needed_bytes:
        staying = sorted(found for found in _found(final.parent) if found.is_proper and found.path not in surplus)
        if any(_is_whole(found.path) for found in reversed(staying)):
            for path in surplus:
                _remove(path)


def _bytes_needed(model: torch.nn.Module, optimizer: torch.optim.Optimizer, position: Position) -> float:
    """An estimate from above: the tensors, and what is written of each loss and beside all that."""
    tensors: dict[str, torch.Tensor] = {}
    _pack(optimizer.state_dict(), tensors, "optimizer")
    size = sum(tensor.nbytes for tensor in (*_unshared(model).values(), *tensors.values()))
    return 1.02 * size + 24 * len(position.losses) + 2**16


# ---------------------------------------------------------------------------------------------------------- files


def _write_files(directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, position: Position) -> None:
    _write_tensors(directory / "model.safetensors", _unshared(model))
    config = getattr(model, "config", None)
    if isinstance(config, PretrainedConfig):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        config.use_cache = True  # off in training only
        config.save_pretrained(directory)
    tensors: dict[str, torch.Tensor] = {}
    _write_json(directory / "optimizer.json", _pack(optimizer.state_dict(), tensors, "optimizer"))
    _write_tensors(directory / "optimizer.safetensors", tensors)
    state = {
        "format": _FORMAT,
        "step": position.step,
        "next_batch": position.next_batch,
        "losses": position.losses,
        "torch_random": base64.b64encode(position.random_state.torch_bytes).decode(),
        "python_random": position.random_state.python,
    }
    _write_json(directory / "state.json", state)
    files = sorted(directory.iterdir())
    _write_json(directory / "manifest.json", {file.name: [file.stat().st_size, _checksum(file)] for file in files})
    for file in directory.iterdir():
        sync(file)


def _is_whole(directory: Path) -> bool:
    try:
        manifest = _read_json(directory / "manifest.json")
        return manifest.keys() >= _REQUIRED and all(
            (directory / name).stat().st_size == size and _checksum(directory / name) == checksum
            for name, (size, checksum) in manifest.items()
        )
    except (OSError, ValueError, TypeError, AttributeError):  # whatever a damaged manifest may hold
        return False


def _checksum(file: Path) -> int:
    checksum = 0
    with file.open("rb") as stream:
        while piece := stream.read(1 << 20):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# -------------------------------------------------------------------------------------------------------- tensors


def _unshared(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's own tensors, each under the first of its names: tied ones have several, safetensors allows one."""
    tensors: dict[tuple[object, ...], tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        tensors.setdefault(key, (name, tensor.detach()))
    return dict(tensors.values())


def _write_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Copies only what is scattered in memory or named twice, for the tensors may fill most of it."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if not tensor.is_contiguous() or tensor.data_ptr() in seen:
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
        seen.add(tensor.data_ptr())
    save_file(tensors, file, metadata={"format": "pt"})


def _fill(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    with safe_open(file, framework="pt") as saved:
        if set(saved.keys()) != tensors.keys():
            odd = sorted(set(saved.keys()) ^ tensors.keys())
            raise InputError(f"{file} is of another model: {odd[0]} is only in one of the two; use that run's --model")
        for name, tensor in tensors.items():
            values = saved.get_tensor(name)
            if values.shape != tensor.shape or values.dtype != tensor.dtype:
                expected, got = (f"{list(one.shape)} {one.dtype}" for one in (tensor, values))
                raise InputError(
                    f"{file}: expected {name} to be {expected}, got {got}; give that run's --model, --dtype"
                )
            tensor.copy_(values)


def _pack(value: object, tensors: dict[str, torch.Tensor], name: str) -> object:
    """A state_dict as JSON; tensors go aside under the path that leads to them, dicts keep their keys' types."""
    match value:
        case torch.Tensor():
            tensors[name] = value.detach()
            return {"tensor": name}
        case dict():
            return {"dict": [[key, _pack(item, tensors, f"{name}.{key}")] for key, item in value.items()]}
        case list() | tuple():
            items = [_pack(item, tensors, f"{name}.{index}") for index, item in enumerate(value)]
            return {"tuple": items} if isinstance(value, tuple) else items
        case None | bool() | int() | float() | str():
            return value
        case _:
            raise CleaveError(f"cannot save {name} of the optimizer: it is a {type(value).__name__}; use another")


def _unpack(value: Any, tensor: Any) -> Any:
    match value:
        case {"tensor": name}:
            return tensor(name)
        case {"dict": pairs}:
            return {key: _unpack(item, tensor) for key, item in pairs}
        case {"tuple": items}:
            return tuple(_unpack(item, tensor) for item in items)
        case list():
            return [_unpack(item, tensor) for item in value]
        case _:
            return value
