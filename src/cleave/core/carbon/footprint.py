"""The footprint of some work: joules and kgCO2e by part, addable, and compared with another.

Energy is what is drawn at the plug. Embodied emissions, of making the hardware, are a part of their own without joules.
Knows no devices or tables; `energy` and `cloud` compute footprints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import NamedTuple

JOULES_PER_KWH = 3.6e6


class Assumption(NamedTuple):
    """A number that a footprint rests on, with its source, so that a report can print both."""

    what: str
    value: str
    source: str
    column: str = ""
    """The column of a fleet file that it stands in for, if it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Energy of one part, and the emissions of producing it."""

    energy_j: float = 0.0
    kgco2e: float = 0.0

    def __add__(self, other: Part) -> Part:
        return Part(energy_j=self.energy_j + other.energy_j, kgco2e=self.kgco2e + other.kgco2e)

    def __mul__(self, times: float) -> Part:
        return Part(energy_j=self.energy_j * times, kgco2e=self.kgco2e * times)


@dataclass(frozen=True, slots=True, kw_only=True)
class Footprint:
    """Energy and emissions of some work; `+` adds two, `*` repeats one."""

    devices: Part = field(default_factory=Part)
    """Computing: of volunteered devices above idle, or of cloud GPUs."""
    network: Part = field(default_factory=Part)
    server: Part = field(default_factory=Part)
    embodied_kgco2e: float = 0.0
    """Share of the emissions of making devices and server, by the time used."""

    @property
    def energy_j(self) -> float:
        return self.devices.energy_j + self.network.energy_j + self.server.energy_j

    @property
    def operational_kgco2e(self) -> float:
        return self.devices.kgco2e + self.network.kgco2e + self.server.kgco2e

    @property
    def kgco2e(self) -> float:
        return self.operational_kgco2e + self.embodied_kgco2e

    def __add__(self, other: Footprint) -> Footprint:
        return Footprint(
            devices=self.devices + other.devices,
            network=self.network + other.network,
            server=self.server + other.server,
            embodied_kgco2e=self.embodied_kgco2e + other.embodied_kgco2e,
        )

    def __mul__(self, times: float) -> Footprint:
        return Footprint(
            devices=self.devices * times,
            network=self.network * times,
            server=self.server * times,
            embodied_kgco2e=self.embodied_kgco2e * times,
        )

    def compared_with(self, other: Footprint) -> Comparison:
        return Comparison(
            energy=_ratio(self.energy_j, other.energy_j),
            kgco2e=_ratio(self.kgco2e, other.kgco2e),
        )


class Comparison(NamedTuple):
    """How many times as much as another footprint: above 1 is worse."""

    energy: float
    kgco2e: float


def _ratio(ours: float, theirs: float) -> float:
    if theirs > 0:
        return ours / theirs
    return 1.0 if ours == 0 else inf
