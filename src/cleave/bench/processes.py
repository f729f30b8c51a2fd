"""Processes of a cell: started on chosen cores, heard line by line within a time limit, and always ended.

Each is in a session of its own, so that Ctrl-C reaches only `cleave bench`, which ends them. What they write to
standard error is kept, as its last line says why a process died.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

import psutil

from cleave.printable import printable

_PATIENCE_S = 5.0
_IDLE_S = 0.5
_LAST_BYTES = 2000
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


class Process:
    """A Python process of this installation."""

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cores: Sequence[int],
        threads: int,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        limits = dict.fromkeys(_THREAD_VARIABLES, str(threads))
        with pinned(cores):
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env={**os.environ, **limits, **(environment or {})},
                start_new_session=True,
            )
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._is_silent = False
        threading.Thread(target=self._read, daemon=True).start()

    def tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # it died; reading will show that
            self._process.stdin.write(line + b"\n")
            self._process.stdin.flush()

    def lines(self, until_s: float, idle: Callable[[], None] = lambda: None) -> Iterator[bytes]:
        """Yield lines of its output until it closes it; call `idle` every now and then while there is none.

        Raises TimeoutError at a time of `time.monotonic`.
        """
        while not self._is_silent:
            try:
                line = self._lines.get(timeout=min(_IDLE_S, max(0.0, until_s - time.monotonic())))
            except queue.Empty:
                if time.monotonic() >= until_s:
                    raise TimeoutError from None
                idle()
                continue
            if line is None:
                self._is_silent = True
            else:
                yield line

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    @property
    def last_words(self) -> str:
        """The last line that it wrote to standard error, and its exit code if it has ended."""
        size = os.fstat(self._errors.fileno()).st_size
        start = max(0, size - _LAST_BYTES)
        # not `seek`: the process writes at the same position
        text = os.pread(self._errors.fileno(), _LAST_BYTES, start)
        lines = text.decode("utf-8", "replace").strip().splitlines()
        code = self._process.poll()
        ended = f"exit code {code}" if code is not None else "still running"
        return f"{ended}, {printable(lines[-1].strip())}" if lines else ended

    def cpu_s(self) -> float:
        """Processor seconds so far, of its children too."""
        total = 0.0
        with suppress(psutil.Error):
            own = psutil.Process(self._process.pid)
            for each in (own, *own.children(recursive=True)):
                with suppress(psutil.Error):
                    times = each.cpu_times()
                    total += times.user + times.system
        return total

    def rest(self, patience_s: float = _PATIENCE_S) -> list[bytes]:
        """Wait for its end, for a while, and return the lines not read yet."""
        with suppress(TimeoutError):
            return list(self.lines(time.monotonic() + patience_s))
        return []

    def interrupt(self) -> None:
        """Ask it to end, as Ctrl-C would."""
        if self.is_alive:
            with suppress(OSError):
                self._process.terminate()

    def end(self) -> None:
        """End it: ask first, then kill."""
        for stop in (self._process.terminate, self._process.kill):
            if self.is_alive:
                with suppress(OSError):
                    stop()
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(_PATIENCE_S)

    def close(self) -> None:
        """End it, and forget what it wrote."""
        self.end()
        for stream in (self._process.stdin, self._errors):
            if stream is not None:
                with suppress(OSError):
                    stream.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output, suppress(OSError, ValueError):
            for line in output:
                self._lines.put(line)
        self._lines.put(None)


@contextmanager
def ending(processes: list[Process]) -> Generator[None]:
    """End all processes in the list when the block is left, however it is left."""
    try:
        yield
    finally:
        for process in reversed(processes):
            process.interrupt()
        for process in processes:
            process.close()


@contextmanager
def terminable() -> Generator[None]:
    """Take SIGTERM for Ctrl-C within the block, so that it, too, ends every process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def pinned(cores: Sequence[int]) -> Generator[None]:
    """Start processes on these cores; on any, if there are none or the system cannot pin."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    allowed = before & set(cores)
    os.sched_setaffinity(0, allowed or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def free_cores() -> int:
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def machine_cpu_s() -> float:
    """Processor seconds since this machine started, of all processes and cores."""
    times = psutil.cpu_times()
    return times.user + times.system + getattr(times, "nice", 0.0)
