"""The truth that a server does not know: rates beside those it believes, how they drift, stalls, and who is there.

All draws come from numpy generators seeded by the setting's seed and what they are for, so that noise does not change
with churn and a device's rates do not change with the fleet's size. Noise is a lognormal factor of median 1 per device
and rate. Drift is another that a device draws anew every hour. A stall stops a device's processor.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from cleave.core.fleet.profiles import Floats, Profiles
from cleave.errors import InputError
from cleave.sim.churn import Stay

NOISY = ("flops_per_s", "down_bytes_per_s", "up_bytes_per_s")
_HOUR_S = 3600.0
_MOST_SPREAD = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Noise:
    """How far truth is from belief."""

    spread: float = 0.0
    """Standard deviation of the logarithm of each true rate over the believed one."""
    drift: float = 0.0
    """The same for what changes from hour to hour."""
    stalls_per_hour: float = 0.0
    """Stalls of each device."""
    stall_s: float = 10.0
    """Mean length of a stall, which is exponential."""

    def __post_init__(self) -> None:
        if not (0 <= self.spread <= _MOST_SPREAD and 0 <= self.drift <= _MOST_SPREAD):
            raise InputError(
                f"expected noise and drift from 0 to {_MOST_SPREAD:g}, got {self.spread:g} and {self.drift:g}; they "
                "are standard deviations of logarithms, so that 0.2 is about 20 %"
            )
        if not (0 <= self.stalls_per_hour < 1e6 and 0 < self.stall_s < 1e6):
            raise InputError(
                f"expected stalls per hour from 0 and seconds of a stall above 0, got {self.stalls_per_hour:g} and "
                f"{self.stall_s:g}; change them"
            )


class World:
    """True rates of a fleet over time, and when its devices are there."""

    def __init__(
        self,
        believed: Profiles,
        *,
        seed: int = 0,
        noise: Noise | None = None,
        stays: Callable[[], Mapping[str, Iterable[Stay]]] | None = None,
    ) -> None:
        """`stays` draws the stays of each device, the same whenever it is called; without it, all are always there."""
        self.believed = believed
        self.noise = noise or Noise()
        self._seed, self._stays = seed, stays
        self._base = self._factors("noise", self.noise.spread)
        self._hour, self._truth = -1, believed

    @property
    def is_still(self) -> bool:
        """Whether rates never change."""
        return self.noise.drift == 0

    def truth(self, now_s: float) -> Profiles:
        """True profiles at some time."""
        hour = 0 if self.is_still else int(now_s // _HOUR_S)
        if hour != self._hour:
            drift = self._factors(f"drift {hour}", self.noise.drift)
            self._hour = hour
            self._truth = replace(self.believed, **{name: self._scaled(name, drift) for name in NOISY})
        return self._truth

    @property
    def stall_share(self) -> float:
        """Share of the time in which a device's processor is stalled, on average."""
        return (
            self.noise.stalls_per_hour
            * self.noise.stall_s
            / (_HOUR_S + self.noise.stalls_per_hour * self.noise.stall_s)
        )

    def stalls(self, name: str) -> Iterator[tuple[float, float]]:
        """When a device stalls, and for how many seconds; in order, without end."""
        rng, at = self._rng(f"stalls {name}"), 0.0
        while self.noise.stalls_per_hour > 0:
            at += float(rng.exponential(_HOUR_S / self.noise.stalls_per_hour))
            yield at, float(rng.exponential(self.noise.stall_s))

    def lives(self) -> dict[str, Iterator[Stay]]:
        """Stays of each device, from the start."""
        if self._stays is None:
            return {name: iter(((0.0, np.inf),)) for name in self.believed.names}
        return {name: iter(stays) for name, stays in self._stays().items()}

    def _scaled(self, name: str, drift: dict[str, Floats]) -> Floats:
        believed: Floats = getattr(self.believed, name)
        return believed * self._base[name] * drift[name]

    def _factors(self, what: str, spread: float) -> dict[str, Floats]:
        if spread == 0:
            return {name: np.ones(len(self.believed)) for name in NOISY}
        names = self.believed.names
        drawn = np.array([self._rng(f"{what} {name}").standard_normal(len(NOISY)) for name in names])
        return dict(zip(NOISY, np.exp(spread * drawn.T), strict=True))

    def _rng(self, what: str) -> np.random.Generator:
        return np.random.default_rng([self._seed, zlib.crc32(what.encode())])
