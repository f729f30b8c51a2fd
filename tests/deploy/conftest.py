"""A server and devices for the files in deploy/: started as those files say, stopped by id."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from tests.docs.pages import ROOT
from tests.support.commands import Process, environment, piped_to

DEPLOY = ROOT / "deploy"
Start = Callable[..., Process]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a command line under a name; its output goes through a pipe to the file `NAME.out`."""
    started: list[Process] = []

    def begin(name: str, words: Sequence[str], variables: Mapping[str, str] | None = None) -> Process:
        with (tmp_path / f"{name}.out").open("ab") as kept, piped_to(kept) as pipe:
            process = subprocess.Popen(
                words,
                cwd=tmp_path,
                env={**environment(tmp_path), **(variables or {})},
                stdin=subprocess.DEVNULL,
                stdout=pipe.end,
                stderr=pipe.end,
            )
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    directory = tmp_path / "texts"
    directory.mkdir()
    (directory / "fox.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return directory
