"""Files that tell people and services about the project: they load, and what they say is true."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import metadata
from pathlib import Path

import pytest
import yaml

import cleave
from cleave.cli.main import main

ROOT = Path(__file__).parents[1]
FORMS = [ROOT / ".github" / "ISSUE_TEMPLATE" / name for name in ("bug.yml", "idea.yml")]
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CODE_OF_CONDUCT.md"]
BADGE = re.compile(r"\.\./\.\./actions/workflows/([\w-]+\.yml)/badge\.svg")
"""GitHub shows README.md under /OWNER/NAME/blob/BRANCH/, so that this points into the same repository."""
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAMED_FILE = re.compile(r"`((?:[\w.-]+/)*[\w-]+\.(?:md|py|toml|txt|cff|yml))`")


def load(path: Path) -> dict[str, object]:
    loaded = yaml.safe_load(path.read_text())
    assert isinstance(loaded, dict)
    return loaded


def targets() -> set[str]:
    """The targets of the Makefile."""
    return set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def values(node: object, key: str) -> Iterator[str]:
    """Every value of a key, at any depth."""
    if isinstance(node, dict):
        for name, value in node.items():
            if name == key and isinstance(value, str):
                yield value
            yield from values(value, key)
    elif isinstance(node, list):
        for each in node:
            yield from values(each, key)


def made(text: str) -> set[str]:
    """The targets that a text asks make for."""
    commands = re.findall(r"\bmake((?: [a-z][\w-]*)+)", text)
    return {target for command in commands for target in command.split()}


def test_the_workflow_runs_commands_that_exist() -> None:
    commands = list(values(load(ROOT / ".github" / "workflows" / "ci.yml"), "run"))
    assert ".ci/run" in commands
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    asked = made("\n".join([*commands, (ROOT / ".ci" / "run").read_text()]))
    assert {"check", "test-all", "docs", "dist"} <= asked
    assert asked <= targets()


def test_the_workflow_uses_a_python_that_the_package_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {name.rpartition(" ")[2] for name in project["classifiers"] if re.search(r":: 3\.\d+$", name)}
    assert set(values(load(ROOT / ".github" / "workflows" / "ci.yml"), "python-version")) == declared


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_an_issue_form_has_what_github_demands(path: Path) -> None:
    form = load(path)
    assert {"name", "description", "body"} <= form.keys()
    body = form["body"]
    assert isinstance(body, list)
    fields = [each for each in body if each["type"] != "markdown"]
    assert fields
    assert len({each["id"] for each in fields}) == len(fields)
    assert all(each["attributes"]["label"] for each in fields)
    assert all(each["attributes"]["value"] for each in body if each["type"] == "markdown")


def test_issues_may_be_blank() -> None:
    assert load(ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml") == {"blank_issues_enabled": True}


def test_the_version_is_the_same_everywhere(capsys: pytest.CaptureFixture[str]) -> None:
    assert load(ROOT / "CITATION.cff")["version"] == cleave.__version__
    assert metadata("cleave-fleet")["Version"] == cleave.__version__
    assert "version" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dynamic"]
    changes = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## (Unreleased|\[?{re.escape(cleave.__version__)}\b)", changes, re.MULTILINE)
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"cleave {cleave.__version__}\n"


def test_the_citation_names_its_source_and_license() -> None:
    citation = load(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0"
    assert citation["license"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["license"]
    assert "https://arxiv.org/abs/2512.22142" in values(citation, "url")


def test_the_package_promises_no_phones_and_names_no_made_up_address() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "phone" not in project["description"]
    assert "urls" not in project
    assert all("@" not in (ROOT / page).read_text() for page in ("SECURITY.md", "CODE_OF_CONDUCT.md"))


def test_every_required_distribution_is_pinned_for_development() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    required = [*project["dependencies"], *extras["train"], *extras["plot"], *extras["docs"], *extras["dev"]]
    names = {re.match(r"[\w.-]+", each)[0].lower().replace("_", "-") for each in required}  # type: ignore[index]
    assert names - pins == {"cleave-fleet"}


@pytest.mark.parametrize("page", PAGES)
def test_links_badges_and_file_names_point_at_files_that_exist(page: str) -> None:
    text = (ROOT / page).read_text()
    for target in LINK.findall(text):
        if target.startswith("#"):
            continue
        if badge := BADGE.fullmatch(target):
            assert (ROOT / ".github" / "workflows" / badge[1]).is_file(), target
            continue
        if target.startswith("https://"):
            workflow = re.search(r"/workflows/([\w.-]+\.yml)", target)
            assert workflow is None or (ROOT / ".github" / "workflows" / workflow[1]).is_file()
            continue
        assert (ROOT / target.partition("#")[0]).exists(), target
    for name in NAMED_FILE.findall(text):
        assert (ROOT / name).is_file() or any((ROOT / "src").rglob(name)), name


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "SECURITY.md", ".github/PULL_REQUEST_TEMPLATE.md"])
def test_commands_in_community_files_exist(page: str) -> None:
    commands = "\n".join(re.findall(r"`([^`]+)`", (ROOT / page).read_text()))
    assert made(commands)
    assert made(commands) <= targets()
