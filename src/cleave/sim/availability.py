"""How long devices stay and stay away, as fitted to traces of real systems in the Failure Trace Archive.

Fits are rows of `facts/availability_distributions.csv`, in hours: exponential (mean), Weibull (shape, scale), lognormal
(mu, sigma of the logarithm) and gamma (shape, scale).
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from cleave.errors import InputError
from cleave.sim.churn import Stay

Family = Literal["exp", "weibull", "lognormal", "gamma"]
FAMILIES: tuple[Family, ...] = get_args(Family)
_HOUR_S = 3600.0
_USUAL_FAMILY: Family = "weibull"


@dataclass(frozen=True, slots=True)
class Duration:
    """A distribution of hours."""

    family: Family
    first: float
    second: float = math.nan

    @property
    def mean_h(self) -> float:
        match self.family:
            case "exp":
                return self.first
            case "weibull":
                return self.second * math.gamma(1 + 1 / self.first)
            case "lognormal":
                return math.exp(self.first + self.second**2 / 2)
            case "gamma":
                return self.first * self.second

    def draw_h(self, rng: random.Random) -> float:
        match self.family:
            case "exp":
                return rng.expovariate(1 / self.first)
            case "weibull":
                return rng.weibullvariate(self.second, self.first)
            case "lognormal":
                return rng.lognormvariate(self.first, self.second)
            case "gamma":
                return rng.gammavariate(self.first, self.second)


@dataclass(frozen=True, slots=True)
class Fit:
    trace: str
    stays: Duration
    absences: Duration

    def lives(self, rng: random.Random) -> Iterator[Stay]:
        """Alternate stays and absences; a device is there at the start with its long-run probability."""
        share = self.stays.mean_h / (self.stays.mean_h + self.absences.mean_h)
        joined_s = 0.0 if rng.random() < share else self.absences.draw_h(rng) * _HOUR_S
        while True:
            left_s = joined_s + self.stays.draw_h(rng) * _HOUR_S
            if left_s > joined_s:
                yield joined_s, left_s
            joined_s = left_s + self.absences.draw_h(rng) * _HOUR_S


def fit(rows: Iterable[Mapping[str, str]], name: str) -> Fit:
    """The fit of a trace such as `microsoft99`, or of one family of it, such as `microsoft99:gamma`."""
    trace, _, family = name.partition(":")
    known: dict[tuple[str, str], Fit] = {}
    for row in rows:
        key = row["trace"].partition(" ")[0].lower()
        known[key, row["family"]] = Fit(row["trace"], _duration(row, "avail"), _duration(row, "unavail"))
    found = known.get((trace.lower(), family or _USUAL_FAMILY))
    if found is None:
        names = sorted({key for key, _ in known})
        raise InputError(
            f"expected a trace ({', '.join(names)}), optionally with a family ({', '.join(FAMILIES)}) such as "
            f"{names[0]}:{_USUAL_FAMILY}, got {name[:60]!r}; change it"
        )
    return found


def _duration(row: Mapping[str, str], column: Literal["avail", "unavail"]) -> Duration:
    family: dict[str, Family] = {one: one for one in FAMILIES}
    return Duration(family[row["family"]], float(row[f"{column}_p1"]), float(row[f"{column}_p2"] or "nan"))
