"""Results as a picture: every step of every cell, its prediction, and their ratio; or step times as they develop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, StrMethodFormatter

from cleave.bench.figures import Figures, figures, short_names
from cleave.bench.records import Measured, Results, Step
from cleave.errors import InputError

_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d")
_BAND = "#e8f1e4"
_ROW_INCHES = 0.36
_STEPS_INCHES = 3.4


def draw(results: Results, path: Path) -> None:
    """Draw the results into a PNG file; nothing if no step was measured."""
    warmup = results.scenario.warmup
    found = [(each, figures(each, warmup, None)) for each in results.cells]
    rows = [(each, of) for each, of in found if of is not None]
    if not rows:
        return
    steps_height = _STEPS_INCHES if results.scenario.show_steps else 0.0
    height = max(1.6 + _ROW_INCHES * len(rows), 2.4) + steps_height
    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(results.scenario.title, fontsize=12, x=0.01, ha="left", fontweight="bold")
    grid = figure.add_gridspec(2, 2, width_ratios=[3, 2], height_ratios=[steps_height or 1e-6, height - steps_height])
    if steps_height:
        _draw_steps(figure.add_subplot(grid[0, :]), rows)
    times = figure.add_subplot(grid[1, 0])
    ratios = figure.add_subplot(grid[1, 1], sharey=times)
    _draw_times(times, rows, warmup)
    _draw_ratios(ratios, rows, results)
    try:
        figure.savefig(path, dpi=120)
    except OSError as fault:
        raise InputError(f"cannot write the plot to {path}: {fault.strerror}; choose another --out") from None


def _draw_times(axes: Axes, rows: list[tuple[Measured, Figures]], warmup: int) -> None:
    colours = _fleet_colours(rows)
    for place, (measured, found) in enumerate(rows):
        steps = _steps(measured, warmup)
        colour = colours[measured.cell.fleet_name]
        axes.scatter([step.seconds for step in steps], _jitter(place, len(steps)), s=16, color=colour, alpha=0.55, lw=0)
        axes.plot([found.seconds.median] * 2, [place - 0.32, place + 0.32], color=colour, lw=2.4)
        if found.predicted_s is not None:
            axes.plot(found.predicted_s, place, marker="D", ms=6, mfc="white", mec="black", mew=1.2, ls="none")
    axes.set_yticks(range(len(rows)), short_names([measured for measured, _ in rows]), fontsize=9)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    _set_seconds(axes.xaxis, axes, [x for _, f in rows for x in (f.seconds.least, f.seconds.most, f.predicted_s) if x])
    axes.set_xlabel("seconds a step")
    axes.plot([], [], marker="o", ms=4, color="grey", alpha=0.7, ls="none", label="a step")
    axes.plot([], [], color="grey", lw=2.4, label="median")
    axes.plot([], [], marker="D", ms=6, mfc="white", mec="black", ls="none", label="predicted")
    axes.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=3, fontsize=8, frameon=False, borderpad=0)
    _tidy(axes, "x")


def _draw_ratios(axes: Axes, rows: list[tuple[Measured, Figures]], results: Results) -> None:
    colours = _fleet_colours(rows)
    if (target := results.scenario.target) is not None:
        axes.axvspan(*target, color=_BAND, zorder=0)
    axes.axvline(1, color="black", lw=0.8)
    for place, (measured, found) in enumerate(rows):
        ratios = [step.ratio for step in _steps(measured, results.scenario.warmup) if step.ratio is not None]
        colour = colours[measured.cell.fleet_name]
        axes.scatter(ratios, _jitter(place, len(ratios)), s=16, color=colour, alpha=0.55, lw=0)
        if found.ratio is not None:
            axes.plot([found.ratio.median] * 2, [place - 0.32, place + 0.32], color=colour, lw=2.4)
            axes.annotate(
                f"{found.ratio.median:.2f}",
                (1.0, place),
                xycoords=("axes fraction", "data"),
                xytext=(6, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
                annotation_clip=False,
            )
    everything = [
        ratio for _, found in rows if found.ratio is not None for ratio in (found.ratio.least, found.ratio.most)
    ]
    axes.set_xscale("log")
    axes.set_xlim(min([0.6, *everything]) / 1.1, max([1.7, *everything]) * 1.1)
    axes.xaxis.set_major_locator(FixedLocator([0.1, 0.25, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 20, 50, 100]))
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("measured / predicted" + ("" if target is None else f" (target {target[0]:g}-{target[1]:g})"))
    axes.tick_params(axis="y", length=0, labelleft=False)
    _tidy(axes, "x")


def _draw_steps(axes: Axes, rows: list[tuple[Measured, Figures]]) -> None:
    everything: list[float] = []
    labels = short_names([measured for measured, _ in rows])
    for number, (measured, _) in enumerate(rows):
        for run_number, run in enumerate(measured.runs):
            taken = [step.seconds for step in run.steps]
            everything += taken
            label = labels[number] if run_number == 0 else None
            colour = _COLOURS[number % len(_COLOURS)]
            axes.plot([step.number for step in run.steps], taken, marker="o", ms=4, color=colour, label=label)
    _set_seconds(axes.yaxis, axes, everything)
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    axes.set_xticks(range(1, 1 + max(len(run.steps) for measured, _ in rows for run in measured.runs)))
    axes.legend(fontsize=8, frameon=False)
    _tidy(axes, "both")


def _set_seconds(axis: object, axes: Axes, values: list[float]) -> None:
    """Label seconds as plain numbers, on a logarithmic axis where values differ by much."""
    along = axes.xaxis if axis is axes.xaxis else axes.yaxis
    name = "x" if along is axes.xaxis else "y"
    if max(values) > 8 * min(values):
        (axes.set_xscale if name == "x" else axes.set_yscale)("log")
        along.set_major_formatter(StrMethodFormatter("{x:g}"))
        along.set_minor_formatter(NullFormatter())
    elif name == "x":
        axes.set_xlim(0, 1.06 * max(values))
    else:
        axes.set_ylim(0, 1.06 * max(values))


def _steps(measured: Measured, warmup: int) -> list[Step]:
    return [step for run in measured.runs for step in run.steps[warmup:]]


def _jitter(place: int, count: int) -> list[float]:
    """Spread the steps of a cell over the height of its row, in their order."""
    return (place + np.linspace(-0.22, 0.22, count)).tolist() if count > 1 else [float(place)] * count


def _fleet_colours(rows: list[tuple[Measured, Figures]]) -> dict[str, str]:
    fleets = list(dict.fromkeys(measured.cell.fleet_name for measured, _ in rows))
    return {fleet: _COLOURS[number % len(_COLOURS)] for number, fleet in enumerate(fleets)}


def _tidy(axes: Axes, grid: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis=grid, color="#dddddd", lw=0.6)  # pyright: ignore[reportArgumentType]
    axes.set_axisbelow(True)
