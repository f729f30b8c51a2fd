"""Fixed CPU cost of a task of a resident pass, on the device and on the server, by rows per task.

    python benchmarks/task_cost.py [--rounds 5] [--rows 16 32 64 128 256] [--sequences 8]

One device process takes the demo model (hidden 256, 4 layers) through forward and backward, with the same tokens cut
into more or fewer tasks. CPU is that of each process, all threads, per task; what the same tokens cost in tasks of
`--rows` most rows is arithmetic and bytes, so the slope of CPU over the number of tasks is what a task costs by itself.
Thin tasks also multiply less efficiently; that is part of the slope.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, replace

import numpy as np
import psutil

from cleave.api.fleet import Fleet
from cleave.core.model.batch import Batch
from cleave.core.model.decoder import Attention, Decoder, Head, Mlp, Norm, Parameter, Part, View, Weight
from cleave.core.plan.choose import PassWork
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.server.cluster import Cluster
from cleave.server.operands import Tensor

_HIDDEN, _INNER, _LAYERS, _HEADS, _WORDS, _SEQUENCE = 256, 768, 4, 4, 256, 256


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, nargs="+", default=[16, 32, 64, 128, 256])
    parser.add_argument("--sequences", type=int, default=8)
    options = parser.parse_args()
    found: dict[int, list[Cost]] = {rows: [] for rows in options.rows}
    with Fleet("127.0.0.1:0", wire="bf16", offload="always", trust="own") as fleet:
        (pid,) = fleet.start_devices(1)
        fleet.wait(1)
        passes = Passes(fleet.cluster, psutil.Process(pid), options.sequences)
        for round_ in range(options.rounds + 1):
            for rows in options.rows:
                cost = passes.cost(rows)
                if round_:  # the first warms up
                    found[rows].append(cost)
    print_table(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    tasks: int
    device_s: float
    server_s: float
    pass_s: float


class Passes:
    """Trained passes of one batch over one device, whose weights are already there."""

    def __init__(self, cluster: Cluster, device: psutil.Process, sequences: int) -> None:
        self._cluster, self._device, self._sequences = cluster, device, sequences
        self._decoder = demo_decoder()
        rng = np.random.default_rng(0)
        self._operands = tuple(self._staged(one, rng) for one in self._decoder.parameters)
        tokens = sequences * _SEQUENCE
        self._x = rng.standard_normal((tokens, _HIDDEN), dtype=np.float32)
        self._targets = rng.integers(0, _WORDS, (tokens, 1)).astype(np.float32)
        choice = cluster.choose_pass(PassWork(self._decoder, sequences, _SEQUENCE, is_trained=True), must=True)
        assert choice.plan is not None
        self._plan: ResidentPlan = choice.plan

    def _staged(self, parameter: Parameter, rng: np.random.Generator) -> Tensor:
        tensor = self._cluster.tensor(parameter.rows, parameter.cols)
        scale = parameter.cols**-0.5 if parameter.rows > 1 else 1.0
        tensor.bind(scale * rng.standard_normal((parameter.rows, parameter.cols), dtype=np.float32))
        return tensor

    def cost(self, rows: int) -> Cost:
        (member,) = self._cluster.here()
        tasks, device_s, server_s, started = member.tasks, self._device_s(), time.process_time(), time.perf_counter()
        batch = Batch(
            x=self._x,
            sequences=self._sequences,
            sequence=_SEQUENCE,
            operands=self._operands,
            targets=self._targets,
            scales=np.full((len(self._x), 1), 1.0 / len(self._x), dtype=np.float32),
        )
        running = self._cluster.run(self._decoder, batch, replace(self._plan, chunk=rows))
        self._cluster.wait(running.outputs)
        self._cluster.wait(running.backward(None))
        return Cost(
            tasks=member.tasks - tasks,
            device_s=self._device_s() - device_s,
            server_s=time.process_time() - server_s,
            pass_s=time.perf_counter() - started,
        )

    def _device_s(self) -> float:
        times = self._device.cpu_times()
        return times.user + times.system


def print_table(found: dict[int, list[Cost]]) -> None:
    print("| rows | tasks | pass, s | device CPU, ms a task | server CPU, ms a task |")
    print("|---|---|---|---|---|")
    for rows, costs in found.items():
        tasks = costs[0].tasks
        device, server, whole = (
            statistics.median(getattr(cost, name) for cost in costs) for name in ("device_s", "server_s", "pass_s")
        )
        print(f"| {rows} | {tasks} | {whole:.2f} | {device / tasks * 1e3:.2f} | {server / tasks * 1e3:.2f} |")
    for name in ("device_s", "server_s"):
        tasks = np.array([cost.tasks for costs in found.values() for cost in costs], dtype=float)
        spent = np.array([getattr(cost, name) for costs in found.values() for cost in costs])
        slope, _ = np.polyfit(tasks, spent, 1)
        print(f"fixed {name.removesuffix('_s')} CPU: {slope * 1e3:.2f} ms a task")


def demo_decoder() -> Decoder:
    """Return the decoder of the demo model, without positions."""
    parameters: list[Parameter] = []

    def weight(rows: int, cols: int) -> int:
        parameters.append(Parameter(rows, cols, is_trained=True))
        return len(parameters) - 1

    def linear(out: int, into: int) -> Weight:
        return Weight(weight=weight(out, into))

    def norm() -> Norm:
        return Norm(kind="rms", eps=1e-5, weight=weight(1, _HIDDEN))

    parts: list[Part] = []
    for _ in range(_LAYERS):
        q, k, v, o = (linear(_HIDDEN, _HIDDEN) for _ in range(4))
        head_dim = _HIDDEN // _HEADS
        parts.append(Attention(norm=norm(), q=q, k=k, v=v, o=o, head_dim=head_dim, scale=head_dim**-0.5))
        gate, up, down = linear(_INNER, _HIDDEN), linear(_INNER, _HIDDEN), linear(_HIDDEN, _INNER)
        parts.append(Mlp(norm=norm(), gate=gate, up=up, down=down, activation="silu"))
    head = Head(norm=norm(), weight=linear(_WORDS, _HIDDEN))
    views = tuple(View(number, (0, one.rows), (0, one.cols)) for number, one in enumerate(parameters))
    return Decoder(hidden=_HIDDEN, parts=tuple(parts), head=head, parameters=tuple(parameters), views=views)


if __name__ == "__main__":
    main()
