"""Keep freed memory for the next message: fresh pages cost more than copying into used ones (docs/log.md)."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # mallopt parameters, from glibc's malloc.h
_LARGEST_KEPT_BYTES = 256 << 20
_DEFAULT_BYTES = 128 << 10
"""Default of both thresholds in glibc."""


def keep_freed_memory(*, one_arena: bool = False) -> bool:
    """Have malloc reuse large buffers instead of returning them to the system; return False if it cannot.

    The setting only works for the main arena: `one_arena` has threads that start from now on share it.
    """
    mallopt = _mallopt()
    if mallopt is None:
        return False
    if one_arena:
        mallopt(_ARENA_MAX, 1)
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES) and mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_KEPT_BYTES))


def return_freed_memory() -> None:
    """Have malloc return large buffers again, as it does by default."""
    mallopt = _mallopt()
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _DEFAULT_BYTES)
        mallopt(_TRIM_THRESHOLD, _DEFAULT_BYTES)
        mallopt(_ARENA_MAX, 0)  # as many as suit the number of cores


def give_back_freed_memory() -> None:
    """Return to the system what is free now, and go on as before."""
    trim = _glibc("malloc_trim")
    if trim is not None:
        trim(0)


def _mallopt() -> Callable[[int, int], int] | None:
    return _glibc("mallopt")


def _glibc(name: str) -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        return getattr(ctypes.CDLL(None), name)
    except (AttributeError, OSError):  # not glibc
        return None
