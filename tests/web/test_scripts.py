"""The kernel that the pages load; `make check` runs the tests of their scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DEVICE = HERE.parents[1] / "src" / "cleave" / "web" / "device"
GUARD_S = 600


def run(*command: str, folder: Path = HERE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=GUARD_S, check=False)


def test_the_committed_kernel_is_what_its_source_compiles_to(tmp_path: Path) -> None:
    if shutil.which("clang-16") is None:
        assert not os.environ.get("CI"), "CI must have clang-16: see .ci/packages"
        pytest.skip("clang-16 is not installed: apt-get install clang-16 lld-16")
    built = run("./build-kernel", str(tmp_path), folder=DEVICE)
    assert built.returncode == 0, built.stderr
    for name in ("kernel.wasm", "kernel-relaxed.wasm"):
        assert (tmp_path / name).read_bytes() == (DEVICE / name).read_bytes(), (
            f"{name} is older than kernel.c: make wasm"
        )
