"""The systems that can be simulated, by name: Cleave here, its rivals in `baselines`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import cast

from cleave.errors import InputError
from cleave.sim.cleave import SYSTEM
from cleave.sim.setting import System

_BASELINES = "cleave.sim.baselines"


def baselines() -> Mapping[str, System]:
    """Rivals by name."""
    if find_spec(_BASELINES) is None:
        return {}
    return cast("Mapping[str, System]", import_module(_BASELINES).SYSTEMS)


def checked_systems(names: Sequence[str]) -> list[str]:
    """The same names, once each; InputError if there is no such system."""
    known = [SYSTEM, *baselines()]
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {near[0]}?" if near else "choose among those"
            raise InputError(f"expected systems among {', '.join(known)}, got {name[:60]!r}; {advice}")
    if not names:
        raise InputError(f"expected at least one system among {', '.join(known)}; name one")
    return list(dict.fromkeys(names))
