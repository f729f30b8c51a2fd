"""Wording shared by all plan reports: fleet, server, tables, and the comparison with a cloud GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table

from cleave.core.carbon.facts import first_number
from cleave.core.cost.rates import Server
from cleave.core.plan.resident.stages import ColumnLimit
from cleave.report.plain import plain_console
from cleave.report.quantities import seconds, si

_GPU = "A100 SXM4"
_GPU_MEMORY_BYTES = 80e9
_TRAINING_BYTES_PER_PARAM = 16  # 16-bit weights and gradients, 32-bit master weights and two Adam moments


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
    return CloudGpu(
        name=_GPU,
        peak_flops_per_s=float(row["fp16_dense_peak_tflops"]) * 1e12,
        utilisation=first_number(row["typical_mfu"]),
    )


def say(line: str) -> None:
    plain_console().print(line)


def print_gpu(console: Console, flops: int, taken_s: float, gpu: CloudGpu, params: int | None) -> None:
    gpu_s = flops / gpu.flops_per_s
    line = (
        f"compared with one {gpu.name}: {seconds(gpu_s)} (this fleet takes {taken_s / gpu_s:.3g} times as long), for "
        f"{si(flops, 'FLOP')} at {gpu.utilisation:.0%} of {si(gpu.peak_flops_per_s, 'FLOP/s')}"
    )
    if params is not None and params * _TRAINING_BYTES_PER_PARAM > _GPU_MEMORY_BYTES:
        cards = -(-params * _TRAINING_BYTES_PER_PARAM // int(_GPU_MEMORY_BYTES))
        line += (
            f"; its 80 GB cannot hold the {si(params * _TRAINING_BYTES_PER_PARAM, 'B')} of training state "
            f"({_TRAINING_BYTES_PER_PARAM} B per parameter: {cards} cards could)"
        )
    console.print(line)


def table(*headings: str) -> Table:
    columns = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for heading in headings:
        left = heading in {"segment", "role", "device", "limit", "cut", "arrangement"}
        columns.add_column(heading, justify="left" if left else "right", no_wrap=True)
    return columns


def devices_text(count: int) -> str:
    return f"{count:,} device{'' if count == 1 else 's'}"


def limit_text(limit: ColumnLimit) -> str:
    return {"up": "uplinks", "down": "downlinks"}.get(limit, limit)


def server_text(server: Server) -> str:
    links = [
        f"{way} {'unlimited' if np.isinf(rate) else si(8 * rate, 'bit/s')}"
        for way, rate in (("down", server.down_bytes_per_s), ("up", server.up_bytes_per_s))
    ]
    share = f"computes at {si(server.flops_per_s, 'FLOP/s')}" if server.flops_per_s else "computes nothing"
    return f"server: {', '.join(links)}, {share}"
