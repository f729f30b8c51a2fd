# pyright: standard
"""Change a module's behavior in place by swapping its class for a subclass.

Parameters, state_dict, hooks and names stay, and assigning the class back undoes it. A mixin is put before the module's
own class; this module does not know what mixins do.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import nn


class Swapped:
    """Base of mixins that are put before a module's own class."""


def original(module: nn.Module) -> type:
    """Return the class a module had before any swap."""
    return next(kind for kind in type(module).__mro__ if not issubclass(kind, Swapped))


def swap(module: nn.Module, mixin: type[Swapped]) -> None:
    module.__class__ = _disguised(mixin, original(module))


def restore(module: nn.Module) -> None:
    module.__class__ = original(module)


@functools.cache
def _disguised(mixin: type[Swapped], kind: type) -> type:
    """Make a subclass under the original's name, which save_pretrained, Trainer and others rely on."""
    body: dict[str, Any] = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    if "forward" in mixin.__dict__:
        mixed: Any = mixin
        plain = kind.forward  # type: ignore[attr-defined]

        @functools.wraps(plain)  # Trainer and generate inspect the signature
        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            # accelerate stores this function on the model, where it outlives the swap
            return mixed.forward(self, *args, **kwargs) if isinstance(self, mixed) else plain(self, *args, **kwargs)

        body["forward"] = forward
    return type(kind.__name__, (mixin, kind), body)
