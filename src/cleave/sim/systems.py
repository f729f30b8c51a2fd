"""The systems that can be simulated, by name: Cleave here, its rivals in `baselines`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

from cleave.errors import InputError
from cleave.sim.names import ALL, SYSTEMS
from cleave.sim.setting import System


def baselines() -> Mapping[str, System]:
    """Rivals by name."""
    from cleave.sim.baselines import SYSTEMS as RIVALS

    return RIVALS


def checked_systems(names: Sequence[str]) -> list[str]:
    """The same names, once each, `all` spelled out; InputError if there is no such system."""
    for name in names:
        if name not in (*SYSTEMS, ALL):
            near = difflib.get_close_matches(name, SYSTEMS, n=1)
            advice = f"did you mean {near[0]}?" if near else f"choose among those, or {ALL}"
            raise InputError(f"expected systems among {', '.join(SYSTEMS)}, got {name[:60]!r}; {advice}")
    if not names:
        raise InputError(f"expected at least one system among {', '.join(SYSTEMS)}; name one, or {ALL}")
    return list(dict.fromkeys(one for name in names for one in (SYSTEMS if name == ALL else (name,))))
