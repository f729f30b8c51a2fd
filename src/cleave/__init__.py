"""Cleave trains foundation models on idle laptops, desktops and phones.

Public names are loaded on first use, so that `import cleave` and `cleave --help` stay fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cleave.app import plan as plan
    from cleave.core.cost import Server as Server
    from cleave.core.fleet import Profiles as Profiles
    from cleave.core.graph import Gemm as Gemm
    from cleave.fleet import Fleet as Fleet
    from cleave.fleet import distribute as distribute
    from cleave.fleet import overlap as overlap
    from cleave.fleet import undistribute as undistribute

__version__ = "0.1.0"
__all__ = ["Fleet", "Gemm", "Profiles", "Server", "distribute", "overlap", "plan", "undistribute"]

_HOMES = {
    "plan": "cleave.app",
    "Fleet": "cleave.fleet",
    "distribute": "cleave.fleet",
    "overlap": "cleave.fleet",
    "undistribute": "cleave.fleet",
    "Profiles": "cleave.core.fleet",
    "Gemm": "cleave.core.graph",
    "Server": "cleave.core.cost",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'cleave' has no attribute {name!r}")
    from importlib import import_module

    found: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = found  # a submodule of the same name, such as cleave.fleet, must not shadow it
    return found
