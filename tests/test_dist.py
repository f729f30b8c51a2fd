"""The distributions of `make dist`: complete, and usable in an environment that has nothing else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from tests.support.commands import free_port

import cleave

ROOT = Path(__file__).parents[1]
PATIENCE_S = 600
pytestmark = pytest.mark.slow


def bare() -> dict[str, str]:
    """This process's variables without those that would let another environment in."""
    unwanted = ("CLEAVE_", "PYTHON", "VIRTUAL_ENV", "PIP_CONSTRAINT")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}
    return {**kept, "PIP_CONSTRAINT": str(ROOT / "constraints.txt"), "COLUMNS": "80"}


def run(*words: str | Path, cwd: Path, shell: bool = False) -> subprocess.CompletedProcess[str]:
    given = str(words[0]) if shell else [str(word) for word in words]
    return subprocess.run(
        given, capture_output=True, text=True, cwd=cwd, env=bare(), timeout=PATIENCE_S, check=False, shell=shell
    )


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The wheel and the source distribution."""
    target = tmp_path_factory.mktemp("dist")
    copy = target / "source"  # a build writes into its tree, and other workers may build too
    unneeded = (
        ".git",
        ".venv",
        ".hypothesis",
        "build",
        "dist",
        "*.egg-info",
        "__pycache__",
        ".*_cache",
        "node_modules",
    )
    shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(*unneeded, ".*_cache", "node_modules"))
    ended = run(sys.executable, "-m", "build", "--outdir", target, copy, cwd=target)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [wheel], [source] = target.glob("*.whl"), target.glob("*.tar.gz")
    return wheel, source


@pytest.fixture(scope="module")
def scripts(built: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of commands of a fresh environment with the wheel installed."""
    place = tmp_path_factory.mktemp("bare") / "venv"
    venv.create(place, with_pip=True)
    commands = place / ("Scripts" if os.name == "nt" else "bin")
    ended = run(commands / "python", "-m", "pip", "install", "--quiet", built[0], cwd=place)
    assert ended.returncode == 0, ended.stderr
    return commands


def test_a_device_install_has_no_torch_and_stays_small(scripts: Path, tmp_path: Path) -> None:
    listed = run(scripts / "python", "-m", "pip", "list", "--format", "freeze", cwd=tmp_path).stdout
    names = {line.partition("==")[0].lower() for line in listed.splitlines()}
    assert {"cleave-fleet", "numpy", "msgspec", "websockets"} <= names
    assert not {"torch", "transformers", "matplotlib", "cleave"} & names
    assert len(names) < 20


def test_the_bare_command_tells_its_version_samples_a_fleet_and_plans(scripts: Path, tmp_path: Path) -> None:
    assert run(scripts / "cleave", "--version", cwd=tmp_path).stdout == f"cleave {cleave.__version__}\n"
    sampled = run(scripts / "cleave", "fleet", "sample", "--mix", "laptop=3", "--out", "fleet.csv", cwd=tmp_path)
    assert sampled.returncode == 0, sampled.stderr
    planned = run(scripts / "cleave", "plan", "--gemm", "512,512,512", "--fleet", "fleet.csv", cwd=tmp_path)
    assert planned.returncode == 0, planned.stderr
    assert "lower bound" in " ".join(planned.stdout.split())
    for verb in (["runs", "list"], ["completion", "bash"]):
        ended = run(scripts / "cleave", *verb, cwd=tmp_path)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_joining_a_closed_port_gives_one_sentence_and_exit_code_2(scripts: Path, tmp_path: Path) -> None:
    address = f"ws://127.0.0.1:{free_port()}"
    ended = run(scripts / "cleave", "join", address, "--quiet", "--wait", "1", cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.startswith("cleave join: ")
    assert ended.stderr.count("\n") == 1


def test_training_without_torch_names_what_really_installs_it(scripts: Path, tmp_path: Path) -> None:
    ended = run(scripts / "cleave", "train", "--out", tmp_path / "run", cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert f"{scripts / 'python'}" in ended.stderr
    assert "'torch>=2.4'" in ended.stderr
    assert "cleave[" not in ended.stderr
    assert not (tmp_path / "run").exists()


def test_the_command_of_a_hint_installs_what_was_missing(scripts: Path, tmp_path: Path) -> None:
    run(scripts / "cleave", "fleet", "sample", "--mix", "laptop=3", "--out", "fleet.csv", cwd=tmp_path)
    plot = ["plan", "--gemm", "512,512,512", "--fleet", "fleet.csv", "--plot", "plan.png"]
    refused = run(scripts / "cleave", *plot, cwd=tmp_path)
    assert refused.returncode == 2
    hint = refused.stderr.strip().partition("; run ")[2]
    assert "matplotlib" in hint
    installed = run(hint, cwd=tmp_path, shell=True)
    assert installed.returncode == 0, installed.stderr
    drawn = run(scripts / "cleave", *plot, cwd=tmp_path)
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "plan.png").stat().st_size > 10_000


def test_the_source_distribution_installs(built: tuple[Path, Path], scripts: Path, tmp_path: Path) -> None:
    flags = ["--quiet", "--force-reinstall", "--no-deps"]
    ended = run(scripts / "python", "-m", "pip", "install", *flags, built[1], cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert run(scripts / "cleave", "--version", cwd=tmp_path).stdout == f"cleave {cleave.__version__}\n"


def test_the_wheel_has_the_package_alone(built: tuple[Path, Path]) -> None:
    with zipfile.ZipFile(built[0]) as wheel:
        names = set(wheel.namelist())
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"cleave", "cleave_fleet"}
    package = ROOT / "src" / "cleave"
    sources = {f"cleave/{path.relative_to(package)}" for kind in ("*.py", "*.csv") for path in package.rglob(kind)}
    assert sources | {"cleave/py.typed"} <= names


def test_the_source_distribution_has_what_tests_and_docs_need(built: tuple[Path, Path]) -> None:
    with tarfile.open(built[1]) as source:
        names = {name.partition("/")[2] for name in source.getnames()}
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT, check=False)
    if tracked.returncode:
        pytest.skip("not in a clone")
    files = {name for name in tracked.stdout.splitlines() if (ROOT / name).is_file()}
    assert files - names <= {".gitignore"}
    assert not any("__pycache__" in name for name in names)
