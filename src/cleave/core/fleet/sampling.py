"""Sample a fleet from the fact tables: realistic speeds, links and memories.

A device model is drawn by its weight within a class, a home line or mobile link by the access technologies of a
country, usable memory by BOINC's defaults. Tables are passed in as parsed rows (`cleave.facts.table`) and all
randomness comes from the given generator, so the same seed gives the same fleet. Churn is not modeled here, nor are
shared lines: every device is assumed to have its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import numpy as np

from cleave.core.fleet.profiles import Floats, Ints, Profiles
from cleave.errors import FleetError

Row = Mapping[str, str]
DeviceClass = Literal["phone", "laptop", "desktop", "sbc"]
CLASSES: Final[tuple[str, ...]] = get_args(DeviceClass)

# Assumptions that no table provides; README.md of the fact tables gives the reasons.
SPEED_SIGMA_LN: Final = 0.15
"""Spread between devices of one model: heat, age, other load."""
LINE_CORRELATION: Final = 0.8
"""Correlation of log down and log up rates within a technology: dearer plans are faster both ways."""
LATENCY_SIGMA_LN: Final = 1.04
"""sqrt(2 ln(24/14)), from the US fixed mean and median of networks.csv."""
LINK_CEILING_MBPS: Final = 1000.0
"""Gigabit Ethernet ports of home routers; truncates the lognormal tails."""
MOBILE_SHARE: Final[Mapping[str, float]] = {"phone": 0.2, "laptop": 0.0, "desktop": 0.0, "sbc": 0.0}
WIFI_SHARE: Final[Mapping[str, float]] = {"phone": 0.8, "laptop": 0.85, "desktop": 0.0, "sbc": 0.0}
"""The rest, neither mobile nor Wi-Fi, is on Ethernet."""
MAX_DEVICES: Final = 1_000_000

_BYTES_PER_S_PER_MBPS: Final = 1e6 / 8
_BYTES_PER_GB: Final = 2.0**30  # RAM is sold in powers of two


def parse_mix(text: str) -> dict[str, int]:
    """Parse devices per class from text such as `phone=600,laptop=300`."""
    mix: dict[str, int] = {}
    for part in text.split(","):
        name, equals, digits = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise FleetError(
                f"expected a mix such as phone=600,laptop=300, got {part!r}; write class=count for each class"
            )
        if name in mix:
            raise FleetError(f"{name!r} appears twice in the mix; add its counts up")
        count = digits.removeprefix("-")
        if not (count.isascii() and count.isdecimal() and len(count) <= 9):
            raise FleetError(
                f"the count of {name or 'a class'} must be a whole number up to {MAX_DEVICES:,}, but is "
                f"{digits[:20]!r}; try phone=600,laptop=300"
            )
        mix[name] = int(digits)
    _check_mix(mix)
    return mix


def sample(
    devices: Sequence[Row],
    access: Sequence[Row],
    memory_policy: Sequence[Row],
    *,
    mix: Mapping[str, int],
    country: str,
    rng: np.random.Generator,
) -> Profiles:
    """Sample a fleet of `mix` devices per class in one country.

    The rows are those of the fact tables devices, access and device_memory_policy. Devices come class by class in the
    order of the mix, named `phone-0001` and so on.
    """
    country = country.strip().lower()
    _check_mix(mix)
    counts = {name: count for name, count in mix.items() if count > 0}
    classes = [name for name, count in counts.items() for _ in range(count)]
    model = np.concatenate([_draw_models(devices, name, count, rng) for name, count in counts.items()])
    tflops = _column(devices, "sustained_tflops")[model]
    speed = np.exp(SPEED_SIGMA_LN * rng.standard_normal(len(model)))
    links = _connect(access, country, classes, rng)
    return Profiles(
        names=_names(counts),
        flops_per_s=tflops * 1e12 * speed,
        down_bytes_per_s=links.down_mbps * _BYTES_PER_S_PER_MBPS,
        up_bytes_per_s=links.up_mbps * _BYTES_PER_S_PER_MBPS,
        latency_s=links.latency_ms / 1e3,
        memory_bytes=_draw_memory_bytes(devices, memory_policy, model, classes, rng),
        watts=_column(devices, "load_w")[model],
        embodied_kgco2e=_column(devices, "embodied_kgco2e")[model],
        device_class=tuple(classes),
        country=(country,) * len(model),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """One entry per link in every column; latency is round trip."""

    down_mbps: Floats
    up_mbps: Floats
    latency_ms: Floats


def draw_links(
    access: Sequence[Row],
    *,
    country: str,
    kind: Literal["fixed", "mobile", "wifi"],
    count: int,
    rng: np.random.Generator,
) -> Links:
    """Draw links of one kind: a technology by its share, then both rates from its two correlated lognormals.

    `wifi` is the radio alone; a device gets the lesser of it and the home's fixed line.
    """
    rows, scale = _mixture(access, country, kind)
    share = _column(rows, "share")
    technology = rng.choice(len(rows), size=count, p=share / share.sum())
    down, independent, wait = rng.standard_normal((3, count))
    up = LINE_CORRELATION * down + np.sqrt(1 - LINE_CORRELATION**2) * independent

    def rate_mbps(direction: str, deviate: Floats) -> Floats:
        median, sigma = _column(rows, f"{direction}_median_mbps"), _column(rows, f"{direction}_sigma_ln")
        drawn = scale * median[technology] * np.exp(sigma[technology] * deviate)
        return np.minimum(drawn, LINK_CEILING_MBPS)

    return Links(
        down_mbps=rate_mbps("down", down),
        up_mbps=rate_mbps("up", up),
        latency_ms=_column(rows, "latency_ms")[technology] * np.exp(LATENCY_SIGMA_LN * wait),
    )


def countries(access: Sequence[Row]) -> tuple[str, ...]:
    """List the countries for which links can be drawn, sorted."""
    return tuple(sorted({row["country"] for row in access if row["kind"] == "fixed"}))


def _check_mix(mix: Mapping[str, int]) -> None:
    for name, count in mix.items():
        if name not in CLASSES:
            raise FleetError(f"unknown device class {name!r} in the mix; use {', '.join(CLASSES)}")
        if count < 0:
            raise FleetError(f"the count of {name} must be at least 0, but is {count}; try {name}=100")
    total = sum(mix.values())
    if not 0 < total <= MAX_DEVICES:
        raise FleetError(
            f"a mix needs 1 to {MAX_DEVICES:,} devices in all, but has {total:,}; try phone=600,laptop=300"
        )


def _names(counts: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(
        f"{name}-{i:0{max(4, len(str(count)))}d}" for name, count in counts.items() for i in range(1, count + 1)
    )


def _column(rows: Sequence[Row], column: str) -> Floats:
    """Return a column as numbers, NaN where the cell is empty."""
    return np.array([float(row[column] or "nan") for row in rows])


def _draw_models(devices: Sequence[Row], name: str, count: int, rng: np.random.Generator) -> Ints:
    """Draw indices into the device table, by weight within the class."""
    weight = np.where([row["class"] == name for row in devices], _column(devices, "weight"), 0.0)
    return rng.choice(len(devices), size=count, p=weight / weight.sum())


def _draw_memory_bytes(
    devices: Sequence[Row],
    memory_policy: Sequence[Row],
    model: Ints,
    classes: Sequence[str],
    rng: np.random.Generator,
) -> Floats:
    """Draw usable memory between BOINC's caps for an active and an idle owner; of VRAM for a discrete GPU."""
    limits = {name: _memory_limits(memory_policy, name) for name in CLASSES}
    active = np.array([limits[name][0] for name in classes])
    idle = np.array([limits[name][1] for name in classes])
    ram_gb, vram_gb = _column(devices, "ram_gb"), _column(devices, "vram_gb")
    capacity_gb = np.where(np.isnan(vram_gb), ram_gb, vram_gb)[model]
    return np.floor(capacity_gb * _BYTES_PER_GB * rng.uniform(active, idle))


def _memory_limits(memory_policy: Sequence[Row], name: str) -> tuple[float, float]:
    platform = "BOINC Android default" if name == "phone" else "BOINC desktop default"
    value = next(row["value"] for row in memory_policy if row["platform"] == platform and "RAM" in row["rule"])
    active, idle = (float(share.strip().removesuffix("%")) / 100 for share in value.split("/"))
    return active, idle


def _connect(access: Sequence[Row], country: str, classes: Sequence[str], rng: np.random.Generator) -> Links:
    """Give each device a mobile link, or a home line over Wi-Fi or Ethernet."""
    count = len(classes)
    line = draw_links(access, country=country, kind="fixed", count=count, rng=rng)
    radio = draw_links(access, country=country, kind="wifi", count=count, rng=rng)
    mobile = draw_links(access, country=country, kind="mobile", count=count, rng=rng)
    mobile_share = np.array([MOBILE_SHARE[name] for name in classes])
    wifi_share = np.array([WIFI_SHARE[name] for name in classes])
    draw = rng.random(count)
    on_mobile = draw < mobile_share
    on_wifi = ~on_mobile & (draw < mobile_share + wifi_share)
    home_down = np.where(on_wifi, np.minimum(line.down_mbps, radio.down_mbps), line.down_mbps)
    home_up = np.where(on_wifi, np.minimum(line.up_mbps, radio.up_mbps), line.up_mbps)
    home_latency = line.latency_ms + np.where(on_wifi, radio.latency_ms, 0.0)
    return Links(
        down_mbps=np.where(on_mobile, mobile.down_mbps, home_down),
        up_mbps=np.where(on_mobile, mobile.up_mbps, home_up),
        latency_ms=np.where(on_mobile, mobile.latency_ms, home_latency),
    )


def _mixture(access: Sequence[Row], country: str, kind: str) -> tuple[Sequence[Row], float]:
    """Return a country's technologies, or the world's with a factor to match the country's published median."""
    if country not in countries(access):
        raise FleetError(
            f"there is no link data for the country {country!r}; use --country world, or one of "
            f"{', '.join(code for code in countries(access) if code != 'world')}"
        )
    of_kind = [row for row in access if row["kind"] == kind]
    own = [row for row in of_kind if row["country"] == country and row["share"]]
    if own:
        return own, 1.0
    medians = {row["country"]: float(row["down_median_mbps"]) for row in of_kind if row["technology"] == "median"}
    world = [row for row in of_kind if row["country"] == "world" and row["share"]]
    return world, medians[country] / medians["world"] if country in medians else 1.0
