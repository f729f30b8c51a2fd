# pyright: standard
"""Undo steps that rest on unchecked work of a device found wrong: keep restore points, and go back to one.

`core/verify/vouching.py` knows which steps those are; checkpoints are the restore points. What it knows is kept in the
run directory, so that a restart of the server helps no liar.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final

import msgspec

from cleave.core.verify.vouching import Record, Vouching
from cleave.disk import read_whole, write_whole
from cleave.errors import CleaveError, InputError
from cleave.events import Listener, RolledBack
from cleave.train import checkpoint
from cleave.train.checkpoint import Position
from cleave.train.saving import Saver

Watching = Callable[[], AbstractContextManager[Vouching]]
"""Gives access to the fleet's vouching, locked while it is used."""

FILE: Final = "trust.json"
_MOST_BYTES: Final = 1 << 24
_LOG: Final = logging.getLogger(__name__)


class Undo:
    def __init__(self, watching: Watching, saver: Saver, run_directory: Path, observe: Listener) -> None:
        """Raise InputError if the record of an earlier process cannot be read."""
        self._watching, self._saver, self._directory, self._observe = watching, saver, run_directory, observe
        self._path = run_directory / FILE
        self._known = self._recalled = _read(self._path)
        self._is_begun = False

    def begin_step(self, step: int, *, is_last: bool) -> None:
        with self._watching() as vouching:
            if not self._is_begun:  # devices join only now
                vouching.can_go_back = self._is_begun = True
                vouching.recall(self._recalled, step - 1)
                self._saver.spared = vouching.restore_points
            vouching.begin_step(step, is_last=is_last)

    def after_step(self, position: Position) -> None:
        """Save a restore point if some device is audited only for lack of it."""
        with self._watching() as vouching:
            is_wanted = vouching.wants_restore_point
        if is_wanted and self._saver.attempt(position):
            with self._watching() as vouching:
                vouching.keep_restore_point(position.step)
                self._saver.spared = vouching.restore_points
        self.remember()

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
        self.remember()
        self._observe(RolledBack(device=doubt.device, from_step=position.step, step=found.step))
        return restored

    def remember(self) -> None:
        """Write down what changed; a full disk is no reason to stop, and the next step tries again."""
        with self._watching() as vouching:
            record = vouching.record
        if self._is_begun and record != self._known:
            try:
                write_whole(self._path, msgspec.json.encode(record) + b"\n")
                self._known = record
            except OSError as fault:
                _LOG.warning("cannot write %s: %s", self._path, fault.strerror or fault)


def _read(path: Path) -> Record:
    try:
        return msgspec.json.decode(read_whole(path, _MOST_BYTES, follow_links=False), type=Record)
    except FileNotFoundError:
        return Record()
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
        raise InputError(
            f"expected a record of unchecked work in {path}, but {fault}; restore the file, or delete it to trust all "
            "tokens again"
        ) from None
