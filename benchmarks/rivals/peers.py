"""Turns of the systems that run as separate processes from their own environment: hivemind and torchft."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Final, Literal

from benchmarks.rivals.turns import RIVALS_PYTHON, Result, environment, fill
from benchmarks.rivals.work import Work
from benchmarks.testbed import SERVER, Testbed

from cleave.core.fleet.profiles import Profiles

PeerSystem = Literal["hivemind", "torchft"]
_MODULES: Final[dict[PeerSystem, str]] = {"hivemind": "hivemind_peer", "torchft": "torchft_replica"}
_SETTINGS: Final[dict[PeerSystem, str]] = {
    "hivemind": "fp16 gradients, matchmaking 2 s",
    "torchft": "fp32 gradients, a quorum per step",
}
_LIGHTHOUSE_PORT: Final = 29510


class Peers:
    """The processes of one system, one per device of a testbed."""

    def __init__(
        self,
        system: PeerSystem,
        testbed: Testbed,
        profiles: Profiles,
        work: Work,
        out: Path,
        *,
        budget_s: float,
        steps: int,
        timeout_s: float,
        least_devices: int,
    ) -> None:
        self.system: PeerSystem = system
        self.testbed, self.out = testbed, out
        self._least_devices = least_devices
        for path in out.glob(f"{system}-*"):
            path.unlink()
        self._log: IO[bytes] = (out / f"{system}.log").open("ab")
        ups: list[float] = profiles.up_bytes_per_s.tolist()
        self.given: list[dict[str, Any]] = [
            {
                "rank": rank,
                "count": len(testbed.devices),
                "address": testbed.address(name),
                "work": {"model": work.model, "lora": work.lora},
                "up_bytes_per_s": ups[rank],
                "timeout_s": timeout_s,
                "budget_s": budget_s,
                "steps": steps,
                "out": str(out),
            }
            for rank, name in enumerate(testbed.devices)
        ]
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the lighthouse, if the system needs one, and every device."""
        if self.system == "torchft":
            command = [RIVALS_PYTHON.with_name("torchft_lighthouse"), "--bind", f"0.0.0.0:{_LIGHTHOUSE_PORT}"]
            command += [
                "--min_replicas",
                str(self._least_devices),
                "--join_timeout_ms",
                "3000",
                "--quorum_tick_ms",
                "100",
            ]
            self.lighthouse = self.testbed.start(SERVER, command, env=environment(), stdout=self._log, stderr=self._log)
        for rank in range(len(self.given)):
            self.start_device(rank)

    def start_device(self, rank: int) -> None:
        """Start the process of a device, again if need be."""
        module = f"benchmarks.rivals.{_MODULES[self.system]}"
        words: list[str | Path] = [RIVALS_PYTHON, "-m", module]
        variables = environment() | {"PYTHONUNBUFFERED": "1"}
        if self.system == "torchft":
            words = [
                *(RIVALS_PYTHON, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "1"),
                *("--max-restarts", "3", "--master-addr", self.given[rank]["address"], "--master-port", "29600"),
                *("-m", module),
            ]
            # Replicas announce their host's name, which must lead the others to this namespace.
            named = f'echo {self.given[rank]["address"]} > /proc/sys/kernel/hostname; exec "$@"'
            words = ["unshare", "--uts", "sh", "-c", named, "torchft", *words]
            variables["TORCHFT_LIGHTHOUSE"] = f"http://{self.testbed.address(SERVER)}:{_LIGHTHOUSE_PORT}"
        process = self.testbed.start(
            self.testbed.devices[rank],
            [*words, json.dumps(self.given[rank])],
            env=variables,
            stdout=self._log,
            stderr=self._log,
        )
        self.processes.append(process)

    def steps(self, rank: int) -> list[dict[str, Any]]:
        """What a device has logged so far."""
        path = self.out / f"{self.system}-{rank}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def wait(self, limit_s: float) -> None:
        until_s = time.monotonic() + limit_s
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until_s - time.monotonic()))

    def close(self) -> None:
        for name in (*self.testbed.devices, SERVER):
            self.testbed.kill(name)
        for process in self.processes:
            process.wait()
        self._log.close()


def turn(
    system: PeerSystem, testbed: Testbed, profiles: Profiles, work: Work, out: Path, budget_s: float, steps: int
) -> Result:
    """Train once with every device, from the start of the processes on."""
    result = Result(system=system, settings=_SETTINGS[system])
    peers = Peers(
        system,
        testbed,
        profiles,
        work,
        out,
        budget_s=3 * budget_s,
        steps=steps,
        timeout_s=max(60.0, 4 * budget_s),
        least_devices=len(testbed.devices),
    )
    try:
        peers.start()
        peers.wait(60 + 4 * budget_s)
        logs = [peers.steps(rank) for rank in range(len(testbed.devices))]
    finally:
        peers.close()
    fill_from_logs(result, logs)
    if len(result.step_s) < 2:
        result.error = f"finished {len(result.step_s)} steps in {60 + 4 * budget_s:.0f} s"
    return result


def fill_from_logs(result: Result, logs: Iterable[list[dict[str, Any]]]) -> None:
    """Take the steps that all devices have logged."""
    by_step = [{line["step"]: line for line in log} for log in logs]
    steps = sorted(set.intersection(*(set(each) for each in by_step)))
    columns = ("ended_s", "down_bytes", "up_bytes", "cpu_s")
    records: list[dict[str, Any]] = []
    for each in by_step:
        if not steps:
            return
        record: dict[str, Any] = {column: [each[step][column] for step in steps] for column in columns}
        record["losses"] = [each[step]["loss"] for step in steps]
        record["began_s"] = each[steps[0]]["began_s"]
        for column in ("idle_memory_bytes", "peak_memory_bytes"):
            record[column] = each[steps[-1]][column]
        records.append(record)
    fill(result, records)
