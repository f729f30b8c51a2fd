"""Power, grid and embodied carbon of a fleet's devices and of its server: as given, or by class from the fact tables.

What a fleet file does not give is taken from the device model of the same class whose speed is nearest, or from the
class as a whole; a device without a class counts as a laptop. Every default that was used is listed with its source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np

from cleave.core.carbon.facts import WORLD, CarbonFacts, Figure, Quantity
from cleave.core.carbon.footprint import Assumption
from cleave.core.fleet.profiles import Bools, Floats, Profiles
from cleave.core.fleet.sampling import CLASSES, MOBILE_SHARE
from cleave.errors import FleetError

USUAL_CLASS: Final = "laptop"
_SECONDS_PER_HOUR: Final = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DevicePower:
    """One entry per device in every column."""

    load_w: Floats
    """Power of the whole device while it computes, behind its charger."""
    idle_w: Floats
    charger_efficiency: Floats
    """Power behind the charger over power at the plug."""
    network_j_per_byte: Floats
    kgco2e_per_kwh: Floats
    embodied_kgco2e: Floats
    lifetime_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPower:
    """The machine that holds the model; all of its power counts, as it runs for the work only."""

    watts: float
    """At the plug."""
    pue: float = 1.0
    kgco2e_per_kwh: float
    embodied_kgco2e: float
    lifetime_s: float


def device_power(profiles: Profiles, facts: CarbonFacts) -> tuple[DevicePower, tuple[Assumption, ...]]:
    """Power of every device, and the assumptions made."""
    _check_idle(profiles)
    classes = np.array([name if name in CLASSES else USUAL_CLASS for name in profiles.device_class])
    used = tuple(name for name in CLASSES if (classes == name).any())
    notes: list[Assumption] = []
    strange = sum(name not in CLASSES for name in profiles.device_class)
    if strange:
        notes.append(Assumption(_of("class", strange), USUAL_CLASS, "assumption: these devices name no known class"))

    def by_class(quantity: Quantity, what: str, unit: str, where: Bools) -> Floats:
        values = np.full(len(profiles), np.nan)
        for name in used:
            members = classes == name
            figure = facts.default(quantity, name)
            values[members] = figure.value
            if (members & where).any():
                notes.append(
                    Assumption(
                        _of(f"{what} of a {name}", (members & where).sum()), f"{figure.value:g}{unit}", figure.source
                    )
                )
        return values

    everyone = np.ones(len(profiles), dtype=np.bool_)
    load_w = _or_else(profiles.watts, lambda: _nearest_load_w(profiles, classes, facts))
    load_w = np.fmax(load_w, profiles.idle_watts)
    unknown = np.isnan(profiles.watts)
    if unknown.any():
        notes.append(
            Assumption(
                _of("power under load", unknown.sum()),
                f"{load_w[unknown].min():.3g} to {load_w[unknown].max():.3g} W",
                "devices.csv: the model of the same class with the nearest speed",
            )
        )
    idle_share = by_class("idle_share", "idle power", " of its load", np.isnan(profiles.idle_watts))
    embodied = by_class("embodied", "embodied carbon", " kgCO2e", np.isnan(profiles.embodied_kgco2e))
    grids = {country: facts.kgco2e_per_kwh(country) for country in dict.fromkeys(profiles.country)}
    notes += [grid_note(country, figure) for country, figure in grids.items()]
    power = DevicePower(
        load_w=load_w,
        idle_w=_or_else(profiles.idle_watts, lambda: idle_share * load_w),
        charger_efficiency=by_class("charger_efficiency", "charger efficiency", "", everyone),
        network_j_per_byte=_network(classes, used, facts, notes),
        kgco2e_per_kwh=np.array([grids[country].value for country in profiles.country]),
        embodied_kgco2e=_or_else(profiles.embodied_kgco2e, lambda: embodied),
        lifetime_s=by_class("lifetime_h", "lifetime", " h", everyone) * _SECONDS_PER_HOUR,
    )
    return power, tuple(notes)


def server_power(
    profiles: Profiles, facts: CarbonFacts, *, watts: float | None = None
) -> tuple[ServerPower, tuple[Assumption, ...]]:
    """An office desktop in the country of most devices, or a machine of so many watts there; and the assumptions."""
    country = most_common_country(profiles)
    load, embodied = facts.default("load", "server"), facts.default("embodied", "server")
    lifetime = facts.default("lifetime_h", "server")
    power = ServerPower(
        watts=load.value if watts is None else watts,
        kgco2e_per_kwh=facts.kgco2e_per_kwh(country).value,
        embodied_kgco2e=embodied.value,
        lifetime_s=lifetime.value * _SECONDS_PER_HOUR,
    )
    notes = [
        Assumption("country of the server", country or WORLD, "assumption: that of most devices"),
        Assumption("embodied carbon of the server", f"{embodied.value:g} kgCO2e", embodied.source),
        Assumption("lifetime of the server", f"{lifetime.value:g} h", lifetime.source),
    ]
    if watts is None:
        notes.insert(1, Assumption("power of the server", f"{load.value:g} W", load.source))
    return power, tuple(notes)


def most_common_country(profiles: Profiles) -> str:
    return Counter(profiles.country).most_common(1)[0][0]


def grid_note(country: str, figure: Figure) -> Assumption:
    return Assumption(f"grid of {country or WORLD}", f"{figure.value:.3g} kgCO2e/kWh", figure.source)


def _of(what: str, count: int | np.int64) -> str:
    return f"{what} ({count:,} device{'' if count == 1 else 's'})"


def _or_else(given: Floats, default: Callable[[], Floats]) -> Floats:
    return np.where(np.isnan(given), default(), given)


def _check_idle(profiles: Profiles) -> None:
    above = np.flatnonzero(profiles.idle_watts > profiles.watts)
    if len(above):
        i = int(above[0])
        raise FleetError(
            f"expected idle_watts of device {profiles.names[i][:60]!r} to be at most its watts, "
            f"{profiles.watts[i]:g}, got {profiles.idle_watts[i]:g}; correct it"
        )


def _nearest_load_w(
    profiles: Profiles, classes: np.ndarray[tuple[int], np.dtype[np.str_]], facts: CarbonFacts
) -> Floats:
    load_w = np.empty(len(profiles))
    for name in dict.fromkeys(classes.tolist()):
        models = [row for row in facts.devices if row["class"] == name and row["load_w"] and row["sustained_tflops"]]
        speeds = np.log([float(row["sustained_tflops"]) * 1e12 for row in models])
        watts = np.array([float(row["load_w"]) for row in models])
        members = np.flatnonzero(classes == name)
        apart = np.abs(np.log(profiles.flops_per_s[members])[:, None] - speeds)
        load_w[members] = watts[apart.argmin(axis=1)]
    return load_w


def _network(
    classes: np.ndarray[tuple[int], np.dtype[np.str_]], used: Iterable[str], facts: CarbonFacts, notes: list[Assumption]
) -> Floats:
    """Joules per byte: the energy of fixed and mobile networks, by the share of a class that is on mobile links."""
    fixed, mobile = facts.network_j_per_byte("fixed"), facts.network_j_per_byte("mobile")
    notes.append(Assumption("energy of fixed networks", f"{fixed.value * 1e6:g} J/MB", fixed.source))
    per_byte = np.full(len(classes), fixed.value)
    for name in used:
        share = MOBILE_SHARE[name]
        if share:
            per_byte[classes == name] = fixed.value * (1 - share) + mobile.value * share
            notes.append(Assumption("energy of mobile networks", f"{mobile.value * 1e6:g} J/MB", mobile.source))
            notes.append(Assumption(f"bytes of a {name} on mobile links", f"{share:.0%}", "as fleets are sampled"))
    return per_byte
