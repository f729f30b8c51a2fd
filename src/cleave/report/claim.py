"""Published claims beside what was found: a factor per setting, and whether it is enough. As text and Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A comparison in one setting."""

    model: str
    devices: int
    to_devices: int | None = None
    """The larger fleet, where two are compared."""
    other: str = ""
    """What else differs from the center of the study, in words."""
    factor: float | None
    """How many times better than the opponent; None if either has no figure."""
    holds: bool
    why: str = ""
    """Why there is no factor."""

    @property
    def setting(self) -> str:
        return _devices_text(self, self) + (f", {self.other}" if self.other else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    system: str
    """Whose claim it is: Cleave's, or that of another form of it."""
    against: str
    findings: tuple[Finding, ...]
    not_compared: str = ""
    """Settings left out of the findings, and why."""

    @property
    def factors(self) -> list[float]:
        return sorted(one.factor for one in self.findings if one.factor is not None)

    @property
    def held(self) -> list[Finding]:
        return [one for one in self.findings if one.holds]

    @property
    def failed(self) -> list[Finding]:
        return [one for one in self.findings if not one.holds]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    name: str
    published: str
    rule: str
    """What the factor is, and from which value on the claim holds."""
    comparisons: tuple[Comparison, ...]

    def by_opponent(self) -> dict[str, dict[str, Comparison]]:
        """Comparisons by what is compared with, then by whose they are."""
        found: dict[str, dict[str, Comparison]] = {}
        for one in self.comparisons:
            found.setdefault(one.against, {})[one.system] = one
        return found


def systems_of(claims: Sequence[Claim]) -> list[str]:
    """Whose claims are judged."""
    return list(dict.fromkeys(one.system for claim in claims for one in claim.comparisons))


def factor_text(factor: float) -> str:
    return f"{factor:,.0f}" if factor >= 100 else f"{factor:.3g}"


def count_text(found: Comparison | None) -> str:
    return f"{len(found.held)} of {len(found.findings)}" if found is not None and found.findings else "not compared"


def range_text(found: Comparison | None) -> str:
    """Least, median and greatest factor."""
    if found is None or not found.factors:
        return ""
    low, high = found.factors[0], found.factors[-1]
    return f"{factor_text(low)} to {factor_text(high)}, median {factor_text(float(np.median(found.factors)))}"


def where_text(findings: Sequence[Finding], *, holds: bool) -> str:
    """Settings in which a claim holds, or does not, with their factors; by model, neighboring fleet sizes together."""
    said: list[str] = []
    for model in dict.fromkeys(one.model for one in findings):
        own = [one for one in findings if one.model == model]
        plain = sorted((one for one in own if not one.other), key=lambda one: one.devices)
        runs = [list(run) for held, run in groupby(plain, key=lambda one: one.holds) if held == holds]
        runs += [[one] for one in own if one.other and one.holds == holds]
        if runs:
            said.append(f"**{model}** " + ", ".join(map(_run_text, runs)))
    return "; ".join(said) or "none"


def _run_text(run: Sequence[Finding]) -> str:
    factors = [one.factor for one in run if one.factor is not None]
    ends = dict.fromkeys(map(factor_text, (min(factors), max(factors)))) if factors else ()
    values = " to ".join(f"{end}x" for end in ends)
    whys = {one.why for one in run if one.why}
    place = _devices_text(run[0], run[-1]) + (f", {run[0].other}" if run[0].other else "")
    return f"{place} ({'; '.join(filter(None, (values, *sorted(whys))))})"


def _devices_text(first: Finding, last: Finding) -> str:
    end = last.to_devices or last.devices
    return f"{first.devices:,} devices" if first.devices == end else f"{first.devices:,} to {end:,} devices"


def as_json(claims: tuple[Claim, ...]) -> list[dict[str, object]]:
    return [
        {
            "name": claim.name,
            "published": claim.published,
            "rule": claim.rule,
            "comparisons": [
                {
                    "system": found.system,
                    "against": found.against,
                    "holds_in": len(found.held),
                    "of": len(found.findings),
                    "factors": found.factors,
                    "not_compared": found.not_compared,
                    "findings": [
                        {
                            "model": one.model,
                            "setting": one.setting,
                            "factor": one.factor,
                            "holds": one.holds,
                            "why": one.why,
                        }
                        for one in found.findings
                    ],
                }
                for found in claim.comparisons
            ],
        }
        for claim in claims
    ]


def as_markdown(claims: tuple[Claim, ...], *, date: str, command: str, setting: str) -> str:
    systems = systems_of(claims)
    lines = [
        "# Claims",
        "",
        f"Generated on {date} by `{command}`; do not edit. What arXiv:2512.22142 publishes, and what the simulator "
        "finds for this code in every setting of its report. A factor above 1 favors Cleave. Nothing here was "
        "measured; [Simulate a fleet](simulate.md) says how far to trust it.",
        "",
        f"Center of the study: {setting}.",
        "",
        "| published | against | " + " | ".join(f"{one}: holds in | factors" for one in systems) + " |",
        "|---" * (2 + 2 * len(systems)) + "|",
    ]
    for claim in claims:
        for number, (against, found) in enumerate(claim.by_opponent().items()):
            cells = [text(found.get(one)) for one in systems for text in (count_text, range_text)]
            lines.append(f"| {claim.published if number == 0 else ''} | {against} | {' | '.join(cells)} |")
    for claim in claims:
        lines += ["", f"## {claim.name}", "", claim.rule]
        for found in claim.comparisons:
            lines += [
                "",
                f"### {claim.name}: {found.system} against {found.against}",
                "",
                f"- Holds in {count_text(found)}: {where_text(found.findings, holds=True)}",
                f"- Does not hold in: {where_text(found.findings, holds=False)}",
                *([f"- Not compared: {found.not_compared}"] if found.not_compared else []),
            ]
    return "\n".join(lines) + "\n"
