"""`cleave plan` as text: times, distance from the lower bound, bottlenecks, and why devices are left out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np
from rich.console import Console
from rich.text import Text

from cleave.core.cost.rates import Server
from cleave.core.fleet.profiles import Floats, Profiles
from cleave.core.model.gemms import step_flops
from cleave.core.plan.gemm.product import GemmPlan
from cleave.core.plan.step import ROLES, StepChoice, StepPlan
from cleave.report.plain import plain_console
from cleave.report.plan_words import CloudGpu, devices_text, print_gpu, server_text, table
from cleave.report.quantities import parameters, seconds, si
from cleave.report.step_text import show_choice


def show(plan: GemmPlan | StepPlan | StepChoice, profiles: Profiles, server: Server, gpu: CloudGpu) -> None:
    match plan:
        case GemmPlan():
            _show_gemm(plan, profiles, server, gpu)
        case StepPlan():
            _show_step(plan, profiles, server, gpu)
        case StepChoice():
            show_choice(plan, profiles, server, gpu)
            if isinstance(plan.plan, StepPlan):
                _show_step(plan.plan, profiles, server, gpu)


def _show_step(plan: StepPlan, profiles: Profiles, server: Server, gpu: CloudGpu) -> None:
    console = plain_console()
    shape = plan.shape
    facts = (
        f" ({parameters(shape.params)}), {plan.tokens:,} tokens a step in sequences of {plan.sequence:,}, wire "
        f"{plan.wire}, {devices_text(len(profiles))}, {server_text(server)}"
    )
    console.print(Text.assemble((shape.name, "bold"), facts))
    rows = table("segment", "role", "m x n x k", "cut", "used", "runs", "step", "/bound", "limit")
    for segment in plan.segments:
        what, gemm_plan = segment.what, segment.plan
        rows.add_row(
            what.segment,
            what.role,
            f"{what.gemm.m}x{what.gemm.n}x{what.gemm.k}",
            gemm_plan.split + (f" in {gemm_plan.rounds}" if gemm_plan.rounds > 1 else ""),
            str(_used(gemm_plan)),
            f"{what.count} x {seconds(gemm_plan.makespan_s)}",
            seconds(segment.step_s),
            f"{gemm_plan.ratio:.3f}",
            gemm_plan.limit,
        )
    console.print(rows)
    roles = ", ".join(f"{role} {seconds(plan.role_s(role))}" for role in ROLES)
    ratio = f"{plan.step_s / plan.bound_s:.3f} times the lower bound"
    console.print(Text.assemble((f"step {seconds(plan.step_s)}", "bold"), f": {roles}; {ratio}"))
    if plan.attention_s:
        console.print(f"attention products on the server: {seconds(plan.attention_s)} of it")
    else:
        console.print(
            f"attention products stay on the server and are not included: {si(plan.attention_flops, 'FLOP')} "
            "a step (give --server-tflops to include them)"
        )
    down, up = np.zeros(len(profiles) + 1), np.zeros(len(profiles) + 1)
    for segment in plan.segments:
        np.add.at(down, segment.plan.tiling.device, segment.plan.down_bytes * segment.what.count)
        np.add.at(up, segment.plan.tiling.device, segment.plan.up_bytes * segment.what.count)
    _print_bytes(console, down[:-1], up[:-1], plan.step_s)
    _print_left_out(console, [segment.plan for segment in plan.segments], len(profiles))
    print_gpu(console, step_flops(shape, plan.tokens, plan.sequence), plan.step_s, gpu, shape.params)


def _show_gemm(plan: GemmPlan, profiles: Profiles, server: Server, gpu: CloudGpu) -> None:
    console = plain_console()
    gemm = plan.gemm
    facts = f", wire {plan.wire}, {devices_text(len(profiles))}, {server_text(server)}"
    console.print(Text.assemble((f"gemm {gemm.m} x {gemm.n} x {gemm.k}", "bold"), facts))
    parts = f"{len(plan.tiling):,} blocks on {devices_text(_used(plan))}" + (
        f" in {plan.rounds} rounds, as memory cannot hold the output at once" if plan.rounds > 1 else ""
    )
    facts = f" with a {plan.split} cut: {plan.ratio:.3f} times the lower bound; {parts}; limited by {plan.limit}"
    console.print(Text.assemble((seconds(plan.makespan_s), "bold"), facts))
    rows = table("device", "rows", "columns", "inner", "down", "up", "finish")
    tiling = plan.tiling
    slowest = np.argsort(-plan.finish_s, kind="stable")[:_MAX_BLOCKS]
    for block in slowest.tolist():
        rows.add_row(
            plan.names[int(tiling.device[block])],
            *(_range(r[block].tolist()) for r in (tiling.rows, tiling.cols, tiling.inner)),
            si(float(plan.down_bytes[block]), "B"),
            si(float(plan.up_bytes[block]), "B"),
            seconds(float(plan.finish_s[block])),
        )
    console.print(rows)
    if len(tiling) > _MAX_BLOCKS:
        console.print(f"... the {_MAX_BLOCKS} latest of {len(tiling):,} blocks (--json lists all)")
    down, up = np.zeros(len(profiles) + 1), np.zeros(len(profiles) + 1)
    np.add.at(down, tiling.device, plan.down_bytes)
    np.add.at(up, tiling.device, plan.up_bytes)
    _print_bytes(console, down[:-1], up[:-1], plan.makespan_s)
    _print_left_out(console, [plan], len(profiles))
    print_gpu(console, gemm.flops, plan.makespan_s, gpu, None)


_MAX_BLOCKS = 12
_MAX_REASONS = 3


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
    of_all = _intersection([set(plan.left_out) for plan in plans])
    of_some = {device for plan in plans for device in plan.left_out} - of_all
    if not of_all and not of_some:
        console.print("every device takes part")
        return
    console.print(
        f"left out of everything: {len(of_all):,} of {devices_text(devices)}; of some gemms: {len(of_some):,}"
        if len(plans) > 1
        else f"left out: {len(of_all):,} of {devices_text(devices)}"
    )
    kinds: Counter[str] = Counter()
    examples: dict[str, str] = {}
    for plan in plans:
        for device, reason in plan.left_out.items():
            kind = reason.split(":")[0]
            kinds[kind] += 1
            examples.setdefault(kind, f"{reason} ({device})")
    for kind, count in kinds.most_common(_MAX_REASONS):
        console.print(f"  {count:,} x {examples[kind]}")


def _intersection(sets: list[set[str]]) -> set[str]:
    return {name for name in sets[0] if all(name in names for names in sets)}


def _used(plan: GemmPlan) -> int:
    return len(np.unique(plan.tiling.device))


def _range(ends: list[int]) -> str:
    return f"{ends[0]}-{ends[1]}"
