"""The outcomes of a simulation, as JSON and as a table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

from cleave.core.cost.rates import Server
from cleave.report.plain import plain_console
from cleave.report.plan_words import table
from cleave.report.quantities import plural, seconds, si


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One system's outcome."""

    system: str
    fits: bool
    reason: str
    batch_s: float | None
    down_bytes: float | None
    up_bytes: float | None
    memory_bytes: float | None
    devices_used: int
    recovery_s: float | None
    detail: Mapping[str, float | int | str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A setting, and a row per system."""

    model: str
    params: int
    tokens: int
    sequence: int
    devices: int
    wire: str
    server: Server
    batches: int
    churn: str | None
    noise: float
    drift: float
    stalls_per_hour: float
    seed: int
    rows: tuple[Row, ...]


def as_json(sheet: Sheet) -> dict[str, object]:
    """What `--json` prints; quantities that do not exist are absent, those without a limit are null."""
    setting = {name: getattr(sheet, name) for name in Sheet.__slots__ if name not in ("server", "rows")}
    server = sheet.server
    return {
        "setting": setting
        | {
            "server_down_bytes_per_s": _finite(server.down_bytes_per_s),
            "server_up_bytes_per_s": _finite(server.up_bytes_per_s),
        },
        "systems": {row.system: _fields(row) for row in sheet.rows},
    }


def show(sheet: Sheet) -> None:
    console = plain_console()
    links = [
        "unlimited" if rate == float("inf") else si(8 * rate, "bit/s")
        for rate in (sheet.server.down_bytes_per_s, sheet.server.up_bytes_per_s)
    ]
    console.print(
        f"{sheet.model}, {sheet.tokens:,} tokens per batch in sequences of {sheet.sequence:,}, "
        f"{plural(sheet.devices, 'device')}, wire {sheet.wire}, server {links[0]} down and {links[1]} up"
    )
    world = [f"seed {sheet.seed}"]
    world += [f"churn {sheet.churn}"] if sheet.churn else []
    world += [f"true rates off by {sheet.noise:.0%}"] if sheet.noise else []
    world += [f"drifting by {sheet.drift:.0%} an hour"] if sheet.drift else []
    world += [f"{sheet.stalls_per_hour:g} stalls an hour"] if sheet.stalls_per_hour else []
    batches = "one batch" if sheet.batches == 1 else f"mean of {sheet.batches:,} batches"
    console.print(f"{batches}; {', '.join(world)}; no leases: all trained weights travel in every batch")
    found = table("arrangement", "s per batch", "devices", "down", "up", "memory", "recovery")
    for row in sheet.rows:
        if row.fits and row.batch_s is not None:
            found.add_row(
                row.system,
                seconds(row.batch_s),
                f"{row.devices_used:,}",
                *(_size(value) for value in (row.down_bytes, row.up_bytes, row.memory_bytes)),
                "" if row.recovery_s is None else seconds(row.recovery_s),
            )
        else:
            found.add_row(row.system, "does not fit", "", "", "", "", "")
    console.print(found)
    for row in sheet.rows:
        method = f" (method: {row.detail['method']})" if "method" in row.detail else ""
        console.print(f"{row.system}: {row.reason}{method}")


def _fields(row: Row) -> dict[str, object]:
    named: dict[str, object] = {name: getattr(row, name) for name in Row.__slots__ if name not in ("system", "detail")}
    return {**{name: value for name, value in named.items() if value is not None}, **row.detail}


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None


def _size(value: float | None) -> str:
    return "" if value is None else si(value, "B")
