"""What a process sees of its own steps, written line by line, so that a kill loses none. Standard library only."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Final

LEAST_STEPS: Final = 3
"""Steps that a turn takes in any case, however small its budget."""


def link_bytes() -> tuple[int, int]:
    """Bytes received and sent over this namespace's link."""
    for line in Path("/proc/net/dev").read_text(encoding="utf-8").splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == "eth0":
            numbers = counts.split()
            return int(numbers[0]), int(numbers[8])
    return 0, 0


def memory_bytes(field_name: str) -> int:
    """A field of this process's status, such as VmHWM, the peak of its resident memory."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field_name}:"):
            return int(line.split()[1]) * 1024
    return 0


class StepLog:
    """Appends a line per step: when it ended, its loss, bytes, CPU seconds and memory so far."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._idle_bytes = memory_bytes("VmRSS")
        self._before, self._cpu_s, self._began_s = link_bytes(), time.process_time(), time.monotonic()

    def begin(self) -> None:
        """Count from now on: everything is connected and built."""
        self._before, self._cpu_s, self._began_s = link_bytes(), time.process_time(), time.monotonic()

    def end(self, step: int, loss: float | None, *, devices: int | None = None) -> None:
        """Note that a step has ended, and among how many devices."""
        now, after, cpu_s = time.monotonic(), link_bytes(), time.process_time()
        line = {
            "step": step,
            "began_s": self._began_s,
            "ended_s": now,
            "loss": loss,
            "down_bytes": after[0] - self._before[0],
            "up_bytes": after[1] - self._before[1],
            "cpu_s": cpu_s - self._cpu_s,
            "idle_memory_bytes": self._idle_bytes,
            "peak_memory_bytes": memory_bytes("VmHWM"),
            "devices": devices,
        }
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        self._before, self._cpu_s, self._began_s = after, cpu_s, now
