# pyright: standard
"""Policy of saving a run: when to save, how to treat a failed save, and where to resume.

`checkpoint` reads and writes a single checkpoint; this module knows the run, its settings and its directory, and that a
full disk is no reason to stop training. A server that dies loses at most `save_minutes` of work.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import torch

from cleave.config import TrainConfig, to_toml
from cleave.disk import write_whole
from cleave.errors import CleaveError, InputError
from cleave.events import CheckpointSaved, Listener, Note
from cleave.train import checkpoint
from cleave.train.checkpoint import Checkpoint, Position


def find(run_directory: Path, *, resume: bool) -> Checkpoint | None:
    """Find the checkpoint to resume from; None starts at the first step. Never overwrites or restarts a run unasked."""
    found = checkpoint.latest(run_directory)
    if found is not None and not resume:
        raise InputError(f"{run_directory} already holds a run; add --resume to continue it, or give another --out")
    if found is None and (damaged := checkpoint.damaged(run_directory)):
        names = ", ".join(path.name for path in damaged)
        advice = "restore one from a backup, or move these away to start again from the first step"
        raise InputError(f"there is no intact checkpoint in {run_directory} (damaged: {names}); {advice}")
    if found is None and resume and not (run_directory / "config.toml").is_file():
        raise InputError(f"there is no run to resume in {run_directory}; correct --out")
    return found


def keep_settings(config: TrainConfig, run_directory: Path) -> None:
    """Write the settings into the run's directory unless already there, so that resuming needs no disk space for it."""
    path, text = run_directory / "config.toml", to_toml(config).encode()
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.stat().st_size != len(text) or path.read_bytes() != text:
            write_whole(path, text)
    except OSError as fault:
        cause = fault.strerror or fault
        raise InputError(f"cannot write {path}: {cause}; make room there, or give another --out") from fault


class Saver:
    """Save a run at intervals of steps and minutes. `clock` returns seconds from any origin."""

    def __init__(
        self,
        config: TrainConfig,
        run_directory: Path,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        observe: Listener,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._directory, self._observe, self._clock = config, run_directory, observe, clock
        self._model, self._optimizer = model, optimizer
        self._tried_s = clock()
        self._failing = False
        self.saved: Checkpoint | None = None
        """The newest checkpoint."""
        self.spared: Collection[int] = ()
        """Steps whose checkpoints stay, however old."""

    def restore(self, found: Checkpoint) -> Position:
        """Restore model, optimizer state and random state. Optimizer settings stay as configured now, not as saved."""
        settings = [{key: group[key] for key in group if key != "params"} for group in self._optimizer.param_groups]
        position = checkpoint.restore(found, self._model, self._optimizer)
        for group, current in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(current)
        position.random_state.put_back()
        self.saved = found
        return position

    def after_step(self, position: Position) -> None:
        """Save if due, by steps or by the clock."""
        every, after_s = self._config.save_every, 60 * self._config.save_minutes
        by_steps = every and position.step % every == 0
        if by_steps or (after_s and self._clock() - self._tried_s >= after_s):
            self.attempt(position)

    def attempt(self, position: Position | None) -> bool:
        """Try to save; return whether the step is saved. Report only the first of consecutive failures."""
        was_reported = self._failing
        try:
            self.save(position)
        except CleaveError as fault:
            if not was_reported:
                self._observe(Note(text=f"{fault}: training continues, and the next save will retry"))
        return position is not None and self.saved is not None and self.saved.step == position.step

    def save(self, position: Position | None) -> None:
        """Save, or raise CleaveError. Does nothing if there is no step to save or it is saved already.

        Never saves a scale test, whose weights come from devices that compute nothing.
        """
        if self._config.scale_test:
            return
        if position is None or position.step == 0 or (self.saved is not None and self.saved.step == position.step):
            return
        try:
            self.saved = checkpoint.save(
                self._directory, self._model, self._optimizer, position, keep=self._config.keep, spared=self.spared
            )
        except CleaveError:
            self._failing = True
            raise
        finally:
            self._tried_s = self._clock()
        self._failing = False
        self._observe(CheckpointSaved(step=position.step, path=str(self.saved.path)))
