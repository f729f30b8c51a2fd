"""Commands that do not outlive their test, and the settings of a small run that ends when the test says so."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
from tests.support.commands import Process, command, environment, piped_to

Start = Callable[..., Process]
# During warm-up, the learning rate does not depend on the total number of steps, so tests may decide that later.
_SETTINGS = """
model = "tiny-llama"
data = '{data}'
sequence = 32
batch = 2
steps = 100_000
warmup_steps = 100_000
learning_rate = 20.0
eval_every = 0
sample = 0
"""


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start a command under a name; its output goes to the file `NAME.out`, through a pipe if `piped`."""
    started: list[Process] = []

    def begin(name: str, *arguments: str, piped: bool = False) -> Process:
        with (tmp_path / f"{name}.out").open("ab") as kept, piped_to(kept) if piped else nullcontext() as pipe:
            output = kept if pipe is None else pipe.end
            process = subprocess.Popen(command(*arguments), env=environment(tmp_path), stdout=output, stderr=output)
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


@pytest.fixture
def settings(tmp_path: Path, text: Path) -> str:
    path = tmp_path / "run.toml"
    path.write_text(_SETTINGS.format(data=text))
    return str(path)
