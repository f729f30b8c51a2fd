"""A simulated device: a downlink, a processor and an uplink, each of which serves one task at a time, by urgency.

The time of a task follows from its bytes, its FLOPs and the true rates of its device, which the server does not know.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from cleave.core.cost.rates import Pace
from cleave.core.schedule.tasks import OperandId, Task, TaskId

STORE_HEADER_BYTES, RESULT_HEADER_BYTES = 80, 139
"""Of the message before an operand, and before a result, in JSON."""
LineName = Literal["down", "compute", "up"]


@dataclass(slots=True, eq=False)
class Job:
    """A task on its device."""

    task: Task
    down_bytes: int
    """On the wire, headers included; the same below."""
    up_bytes: int
    brings: frozenset[OperandId]
    """Operands that come down with it."""
    seconds: dict[LineName, float] = field(default_factory=lambda: dict[LineName, float]())
    """What each line took for it."""


@dataclass(slots=True, eq=False)
class Line:
    """Jobs that wait for a link or a processor, and the one that it serves."""

    waiting: list[tuple[float, int, int, Job]] = field(default_factory=lambda: list[tuple[float, int, int, Job]]())
    """A heap by time, where that matters, then priority, then order of arrival."""
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
    peak_bytes: int = 0
    """Most memory in use at a time, operands kept for later tasks included."""
    cancelled: set[TaskId] = field(default_factory=lambda: set[TaskId]())
    stalled_until: float = 0.0
    """Its processor begins nothing before."""
    coming: set[OperandId] = field(default_factory=lambda: set[OperandId]())
    """Operands that are under way, with whichever task was to bring them."""
    unready: list[Job] = field(default_factory=lambda: list[Job]())
    """Jobs that came down before one of their operands."""
    lines: dict[LineName, Line] = field(default_factory=lambda: {"down": Line(), "compute": Line(), "up": Line()})

    def compute_s(self, task: Task) -> float:
        return self.pace.task_s + task.flops * task.effort / self.pace.flops_per_s

    def ready(self) -> list[Job]:
        """Take out the jobs whose operands have all come."""
        found = [job for job in self.unready if not any(one.id in self.coming for one in job.task.operands)]
        self.unready = [job for job in self.unready if job not in found]
        return found

    def size(self, line: LineName, job: Job) -> int:
        return job.down_bytes if line == "down" else job.up_bytes

    def rate(self, line: LineName) -> float:
        return self.pace.down_bytes_per_s if line == "down" else self.pace.up_bytes_per_s

    def forget(self) -> None:
        """Drop everything under way, as a device does that leaves."""
        self.coming.clear()
        self.unready.clear()
        for line in self.lines.values():
            line.waiting.clear()
            line.job = None
            line.turn += 1
