# pyright: standard
"""A rank of the torch rivals: takes part in one variant and writes what came of it as JSON.

The moments at which each step ended, by the clock that all processes of a machine share, losses, bytes over the link,
CPU seconds, and peak memory. `forks.py` starts it in the namespace of its device.
"""

from __future__ import annotations

import json
import os
import time
import traceback
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.rivals.ranks import arrange
from benchmarks.rivals.shape import Work
from benchmarks.rivals.step_log import StepLog, link_bytes, memory_bytes
from benchmarks.rivals.variants import Variant
from benchmarks.rivals.work import batch

_LEAST_STEPS = 2


@dataclass(slots=True)
class Record:
    """What one rank saw of one variant."""

    rank: int
    began_s: float = 0.0
    ended_s: list[float] = field(default_factory=lambda: list[float]())
    losses: list[float | None] = field(default_factory=lambda: list[float | None]())
    down_bytes: list[int] = field(default_factory=lambda: list[int]())
    up_bytes: list[int] = field(default_factory=lambda: list[int]())
    cpu_s: list[float] = field(default_factory=lambda: list[float]())
    idle_memory_bytes: int = 0
    """Resident memory before the model was built: the interpreter and its libraries."""
    peak_memory_bytes: int = 0
    error: str = ""
    failed_s: float = 0.0


def run(work: Work, variant: Variant, steps: int, budget_s: float, log: StepLog | None = None) -> Record:
    record = Record(rank=dist.get_rank())
    record.idle_memory_bytes = memory_bytes("VmRSS")
    part: Any = arrange(work, variant)
    dist.barrier()
    record.began_s = time.monotonic()
    number = 0
    while number < steps:
        before, cpu_s = link_bytes(), time.process_time()
        record.losses.append(part.step(batch(number)))
        record.ended_s.append(time.monotonic())
        record.cpu_s.append(time.process_time() - cpu_s)
        after = link_bytes()
        record.down_bytes.append(after[0] - before[0])
        record.up_bytes.append(after[1] - before[1])
        if log is not None:
            log.end(number, None)
        number += 1
        if number == _LEAST_STEPS:
            steps = _affordable(record, steps, budget_s)
    record.peak_memory_bytes = memory_bytes("VmHWM")
    dist.barrier()
    return record


def _affordable(record: Record, steps: int, budget_s: float) -> int:
    """Let rank 0 say how many steps fit into the budget, judging by its latest one."""
    each_s = max(1e-3, record.ended_s[-1] - record.ended_s[-2])
    allowed = torch.tensor([max(_LEAST_STEPS, min(steps, int(budget_s / each_s)))])
    dist.broadcast(allowed, 0)
    return int(allowed.item())


def main(given: dict[str, Any]) -> None:
    """Take part in one variant, and write what came of it."""
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    rank = given["rank"]
    settings = given["variant"]
    variant = Variant(**{**settings, "pipelines": tuple(map(tuple, settings["pipelines"]))})
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{given['master']}:{given['port']}",
            rank=rank,
            world_size=given["count"],
            timeout=timedelta(seconds=given["timeout_s"]),
        )
        log = StepLog(Path(given["out"], f"rank-{rank}.jsonl")) if given.get("log") else None
        record = run(Work(**given["work"]), variant, given["steps"], given["budget_s"], log)
    except Exception as fault:  # whatever a rival raises is its result
        traceback.print_exc()
        record = Record(rank=rank, error=f"{type(fault).__name__}: {fault}"[:300], failed_s=time.monotonic())
    Path(given["out"], f"rank-{rank}.json").write_text(json.dumps(asdict(record)), encoding="utf-8")
