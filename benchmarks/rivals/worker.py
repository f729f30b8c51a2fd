# pyright: standard
"""The ranks of the torch rivals, each in the namespace of its device: one arrangement after the other.

`python -m benchmarks.rivals.worker JSON`, with the namespaces of the ranks, the address of rank 0, the work, the
variants and a budget; then the number of a variant to run, line by line, on standard input. Fresh ranks are forked for
every variant from one process, so that torch is imported once. Each writes a JSON file: the moments at which each step
ended, by the clock that all processes of a machine share, losses, bytes over the link, CPU seconds, and peak memory.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.rivals.ranks import arrange
from benchmarks.rivals.step_log import link_bytes, memory_bytes
from benchmarks.rivals.variants import Variant
from benchmarks.rivals.work import Work, batch, build

_LEAST_STEPS = 2
_NETWORK_NAMESPACE = 0x40000000
_FIRST_PORT = 29500


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


def run(work: Work, variant: Variant, steps: int, budget_s: float) -> Record:
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


def enter_namespace(name: str) -> None:
    """Move this process into a named network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open("rb") as opened:
        if libc.setns(opened.fileno(), _NETWORK_NAMESPACE) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter the namespace {name}")


def serve_rank(given: dict[str, Any], number: int, rank: int) -> None:
    """Take part in one variant, and write what came of it."""
    enter_namespace(given["namespaces"][rank])
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    settings = given["variants"][number]
    variant = Variant(**{**settings, "pipelines": tuple(map(tuple, settings["pipelines"]))})
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{given['master']}:{_FIRST_PORT + number}",
            rank=rank,
            world_size=len(given["namespaces"]),
            timeout=timedelta(seconds=given["timeout_s"]),
        )
        record = run(Work(**given["work"]), variant, given["steps"], given["budget_s"])
    except Exception as fault:  # whatever a rival raises is its result
        traceback.print_exc()
        record = Record(rank=rank, error=f"{type(fault).__name__}: {fault}"[:300])
    Path(given["out"], f"{number}-{rank}.json").write_text(json.dumps(asdict(record)), encoding="utf-8")


def run_variant(given: dict[str, Any], number: int) -> None:
    """Fork the ranks of a variant and wait for them; end those that take longer than their limit."""
    children: list[int] = []
    for rank in range(len(given["namespaces"])):
        child = os.fork()
        if child == 0:
            try:
                serve_rank(given, number, rank)
            finally:
                os._exit(0)
        children.append(child)
    until_s = time.monotonic() + given["limit_s"]
    for child in children:
        with os.fdopen(os.pidfd_open(child)) as ended:
            if not select.select([ended], [], [], max(0.0, until_s - time.monotonic()))[0]:
                os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def main() -> None:
    given = json.loads(sys.argv[1])
    build(Work(**given["work"]))  # imports what building imports, once for all ranks
    for line in sys.stdin:
        run_variant(given, int(line))
        print(f"done {int(line)}", flush=True)


if __name__ == "__main__":
    main()
