"""The footprint of a fleet's work, from the seconds it was busy and the bytes it moved.

    devices    (load_w - idle_w) x busy_s / charger_efficiency
    network    joules per byte x (down_bytes + up_bytes)
    server     watts x pue x wall_s
    kgco2e     each of these x the grid intensity where it is drawn
    embodied   embodied kgCO2e x busy_s / lifetime_s of a device, and x wall_s / lifetime_s of the server

Embodied carbon is shared out by calendar time: a second of use carries the same part of it as any other second of a
device's life. Busy is a device that computes; a device that waits or transfers is idle, which counts only where it is
kept awake for the work (`awake_idle`). docs/carbon.md gives the reasons. Knows neither plans nor runs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cleave.core.carbon.footprint import JOULES_PER_KWH, Footprint, Part
from cleave.core.carbon.power import DevicePower, ServerPower
from cleave.core.fleet.profiles import Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Use:
    """What work took: one entry per device, and the time from its start to its end."""

    busy_s: Floats
    """Seconds of computing."""
    down_bytes: Floats
    up_bytes: Floats
    wall_s: float

    def __add__(self, other: Use) -> Use:
        return Use(
            busy_s=self.busy_s + other.busy_s,
            down_bytes=self.down_bytes + other.down_bytes,
            up_bytes=self.up_bytes + other.up_bytes,
            wall_s=self.wall_s + other.wall_s,
        )

    def __mul__(self, times: float) -> Use:
        return Use(
            busy_s=self.busy_s * times,
            down_bytes=self.down_bytes * times,
            up_bytes=self.up_bytes * times,
            wall_s=self.wall_s * times,
        )


def footprint(use: Use, power: DevicePower, server: ServerPower) -> Footprint:
    devices_j = (power.load_w - power.idle_w) * use.busy_s / power.charger_efficiency
    network_j = power.network_j_per_byte * (use.down_bytes + use.up_bytes)
    embodied_kg = float((power.embodied_kgco2e * use.busy_s / power.lifetime_s).sum())
    return Footprint(
        devices=emitted(devices_j, power.kgco2e_per_kwh),
        network=emitted(network_j, power.kgco2e_per_kwh),
        server=emitted(np.array([server.watts * server.pue * use.wall_s]), np.array([server.kgco2e_per_kwh])),
        embodied_kgco2e=embodied_kg + server.embodied_kgco2e * use.wall_s / server.lifetime_s,
    )


def awake_idle(use: Use, power: DevicePower) -> Part:
    """Idle energy of the devices that take part, to be added where they would be asleep or off without the work."""
    takes_part = (use.busy_s > 0) | (use.down_bytes > 0)
    return emitted(power.idle_w * use.wall_s * takes_part / power.charger_efficiency, power.kgco2e_per_kwh)


def emitted(energy_j: Floats, kgco2e_per_kwh: Floats) -> Part:
    """Energy drawn from grids, and its emissions."""
    return Part(energy_j=float(energy_j.sum()), kgco2e=float((energy_j * kgco2e_per_kwh).sum()) / JOULES_PER_KWH)


def joules_per_flop(power: DevicePower, flops_per_s: Floats, bytes_per_flop: float) -> Floats:
    """Energy of a device for one more operation, with the bytes that go with it."""
    compute_w = (power.load_w - power.idle_w) / power.charger_efficiency
    return compute_w / flops_per_s + power.network_j_per_byte * bytes_per_flop


def kgco2e_per_flop(power: DevicePower, flops_per_s: Floats, bytes_per_flop: float) -> Floats:
    """Emissions of the same, with the embodied share."""
    drawn = joules_per_flop(power, flops_per_s, bytes_per_flop) * power.kgco2e_per_kwh / JOULES_PER_KWH
    return drawn + power.embodied_kgco2e / power.lifetime_s / flops_per_s
