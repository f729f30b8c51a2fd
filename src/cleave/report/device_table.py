"""A table of devices that fits the terminal: names are shortened and columns dropped before a number is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from rich.table import Table
from rich.text import Text

from cleave.report.quantities import si

_MAX_NAME = 20
_MIN_NAME = 8


class DeviceRow(Protocol):
    """A device as views show it; the server's `Member` implements it."""

    name: str
    kernel: str
    tasks: int
    done_flops: float
    verified_flops: float
    wrong: int
    down_bytes: int
    up_bytes: int
    idle_reason: str

    @property
    def level(self) -> str:
        """How far it is trusted."""
        ...

    @property
    def rates(self) -> tuple[float, float, float]: ...


# Headings and cells; where they do not fit, the last columns are dropped first.
_COLUMNS: tuple[tuple[str, Callable[[DeviceRow], str]], ...] = (
    ("tasks", lambda device: f"{device.tasks:,}"),
    ("work", lambda device: si(device.done_flops, "FLOP")),
    ("speed", lambda device: si(device.rates[0], "FLOP/s")),
    ("trust", lambda device: device.level),
    ("received", lambda device: si(device.down_bytes, "B")),
    ("returned", lambda device: si(device.up_bytes, "B")),
    ("down", lambda device: si(device.rates[1], "B/s")),
    ("up", lambda device: si(device.rates[2], "B/s")),
)


def device_table(devices: Sequence[DeviceRow], width: int, *, at_most: int | None = None) -> Table:
    """Tabulate what each device contributes and how fast it is, in `width` characters and at most so many rows."""
    shown = devices if at_most is None or len(devices) <= at_most else devices[: max(at_most - 1, 0)]
    cells = [[cell(device) for _, cell in _COLUMNS] for device in shown]
    widths = [
        max(len(heading), *(len(row[index]) for row in cells), 0) if cells else len(heading)
        for index, (heading, _) in enumerate(_COLUMNS)
    ]
    kept = len(_COLUMNS)
    while kept > 1 and sum(widths[:kept]) + 2 * kept + _MIN_NAME > width:
        kept -= 1
    room = max(_MIN_NAME, min(_MAX_NAME, width - sum(widths[:kept]) - 2 * kept))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("device", no_wrap=True, max_width=room, overflow="ellipsis")
    for (heading, _), column in zip(_COLUMNS[:kept], widths, strict=False):
        table.add_column(heading, justify="right", no_wrap=True, min_width=column)
    for device, row in zip(shown, cells, strict=True):
        table.add_row(Text(device.name), *row[:kept])
    if len(shown) < len(devices):
        table.add_row(f"+ {len(devices) - len(shown):,} more")
    return table
