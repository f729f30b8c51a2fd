"""Settings and fixtures of every test.

No test depends on speed, so hypothesis has no deadline. Examples are the same in every run, so that CI is as green as
the commit; `pytest --hypothesis-seed=random` looks further.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("unhurried", deadline=None, derandomize=True)
settings.load_profile("unhurried")


@pytest.fixture
def limit_files() -> Iterator[Callable[[int | None], None]]:
    """Call it with a size that no file may exceed from now on, or None: such a disk takes a part of a write, then none.

    Threads and processes of the test share the limit.
    """
    resource = pytest.importorskip("resource")
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual if size is None else (size, usual[1]))

    yield limit
    limit(None)


@pytest.fixture
def mount_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Makes a disk of so many bytes, where this process may mount one."""
    directory = tmp_path / "disk"

    def mount(size: int) -> Path:
        directory.mkdir()
        command = shutil.which("mount") or pytest.skip("there is no mount here")
        flags = ["-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)]
        if subprocess.run([command, *flags], capture_output=True, check=False).returncode:
            pytest.skip("mounting is not allowed here")
        return directory

    yield mount
    if directory.is_mount():
        subprocess.run(["umount", str(directory)], check=True)
