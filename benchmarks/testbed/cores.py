"""Reserve processor time for every place of a testbed: a control group with a quota each.

Without quotas all places share this machine's cores, so that a step that keeps eight devices busy measures the two
cores below them. With quotas every place is a slower machine of its own. Together they may not exceed the cores there
are; then nobody waits for anybody else's computing. `removal.py` removes the groups.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Final

from benchmarks.testbed.removal import GROUPS, groups_root

_PERIOD_US: Final = 10_000
"""A place that has used up its quota waits for the next period: short ones make a smooth slow processor."""
_LEAST_US: Final = 1_000
"""The kernel takes no smaller quota."""


def reserve(group: str, cores: float) -> Path:
    """Make a control group that may use so many cores; return the file that takes the ids of its processes."""
    root = groups_root()
    path = root / group
    quota_us = max(_LEAST_US, round(cores * _PERIOD_US))
    path.mkdir()
    if root == GROUPS:
        (path / "cpu.max").write_text(f"{quota_us} {_PERIOD_US}")
    else:
        (path / "cpu.cfs_period_us").write_text(str(_PERIOD_US))
        (path / "cpu.cfs_quota_us").write_text(str(quota_us))
    return path / "cgroup.procs"


def why_not() -> str:
    """Say why quotas cannot be had here; empty if they can."""
    root = groups_root()
    if not os.access(root, os.W_OK):
        return f"{root} cannot be written to"
    if root == GROUPS:
        control = root / "cgroup.subtree_control"
        with suppress(OSError):
            control.write_text("+cpu")
        if not control.exists() or "cpu" not in control.read_text().split():
            return f"{control} does not offer the cpu controller"
    return ""
