"""The interface between the simulator and the systems it compares: one setting in, one outcome out.

A system is a pure function of a `Setting`; the same setting, seed included, gives the same digits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from cleave.core.cost.rates import Server
from cleave.core.cost.wire import WireFormat
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.shapes import ModelShape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setting:
    """One batch of a model on a fleet."""

    model: ModelShape
    tokens: int
    """Tokens per batch: a whole number of sequences."""
    sequence: int
    """Tokens per sequence."""
    profiles: Profiles
    """What the planner believes of the devices."""
    server: Server = field(default_factory=Server)
    wire: WireFormat = "bf16"
    seed: int = 0

    @property
    def sequences(self) -> int:
        return self.tokens // self.sequence


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Outcome:
    """What a system makes of a setting."""

    system: str
    fits: bool
    """Whether it can run at all."""
    reason: str = ""
    """Why it cannot run; otherwise how it runs, in words."""
    batch_s: float | None = None
    """Seconds per batch; None if it cannot run."""
    down_bytes: float | None = None
    """Bytes per batch received by the device that receives most."""
    up_bytes: float | None = None
    """Bytes per batch sent by the device that sends most."""
    memory_bytes: float | None = None
    """Memory of the device that needs most."""
    devices_used: int = 0
    recovery_s: float | None = None
    """Mean seconds that a batch takes longer if one of its devices leaves; None if not modeled."""
    detail: Mapping[str, float | int | str] = field(default_factory=lambda: dict[str, float | int | str]())
    """Figures of this system alone."""


System = Callable[[Setting], Outcome]
