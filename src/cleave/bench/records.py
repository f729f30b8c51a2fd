"""Raw numbers: what was measured in every step of every run, and under which circumstances.

One JSON file per scenario. Tables, plots and pages are made from it alone, so they can be made again, and by others.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Final

import msgspec

import cleave
from cleave.bench.scenario import Cell, Scenario
from cleave.disk import read_whole, write_whole
from cleave.errors import InputError

FORMAT: Final = 1
_MOST_BYTES: Final = 1 << 28
_PACKAGES: Final = ("torch", "transformers", "peft", "numpy", "websockets", "uvicorn", "uvloop", "msgspec")


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """What the server believes of a device after a step."""

    device: str
    flops_per_s: float
    down_bytes_per_s: float
    up_bytes_per_s: float
    down_bytes: int
    """Moved since it joined, as `up_bytes`."""
    up_bytes: int


class Step(msgspec.Struct, frozen=True, kw_only=True, tag_field="message", tag="step"):
    """One training step."""

    number: int
    """Counted from 1."""
    seconds: float
    batch_s: float
    """Forward and backward; the rest of `seconds` is the optimizer's."""
    predicted_s: float | None
    """What the server predicted of this step, just before it."""
    modeled_s: float | None = None
    """The cost model's own time, before experience with earlier steps corrects it."""
    loss: float
    down_bytes: int
    up_bytes: int
    grain: str | None
    plan: str
    """The plan in words."""
    devices: int
    server_cpu_s: float
    device_cpu_s: float | None = None
    """Processor seconds of all device processes together."""
    other_cpu_s: float | None = None
    """Processor seconds that this machine spent on anything else meanwhile."""
    rates: tuple[Rates, ...] = ()

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return None if not self.predicted_s else self.seconds / self.predicted_s


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One server and its devices, from start to end."""

    started: str
    """Date and time, UTC."""
    steps: tuple[Step, ...]
    join_s: float | None = None
    """Until all devices had joined, measuring of links included."""
    peak_rss_bytes: int | None = None
    """Of the server's process."""
    events: dict[str, int] = {}
    """How often what happened, such as `device_late`."""
    choices: tuple[str, ...] = ()
    """Every choice of a grain, with its reason."""
    emulation: dict[str, object] = {}
    """What `cleave emulate` said of itself at its end."""
    failed: str | None = None
    """Why it did not finish; None if it did."""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A cell and its runs."""

    cell: Cell
    digest: str
    """Of settings and code: a cell with the same one need not be measured again."""
    command: str
    versions: dict[str, str]
    runs: tuple[Run, ...]

    @property
    def failed(self) -> str | None:
        return next((run.failed for run in self.runs if run.failed is not None), None)


class Reference(msgspec.Struct, frozen=True, kw_only=True):
    """The same training in plain torch, without devices."""

    digest: str
    seconds: tuple[float, ...]
    losses: tuple[float, ...]


class Results(msgspec.Struct, frozen=True, kw_only=True):
    """The raw numbers of a scenario."""

    format: int = FORMAT
    scenario: Scenario
    command: str
    """The command that measures all cells; a cell has the one that measured it."""
    date: str
    versions: dict[str, str]
    cells: tuple[Measured, ...] = ()
    references: tuple[Reference, ...] = ()

    def reference(self, cell: Cell) -> Reference | None:
        digest = cell.reference_digest()
        return next((each for each in self.references if each.digest == digest), None)


def read_results(path: Path) -> Results | None:
    """Read raw numbers; None if there are none yet, or they are of another format."""
    try:
        return msgspec.json.decode(read_whole(path, _MOST_BYTES), type=Results)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as fault:
        raise InputError(
            f"{path} holds no results that this version can read ({fault}); move it away, or give another --out"
        ) from None


def write_results(path: Path, results: Results) -> None:
    write_whole(path, msgspec.json.encode(results) + b"\n")


def versions() -> dict[str, str]:
    """Versions of everything that matters for a figure, and the machine's kind."""
    found = {"cleave": cleave.__version__, "code": code_digest(), "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {**found, "system": f"{platform.system()} {platform.machine()}", "cores": str(os.cpu_count() or 1)}


def code_digest() -> str:
    """Identify the installed code, so that figures of other code are not taken for its own."""
    root = Path(cleave.__file__).parent
    whole = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if not name.startswith(_UNMEASURED):
            whole.update(name.encode() + b"\0" + path.read_bytes())
    return whole.hexdigest()[:12]


_UNMEASURED: Final = ("cli/", "report/", "runs/", "bench/figures", "bench/files", "bench/plot", "bench/table")
"""Parts of the package that have no say in what is measured."""
