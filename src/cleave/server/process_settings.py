"""Process-wide settings for serving devices, in force while any server of the process runs.

A busy training thread would make the event loop wait 6 ms for the GIL instead of 0.2; fresh pages cost more than
copying into used ones; OpenBLAS threads would spin for each other over products as small as checks; and the usual
limit of 1,024 open files is meant for programs that use select(). The last server to stop restores everything.
"""

from __future__ import annotations

import sys
import threading
from contextlib import ExitStack

from threadpoolctl import ThreadpoolController

from cleave.descriptors import raise_descriptors
from cleave.transport.allocation import keep_freed_memory, return_freed_memory

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
        if keep_freed_memory(one_arena=True):
            _restore.callback(return_freed_memory)
        _restore.callback(raise_descriptors(_DESCRIPTORS))
        _restore.enter_context(ThreadpoolController().select(internal_api="openblas").limit(limits=1))


def release() -> None:
    """Restore the previous settings, if no other server needs these."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            _restore.close()
