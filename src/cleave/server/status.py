"""The state of a fleet at one moment, for people and programs: `Fleet.status()` and `/api/status`."""

from __future__ import annotations

from dataclasses import dataclass

from cleave.core.schedule.members import Member
from cleave.server.step_clock import StepTime


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatus:
    """A connected device: its measured profile, and its contribution so far."""

    device: str
    kernel: str
    """What multiplies on it: numpy, torch-cpu, torch-cuda or torch-mps."""
    flops_per_s: float
    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float
    memory_bytes: int
    task_s: float
    """Fixed cost of a task."""
    tasks: int
    done_flops: float
    verified_flops: float
    wrong: int
    """Results found wrong."""
    trust: str
    """Level of the token it joined with: own, known or stranger."""
    down_bytes: int
    up_bytes: int
    idle_reason: str
    """Why it has no work; empty while it has some."""
    is_late: bool
    """Whether its work is given to others, too, and it gets no new work until it answers."""
    is_leaving: bool
    """Whether it was drained: it leaves at the end of the step."""
    token: str
    """Id of the token it joined with, if `cleave token list` has it; else empty."""

    @classmethod
    def of(cls, member: Member, *, is_late: bool, is_leaving: bool, token: str) -> DeviceStatus:
        flops_per_s, down_bytes_per_s, up_bytes_per_s = member.rates
        return cls(
            device=member.name,
            kernel=member.kernel,
            flops_per_s=flops_per_s,
            down_bytes_per_s=down_bytes_per_s,
            up_bytes_per_s=up_bytes_per_s,
            latency_s=member.latency_s,
            memory_bytes=member.memory_bytes,
            task_s=member.fixed.task_s,
            tasks=member.tasks,
            done_flops=member.done_flops,
            verified_flops=member.verified_flops,
            wrong=member.wrong,
            trust=member.level,
            down_bytes=member.down_bytes,
            up_bytes=member.up_bytes,
            idle_reason=member.idle_reason,
            is_late=is_late,
            is_leaving=is_leaving,
            token=token,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """A fleet: its devices, the grain in use, and totals since it was opened."""

    devices: tuple[DeviceStatus, ...]
    grain: str | None
    """`resident`, `gemm` or `server`; None until a model is trained."""
    grain_reason: str
    predicted_s: float | None
    """Predicted seconds of the next step, if it has one batch."""
    steps: tuple[StepTime, ...]
    """The latest steps, oldest first: what was predicted of each, and what it took."""
    off_reason: str
    """Which term was wrong when a step last took 1.5 times its prediction; empty if none did, or none explains it."""
    shared_links: tuple[str, ...]
    """Media and lines that devices were found to share, in words."""
    down_bytes: int
    up_bytes: int
    products: int
    """Products and passes submitted."""
    waiting_s: float
    """Seconds the caller waited for devices."""
    checking_s: float
    """Seconds the server spent verifying results."""
    paused: tuple[str, ...]
    """Devices that may not join until an administrator resumes them."""
