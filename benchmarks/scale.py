"""How many devices one server handles: steps on 64, 256 and 1,000 emulated devices, and 5,000 idle connections.

`python benchmarks/scale.py`: for each cell, a server in a process of its own and `cleave emulate --compute none` in
another, over real sockets on this machine. Devices are the fleet file's rows, repeated; they take the time of their
profiles but compute nothing, so the server is what is measured. Server CPU includes its planning process. "Late" is
the share of results for which the emulating process was too slow: then it, not the server, limits the step. Where
this machine has two cores or more, the server has one and the emulating process another, so that CPU over measured
seconds says how busy each was: whichever is near 1 sets the pace, whatever links and devices would allow. A cell that
devices left before its end has no times: they would be those of another fleet.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import psutil

from cleave import events
from cleave.api.fleet import Fleet
from cleave.api.training import distribute
from cleave.core.model.gemms import Linear
from cleave.descriptors import descriptors, raise_descriptors
from cleave.errors import CleaveError

_FLEET = Path(__file__).parent / "fleets" / "mixed8.csv"
_LINEAR = Linear(tokens=2048, in_width=1024, out_width=4096)
_STEPS = 4
_FILES = 512
"""Descriptors besides one per connection."""

Kind = Literal["gemm", "resident", "idle"]


class Figures(NamedTuple):
    """What a cell measured."""

    joined_s: float
    devices: int
    """Connected at the end."""
    predicted_s: float | None
    steps_s: list[float]
    cpu_s: float
    """Server CPU per step; per minute for idle connections."""
    devices_cpu_s: float
    """The same of the process that emulates the devices."""
    server_s: float | None
    """Part of the prediction that is the server's own CPU."""
    peak_bytes: int
    tasks: int
    """Done by devices in the steps, by the server's count."""
    late: float | None
    """None if the emulating process said nothing at its end."""
    fault: str = ""
    left: Sequence[str] = ()
    """Devices that left before the end, and why."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps on many emulated devices, and idle connections.")
    parser.add_argument("--devices", default="64,256,1000", help="devices per cell")
    parser.add_argument("--idle", type=int, default=5000, help="idle connections; 0 for none")
    parser.add_argument("--hold", type=float, default=60.0, help="seconds to hold idle connections")
    parser.add_argument("--fleet", default=str(_FLEET), help="device profiles, repeated as needed")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds per cell before it is given up")
    parser.add_argument("--cell", nargs=2, metavar=("KIND", "N"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell is not None:
        print(json.dumps(_measure(options.cell[0], int(options.cell[1]), options)._asdict()))
        return
    counts = [int(count) for count in options.devices.split(",") if count]
    print(f"# Scale: one server, {Path(options.fleet).name} repeated, {os.cpu_count()} cores for everything\n")
    print(
        "| devices | work | joined in s | predicted s | of it server CPU | measured s | server CPU s | "
        "devices' CPU s | peak memory | tasks | late | |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|---|---|", flush=True)
    for count in counts:
        for kind in ("gemm", "resident"):
            print(_row(kind, count, _cell(kind, count, options)), flush=True)
    if options.idle:
        print(_row("idle", options.idle, _cell("idle", options.idle, options)), flush=True)
    print(
        f"\ngemm: the three products of {_LINEAR.tokens} tokens x {_LINEAR.in_width} x {_LINEAR.out_width}; resident: "
        f"the demo model, 2,048 tokens, forward and backward. Medians of {_STEPS - 1} steps after the first. CPU is "
        "per step, for idle connections per minute."
    )


def _cell(kind: Kind, count: int, options: argparse.Namespace) -> Figures:
    """Measure in a process of its own, as peak memory is of a whole process."""
    command = [sys.executable, __file__, "--cell", kind, str(count), "--fleet", options.fleet]
    command += ["--hold", str(options.hold), "--limit", str(options.limit)]
    ended = subprocess.run(command, capture_output=True, text=True)
    lines = ended.stdout.strip().splitlines()
    if ended.returncode or not lines:
        last = (ended.stderr.strip().splitlines() or ["no output"])[-1]
        return _failed(last)
    return Figures(**json.loads(lines[-1]))


def _failed(fault: str) -> Figures:
    return Figures(0.0, 0, None, [], 0.0, 0.0, None, 0, 0, 0.0, fault)


def _row(kind: Kind, count: int, figures: Figures) -> str:
    is_whole = figures.devices >= count and not figures.left
    measured = f"{statistics.median(figures.steps_s):.2f}" if figures.steps_s and is_whole else ""
    predicted = f"{figures.predicted_s:.2f}" if figures.predicted_s is not None else ""
    served = f"{figures.server_s:.2f}" if figures.server_s is not None else ""
    late = "?" if figures.late is None else f"{figures.late:.0%}"
    note = figures.fault
    if not (note or is_whole):
        note = f"no time: {figures.devices:,} connected at the end; {'; '.join(figures.left[:3])}"
    return (
        f"| {count:,} | {kind} | {figures.joined_s:.1f} | {predicted} | {served} | {measured} | {figures.cpu_s:.2f} | "
        f"{figures.devices_cpu_s:.2f} | {figures.peak_bytes / 1e6:.0f} MB | {figures.tasks:,} | {late} | "
        f"{note} |"
    )


# ------------------------------------------------------------------------------------------------ one cell


def _measure(kind: Kind, count: int, options: argparse.Namespace) -> Figures:
    raise_descriptors(count + _FILES)
    allowed = descriptors()[0]
    if allowed < count + _FILES:
        return _failed(f"needs {count + _FILES} open files, {allowed:.0f} are allowed (ulimit -Hn)")
    until_s = time.monotonic() + options.limit
    cores = sorted(psutil.Process().cpu_affinity() or ()) if hasattr(psutil.Process, "cpu_affinity") else []
    if len(cores) > 1:
        psutil.Process().cpu_affinity(cores[:1])
    left: list[str] = []

    def hear(event: events.Event) -> None:
        if isinstance(event, events.DeviceLeft) and not is_over:
            left.append(f"{event.device}: {event.reason}")

    is_over = False
    with Fleet.serve(
        "127.0.0.1:0", wire="bf16", offload="always", trust="own", scale_test=True, listener=hear
    ) as fleet:
        started_s = time.monotonic()
        emulator = _emulator(fleet.url, options.fleet, count)
        if len(cores) > 1:
            psutil.Process(emulator.pid).cpu_affinity(cores[1:2])
        try:
            fleet.wait(count, options.limit)
            joined_s = time.monotonic() - started_s
            tasks_before = _tasks(fleet)
            before_s, devices_before_s = _cpu_s(emulator.pid), _own_cpu_s(psutil.Process(emulator.pid))
            fault, predicted_s, server_s, steps_s = "", None, None, list[float]()
            try:
                match kind:
                    case "idle":
                        time.sleep(options.hold)
                        per = options.hold / 60
                    case "gemm":
                        predicted_s, server_s, steps_s = _gemms(fleet, until_s)
                        per = len(steps_s)
                    case "resident":
                        predicted_s, steps_s = _passes(fleet, until_s)
                        per = len(steps_s)
            except (CleaveError, TimeoutError) as error:
                fault, per = str(error) or type(error).__name__, 1
            per = max(per, 1e-9)
            cpu_s = (_cpu_s(emulator.pid) - before_s) / per
            devices_cpu_s = (_own_cpu_s(psutil.Process(emulator.pid)) - devices_before_s) / per
            devices, tasks, is_over = fleet.cluster.devices, _tasks(fleet) - tasks_before, True
            if steps_s and not tasks:
                fault, steps_s = "no device did a task", []
        finally:
            is_over = True
            fleet.close()
            summary = _summary(emulator)
    return Figures(
        joined_s=joined_s,
        devices=devices,
        predicted_s=predicted_s,
        steps_s=steps_s[1:],
        cpu_s=cpu_s,
        devices_cpu_s=devices_cpu_s,
        server_s=server_s,
        peak_bytes=_peak_bytes(),
        tasks=tasks,
        late=summary["late_results"] / max(summary["results"], 1) if summary else None,
        fault=fault,
        left=left,
    )


def _tasks(fleet: Fleet) -> int:
    """Tasks that connected devices have done so far."""
    return sum(member.tasks for member in fleet.cluster.members())


def _gemms(fleet: Fleet, until_s: float) -> tuple[float | None, float | None, list[float]]:
    """The three products of a linear layer; return the last prediction, the server's part, and seconds per step."""
    cluster, linear = fleet.cluster, _LINEAR
    rng = np.random.default_rng(0)

    def tensor(rows: int, cols: int) -> Any:
        made = cluster.tensor(rows, cols)
        made.bind(rng.standard_normal((rows, cols), dtype=np.float32))
        return made

    predicted_s = server_s = None
    steps_s: list[float] = []
    while len(steps_s) < _STEPS:
        x, weight = tensor(linear.tokens, linear.in_width), tensor(linear.out_width, linear.in_width)
        dy = tensor(linear.tokens, linear.out_width)
        started_s = time.perf_counter()
        plan = cluster.choose_layer(linear).plan
        if plan is not None:
            predicted_s, server_s = plan.total_s, plan.server_s
        work = [
            cluster.submit("forward", (x,), (weight,), plan),
            cluster.submit("grad_input", (dy,), (weight,), plan),
            cluster.submit("grad_weight", (dy,), (x,), plan),
        ]
        for future in work:
            future.result(max(0.0, until_s - time.monotonic()))
        steps_s.append(time.perf_counter() - started_s)
        cluster.step_ended()
    return predicted_s, server_s, steps_s


def _passes(fleet: Fleet, until_s: float) -> tuple[float | None, list[float]]:
    """The demo model forward and backward, with resident layers; return the last prediction and seconds per step."""
    import torch

    from cleave.train.models import build_model

    model, _ = build_model("demo", "fp32", 1)
    distributed = distribute(model, fleet, grain="resident")
    steps_s: list[float] = []
    while len(steps_s) < _STEPS:
        if time.monotonic() > until_s:
            raise TimeoutError(f"{len(steps_s)} steps done in time")
        batch = torch.randint(0, 256, (8, 256), generator=torch.Generator().manual_seed(len(steps_s)))
        started_s = time.perf_counter()
        distributed(input_ids=batch, labels=batch).loss.backward()
        steps_s.append(time.perf_counter() - started_s)
        fleet.cluster.step_ended()
    return fleet.status().predicted_s, steps_s


def _emulator(url: str, fleet: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "cleave", "emulate", url, "--fleet", fleet, "--count", str(count)]
    command += [
        "--compute",
        "none",
        "--quiet",
        "--json",
        "--wait",
        "5",
    ]  # at the end, for devices that heard no goodbye
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)


def _summary(emulator: subprocess.Popen[str]) -> dict[str, Any]:
    try:
        out, _ = emulator.communicate(timeout=30)
        return json.loads(out)
    except (subprocess.TimeoutExpired, json.JSONDecodeError):
        emulator.kill()
        emulator.wait()
        return {}


def _cpu_s(other: int) -> float:
    """CPU seconds of this process and its children so far, `other` left out."""
    total, own = 0.0, psutil.Process()
    for process in (own, *own.children(recursive=True)):
        if process.pid != other:
            total += _own_cpu_s(process)
    return total


def _own_cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system


def _peak_bytes() -> int:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
