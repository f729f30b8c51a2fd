"""`cleave.simulate`: how long batches of a model would take on a fleet, with Cleave and with other systems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cleave.api.checks import check_type, checked_wire
from cleave.api.churning import AWAY_S, churn_of
from cleave.api.planning import checked_sequence, load_fleet, load_shape
from cleave.core.cost.rates import Server
from cleave.core.cost.wire import PLAN_WIRE, WireName
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.shapes import ModelShape
from cleave.errors import InputError
from cleave.sim.cleave import SYSTEM, MethodChoice, Run, simulate_cleave
from cleave.sim.course import Course
from cleave.sim.setting import Outcome, Setting
from cleave.sim.systems import baselines, checked_systems
from cleave.sim.world import Noise, World

_MOST_BATCHES = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Simulated:
    """A setting, and each system's outcome in it."""

    setting: Setting
    batches: int
    churn: str | None
    noise: Noise
    systems: dict[str, Outcome]


def simulate(
    fleet: Profiles | str | Path,
    *,
    model: str | ModelShape,
    tokens: int,
    sequence: int | None = None,
    wire: WireName = PLAN_WIRE,
    server: Server | None = None,
    systems: Sequence[str] = (SYSTEM,),
    batches: int = 1,
    churn: str | None = None,
    away_s: float = AWAY_S,
    noise: Noise | None = None,
    seed: int = 0,
    method: MethodChoice = "auto",
    watch: Callable[[Course], None] = lambda course: None,
) -> Simulated:
    """Simulate batches of a model on a fleet: profiles, or the path of a fleet CSV.

    `churn` is a number of departures per device and hour (each is followed by an absence of mean `away_s`), `daily`
    (idle and charging, mostly at night), `fta:` and a trace of the Failure Trace Archive such as `fta:microsoft99`, or
    the path of a trace. `noise` says how far true rates are from the believed ones. Batches, churn and noise concern
    Cleave; other systems are judged on one undisturbed batch. The same seed gives the same results. `watch` receives
    what happens in Cleave's batches.
    """
    check_type(fleet, Profiles | str | Path, "a fleet as Profiles or the path of a fleet CSV")
    format = checked_wire(wire)
    if not 1 <= batches <= _MOST_BATCHES:
        raise InputError(f"expected batches from 1 to {_MOST_BATCHES:,}, got {batches}; change it")
    if not 0 <= seed < 2**63:
        raise InputError(f"expected a seed of at least 0, got {seed}; change it")
    if tokens < 1:
        raise InputError(f"expected at least 1 token per batch, got {tokens}; change it")
    names = checked_systems(systems)
    profiles = fleet if isinstance(fleet, Profiles) else load_fleet(fleet)
    shape = model if isinstance(model, ModelShape) else load_shape(model)
    length = checked_sequence(shape, tokens, sequence)
    if tokens % length:
        raise InputError(f"expected whole sequences of {length} tokens, got --tokens {tokens}; change one of them")
    noise = noise or Noise()
    setting = Setting(
        model=shape,
        tokens=tokens,
        sequence=length,
        profiles=profiles,
        server=server or Server(),
        wire=format,
        seed=seed,
    )
    stays = None if churn is None else churn_of(churn, profiles.names, seed=seed, away_s=away_s)
    outcomes: dict[str, Outcome] = {}
    for name in names:
        if name == SYSTEM:
            world = World(profiles, seed=seed, noise=noise, stays=stays)
            run = Run(world=world, batches=batches, has_churn=churn is not None, method=method, watch=watch)
            outcomes[name] = simulate_cleave(setting, run)
        else:
            outcomes[name] = baselines()[name](setting)
    return Simulated(setting=setting, batches=batches, churn=churn, noise=noise, systems=outcomes)
