"""Trust in a device: what its owner grants it, and what the verdicts on its results add or take away.

A **level** comes with the token a device joined with. It decides how much work is audited that cannot be checked by
itself: results of resident layers. Products are always checked.

Verdicts do not decide which results are accepted but which devices are kept: a wrong block must be computed a second
time. One wrong block makes a device a suspect, which is checked harder; correct ones slowly clear it, since memory
errors happen too. A device that is wrong more than once in RIGHTS_PER_WRONG blocks is eventually quarantined. Unchecked
results clear nobody, so audits keep a suspicion of their own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, Literal, get_args

Level = Literal["own", "known", "stranger"]
"""Own machines: nothing is audited. Known people: newcomers, then a sample. Strangers: everything."""

LEVELS: Final[tuple[Level, ...]] = get_args(Level)
_FORMER_NAMES: Final[dict[str, Level]] = {"none": "own", "sample": "known", "strict": "stranger"}

RIGHTS_PER_WRONG: Final = 200
WRONGS_TO_QUARANTINE: Final = 3
PROBATION: Final = 3
"""Accounts of a known device that must pass before only a sample of them is audited."""
SAMPLED_PER_PASS: Final = 0.2
"""Accounts of proven devices audited per pass, on average: the cost does not grow with the fleet."""


def level_of(text: object) -> Level | None:
    """Read a level, also by the name it had in earlier releases; None if there is no such level."""
    names: dict[object, Level] = {**{level: level for level in LEVELS}, **_FORMER_NAMES}
    return names.get(text) if isinstance(text, str) else None


@dataclass(slots=True)
class Trust:
    """Suspicion against one device: up by 1 per wrong block, down slowly with correct ones."""

    suspicion: float = 0.0
    audit_suspicion: float = 0.0
    passed: Counter[str] = field(default_factory=lambda: Counter[str]())
    """Audits passed since the last failed one, by direction of the pass."""

    def right(self, share: float = 1.0) -> None:
        """Count a correct share of a block: however finely it is returned, it clears no more than the block."""
        self.suspicion = max(0.0, self.suspicion - share / RIGHTS_PER_WRONG)

    def wrong(self) -> None:
        self.suspicion += 1

    def audited_right(self, directions: Iterable[str]) -> None:
        self.audit_suspicion = max(0.0, self.audit_suspicion - 1 / RIGHTS_PER_WRONG)
        self.passed.update(directions)

    def audited_wrong(self) -> None:
        """Count a failed audit; the caller counts the wrong result itself."""
        self.audit_suspicion += 1
        self.passed.clear()

    def lose(self) -> None:
        """Quarantine the device, whatever it did before."""
        self.suspicion = max(self.suspicion, float(WRONGS_TO_QUARANTINE))

    def is_proven(self, direction: str) -> bool:
        return self.passed[direction] >= PROBATION

    @property
    def is_suspect(self) -> bool:
        return self.suspicion > 0

    @property
    def is_audit_suspect(self) -> bool:
        return self.audit_suspicion > 0

    @property
    def is_lost(self) -> bool:
        return max(self.suspicion, self.audit_suspicion) > WRONGS_TO_QUARANTINE - 1


def usual_share(level: Level, devices: int) -> float:
    """Return the probability of auditing an account of a proven device in a fleet of so many."""
    return {"own": 0.0, "known": SAMPLED_PER_PASS / max(1, devices), "stranger": 1.0}[level]


def audited_share(level: Level, trust: Trust, direction: str, devices: int) -> float:
    """Return the probability of auditing a device's account: everything of newcomers and suspects but one's own."""
    is_doubtful = trust.is_suspect or trust.is_audit_suspect or not trust.is_proven(direction)
    return 1.0 if is_doubtful and level != "own" else usual_share(level, devices)
