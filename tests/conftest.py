"""Settings, markers and fixtures shared by all tests.

No test depends on speed, so hypothesis has no deadline. Its examples are the same in every run, so a CI result depends
on the commit alone; `pytest --hypothesis-seed=random` explores further.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from tests.support.grids import covering_sample, is_exhaustive

# Workers, servers and devices share the cores, and idle BLAS threads spin. BLAS reads these when it is loaded.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
    os.environ.setdefault(_variable, "1")

settings.register_profile("unhurried", deadline=None, derandomize=True)
settings.load_profile("unhurried")


@pytest.hookimpl(tryfirst=True)  # before `-m` deselects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only `make test-exhaustive` runs, such as cases of a `grid` outside its covering sample."""
    _mark_cases_outside_samples(items)
    if is_exhaustive() or any("[" in argument for argument in config.args):  # a case was asked for by its name
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]


def _mark_cases_outside_samples(items: list[pytest.Item]) -> None:
    grids: dict[tuple[str, int], list[pytest.Function]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("grid")
        if mark is not None and isinstance(item, pytest.Function):
            grids[item.nodeid.partition("[")[0], mark.kwargs.get("strength", 2)].append(item)
    for (_, strength), functions in grids.items():
        sample = set(covering_sample([_parameters(function) for function in functions], strength))
        for index, function in enumerate(functions):
            if index not in sample:
                function.add_marker(pytest.mark.exhaustive)


def _parameters(function: pytest.Function) -> dict[str, Hashable]:
    """Parameter values of a case, with the id in place of an unhashable value."""
    values = function.callspec.params.items()
    return {name: value if isinstance(value, Hashable) else id(value) for name, value in values}


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """Run every test as if from a terminal, where SIGINT interrupts.

    Under nohup and in the background of a script, a process starts with SIGINT ignored and passes that on to its
    children. Cleave respects it, so tests that interrupt a run would wait forever.
    """
    inherited = signal.getsignal(signal.SIGINT)
    if inherited is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, inherited)


@pytest.fixture
def limit_files() -> Iterator[Callable[[int | None], None]]:
    """Limit the size of any file from now on, or lift the limit with None: writes come up short, then fail.

    Threads and child processes of the test share the limit.
    """
    resource = pytest.importorskip("resource")
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int | None) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual if size is None else (size, usual[1]))

    yield limit
    limit(None)


@pytest.fixture
def mount_disk(tmp_path: Path) -> Iterator[Callable[[int], Path]]:
    """Mount a disk of a given size in bytes, or skip the test where mounting is not possible."""
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
