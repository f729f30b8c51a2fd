"""Run directories: where they lie, which one is newest, and which process is training in one.

    $CLEAVE_HOME/runs/20260131-142500/  config.toml  events.jsonl  checkpoints/  model/     what `train` writes
                                        server.json                                         this module: see `claim`

A run that trains locks its directory, so that of two processes started at the same moment only one trains, and the
system unlocks it when the process ends, however it ends. Its claim, `server.json`, tells others which process that is.
A killed process leaves the claim behind, so it counts only while its process lives; the process's start time tells it
from a later one with the same id. Where directories cannot be locked (Windows, some network disks), it has to suffice.
Knows no formats of other files; `cleave.runs` reads them.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec
import psutil

from cleave.disk import read_whole, write_whole
from cleave.errors import InputError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

_LOG: Final = logging.getLogger(__name__)
SETTINGS: Final = "config.toml"
EVENTS: Final = "events.jsonl"
_CLAIM: Final = "server.json"
_locks: Final[dict[Path, int]] = {}
"""Descriptors of the directories this process has locked."""
_MOST_BYTES: Final = 1 << 16
_SAME_START_S: Final = 2.0  # the clock may be set while a process runs, which moves its start time a little


class Claim(msgspec.Struct, frozen=True, kw_only=True):
    """The process that trains in a run directory."""

    pid: int
    created_s: float
    """When the process started, in seconds since 1970."""
    url: str | None = None
    """Where devices join, without a token; None while it is not known."""
    host: str = ""
    """Name of the process's machine or container."""

    @property
    def is_visible(self) -> bool:
        """Whether the process is on this machine, so that its end would be noticed."""
        return self.host == platform.node()


# ---------------------------------------------------------------------------------------------------- directories


def home() -> Path:
    """Return the directory of what Cleave keeps for this user: $CLEAVE_HOME, by default ~/.cleave."""
    return Path(os.environ.get("CLEAVE_HOME") or Path.home() / ".cleave")


def runs_home() -> Path:
    """Return the directory of all runs that got no --out."""
    return home() / "runs"


def new_run(home: Path | None = None) -> Path:
    """Name a run directory by the time, such as 20260131-142500. Does not create it."""
    stem = (home or runs_home()) / time.strftime("%Y%m%d-%H%M%S")
    path, number = stem, 1
    while path.exists():
        number += 1
        path = stem.with_name(f"{stem.name}-{number}")
    return path


def find_runs(home: Path | None = None) -> list[Path]:
    """List the run directories directly inside `home`, newest first."""
    try:
        found = [path for path in (home or runs_home()).iterdir() if (path / SETTINGS).is_file()]
    except OSError:
        return []
    return sorted(found, key=lambda path: (_changed_ns(path / SETTINGS), path.name), reverse=True)


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # removed meanwhile
        return 0


def newest_run(home: Path | None = None, *, prefer: Callable[[Path], bool] = lambda run: True) -> Path | None:
    """Return the run directory whose settings were written last, a preferred one if there is any; None without runs."""
    runs = find_runs(home)
    return next((run for run in runs if prefer(run)), next(iter(runs), None))


# --------------------------------------------------------------------------------------------------------- claims


def claim(directory: Path, url: str | None = None) -> None:
    """Claim a run directory for this process, or update its claim with the address devices join.

    Raise InputError if another process trains there. A full disk is no reason not to train: then there is no claim.
    """
    created_s = psutil.Process().create_time()
    own = Claim(pid=os.getpid(), created_s=created_s, url=url, host=platform.node())
    data = msgspec.json.encode(own) + b"\n"
    try:
        is_locked = _lock(directory)
        with suppress(FileExistsError), (directory / _CLAIM).open("xb") as file:  # of two processes, one succeeds
            file.write(data)
            return
        holder = running(directory)
        if holder is not None and holder.is_visible and holder.pid != os.getpid():
            if is_locked:
                _unlock(directory)
            raise _taken(directory, holder)
        write_whole(directory / _CLAIM, data)
    except OSError as fault:
        _LOG.warning("cannot write %s: %s", directory / _CLAIM, fault.strerror or fault)


def release(directory: Path) -> None:
    """Give up this process's claim; one of another process stays. A directory with nothing else in it is removed."""
    holder = _read(directory)
    if holder is not None and holder.pid == os.getpid() and holder.is_visible:
        try:
            (directory / _CLAIM).unlink(missing_ok=True)
        except OSError as fault:
            _LOG.warning("cannot remove %s: %s", directory / _CLAIM, fault.strerror or fault)
        with suppress(OSError):
            directory.rmdir()
    _unlock(directory)


@contextmanager
def locked(directory: Path) -> Generator[None]:
    """Keep other processes from training in an existing run directory meanwhile; raise InputError if one does."""
    is_new = _lock(directory)
    try:
        yield
    finally:
        if is_new:
            _unlock(directory)


def _lock(directory: Path) -> bool:
    """Lock a directory, made if missing, for the life of this process.

    Return False if it is locked by this process already or cannot be; raise InputError if another process locked it.
    """
    while True:
        directory.mkdir(parents=True, exist_ok=True)
        path = directory.resolve()
        if fcntl is None or path in _locks:
            return False
        descriptor = os.open(path, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):  # else it was removed just now: make it again
                _locks[path] = descriptor
                return True
        except BlockingIOError:
            os.close(descriptor)
            raise _taken(directory, running(directory)) from None
        except FileNotFoundError:
            pass
        except OSError as fault:
            os.close(descriptor)
            _LOG.debug("cannot lock %s: %s", directory, fault)
            return False
        os.close(descriptor)


def _unlock(directory: Path) -> None:
    descriptor = _locks.pop(directory.resolve(), None)
    if descriptor is not None:
        os.close(descriptor)


def _taken(directory: Path, holder: Claim | None) -> InputError:
    process = f"process {holder.pid}" if holder is not None else "another process"
    where = "" if holder is None or holder.is_visible else f" on {holder.host}"
    advice = "wait for it, stop it, or give another --out"
    return InputError(f"{process}{where} is training in {directory} already; {advice}")


def running(directory: Path) -> Claim | None:
    """Return the claim of the process that trains in a run directory; None if there is none or it has ended.

    Whether a process of another machine or container still lives cannot be seen from here, so its claim counts.
    """
    holder = _read(directory)
    return holder if holder is not None and (not holder.is_visible or _lives(holder)) else None


def _read(directory: Path) -> Claim | None:
    """Read a claim; None if there is none, or none that could be shown to anyone."""
    try:
        found = msgspec.json.decode(read_whole(directory / _CLAIM, _MOST_BYTES), type=Claim)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return found if f"{found.host}{found.url}".isprintable() else None


def _lives(holder: Claim) -> bool:
    try:
        process = psutil.Process(holder.pid)
        return (
            abs(process.create_time() - holder.created_s) < _SAME_START_S and process.status() != psutil.STATUS_ZOMBIE
        )
    except (psutil.NoSuchProcess, ValueError, OverflowError):
        return False
    except psutil.AccessDenied:  # it exists, and belongs to someone else
        return True
