"""Remove a testbed: end what runs in its namespaces, then delete them, and its control groups.

Standard library only, as it is also a program.

`python removal.py PREFIX OWNER` waits until the process OWNER has ended or its own standard input closes, then removes
everything whose name starts with PREFIX. A testbed starts one of these before it makes anything, so that a crash or
`kill -9` leaves nothing behind; an orderly end takes the same way. Should both die, the next testbed finds the
remains: names carry the owner's process id and its time of start, so that nobody removes what is still in use.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "cleave-testbed"
GROUPS: Final = Path("/sys/fs/cgroup")
_NAMES: Final = Path("/run/netns")
_PATIENCE_S: Final = 10.0


def started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else int(fields[19])


def owned_prefix(number: int) -> str:
    """The start of all names of this process's testbed with that number."""
    return f"{PREFIX}-{os.getpid()}-{started(os.getpid())}-{number}-"


def remove(prefix: str) -> None:
    """Kill every process in namespaces with this prefix, and delete them and the control groups of their names."""
    assert prefix.startswith(f"{PREFIX}-")
    names = sorted(path.name for path in _NAMES.glob(f"{prefix}*"))
    until = time.monotonic() + _PATIENCE_S
    for name in names:
        while (pids := processes(name)) and time.monotonic() < until:
            for pid in pids:
                _kill(pid)
            time.sleep(0.01)
    for name in names:
        subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
    for group in groups_root().glob(f"{prefix}*"):
        while time.monotonic() < until:
            with suppress(OSError):  # a process in it is still ending
                group.rmdir()
                break
            time.sleep(0.01)


def groups_root() -> Path:
    """Where control groups with quotas are made: in the hierarchy of version 1 if it is mounted, else of version 2."""
    first = GROUPS / "cpu"
    return first if first.is_dir() else GROUPS


def processes(namespace: str) -> list[int]:
    """Ids of the processes in a namespace."""
    listed = subprocess.run(["ip", "netns", "pids", namespace], check=False, capture_output=True, text=True)
    return [int(word) for word in listed.stdout.split()]


def remove_abandoned() -> list[str]:
    """Remove testbeds whose owners have ended; return the prefixes of their names."""
    prefixes = {path.name.rpartition("-")[0] for path in _NAMES.glob(f"{PREFIX}-*")}
    abandoned: list[str] = []
    for prefix in sorted(prefixes):
        pid, start, _ = prefix.removeprefix(f"{PREFIX}-").split("-")
        if started(int(pid)) != int(start):
            abandoned.append(f"{prefix}-")
            remove(abandoned[-1])
    return abandoned


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _watch(prefix: str, owner: int) -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    watched: list[int] = [sys.stdin.fileno()]
    try:
        watched.append(os.pidfd_open(owner))
    except ProcessLookupError:
        return remove(prefix)
    select.select(watched, [], [])
    return remove(prefix)


if __name__ == "__main__":
    _watch(sys.argv[1], int(sys.argv[2]))
