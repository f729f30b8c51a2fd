"""The Dockerfiles without an engine: what they copy exists, and what they install and start works in a bare venv.

`docker build --check` reads them where there is a Docker client with its engine. Making users and layers is left out.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
from tests.deploy.conftest import DEPLOY, Start
from tests.docs.pages import ROOT
from tests.support.commands import PATIENCE_S, free_port, joined, last_step, wait_until

pytestmark = pytest.mark.slow
Instruction = tuple[str, str]


def instructions(dockerfile: Path) -> list[Instruction]:
    text = re.sub(r"^\s*#.*\n", "", dockerfile.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines() if line.strip())
    ]


def values(parsed: list[Instruction], word: str) -> list[str]:
    return [rest for name, rest in parsed if name == word]


def built(dockerfile: Path, directory: Path, *, shared: bool) -> Path:
    """Carry out COPY and `RUN pip` in a directory and a new venv; return the venv's programs.

    `shared` lends the venv all packages of this one, so that nothing large is downloaded; pip still resolves and checks
    every requirement.
    """
    parsed = instructions(dockerfile)
    assert parsed[0] == ("FROM", "python:3.12-slim")
    for copied in values(parsed, "COPY"):
        *sources, target = copied.split()
        place = directory / target.lstrip("/")
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, place)
    venv.create(directory / "venv", with_pip=True)
    programs = directory / "venv" / "bin"
    if shared:
        (path,) = (directory / "venv" / "lib").glob("python*/site-packages")
        (path / "shared.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    installs = [run for run in values(parsed, "RUN") if run.startswith("pip install")]
    assert installs
    for install in installs:
        line = re.sub(r"\$\{?PIP_OPTIONS\}?", "", install).replace("/src", str(directory / "src"))
        options = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        words = [str(programs / "python"), "-m", *shlex.split(line)]
        done = subprocess.run(words, env=options, capture_output=True, text=True, timeout=PATIENCE_S * 4, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    return programs


def words_of(parsed: list[Instruction], instruction: str) -> list[str]:
    (line,) = values(parsed, instruction)
    return list(json.loads(line))


def test_the_images_install_and_start_a_server_and_a_device_that_joins_it(
    tmp_path: Path, start: Start, texts: Path
) -> None:
    if sys.platform == "win32":
        pytest.skip("images are for Linux")
    images = {}
    for end in ("server", "device"):
        (tmp_path / end).mkdir()
        images[end] = built(DEPLOY / f"Dockerfile.{end}", tmp_path / end, shared=end == "server")
    assert subprocess.run(
        [images["device"] / "python", "-c", "import torch"], capture_output=True, check=False
    ).returncode

    port, out = free_port(), tmp_path / "run"
    parsed = instructions(DEPLOY / "Dockerfile.server")
    (entry,), arguments = words_of(parsed, "ENTRYPOINT"), words_of(parsed, "CMD")
    arguments = [word.replace("7077", str(port)) for word in arguments]
    flags = ["--model", "tiny-llama", "--data", str(texts), "--sequence", "32", "--batch", "2", "--steps", "3"]
    server = start("server", [str(images["server"] / entry), *arguments, *flags, "--out", str(out)])
    printed = tmp_path / "server.out"
    wait_until(lambda: re.search(r"cleave join '\S+#\S+'", printed.read_text()), server)
    address = re.findall(r"cleave join '(\S+#\S+)'", printed.read_text())[-1]

    entry, *verb = words_of(instructions(DEPLOY / "Dockerfile.device"), "ENTRYPOINT")
    limits = ["--memory", "1GB", "--threads", "1", "--name", "container"]
    device = start("device", [str(images["device"] / entry), *verb, address, *limits])
    assert server.wait(PATIENCE_S) == 0, printed.read_text()
    assert device.wait(PATIENCE_S) == 0, (tmp_path / "device.out").read_text()
    assert joined(out) == ["container"]
    assert last_step(out) == 3
