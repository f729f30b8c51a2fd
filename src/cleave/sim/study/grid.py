"""The settings of a study, and its figures: eight records over one grid.

One setting is the center: a model, a number of tokens, a number of devices. Each panel varies one thing around it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from cleave.core.carbon.cloud import CARDS, cloud_card
from cleave.core.cost.wire import WireFormat
from cleave.core.model.shapes import ModelShape
from cleave.facts.carbon import carbon_facts
from cleave.report.chart import Unit
from cleave.report.quantities import si
from cleave.sim.cell import Cell
from cleave.sim.cleave import SYSTEM
from cleave.sim.study.figure import (
    Figure,
    FigurePanel,
    Line,
    Measure,
    Point,
    expected_under_churn,
    field,
    kind_of,
    largest,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    center: Cell
    systems: tuple[str, ...]
    devices: tuple[int, ...]
    """Sizes of fleets, ascending."""
    few: tuple[int, ...]
    """Those in which every model is tried."""
    models: tuple[str, ...]
    """Models for which devices are varied, the center's among them."""
    families: Mapping[str, tuple[str, ...]]
    """Models by family, from small to large."""
    shapes: Mapping[str, ModelShape]
    asymmetries: tuple[float, ...] = (1, 2, 4, 10)
    server_bytes_per_s: tuple[float, ...] = tuple(gbit * 1e9 / 8 for gbit in (1, 10, 100, 3000))
    memory_bytes: tuple[float, ...] = tuple(gb * 1e9 for gb in (0.25, 0.5, 1, 2, 8))
    wires: tuple[WireFormat, ...] = ("fp32", "bf16", "q8")
    churn_per_hour: tuple[float, ...] = (0, 0.01, 0.1, 0.3, 1)
    churned_batches: int = 10


def figures(grid: Grid) -> tuple[Figure, ...]:
    center = grid.center
    every = _lines(grid.systems)
    fleets = _lines([system for system in grid.systems if kind_of(system) != "cloud"])
    over_devices = {model: _vary(replace(center, model=model), "devices", grid.devices) for model in grid.models}
    own = over_devices[center.model]
    batch = partial(FigurePanel, y_label="seconds per batch", unit="s", lines=every(field("batch_s")))
    by_devices = partial(FigurePanel, x_label="devices offered")
    return (
        Figure(
            name="devices",
            title="Time per batch against devices",
            says="Seconds per batch as the fleet grows. A cloud GPU does not depend on the fleet.",
            panels=tuple(
                batch(title=model, x_label="devices offered", points=points) for model, points in over_devices.items()
            ),
        ),
        Figure(
            name="models",
            title="Time per batch against model size",
            says="Every size of both families, on the same fleet.",
            panels=tuple(
                batch(title=family, x_label="model", points=_each([replace(center, model=one) for one in names], names))
                for family, names in grid.families.items()
            ),
        ),
        Figure(
            name="limits",
            title="Largest model, and devices used",
            says="The largest model of the first family that fits, and how many of the offered devices a system uses.",
            panels=(
                by_devices(
                    title="Largest model that fits",
                    y_label="billions of parameters",
                    unit="parameters",
                    points=_sizes(grid),
                    lines=every(largest({name: shape.params for name, shape in grid.shapes.items()})),
                ),
                by_devices(
                    title=f"Devices used, {center.model}",
                    y_label="devices used",
                    unit="devices",
                    points=own,
                    lines=fleets(field("devices_used")),
                ),
            ),
        ),
        Figure(
            name="loads",
            title="Traffic and memory per device against devices",
            says="Bytes of the device that receives, sends or holds most.",
            panels=tuple(
                by_devices(
                    title=f"{title}, {center.model}",
                    y_label=y_label,
                    unit="B",
                    points=own,
                    lines=fleets(field(name)),
                )
                for title, y_label, name in _LOADS
            ),
        ),
        Figure(
            name="recovery",
            title="Recovery after a departure",
            says="Seconds that the departure of one device adds to a batch: the mean over its devices.",
            panels=tuple(
                by_devices(
                    title=model, y_label="seconds added", unit="s", points=points, lines=fleets(field("recovery_s"))
                )
                for model, points in over_devices.items()
            ),
        ),
        Figure(
            name="churn",
            title="A batch under churn",
            says=f"The thick line simulates {grid.churned_batches} batches of Cleave; devices return after 600 s on "
            "average. All other lines are expectations, T / (1 - devices x rate x recovery), in which a departed "
            "device is replaced at once and recoveries never overlap: compare those only with each other.",
            panels=tuple(
                FigurePanel(
                    title=f"{center.model}, {devices:,} devices",
                    x_label="departures per device and hour",
                    y_label="seconds per batch",
                    unit="s",
                    points=_each(
                        [
                            replace(center, devices=devices, churn_per_hour=rate, batches=grid.churned_batches)
                            if rate
                            else replace(center, devices=devices)
                            for rate in grid.churn_per_hour
                        ],
                        [f"{rate:g}" for rate in grid.churn_per_hour],
                    ),
                    lines=(_SIMULATED, *_renamed(fleets(expected_under_churn))),
                )
                for devices in grid.few
            ),
        ),
        Figure(
            name="sensitivity",
            title="Sensitivity to links, server, memory and wire",
            says="One thing varies at a time; everything else stays as in the center of the study. Where asymmetry "
            "varies, downlinks stay the same. A rival with a number format of its own keeps it.",
            panels=(
                batch(
                    title="Asymmetry: uplinks change",
                    x_label="downlink : uplink",
                    points=_vary(center, "down_per_up", grid.asymmetries, lambda ratio: f"{ratio:g}:1"),
                ),
                batch(
                    title="Server's link, each way",
                    x_label="bit/s",
                    points=_vary(center, "server_bytes_per_s", grid.server_bytes_per_s, lambda rate: si(8 * rate, "")),
                ),
                batch(
                    title="Memory of every device",
                    x_label="usable memory",
                    points=_vary(center, "memory_bytes", grid.memory_bytes, lambda size: si(size, "B")),
                ),
                batch(
                    title="Wire format",
                    x_label="format",
                    points=_each([replace(center, wire=wire) for wire in grid.wires], grid.wires),
                ),
            ),
        ),
        Figure(
            name="carbon",
            title="Energy and carbon beside cloud GPUs",
            says=_carbon_says(),
            panels=tuple(
                by_devices(
                    title=f"{title}, {center.model}",
                    y_label=f"{unit} per batch",
                    unit=unit,
                    points=_vary(replace(center, is_billed=True), "devices", grid.few),
                    lines=tuple(
                        Line(name=name, system=SYSTEM, kind=kind_of(name), value=field(key)) for name, key in keys
                    ),
                )
                for title, unit, keys in _FOOTPRINTS
            ),
        ),
    )


def _carbon_says() -> str:
    """What a bill counts and assumes, and what is published against training on phones."""
    facts = carbon_facts()
    cards = " and ".join(f"{cloud_card(facts, name)[0].mfu:.3g} ({name})" for name in CARDS)
    evidence = facts.counter_evidence()
    against = "; ".join(f"{one.what}: {one.value}" for one in evidence)
    return (
        "Per batch: devices above idle, network by bytes, server, and embodied carbon. A cloud GPU does the same FLOPs "
        f"at an MFU of {cards}, at PUE {facts.cloud_pue().value:g}, on the grid of most devices; its hosts and traffic "
        f"are left out, which favors it. Published against training on phones ({evidence[0].source}): {against}."
    )


_LOADS = (
    ("Received", "bytes down per batch", "down_bytes"),
    ("Sent", "bytes up per batch", "up_bytes"),
    ("Memory", "bytes of memory", "memory_bytes"),
)
_FOOTPRINTS: tuple[tuple[str, Unit, tuple[tuple[str, str], ...]], ...] = (
    ("Energy", "J", ((SYSTEM, "energy_j"), ("a100", "a100_j"), ("h100", "h100_j"))),
    ("Emissions", "kgCO2e", ((SYSTEM, "kgco2e"), ("a100", "a100_kgco2e"), ("h100", "h100_kgco2e"))),
)
_SIMULATED = Line(name=SYSTEM, system=SYSTEM, kind="ours", value=field("batch_s"), meets_churn=True)


def _lines(systems: Sequence[str]) -> Callable[[Measure], tuple[Line, ...]]:
    """A line per system, for whatever measure."""
    return lambda measure: tuple(
        Line(name=system, system=system, kind=kind_of(system), value=measure) for system in systems
    )


def _renamed(lines: Sequence[Line]) -> tuple[Line, ...]:
    """Lines of expectations beside the simulated one."""
    return tuple(replace(one, name=f"{SYSTEM}, expected") if one.system == SYSTEM else one for one in lines)


def _vary(
    cell: Cell, field: str, values: Sequence[float], label: Callable[[float], str] = "{:,}".format
) -> tuple[Point, ...]:
    """One field over some values, which are the places on the axis."""
    return tuple(Point(x=x, label=label(x), cells=(replace(cell, **{field: x}),)) for x in values)


def _each(cells: Sequence[Cell], labels: Sequence[str]) -> tuple[Point, ...]:
    """Cells at even distances."""
    return tuple(
        Point(x=x, label=label, cells=(cell,)) for x, (cell, label) in enumerate(zip(cells, labels, strict=True), 1)
    )


def _sizes(grid: Grid) -> tuple[Point, ...]:
    models = next(iter(grid.families.values()))
    return tuple(
        Point(
            x=devices,
            label=f"{devices:,}",
            cells=tuple(replace(grid.center, devices=devices, model=model) for model in models),
        )
        for devices in grid.few
    )
