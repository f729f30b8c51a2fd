"""Turns of the systems that run as separate processes from their own environment: hivemind and torchft."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, Literal

from benchmarks.rivals.shape import Work
from benchmarks.rivals.turns import RIVALS_PYTHON, Forks, Limits, Result, environment, fill, wait_for_all
from benchmarks.testbed import SERVER, Testbed

from cleave.core.fleet.profiles import Profiles

PeerSystem = Literal["hivemind", "torchft"]
_MODULES: Final[dict[PeerSystem, str]] = {"hivemind": "hivemind_peer", "torchft": "torchft_replica"}
_SETTINGS: Final[dict[PeerSystem, str]] = {
    "hivemind": "fp16 gradients, matchmaking 2 s",
    "torchft": "fp32 gradients, a quorum per step",
}
_LIGHTHOUSE_PORT: Final = 29510
_GONE_S: Final = 30.0


class Peers:
    """The processes of one system, one per device of a testbed."""

    def __init__(
        self,
        system: PeerSystem,
        forks: Forks,
        testbed: Testbed,
        profiles: Profiles,
        work: Work,
        out: Path,
        limits: Limits,
        least_devices: int,
    ) -> None:
        self.system: PeerSystem = system
        self._forks, self.testbed, self.out = forks, testbed, out
        for path in out.glob(f"{system}-*"):
            path.unlink()
        ups: list[float] = profiles.up_bytes_per_s.tolist()
        self.given: list[dict[str, Any]] = [
            {
                "rank": rank,
                "count": len(testbed.devices),
                "address": testbed.address(name),
                "lighthouse": f"http://{testbed.address(SERVER)}:{_LIGHTHOUSE_PORT}",
                "work": {"model": work.model, "lora": work.lora},
                "up_bytes_per_s": ups[rank],
                "timeout_s": limits.reduce_s,
                "budget_s": limits.budget_s,
                "steps": limits.steps,
                "out": str(out),
            }
            for rank, name in enumerate(testbed.devices)
        ]
        self.pids: list[int] = []
        if system == "torchft":
            command = [RIVALS_PYTHON.with_name("torchft_lighthouse"), "--bind", f"0.0.0.0:{_LIGHTHOUSE_PORT}"]
            command += ["--min_replicas", str(least_devices), "--join_timeout_ms", "3000", "--quorum_tick_ms", "100"]
            with (out / "lighthouse.log").open("ab") as log:
                testbed.start(SERVER, command, env=environment(), stdout=log, stderr=log)

    def start(self) -> None:
        """Start every device."""
        self.pids = [self.start_device(rank) for rank in range(len(self.given))]

    def start_device(self, rank: int) -> int:
        """Start the process of a device, again if need be."""
        return self._forks.start(self.testbed, self.testbed.devices[rank], _MODULES[self.system], self.given[rank])

    def steps(self, rank: int) -> list[dict[str, Any]]:
        """What a device has logged so far."""
        path = self.out / f"{self.system}-{rank}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def close(self) -> None:
        for name in (*self.testbed.devices, SERVER):
            self.testbed.kill(name)
        wait_for_all(self.pids, _GONE_S)


def turn(
    system: PeerSystem, forks: Forks, testbed: Testbed, profiles: Profiles, work: Work, out: Path, limits: Limits
) -> Result:
    """Train once with every device, from the start of the processes on."""
    result = Result(system=system, settings=_SETTINGS[system])
    peers = Peers(system, forks, testbed, profiles, work, out, limits, len(testbed.devices))
    try:
        peers.start()
        wait_for_all(peers.pids, limits.turn_s)
        logs = [peers.steps(rank) for rank in range(len(testbed.devices))]
    finally:
        peers.close()
    fill_from_logs(result, logs)
    if len(result.step_s) < 2:
        result.error = f"finished {len(result.step_s)} steps in {limits.turn_s:.0f} s"
    return result


def fill_from_logs(result: Result, logs: Iterable[list[dict[str, Any]]]) -> None:
    """Take the steps that all devices have logged."""
    by_step: list[dict[int, dict[str, Any]]] = [{line["step"]: line for line in log} for log in logs]
    steps = [step for step in sorted(by_step[0]) if all(step in each for each in by_step)]
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
