"""Names of the systems that can be simulated: for the command line, which must not load them to list them."""

from __future__ import annotations

from typing import Final

CLEAVE: Final = "cleave"
RIVALS: Final = (
    "dtfm",
    "alpa",
    "swarm",
    "hivemind",
    "gpipe",
    "asteroid",
    "cleave-2d",
    "a100",
    "a100-8",
    "h100",
    "h100-8",
)
SYSTEMS: Final = (CLEAVE, *RIVALS)
ALL: Final = "all"
"""Every system, in a list of names."""
