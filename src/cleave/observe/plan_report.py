"""`cleave plan` as a person reads it: what takes how long, how near the bound, what limits, who is left out and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from cleave.core.cost import Server
from cleave.core.fleet import Floats, Profiles
from cleave.core.graph import step_flops
from cleave.core.planner.gemm import GemmPlan
from cleave.core.planner.step import ROLES, StepPlan
from cleave.observe.units import seconds, si

_MFU = 0.45
_GPU = "A100 SXM4"
_GPU_MEMORY_BYTES = 80e9
_TRAINING_BYTES_PER_PARAM = 16  # weights and gradients in 16 bits, master weights and two Adam moments in 32


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudGpu:
    name: str
    peak_flops_per_s: float
    utilisation: float

    @property
    def flops_per_s(self) -> float:
        return self.peak_flops_per_s * self.utilisation


def cloud_gpu(cloud: Sequence[Mapping[str, str]]) -> CloudGpu:
    row = next(row for row in cloud if row["gpu"] == _GPU)
    return CloudGpu(name=_GPU, peak_flops_per_s=float(row["fp16_dense_peak_tflops"]) * 1e12, utilisation=_MFU)


def say(line: str) -> None:
    Console(highlight=False).print(line)


def show(plan: GemmPlan | StepPlan, profiles: Profiles, server: Server, gpu: CloudGpu) -> None:
    if isinstance(plan, GemmPlan):
        _show_gemm(plan, profiles, server, gpu)
    else:
        _show_step(plan, profiles, server, gpu)


def _show_step(plan: StepPlan, profiles: Profiles, server: Server, gpu: CloudGpu) -> None:
    console = Console(highlight=False)
    shape = plan.shape
    console.print(
        f"[bold]{shape.name}[/] ({si(shape.params, 'parameters')}), {plan.tokens:,} tokens a step in sequences of "
        f"{plan.sequence:,}, wire {plan.wire}, {_devices(len(profiles))}, {_server(server)}"
    )
    table = _table("segment", "role", "m x n x k", "cut", "used", "runs", "step", "/bound", "limit")
    for segment in plan.segments:
        what, found = segment.what, segment.plan
        table.add_row(
            what.segment,
            what.role,
            f"{what.gemm.m}x{what.gemm.n}x{what.gemm.k}",
            found.split + (f" in {found.rounds}" if found.rounds > 1 else ""),
            str(_used(found)),
            f"{what.count} x {seconds(found.makespan_s)}",
            seconds(segment.step_s),
            f"{found.ratio:.3f}",
            found.limit,
        )
    console.print(table)
    roles = ", ".join(f"{role} {seconds(plan.role_s(role))}" for role in ROLES)
    console.print(f"[bold]step {seconds(plan.step_s)}[/]: {roles}; {plan.step_s / plan.bound_s:.3f} of the lower bound")
    if plan.attention_s:
        console.print(f"attention products on the server: {seconds(plan.attention_s)} of it")
    else:
        console.print(
            f"attention products stay on the server and are not in this time: {si(plan.attention_flops, 'FLOP')} "
            "a step (give --server-tflops to count them)"
        )
    down, up = np.zeros(len(profiles) + 1), np.zeros(len(profiles) + 1)
    for segment in plan.segments:
        np.add.at(down, segment.plan.tiling.device, segment.plan.down_bytes * segment.what.count)
        np.add.at(up, segment.plan.tiling.device, segment.plan.up_bytes * segment.what.count)
    _print_bytes(console, down[:-1], up[:-1], plan.step_s)
    _print_left_out(console, [segment.plan for segment in plan.segments], len(profiles))
    _print_gpu(console, step_flops(shape, plan.tokens, plan.sequence), plan.step_s, gpu, shape.params)


def _show_gemm(plan: GemmPlan, profiles: Profiles, server: Server, gpu: CloudGpu) -> None:
    console = Console(highlight=False)
    gemm = plan.gemm
    console.print(
        f"[bold]gemm {gemm.m} x {gemm.n} x {gemm.k}[/], wire {plan.wire}, {_devices(len(profiles))}, {_server(server)}"
    )
    parts = f"{len(plan.tiling):,} blocks on {_devices(_used(plan))}" + (
        f" in {plan.rounds} rounds, as memory cannot hold the output at once" if plan.rounds > 1 else ""
    )
    console.print(
        f"[bold]{seconds(plan.makespan_s)}[/] with a {plan.split} cut: {plan.ratio:.3f} of the lower bound; {parts}; "
        f"limited by {plan.limit}"
    )
    table = _table("device", "rows", "columns", "inner", "down", "up", "finish")
    tiling = plan.tiling
    slowest = np.argsort(-plan.finish_s, kind="stable")[:_SHOWN]
    for block in slowest.tolist():
        table.add_row(
            plan.names[int(tiling.device[block])],
            *(_range(r[block].tolist()) for r in (tiling.rows, tiling.cols, tiling.inner)),
            si(float(plan.down_bytes[block]), "B"),
            si(float(plan.up_bytes[block]), "B"),
            seconds(float(plan.finish_s[block])),
        )
    console.print(table)
    if len(tiling) > _SHOWN:
        console.print(f"... the {_SHOWN} latest of {len(tiling):,} blocks (--json lists all)")
    down, up = np.zeros(len(profiles) + 1), np.zeros(len(profiles) + 1)
    np.add.at(down, tiling.device, plan.down_bytes)
    np.add.at(up, tiling.device, plan.up_bytes)
    _print_bytes(console, down[:-1], up[:-1], plan.makespan_s)
    _print_left_out(console, [plan], len(profiles))
    _print_gpu(console, gemm.flops, plan.makespan_s, gpu, None)


_SHOWN = 12
_REASONS = 3


def _print_bytes(console: Console, down: Floats, up: Floats, taken_s: float) -> None:
    busy = down > 0
    if not busy.any():
        return
    console.print(
        f"bytes per device, median (most): down {si(float(np.median(down[busy])), 'B')} "
        f"({si(float(down.max()), 'B')}), up {si(float(np.median(up[busy])), 'B')} ({si(float(up.max()), 'B')}); "
        f"through the server: down "
        f"{si(float(down.sum()), 'B')}, up {si(float(up.sum()), 'B')}, on average "
        f"{si(8 * float(down.sum()) / taken_s, 'bit/s')} and {si(8 * float(up.sum()) / taken_s, 'bit/s')}"
    )


def _print_left_out(console: Console, plans: Iterable[GemmPlan], devices: int) -> None:
    plans = list(plans)
    always = _common([set(plan.left_out) for plan in plans])
    sometimes = {device for plan in plans for device in plan.left_out} - always
    if not always and not sometimes:
        console.print("every device takes part")
        return
    console.print(
        f"left out of everything: {len(always):,} of {_devices(devices)}; of some gemms: {len(sometimes):,}"
        if len(plans) > 1
        else f"left out: {len(always):,} of {_devices(devices)}"
    )
    kinds: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for plan in plans:
        for device, reason in plan.left_out.items():
            kind = reason.split(":")[0]
            kinds[kind] += 1
            examples.setdefault(kind, f"{reason} ({device})")
    for kind, count in kinds.most_common(_REASONS):
        console.print(f"  {count:,} x {examples[kind]}")


def _common(sets: list[set[str]]) -> set[str]:
    return {name for name in sets[0] if all(name in others for others in sets)}


def _print_gpu(console: Console, flops: int, taken_s: float, gpu: CloudGpu, params: int | None) -> None:
    gpu_s = flops / gpu.flops_per_s
    line = (
        f"one {gpu.name} beside it: {seconds(gpu_s)} ({taken_s / gpu_s:.3g} x as long here), taking "
        f"{si(flops, 'FLOP')} at {gpu.utilisation:.0%} of {si(gpu.peak_flops_per_s, 'FLOP/s')}"
    )
    if params is not None and params * _TRAINING_BYTES_PER_PARAM > _GPU_MEMORY_BYTES:
        cards = -(-params * _TRAINING_BYTES_PER_PARAM // int(_GPU_MEMORY_BYTES))
        line += (
            f"; its 80 GB do not hold the {si(params * _TRAINING_BYTES_PER_PARAM, 'B')} of training state "
            f"({_TRAINING_BYTES_PER_PARAM} B a parameter: {cards} cards would)"
        )
    console.print(line)


def _table(*headings: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for heading in headings:
        left = heading in {"segment", "role", "device", "limit", "cut"}
        table.add_column(heading, justify="left" if left else "right", no_wrap=True)
    return table


def _used(plan: GemmPlan) -> int:
    return len(np.unique(plan.tiling.device))


def _devices(count: int) -> str:
    return f"{count:,} device{'' if count == 1 else 's'}"


def _range(ends: list[int]) -> str:
    return f"{ends[0]}-{ends[1]}"


def _server(server: Server) -> str:
    links = [
        f"{way} {'unlimited' if np.isinf(rate) else si(8 * rate, 'bit/s')}"
        for way, rate in (("down", server.down_bytes_per_s), ("up", server.up_bytes_per_s))
    ]
    share = si(server.flops_per_s, "FLOP/s") if server.flops_per_s else "none"
    return f"server: {', '.join(links)}, own compute {share}"
