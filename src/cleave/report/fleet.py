"""`cleave fleet show`: summarize a fleet as a table or as JSON."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cleave.core.fleet.profiles import FleetSummary
from cleave.report.quantities import seconds, si

_LABELS = {
    "flops_per_s": ("compute", "FLOP/s"),
    "down_bytes_per_s": ("down", "bit/s"),
    "up_bytes_per_s": ("up", "bit/s"),
    "latency_s": ("latency", "s"),
    "memory_bytes": ("usable memory", "B"),
    "task_s": ("fixed cost of a task", "s"),
    "byte_s": ("handling of a byte", "s"),
    "medium_bytes_per_s": ("shared medium", "bit/s"),
    "watts": ("power under load", "W"),
    "idle_watts": ("power when idle", "W"),
    "embodied_kgco2e": ("embodied carbon", "kg CO2e"),
}


def show(summary: FleetSummary, source: str, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({"fleet": source, **asdict(summary)}) + "\n")
        return
    console = Console(markup=False, emoji=False)
    kinds = ", ".join(f"{count:,} {name}" for name, count in summary.classes)
    places = ", ".join(name for name, _ in summary.countries)
    console.print(Text.assemble((source, "bold"), f": {summary.devices:,} devices ({kinds}); country: {places}"))
    table = Table(box=None, pad_edge=False)
    for heading in ("", "slow tenth", "median", "fast tenth", "together"):
        table.add_column(heading, justify="left" if not heading else "right")
    for column in summary.columns:
        label, unit = _LABELS[column.column]
        total = "" if column.total is None else _format(column.total, unit)
        known = "" if column.known == summary.devices else f" ({column.known:,} known)"
        table.add_row(label + known, *(_format(v, unit) for v in (column.p10, column.p50, column.p90)), total)
    console.print(table)


def _format(value: float, unit: str) -> str:
    if unit == "s":
        return seconds(value)
    if unit.startswith("kg"):
        return f"{value:,.0f} {unit}"
    return si(value * 8 if unit == "bit/s" else value, unit)
