"""Bytes of a step on the wire, for both grains, compared with the plan's formulas.

`python benchmarks/resident_bytes.py`: 4 layers of hidden 512, 2,048 tokens in 8 sequences, all weights trained, on four
local devices on one shaped Wi-Fi network. The first step is excluded; the others should not differ.
"""

from __future__ import annotations

import argparse

from home import GRAINS, Figures, Work, later, train_over  # isort: skip

import torch

from cleave.api.fleet import Fleet
from cleave.core.cost.wire import WIRE_FORMATS
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.errors import CleaveError
from cleave.transport.shaped import Link

_DEVICES = 4
_WIFI = Link(medium_bytes_per_s=37.5e6, latency_s=0.002)  # on loopback bytes cost nothing, so plans waste them


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes of a step, measured and predicted.")
    parser.add_argument("--steps", type=int, default=3, help="steps; the first is a warm-up")
    parser.add_argument("--wire", choices=WIRE_FORMATS, default="bf16")
    options = parser.parse_args()
    torch.set_num_threads(1)
    work = Work(hidden=512, layers=4, tokens=2048, sequence=256, full=True, steps=options.steps)
    print(f"# Bytes of a step: {_DEVICES} devices on one 300 Mbit/s Wi-Fi, wire {options.wire}\n")
    print("4 layers of hidden 512, 2,048 tokens, all weights trained.\n")
    print("| grain | MB down | predicted | ratio | MB up | predicted | ratio | s per step |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    for grain in GRAINS:
        try:
            with Fleet.local(_DEVICES, wire=options.wire, offload="always", links=_WIFI) as fleet:
                figures = train_over(fleet, work, grain)
                plan = fleet.cluster.planning.latest
        except CleaveError as fault:
            print(f"| {grain} | {fault} | | | | | | |", flush=True)
            continue
        print(_row(grain, figures, plan if grain == "resident" else None), flush=True)


def _row(grain: str, figures: Figures, plan: ResidentPlan | None) -> str:
    cells: list[str] = []
    for measured, formula in (
        (later(figures.down_bytes), plan and plan.down_bytes),
        (later(figures.up_bytes), plan and plan.up_bytes),
    ):
        cells += [f"{measured / 1e6:.1f}"]
        cells += ["", ""] if formula is None else [f"{formula / 1e6:.1f}", f"{measured / formula:.3f}"]
    return f"| {grain} | {' | '.join(cells)} | {later(figures.taken_s):.2f} |"


if __name__ == "__main__":
    main()
