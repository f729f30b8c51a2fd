"""How close gemm plans come to the lower bound, and how long planning takes (scenarios/gemm_planner.toml)."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import TypedDict, cast

import numpy as np

from cleave.api.planning import sample_fleet
from cleave.core.cost.bound import bound_2d, bound_3d, ideal_overlap_bound
from cleave.core.cost.gemm import finish_s, unit_costs
from cleave.core.cost.rates import Server
from cleave.core.fleet.profiles import Floats, Profiles
from cleave.core.model.gemms import Gemm, step_gemms
from cleave.core.model.shapes import named
from cleave.core.plan.gemm.product import plan_gemm
from cleave.core.plan.gemm.repair import repair

_GBIT_BYTES = 1e9 / 8
_WORTH_3D = 1.1  # shapes where splitting the inner dimension could gain less than this are left to 2D


class Shapes(TypedDict):
    models: list[tuple[str, int]]
    long_inner: list[tuple[int, int, int]]


class Fleets(TypedDict):
    sizes_2d: list[int]
    sizes_3d: list[int]
    mixes: dict[str, dict[str, float]]


class Caps(TypedDict):
    gbit: list[float]
    sizes: list[int]


class Timing(TypedDict):
    devices: int
    model: str
    tokens: int
    loss: float
    runs: int


class Scenario(TypedDict):
    title: str
    seeds: list[int]
    countries: list[str]
    shapes: Shapes
    fleets: Fleets
    caps: Caps
    timing: Timing


Say = Callable[[str], None]


def run(scenario: Scenario, say: Say) -> None:
    for section in (quality_2d, quality_3d, quality_capped, rivals, timing):
        section(scenario, say)
        say("")


def quality_2d(scenario: Scenario, say: Say) -> None:
    say("## 2D: makespan / bound")
    say("fleets by seed, country and mix, and the synthetic mix; every distinct shape of the models\n")
    say("| devices | plans | mean | p95 | worst |\n|---|---|---|---|---|")
    shapes = _model_shapes(scenario)
    for size in scenario["fleets"]["sizes_2d"]:
        seeds = scenario["seeds"][: 1 if size > 2000 else None]
        ratios = [
            plan_gemm(fleet, gemm, split="2d").ratio for fleet in _fleets(scenario, size, seeds) for gemm in shapes
        ]
        say(f"| {size} | {len(ratios)} | {_spread(ratios)} |")


def quality_3d(scenario: Scenario, say: Say) -> None:
    say("## 3D: makespan / bound")
    say("shapes with a long inner dimension, where 2D's bound is at least 1.1 x that of 3D. The bound is that of the")
    say("streamed cost; `ideal` is the Loomis-Whitney bound, which assumes complete overlap. The last column is how")
    say("far apart the two bounds are: no plan can close that gap.\n")
    say("| devices | plans | mean | p95 | worst | / ideal: mean | worst | bound / ideal |")
    say("|---|---|---|---|---|---|---|---|")
    for size in scenario["fleets"]["sizes_3d"]:
        seeds = scenario["seeds"][: 1 if size > 2000 else None]
        ratios: list[float] = []
        ideals: list[float] = []
        floors: list[float] = []
        for fleet in _fleets(scenario, size, seeds):
            unit = unit_costs(fleet, "bf16", Server())
            for m, n, k in scenario["shapes"]["long_inner"]:
                gemm = Gemm(m=m, n=n, k=k)
                if bound_2d(unit, gemm, Server()) < _WORTH_3D * bound_3d(unit, gemm, Server()):
                    continue
                found, ideal_s = plan_gemm(fleet, gemm, split="3d"), ideal_overlap_bound(unit, gemm)
                ratios.append(found.ratio)
                ideals.append(found.makespan_s / ideal_s)
                floors.append(found.bound_s / ideal_s)
        say(
            f"| {size} | {len(ratios)} | {_spread(ratios)} | {np.mean(ideals):.3f} | {max(ideals):.3f} "
            f"| {np.mean(floors):.3f} |"
        )


def quality_capped(scenario: Scenario, say: Say) -> None:
    say("## Under a server cap: makespan / capped bound")
    say("2D plans, both links capped, only where the cap binds (bound at least 1.05 x the uncapped one)\n")
    say("| devices | Gbit/s | plans | mean | p95 | worst | devices used, median |\n|---|---|---|---|---|---|---|")
    for size in scenario["caps"]["sizes"]:
        for gbit in scenario["caps"]["gbit"]:
            server = Server(down_bytes_per_s=gbit * _GBIT_BYTES, up_bytes_per_s=gbit * _GBIT_BYTES)
            ratios: list[float] = []
            used: list[int] = []
            for fleet in _fleets(scenario, size, scenario["seeds"][:1]):
                unit = unit_costs(fleet, "bf16", server)
                for gemm in _model_shapes(scenario)[::3]:
                    if bound_2d(unit, gemm, server) < 1.05 * bound_2d(unit, gemm, Server()):
                        continue
                    found = plan_gemm(fleet, gemm, split="2d", server=server)
                    ratios.append(found.ratio)
                    used.append(len(np.unique(found.tiling.device)))
            if ratios:
                say(f"| {size} | {gbit:g} | {len(ratios)} | {_spread(ratios)} | {np.median(used):.0f} |")


def rivals(scenario: Scenario, say: Say) -> None:
    say("## Simpler splits on the same fleets: makespan / 2D bound, mean (worst)")
    say("\n| devices | Cleave | rows in proportion to speed | equal grid | equal rows |\n|---|---|---|---|---|")
    for size in scenario["fleets"]["sizes_2d"]:
        table: dict[str, list[float]] = {"cleave": [], "speed": [], "grid": [], "rows": []}
        for fleet in _fleets(scenario, size, scenario["seeds"][:1]):
            unit = unit_costs(fleet, "bf16", Server())
            for gemm in _model_shapes(scenario)[::4]:
                bound = bound_2d(unit, gemm, Server())
                long, short = float(max(gemm.m, gemm.n)), float(min(gemm.m, gemm.n))
                across = max(int(np.sqrt(size * short / long)), 1)
                down = -(-size // across)
                splits: dict[str, tuple[Floats, Floats]] = {
                    "speed": (long * fleet.flops_per_s / fleet.flops_per_s.sum(), np.full(size, short)),
                    "grid": (np.full(size, long / down), np.full(size, short / across)),
                    "rows": (np.full(size, long / size), np.full(size, short)),
                }
                table["cleave"].append(plan_gemm(fleet, gemm, split="2d").ratio)
                for name, (rows, cols) in splits.items():
                    table[name].append(float(finish_s(unit, rows, cols, float(gemm.k)).max()) / bound)
        cells = " | ".join(f"{np.mean(r):.3g} ({max(r):.3g})" for r in table.values())
        say(f"| {size} | {cells} |")


def timing(scenario: Scenario, say: Say) -> None:
    setting = scenario["timing"]
    say("## Planning time")
    devices, runs = setting["devices"], setting["runs"]
    fleet = _synthetic(devices, scenario["seeds"][0])
    shapes = list(dict.fromkeys(step.gemm for step in step_gemms(named(setting["model"]), setting["tokens"])))
    deep = max(shapes, key=lambda gemm: gemm.k)
    square = np.random.default_rng(0).standard_normal((1024, 1024)).astype(np.float32)
    flat_plan, deep_plan = plan_gemm(fleet, shapes[0], split="2d"), plan_gemm(fleet, deep, split="3d")
    gone = np.random.default_rng(1).choice(devices, max(int(devices * setting["loss"]), 1), replace=False)
    lost: list[str] = [fleet.names[i] for i in gone]
    jobs: dict[str, Callable[[], object]] = {
        "yardstick: numpy 1024^3 product, fp32": lambda: square @ square,
        f"2D, all {len(shapes)} distinct shapes": lambda: [plan_gemm(fleet, gemm, split="2d") for gemm in shapes],
        "3D, slowest shape": lambda: max(
            _timed(lambda gemm=gemm: plan_gemm(fleet, gemm, split="3d")) for gemm in shapes
        ),
        f"repair of a 2D plan, {len(lost)} devices lost": lambda: repair(flat_plan, fleet, lost),
        f"repair of a 3D plan, {len(lost)} devices lost": lambda: repair(deep_plan, fleet, lost),
        "cleave --help": lambda: subprocess.run(
            [sys.executable, "-m", "cleave", "--help"], capture_output=True, check=True
        ),
    }
    say(f"{devices} devices (synthetic mix), {setting['model']}, {setting['tokens']} tokens, {runs} runs each\n")
    say("| what | best | median |\n|---|---|---|")
    for what, job in jobs.items():
        slowest = what.startswith("3D")
        seconds = [cast("float", job()) if slowest else _timed(job) for _ in range(runs if not slowest else 2)]
        say(f"| {what} | {1e3 * min(seconds):.1f} ms | {1e3 * float(np.median(seconds)):.1f} ms |")
    for kind, found in (("2D", flat_plan), ("3D", deep_plan)):
        mended = repair(found, fleet, lost)
        say(
            f"\n{kind} repair: lost blocks are recovered in {mended.recovery_s / found.makespan_s:.1%} of the gemm's "
            f"time ({mended.by_mates} of {mended.lost_blocks} by column mates)."
        )


def _timed(job: Callable[[], object]) -> float:
    begun = time.perf_counter()
    job()
    return time.perf_counter() - begun


def _model_shapes(scenario: Scenario) -> list[Gemm]:
    steps = [step_gemms(named(model), tokens) for model, tokens in scenario["shapes"]["models"]]
    return list(dict.fromkeys(step.gemm for gemms in steps for step in gemms))


def _fleets(scenario: Scenario, size: int, seeds: list[int]) -> list[Profiles]:
    fleets = [_synthetic(size, seed) for seed in seeds]
    for mix in scenario["fleets"]["mixes"].values():
        counts = {kind: int(share * size) for kind, share in mix.items()}
        counts[next(iter(counts))] += size - sum(counts.values())
        text = ",".join(f"{kind}={count}" for kind, count in counts.items() if count)
        for seed in seeds:
            country = scenario["countries"][seed % len(scenario["countries"])]
            fleets.append(sample_fleet(text, country, seed))
    return fleets


def _synthetic(size: int, seed: int) -> Profiles:
    """60% phones, 30% laptops, 10% budget phones, each rate uniform in its class's range (PLANNER.md's fleets)."""
    rng = np.random.default_rng(seed)
    kind = rng.choice(3, size, p=(0.6, 0.3, 0.1))
    laptop, slow = kind == 1, np.where(kind == 2, 0.1, 1.0)

    def rate(phone: tuple[float, float], other: tuple[float, float], unit: float) -> Floats:
        return np.where(laptop, rng.uniform(*other, size), rng.uniform(*phone, size)) * unit * slow

    memory = np.where(laptop, rng.uniform(2, 16, size), rng.uniform(0.5, 2, size)) * 1e9
    return Profiles(
        names=tuple(f"device-{i}" for i in range(size)),
        flops_per_s=rate((0.4, 1.6), (1.5, 9.0), 1e12),
        down_bytes_per_s=rate((50, 200), (100, 500), 1e6 / 8),
        up_bytes_per_s=rate((10, 50), (20, 100), 1e6 / 8),
        latency_s=rng.uniform(0.01, 0.06, size),
        memory_bytes=memory * np.where(kind == 2, 0.5, 1.0),
    )


def _spread(ratios: list[float]) -> str:
    return f"{np.mean(ratios):.4f} | {np.quantile(ratios, 0.95):.4f} | {max(ratios):.4f}"
