# pyright: standard
"""Other behaviour for a module without another module: its class becomes a subclass of what it was.

Parameters, state_dict, hooks and names stay, and assigning the class back undoes it. A mixin comes before the module's
own class; what it does is its own affair.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn


class Swapped:
    """Mixed in before a module's own class."""


def original(module: nn.Module) -> type:
    """The class a module had before any swap."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, Swapped))


def swap(module: nn.Module, mixin: type[Swapped]) -> None:
    module.__class__ = _disguised(mixin, original(module))


def restore(module: nn.Module) -> None:
    module.__class__ = original(module)


@functools.cache
def _disguised(mixin: type[Swapped], kind: type) -> type:
    """A subclass that goes by the name of its original, which save_pretrained, Trainer and others look at."""
    body: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    if "forward" in mixin.__dict__:
        mixed: Any = mixin
        plain = kind.forward  # type: ignore[attr-defined]

        @functools.wraps(plain)  # Trainer and generate read its signature
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # accelerate keeps this very function as an attribute of the model, where it outlives the swap
            return mixed.forward(self, *args, **kwargs) if isinstance(self, mixed) else plain(self, *args, **kwargs)

        body["forward"] = forward
    return type(kind.__name__, (mixin, kind), body)
