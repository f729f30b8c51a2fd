"""What a plan should have least of."""

from __future__ import annotations

from typing import Final, Literal

Objective = Literal["time", "energy", "carbon"]
OBJECTIVES: Final[tuple[Objective, ...]] = ("time", "energy", "carbon")
