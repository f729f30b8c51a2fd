"""The devices to emulate: one per row of a fleet file, repeated as often as asked. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from cleave.core.fleet.profiles import Profiles


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One device: what it can do, and what it shares."""

    name: str
    flops_per_s: float
    down_bytes_per_s: float
    up_bytes_per_s: float
    latency_s: float
    """Round trip."""
    memory_bytes: int
    task_s: float = 0.0
    byte_s: float = 0.0
    medium: str = ""
    medium_bytes_per_s: float = np.inf


def devices_of(
    profiles: Profiles, count: int | None = None, calibration: Profiles | None = None
) -> list[DeviceProfile]:
    """Return a device per row, or `count` of them: the first rows, or all rows again and again with numbered names.

    Each repetition has media of its own, like another household. Rows without `task_s` or `byte_s` take them from the
    first row of `calibration`.
    """
    rows = _rows(profiles, calibration)
    wanted = len(rows) if count is None else count
    if wanted <= len(rows):
        return rows[:wanted]
    return [_numbered(rows[i % len(rows)], i // len(rows) + 1) for i in range(wanted)]


def _rows(profiles: Profiles, calibration: Profiles | None) -> list[DeviceProfile]:
    task_s, byte_s = profiles.task_s, profiles.byte_s
    if calibration is not None:
        task_s = np.where(task_s > 0, task_s, calibration.task_s[0])
        byte_s = np.where(byte_s > 0, byte_s, calibration.byte_s[0])
    return [
        DeviceProfile(
            name=name,
            flops_per_s=float(profiles.flops_per_s[i]),
            down_bytes_per_s=float(profiles.down_bytes_per_s[i]),
            up_bytes_per_s=float(profiles.up_bytes_per_s[i]),
            latency_s=float(profiles.latency_s[i]),
            memory_bytes=int(profiles.memory_bytes[i]),
            task_s=float(task_s[i]),
            byte_s=float(byte_s[i]),
            medium=profiles.medium[i],
            medium_bytes_per_s=float(profiles.medium_bytes_per_s[i]) if profiles.medium[i] else np.inf,
        )
        for i, name in enumerate(profiles.names)
    ]


def _numbered(device: DeviceProfile, number: int) -> DeviceProfile:
    return replace(device, name=f"{device.name}-{number}", medium=f"{device.medium}-{number}" if device.medium else "")


def capacities(devices: Sequence[DeviceProfile]) -> dict[str, float]:
    """Bytes per second of each medium, by name."""
    return {device.medium: device.medium_bytes_per_s for device in devices if device.medium}
