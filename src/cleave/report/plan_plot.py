"""`cleave plan --plot`: draw the tiling of the output and the devices' timelines.

A 3D plan is shown as the cross-section through the middle of its inner dimension, where blocks also cover the output
exactly once. In a timeline the download starts at zero; compute and upload are drawn as solid bars that end when the
block is returned, although in reality they overlap with the download.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from cleave.core.cost.gemm import unit_costs
from cleave.core.cost.rates import Server
from cleave.core.fleet.profiles import Profiles
from cleave.core.plan.gemm.product import GemmPlan
from cleave.core.plan.step import ROLES, PlannedGemm, StepChoice, StepPlan
from cleave.errors import InputError
from cleave.report.plan_plane import draw_choice
from cleave.report.quantities import seconds

_CLASS_COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2", "#e45756", "#72b7b2", "#9d755d")
_SERVER_COLOUR = "#222222"
_PART_COLOURS = {"latency": "#bbbbbb", "down": "#4c78a8", "compute": "#f58518", "up": "#54a24b"}
_ROLE_COLOURS = dict(zip(ROLES, ("#4c78a8", "#f58518", "#54a24b"), strict=True))
_TIMELINES = 40


def draw(plan: GemmPlan | StepPlan | StepChoice, profiles: Profiles, server: Server, path: Path) -> None:
    figure = Figure(figsize=(15, 9.5), layout="constrained")
    FigureCanvasAgg(figure)
    if isinstance(plan, GemmPlan):
        _draw_tiling(figure.add_subplot(1, 2, 1), plan, profiles, "")
        _draw_timeline(figure.add_subplot(1, 2, 2), plan, profiles, server)
        figure.suptitle(_title(plan))
    elif isinstance(plan, StepPlan):
        _draw_step(figure, plan, profiles, server)
    elif isinstance(plan.plan, StepPlan):
        _draw_step(figure, plan.plan, profiles, server)
    else:
        draw_choice(figure, plan, profiles, device_colours(profiles))
    try:
        figure.savefig(path, dpi=110)
    except OSError as fault:
        raise InputError(f"cannot write the plot to {path}: {fault.strerror}; choose another --plot") from None


def _draw_step(figure: Figure, plan: StepPlan, profiles: Profiles, server: Server) -> None:
    """Draw the most expensive gemm of each role above; the step's breakdown and one gemm's timelines below."""
    heaviest = [
        max((s for s in plan.segments if s.what.role == role), key=lambda segment: segment.step_s) for role in ROLES
    ]
    grid = figure.add_gridspec(2, 6)
    for number, segment in enumerate(heaviest):
        axes = figure.add_subplot(grid[0, 2 * number : 2 * number + 2])
        _draw_tiling(axes, segment.plan, profiles, f"{segment.what.segment}, {segment.what.role}: ")
    _draw_shares(figure.add_subplot(grid[1, :3]), plan.segments)
    timeline = figure.add_subplot(grid[1, 3:])
    _draw_timeline(timeline, max(heaviest, key=lambda segment: segment.step_s).plan, profiles, server)
    figure.suptitle(
        f"{plan.shape.name}, {plan.tokens:,} tokens on {len(profiles):,} devices, wire {plan.wire}: "
        f"{seconds(plan.step_s)} a step, {plan.step_s / plan.bound_s:.3f} of the lower bound"
    )


def _draw_tiling(axes: Axes, plan: GemmPlan, profiles: Profiles, prefix: str) -> None:
    tiling, middle = plan.tiling, plan.gemm.k // 2
    shown = np.flatnonzero((tiling.inner[:, 0] <= middle) & (tiling.inner[:, 1] > middle))
    top, bottom = tiling.rows[shown].T
    left, right = tiling.cols[shown].T
    corners = np.stack([left, top, right, top, right, bottom, left, bottom], axis=1).reshape(-1, 4, 2)
    colours = device_colours(profiles)
    names = [*profiles.device_class, "server"]
    kinds: list[str] = [names[device] for device in tiling.device[shown]]
    faces = [colours[kind] for kind in kinds]
    edge = 0.5 if len(shown) < 1500 else 0.2
    axes.add_collection(PolyCollection(list(corners), facecolors=faces, edgecolors="white", linewidths=edge))
    axes.set_xlim(0, plan.gemm.n)
    axes.set_ylim(plan.gemm.m, 0)
    axes.set_xlabel(f"columns of the output ({plan.gemm.n:,})")
    axes.set_ylabel(f"rows ({plan.gemm.m:,})")
    cross = f" at the middle of {plan.gemm.k:,}" if plan.split == "3d" else ""
    axes.set_title(
        f"{prefix}{plan.split}{cross}\n{seconds(plan.makespan_s)}, {plan.ratio:.3f} of the bound", fontsize=10
    )
    present = [kind for kind in colours if kind in set(kinds)]
    patches = [Patch(color=colours[kind], label=kind or "device") for kind in present]
    axes.legend(handles=patches, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=5, fontsize=8, frameon=False)


def _draw_timeline(axes: Axes, plan: GemmPlan, profiles: Profiles, server: Server) -> None:
    unit = unit_costs(profiles, plan.wire, server, plan.a_wire).take(plan.tiling.device)
    order = np.argsort(-plan.finish_s, kind="stable")
    chosen = order[np.linspace(0, len(order) - 1, min(_TIMELINES, len(order))).astype(np.int64)]
    tiling = plan.tiling
    area, edges = tiling.heights * tiling.widths, tiling.heights + tiling.widths
    work = {
        "down": unit.down_s * tiling.depths * edges,
        "compute": unit.mac_s * tiling.depths * area,
        "up": unit.up_s * area,
    }
    places = np.arange(len(chosen), dtype=np.float64)
    axes.barh(places, unit.latency_s[chosen], height=0.9, color=_PART_COLOURS["latency"], label="latency")
    for offset, (part, part_s) in zip((-0.3, 0.0, 0.3), work.items(), strict=True):
        start = unit.latency_s if part == "down" else plan.finish_s - part_s
        axes.barh(
            places + offset, part_s[chosen], left=start[chosen], height=0.3, color=_PART_COLOURS[part], label=part
        )
    axes.axvline(plan.makespan_s / plan.rounds, color="black", linewidth=1, label="finish")
    axes.axvline(plan.bound_s / plan.rounds, color="black", linewidth=1, linestyle=":", label="lower bound")
    names: list[str] = [plan.names[device] for device in tiling.device[chosen]]
    axes.set_yticks(places, names, fontsize=6)
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    gemm = plan.gemm
    count = f"{len(chosen)} of {len(order):,} blocks" if len(chosen) < len(order) else f"{len(order)} blocks"
    axes.set_title(f"timelines of {count}, gemm {gemm.m} x {gemm.n} x {gemm.k}", fontsize=10)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=6, fontsize=8, frameon=False)


def _draw_shares(axes: Axes, segments: tuple[PlannedGemm, ...]) -> None:
    names = list(dict.fromkeys(segment.what.segment for segment in segments))
    left = np.zeros(len(names))
    for role in ROLES:
        role_s = np.array(
            [sum(s.step_s for s in segments if (s.what.segment, s.what.role) == (n, role)) for n in names]
        )
        axes.barh(names, role_s, left=left, color=_ROLE_COLOURS[role], label=role)
        left += role_s
    axes.invert_yaxis()
    axes.set_xlabel("seconds per step")
    axes.set_title("where the step's time goes", fontsize=10)
    axes.legend(fontsize=8)


def device_colours(profiles: Profiles) -> dict[str, str]:
    kinds = list(dict.fromkeys(profiles.device_class))
    colours = {kind: _CLASS_COLOURS[number % len(_CLASS_COLOURS)] for number, kind in enumerate(kinds)}
    return {**colours, "server": _SERVER_COLOUR}


def _title(plan: GemmPlan) -> str:
    gemm = plan.gemm
    return f"gemm {gemm.m} x {gemm.n} x {gemm.k}, wire {plan.wire}: {seconds(plan.makespan_s)}"
