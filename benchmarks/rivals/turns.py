"""Run rivals and Cleave in turns on one testbed and collect what every step took.

A `Result` holds raw numbers of one system with one setting. The rivals' ranks are forked by one long-lived process of
their own environment (`worker.py`), Cleave's server and devices are fresh processes for every turn.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from benchmarks.rivals.variants import Variant
from benchmarks.rivals.work import Work
from benchmarks.testbed import SERVER, Testbed, TestbedError, removal

ROOT: Final = Path(__file__).parents[2]
RIVALS_PYTHON: Final = ROOT / "build" / "rivals" / "bin" / "python"
_PORT: Final = 7077
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


class RankServer:
    """The process that forks ranks: one turn of a variant at a time."""

    def __init__(
        self,
        testbed: Testbed,
        order: Sequence[str],
        work: Work,
        variants: Sequence[Variant],
        out: Path,
        budget_s: float,
        steps: int,
    ) -> None:
        if not RIVALS_PYTHON.exists():
            raise TestbedError(f"the rivals are not installed: there is no {RIVALS_PYTHON}; run: make rivals")
        self.order, self.variants, self.out = tuple(order), tuple(variants), out
        given = {
            "namespaces": [testbed.layout.namespace(name) for name in order],
            "master": testbed.address(order[0]),
            "work": {"model": work.model, "lora": work.lora},
            "variants": [asdict(variant) for variant in variants],
            "timeout_s": max(60.0, 3 * budget_s),
            "limit_s": max(90.0, 4 * budget_s),
            "budget_s": budget_s,
            "steps": steps,
            "out": str(out),
        }
        self._log = (out / "ranks.log").open("wb")
        self._process = subprocess.Popen(
            [str(RIVALS_PYTHON), "-m", "benchmarks.rivals.worker", json.dumps(given)],
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )

    def turn(self, number: int) -> Result:
        """Run a variant once."""
        variant = self.variants[number]
        result = Result(system=variant.rival, settings=variant.settings)
        for path in self.out.glob(f"{number}-*.json"):
            path.unlink()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{number}\n".encode())
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise TestbedError(f"the process that forks the rivals' ranks ended; read {self.out / 'ranks.log'}")
        records: list[dict[str, Any]] = []
        for rank in range(len(self.order)):
            path = self.out / f"{number}-{rank}.json"
            records.append(json.loads(path.read_text()) if path.exists() else {"error": "did not finish in its time"})
        result.error = next((record["error"] for record in records if record["error"]), "")
        if not result.error:
            fill(result, records)
        return result

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


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


class Cleave:
    """Cleave's server in the server's namespace, `cleave join` in every other."""

    def __init__(self, testbed: Testbed, work: Work, out: Path, budget_s: float, steps: int, grain: str) -> None:
        self._testbed, self._out = testbed, out
        self._given = {
            "address": testbed.address(SERVER),
            "port": _PORT,
            "devices": len(testbed.devices),
            "work": {"model": work.model, "lora": work.lora},
            "steps": steps,
            "budget_s": budget_s,
            "grain": grain,
        }

    def turn(self) -> Result:
        """Train once, from joining on."""
        result = Result(system="Cleave", settings=f"grain {self._given['grain']}, bf16")
        with (self._out / "cleave.log").open("ab") as log:
            server = self._testbed.start(
                SERVER,
                [sys.executable, "-m", "benchmarks.rivals.cleave_server", json.dumps(self._given)],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=log,
            )
            assert server.stdout is not None
            server.stdout.readline()  # it listens
            devices = [
                self._testbed.start(
                    name,
                    [
                        *(sys.executable, "-m", "cleave", "join", f"ws://{self._testbed.address(SERVER)}:{_PORT}"),
                        *("--name", name, "--threads", "1", "--quiet"),
                    ],
                    env=environment(),
                    stdout=log,
                    stderr=log,
                )
                for name in self._testbed.devices
            ]
            self._watch(result, server.stdout)
            server.wait()
            for device in devices:
                device.kill()
                device.wait()
        if len(result.step_s) < 2:
            result.error = result.error or f"ended with exit code {server.returncode}; read {self._out / 'cleave.log'}"
        return result

    def _watch(self, result: Result, lines: IO[bytes]) -> None:
        traffic, cpu_s = self._testbed.traffic(), 0.0
        previous_s = 0.0
        for line in lines:
            said = json.loads(line)
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
            cpu_s = used_s
            result.peak_memory_bytes = peaks

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
