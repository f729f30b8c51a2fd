"""How many descriptors (open files and connections) this process may have, and how to be allowed more."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

import psutil

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None


def descriptors() -> tuple[float, int]:
    """Return how many descriptors this process may open, and how many it has open."""
    if resource is None:
        return math.inf, 0
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if limit == resource.RLIM_INFINITY else limit, psutil.Process().num_fds()


def raise_descriptors(wanted: int) -> Callable[[], None]:
    """Raise the limit to `wanted`, as far as the system allows; return a function that restores it."""
    if resource is None:
        return _nothing
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= allowed:
        return _nothing
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        set_limits, name = resource.setrlimit, resource.RLIMIT_NOFILE
        return lambda: set_limits(name, (soft, hard))
    return _nothing


def _nothing() -> None:
    pass
