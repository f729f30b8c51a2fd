"""Whole steps in columns compared with every alternative, and how long planning takes (scenarios/step_planner.toml).

Fleets are drawn exactly as those of shared/PLANNER.md, so that its figures are comparable with these.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import TypedDict, cast

import numpy as np

from cleave.core.cost.lease import ADAM_STATES
from cleave.core.cost.rates import Server
from cleave.core.cost.resident import sum_up
from cleave.core.cost.terms import lean_terms, live_terms
from cleave.core.cost.wire import WireFormat
from cleave.core.fleet.profiles import Floats, Ints, Profiles
from cleave.core.model.gemms import step_flops
from cleave.core.model.shapes import named
from cleave.core.model.sublayers import Sublayer, sublayers_of
from cleave.core.plan.resident.cover import Recipe, cover, make_table, weigh
from cleave.core.plan.resident.large_fleet import ModelPlan, plan_resident
from cleave.core.plan.resident.problem import Leasing, pose
from cleave.core.plan.resident.small_fleet import plan_columns
from cleave.core.plan.rivals.case import Case, Rival
from cleave.core.plan.rivals.compare import all_rivals
from cleave.core.plan.rivals.pipeline import PIPELINES
from cleave.core.plan.rivals.products import GROUPED, attention_by_heads_s
from cleave.core.plan.rivals.sharded import SHARDED
from cleave.core.plan.step import StepChoice, choose_step, plan_step
from cleave.errors import InfeasibleError

_GBIT_BYTES = 1e9 / 8
_A100_FLOPS_PER_S = 0.47 * 312e12
_SHARES = {"mixed": (0.6, 0.3, 0.1), "phones": (1.0, 0.0, 0.0), "laptops": (0.0, 1.0, 0.0)}
_CLASSES = ("phone", "laptop", "budget phone")
_SYNC_SHARES = (0.05, 0.15, 0.3, 0.4, 0.5, 0.65)

Say = Callable[[str], None]


class Grid(TypedDict):
    models: list[str]
    fleets: list[str]
    sizes: list[int]
    large: list[tuple[str, str, int, int]]


class Caps(TypedDict):
    gbit: list[float]
    cells: list[tuple[str, str, int]]


class Timing(TypedDict):
    model: str
    devices: int
    loss: float
    live_model: str
    live_devices: list[int]
    runs: int


class Scenario(TypedDict):
    seed: int
    tokens: int
    sequence: int
    grid: Grid
    caps: Caps
    timing: Timing


def run(given: dict[str, object], say: Say) -> None:
    scenario = cast("Scenario", given)
    _table(scenario, say)
    _steps(scenario, say)
    for wire in ("bf16", "q8"):
        _grid(scenario, wire, say)
    _caps(scenario, say)
    _timing(scenario, say)


def fleet(kind: str, count: int, seed: int) -> Profiles:
    """60% phones, 30% laptops, 10% budget phones, or one kind; `symmetric` and `campus` have other links."""
    rng = np.random.default_rng(seed)
    shares = _SHARES.get(kind, _SHARES["mixed"])
    classes: Ints = rng.choice(3, size=count, p=shares)
    if count <= 32:
        counts = [round(share * count) for share in shares]
        counts[0] += count - sum(counts)
        classes = np.repeat([0, 1, 2], counts)
    slow = classes == 2

    def draw(phone: tuple[float, float], laptop: tuple[float, float]) -> Floats:
        phones = rng.uniform(*phone, count)
        return np.where(classes != 1, phones, rng.uniform(*laptop, count))

    flops = draw((0.4, 1.6), (1.5, 9.0)) * 1e12
    down = draw((50, 200), (100, 500)) * 1e6 / 8
    up = draw((10, 50), (20, 100)) * 1e6 / 8
    memory = draw((0.5, 2), (2, 16)) * 1e9
    latency = rng.uniform(0.01, 0.06, count)
    down, up = down * np.where(slow, 0.1, 1), up * np.where(slow, 0.1, 1)
    if kind == "symmetric":
        up = down
    if kind == "campus":
        down = up = np.full(count, 1e9 / 8)
        latency = np.random.default_rng(1).uniform(0.002, 0.006, count)
    return Profiles(
        names=tuple(f"d{number}" for number in range(count)),
        flops_per_s=flops * np.where(slow, 0.1, 1),
        down_bytes_per_s=down,
        up_bytes_per_s=up,
        latency_s=latency,
        memory_bytes=memory * np.where(slow, 0.5, 1),
        device_class=tuple(_CLASSES[int(number)] for number in classes),
    )


def _table(scenario: Scenario, say: Say) -> None:
    shape, tokens, sequence = named("llama-2-13b"), scenario["tokens"], scenario["sequence"]
    profiles = fleet("mixed", 1024, scenario["seed"])
    case = Case(profiles=profiles, shape=shape, tokens=tokens, sequence=sequence, wire="bf16", server=Server())
    rivals = {rival.name: rival.step_s for rival in all_rivals(case)}
    attention_s = attention_by_heads_s(case)
    alone = plan_step(profiles, shape, tokens, sequence=sequence, split="2d", grouped=False)
    grouped = plan_step(profiles, shape, tokens, sequence=sequence)

    def columns(wire: WireFormat) -> ModelPlan:
        return plan_resident(profiles, shape, tokens, sequence=sequence, wire=wire)

    plan = columns("bf16")
    say("## Llama-2-13B, 131,072 tokens, 1,024 mixed devices, server unlimited: seconds per step\n")
    say("Gemms are planned in full, plus attention by heads. Layer groups are a fluid estimate.\n")
    say("| way | PLANNER.md | here |\n|---|---|---|")
    rows = {
        "every gemm alone, 2D": ("1847", alone.step_s + attention_s),
        "grouped q/k/v and gate/up, 3D where it pays": ("720", grouped.step_s + attention_s),
        "layers given to device groups, 3D inside": ("391", rivals["layer groups"]),
        "GPipe x data parallel": ("280", rivals[PIPELINES]),
        "FSDP": ("", rivals[SHARDED]),
        "columns, bf16 wire": ("147", plan.step_s),
        "columns, q8 wire": ("86", columns("q8").step_s),
        "columns, fluid area bound (bf16)": ("", plan.bound_s),
        "one A100 at 45 %": ("73", step_flops(shape, tokens, sequence) / _A100_FLOPS_PER_S),
    }
    for name, (before, here_s) in rows.items():
        say(f"| {name} | {before} | {here_s:.1f} |")
    say(
        f"\ncolumns: activations {plan.activation_s:.1f}, synchronization {plan.synchronisation_s:.1f}, fill "
        f"{plan.fill_s:.1f} s; {plan.down_bytes / 1e9:.0f} GB down and {plan.up_bytes / 1e9:.0f} GB up through the "
        f"server; {len(plan.stages)} stages, {len(plan.left_out)} devices left out\n"
    )


def _steps(scenario: Scenario, say: Say) -> None:
    """Each refinement by itself: one recipe, its times bisected for a few shares of synchronization."""
    cells = [("llama-2-13b", "mixed", 1024), ("llama-2-13b", "phones", 1024)]
    cells += [("llama-2-7b", "mixed", 256), ("llama-2-7b", "campus", 256)]
    stages = {
        "block columns, whole sequences": ("284 / 662 / 253 / 48", Recipe(chunk=scenario["sequence"], least_count=2)),
        "+ 64-token chunks": ("173 / 322 / 191 / 51", Recipe(least_count=2)),
        "+ attention and MLP apart": ("161 / 254 / 183 / 47", Recipe(least_count=1)),
        "+ slices": ("148 / 216 / 178 / 47", Recipe(least_count=0)),
    }
    say("## Gain of each refinement: 13B on 1,024 mixed / phones, 7B on 256 mixed / campus; seconds\n")
    say("| columns | PLANNER.md | here |\n|---|---|---|")
    for name, (before, recipe) in stages.items():
        found = [_one_recipe(scenario, cell, recipe) for cell in cells]
        say(f"| {name} | {before} | {' / '.join(f'{seconds:.0f}' for seconds in found)} |")
    whole = [
        plan_resident(
            fleet(kind, size, scenario["seed"]), named(model), scenario["tokens"], sequence=scenario["sequence"]
        ).step_s
        for model, kind, size in cells
    ]
    say(f"| + search of chunk, shares, selection, slack | | {' / '.join(f'{seconds:.0f}' for seconds in whole)} |\n")


def _one_recipe(scenario: Scenario, cell: tuple[str, str, int], recipe: Recipe) -> float:
    model, kind, size = cell
    shape, profiles = named(model), fleet(kind, size, scenario["seed"])
    terms = lean_terms("bf16")
    whole = sum_up(sublayers_of(shape), hidden=shape.hidden, sequence=scenario["sequence"], terms=terms)
    table = make_table(profiles, whole, scenario["tokens"], recipe.chunk, is_held=True)
    best = np.inf
    for share in _SYNC_SHARES:
        low, high = 1.0, 1e5
        while high / low > 1.005:
            middle = float(np.sqrt(low * high))
            runs = cover(table, replace(recipe, sync_share=share), middle)
            low, high = (low, middle) if runs else (middle, high)
            if runs:
                best = min(best, weigh(table, runs, Server()).seconds)
    return best


def _grid(scenario: Scenario, wire: WireFormat, say: Say) -> None:
    grid = scenario["grid"]
    small = product(grid["models"], grid["fleets"], grid["sizes"])
    cells = [(model, kind, size, scenario["tokens"]) for model, kind, size in small] + list(grid["large"])
    say(f"## {len(cells)} cells: seconds per step, {wire}, leases where they pay, server unlimited\n")
    say("`gain` is the best rival's time over the columns': below 1, the rival wins. Rivals keep their optimizer on")
    say("devices, send 16-bit numbers, and are lower bounds or optimistic estimates.\n")
    say("| model | fleet | devices | tokens | columns | / area bound | best rival | | gain | / grouped gemms |")
    say("|---|---|---|---|---|---|---|---|---|---|")
    gains: list[float] = []
    grouped: list[float] = []
    lost: list[tuple[str, StepChoice]] = []
    for model, kind, size, tokens in cells:
        profiles = fleet(kind, size, scenario["seed"])
        where = f"{model} | {kind} | {size} | {tokens}"
        try:
            chosen = choose_step(
                profiles,
                named(model),
                tokens,
                sequence=scenario["sequence"],
                wire=wire,
                resident_only=True,
                leasing=Leasing(states=ADAM_STATES),
            )
        except InfeasibleError:
            say(f"| {where} | does not fit | | | | | |")
            continue
        best = best_rival(chosen)
        gains.append(best.step_s / chosen.step_s)
        grouped.append(next(way.step_s for way in chosen.rivals if way.name == GROUPED) / chosen.step_s)
        if chosen.faster:
            lost.append((where, chosen))
        say(
            f"| {where} | {chosen.step_s:.1f} | {chosen.step_s / chosen.bound_s:.2f} | {best.step_s:.1f} | {best.name} "
            f"| {gains[-1]:.2f} | {grouped[-1]:.1f} |"
        )
    say(
        f"\ngain over the best rival: geometric mean {_geometric(gains):.2f}, least {min(gains):.2f}, lost "
        f"{len(lost)} of {len(gains)}; over grouped gemms {_geometric(grouped):.1f}\n"
    )
    say("### Lost cells\n")
    say("| model | fleet | devices | tokens | faster | times | how | why |\n|---|---|---|---|---|---|---|---|")
    for where, chosen in lost:
        for rival in chosen.faster:
            times = f"{chosen.step_s / rival.step_s:.2f}"
            say(f"| {where} | {rival.name} | {times} | {rival.arrangement} | {rival.spares} |")
    say("")


def best_rival(chosen: StepChoice) -> Rival:
    return next(way for way in chosen.rivals if not way.is_ours)


def _caps(scenario: Scenario, say: Say) -> None:
    caps = scenario["caps"]
    say("## Under a server cap: seconds per step (devices used)\n")
    say("| model | devices | " + " | ".join(f"{gbit:g} Gbit/s" for gbit in caps["gbit"]) + " |")
    say("|---" * (len(caps["gbit"]) + 2) + "|")
    for model, kind, size in caps["cells"]:
        profiles = fleet(kind, size, scenario["seed"])
        told: list[str] = []
        for gbit in caps["gbit"]:
            server = Server(down_bytes_per_s=gbit * _GBIT_BYTES, up_bytes_per_s=gbit * _GBIT_BYTES)
            plan = plan_resident(
                profiles, named(model), scenario["tokens"], sequence=scenario["sequence"], server=server
            )
            told.append(f"{plan.step_s:.1f} ({size - len(plan.left_out):,})")
        say(f"| {model} | {size:,} | {' | '.join(told)} |")
    say("")


def _timing(scenario: Scenario, say: Say) -> None:
    timing = scenario["timing"]
    shape, count = named(timing["model"]), timing["devices"]
    profiles = fleet("mixed", count, scenario["seed"])

    def planned(devices: Profiles, previous: ModelPlan | None) -> ModelPlan:
        return plan_resident(devices, shape, scenario["tokens"], sequence=scenario["sequence"], previous=previous)

    say(f"## Planning time, {timing['model']}, {count:,} devices: seconds of CPU (wall clock)\n")
    first, spent = _timed(lambda: planned(profiles, None))
    say(f"first plan: {spent}, step {first.step_s:.1f} s (target: at most 40)")
    rng = np.random.default_rng(scenario["seed"])
    stay = np.sort(rng.permutation(count)[: round(count * (1 - timing["loss"]))])
    rest = profiles.take(stay)
    again, spent = _timed(lambda: planned(rest, first))
    say(f"again without {timing['loss']:.0%} of them: {spent}, step {again.step_s:.1f} s (target: at most 5)")
    wander = rng.uniform(0.9, 1.1, count)
    moved = replace(profiles, up_bytes_per_s=profiles.up_bytes_per_s * wander)
    again, spent = _timed(lambda: planned(moved, first))
    say(f"again with uplinks off by 10%: {spent}, step {again.step_s:.1f} s\n")
    live = named(timing["live_model"])
    sublayers = sublayers_of(live)
    say(f"live columns, {timing['live_model']} ({len(sublayers)} sublayers), best of {timing['runs']}:\n")
    for number in timing["live_devices"]:
        few = fleet("laptops", number, scenario["seed"])
        roomy = replace(few, memory_bytes=few.memory_bytes * 8)
        times = [_live_ms(roomy, live.hidden, sublayers) for _ in range(timing["runs"])]
        say(f"- {number} devices: {min(times):.0f} ms of CPU")


def _live_ms(profiles: Profiles, hidden: int, sublayers: tuple[Sublayer, ...]) -> float:
    begun = time.process_time()
    terms = live_terms("bf16")
    plan_columns(pose(profiles, sublayers, hidden=hidden, sequences=16, sequence=1024, terms=terms))
    return 1e3 * (time.process_time() - begun)


def _timed(work: Callable[[], ModelPlan]) -> tuple[ModelPlan, str]:
    cpu, wall = time.process_time(), time.perf_counter()
    plan = work()
    return plan, f"{time.process_time() - cpu:.2f} ({time.perf_counter() - wall:.2f})"


def _geometric(values: list[float]) -> float:
    return float(np.exp(np.mean(np.log(values))))
