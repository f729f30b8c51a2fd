"""A forged checkpoint counts as damaged or is refused with one sentence: nothing hangs, nothing outside it is read.

A forger knows the format, so most cases here have a manifest that matches what was changed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import tempfile
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cleave.errors import InputError
from cleave.train.checkpoint import Checkpoint, Position, RandomState, latest, path_of, restore, save

Forge = Callable[[Path], object]


def _machine() -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def _save(run: Path, step: int) -> Path:
    position = Position(step=step, next_batch=step, losses=(1.0,) * step, random_state=RandomState.capture())
    save(run, *_machine(), position, keep=9)
    return path_of(run, step)


def _seal(directory: Path) -> None:
    """Write the manifest that fits the files as they are."""
    files = [file for file in directory.iterdir() if file.name != "manifest.json"]
    manifest = {file.name: [file.stat().st_size, zlib.crc32(file.read_bytes())] for file in files}
    (directory / "manifest.json").write_text(json.dumps(manifest))


def _name(name: str, entry: object = (0, 0)) -> Forge:
    """Add a name to the manifest."""

    def forge(directory: Path) -> None:
        manifest = json.loads((directory / "manifest.json").read_text())
        (directory / "manifest.json").write_text(json.dumps({**manifest, name: entry}))

    return forge


def _replace(name: str, make: Callable[[Path], object]) -> Forge:
    """Replace a file, whose entry in the manifest claims that it is empty."""

    def forge(directory: Path) -> None:
        (directory / name).unlink()
        make(directory / name)
        _name(name)(directory)

    return forge


def _move_away(directory: Path, name: str = "state.json") -> None:
    """Replace a file with a link to an equal one elsewhere."""
    elsewhere = directory.parent.parent / name
    (directory / name).rename(elsewhere)
    (directory / name).symlink_to(elsewhere)


def _link_directory(directory: Path) -> None:
    directory.rename(directory.parent.parent / "elsewhere")
    directory.symlink_to(directory.parent.parent / "elsewhere")


def _with_holes(directory: Path) -> None:
    """Claim a file of an exabyte, which takes no space."""
    size = 1 << 60
    try:
        os.truncate(directory / "model.safetensors", size)
    except OSError:  # this file system has smaller files
        size = 1 << 43
        os.truncate(directory / "model.safetensors", size)
    _name("model.safetensors", [size, 0])(directory)


NESTED = "[" * 100_000

DAMAGED: dict[str, Forge] = {
    "pipe": _replace("state.json", os.mkfifo),
    "another pipe": lambda directory: (os.mkfifo(directory / "x"), _name("x")(directory)),
    "endless device": _replace("optimizer.json", lambda file: file.symlink_to("/dev/zero")),
    "device by path": _name("/dev/zero"),
    "link": _move_away,
    "link of a directory": _link_directory,
    "parent": _name("../../other"),
    "absolute path": _name("/etc/hostname"),
    "directory": _name("."),
    "parent directory": _name(".."),
    "nothing": _name(""),
    "nul": _name("a\0b"),
    "very long name": _name("x" * 5000),
    "surrogate": _name("\udcff"),
    "holes": _with_holes,
    "negative size": _name("state.json", [-1, 0]),
    "size is not a number": _name("state.json", [math.nan, 0]),
    "size beyond a float": _name("state.json", [10**400, 0]),
    "text as entry": _name("state.json", "ab"),
    "null as entry": _name("state.json", None),
    "truncated": lambda directory: os.truncate(directory / "manifest.json", 20),
    "nested": lambda directory: (directory / "manifest.json").write_text(NESTED),
    "nested object": lambda directory: (directory / "manifest.json").write_text('{"a":' * 100_000),
    "not UTF-8": lambda directory: (directory / "manifest.json").write_bytes(b'{"\xff": 1}'),
    "huge number": lambda directory: (directory / "manifest.json").write_text("1" * 10_000),
    "huge manifest": lambda directory: os.truncate(directory / "manifest.json", 1 << 40),
    "pipe as manifest": lambda directory: (
        (directory / "manifest.json").unlink(),
        os.mkfifo(directory / "manifest.json"),
    ),
    "device as manifest": lambda directory: (
        (directory / "manifest.json").unlink(),
        (directory / "manifest.json").symlink_to("/dev/zero"),
    ),
}


@pytest.mark.parametrize("forge", DAMAGED.values(), ids=DAMAGED)
def test_a_manifest_of_anything_but_own_regular_files_is_damaged(tmp_path: Path, forge: Forge) -> None:
    _save(tmp_path, 4)
    forge(_save(tmp_path, 5))
    found = latest(tmp_path)
    assert found is not None
    assert (found.step, found.damaged) == (4, (path_of(tmp_path, 5),))


def _change(file: str, key: str, value: object) -> Forge:
    def forge(directory: Path) -> None:
        content = json.loads((directory / file).read_text())
        (directory / file).write_text(json.dumps({**content, key: value}))

    return forge


def _write(file: str, content: str | bytes) -> Forge:
    raw = content if isinstance(content, bytes) else content.encode()
    return lambda directory: (directory / file).write_bytes(raw)


def _tensors(header: object, body: bytes = b"", *, length: int | None = None) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def _tree(edit: Callable[[dict[str, object], dict[int, dict[str, object]]], object]) -> Forge:
    """Edit the packed optimizer tree: its top, and the packed state of each parameter."""

    def forge(directory: Path) -> None:
        packed = json.loads((directory / "optimizer.json").read_text())
        top = dict(packed["dict"])
        states = {index: dict(state["dict"]) for index, state in top["state"]["dict"]}
        edit(top, states)
        if isinstance(top.get("state"), dict):
            top["state"] = {"dict": [[index, {"dict": list(state.items())}] for index, state in states.items()]}
        (directory / "optimizer.json").write_text(json.dumps({"dict": list(top.items())}))

    return forge


def _tensor(name: str) -> dict[str, str]:
    return {"tensor": f"optimizer.state.{name}"}


FORGED: dict[str, tuple[str, Forge]] = {
    "other step": ("state.json", _change("state.json", "step", 6)),
    "step is not a number": ("state.json", _change("state.json", "step", math.nan)),
    "step is a text": ("state.json", _change("state.json", "step", "5")),
    "negative batch": ("state.json", _change("state.json", "next_batch", -1)),
    "absurd batch": ("state.json", _change("state.json", "next_batch", 10**30)),
    "batch is infinite": ("state.json", _change("state.json", "next_batch", math.inf)),
    "losses are texts": ("state.json", _change("state.json", "losses", ["a"])),
    "losses are a number": ("state.json", _change("state.json", "losses", 3)),
    "torch state too short": ("state.json", _change("state.json", "torch_random", "AAAA")),
    "torch state empty": ("state.json", _change("state.json", "torch_random", "")),
    "torch state is no base64": ("state.json", _change("state.json", "torch_random", "é")),
    "torch state of zeros": ("state.json", _change("state.json", "torch_random", "A" * 6744)),
    "torch state too long": ("state.json", _change("state.json", "torch_random", "A" * 1_000_000)),
    "python state too short": ("state.json", _change("state.json", "python_random", [3, [1, 2], None])),
    "python state too large": ("state.json", _change("state.json", "python_random", [3, [2**70] * 625, None])),
    "python state of a wrong kind": ("state.json", _change("state.json", "python_random", [3, ["a"] * 625, None])),
    "python state of a wrong version": ("state.json", _change("state.json", "python_random", [9, [0] * 625, None])),
    "state is a list": ("state.json", _write("state.json", "[]")),
    "state is empty": ("state.json", _write("state.json", "")),
    "state is truncated": ("state.json", _write("state.json", '{"format": 1, "step"')),
    "state is nested": ("state.json", _write("state.json", NESTED)),
    "state is not UTF-8": ("state.json", _write("state.json", b'{"\xff": 1}')),
    "state is another format": ("step-000005", _change("state.json", "format", {"a": 1})),
    "tree is nested": ("optimizer.json", _write("optimizer.json", NESTED)),
    "tree is deep": ("optimizer", _write("optimizer.json", '{"tuple":[' * 400 + "1" + "]}" * 400)),
    "tree is a number": ("optimizer", _write("optimizer.json", "3")),
    "tree is empty": ("optimizer", _write("optimizer.json", '{"dict": []}')),
    "tree of odd pairs": ("optimizer.safetensors", _write("optimizer.json", '{"dict": [1]}')),
    "tree with a list as key": ("optimizer.safetensors", _write("optimizer.json", '{"dict": [[[1], 2]]}')),
    "tree of an unknown tensor": ("optimizer.safetensors", _write("optimizer.json", '{"tensor": "weights"}')),
    "tree of a numbered tensor": ("optimizer.safetensors", _write("optimizer.json", '{"tensor": 3}')),
    "one tensor many times": (
        "optimizer.safetensors",
        _write("optimizer.json", json.dumps([_tensor("0.exp_avg")] * 100_000)),
    ),
    "unknown parameter": ("optimizer", _tree(lambda top, states: states.update({7: {}}))),
    "parameter by name": ("optimizer", _tree(lambda top, states: states.update({"weight": {}}))),  # pyright: ignore
    "unknown state": ("optimizer", _tree(lambda top, states: states[0].update({"extra": 1}))),
    "missing state": ("optimizer", _tree(lambda top, states: states[0].pop("exp_avg"))),
    "number as moment": ("optimizer", _tree(lambda top, states: states[0].update({"exp_avg": 1.5}))),
    "moment of another": (
        "optimizer",
        _tree(lambda top, states: states.update({0: states[1], 1: states[0]})),
    ),
    "step of the optimizer": ("optimizer", _tree(lambda top, states: states[0].update({"step": math.nan}))),
    "step without end": ("optimizer", _tree(lambda top, states: states[0].update({"step": math.inf}))),
    "no groups": ("optimizer", _tree(lambda top, states: top.update({"param_groups": []}))),
    "odd groups": ("optimizer", _tree(lambda top, states: top.update({"param_groups": 5}))),
    "odd state": ("optimizer", _tree(lambda top, states: top.update({"state": []}))),
    "header beyond the file": ("model.safetensors", _write("model.safetensors", _tensors({}, length=1 << 40))),
    "header of any length": ("model.safetensors", _write("model.safetensors", _tensors({}, length=2**64 - 1))),
    "no header": ("model.safetensors", _write("model.safetensors", b"")),
    "header is no JSON": ("model.safetensors", _write("model.safetensors", struct.pack("<Q", 4) + b"abcd")),
    "header is nested": (
        "model.safetensors",
        _write("model.safetensors", struct.pack("<Q", 100_000) + NESTED.encode()),
    ),
    "overlapping tensors": (
        "model.safetensors",
        _write(
            "model.safetensors",
            _tensors(
                {
                    "weight": {"dtype": "F32", "shape": [3, 4], "data_offsets": [0, 48]},
                    "bias": {"dtype": "F32", "shape": [3], "data_offsets": [36, 48]},
                },
                bytes(48),
            ),
        ),
    ),
    "tensors beyond the file": (
        "optimizer.safetensors",
        _write(
            "optimizer.safetensors",
            _tensors({"a": {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]}}),
        ),
    ),
    "absurd shape": (
        "optimizer.safetensors",
        _write(
            "optimizer.safetensors",
            _tensors({"a": {"dtype": "F32", "shape": [1 << 63, 1 << 63], "data_offsets": [0, 0]}}),
        ),
    ),
}


@pytest.mark.parametrize(("named", "forge"), FORGED.values(), ids=FORGED)
def test_forged_content_is_refused_by_its_name(tmp_path: Path, named: str, forge: Forge) -> None:
    directory = _save(tmp_path, 5)
    forge(directory)
    _seal(directory)
    found = latest(tmp_path)
    assert found is not None, "the manifest matches"
    with pytest.raises(InputError, match=named) as caught:
        restore(found, *_machine())
    assert "\n" not in str(caught.value)
    assert "step-000005" in str(caught.value)


def test_a_huge_state_is_not_read(tmp_path: Path) -> None:
    directory = _save(tmp_path, 5)
    os.truncate(directory / "state.json", 1 << 34)
    with pytest.raises(InputError, match=r"state\.json: .*bytes"):
        restore(Checkpoint(path=directory, step=5), *_machine())


# ---------------------------------------------------------------------------------------------------- any mutation

JSON_FILES = ("manifest.json", "state.json", "optimizer.json")
ODD = st.sampled_from(
    [None, True, -1, 0, 10**30, 1e308, math.nan, "", "x", [], {}, [[]], {"tensor": "x"}, {"dict": [1]}, {"tuple": 3}]
)


@pytest.fixture(scope="module")
def sound() -> dict[str, bytes]:
    with tempfile.TemporaryDirectory() as run:
        return {file.name: file.read_bytes() for file in _save(Path(run), 5).iterdir()}


@settings(max_examples=150)
@given(data=st.data())
def test_any_mutation_restores_or_is_refused(sound: dict[str, bytes], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as run:
        directory = path_of(Path(run), 5)
        directory.mkdir(parents=True)
        for name, raw in sound.items():
            (directory / name).write_bytes(raw)
        name = data.draw(st.sampled_from(JSON_FILES))
        (directory / name).write_bytes(data.draw(_mutated(sound[name])))
        if name != "manifest.json":
            _seal(directory)
        found = latest(Path(run))
        if found is not None:
            with suppress(InputError):
                restore(found, *_machine()).random_state.put_back()


def _mutated(raw: bytes) -> st.SearchStrategy[bytes]:
    """Cut, flip or replace some bytes, or put another value somewhere into the tree."""
    places = st.integers(0, len(raw) - 1)
    cut = places.map(lambda place: raw[:place])
    flipped = st.builds(lambda place, byte: raw[:place] + bytes([byte]) + raw[place + 1 :], places, st.integers(0, 255))
    paths = _paths(json.loads(raw))
    planted = st.builds(
        lambda path, value: json.dumps(_planted(json.loads(raw), path, value)).encode(), st.sampled_from(paths), ODD
    )
    return cut | flipped | planted


def _paths(value: object) -> list[tuple[object, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    below = [(key, *path) for key, item in list(pairs)[:8] for path in _paths(item)]
    return [(), *below]


def _planted(tree: object, path: tuple[object, ...], value: object) -> object:
    if not path:
        return value
    tree[path[0]] = _planted(tree[path[0]], path[1:], value)  # pyright: ignore
    return tree


def test_an_intact_checkpoint_is_still_restored(tmp_path: Path) -> None:
    directory = _save(tmp_path, 5)
    shutil.copytree(directory, path_of(tmp_path, 6))
    _change("state.json", "step", 6)(path_of(tmp_path, 6))
    _seal(path_of(tmp_path, 6))
    found = latest(tmp_path)
    assert found is not None
    assert restore(found, *_machine()).step == 6
