"""From figures and outcomes to charts: values as text, settings in words, outcomes as rows of a CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from dataclasses import fields as fields_of

from cleave.report.chart import Chart, Mark, Panel, Series, Unit
from cleave.report.quantities import plural, seconds, si
from cleave.sim.cell import Cell
from cleave.sim.setting import Outcome
from cleave.sim.study.figure import Figure, FigurePanel, Found, Line, Point, cells, cells_of

_FIELDS = tuple(one.name for one in fields_of(Cell))
_FIGURES = (
    "fits", "batch_s", "down_bytes", "up_bytes", "memory_bytes", "devices_used", "recovery_s", "reason",
)  # fmt: skip


def chart_of(figure: Figure, outcomes: Mapping[Cell, Outcome], population: str) -> Chart:
    """`population` says in words where the devices are from."""
    return Chart(
        name=figure.name,
        title=figure.title,
        says=figure.says,
        panels=tuple(_panel(panel, outcomes, population) for panel in figure.panels),
        rows=tuple(_row(cell, outcomes[cell]) for cell in cells([figure])),
    )


def _panel(panel: FigurePanel, outcomes: Mapping[Cell, Outcome], population: str) -> Panel:
    return Panel(
        title=panel.title,
        setting=setting_text([cell for point in panel.points for cell in point.cells], population),
        x_label=panel.x_label,
        y_label=panel.y_label,
        places=tuple(point.x for point in panel.points),
        labels=tuple(point.label for point in panel.points),
        series=tuple(
            Series(
                name=line.name,
                kind=line.kind,
                marks=tuple(_mark(line, point, panel.unit, outcomes) for point in panel.points),
            )
            for line in panel.lines
        ),
    )


def _mark(line: Line, point: Point, unit: Unit, outcomes: Mapping[Cell, Outcome]) -> Mark:
    found = [Found(cell, outcomes[cell]) for cell in cells_of(line, point)]
    value = line.value(point, found)
    if value.y is not None:
        return Mark(y=value.y, text=quantity(value.y, unit))
    return Mark(y=None, text=value.short, why=value.why)


def quantity(value: float, unit: Unit) -> str:
    match unit:
        case "s":
            return seconds(value)
        case "B" | "J":
            return si(value, unit)
        case "kgCO2e":
            return si(value, "kg") if value >= 1 else si(value * 1e3, "g")
        case "parameters":
            return f"{value:.3g} B"
        case "devices":
            return f"{value:,.0f}"


def setting_text(cells: Sequence[Cell], population: str) -> str:
    """What all of some cells have in common, in words; what varies is on the axis."""
    common = {name: value for name in _FIELDS if len({value := getattr(cell, name) for cell in cells}) == 1}
    said = [
        f"{common['model']}" if "model" in common else "",
        f"{common['tokens']:,} tokens per batch in sequences of {common['sequence']:,}",
        f"{plural(common['devices'], 'device')} of {population}" if "devices" in common else population,
    ]
    if "down_per_up" in common:
        ratio = common["down_per_up"]
        said.append("links as drawn" if ratio is None else f"links {ratio:g}:1")
    if "memory_bytes" in common:
        size = common["memory_bytes"]
        said.append("memory as drawn" if size is None else f"{si(size, 'B')} each")
    if "server_bytes_per_s" in common:
        link = common["server_bytes_per_s"]
        said.append("server's link unlimited" if link is None else f"server's link {si(8 * link, 'bit/s')} each way")
    if "wire" in common:
        said.append(f"wire {common['wire']}")
    if common.get("churn_per_hour") == 0:
        said.append("no churn, true rates as believed")
    said.append(f"seed {common['seed']}")
    return "; ".join(one for one in said if one)


def _row(cell: Cell, outcome: Outcome) -> dict[str, object]:
    figures = {name: getattr(outcome, name) for name in _FIGURES}
    return {**asdict(cell), **figures, **{f"detail.{name}": value for name, value in outcome.detail.items()}}
