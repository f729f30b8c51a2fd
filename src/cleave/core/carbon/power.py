"""Power, grid and embodied carbon of a fleet's devices and of its server: as given, or by class from the fact tables.

What a fleet file does not give is taken from the device model of the same class whose speed is nearest, or from the
class as a whole; a device without a class counts as a laptop. Every default that was used is listed with its source.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cleave.core.carbon.facts import WORLD, CarbonFacts, Figure, Quantity
from cleave.core.carbon.footprint import Assumption
from cleave.core.fleet.profiles import Bools, Floats, Profiles
from cleave.core.fleet.sampling import CLASSES, MOBILE_SHARE
from cleave.errors import FleetError

Classes = NDArray[np.str_]
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
    known = np.array([name in CLASSES for name in profiles.device_class])
    classes = np.where(known, profiles.device_class, USUAL_CLASS)
    notes: list[Assumption] = []
    if not known.all():
        why = "assumption: these devices name no known class"
        notes.append(Assumption(_of("class", ~known), USUAL_CLASS, why, "class"))

    def by_class(quantity: Quantity, what: str, unit: str, given: Floats | None = None, column: str = "") -> Floats:
        """A quantity by class; noted for the devices of which it is not given."""
        values = np.empty(len(profiles))
        lacking = np.ones(len(profiles), dtype=np.bool_) if given is None else np.isnan(given)
        for name in dict.fromkeys(classes.tolist()):
            members = classes == name
            values[members], source = facts.default(quantity, name)
            if (members & lacking).any():
                what_of, value = _of(f"{what} of a {name}", members & lacking), f"{values[members][0]:g}{unit}"
                notes.append(Assumption(what_of, value, source, column))
        return values

    lacking = np.isnan(profiles.watts)
    load_w = np.where(lacking, np.fmax(_nearest_load_w(profiles, classes, facts), profiles.idle_watts), profiles.watts)
    if lacking.any():
        least, most = load_w[lacking].min(), load_w[lacking].max()
        why = "devices.csv: the model of the same class with the nearest speed"
        value = f"{least:.3g} W" if least == most else f"{least:.3g} to {most:.3g} W"
        notes.append(Assumption(_of("power under load", lacking), value, why, "watts"))
    idle_w = load_w * by_class("idle_share", "idle power", " of its load", profiles.idle_watts, "idle_watts")
    embodied = by_class("embodied", "embodied carbon", " kgCO2e", profiles.embodied_kgco2e, "embodied_kgco2e")
    grids = {country: facts.kgco2e_per_kwh(country) for country in dict.fromkeys(profiles.country)}
    notes += [_grid(country, figure) for country, figure in grids.items()]
    power = DevicePower(
        load_w=load_w,
        idle_w=np.where(np.isnan(profiles.idle_watts), idle_w, profiles.idle_watts),
        charger_efficiency=by_class("charger_efficiency", "charger efficiency", ""),
        network_j_per_byte=_network(classes, facts, notes),
        kgco2e_per_kwh=np.array([grids[country].value for country in profiles.country]),
        embodied_kgco2e=np.where(np.isnan(profiles.embodied_kgco2e), embodied, profiles.embodied_kgco2e),
        lifetime_s=by_class("lifetime_h", "lifetime", " h") * _SECONDS_PER_HOUR,
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


def _grid(country: str, figure: Figure) -> Assumption:
    column = "" if country else "country"
    return Assumption(f"grid of {country or WORLD}", f"{figure.value:.3g} kgCO2e/kWh", figure.source, column)


def _of(what: str, devices: Bools) -> str:
    count = int(devices.sum())
    return f"{what} ({count:,} device{'' if count == 1 else 's'})"


def _check_idle(profiles: Profiles) -> None:
    above = np.flatnonzero(profiles.idle_watts > profiles.watts)
    if len(above):
        i = int(above[0])
        raise FleetError(
            f"expected idle_watts of device {profiles.names[i][:60]!r} to be at most its watts, "
            f"{profiles.watts[i]:g}, got {profiles.idle_watts[i]:g}; correct it"
        )


def _nearest_load_w(profiles: Profiles, classes: Classes, facts: CarbonFacts) -> Floats:
    """Power of the device model of the same class whose speed is nearest, in logarithms."""
    load_w = np.empty(len(profiles))
    for name in dict.fromkeys(classes.tolist()):
        models = [row for row in facts.devices if row["class"] == name and row["load_w"] and row["sustained_tflops"]]
        speeds = np.log([float(row["sustained_tflops"]) * 1e12 for row in models])
        watts = np.array([float(row["load_w"]) for row in models])
        members = np.flatnonzero(classes == name)
        apart = np.abs(np.log(profiles.flops_per_s[members])[:, None] - speeds)
        load_w[members] = watts[apart.argmin(axis=1)]
    return load_w


def _network(classes: Classes, facts: CarbonFacts, notes: list[Assumption]) -> Floats:
    """Joules per byte: the energy of fixed and mobile networks, by the share of a class that is on mobile links."""
    fixed, mobile = facts.network_j_per_byte("fixed"), facts.network_j_per_byte("mobile")
    notes.append(Assumption("energy of fixed networks", f"{fixed.value * 1e6:g} J/MB", fixed.source))
    per_byte = np.full(len(classes), fixed.value)
    for name in dict.fromkeys(classes.tolist()):
        share = MOBILE_SHARE[name]
        if share:
            per_byte[classes == name] = fixed.value * (1 - share) + mobile.value * share
            notes.append(Assumption("energy of mobile networks", f"{mobile.value * 1e6:g} J/MB", mobile.source))
            notes.append(Assumption(f"bytes of a {name} on mobile links", f"{share:.0%}", "as fleets are sampled"))
    return per_byte
