"""`cleave plan --model --plot`: the plane of tokens x parameters with one rectangle per device, and the step time.

Parameters run across in the order of the sublayers, tokens down. Neighbors within a column differ in shade, device
classes in hue. Below the plane: a breakdown of the step, and the step time of every alternative.
"""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cleave.core.fleet.profiles import Profiles
from cleave.core.model.sublayers import sublayers_of
from cleave.core.plan.resident.large_fleet import ModelPlan
from cleave.core.plan.resident.plane import tiles
from cleave.core.plan.step import StepChoice
from cleave.report.plan_words import limit_text
from cleave.report.quantities import seconds, si

_PART_COLOURS = {"activations": "#4c78a8", "synchronization": "#f58518", "fill": "#bbbbbb"}
_CHOSEN, _FASTER, _OTHER = "#4c78a8", "#e45756", "#cccccc"
_SHADES = (0.0, 0.28, 0.14)
_TICKS = 12


def draw_choice(figure: Figure, choice: StepChoice, profiles: Profiles, colours: dict[str, str]) -> None:
    plan = choice.plan
    assert isinstance(plan, ModelPlan), "a choice of gemms is drawn as such"
    grid = figure.add_gridspec(2, 2, height_ratios=(3.2, 1.1), width_ratios=(1, 1.6))
    _draw_plane(figure.add_subplot(grid[0, :]), plan, profiles, colours)
    _draw_parts(figure.add_subplot(grid[1, 0]), plan)
    _draw_alternatives(figure.add_subplot(grid[1, 1]), choice)
    figure.suptitle(
        f"{choice.shape.name}, {choice.tokens:,} tokens on {len(profiles):,} devices, wire {choice.wire}: "
        f"{seconds(choice.step_s)} a step ({choice.arrangement}), "
        f"{choice.step_s / choice.bound_s:.2f} of the lower bound"
    )


def _draw_plane(axes: Axes, plan: ModelPlan, profiles: Profiles, colours: dict[str, str]) -> None:
    units = tiles(plan)
    left, right = np.array([unit.params for unit in units]).T
    top, bottom = np.array([unit.tokens for unit in units]).T
    corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
    classes = dict(zip(profiles.names, profiles.device_class, strict=True))
    faces: list[tuple[float, ...]] = []
    position, column = 0, (-1, -1)
    for unit in units:
        position = position + 1 if column == (unit.stage, unit.part) else unit.stage + unit.part
        column = unit.stage, unit.part
        shade = _SHADES[position % len(_SHADES)]
        base = to_rgb(colours[classes[unit.device]])
        faces.append(tuple(part + (1 - part) * shade for part in base))
    edge = 0.6 if len(units) < 400 else 0.3 if len(units) < 2000 else 0.1
    axes.add_collection(PolyCollection(list(corners), facecolors=faces, edgecolors="white", linewidths=edge))
    sublayers = sublayers_of(plan.shape)
    offsets = np.concatenate([[0], np.cumsum([sublayer.params for sublayer in sublayers])])
    for stage in plan.stages[1:]:
        axes.axvline(float(offsets[stage.first]), color="black", linewidth=0.5)
    layers = np.unique(np.linspace(0, plan.shape.layers, min(_TICKS, plan.shape.layers + 1)).astype(np.int64))
    names = [f"layer {layer}" for layer in layers.tolist()[:-1]]
    axes.set_xticks(offsets[2 * layers], [*names, "head"], fontsize=8)
    axes.set_xlim(0, float(offsets[-1]))
    axes.set_ylim(plan.tokens, 0)
    axes.set_xlabel(f"parameters ({si(float(offsets[-1]), '')} resident); black: stage boundaries")
    axes.set_ylabel(f"tokens ({plan.tokens:,})")
    used = len({unit.device for unit in units})
    axes.set_title(
        f"one rectangle per device ({used:,} of {len(profiles):,}): its tokens x the parameters it holds",
        fontsize=10,
    )
    present = {classes[unit.device] for unit in units}
    patches = [Patch(color=colours[kind], label=kind or "device") for kind in colours if kind in present]
    axes.legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=9, frameon=False)


def _draw_parts(axes: Axes, plan: ModelPlan) -> None:
    parts = {"activations": plan.activation_s, "synchronization": plan.synchronisation_s, "fill": plan.fill_s}
    start = 0.0
    for name, part_s in parts.items():
        axes.barh([0], [part_s], left=start, color=_PART_COLOURS[name], label=f"{name} {seconds(part_s)}")
        start += part_s
    axes.axvline(plan.bound_s, color="black", linestyle=":", label=f"lower bound {seconds(plan.bound_s)}")
    axes.set_yticks([])
    axes.set_ylim(-0.6, 0.6)
    axes.set_xlabel("seconds per step")
    axes.set_title(f"where the step's time goes; limited by {limit_text(plan.limit)}", fontsize=10)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.28), ncols=2, fontsize=8, frameon=False)


def _draw_alternatives(axes: Axes, choice: StepChoice) -> None:
    alternatives = [alternative for alternative in choice.rivals if alternative.fits]
    positions = np.arange(len(alternatives))
    times_s = [alternative.step_s for alternative in alternatives]
    faster = {rival.name for rival in choice.faster}
    colours = {choice.arrangement: _CHOSEN, **dict.fromkeys(faster, _FASTER)}
    axes.barh(positions, times_s, color=[colours.get(alternative.name, _OTHER) for alternative in alternatives])
    for position, alternative in enumerate(alternatives):
        axes.text(alternative.step_s * 1.03, position, seconds(alternative.step_s), va="center", fontsize=8)
    axes.set_yticks(positions, [alternative.name for alternative in alternatives], fontsize=8)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(min(times_s) * 0.5, max(times_s) * 2)
    axes.set_xlabel("seconds per step (logarithmic)")
    missing = [alternative.name for alternative in choice.rivals if not alternative.fits]
    title = "compared with every alternative" + (f" (do not fit: {', '.join(missing)})" if missing else "")
    if faster:
        title += "\nred: faster, but not something Cleave can run"
    axes.set_title(title, fontsize=10)
