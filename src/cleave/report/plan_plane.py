"""`cleave plan --model --plot`: the plane of tokens x parameters with a rectangle for each device, and what it takes.

Parameters run across in the order of the sublayers, tokens down. Neighbours in a column differ in shade, classes of
devices in hue. Beside the plane: the step's parts, and the time of every other way to do it.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cleave.core.cost.resident import sublayers_of
from cleave.core.fleet.profiles import Profiles
from cleave.core.plan.resident.large_fleet import ResidentPlan
from cleave.core.plan.resident.plane import rectangles
from cleave.core.plan.step import StepChoice
from cleave.report.plan_words import limit_text
from cleave.report.quantities import seconds, si

_PART_COLOURS = {"activations": "#4c78a8", "synchronisation": "#f58518", "fill": "#bbbbbb"}
_CHOSEN, _OTHER = "#4c78a8", "#cccccc"
_SHADES = (0.0, 0.28, 0.14)
_TICKS = 12


def draw_choice(figure: Figure, choice: StepChoice, profiles: Profiles, colours: dict[str, str]) -> None:
    plan = choice.plan
    if isinstance(plan, ResidentPlan):
        grid = figure.add_gridspec(2, 2, height_ratios=(3.2, 1.1), width_ratios=(1, 1.6))
        _draw_plane(figure.add_subplot(grid[0, :]), plan, profiles, colours)
        _draw_parts(figure.add_subplot(grid[1, 0]), plan)
        _draw_ways(figure.add_subplot(grid[1, 1]), choice)
    else:
        _draw_ways(figure.add_subplot(1, 1, 1), choice)
    figure.suptitle(
        f"{choice.shape.name}, {choice.tokens:,} tokens on {len(profiles):,} devices, wire {choice.wire}: "
        f"{seconds(choice.step_s)} a step ({choice.arrangement}), "
        f"{choice.step_s / choice.bound_s:.2f} of the lower bound"
    )


def _draw_plane(axes: Axes, plan: ResidentPlan, profiles: Profiles, colours: dict[str, str]) -> None:
    units = rectangles(plan)
    left, right = np.array([unit.params for unit in units]).T
    top, bottom = np.array([unit.tokens for unit in units]).T
    corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
    faces: list[tuple[float, ...]] = []
    place, column = 0, (-1, -1)
    for unit in units:
        place = place + 1 if column == (unit.stage, unit.part) else unit.stage + unit.part
        column = unit.stage, unit.part
        shade = _SHADES[place % len(_SHADES)]
        base = to_rgb(colours[profiles.device_class[unit.device]])
        faces.append(tuple(part + (1 - part) * shade for part in base))
    edge = 0.6 if len(units) < 400 else 0.3 if len(units) < 2000 else 0.1
    axes.add_collection(PolyCollection(list(corners), facecolors=faces, edgecolors="white", linewidths=edge))
    sublayers = sublayers_of(plan.shape)
    begins = np.concatenate([[0], np.cumsum([sublayer.params for sublayer in sublayers])])
    for stage in plan.stages[1:]:
        axes.axvline(float(begins[stage.first]), color="black", linewidth=0.5)
    layers = np.unique(np.linspace(0, plan.shape.layers, min(_TICKS, plan.shape.layers + 1)).astype(np.int64))
    names = [f"layer {layer}" for layer in layers.tolist()[:-1]]
    axes.set_xticks(begins[2 * layers], [*names, "head"], fontsize=8)
    axes.set_xlim(0, float(begins[-1]))
    axes.set_ylim(plan.tokens, 0)
    axes.set_xlabel(f"parameters ({si(float(begins[-1]), '')} resident); black: where a stage ends")
    axes.set_ylabel(f"tokens ({plan.tokens:,})")
    used = len({unit.device for unit in units})
    axes.set_title(
        f"one rectangle a device ({used:,} of {len(profiles):,}): the tokens it takes through the parameters it holds",
        fontsize=10,
    )
    present = {profiles.device_class[unit.device] for unit in units}
    patches = [Patch(color=colours[kind], label=kind or "device") for kind in colours if kind in present]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9, frameon=False)


def _draw_parts(axes: Axes, plan: ResidentPlan) -> None:
    parts = {"activations": plan.activation_s, "synchronisation": plan.synchronisation_s, "fill": plan.fill_s}
    start = 0.0
    for name, lasts in parts.items():
        axes.barh([0], [lasts], left=start, color=_PART_COLOURS[name], label=f"{name} {seconds(lasts)}")
        start += lasts
    axes.axvline(plan.bound_s, color="black", linestyle=":", label=f"lower bound {seconds(plan.bound_s)}")
    axes.set_yticks([])
    axes.set_ylim(-0.6, 0.6)
    axes.set_xlabel("seconds of a step")
    axes.set_title(f"where the step's time goes; limited by {limit_text(plan.limit)}", fontsize=10)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=2, fontsize=8, frameon=False)


def _draw_ways(axes: Axes, choice: StepChoice) -> None:
    ways = [way for way in choice.rivals if way.fits]
    places = np.arange(len(ways))
    chosen = [choice.arrangement.startswith(way.name) for way in ways]
    lasting = [way.step_s for way in ways]
    axes.barh(places, lasting, color=[_CHOSEN if is_chosen else _OTHER for is_chosen in chosen])
    for place, way in enumerate(ways):
        axes.text(way.step_s * 1.03, place, seconds(way.step_s), va="center", fontsize=8)
    axes.set_yticks(places, [way.name for way in ways], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(min(lasting) * 0.5, max(lasting) * 2)
    axes.set_xlabel("seconds of a step (logarithmic)")
    missing = [way.name for way in choice.rivals if not way.fits]
    axes.set_title(
        "beside every other way" + (f" (does not fit: {', '.join(missing)})" if missing else ""), fontsize=10
    )
