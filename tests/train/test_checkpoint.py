"""A checkpoint restores exactly what was saved, and a damaged one is never restored."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from cleave.errors import CleaveError, InputError
from cleave.train.checkpoint import Position, RandomState, damaged, latest, path_of, restore, save
from cleave.train.models import build_model

MakeOptimizer = Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, betas=(0.8, 0.9), amsgrad=True),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "sgd-plain": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters),
    "rprop": lambda parameters: torch.optim.Rprop(parameters, lr=0.01, etas=(0.4, 1.3)),
}


def _position(step: int) -> Position:
    losses = tuple(1 / (index + 3) for index in range(step))
    return Position(step=step, next_batch=3 * step, losses=losses, random_state=RandomState.capture())


def _trained(model: torch.nn.Module, make: MakeOptimizer, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = make(list(model.parameters()))
    for _ in range(steps):
        _step(model, optimizer)
    return optimizer


def _step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    sum(parameter.float().square().sum() for parameter in model.parameters()).backward()  # pyright: ignore
    optimizer.step()


def _saved(run: Path, steps: list[int], keep: int = 99) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(4, 3)
    optimizer = _trained(model, OPTIMIZERS["adamw"])
    for step in steps:
        save(run, model, optimizer, _position(step), keep=keep)
    return model, optimizer


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_any_optimizer_continues_after_a_restore_exactly_as_without(tmp_path: Path, make: MakeOptimizer) -> None:
    model, other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    optimizer, fresh = _trained(model, make), make(list(other.parameters()))
    written = save(tmp_path, model, optimizer, _position(2), keep=1)
    position = restore(written, other, fresh)
    assert (position.step, position.next_batch, position.losses) == (2, 6, (1 / 3, 1 / 4))
    _step(model, optimizer)
    _step(other, fresh)
    assert torch.equal(model.weight, other.weight)
    assert torch.equal(model.bias, other.bias)


def test_random_numbers_continue_where_they_stopped(tmp_path: Path) -> None:
    torch.rand(7), random.random()
    model, optimizer = _saved(tmp_path, [5])
    drawn = torch.rand(3).tolist(), random.random()
    torch.manual_seed(0)
    random.seed(0)
    checkpoint = latest(tmp_path)
    assert checkpoint is not None
    restore(checkpoint, model, optimizer).random_state.put_back()
    assert (torch.rand(3).tolist(), random.random()) == drawn


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-opt", "tiny-gpt2"])
def test_hugging_face_loads_a_checkpoint_and_gives_the_same_logits(tmp_path: Path, name: str, dtype: str) -> None:
    model, _ = build_model(name, dtype, seed=1)  # pyright: ignore[reportArgumentType]
    optimizer = _trained(model, OPTIMIZERS["adamw-fused"], steps=1)
    written = save(tmp_path, model, optimizer, _position(1), keep=1)
    loaded = AutoModelForCausalLM.from_pretrained(written.path)
    tokens = torch.arange(64).view(1, 64)
    assert loaded.dtype == model.dtype
    assert torch.equal(loaded(input_ids=tokens).logits, model(input_ids=tokens).logits)
    assert loaded.config.use_cache


def test_tied_weights_are_written_once_and_stay_tied(tmp_path: Path) -> None:
    model, _ = build_model("tiny-gpt2", "fp32", seed=1)
    other, _ = build_model("tiny-gpt2", "fp32", seed=2)
    written = save(tmp_path, model, OPTIMIZERS["sgd"](list(model.parameters())), _position(1), keep=1)
    size = sum(4 * parameter.numel() for parameter in model.parameters())
    assert (written.path / "model.safetensors").stat().st_size < size + 10_000
    restore(written, other, OPTIMIZERS["sgd"](list(other.parameters())))
    assert other.lm_head.weight.data_ptr() == other.transformer.wte.weight.data_ptr()
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())


def test_weights_scattered_in_memory_are_restored_in_place(tmp_path: Path) -> None:
    model, other = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)
    for one in (model, other):
        one.weight = torch.nn.Parameter(torch.rand(4, 3).T)
    written = save(tmp_path, model, OPTIMIZERS["sgd-plain"](list(model.parameters())), _position(1), keep=1)
    restore(written, other, OPTIMIZERS["sgd-plain"](list(other.parameters())))
    assert torch.equal(model.weight, other.weight)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: (path / "model.safetensors").unlink(),
        lambda path: (path / "optimizer.safetensors").write_bytes(b"short"),
        lambda path: (path / "state.json").write_bytes((path / "state.json").read_bytes().replace(b"5", b"6", 1)),
        lambda path: (path / "manifest.json").unlink(),
        lambda path: (path / "manifest.json").write_text("{"),
        lambda path: (path / "manifest.json").write_text("{}"),
        lambda path: (path / "manifest.json").write_text("[1]"),
        lambda path: (path / "manifest.json").write_text('{"state.json": 3}'),
    ],
    ids=["missing", "short", "flipped", "no-manifest", "torn-manifest", "empty-manifest", "odd-manifest", "odd-entry"],
)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    _saved(tmp_path, [4, 5])
    damage(path_of(tmp_path, 5))
    checkpoint = latest(tmp_path)
    assert checkpoint is not None
    assert (checkpoint.step, checkpoint.damaged) == (4, (path_of(tmp_path, 5),))


def test_without_an_intact_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    _saved(tmp_path, [5])
    (path_of(tmp_path, 5) / "state.json").unlink()
    assert latest(tmp_path) is None


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    _saved(tmp_path, [1, 2, 3, 4], keep=2)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step-000003", "step-000004"]


def test_a_damaged_later_checkpoint_never_displaces_a_good_one_and_is_replaced(tmp_path: Path) -> None:
    model, optimizer = _saved(tmp_path, [1, 9])
    (path_of(tmp_path, 9) / "state.json").unlink()
    save(tmp_path, model, optimizer, _position(2), keep=1)
    good = latest(tmp_path)
    assert good is not None
    assert good.step == 2
    save(tmp_path, model, optimizer, _position(9), keep=1)
    good = latest(tmp_path)
    assert good is not None
    assert good.step == 9
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-000009"]


def test_a_half_written_checkpoint_is_ignored_and_cleared_away(tmp_path: Path) -> None:
    model, optimizer = _saved(tmp_path, [1])
    rest = tmp_path / "checkpoints" / ".partial-step-000002"
    rest.mkdir()
    (rest / "model.safetensors").write_bytes(b"half")
    good = latest(tmp_path)
    assert good is not None
    assert good.step == 1
    save(tmp_path, model, optimizer, _position(2), keep=5)
    assert not rest.exists()


def test_a_checkpoint_that_cannot_be_written_is_reported_and_spares_the_old_ones(tmp_path: Path) -> None:
    model, optimizer = _saved(tmp_path, [1])
    (tmp_path / "checkpoints" / ".partial-step-000002").write_text("a file where the directory should go")
    with pytest.raises(CleaveError, match=r"cannot write the checkpoint .*step-000002"):
        save(tmp_path, model, optimizer, _position(2), keep=1)
    good = latest(tmp_path)
    assert good is not None
    assert good.step == 1


def test_a_checkpoint_of_another_model_optimizer_or_format_is_refused(tmp_path: Path) -> None:
    model, optimizer = _saved(tmp_path, [1])
    checkpoint = latest(tmp_path)
    assert checkpoint is not None
    with pytest.raises(InputError, match=r"weight .*\[5, 4\].*\[3, 4\]"):
        restore(checkpoint, torch.nn.Linear(4, 5), optimizer)
    with pytest.raises(InputError, match=r"model\.safetensors .*another model.*\bbias\b.*--model"):
        restore(checkpoint, torch.nn.Linear(4, 3, bias=False), optimizer)
    with pytest.raises(InputError, match=r"optimizer .*step-000001"):
        restore(checkpoint, model, OPTIMIZERS["sgd"]([model.weight]))
    state = checkpoint.path / "state.json"
    state.write_text(state.read_text().replace('"format": 1', '"format": 2'))
    with pytest.raises(InputError, match=r"step-000001 .*format 2\b.* 1\b"):
        restore(checkpoint, model, optimizer)


# ------------------------------------------------------------------------------------------------ death, full disks


def _kills(*arguments: object) -> int:
    result = subprocess.run(
        [sys.executable, "-m", "tests.support.killed_saves", *map(str, arguments)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return int(result.stdout.split()[0])


def test_a_kill_at_any_moment_costs_no_finished_save(tmp_path: Path) -> None:
    assert _kills("at-random", tmp_path, 20) == 20


@pytest.mark.parametrize(
    "situations",
    [
        ["over-damage"],
        pytest.param(["first", "next", "next-of-many", "same", "same-of-many"], marks=pytest.mark.slow),
    ],
    ids=",".join,
)
def test_a_kill_before_any_disk_operation_leaves_an_intact_checkpoint(tmp_path: Path, situations: list[str]) -> None:
    kills = _kills("at-each-operation", tmp_path, *situations)
    assert kills > 10 * len(situations), "a save takes more than a few operations"


def _names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.parametrize("size", [0, 50, 300, 1000])
@pytest.mark.parametrize("again", [False, True], ids=["next", "same"])
def test_a_failed_save_leaves_the_old_checkpoints_and_nothing_else(
    tmp_path: Path, size: int, again: bool, limit_files: Callable[[int | None], None]
) -> None:
    model, optimizer = _saved(tmp_path, [1, 2])
    limit_files(size)
    with pytest.raises(CleaveError, match="cannot write the checkpoint"):
        save(tmp_path, model, optimizer, _position(2 if again else 3), keep=1)
    limit_files(None)
    assert _names(tmp_path) == ["step-000001", "step-000002"]
    assert not damaged(tmp_path)
    assert save(tmp_path, model, optimizer, _position(3), keep=1).step == 3


def _large() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and optimizer whose checkpoints take 0.8 MB, so that two fit on a disk of 2 MB."""
    model = torch.nn.Linear(320, 320)
    return model, _trained(model, OPTIMIZERS["sgd"])


def test_on_a_disk_for_two_an_expired_checkpoint_makes_room_for_the_next(mount_disk: Callable[[int], Path]) -> None:
    small_disk = mount_disk(2 << 20)
    model, optimizer = _large()
    for step in range(1, 6):
        save(small_disk, model, optimizer, _position(step), keep=2)
    assert _names(small_disk) == ["step-000004", "step-000005"]


def test_on_a_full_disk_the_last_good_checkpoint_is_never_deleted(mount_disk: Callable[[int], Path]) -> None:
    small_disk = mount_disk(2 << 20)
    model, optimizer = _large()
    for step in (1, 2):
        save(small_disk, model, optimizer, _position(step), keep=2)
    (path_of(small_disk, 2) / "state.json").write_text("{")
    free = shutil.disk_usage(small_disk).free
    with pytest.raises(CleaveError, match=r"No space left on device.*; make room there"):
        save(small_disk, model, optimizer, _position(3), keep=2)
    good = latest(small_disk)
    assert good is not None
    assert good.step == 1
    assert shutil.disk_usage(small_disk).free == free
    shutil.rmtree(path_of(small_disk, 2))
    assert save(small_disk, model, optimizer, _position(3), keep=2).step == 3
