"""Freed memory is kept for the next message: fresh pages cost more than copying into used ones (docs/log.md)."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # names of glibc's malloc.h
_LARGEST_KEPT_BYTES = 256 << 20


def keep_freed_memory() -> bool:
    """Have malloc reuse large buffers instead of returning them; False where malloc has no such setting."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # another C library
        return False
    return bool(mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES) and mallopt(_TRIM_THRESHOLD, 2 * _LARGEST_KEPT_BYTES))
