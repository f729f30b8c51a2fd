"""Commands that install what an optional part of Cleave needs.

The requirements are read from the metadata of the installed distribution, found by its `cleave` command and not by
name. So a hint is right for a clone, a wheel or a fork, and never names a stranger's package on PyPI.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from importlib.metadata import Distribution, PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Final, Literal

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

Extra = Literal["train", "plot", "docs", "dev"]
_COMMAND: Final = ("cleave", "cleave.cli.main:main")


def install_command(extra: Extra, *only: str) -> str:
    """Return a shell command that installs the missing requirements of an extra into this Python.

    `only` restricts it to some of them: `install_command("train", "pyarrow")`. If none is missing although an import
    failed, one of them is broken, and the command upgrades them.
    """
    found = _own_distribution()
    if found is None:  # run from a source tree that was never installed
        return _pip_install([f"{Path(__file__).parents[2]}[{extra}]"])
    chosen = {canonicalize_name(name) for name in only}
    requirements = [
        requirement
        for requirement in _requirements(found, extra)
        if not chosen or canonicalize_name(requirement.name) in chosen
    ]
    missing = [requirement for requirement in requirements if not _is_installed(requirement)]
    if missing:
        return _pip_install([_text(requirement) for requirement in missing])
    return _pip_install(["--upgrade", *(_text(requirement) for requirement in requirements)])


# --------------------------------------------------------------------------------------------------- requirements


def _own_distribution() -> Distribution | None:
    found = (entry.dist for entry in entry_points(group="console_scripts") if (entry.name, entry.value) == _COMMAND)
    return next((each for each in found if each is not None), None)


def _requirements(found: Distribution, extra: str) -> list[Requirement]:
    """List the requirements of an extra that apply to this machine, following extras that refer to others."""
    applying: list[Requirement] = []
    for text in found.requires or ():
        try:
            requirement = Requirement(text)
        except InvalidRequirement:  # of a distribution with old metadata
            continue
        if requirement.marker is None or not _applies(requirement, extra):
            continue
        if canonicalize_name(requirement.name) == canonicalize_name(found.name):
            applying += [each for name in sorted(requirement.extras) for each in _requirements(found, name)]
        else:
            applying.append(requirement)
    return applying


def _applies(requirement: Requirement, extra: str) -> bool:
    """Whether this machine needs a requirement because of the extra, and not anyway."""
    assert requirement.marker is not None
    return requirement.marker.evaluate({"extra": extra}) and not requirement.marker.evaluate({"extra": ""})


def _is_installed(requirement: Requirement) -> bool:
    try:
        found = distribution(requirement.name)
    except PackageNotFoundError:
        return False
    return requirement.specifier.contains(found.version, prereleases=True) and all(
        _is_installed(needed) for extra in requirement.extras for needed in _requirements(found, extra)
    )


def _text(requirement: Requirement) -> str:
    """Write a requirement without its marker, which was evaluated already."""
    extras = f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""
    source = f" @ {requirement.url}" if requirement.url else str(requirement.specifier)
    return f"{requirement.name}{extras}{source}"


# -------------------------------------------------------------------------------------------------------- command


def _pip_install(arguments: list[str]) -> str:
    python = _python()
    if find_spec("pip") is None and shutil.which("uv"):  # environments made by uv have no pip
        words, prefix = ["uv", "pip", "install", "--python", python], ""
    else:
        words = [python, "-m", "pip", "install"]
        prefix = f"{_quoted(python)} -m ensurepip && " if find_spec("pip") is None else ""
    return prefix + " ".join(_quoted(word) for word in (*words, *arguments))


def _python() -> str:
    """Return the shortest name of this interpreter: `python`, if that is what the shell would start."""
    for name in ("python", "python3"):
        if shutil.which(name) == sys.executable:
            return name
    return sys.executable


def _quoted(word: str) -> str:
    if os.name != "nt":
        return shlex.quote(word)
    return word if all(character.isalnum() or character in "-_.:\\/" for character in word) else f'"{word}"'
