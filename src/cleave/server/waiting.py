"""How long a training process has waited for devices, and the CPU time it used meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager


class Waiting:
    """Totals of time in which at least one thread waits; call from any thread."""

    def __init__(self) -> None:
        self._lock, self._threads = threading.Lock(), 0
        self._since_s = self._cpu_since_s = 0.0
        self._total_s = self._cpu_s = 0.0

    @contextmanager
    def counted(self) -> Generator[None]:
        with self._lock:
            if not self._threads:
                self._since_s, self._cpu_since_s = time.perf_counter(), time.process_time()
            self._threads += 1
        try:
            yield
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads:
                    self._total_s += time.perf_counter() - self._since_s
                    self._cpu_s += time.process_time() - self._cpu_since_s

    @property
    def seconds(self) -> float:
        """Includes a wait in progress."""
        with self._lock:
            return self._total_s + (time.perf_counter() - self._since_s if self._threads else 0.0)

    @property
    def cpu_s(self) -> float:
        """CPU seconds of the whole process during waits that are over: what devices cost the server."""
        return self._cpu_s
