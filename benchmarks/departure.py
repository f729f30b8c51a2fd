"""Cost of a departure with resident layers: a device of a column is killed (SIGKILL) in the middle of a step.

Devices are processes on one machine, all in one column, as plans on loopback are. For comparison, the design's discrete
simulation loses 30% of a step with a column of 2, 12% with 3, 2% with 9. Run: python benchmarks/departure.py
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import threading
import time

import torch

from cleave import Fleet, distribute
from cleave.events import AnyEvent, Recovered
from home import Work


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--devices", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--kills", type=int, default=4)
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| devices in the column | s per step | killed at | s of that step | lost | loss off by |")
    print("|---|---|---|---|---|---|", flush=True)
    for count in options.devices:
        for kill in range(options.kills):
            _row(count, (kill + 0.5) / options.kills)


def _row(count: int, at: float) -> None:
    """Run some undisturbed steps on one fleet, then one in which a device is killed after a share `at` of a step."""
    work = Work(hidden=256, layers=4, tokens=2048, sequence=256, full=True, steps=1)
    model, other = work.model(), work.model()
    recovered: list[float] = []

    def hear(event: AnyEvent) -> None:
        if isinstance(event, Recovered):
            recovered.append(event.seconds)

    with Fleet.local(count, offload="always", listener=hear) as fleet:
        distribute(model, fleet, grain="resident")
        whole_s = statistics.median([_step(model, work) for _ in range(5)][1:])
        victim = fleet._processes[0].pid  # pyright: ignore[reportPrivateUsage]
        timer = threading.Timer(at * whole_s, os.kill, (victim, signal.SIGKILL))
        timer.start()
        taken_s = _step(model, work)
        timer.join()
        off = abs(_loss(model, work) - _loss(other, work))
    lost = 100 * (taken_s / whole_s - 1)
    print(f"| {count} | {whole_s:.2f} | {100 * at:.0f} % | {taken_s:.2f} | {lost:.0f} % | {off:.1e} |", flush=True)


def _step(model: torch.nn.Module, work: Work) -> float:
    started_s = time.perf_counter()
    batch = work.batch(0)
    model(input_ids=batch, labels=batch).loss.backward()
    model.zero_grad()
    return time.perf_counter() - started_s


@torch.no_grad()
def _loss(model: torch.nn.Module, work: Work) -> float:
    batch = work.batch(0)
    return float(model(input_ids=batch, labels=batch, use_cache=False).loss)


if __name__ == "__main__":
    main()
