"""Cleave trains PyTorch models on idle laptops and desktops.

Public names are imported on first use, so that `import cleave` and `cleave --help` stay fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cleave.api.fleet import Fleet as Fleet
    from cleave.api.planning import plan as plan
    from cleave.api.simulating import simulate as simulate
    from cleave.api.training import distribute as distribute
    from cleave.api.training import overlap as overlap
    from cleave.api.training import undistribute as undistribute
    from cleave.core.cost.rates import Server as Server
    from cleave.core.fleet.profiles import Profiles as Profiles
    from cleave.core.model.gemms import Gemm as Gemm

__version__ = "0.1.0"
__all__ = ["Fleet", "Gemm", "Profiles", "Server", "distribute", "overlap", "plan", "simulate", "undistribute"]

_MODULES = {
    "plan": "cleave.api.planning",
    "simulate": "cleave.api.simulating",
    "Fleet": "cleave.api.fleet",
    "distribute": "cleave.api.training",
    "overlap": "cleave.api.training",
    "undistribute": "cleave.api.training",
    "Profiles": "cleave.core.fleet.profiles",
    "Gemm": "cleave.core.model.gemms",
    "Server": "cleave.core.cost.gemm",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'cleave' has no attribute {name!r}")
    from importlib import import_module

    try:
        value: object = getattr(import_module(_MODULES[name]), name)
    except ModuleNotFoundError as fault:
        if fault.name is None or fault.name.startswith("cleave"):
            raise
        from cleave.extras import install_command

        advice = f"install it with: {install_command('train')}"
        problem = f"cleave.{name} needs {fault.name}, which is not installed; {advice}"
        raise ModuleNotFoundError(problem, name=fault.name) from None
    globals()[name] = value  # cache it, so that this runs once per name
    return value
