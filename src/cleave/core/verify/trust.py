"""How far a device is trusted, from what its results were found to be.

Every result is checked, so trust is not about what is accepted but about whom to keep: a wrong one costs its block a
second time. One wrong block makes a suspect, who is checked harder; right ones slowly clear it, as memory errs too.
Who is wrong more often than one block in RIGHTS_PER_WRONG ends in quarantine however long it takes.
"""

from __future__ import annotations

from dataclasses import dataclass

RIGHTS_PER_WRONG = 200
WRONGS_TO_QUARANTINE = 3


@dataclass(slots=True)
class Trust:
    suspicion: float = 0.0

    def right(self, share: float = 1.0) -> None:
        """A share of a block: however finely it is returned, it clears no more than the block."""
        self.suspicion = max(0.0, self.suspicion - share / RIGHTS_PER_WRONG)

    def wrong(self) -> None:
        self.suspicion += 1

    @property
    def is_suspect(self) -> bool:
        return self.suspicion > 0

    @property
    def is_lost(self) -> bool:
        return self.suspicion > WRONGS_TO_QUARANTINE - 1
