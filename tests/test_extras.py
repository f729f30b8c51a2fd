"""Hints for missing parts: what they install, for whichever distribution and interpreter this is."""

from __future__ import annotations

import importlib
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cleave.extras import Extra, install_command

Install = Callable[..., None]
REQUIRES = (
    "numpy>=1.26",
    "torch>=2.4; extra == 'train'",
    "uvloop; sys_platform == 'no-such-system' and extra == 'train'",
    "frames[fast]>=1,<3; extra == 'train'",
    "pictures; extra == 'plot'",
    "a-fork-of-cleave[plot,train]; extra == 'dev'",
    "linter; python_version > '3' and extra == 'dev'",
)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """An environment with nothing but what the returned function installs; first of all Cleave, by another name."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def add(name: str, version: str, requires: tuple[str, ...] = (), scripts: str = "") -> None:
        folder = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {each}" for each in requires)]
        (folder / "METADATA").write_text("Metadata-Version: 2.1\n" + "\n".join(lines) + "\n")
        (folder / "entry_points.txt").write_text(f"[console_scripts]\n{scripts}\n")
        importlib.invalidate_caches()

    (tmp_path / "pip").mkdir()
    (tmp_path / "pip" / "__init__.py").touch()
    add("cleave", "9.0", ("malware; extra == 'train'",), scripts="cleave = cleave.main:run")  # the one on PyPI
    add("a-fork-of-cleave", "1.0", REQUIRES, scripts="cleave = cleave.cli.main:main")
    return add


def installed_by(extra: Extra, *only: str) -> list[str]:
    """The requirements that the command installs."""
    words = shlex.split(install_command(extra, *only))
    assert words[1:4] == ["-m", "pip", "install"]
    return words[4:]


def test_a_hint_lists_the_requirements_of_the_extra_that_apply_here(install: Install) -> None:
    assert installed_by("train") == ["torch>=2.4", "frames[fast]<3,>=1"]
    assert installed_by("plot") == ["pictures"]


def test_a_hint_leaves_out_what_is_installed(install: Install) -> None:
    install("Torch", "2.13.0+cpu")
    assert installed_by("train") == ["frames[fast]<3,>=1"]


def test_what_is_too_old_or_lacks_an_extra_of_its_own_is_missing(install: Install) -> None:
    install("torch", "2.3")
    install("frames", "2.0", ("speed; extra == 'fast'",))
    assert installed_by("train") == ["torch>=2.4", "frames[fast]<3,>=1"]
    install("speed", "0.1")
    assert installed_by("train") == ["torch>=2.4"]


def test_a_hint_follows_extras_that_refer_to_others(install: Install) -> None:
    assert installed_by("dev") == ["pictures", "torch>=2.4", "frames[fast]<3,>=1", "linter"]


def test_a_hint_can_name_a_single_requirement(install: Install) -> None:
    assert installed_by("train", "Torch") == ["torch>=2.4"]


def test_a_part_that_is_there_and_broken_is_upgraded(install: Install) -> None:
    install("pictures", "1.0")
    assert installed_by("plot") == ["--upgrade", "pictures"]


def test_a_hint_for_a_source_tree_installs_that_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    source = shlex.split(install_command("train"))[-1]
    assert source.endswith("[train]")
    assert (Path(source.removesuffix("[train]")) / "pyproject.toml").is_file()


def test_a_hint_installs_into_this_interpreter(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert shlex.split(install_command("plot"))[0] == sys.executable
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))
    short = shlex.split(install_command("plot"))[0]
    assert short in {"python", "python3"}
    assert shutil.which(short) == sys.executable


def test_a_hint_works_in_an_environment_without_pip(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.rmtree(tmp_path / "pip")
    importlib.invalidate_caches()
    monkeypatch.delitem(sys.modules, "pip", raising=False)
    monkeypatch.setenv("PATH", "")
    assert f"{shlex.quote(sys.executable)} -m ensurepip && " in install_command("plot")
    (tmp_path / "uv").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shlex.split(install_command("plot")) == ["uv", "pip", "install", "--python", sys.executable, "pictures"]


@pytest.mark.parametrize("extra", ["train", "plot", "docs", "dev"])
def test_this_distribution_declares_every_extra_that_hints_name(extra: Extra) -> None:
    """All of them are installed for tests, so the command upgrades them."""
    names = [Requirement(text).name for text in installed_by(extra)[1:]]
    assert names
    assert not {"cleave", "cleave-fleet"} & set(names)
