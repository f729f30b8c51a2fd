"""A simulated device: a downlink, a processor and an uplink, each of which serves one task at a time, in order.

The time of a task follows from its bytes, its FLOPs and the true rates of its device, which the server does not know.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from cleave.core.cost.rates import Pace
from cleave.core.schedule.tasks import Task, TaskId

LineName = Literal["down", "compute", "up"]


@dataclass(slots=True, eq=False)
class Job:
    """A task on its device."""

    task: Task
    down_bytes: int
    seconds: dict[LineName, float] = field(default_factory=lambda: dict[LineName, float]())
    """What each line took for it."""


@dataclass(slots=True, eq=False)
class Line:
    """Jobs that wait for a link or a processor, and the one that it serves."""

    waiting: deque[Job] = field(default_factory=lambda: deque[Job]())
    job: Job | None = None
    began: float = 0.0
    turn: int = 0
    """Grows whenever the line turns to another job, so that the end of a cancelled one is recognized."""


@dataclass(slots=True, eq=False)
class Device:
    pace: Pace
    """True rates."""
    memory_bytes: int = 8 << 30
    medium: str = ""
    """Name of the medium it shares with others, if any."""
    computed_s: float = 0.0
    down_bytes: int = 0
    up_bytes: int = 0
    cancelled: set[TaskId] = field(default_factory=lambda: set[TaskId]())
    stalled_until: float = 0.0
    """Its processor begins nothing before."""
    lines: dict[LineName, Line] = field(default_factory=lambda: {"down": Line(), "compute": Line(), "up": Line()})

    def compute_s(self, task: Task) -> float:
        return self.pace.task_s + task.flops * task.effort / self.pace.flops_per_s

    def size(self, line: LineName, job: Job) -> int:
        return job.down_bytes if line == "down" else job.task.up_bytes

    def rate(self, line: LineName) -> float:
        return self.pace.down_bytes_per_s if line == "down" else self.pace.up_bytes_per_s

    def forget(self) -> None:
        """Drop everything under way, as a device does that leaves."""
        for line in self.lines.values():
            line.waiting.clear()
            line.job = None
            line.turn += 1
