"""One cell of a study: a system and a setting in plain numbers, so that it can be compared, counted, hashed and kept.

Fleets of any size come from one population: its devices in an order drawn once, over again if more are asked for. So a
larger fleet has every device of a smaller one, and curves over devices differ by what was added alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

import numpy as np

from cleave.core.carbon.bill import fleet_power
from cleave.core.cost.rates import Server
from cleave.core.cost.wire import WireFormat
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.shapes import ModelShape
from cleave.core.plan.usage import plan_flops, use_of
from cleave.errors import InfeasibleError
from cleave.facts.carbon import carbon_facts
from cleave.sim.churn import AWAY_S, constant, of_each
from cleave.sim.cleave import SYSTEM, Run, simulate_cleave
from cleave.sim.planning import plan_setting
from cleave.sim.setting import Outcome, Setting
from cleave.sim.systems import baselines
from cleave.sim.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    system: str = SYSTEM
    model: str
    tokens: int
    sequence: int
    devices: int
    down_per_up: float | None = None
    """Downlink over uplink: uplinks are changed to it; None leaves them as they are."""
    memory_bytes: float | None = None
    """Of every device; None leaves it as it is."""
    server_bytes_per_s: float | None = None
    """Of the server's link, each way; None if unlimited."""
    wire: WireFormat = "bf16"
    churn_per_hour: float = 0.0
    """Departures per device; simulated for Cleave alone."""
    batches: int = 1
    is_billed: bool = False
    """Whether energy and emissions are computed, and nothing else; for Cleave alone."""
    seed: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Ground:
    """What the cells of a study have in common."""

    population: Profiles
    shapes: Mapping[str, ModelShape]
    """Models by name."""


def setting_of(cell: Cell, ground: Ground) -> Setting:
    profiles = fleet_of(ground.population, cell.devices, cell.seed)
    if cell.down_per_up is not None:
        profiles = replace(profiles, up_bytes_per_s=profiles.down_bytes_per_s / cell.down_per_up)
    if cell.memory_bytes is not None:
        profiles = replace(profiles, memory_bytes=np.full(cell.devices, cell.memory_bytes))
    link = inf if cell.server_bytes_per_s is None else cell.server_bytes_per_s
    return Setting(
        model=ground.shapes[cell.model],
        tokens=cell.tokens,
        sequence=cell.sequence,
        profiles=profiles,
        server=Server(down_bytes_per_s=link, up_bytes_per_s=link),
        wire=cell.wire,
        seed=cell.seed,
    )


def fleet_of(population: Profiles, devices: int, seed: int) -> Profiles:
    """So many devices of a population, each as often as the others or once more."""
    order = np.random.default_rng(seed).permutation(len(population))
    return population.take(np.resize(order, devices), tuple(f"device-{number}" for number in range(devices)))


def evaluate(cell: Cell, ground: Ground) -> Outcome:
    """What the system of a cell makes of its setting; the same cell gives the same digits."""
    setting = setting_of(cell, ground)
    if cell.system != SYSTEM:
        return baselines()[cell.system](setting)
    if cell.is_billed:
        return _billed(setting)
    rate, names = cell.churn_per_hour, setting.profiles.names
    stays = None if rate == 0 else lambda: of_each(names, cell.seed, lambda rng: constant(rng, rate, AWAY_S))
    world = World(setting.profiles, seed=cell.seed, stays=stays)
    run = Run(world=world, batches=cell.batches, has_churn=stays is not None, method="law")
    return simulate_cleave(setting, run)


def _billed(setting: Setting) -> Outcome:
    """Energy and emissions of a planned batch, of its parts, and of the same work on cloud GPUs."""
    try:
        plan = plan_setting(setting)
    except InfeasibleError as why:
        return Outcome(system=SYSTEM, fits=False, reason=str(why))
    power = fleet_power(setting.profiles, carbon_facts())
    use = use_of(plan, setting.profiles)
    bill = power.bill(use, plan_flops(plan))
    devices = int((use.busy_s > 0).sum())
    ours = bill.footprint
    figures = {"energy_j": ours.energy_j, "kgco2e": ours.kgco2e, "embodied_kgco2e": ours.embodied_kgco2e}
    for name, part in (("devices", ours.devices), ("network", ours.network), ("server", ours.server)):
        figures[f"{name}_j"] = part.energy_j
    for cloud in bill.clouds:
        key = cloud_key(cloud.gpu)
        figures[f"{key}_j"], figures[f"{key}_kgco2e"] = cloud.footprint.energy_j, cloud.footprint.kgco2e
    return Outcome(
        system=SYSTEM, fits=True, reason="as planned", batch_s=plan.step_s, devices_used=devices, detail=figures
    )


def cloud_key(gpu: str) -> str:
    """`A100 SXM4` is `a100`, as among the systems."""
    return gpu.partition(" ")[0].lower()
