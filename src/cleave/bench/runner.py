"""Run the cells of a scenario, one after the other, and keep what is done after each.

A cell that fails, hangs or takes too long is recorded with its reason, and the others go on. Cells whose settings and
code are those of an earlier run in the same directory are not run again.
"""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, cast

import msgspec
from msgspec.structs import replace

from cleave.bench.messages import AnyMessage, Failed, Finished, Job, Joined, Listening
from cleave.bench.processes import Process, ending, free_cores, machine_cpu_s
from cleave.bench.records import Measured, Reference, Results, Run, Step
from cleave.bench.scenario import Cell, FleetSetting
from cleave.errors import CleaveError

_JOIN_S: Final = 120.0
_WORKER: Final = ("-m", "cleave.bench.worker")

Watch = Callable[[Cell, int, Step], None]
"""Hears of each step of a cell, with the number of the run."""


class _Stopped(Exception):
    """A run that did not finish, and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Cells to run now, and those whose earlier results stand."""

    pending: tuple[Cell, ...]
    standing: tuple[Measured, ...]


def plan_cells(cells: Sequence[Cell], earlier: Results | None, code: str, *, again: bool) -> Plan:
    """Decide which cells to run with the code of this digest; with `again`, all of them."""
    finished = {m.digest: m for m in (earlier.cells if earlier is not None else ()) if m.failed is None}
    standing = () if again else tuple(finished[d] for cell in cells if (d := cell.digest(code)) in finished)
    done = {measured.digest for measured in standing}
    return Plan(pending=tuple(cell for cell in cells if cell.digest(code) not in done), standing=standing)


def run_cells(
    plan: Plan,
    results: Results,
    *,
    command: str,
    limit_s: float,
    watch: Watch,
    done: Callable[[Results, Measured], None],
) -> Results:
    """Run the pending cells; `done` gets the results so far after each. One that plain torch cannot do has failed."""
    for cell in plan.pending:
        runs: list[Run] = []
        if cell.fleet.compute == "real" and results.reference(cell) is None:
            try:
                results = replace(results, references=(*results.references, _reference(cell, limit_s)))
            except CleaveError as fault:  # its losses could not be compared; the other cells go on
                runs.append(Run(started=_now(), steps=(), failed=str(fault)))
        while len(runs) < cell.repeats and not any(run.failed for run in runs):
            number = len(runs) + 1
            runs.append(run_cell(cell, limit_s, lambda step, cell=cell, number=number: watch(cell, number, step)))
        measured = Measured(
            cell=cell,
            digest=cell.digest(results.versions["code"]),
            command=command,
            versions=results.versions,
            runs=tuple(runs),
        )
        results = with_cell(results, measured)
        done(results, measured)
    return results


def with_cell(results: Results, measured: Measured) -> Results:
    """Put a cell in the place of an earlier one of the same name, or at the end."""
    name = measured.cell.name
    if all(each.cell.name != name for each in results.cells):
        return replace(results, cells=(*results.cells, measured))
    return replace(results, cells=tuple(measured if each.cell.name == name else each for each in results.cells))


def run_cell(cell: Cell, limit_s: float, watch: Callable[[Step], None]) -> Run:
    """Run a cell once: a server process, its devices, and the training between them."""
    until_s = time.monotonic() + limit_s
    heard = _Heard(watch)
    started = _now()
    processes: list[Process] = []
    devices: list[Process] = []
    reason: str | None = None
    emulation: dict[str, object] = {}
    with ending(processes), tempfile.TemporaryDirectory(prefix="cleave-bench-") as directory:
        token = secrets.token_urlsafe(16)
        server = _start_worker(cell, processes, has_devices=True, token=token, join_s=min(_JOIN_S, limit_s))

        def check_devices() -> None:
            if heard.join_s is None and not all(device.is_alive for device in devices):
                raise _Stopped("a device process ended before all devices had joined")

        try:
            for line in server.lines(until_s, check_devices):
                message = msgspec.json.decode(line, type=AnyMessage)
                if isinstance(message, Listening):
                    devices += _start_devices(cell, message.url, token, Path(directory), processes)
                heard(message, sum(device.cpu_s() for device in devices), machine_cpu_s())
                if heard.finished is not None:
                    break
            else:
                reason = f"the server's process ended early: {server.last_words}"
        except TimeoutError:
            reason = f"not finished within {limit_s:g} s: {len(heard.steps)} of {cell.steps} steps done"
        except _Stopped as stopped:
            reason = str(stopped)
        if reason is not None:
            gone = [device for device in devices if not device.is_alive]
            server.end()
            for device in devices:
                device.interrupt()
            reason += "".join(f"; {d.last_words}" for d in gone[:1])
        else:
            server.rest()  # says goodbye to devices, which then end by themselves
        for device in devices:
            emulation |= _summary(device.rest())
    finished = heard.finished
    return Run(
        started=started,
        steps=tuple(heard.steps),
        join_s=heard.join_s,
        peak_rss_bytes=finished.peak_rss_bytes if finished is not None else None,
        events=finished.events if finished is not None else {},
        choices=finished.choices if finished is not None else (),
        emulation=emulation,
        failed=reason,
    )


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


class _Heard:
    """What a cell's server said so far."""

    def __init__(self, watch: Callable[[Step], None]) -> None:
        self._watch = watch
        self._cpu_s, self._machine_cpu_s = 0.0, 0.0
        self.steps: list[Step] = []
        self.join_s: float | None = None
        self.finished: Finished | None = None

    def __call__(self, message: AnyMessage, device_cpu_s: float, machine_cpu_s: float) -> None:
        match message:
            case Listening():
                pass
            case Joined(seconds=seconds):
                self.join_s = seconds
            case Step():
                ours_s = max(0.0, device_cpu_s - self._cpu_s)
                other_s = max(0.0, machine_cpu_s - self._machine_cpu_s - message.server_cpu_s - ours_s)
                self.steps.append(replace(message, device_cpu_s=ours_s, other_cpu_s=other_s))
                self._watch(self.steps[-1])
            case Finished():
                self.finished = message
            case Failed(reason=reason):
                raise _Stopped(reason)
        self._cpu_s, self._machine_cpu_s = device_cpu_s, machine_cpu_s


def _reference(cell: Cell, limit_s: float) -> Reference:
    """Train the cell's model in plain torch, on all cores: nothing else runs meanwhile."""
    processes: list[Process] = []
    heard = _Heard(lambda step: None)
    with ending(processes):
        worker = _start_worker(cell, processes, has_devices=False)
        try:
            for line in worker.lines(time.monotonic() + limit_s):
                heard(msgspec.json.decode(line, type=AnyMessage), 0.0, machine_cpu_s())
        except TimeoutError:
            raise CleaveError(
                f"plain torch did not finish {cell.steps} steps of {cell.model_name}/{cell.mode} within {limit_s:g} s; "
                "raise limit_s, or choose a smaller model"
            ) from None
        except _Stopped as stopped:
            raise CleaveError(f"plain torch cannot train {cell.model_name}/{cell.mode}: {stopped}") from None
        if heard.finished is None:
            raise CleaveError(f"plain torch failed on {cell.model_name}/{cell.mode}: {worker.last_words}")
    return Reference(
        digest=cell.reference_digest(),
        seconds=tuple(step.seconds for step in heard.steps),
        losses=tuple(step.loss for step in heard.steps),
    )


def _start_worker(
    cell: Cell, processes: list[Process], *, has_devices: bool, token: str = "", join_s: float = _JOIN_S
) -> Process:
    cores = cell.processes.server_cores if has_devices else ()
    threads = len(cores) or free_cores()
    shared = len(cell.processes.device_cores) or free_cores()
    job = Job(
        cell=cell,
        has_devices=has_devices,
        token=token,
        join_s=join_s,
        threads=threads,
        device_cores=shared if cell.fleet.devices == "join" else None,
    )
    processes.append(Process(_WORKER, cores=cores, threads=threads))
    processes[-1].tell(msgspec.json.encode(job))
    return processes[-1]


def _start_devices(cell: Cell, url: str, token: str, directory: Path, processes: list[Process]) -> list[Process]:
    fleet = cell.fleet
    if fleet.devices == "emulate":
        path = directory / "fleet.csv"
        path.write_text(cell.fleet_csv, encoding="utf-8")
        threads = len(cell.processes.device_cores) or free_cores()
        commands = [emulate_arguments(fleet, url, path, threads)]
    else:
        commands = [join_arguments(fleet, url, f"join-{number + 1}") for number in range(cell.device_count)]
    started = [
        Process(
            arguments,
            cores=cell.processes.device_cores,
            threads=fleet.threads,
            environment={"CLEAVE_TOKEN": token},
        )
        for arguments in commands
    ]
    processes += started
    return started


def emulate_arguments(fleet: FleetSetting, url: str, path: Path, threads: int) -> list[str]:
    """Arguments of the process that answers for all emulated devices."""
    command = ["-m", "cleave", "emulate", url, "--fleet", str(path), "--threads", str(threads), "--quiet", "--json"]
    command += ["--claim", f"{fleet.claim:g}"] if fleet.claim != 1 else []
    return command + (["--compute", fleet.compute] if fleet.compute != "real" else [])


def join_arguments(fleet: FleetSetting, url: str, name: str) -> list[str]:
    """Arguments of the process of one real device."""
    command = ["-m", "cleave", "join", url, "--name", name, "--threads", str(fleet.threads), "--quiet", "--with-parent"]
    return command + (["--memory", fleet.memory] if fleet.memory else [])


def _summary(lines: Sequence[bytes]) -> dict[str, object]:
    """Return the JSON object that an emulation prints at its end, if it did."""
    for line in reversed(lines):
        try:
            found: object = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError):
            continue
        if isinstance(found, dict):
            return cast("dict[str, object]", found)
    return {}
