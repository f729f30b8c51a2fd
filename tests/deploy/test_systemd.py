"""The units in deploy/systemd: systemd accepts them, and their commands start a run, join it and resume it."""

from __future__ import annotations

import re
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deploy.conftest import DEPLOY, Start
from tests.support.commands import PATIENCE_S, free_port, joined, last_step, wait_until

from cleave.events import Resumed, read_events

UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
CLEAVE = Path(sys.executable).with_name("cleave")


def rendered(unit: Path, directory: Path) -> str:
    """The unit with directories of this test in place of the system's."""
    text = unit.read_text()
    for old, new in (
        ("/opt/cleave/bin/cleave", str(CLEAVE)),
        ("/var/lib/cleave", str(directory / "var")),
        ("/etc/cleave", str(directory / "etc")),
    ):
        text = text.replace(old, new)
    return text


def values(text: str, key: str) -> list[str]:
    return re.findall(rf"^{key}=(.*)$", text, flags=re.MULTILINE)


def command_of(text: str) -> list[str]:
    """Split ExecStart as systemd does: quotes group words, and $$ is a dollar sign."""
    (line,) = values(text, "ExecStart")
    return shlex.split(line.replace("$$", "$"))


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_accepts_the_unit(unit: Path, tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze") or pytest.skip(
        "there is no systemd-analyze here: apt-get install systemd"
    )
    copy = tmp_path / unit.name
    copy.write_text(rendered(unit, tmp_path))
    checked = subprocess.run([analyze, "verify", str(copy)], capture_output=True, text=True, check=False)
    complaints = [line for line in checked.stderr.splitlines() if unit.name in line or str(copy) in line]
    assert (checked.returncode, complaints) == (0, []), checked.stderr


@pytest.mark.slow
def test_the_server_unit_resumes_its_run_and_the_device_unit_rejoins_it(
    tmp_path: Path, start: Start, texts: Path
) -> None:
    etc, out, port = tmp_path / "etc", tmp_path / "var" / "run", free_port()
    etc.mkdir()
    (tmp_path / "var").mkdir()
    settings = (DEPLOY / "run.toml").read_text()
    for old, new in (
        ('"opt-125m"', '"tiny-llama"'),
        ('"/srv/cleave/texts"', f'"{texts}"'),
        ("0.0.0.0:7077", f"0.0.0.0:{port}"),
    ):
        assert old in settings
        settings = settings.replace(old, new)
    (etc / "run.toml").write_text(f"{settings}\nsequence = 32\nbatch = 2\neval_every = 0\nsample = 0\n")
    server_unit, device_unit = (
        rendered(DEPLOY / "systemd" / f"cleave-{end}.service", tmp_path) for end in ("server", "device")
    )
    variables = dict(line.split("=", 1) for line in values(server_unit, "Environment"))
    interrupt = signal.Signals[values(server_unit, "KillSignal")[0]]
    printed = tmp_path / "server.out"

    server = start("server", command_of(server_unit), variables)
    wait_until(lambda: re.search(r"cleave join '\S+#\S+'", printed.read_text()), server)
    address = re.findall(r"cleave join '(\S+#\S+)'", printed.read_text())[-1]
    device = start("device", command_of(device_unit), {"CLEAVE_SERVER": address})
    wait_until(lambda: last_step(out) >= 2, server)
    server.send_signal(interrupt)
    assert server.wait(PATIENCE_S) == 0, printed.read_text()

    reached = last_step(out)
    server = start("server", command_of(server_unit), variables)
    wait_until(lambda: last_step(out) >= reached + 2, server)
    assert any(isinstance(event, Resumed) for event in read_events(out / "events.jsonl"))
    assert len(set(joined(out))) == 1, "the device came back by itself, with its old token"
    device.send_signal(signal.Signals[values(device_unit, "KillSignal")[0]])
    assert device.wait(PATIENCE_S) == 0
    server.send_signal(interrupt)
    allowed = {0, *(int(code) for code in values(server_unit, "SuccessExitStatus"))}
    assert server.wait(PATIENCE_S) in allowed, printed.read_text()
