# pyright: standard
"""When a run is saved, what a save that fails means, and where a run goes on.

`checkpoint` knows how one is written and read; this module knows the run: its settings, its directory, and that a full
disk is no reason to stop training. Between saves, a server that dies loses `save_minutes` at most.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from cleave.config import TrainConfig, to_toml
from cleave.disk import write_whole
from cleave.errors import CleaveError, InputError
from cleave.events import CheckpointSaved, Listener, Note
from cleave.train import checkpoint
from cleave.train.checkpoint import Checkpoint, Position


def find(run_directory: Path, *, resume: bool) -> Checkpoint | None:
    """Where the run goes on; None: at its first step. A run is never written over, nor begun anew unasked."""
    found = checkpoint.latest(run_directory)
    if found is not None and not resume:
        raise InputError(f"{run_directory} holds a run already; add --resume to go on with it, or give another --out")
    if found is None and (damaged := checkpoint.damaged(run_directory)):
        came = f"none of the {len(damaged)} there is: {', '.join(path.name for path in damaged)}"
        advice = "bring one back from a copy, or move them away to start again from the first step"
        raise InputError(f"expected a whole checkpoint in {run_directory}, but {came}; {advice}")
    if found is None and resume and not (run_directory / "config.toml").is_file():
        raise InputError(f"expected a run to resume in {run_directory}, but there is none; correct --out")
    return found


def keep_settings(config: TrainConfig, run_directory: Path) -> None:
    """Write the run's settings into its directory, unless they stand there: a resume needs no room for that."""
    path, text = run_directory / "config.toml", to_toml(config).encode()
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
        if not path.is_file() or path.read_bytes() != text:
            write_whole(path, text)
    except OSError as fault:
        cause = fault.strerror or fault
        raise InputError(f"cannot write {path}: {cause}; make room there, or give another --out") from fault


class Saver:
    """Saves a run by steps and by time. `clock` is in seconds, from any start."""

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
        """The newest one."""

    def restore(self, found: Checkpoint) -> Position:
        """Fill model and optimizer; of the optimizer's settings, what is configured now counts, not what was then."""
        settings = [{key: group[key] for key in group if key != "params"} for group in self._optimizer.param_groups]
        position = checkpoint.restore(found, self._model, self._optimizer)
        for group, own in zip(self._optimizer.param_groups, settings, strict=True):
            group.update(own)
        position.random_state.put_back()
        self.saved = found
        return position

    def after_step(self, position: Position) -> None:
        """Save if it is time to, by steps or by the clock."""
        every, after_s = self._config.save_every, 60 * self._config.save_minutes
        by_steps = every and position.step % every == 0
        if by_steps or (after_s and self._clock() - self._tried_s >= after_s):
            self.attempt(position)

    def attempt(self, position: Position | None) -> None:
        """Save; if that fails, say so the first time, and leave it to the next save to try again."""
        said = self._failing
        try:
            self.save(position)
        except CleaveError as fault:
            if not said:
                self._observe(Note(text=f"{fault}: training goes on, and the next save tries again"))

    def save(self, position: Position | None) -> None:
        """Save, or raise one sentence; nothing to do if that step is saved, or there is none."""
        if position is None or position.step == 0 or (self.saved is not None and self.saved.step == position.step):
            return
        keep = self._config.keep
        try:
            self.saved = checkpoint.save(self._directory, self._model, self._optimizer, position, keep=keep)
        except CleaveError:
            self._failing = True
            raise
        finally:
            self._tried_s = self._clock()
        self._failing = False
        self._observe(CheckpointSaved(step=position.step, path=str(self.saved.path)))
