"""Charts as data: panels of series over a few places on the x axis.

`chart_plot` draws them, `study_page` puts them on a page.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Kind = Literal["ours", "rival", "cloud"]
Unit = Literal["s", "B", "J", "kgCO2e", "parameters", "devices"]
NO_FIT = "does not fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """What a series has at one place: a value, or why there is none."""

    y: float | None
    text: str
    """The value or its absence, for a table."""
    why: str = ""
    """Why there is no value, in a sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    name: str
    kind: Kind
    marks: tuple[Mark, ...]
    """One per place of the panel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    title: str
    setting: str
    """Everything that holds for all of the panel, in words."""
    x_label: str
    y_label: str
    places: tuple[float, ...]
    labels: tuple[str, ...]
    """Of the places, for ticks and tables."""
    series: tuple[Series, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    name: str
    """Of its files and of its section."""
    title: str
    says: str
    """What is shown and how it was computed, in a few sentences."""
    panels: tuple[Panel, ...]
    rows: tuple[Mapping[str, object], ...]
    """Outcomes behind it with their settings, for a CSV."""


def series_of(charts: tuple[Chart, ...]) -> dict[str, Kind]:
    """All series by name, in the order of their first appearance."""
    return {one.name: one.kind for chart in charts for panel in chart.panels for one in panel.series}
