# pyright: standard
"""CPU seconds of a training step over all processes, next to plain torch.

    PYTHONPATH=. python benchmarks/step_cpu.py [--modes lora full] [--model demo] [--devices 4] [--rounds 8]

A server and `cleave join` processes of one thread each train the work of the rivals (`rivals/work.py`) on loopback, so
links cost nothing. Each round is one step on the fleet and one of plain torch with one thread, in turns. CPU is that of
whole processes, all threads: wall time says nothing here, as all share the machine's cores. What the fleet's step takes
beyond plain torch's is Cleave's own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from benchmarks.rivals.shape import MODELS, Work
from benchmarks.rivals.work import adamw, batch, build

import cleave


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    parser.add_argument("--model", default="demo", choices=MODELS)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=5, help="rounds that are not counted (default: 5)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| mode | plain torch | server | of which training | event loop | devices | all | over plain torch | loss |")
    print("|---|---|---|---|---|---|---|---|---|")
    for mode in options.modes:
        work = Work(model=options.model, lora=mode == "lora")
        spent = measure(work, options.devices, options.rounds, options.warmup)
        cells = [f"{median:.3f} ({least:.3f})" for median, least in map(_summary, zip(*spent.rows, strict=True))]
        plain, whole = (statistics.median(column) for column in (spent.plain, spent.all))
        print(f"| {mode} | {' | '.join(cells)} | {whole / plain:.2f} | {spent.loss:.6f} |")
    load = f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    print(f"\nCPU s per step, median (least) of {options.rounds}; {load}.")


def _summary(column: tuple[float, ...]) -> tuple[float, float]:
    return statistics.median(column), min(column)


@dataclass(frozen=True, slots=True)
class Spent:
    """CPU seconds of each step; `rows` has plain torch, server, its training thread, its loop, devices, and all."""

    rows: list[tuple[float, ...]]
    loss: float

    @property
    def plain(self) -> list[float]:
        return [row[0] for row in self.rows]

    @property
    def all(self) -> list[float]:
        return [row[-1] for row in self.rows]


def measure(work: Work, devices: int, rounds: int, warmup: int) -> Spent:
    with (
        cleave.Fleet("127.0.0.1:0", wire="bf16", offload="always", trust="own") as fleet,
        _joined(fleet, devices) as processes,
    ):
        trained = Training(cleave.distribute(build(work), fleet, grain="resident"))
        alone = Training(build(work))
        rows: list[tuple[float, ...]] = []
        for number in range(warmup + rounds):
            tokens, plain_s = batch(number), time.process_time()
            alone.step(tokens)
            plain_s = time.process_time() - plain_s
            loop_s, devices_s, own_s, server_s = _loop_s(), _used_s(processes), time.thread_time(), time.process_time()
            trained.step(tokens)
            server_s, own_s = time.process_time() - server_s, time.thread_time() - own_s
            loop_s, devices_s = _loop_s() - loop_s, _used_s(processes) - devices_s
            if number >= warmup:
                rows.append((plain_s, server_s, own_s, loop_s, devices_s, server_s + devices_s))
        return Spent(rows, trained.loss)


class Training:
    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self._optimizer = model, adamw(model)
        self.loss = 0.0

    def step(self, tokens: torch.Tensor) -> None:
        loss = self._model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.loss = loss.item()


@contextmanager
def _joined(fleet: cleave.Fleet, count: int) -> Generator[list[psutil.Process]]:
    """Start devices as their owners would: the server is not told that they share this machine's cores."""
    command = [sys.executable, "-m", "cleave", "join", fleet.url, "--quiet", "--threads", "1", "--name"]
    devices = [subprocess.Popen([*command, f"device-{number}"]) for number in range(count)]
    try:
        fleet.wait(count)
        yield [psutil.Process(device.pid) for device in devices]
    finally:
        for device in devices:
            device.terminate()
            device.wait()


def _used_s(processes: list[psutil.Process]) -> float:
    times = [process.cpu_times() for process in processes]
    return sum(each.user + each.system for each in times)


def _loop_s() -> float:
    """CPU of the event loop's thread so far."""
    (loop,) = (thread for thread in threading.enumerate() if thread.name == "cleave-server")
    times = Path(f"/proc/self/task/{loop.native_id}/schedstat").read_text(encoding="ascii")
    return int(times.split()[0]) / 1e9


if __name__ == "__main__":
    main()
