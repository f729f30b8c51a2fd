# pyright: standard
"""Checkpoints: everything a run needs to resume as if it had never stopped, and a model Hugging Face can load.

    checkpoints/step-000120/  model.safetensors  config.json           the model, for AutoModelForCausalLM
                              optimizer.safetensors  optimizer.json    its tensors, and the tree that holds them
                              state.json                               step, data position, random states, losses
                              manifest.json                            size and checksum of each file above

A directory of that name is never half-written: files go to a sibling, `.partial-step-000120`, are synced to disk, and
the sibling is renamed. A directory to be removed is renamed first, to `.replaced-` or `.removed-`. Whenever a process
is killed, the manifests tell which of these are complete, and the best of those counts.

Nothing is pickled, so opening a stranger's checkpoint runs no code. Its manifest names only regular files in its own
directory, and everything read is checked: a checkpoint is restored, or counts as damaged, or is refused with one
sentence. Works for any torch model and optimizer; knows no training loop and no devices.
"""

from __future__ import annotations

import base64
import copy
import json
import math
import random
import re
import reprlib
import shutil
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PretrainedConfig

from cleave.disk import open_regular, read_whole, sync
from cleave.errors import CleaveError, InputError
from cleave.train.causes import cause_of

_FORMAT: Final = 1
_NAME: Final = re.compile(r"(?:\.(partial|replaced|removed)-)?step-(\d{6,})")
_TRUST: Final = ("removed", "replaced", "partial", None)  # if several of one step are complete, the last kind wins
_REQUIRED: Final = frozenset({"model.safetensors", "optimizer.safetensors", "optimizer.json", "state.json"})
_MOST_MANIFEST_BYTES: Final = 1 << 16
_MOST_JSON_BYTES: Final = 1 << 28  # a loss takes some 20 bytes in state.json, so these are ten million steps


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomState:
    """State of torch's and Python's global random generators."""

    torch_bytes: bytes
    python: tuple[int, tuple[int, ...], float | None]

    @staticmethod
    def capture() -> RandomState:
        return RandomState(torch_bytes=torch.get_rng_state().numpy().tobytes(), python=random.getstate())

    def put_back(self) -> None:
        torch.set_rng_state(self._torch_state())
        random.setstate(self.python)

    def check(self) -> None:
        """Raise some error unless `put_back` can work."""
        torch.Generator().set_state(self._torch_state())
        random.Random().setstate(self.python)

    def _torch_state(self) -> torch.Tensor:
        return torch.frombuffer(bytearray(self.torch_bytes), dtype=torch.uint8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """Position of a run after a finished step: its state apart from the tensors of model and optimizer."""

    step: int
    """Finished steps."""
    next_batch: int
    """Index of the first micro-batch not trained on yet."""
    losses: tuple[float, ...]
    """One per finished step."""
    random_state: RandomState


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    damaged: tuple[Path, ...] = ()
    """Newer, damaged ones that `latest` skipped."""


def path_of(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"step-{step:06d}"


def save(
    run: Path,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    position: Position,
    *,
    keep: int,
    spared: Collection[int] = (),
) -> Checkpoint:
    """Write a checkpoint, then remove older ones until `keep` are left besides those of `spared` steps.

    On failure, existing checkpoints are untouched and the space of the partial one is freed.
    """
    final = path_of(run, position.step)
    partial = _sibling(final, "partial")
    try:
        _recover(final.parent)
        partial.mkdir(parents=True)
        _make_room(final, _bytes_needed(model, optimizer, position), keep, spared)
        _write_files(partial, model, optimizer, position)
        sync(partial)
        if final.exists():  # damaged, or the same step saved again
            final.rename(_sibling(final, "replaced"))
        partial.rename(final)
        sync(final.parent)
        sync(run)
    except (OSError, SafetensorError) as fault:
        with suppress(OSError):
            _recover(final.parent)
        cause = fault.strerror if isinstance(fault, OSError) and fault.strerror else fault
        raise CleaveError(f"cannot write the checkpoint {final}: {cause}; make room there") from fault
    with suppress(OSError):
        for path in _surplus(final, keep, spared):
            _remove(path)
        _recover(final.parent)
    return Checkpoint(path=final, step=position.step)


def latest(run: Path, *, before: float = math.inf) -> Checkpoint | None:
    """Find the newest checkpoint whose files are complete and match their checksums; None if there is none.

    Only those of steps `before` one count. Read-only, as another process may be writing there; `save` cleans up.
    """
    skipped: list[Path] = []
    for found in sorted((entry for entry in _entries(run / "checkpoints") if entry.step < before), reverse=True):
        if _is_complete(found.path):
            return Checkpoint(path=found.path, step=found.step, damaged=tuple(skipped))
        if found.is_final:
            skipped.append(found.path)
    return None


def remove_after(run: Path, step: int) -> None:
    """Remove the checkpoints of later steps: their manifests first, so that no crash leaves one that counts."""
    later = [found.path for found in _entries(run / "checkpoints") if found.step > step]
    for path in later:
        (path / "manifest.json").unlink(missing_ok=True)
    for path in later:
        shutil.rmtree(path)


def damaged(run: Path) -> list[Path]:
    """List damaged checkpoints, oldest first."""
    found = sorted(entry for entry in _entries(run / "checkpoints") if entry.is_final)
    return [entry.path for entry in found if not _is_complete(entry.path)]


def restore(checkpoint: Checkpoint, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Position:
    """Restore model and optimizer in place. Random states are returned in the position, for `put_back`."""
    path = checkpoint.path
    with _reading(path / "state.json") as file:
        position = _position(_read_json(file), checkpoint)
    with _reading(path / "model.safetensors") as file:
        _fill(file, _unique_tensors(model))
    with _reading(path / "optimizer.json") as file:
        packed = _read_json(file)
    with _reading(path / "optimizer.safetensors") as file, safe_open(file, framework="pt") as tensors:
        tree = _unpack(packed, _each_once(tensors.get_tensor))
    try:
        _check_state(tree, optimizer)
        optimizer.load_state_dict(tree)
    except Exception as fault:  # torch checks little before it uses what it is given
        advice = "use that run's settings"
        raise InputError(f"the optimizer state in {path} does not match ({cause_of(fault)}); {advice}") from None
    return position


class _State(msgspec.Struct):
    """The content of state.json."""

    step: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    next_batch: Annotated[int, msgspec.Meta(ge=0, lt=2**40)]
    losses: tuple[float, ...]
    torch_random: str
    python_random: tuple[int, tuple[int, ...], float | None]


def _position(state: dict[str, object], checkpoint: Checkpoint) -> Position:
    if (found := state.get("format")) != _FORMAT:
        raise InputError(
            f"{checkpoint.path} has format {reprlib.repr(found)}, and this version of Cleave reads {_FORMAT}; use the "
            "version that wrote it"
        )
    read = msgspec.convert(state, _State)
    if read.step != checkpoint.step:
        raise ValueError(f"expected step {checkpoint.step}, got {read.step}")
    random_state = RandomState(torch_bytes=base64.b64decode(read.torch_random), python=read.python_random)
    random_state.check()
    return Position(step=read.step, next_batch=read.next_batch, losses=read.losses, random_state=random_state)


def _check_state(tree: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise an error unless a state belongs to these parameters. Knows Adam, which the training loop uses."""
    own = optimizer.state_dict()["param_groups"]
    if [group["params"] for group in tree["param_groups"]] != [group["params"] for group in own]:
        raise ValueError("it has other groups of parameters")
    if not isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, state in tree["state"].items():
        moments = state.keys() - {"step"}
        if not {"exp_avg", "exp_avg_sq"} <= moments <= {"exp_avg", "exp_avg_sq", "max_exp_avg_sq"}:
            raise ValueError(f"parameter {index} has {', '.join(map(repr, state))}")
        if any(state[name].shape != parameters[index].shape for name in moments):
            raise ValueError(f"the moments of parameter {index} have another shape")
        if not 0 <= float(state["step"]) < math.inf:
            raise ValueError(f"parameter {index} is at step {float(state['step'])}")


def _each_once(load: Callable[[str], torch.Tensor]) -> Callable[[str], torch.Tensor]:
    """Load each tensor only once: a tree that names one a million times would fill the memory."""
    seen: set[str] = set()

    def load_once(name: str) -> torch.Tensor:
        if name in seen:
            raise ValueError(f"{name} comes twice")
        seen.add(name)
        return load(name)

    return load_once


@contextmanager
def _reading(file: Path) -> Iterator[Path]:
    """Turn whatever a damaged or forged file causes into one sentence about it."""
    try:
        yield file
    except CleaveError:
        raise
    except Exception as fault:  # parsers on a stranger's files raise anything
        raise InputError(
            f"cannot restore {file}: {cause_of(fault)}; move {file.parent} away to resume from the checkpoint before it"
        ) from fault


# ---------------------------------------------------------------------------------------------------- directories


@dataclass(frozen=True, slots=True, order=True)
class _Entry:
    """A directory that is or was becoming a checkpoint; sorts by step, then by trust."""

    step: int
    trust: int
    path: Path

    @property
    def is_final(self) -> bool:
        """Whether it has its final name: not being written, replaced or removed."""
        return _TRUST[self.trust] is None


def _entries(directory: Path) -> list[_Entry]:
    names = [(_NAME.fullmatch(path.name), path) for path in (directory.iterdir() if directory.is_dir() else ())]
    return [_Entry(int(match[2]), _TRUST.index(match[1]), path) for match, path in names if match is not None]


def _sibling(final: Path, kind: str) -> Path:
    return final.with_name(f".{kind}-{final.name}")


def _recover(directory: Path) -> None:
    """Clean up after a crash: rename complete entries that have no complete final one, remove all others."""
    for found in sorted(_entries(directory), reverse=True):
        if not found.is_final:
            final = found.path.with_name(f"step-{found.step:06d}")
            is_best = _is_complete(found.path) and not _is_complete(final)
            if (discarded := final if is_best else found.path).exists():
                shutil.rmtree(discarded)
            if is_best:
                found.path.rename(final)


def _surplus(newest: Path, keep: int, spared: Collection[int]) -> list[Path]:
    """Checkpoints older than `newest` beyond `keep`. Newer, damaged ones do not count: good ones must stay."""
    final_entries = sorted(found for found in _entries(newest.parent) if found.is_final and found.step not in spared)
    older = [found.path for found in final_entries if found.step < int(newest.name.removeprefix("step-"))]
    return older[: max(0, len(older) - (keep - 1))]


def _remove(path: Path) -> None:
    """Rename, then remove: a half-removed checkpoint should not look like a damaged one."""
    shutil.rmtree(path.rename(_sibling(path, "removed")))


def _make_room(final: Path, needed_bytes: float, keep: int, spared: Collection[int]) -> None:
    """Remove surplus checkpoints before writing if space is short, but only if a complete one remains."""
    surplus = _surplus(final, keep, spared)
    if surplus and shutil.disk_usage(final.parent).free < needed_bytes:
        remaining = sorted(found for found in _entries(final.parent) if found.is_final and found.path not in surplus)
        if any(_is_complete(found.path) for found in reversed(remaining)):
            for path in surplus:
                _remove(path)


def _bytes_needed(model: torch.nn.Module, optimizer: torch.optim.Optimizer, position: Position) -> float:
    """Upper estimate: tensors, losses and fixed overhead."""
    tensors: dict[str, torch.Tensor] = {}
    _pack(optimizer.state_dict(), tensors, "optimizer")
    size = sum(tensor.nbytes for tensor in (*_unique_tensors(model).values(), *tensors.values()))
    return 1.02 * size + 24 * len(position.losses) + 2**16


# ---------------------------------------------------------------------------------------------------------- files


def _write_files(directory: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, position: Position) -> None:
    _write_tensors(directory / "model.safetensors", _unique_tensors(model))
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


def _is_complete(directory: Path) -> bool:
    try:
        manifest = _read_json(directory / "manifest.json", _MOST_MANIFEST_BYTES)
        most_bytes = shutil.disk_usage(directory).total  # a file with holes may claim any size
        return (
            not directory.is_symlink()
            and manifest.keys() >= _REQUIRED
            and all(
                Path(name).name == name
                and 0 <= size <= most_bytes
                and (directory / name).lstat().st_size == size
                and _checksum(directory / name) == checksum
                for name, (size, checksum) in manifest.items()
            )
        )
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):  # a damaged manifest may hold anything
        return False


def _checksum(file: Path) -> int:
    checksum = 0
    with open_regular(file, follow_links=False) as stream:
        while piece := stream.read(1 << 20):
            checksum = zlib.crc32(piece, checksum)
    return checksum


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def _read_json(path: Path, most_bytes: int = _MOST_JSON_BYTES) -> Any:
    return json.loads(read_whole(path, most_bytes, follow_links=False))


# -------------------------------------------------------------------------------------------------------- tensors


def _unique_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's tensors, each under its first name only: tied ones have several, which safetensors forbids."""
    tensors: dict[tuple[object, ...], tuple[str, torch.Tensor]] = {}
    for name, tensor in model.state_dict().items():
        key = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
        tensors.setdefault(key, (name, tensor.detach()))
    return dict(tensors.values())


def _write_tensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write tensors, copying only those not contiguous or saved twice, as they may fill most of memory."""
    seen: set[int] = set()
    for name, tensor in tensors.items():
        if not tensor.is_contiguous() or tensor.data_ptr() in seen:
            tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
        seen.add(tensor.data_ptr())
    save_file(tensors, file, metadata={"format": "pt"})


def _fill(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    with safe_open(file, framework="pt") as saved:
        if set(saved.keys()) != tensors.keys():
            mismatched = sorted(set(saved.keys()) ^ tensors.keys())
            raise InputError(
                f"{file} belongs to another model: only one of the two has {mismatched[0]}; use that run's --model"
            )
        for name, tensor in tensors.items():
            values = saved.get_tensor(name)
            if values.shape != tensor.shape or values.dtype != tensor.dtype:
                expected, got = (f"{list(each.shape)} {each.dtype}" for each in (tensor, values))
                raise InputError(
                    f"{file}: expected {name} to be {expected}, got {got}; give that run's --model, --dtype"
                )
            tensor.copy_(values)


def _pack(value: object, tensors: dict[str, torch.Tensor], name: str) -> object:
    """Convert a state_dict to JSON; tensors are set aside under their path, dicts keep their keys' types."""
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


def _unpack(value: object, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Rebuild what `_pack` packed; `tensor` loads one by name."""
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
