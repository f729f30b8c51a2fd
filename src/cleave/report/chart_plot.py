"""Draw charts: one SVG per panel, whose colors are the page's, and one PNG per chart.

Places without a value are crosses in a strip above the panel, one row per series: a system that does not fit is shown
as such, not left out.
"""

from __future__ import annotations

import io
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure, SubFigure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from cleave.report.chart import Chart, Kind, Panel, Series
from cleave.report.chart_palette import GREY, LIGHT
from cleave.report.quantities import si

_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "h")
_DASHES = ("--", ":", "-.", (0, (5, 1, 1, 1, 1, 1)))
_WIDTH, _HEIGHT, _ROW, _LEGEND_ROW = 4.7, 3.1, 0.135, 0.19
_LEGEND_COLUMNS = 3
_CAPTION, _CAPTION_SIZE, _CAPTION_CHARACTERS = 0.45, 6.5, 92
"""Of the setting above a panel: inches that it takes, points of its letters, and letters per line."""
_WIDE = 8
"""Ratio of the largest value to the smallest from which a scale is logarithmic."""
_FEW_DECADES = 50
"""Ratio up to which powers of ten alone would leave an axis with one or two numbers."""


@dataclass(frozen=True, slots=True)
class Ink:
    """Colors of a drawing; those of the page are placeholders, which `as_svg` replaces by its variables."""

    text: str
    grid: str
    lines: tuple[str, ...]
    greys: tuple[str, ...]


_PRINT = Ink("#222222", "#e2e2e2", LIGHT, GREY["light"])
_PAGE = Ink("#fd0001", "#fd0002", tuple(f"#fd01{i:02x}" for i in range(10)), tuple(f"#fd02{i:02x}" for i in range(4)))
_VARIABLES = {
    _PAGE.text: "var(--ink)",
    _PAGE.grid: "var(--grid)",
    **{color: f"var(--line-{i})" for i, color in enumerate(_PAGE.lines)},
    **{color: f"var(--grey-{i})" for i, color in enumerate(_PAGE.greys)},
}


def as_svg(panel: Panel, kinds: Mapping[str, Kind]) -> str:
    """Draw a panel in the page's colors."""
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": panel.title}):
        figure = Figure(figsize=(_WIDTH, _height(panel)), layout="constrained")
        FigureCanvasSVG(figure)
        _draw(figure, panel, kinds, _PAGE)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = text.getvalue()
    for placeholder, variable in _VARIABLES.items():
        svg = svg.replace(placeholder, variable)
    return svg[svg.index("<svg") :]


def as_png(chart: Chart, kinds: Mapping[str, Kind]) -> bytes:
    """Draw all panels of a chart, in two columns, each under its setting."""
    columns = min(len(chart.panels), 2)
    lines = [chart.panels[i : i + columns] for i in range(0, len(chart.panels), columns)]
    heights = [max(map(_height, line)) + _CAPTION for line in lines]
    figure = Figure(figsize=(_WIDTH * columns, sum(heights) + 0.5), layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    figure.suptitle(chart.title, fontsize=12, x=0.01, ha="left", fontweight="bold")
    grid = figure.subfigures(len(lines), columns, height_ratios=heights, squeeze=False)
    for line, places in zip(lines, grid.tolist(), strict=True):
        for panel, place in zip(line, places, strict=False):
            _draw(place, panel, kinds, _PRINT)
            caption = textwrap.fill(panel.setting, _CAPTION_CHARACTERS)
            place.suptitle(caption, fontsize=_CAPTION_SIZE, x=0.01, ha="left", color=_PRINT.text)
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=140)
    return data.getvalue()


def _height(panel: Panel) -> float:
    legend = -(-len(panel.series) // _LEGEND_COLUMNS)
    return _HEIGHT + _ROW * len(_missing(panel)) + _LEGEND_ROW * legend


def _missing(panel: Panel) -> list[Series]:
    return [one for one in panel.series if any(mark.y is None for mark in one.marks)]


def _draw(figure: Figure | SubFigure, panel: Panel, kinds: Mapping[str, Kind], ink: Ink) -> None:
    missing = _missing(panel)
    strip_height = max(_ROW * len(missing), 1e-3)
    grid = figure.add_gridspec(2, 1, height_ratios=[strip_height, _HEIGHT - 0.9], hspace=0.0)
    axes = figure.add_subplot(grid[1])
    strip = figure.add_subplot(grid[0], sharex=axes)
    _draw_values(axes, panel, kinds, ink)
    _draw_strip(strip, panel, missing, kinds, ink)
    strip.set_title(panel.title, fontsize=10, loc="left", color=ink.text, fontweight="bold")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles,
        labels,
        loc="outside lower center",
        ncols=_LEGEND_COLUMNS,
        fontsize=8.5,
        frameon=False,
        labelcolor=ink.text,
        handlelength=2.6,
        columnspacing=1.2,
        borderpad=0.1,
    )


def _draw_values(axes: Axes, panel: Panel, kinds: Mapping[str, Kind], ink: Ink) -> None:
    for number, one in enumerate(panel.series):
        style = _style(one.name, kinds, ink)
        values = [float("nan") if mark.y is None else mark.y for mark in one.marks]
        axes.plot(panel.places, values, label=one.name, zorder=3 - number / len(panel.series), **style)
    values = [mark.y for one in panel.series for mark in one.marks if mark.y is not None]
    if values and min(values) > 0 and max(values) > _WIDE * min(values):
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(numticks=8))
        axes.yaxis.set_minor_formatter(NullFormatter())
        if max(values) < _FEW_DECADES * min(values):
            axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
            axes.yaxis.set_minor_formatter(FuncFormatter(_tick))
    elif values:
        axes.set_ylim(0, 1.08 * max(values))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))
    if max(panel.places) > _WIDE * min(panel.places) > 0 and not _is_even(panel.places):
        axes.set_xscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(panel.places)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xticks(panel.places, panel.labels)
    crowded = len("".join(panel.labels)) > 34
    axes.tick_params(axis="x", labelsize=8.5, colors=ink.text, labelrotation=40 if crowded else 0)
    axes.tick_params(axis="y", labelsize=8.5, colors=ink.text, which="both")
    axes.set_xlabel(panel.x_label, fontsize=9, color=ink.text)
    axes.set_ylabel(panel.y_label, fontsize=9, color=ink.text)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(ink.text)
    axes.grid(color=ink.grid, lw=0.6)
    axes.set_axisbelow(True)
    axes.patch.set_alpha(0)


def _is_even(places: Sequence[float]) -> bool:
    return len({after - before for before, after in pairwise(places)}) <= 1


def _tick(value: float, _place: int | None) -> str:
    return si(value, "").strip()


def _draw_strip(axes: Axes, panel: Panel, missing: list[Series], kinds: Mapping[str, Kind], ink: Ink) -> None:
    for row, one in enumerate(missing):
        color = _style(one.name, kinds, ink)["color"]
        absent = [place for place, mark in zip(panel.places, one.marks, strict=True) if mark.y is None]
        axes.plot(absent, [row] * len(absent), ls="none", marker="x", ms=4.5, mew=1.3, color=color, clip_on=False)
    axes.set_ylim(len(missing) - 0.5, -0.5) if missing else axes.set_ylim(0, 1)
    axes.set_yticks(range(len(missing)), [one.name for one in missing], fontsize=7)
    for label, one in zip(axes.get_yticklabels(), missing, strict=True):
        label.set_color(str(_style(one.name, kinds, ink)["color"]))
    axes.tick_params(axis="both", length=0, labelbottom=False)
    axes.spines[["top", "right", "left", "bottom"]].set_visible(False)
    axes.patch.set_alpha(0)
    if missing:
        texts = list(dict.fromkeys(mark.text for one in missing for mark in one.marks if mark.y is None))
        axes.set_title(f"× {', '.join(texts)}", fontsize=8, loc="right", color=ink.text)


def _style(name: str, kinds: Mapping[str, Kind], ink: Ink) -> dict[str, Any]:
    """How a series looks, the same in all charts."""
    kind = kinds[name]
    number = [other for other, of in kinds.items() if of == kind].index(name)
    match kind:
        case "ours":
            style = {"color": ink.lines[0], "lw": 2.6, "marker": "o", "ms": 5.5}
            if number:
                style |= {"lw": 1.4, "ls": _DASHES[number % len(_DASHES)], "marker": _MARKERS[number], "ms": 4.2}
            return style
        case "rival":
            place = 1 + number % (len(ink.lines) - 1)
            return {"color": ink.lines[place], "lw": 1.3, "marker": _MARKERS[place], "ms": 4.2}
        case "cloud":
            return {"color": ink.greys[number % len(ink.greys)], "lw": 1.5, "ls": _DASHES[number % len(_DASHES)]}
