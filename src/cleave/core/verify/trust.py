"""Trust in a device, from the verdicts on its results.

Trust does not decide which results are accepted but which devices are kept: a wrong block must be computed a second
time. One wrong block makes a device a suspect, which is checked harder; correct ones slowly clear it, since memory
errors happen too. A device that is wrong more than once in RIGHTS_PER_WRONG blocks is eventually quarantined. Unchecked
results clear nobody, so audits keep a suspicion of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Policy = Literal["sample", "strict", "none"]
"""Share of unverifiable work to audit: a random sample, all of it (strict), or none."""

RIGHTS_PER_WRONG = 200
WRONGS_TO_QUARANTINE = 3


@dataclass(slots=True)
class Trust:
    """Suspicion against one device: up by 1 per wrong block, down slowly with correct ones."""

    suspicion: float = 0.0
    audit_suspicion: float = 0.0
    proven: set[str] = field(default_factory=lambda: set[str]())
    """Directions of a pass in which the device's latest audit passed."""

    def right(self, share: float = 1.0) -> None:
        """Count a correct share of a block: however finely it is returned, it clears no more than the block."""
        self.suspicion = max(0.0, self.suspicion - share / RIGHTS_PER_WRONG)

    def wrong(self) -> None:
        self.suspicion += 1

    def audited_right(self, directions: Iterable[str]) -> None:
        self.audit_suspicion = max(0.0, self.audit_suspicion - 1 / RIGHTS_PER_WRONG)
        self.proven.update(directions)

    def audited_wrong(self) -> None:
        """Count a failed audit; the caller counts the wrong result itself."""
        self.audit_suspicion += 1
        self.proven.clear()

    @property
    def is_suspect(self) -> bool:
        return self.suspicion > 0

    @property
    def is_audit_suspect(self) -> bool:
        return self.audit_suspicion > 0

    @property
    def is_lost(self) -> bool:
        return max(self.suspicion, self.audit_suspicion) > WRONGS_TO_QUARANTINE - 1
