"""What a device's task costs the server: core seconds, learned from the CPU time the process used while it waited."""

from __future__ import annotations

from cleave.core.cost.rates import Server

TASK_S, BYTE_S = 7e-4, 7e-10
"""Core seconds per task and per byte moved, as measured by benchmarks/event_loop.py and wire_path.py."""
_NEW, _MOST_TASK_S = 0.3, 0.05
_FEW_TASKS = 20


class Handling:
    """Core seconds per task; what bytes cost is taken as known, as tasks of one plan move much the same."""

    def __init__(self) -> None:
        self._task_s = TASK_S
        self._cpu_s, self._tasks, self._moved = 0.0, 0, 0

    def learn(self, cpu_s: float, tasks: int, moved_bytes: int) -> Server:
        """Learn from totals since the start: CPU seconds while waiting, tasks, bytes; return the costs so far."""
        spent_s, done, moved = cpu_s - self._cpu_s, tasks - self._tasks, moved_bytes - self._moved
        self._cpu_s, self._tasks, self._moved = cpu_s, tasks, moved_bytes
        if done >= _FEW_TASKS:
            seen_s = min(max(spent_s - BYTE_S * moved, 0.0) / done, _MOST_TASK_S)
            self._task_s += _NEW * (seen_s - self._task_s)
        return Server(task_s=self._task_s, byte_s=BYTE_S)
