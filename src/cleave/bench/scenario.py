"""Scenarios: a TOML file in, the cells of its grid out.

A cell carries everything that decides what is measured, the rows of its fleet included, so that two cells with equal
settings are the same experiment. Nothing is run here, and torch is not needed to check a file.
"""

from __future__ import annotations

import csv
import hashlib
import io
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Final, Literal, cast

import msgspec
import numpy as np

from cleave.api.planning import load_fleet, sample_fleet
from cleave.core.cost.wire import WireFormat, WireName, format_of
from cleave.core.fleet.profiles import read_csv, write_csv
from cleave.core.model.grain import Grain
from cleave.disk import read_whole
from cleave.errors import InputError

_MOST_BYTES: Final = 1 << 16
_NAME: Final = re.compile(r"[\w.+-]{1,40}")
_MODE: Final = re.compile(r"full|lora-[1-9]\d{0,3}")

Count = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
CountOrZero = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e18)]
Kind = Literal["emulate", "join"]
Compute = Literal["real", "none"]


class Sample(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A fleet drawn from the fact tables, as `cleave fleet sample` does."""

    mix: str
    country: str = "us"
    seed: CountOrZero = 1


class FleetSetting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Devices of a cell."""

    devices: Kind = "emulate"
    """`emulate`: one process answers for all of them, at the speed of their profiles; `join`: real device processes."""
    file: str | None = None
    """Fleet CSV, relative to the scenario."""
    sample: Sample | None = None
    count: Count | None = None
    """Number of devices: rows are repeated or cut off; required for `join`."""
    flops_per_s: Positive | None = None
    """Speed of every device, in place of the file's: what one core can really compute, say."""
    compute: Compute = "real"
    """`none` for emulated devices that return zeros: speed without arithmetic, so losses mean nothing."""
    claim: Positive = 1.0
    """Factor by which emulated devices exaggerate their FLOP/s when they join."""
    threads: Count = 1
    """Threads of each device process."""
    memory: str | None = None
    """Memory of each `join` process, such as 500MB."""


class ModelSetting(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model by name, or a Llama of one's own shape, with weights drawn from the seed."""

    name: str | None = None
    hidden: Count | None = None
    layers: Count = 4
    ffn: Count | None = None
    heads: Count | None = None
    kv_heads: Count | None = None
    vocab: Count = 256


class Processes(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cores that the processes of a cell are pinned to; empty for any."""

    server_cores: tuple[CountOrZero, ...] = ()
    device_cores: tuple[CountOrZero, ...] = ()


class Scenario(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A scenario file as written."""

    title: str
    fleets: dict[str, FleetSetting]
    models: dict[str, ModelSetting]
    modes: tuple[str, ...] = ("full",)
    """`full`, or `lora-RANK`."""
    wires: tuple[WireName, ...] = ("bf16",)
    grains: tuple[Grain, ...] = ("auto",)
    tokens: Count = 2048
    """Tokens per step."""
    sequence: Count = 256
    """Tokens per sequence."""
    steps: Count = 8
    warmup: CountOrZero = 2
    """First steps, left out of medians."""
    repeats: Count = 1
    """Runs of each cell, each with a server and devices of its own."""
    seed: CountOrZero = 1
    learning_rate: Positive = 1e-3
    overlap: bool = False
    """Update each weight during backward, as `cleave train --overlap` does."""
    limit_s: Positive = 300.0
    """Seconds after which a run is ended, and recorded as failed."""
    target: tuple[float, float] | None = None
    """Range in which measured over predicted should be; what is outside is set in bold."""
    show_steps: bool = False
    """Add a table and a plot of single steps."""
    processes: Processes = Processes()


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One experiment, complete: equal cells measure the same."""

    fleet_name: str
    model_name: str
    mode: str
    wire: WireFormat
    grain: Grain
    fleet: FleetSetting
    fleet_csv: str
    """Profiles of the devices; empty for real ones, which measure themselves."""
    model: ModelSetting
    tokens: int
    sequence: int
    steps: int
    repeats: int
    seed: int
    learning_rate: float
    overlap: bool
    processes: Processes

    @property
    def name(self) -> str:
        return "/".join((self.fleet_name, self.model_name, self.mode, self.wire, self.grain))

    @property
    def device_count(self) -> int:
        return len(read_csv(self.fleet_csv, "fleet").names) if self.fleet_csv else self.fleet.count or 0

    def digest(self, code: str) -> str:
        """Identify the settings, and the code that is measured."""
        return _digest(self, code)

    def reference_digest(self) -> str:
        """Identify what plain torch computes for this cell: equal for all fleets, wires and grains."""
        return _digest((self.model, self.mode, self.tokens, self.sequence, self.steps, self.seed, self.learning_rate))


def read_scenario(path: Path) -> tuple[Scenario, tuple[Cell, ...]]:
    """Read and check a scenario file, and the fleet files that it names. Raises InputError."""
    try:
        given = tomllib.loads(read_whole(path, _MOST_BYTES).decode("utf-8"))
    except OSError as fault:
        raise InputError(f"cannot read {path}: {fault.strerror}; give the path of a scenario's TOML file") from None
    except (ValueError, RecursionError) as fault:
        raise InputError(f"expected TOML in {path}, but {fault}; correct the file") from None
    if "benchmark" in given:
        raise InputError(f"{path} is a scenario of benchmarks/run.py, not of cleave bench; run that script on it")
    try:
        scenario = msgspec.convert(given, Scenario)
    except msgspec.ValidationError as fault:
        raise InputError(f"{path} is not a scenario: {_in_words(fault)}; correct the file") from None
    _check(scenario, path)
    fleets = {name: _rows(name, fleet, path) for name, fleet in scenario.fleets.items()}
    return scenario, tuple(_cells(scenario, fleets))


def select(cells: tuple[Cell, ...], wanted: tuple[str, ...]) -> tuple[Cell, ...]:
    """Select cells by name, or by how their name starts: `home4`, `home4/demo`. Raises InputError if none matches."""
    for each in wanted:
        if not any(_starts(cell, each) for cell in cells):
            names = ", ".join(cell.name for cell in cells)
            raise InputError(f"there is no cell {each!r} in this scenario; its cells are {names}")
    return tuple(cell for cell in cells if not wanted or any(_starts(cell, each) for each in wanted))


def _starts(cell: Cell, wanted: str) -> bool:
    return f"{cell.name}/".startswith(f"{wanted.rstrip('/')}/")


def _cells(scenario: Scenario, fleets: Mapping[str, str]) -> list[Cell]:
    grid = product(scenario.fleets, scenario.models, scenario.modes, scenario.wires, scenario.grains)
    return [
        Cell(
            fleet_name=fleet,
            model_name=model,
            mode=mode,
            wire=format_of(wire),
            grain=grain,
            fleet=msgspec.structs.replace(scenario.fleets[fleet], file=None, sample=None),
            fleet_csv=fleets[fleet],
            model=scenario.models[model],
            tokens=scenario.tokens,
            sequence=scenario.sequence,
            steps=scenario.steps,
            repeats=scenario.repeats,
            seed=scenario.seed,
            learning_rate=scenario.learning_rate,
            overlap=scenario.overlap,
            processes=scenario.processes,
        )
        for fleet, model, mode, wire, grain in grid
    ]


def _check(scenario: Scenario, path: Path) -> None:
    def require(good: bool, problem: str) -> None:
        if not good:
            raise InputError(f"{path}: {problem}")

    for kind, names in (("fleet", scenario.fleets), ("model", scenario.models)):
        require(bool(names), f"a scenario needs a {kind}, but [{kind}s] is empty; add one")
        for name in names:
            require(bool(_NAME.fullmatch(name)), f"{name!r} cannot name a {kind}; use letters, digits and _ . + -")
    for values in ("modes", "wires", "grains"):
        listed = cast("tuple[str, ...]", getattr(scenario, values))
        require(bool(listed), f"{values} is empty; name one")
        unique = {format_of(value) or value for value in listed}
        require(len(unique) == len(listed), f"{values} has an entry twice; remove one")
    for mode in scenario.modes:
        require(bool(_MODE.fullmatch(mode)), f"expected a mode to be full or lora-RANK such as lora-8, got {mode!r}")
    require(
        scenario.tokens % scenario.sequence == 0,
        f"tokens ({scenario.tokens}) must be a multiple of sequence ({scenario.sequence}); change one of them",
    )
    require(
        scenario.warmup < scenario.steps,
        f"warmup ({scenario.warmup}) must leave a step of {scenario.steps} to measure; lower it or raise steps",
    )
    if scenario.target is not None:
        low, high = scenario.target
        require(0 < low < high, f"expected target to be a range such as [0.9, 1.15], got [{low}, {high}]; correct it")
    for name, model in scenario.models.items():
        _check_model(name, model, require)
    for name, fleet in scenario.fleets.items():
        sources = (fleet.file is not None) + (fleet.sample is not None)
        if fleet.devices == "emulate":
            require(sources == 1, f"fleet {name} needs either file or sample, not both or neither; correct it")
            require(fleet.memory is None, f"fleet {name}: emulated devices have the memory of their profile; drop it")
        else:
            require(sources == 0, f"fleet {name}: real devices measure themselves; drop file and sample")
            require(fleet.count is not None, f"fleet {name}: how many devices should join? add count")
            emulated = (fleet.compute, fleet.claim, fleet.flops_per_s) == ("real", 1, None)
            require(emulated, f"fleet {name}: compute, claim and flops_per_s are for emulated devices; drop them")


def _check_model(name: str, model: ModelSetting, check: Callable[[bool, str], None]) -> None:
    if model.name is not None:
        plain = model == ModelSetting(name=model.name)
        check(plain, f"model {name} has a name and a shape of its own; give one of them")
        return
    check(model.hidden is not None, f"model {name} needs name, or hidden and other sizes; add them")
    hidden, heads = model.hidden or 0, model.heads or max(1, (model.hidden or 0) // 64)
    check(hidden % heads == 0, f"model {name}: hidden ({hidden}) must be a multiple of heads ({heads}); change one")
    kv_heads = model.kv_heads or heads
    check(heads % kv_heads == 0, f"model {name}: heads ({heads}) must be a multiple of kv_heads ({kv_heads})")


def _rows(name: str, fleet: FleetSetting, path: Path) -> str:
    """Return the profiles of a fleet as CSV; nothing for real devices."""
    if fleet.devices == "join":
        return ""
    if fleet.sample is not None:
        profiles = sample_fleet(fleet.sample.mix, fleet.sample.country, fleet.sample.seed)
    else:
        assert fleet.file is not None
        profiles = load_fleet(path.parent / fleet.file)
    if fleet.flops_per_s is not None:
        profiles = replace(profiles, flops_per_s=np.full(len(profiles), fleet.flops_per_s))
    return _resized(write_csv(profiles), fleet.count) if fleet.count else write_csv(profiles)


def _resized(fleet_csv: str, count: int) -> str:
    """Repeat a fleet's rows up to a number of devices, with numbered names, or cut them off."""
    header, *rows = csv.reader(fleet_csv.splitlines())
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for number in range(count):
        name, *values = rows[number % len(rows)]
        round_ = number // len(rows)
        writer.writerow([f"{name}.{round_ + 1}" if round_ else name, *values])
    return text.getvalue()


def _digest(*parts: object) -> str:
    return hashlib.sha256(msgspec.json.encode(parts, order="sorted")).hexdigest()[:16]


def _in_words(fault: msgspec.ValidationError) -> str:
    """Turn `Expected X, got Y - at $.a.b` into `a.b: expected X, got Y`."""
    problem, _, place = str(fault).replace("`", "").partition(" - at ")
    problem = problem[:1].lower() + problem[1:]
    return f"{place.removeprefix('$.')}: {problem}" if place else problem
