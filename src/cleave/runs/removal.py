"""Remove runs, or only their checkpoints, from disk.

Removes what Cleave wrote and nothing else, since `--out` may have named a directory with other files in it. Never
touches a run that is training, follows no links, and leaves settings and log for last, so that a removal that was cut
short can be repeated.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cleave import disk
from cleave.errors import InputError
from cleave.events import RunFinished, read_events
from cleave.run_files import EVENTS, SETTINGS, locked, running
from cleave.runs.reading import CHECKPOINTS, MODEL, is_run, size_bytes

_CHECKPOINT: Final = re.compile(r"(\.(partial|replaced|removed)-)?step-\d{6,}")
_TENSORBOARD: Final = re.compile(r"events\.out\.tfevents\..*")
_EXPORTED: Final = re.compile(
    r"(model.*\.safetensors(\.index\.json)?|config\.json|generation_config\.json|tokenizer.*|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\..*|merges\.txt|.*\.model|chat_template\.jinja)"
)
_PARTS: Final = (f".partial-{MODEL}", "keys.json", "tls.pem", "trust.json", "server.json")
_LAST: Final = (EVENTS, SETTINGS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Removal:
    """What to remove from one run."""

    run: Path
    targets: tuple[Path, ...]
    """Files and directories, in order."""
    emptied: tuple[Path, ...]
    """Directories that go too, if nothing else is in them."""
    size_bytes: int


def plan_removal(run: Path, *, checkpoints_only: bool) -> Removal:
    """List what to remove from a run; raise InputError if it must not be touched."""
    if run.is_symlink():
        raise InputError(f"{run} is a link; give the directory it leads to, {run.resolve()}")
    run = run.resolve()
    if not is_run(run):
        raise InputError(f"{run} is not a run: expected {SETTINGS} and {EVENTS} in it; nothing was removed")
    _check_idle(run)
    checkpoints = run / CHECKPOINTS
    targets, emptied = _matching(checkpoints, _CHECKPOINT), [checkpoints]
    if not checkpoints_only:
        tensorboard = run / "tensorboard"
        names = [name for part in (*_PARTS, *_LAST) for name in (f".{part}.partial", part)]
        exported = _matching(run / MODEL, _EXPORTED) if _has_exported(run) else []
        targets += [*_matching(tensorboard, _TENSORBOARD), *exported, *(run / name for name in names)]
        emptied += [tensorboard, *([run / MODEL] if exported else []), run]
    existing = tuple(path for path in targets if path.is_symlink() or path.exists())
    return Removal(
        run=run, targets=existing, emptied=tuple(emptied), size_bytes=sum(size_bytes(path) for path in existing)
    )


def remove(removal: Removal) -> list[Path]:
    """Carry out a removal; return what was found beside the run's own files, and stays."""
    try:
        with locked(removal.run):
            _check_idle(removal.run)
            for path in removal.targets:
                disk.remove(path)
            for directory in removal.emptied:
                if directory.is_dir() and not directory.is_symlink() and not any(directory.iterdir()):
                    directory.rmdir()
            leaves_nothing = removal.run in removal.emptied and removal.run.is_dir()
            return sorted(removal.run.iterdir()) if leaves_nothing else []
    except OSError as fault:
        problem = f"cannot remove {fault.filename or removal.run}: {fault.strerror}"
        raise InputError(f"{problem}; check who may write there, then remove the run again") from fault


def _check_idle(run: Path) -> None:
    claim = running(run)
    if claim is None:
        return
    if claim.is_visible:
        raise InputError(f"{run} is running, as process {claim.pid}; stop it before removing anything")
    advice = "stop it there, or delete server.json in that directory if it has ended"
    raise InputError(f"{run} is in use by process {claim.pid} on {claim.host}, unseen from here; {advice}")


def _has_exported(run: Path) -> bool:
    """Whether the run finished once, and so wrote its model; another `model` beside it is not ours."""
    finished = (event for event in read_events(run / EVENTS) if isinstance(event, RunFinished))
    return any(event.reason == "done" for event in finished)


def _matching(directory: Path, pattern: re.Pattern[str]) -> list[Path]:
    """List the entries of a directory that Cleave named, oldest first; a link to a directory has none."""
    if directory.is_symlink() or not directory.is_dir():
        return []
    return sorted(path for path in directory.iterdir() if pattern.fullmatch(path.name))
