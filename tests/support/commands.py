"""The `cleave` command in separate processes, as a person starts it, and its runs as seen in their event logs."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import psutil

from cleave.events import DeviceJoined, DeviceLeft, StepDone, read_events

PATIENCE_S = 400.0
"""Deadline of every wait, far longer than a busy machine needs: only a failure waits this long."""
_POLL_S = 0.02

Process = subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class Pipe:
    """A pipe into a file: what a process writes is in the file a moment later, even after the process has ended."""

    end: IO[bytes]
    copying: threading.Thread

    def drain(self) -> None:
        """Wait until all that was written is in the file; all writers must have ended."""
        self.copying.join(PATIENCE_S)


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cleave", *arguments]


def environment(home: Path) -> dict[str, str]:
    """This process's variables without Cleave's settings, and a terminal wide enough never to wrap lines."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CLEAVE_")}
    return {**kept, "CLEAVE_HOME": str(home), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "500"}


def run(home: Path, *arguments: str, token: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    secret = {} if token is None else {"CLEAVE_TOKEN": token}
    return subprocess.run(
        command(*arguments),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={**environment(home), **secret},
        check=False,
    )


@contextmanager
def piped_to(output: IO[bytes]) -> Iterator[Pipe]:
    """Yield a pipe into a file, as whoever keeps the output of services and containers uses; ends with its writers."""
    reading, writing = os.pipe()
    copying = threading.Thread(target=_copy, args=(reading, os.dup(output.fileno())), daemon=True)
    copying.start()
    with os.fdopen(writing, "wb") as pipe:
        yield Pipe(pipe, copying)


def _copy(reading: int, writing: int) -> None:
    while part := os.read(reading, 1 << 16):
        os.write(writing, part)
    os.close(reading)
    os.close(writing)


def wait_until(condition: Callable[[], object], process: Process) -> None:
    """Wait for something another process does, such as writing a line to a file."""
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up, "timed out"
        if process.poll() is not None:
            assert condition(), f"the process ended too soon, with exit code {process.returncode}"
            return
        time.sleep(_POLL_S)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def local_devices(server: Process) -> dict[str, psutil.Process]:
    """Names of the devices a server started itself."""
    commands = {child: child.cmdline() for child in psutil.Process(server.pid).children()}
    return {words[words.index("--name") + 1]: child for child, words in commands.items() if "join" in words}


# ------------------------------------------------------------------------------------------------ event logs


def losses(run_directory: Path) -> dict[int, float]:
    """Loss per step; the later one for a step done twice."""
    path = run_directory / "events.jsonl"
    seen = read_events(path) if path.exists() else []
    return {event.step: event.loss for event in seen if isinstance(event, StepDone)}


def last_step(run_directory: Path) -> int:
    return max(losses(run_directory), default=0)


def joined(run_directory: Path) -> list[str]:
    """Names of devices in the order they joined."""
    return [event.device for event in read_events(run_directory / "events.jsonl") if isinstance(event, DeviceJoined)]


def departures(run_directory: Path) -> dict[str, str]:
    """Reasons for leaving, by device name."""
    seen = read_events(run_directory / "events.jsonl")
    return {event.device: event.reason for event in seen if isinstance(event, DeviceLeft)}
