"""Memory of this machine, as far as this process may use it: a container's limit counts too."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class _Container:
    """Files of a cgroup: its limit, its use, and statistics with the cache in it, of which shared memory must stay."""

    limit: Path
    used: Path
    statistics: Path
    cache: str
    shared: str

    def read(self) -> tuple[int, int] | None:
        """Return the limit and the bytes in use that cannot be reclaimed; None if there is no limit."""
        try:
            limit, used = int(self.limit.read_text()), int(self.used.read_text())
            found = dict(line.split() for line in self.statistics.read_text().splitlines())
            return limit, used - int(found.get(self.cache, 0)) + int(found.get(self.shared, 0))
        except (OSError, ValueError):  # there is no such file, or it says "max"
            return None


_V2, _V1 = Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/memory")
_CONTAINERS = (
    _Container(_V2 / "memory.max", _V2 / "memory.current", _V2 / "memory.stat", "file", "shmem"),
    _Container(
        _V1 / "memory.limit_in_bytes", _V1 / "memory.usage_in_bytes", _V1 / "memory.stat", "total_cache", "total_shmem"
    ),
)


def total_bytes() -> int:
    """Memory of the machine, or of the container around this process."""
    limits = [found[0] for container in _CONTAINERS if (found := container.read())]
    return min([psutil.virtual_memory().total, *limits])


def available_bytes() -> int:
    """Memory that this process can still take without swapping."""
    free = [found[0] - found[1] for container in _CONTAINERS if (found := container.read())]
    return min([psutil.virtual_memory().available, *free])
