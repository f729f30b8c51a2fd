"""`cleave status`: a server's answer at /api/status, as text."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from rich.console import Console

from cleave.errors import InputError
from cleave.printable import printable
from cleave.report.device_table import device_table
from cleave.report.quantities import plural, seconds, si

_MOST_STEPS = 8


class _Device(msgspec.Struct, rename={"name": "device", "level": "trust"}):
    name: str
    kernel: str
    flops_per_s: float
    down_bytes_per_s: float
    up_bytes_per_s: float
    tasks: int
    done_flops: float
    verified_flops: float
    wrong: int
    level: str
    down_bytes: int
    up_bytes: int
    idle_reason: str

    def __post_init__(self) -> None:
        self.name = printable(self.name)

    @property
    def rates(self) -> tuple[float, float, float]:
        return self.flops_per_s, self.down_bytes_per_s, self.up_bytes_per_s


class _Step(msgspec.Struct, frozen=True):
    seconds: float
    predicted_s: float


class _Status(msgspec.Struct, frozen=True):
    devices: tuple[_Device, ...]
    grain: str | None
    grain_reason: str
    steps: tuple[_Step, ...]
    off_reason: str
    shared_links: tuple[str, ...]
    down_bytes: int
    up_bytes: int


def show(address: str, body: bytes) -> None:
    """Print the status that a server sent. Raises InputError if it is none."""
    try:
        status = msgspec.json.decode(body, type=_Status)
    except msgspec.DecodeError as fault:
        raise InputError(
            f"expected the status of a Cleave server from {address}, but {printable(str(fault))}"
        ) from None
    console = Console(highlight=False)
    for line in _facts(address, status):
        console.print(line, markup=False, soft_wrap=True)
    if status.devices:
        console.print(device_table(status.devices, console.width))


def _facts(address: str, status: _Status) -> Sequence[str]:
    traffic = f"{si(status.down_bytes, 'B')} down, {si(status.up_bytes, 'B')} up"
    lines = [f"{address}: {plural(len(status.devices), 'device')}, {traffic}"]
    if status.grain is not None:
        lines.append(printable(f"grain {status.grain}: {status.grain_reason}"))
    if status.steps:
        took = ", ".join(f"{seconds(one.seconds)} ({seconds(one.predicted_s)})" for one in status.steps[-_MOST_STEPS:])
        lines.append(f"latest steps, measured (predicted): {took}")
    lines += [printable(text) for text in (status.off_reason, *status.shared_links) if text]
    return lines
