# pyright: standard
"""One pair of hooks on every optimizer's step, for whoever needs to know of it.

torch iterates over its hooks while it calls them, and an object that removed its own when it is collected would change
them just then. So hooks are registered once and stay, and pass every step on to the watchers that still live.
"""

from __future__ import annotations

import weakref
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Watcher(Protocol):
    def stepping(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None: ...

    def stepped(self, optimizer: Optimizer) -> None: ...


_watchers: weakref.WeakSet[Any] = weakref.WeakSet()


def watch_steps(watcher: Watcher) -> None:
    """Call a watcher before and after the steps of all optimizers, as long as it lives."""
    _watchers.add(watcher)


def _stepping(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for watcher in list(_watchers):
        watcher.stepping(optimizer, args, kwargs)


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for watcher in list(_watchers):
        watcher.stepped(optimizer)


register_optimizer_step_pre_hook(_stepping)
register_optimizer_step_post_hook(_stepped)
