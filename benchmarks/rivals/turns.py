"""Run rivals and Cleave in turns on one testbed and collect what every step took.

A `Result` holds raw numbers of one system with one setting. Rivals are forked by one long-lived process of their own
environment (`forks.py`), Cleave's server and devices are fresh processes for every turn.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.rivals.shape import Work
from benchmarks.rivals.variants import Variant
from benchmarks.testbed import SERVER, Testbed, TestbedError, removal

ROOT: Final = Path(__file__).parents[2]
RIVALS_PYTHON: Final = ROOT / "build" / "rivals" / "bin" / "python"
_PORT: Final = 7077
_MASTER_PORT: Final = 29500
_LOOK_S: Final = 0.02
_GONE_S: Final = 30.0
_WARM_UP: Final = 2
"""Steps that are not counted: they send weights, open connections, warm caches and let planners learn."""
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


def _floats() -> list[float]:
    return []


def _rows() -> list[list[int]]:
    return []


@dataclass(slots=True, kw_only=True)
class Result:
    """What one system showed in one turn; a list entry per step, and per device within."""

    system: str
    settings: str
    step_s: list[float] = field(default_factory=_floats)
    """From the end of one step to the end of the next; the first from the start."""
    losses: list[float] = field(default_factory=_floats)
    down_bytes: list[list[int]] = field(default_factory=_rows)
    up_bytes: list[list[int]] = field(default_factory=_rows)
    cpu_s: list[float] = field(default_factory=_floats)
    """Of all processes together."""
    peak_memory_bytes: list[int] = field(default_factory=lambda: list[int]())
    """Per device, the interpreter and its libraries included."""
    idle_memory_bytes: list[int] = field(default_factory=lambda: list[int]())
    """The same before the model was built, where known."""
    predicted_s: list[float | None] = field(default_factory=lambda: list[float | None]())
    links: dict[str, list[float]] = field(default_factory=lambda: dict[str, list[float]]())
    """Bytes/s down and up that the system believed at the end."""
    grain: str = ""
    error: str = ""

    @property
    def counted(self) -> list[float]:
        """Seconds of the steps after the warm-up; of the last one if there are no others."""
        return self.step_s[_WARM_UP:] or self.step_s[-1:]

    @property
    def median_s(self) -> float:
        return statistics.median(self.counted)


class Forks:
    """The process of the rivals' environment that forks ranks, peers and replicas."""

    def __init__(self, log: Path, python: Path, *modules: str) -> None:
        if not python.exists():
            raise TestbedError(f"the rivals are not installed: there is no {python}; run: make rivals")
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [str(python), "-m", "benchmarks.rivals.forks", *(f"benchmarks.rivals.{name}" for name in modules)],
                cwd=ROOT,
                env=environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        self._log = log
        self._answer()

    def start(self, testbed: Testbed, place: str, module: str, given: dict[str, Any]) -> int:
        """Run a module's `main` in a place; return the process id, which is of no child of this process."""
        order = {
            "module": f"benchmarks.rivals.{module}",
            "namespace": testbed.layout.namespace(place),
            "group": str(testbed.group(place) or ""),
            "host": testbed.address(place),
            "given": given,
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        return self._answer()["pid"]

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise TestbedError(f"the process that forks the rivals ended; read {self._log}")
        return json.loads(line)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def rival_forks(out: Path) -> Forks:
    """Start the process that forks rivals."""
    return Forks(out / "rivals.log", RIVALS_PYTHON, "worker", "hivemind_peer", "torchft_replica")


def cleave_forks(out: Path) -> Forks:
    """Start the process that forks Cleave's servers."""
    return Forks(out / "cleave.log", Path(sys.executable), "cleave_server")


def wait_for_all(pids: Sequence[int], limit_s: float) -> bool:
    """Wait until processes have ended; return whether they all have."""
    until_s = time.monotonic() + limit_s
    for pid in pids:
        try:
            ended = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            if not select.select([ended], [], [], max(0.0, until_s - time.monotonic()))[0]:
                return False
        finally:
            os.close(ended)
    return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long a turn may take."""

    steps: int
    budget_s: float
    """Seconds of steps after which no further one starts."""
    reduce_s: float = 600.0
    """Seconds after which a rival gives up waiting for others."""

    @property
    def turn_s(self) -> float:
        """Seconds after which a turn is given up, its start included: the cores may be busy with other things."""
        return 180 + 4 * self.budget_s


def torch_turn(
    forks: Forks, testbed: Testbed, order: Sequence[str], work: Work, variant: Variant, out: Path, limits: Limits
) -> Result:
    """Run a variant of the torch rivals once; `order` names the devices by rank."""
    result = Result(system=variant.rival, settings=variant.settings)
    for path in out.glob("rank-*.json"):
        path.unlink()
    given = {
        "count": len(order),
        "master": testbed.address(order[0]),
        "port": _MASTER_PORT,
        "work": {"model": work.model, "lora": work.lora},
        "variant": asdict(variant),
        "timeout_s": limits.reduce_s,
        "budget_s": limits.budget_s,
        "steps": limits.steps,
        "out": str(out),
    }
    pids = [forks.start(testbed, name, "worker", given | {"rank": rank}) for rank, name in enumerate(order)]
    if not wait_for_all(pids, limits.turn_s):
        for name in order:
            testbed.kill(name)
        wait_for_all(pids, limits.turn_s)
    records: list[dict[str, Any]] = []
    for rank in range(len(order)):
        path = out / f"rank-{rank}.json"
        unfinished = {"error": f"did not finish in {limits.turn_s:.0f} s"}
        records.append(json.loads(path.read_text()) if path.exists() else unfinished)
    result.error = next((record["error"] for record in records if record["error"]), "")
    if not result.error:
        fill(result, records)
    return result


def fill(result: Result, records: list[dict[str, Any]]) -> None:
    steps = len(records[0]["ended_s"])
    ends = [max(record["began_s"] for record in records)]
    ends += [max(record["ended_s"][step] for record in records) for step in range(steps)]
    result.step_s = [end - start for start, end in itertools.pairwise(ends)]
    for step in range(steps):
        shown = [record["losses"][step] for record in records if record["losses"][step] is not None]
        result.losses.append(statistics.fmean(shown))
        result.down_bytes.append([record["down_bytes"][step] for record in records])
        result.up_bytes.append([record["up_bytes"][step] for record in records])
        result.cpu_s.append(sum(record["cpu_s"][step] for record in records))
    result.peak_memory_bytes = [record["peak_memory_bytes"] for record in records]
    result.idle_memory_bytes = [record["idle_memory_bytes"] for record in records]


def environment() -> dict[str, str]:
    """One thread for every process, and the modules of this checkout."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)]),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
    }


def cleave_name(wire: str) -> str:
    """The name under which Cleave stands in tables: bf16 is the format that rivals get too."""
    return "Cleave" if wire == "bf16" else f"Cleave, {wire}"


class Cleave:
    """Cleave's server in the server's namespace, `cleave join` in every other."""

    def __init__(
        self, forks: Forks, testbed: Testbed, work: Work, out: Path, limits: Limits, grain: str, wire: str = "bf16"
    ) -> None:
        self._forks, self._testbed, self._out, self._limits = forks, testbed, out, limits
        self._steps, self._wire = out / "cleave.jsonl", wire
        self._given = {
            "address": testbed.address(SERVER),
            "port": _PORT,
            "devices": len(testbed.devices),
            "work": asdict(work),
            "steps": limits.steps + _WARM_UP,
            "budget_s": limits.budget_s,
            "joining_s": limits.turn_s,
            "grain": grain,
            "wire": wire,
            "out": str(out),
        }

    def start(self) -> int:
        """Start the server and every device; return the server's process id."""
        self._steps.unlink(missing_ok=True)
        server = self._forks.start(self._testbed, SERVER, "cleave_server", self._given)
        command = [sys.executable, "-m", "cleave", "join", f"ws://{self._testbed.address(SERVER)}:{_PORT}"]
        with (self._out / "devices.log").open("ab") as log:
            for name in self._testbed.devices:
                options = ["--name", name, "--threads", "1", "--wait", "600", "--quiet"]
                self._testbed.start(name, [*command, *options], env=environment(), stdout=log, stderr=log)
        return server

    def steps(self) -> list[dict[str, Any]]:
        """What the server has written so far."""
        text = self._steps.read_text(encoding="utf-8") if self._steps.exists() else ""
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def stop(self, server: int) -> None:
        for place in (SERVER, *self._testbed.devices):
            self._testbed.kill(place)
        wait_for_all([server], _GONE_S)

    def turn(self) -> Result:
        """Train once, from joining on."""
        result = Result(system=cleave_name(self._wire), settings=f"grain {self._given['grain']}, {self._wire}")
        server = self.start()
        traffic, cpu_s, previous_s = self._testbed.traffic(), 0.0, 0.0
        until_s = time.monotonic() + 2 * self._limits.turn_s
        ended = False
        while not ended and time.monotonic() < until_s:
            ended = wait_for_all([server], _LOOK_S)
            for said in self.steps()[len(result.step_s) :]:
                result.step_s.append(said["ended_s"] - (previous_s or said["began_s"]))
                previous_s = said["ended_s"]
                result.losses.append(said["loss"])
                result.predicted_s.append(said["predicted_s"])
                result.links, result.grain = said["links"], said["grain"] or ""
                after = self._testbed.traffic()
                moved = [after[name] - traffic[name] for name in self._testbed.devices]
                traffic = after
                result.down_bytes.append([each.down_bytes for each in moved])
                result.up_bytes.append([each.up_bytes for each in moved])
                used_s, peaks = self._usage()
                result.cpu_s.append(used_s - cpu_s + said["server_cpu_s"])
                cpu_s, result.peak_memory_bytes = used_s, peaks
        self.stop(server)
        if len(result.step_s) < 2:
            result.error = f"finished {len(result.step_s)} steps; read {self._out / 'cleave.log'}"
        return result

    def _usage(self) -> tuple[float, list[int]]:
        """CPU seconds of all devices together, and the peak of memory of each."""
        used_s, peaks = 0.0, list[int]()
        for name in self._testbed.devices:
            peak = 0
            for pid in removal.processes(self._testbed.layout.namespace(name)):
                try:
                    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
                    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
                except OSError:
                    continue
                used_s += (int(fields[11]) + int(fields[12])) / _TICKS_PER_S
                rows = [row.split()[1] for row in status.splitlines() if row.startswith("VmHWM")]
                peak += sum(int(kilobytes) << 10 for kilobytes in rows)
            peaks.append(peak)
        return used_s, peaks
