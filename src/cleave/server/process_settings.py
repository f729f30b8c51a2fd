"""Process-wide settings for serving devices, in force while any server of the process runs.

A busy training thread would make the event loop wait 6 ms for the GIL instead of 0.2; fresh pages cost more than
copying into used ones; OpenBLAS threads would spin for each other over products as small as checks; and the usual
limit of 1,024 open files is meant for programs that use select(). The last server to stop restores everything.
"""

from __future__ import annotations

import math
import sys
import threading
from contextlib import ExitStack, suppress

import psutil
from threadpoolctl import ThreadpoolController

from cleave.transport.allocation import keep_freed_memory, return_freed_memory

try:
    import resource
except ImportError:  # Windows, which has no such limit
    resource = None

_SWITCH_S = 5e-4
_DESCRIPTORS = 20_000
"""Enough for as many connections as a server accepts, and files."""

_lock = threading.Lock()
_users = 0
_restore = ExitStack()


def acquire() -> None:
    """Apply the settings, unless another server already has."""
    global _users
    with _lock:
        _users += 1
        if _users > 1:
            return
        _restore.callback(sys.setswitchinterval, sys.getswitchinterval())
        sys.setswitchinterval(_SWITCH_S)
        if keep_freed_memory():
            _restore.callback(return_freed_memory)
        _raise_descriptors()
        _restore.enter_context(ThreadpoolController().select(internal_api="openblas").limit(limits=1))


def release() -> None:
    """Restore the previous settings, if no other server needs these."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            _restore.close()


def descriptors() -> tuple[float, int]:
    """Return how many descriptors this process may open, and how many it has open."""
    if resource is None:
        return math.inf, 0
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if limit == resource.RLIM_INFINITY else limit, psutil.Process().num_fds()


def _raise_descriptors() -> None:
    """Raise the limit on descriptors to what a server may need, as far as the system allows."""
    if resource is None:
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _DESCRIPTORS if hard == resource.RLIM_INFINITY else min(_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            _restore.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
