"""The claims published in arXiv:2512.22142, judged on the outcomes of a study: where they hold, where not, by how much.

Every cell of the study without churn counts: all models, fleets, links, servers, memories and wires. None is chosen by
its result. Settings in which a rival does not fit allow no comparison, and are counted apart; settings in which Cleave
does not fit, or is slower, count against the claim. Plain 2D blocks, the published method, are judged beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from cleave.report.chart import Kind
from cleave.report.claim import Claim, Comparison, Finding
from cleave.report.quantities import plural, si
from cleave.sim.cell import Cell
from cleave.sim.cleave import SYSTEM
from cleave.sim.setting import Outcome
from cleave.sim.study.figure import kind_of

Outcomes = Mapping[Cell, Outcome]
Quantity = Callable[[Outcome], float | None]

FASTEST = "the fastest rival"
SMALLER = "a smaller fleet"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """How a claim is judged: by a quantity of Cleave's outcome and of the opponent's in the same setting."""

    name: str
    published: str
    factor: str
    """The factor in words."""
    least: float
    """The factor from which the claim holds."""
    kind: Kind
    """Of the systems that are compared with."""
    quantity: Quantity
    more_is_better: bool = False
    has_best: bool = False
    """Whether there is also a comparison with the best opponent in each setting."""


_RULES = (
    _Rule(
        name="Speed",
        published="4 to 10 times faster per batch than edge rivals, on the same devices",
        factor="The rival's seconds per batch over Cleave's.",
        least=4.0,
        kind="rival",
        quantity=lambda outcome: outcome.batch_s,
        has_best=True,
    ),
    _Rule(
        name="Devices",
        published="2 to 8 times as many devices",
        factor="Devices used by Cleave over those used by the rival, of the same devices offered.",
        least=2.0,
        kind="rival",
        quantity=lambda outcome: float(outcome.devices_used),
        more_is_better=True,
    ),
    _Rule(
        name="Cloud",
        published="as fast as a cloud GPU",
        factor="The cloud's seconds per batch over Cleave's; a little slower still counts.",
        least=0.9,
        kind="cloud",
        quantity=lambda outcome: outcome.batch_s,
    ),
    _Rule(
        name="Recovery",
        published="at least 100 times faster recovery",
        factor="Seconds that a departure adds to the rival's batch over those it adds to Cleave's, on average.",
        least=100.0,
        kind="rival",
        quantity=lambda outcome: outcome.recovery_s,
    ),
)


def claims(outcomes: Outcomes, center: Cell) -> tuple[Claim, ...]:
    """Judge each claim for every form of Cleave among the outcomes."""
    systems = list(dict.fromkeys(cell.system for cell in outcomes))
    own = [name for name in systems if kind_of(name) == "ours"]
    places = _places(outcomes)
    judged = [
        Claim(
            name=rule.name,
            published=rule.published,
            rule=f"{rule.factor} Holds at {rule.least:g} or more.",
            comparisons=tuple(
                _compared(rule, ours, against, names, places, center)
                for ours in own
                for against, names in _opponents(rule, systems).items()
            ),
        )
        for rule in _RULES
    ]
    falling = Claim(
        name="Traffic",
        published="per-device communication falls as devices are added",
        rule="Bytes per batch of the device that receives most and of the one that sends most, on a fleet over those "
        "on the next larger fleet. Holds above 1.",
        comparisons=tuple(_falling(ours, outcomes, center) for ours in own),
    )
    return (*judged, falling)


def _opponents(rule: _Rule, systems: Sequence[str]) -> dict[str, list[str]]:
    """Whom to compare with, by name: each system of the kind, and perhaps all of them."""
    single = {name: [name] for name in systems if kind_of(name) == rule.kind}
    return {FASTEST: list(single)} | single if rule.has_best and len(single) > 1 else single


def _places(outcomes: Outcomes) -> dict[Cell, dict[str, Outcome]]:
    """Outcomes of all systems by setting; churn is no setting to compare in."""
    places: dict[Cell, dict[str, Outcome]] = {}
    for cell, outcome in outcomes.items():
        if cell.churn_per_hour == 0 and not cell.is_billed:
            places.setdefault(replace(cell, system=SYSTEM), {})[cell.system] = outcome
    return places


def _compared(
    rule: _Rule,
    ours: str,
    against: str,
    names: Sequence[str],
    places: Mapping[Cell, Mapping[str, Outcome]],
    center: Cell,
) -> Comparison:
    """Compare with the best of some systems in every setting."""
    findings: list[Finding] = []
    unfit = unknown = 0
    for cell, by_system in places.items():
        present = [by_system[name] for name in names if name in by_system]
        if not present or ours not in by_system:
            continue
        theirs = [value for one in present if one.fits and (value := rule.quantity(one)) is not None]
        if not theirs:
            fits = any(one.fits for one in present)
            unknown, unfit = unknown + fits, unfit + (not fits)
            continue
        best = max(theirs) if rule.more_is_better else min(theirs)
        value = rule.quantity(by_system[ours]) if by_system[ours].fits else None
        factor = None
        if value:
            factor = value / best if rule.more_is_better else best / value
        findings.append(
            Finding(
                model=cell.model,
                devices=cell.devices,
                other=words(cell, center),
                factor=factor,
                holds=factor is not None and factor >= rule.least,
                why="" if factor is not None else "not modeled" if by_system[ours].fits else f"{ours} does not fit",
            )
        )
    apart = [f"{plural(unfit, 'setting')} in which {against} does not fit"] if unfit else []
    apart += [f"{plural(unknown, 'setting')} in which it is not modeled for {against}"] if unknown else []
    return Comparison(system=ours, against=against, findings=tuple(findings), not_compared="; ".join(apart))


def _falling(system: str, outcomes: Outcomes, center: Cell) -> Comparison:
    """Compare each fleet with the next larger one, everything else equal."""
    usual = replace(center, system=system)
    fleets: dict[str, dict[int, float]] = {}
    for cell, outcome in outcomes.items():
        moved = (outcome.down_bytes or 0.0) + (outcome.up_bytes or 0.0)
        if cell == replace(usual, model=cell.model, devices=cell.devices) and moved > 0:
            fleets.setdefault(cell.model, {})[cell.devices] = moved
    findings = [
        Finding(
            model=model,
            devices=small,
            to_devices=large,
            factor=found[small] / found[large],
            holds=found[small] > found[large],
        )
        for model, found in fleets.items()
        for small, large in pairwise(sorted(found))
    ]
    return Comparison(system=system, against=SMALLER, findings=tuple(findings))


def words(cell: Cell, center: Cell) -> str:
    """How a cell differs from the center, apart from model and devices."""
    other: list[str] = []
    if cell.down_per_up is not None:
        other.append(f"links {cell.down_per_up:g}:1")
    if cell.server_bytes_per_s is not None:
        other.append(f"server {si(8 * cell.server_bytes_per_s, 'bit/s')}")
    if cell.memory_bytes is not None:
        other.append(f"{si(cell.memory_bytes, 'B')} each")
    if cell.wire != center.wire:
        other.append(f"wire {cell.wire}")
    return ", ".join(other)
