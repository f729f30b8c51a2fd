"""The scripts of the pages: their types, their own tests, and the kernel that they load."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
DEVICE = HERE.parents[1] / "src" / "cleave" / "web" / "device"
GUARD_S = 600

needs_node = pytest.mark.skipif(shutil.which("node") is None, reason="node is not installed")


def run(*command: str, folder: Path = HERE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=GUARD_S, check=False)


@needs_node
@pytest.mark.parametrize("file", sorted(path.name for path in HERE.glob("*.test.mjs")))
def test_scripts_pass_their_own_tests(file: str) -> None:
    ended = run("node", "--test", file)
    assert ended.returncode == 0, ended.stdout[-4000:]


@pytest.mark.skipif(
    shutil.which("clang-16") is None, reason="clang-16 is not installed: apt-get install clang-16 lld-16"
)
def test_the_committed_kernel_is_what_its_source_compiles_to(tmp_path: Path) -> None:
    built = run("./build-kernel", str(tmp_path), folder=DEVICE)
    assert built.returncode == 0, built.stderr
    for name in ("kernel.wasm", "kernel-relaxed.wasm"):
        assert (tmp_path / name).read_bytes() == (DEVICE / name).read_bytes(), (
            f"{name} is older than kernel.c: make wasm"
        )
