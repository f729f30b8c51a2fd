"""Freed memory is kept for the next message: fresh pages cost more than copying into used ones (docs/log.md)."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # names of glibc's malloc.h
_LARGEST_KEPT_BYTES = 256 << 20


def keep_freed_memory(*, one_arena: bool = False) -> bool:
    """Have malloc reuse large buffers instead of returning them; False where malloc has no such setting.

    Only the first arena keeps what it has, so a process of few threads should have no other.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    if one_arena:
        mallopt(_ARENA_MAX, 1)
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES) and mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_KEPT_BYTES))
