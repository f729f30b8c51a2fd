# pyright: standard
"""Undo steps that rest on unchecked work of a device found wrong: keep restore points, and go back to one.

`core/verify/vouching.py` knows which steps those are; checkpoints are the restore points.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from cleave.core.verify.vouching import Vouching
from cleave.errors import CleaveError
from cleave.events import Listener, RolledBack
from cleave.train import checkpoint
from cleave.train.checkpoint import Position
from cleave.train.saving import Saver

Watching = Callable[[], AbstractContextManager[Vouching]]
"""Gives access to the fleet's vouching, locked while it is used."""


class Undo:
    def __init__(self, watching: Watching, saver: Saver, run_directory: Path, observe: Listener) -> None:
        self._watching, self._saver, self._directory, self._observe = watching, saver, run_directory, observe

    def begin_step(self, step: int) -> None:
        with self._watching() as vouching:
            vouching.can_go_back = True
            vouching.begin_step(step)

    def after_step(self, position: Position) -> None:
        """Save a restore point if some device is audited only for lack of it."""
        with self._watching() as vouching:
            is_wanted = vouching.wants_restore_point
        if is_wanted and self._saver.attempt(position):
            with self._watching() as vouching:
                vouching.keep_restore_point(position.step)
                self._saver.spared = vouching.restore_points

    def go_back(self, position: Position) -> Position | None:
        """Restore the last state without unchecked work of a device found wrong; None if no step is in doubt."""
        with self._watching() as vouching:
            doubt = vouching.doubt
        if doubt is None:
            return None
        found = checkpoint.latest(self._directory, before=doubt.step)
        if found is None:
            raise CleaveError(
                f"{doubt.device} was found wrong, and its unchecked work is in the weights since step {doubt.step}, "
                f"but {self._directory} has no checkpoint from before that; start the run again"
            )
        restored = self._saver.restore(found)
        checkpoint.remove_after(self._directory, found.step)
        with self._watching() as vouching:
            vouching.went_back(found.step)
            self._saver.spared = vouching.restore_points
        self._observe(RolledBack(device=doubt.device, from_step=position.step, step=found.step))
        return restored
