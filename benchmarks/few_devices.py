"""Steps of named models on few devices with home links, beside every rival (scenarios/few_devices.toml).

Here weights and gradients that travel every step weigh most, so leases pay most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypedDict, cast

import numpy as np

from cleave.core.cost.lease import ADAM_STATES
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.shapes import named
from cleave.core.plan.resident.problem import Leasing
from cleave.core.plan.step import choose_step
from step_planner import best_rival

Say = Callable[[str], None]


class Scenario(TypedDict):
    sequence: int
    flops_per_s: float
    memory_bytes: float
    latency_s: float
    mbit: list[tuple[float, float]]
    lora_rank: int
    cells: list[tuple[str, int, int]]
    lora_cells: list[tuple[str, int, int]]


def run(given: dict[str, object], say: Say) -> None:
    scenario = cast("Scenario", given)
    links = ", ".join(f"{down:g}/{up:g}" for down, up in scenario["mbit"])
    say(
        f"Devices of {scenario['flops_per_s'] / 1e12:g} TFLOP/s, {scenario['memory_bytes'] / 1e9:g} GB, "
        f"{scenario['latency_s'] * 1e3:g} ms; links of {links} Mbit/s down/up in turn; bf16; server unlimited. `gain` "
        "is the best rival's time over the columns': below 1, the rival wins. A dash: does not fit.\n"
    )
    say("## All weights trained: predicted seconds per step\n")
    _table(scenario, scenario["cells"], 0, say)
    say(f"## LoRA of rank {scenario['lora_rank']}: predicted seconds per step\n")
    _table(scenario, scenario["lora_cells"], scenario["lora_rank"], say)


def _table(scenario: Scenario, cells: list[tuple[str, int, int]], rank: int, say: Say) -> None:
    names: list[str] = []
    for model, tokens, count in cells:
        shape = replace(named(model), adapter_rank=rank)
        chosen = choose_step(
            _devices(scenario, count),
            shape,
            tokens,
            sequence=scenario["sequence"],
            resident_only=True,
            leasing=Leasing(states=ADAM_STATES),
        )
        rivals = {way.name: way for way in chosen.rivals if not way.is_ours and way.name != "layer groups"}
        if not names:
            names = sorted(rivals)
            say(f"| model | devices | tokens | columns | {' | '.join(names)} | gain | best rival |")
            say("|---" * (len(names) + 6) + "|")
        told = [f"{rivals[name].step_s:.1f}" if rivals[name].fits else "-" for name in names]
        best = best_rival(chosen)
        say(
            f"| {model} | {count} | {tokens:,} | {chosen.step_s:.1f} | {' | '.join(told)} | "
            f"{best.step_s / chosen.step_s:.2f} | {best.name}: {best.arrangement} |"
        )
    say("")


def _devices(scenario: Scenario, count: int) -> Profiles:
    links = np.resize(np.array(scenario["mbit"]), (count, 2)) * 1e6 / 8
    same = np.ones(count)
    return Profiles(
        names=tuple(f"d{number}" for number in range(count)),
        flops_per_s=scenario["flops_per_s"] * same,
        down_bytes_per_s=links[:, 0],
        up_bytes_per_s=links[:, 1],
        latency_s=scenario["latency_s"] * same,
        memory_bytes=scenario["memory_bytes"] * same,
    )
