"""Laws of the background service: secrets stay private, failure leaves nothing behind, each system has its own form."""

from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.commands import command, environment

from cleave.device import background
from cleave.device.background import Service, service_of
from cleave.errors import InputError

SECRET = "192.168.1.20:7077#TopSecret"
COMMAND = ("/opt/my apps/python", "-m", "cleave", "join", "--name=100% $HOME", "--memory=2000000000")

posix = pytest.mark.skipif(os.name != "posix", reason="needs a shell and file modes")


def service(tmp_path: Path, platform: str = "linux") -> Service:
    variables = {"CLEAVE_SERVER": SECRET, "CLEAVE_HOME": str(tmp_path / "cleave")}
    return service_of(platform, tmp_path / "home", tmp_path / "cleave", COMMAND, variables, user=501)


def tool(directory: Path, name: str, code: int = 0) -> Path:
    """Put a stand-in for a system's tool on the path, and return the file with what it was called with."""
    directory.mkdir(exist_ok=True)
    calls = directory / f"{name}.calls"
    file = directory / name
    file.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(calls))}\necho no bus here >&2\nexit {code}\n')
    file.chmod(0o755)
    return calls


@posix
@pytest.mark.parametrize(("platform", "name"), [("linux", "systemctl"), ("darwin", "launchctl"), ("win32", "schtasks")])
def test_a_service_is_installed_described_and_removed_without_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, platform: str, name: str
) -> None:
    calls = tool(tmp_path / "bin", name)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    wanted = service(tmp_path, platform)
    assert background.status(wanted) == ""
    assert not background.remove(wanted)
    assert not calls.exists()

    background.install(wanted)
    for path in wanted.files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert sum(SECRET in path.read_text() for path in wanted.files) == 1
    assert "no bus" in background.status(wanted)
    assert SECRET not in calls.read_text(), "others can see command lines"
    background.install(wanted)
    assert background.remove(wanted)
    assert not any(path.exists() for path in wanted.files)


@posix
def test_an_installation_that_fails_leaves_no_secret_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = service(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    with pytest.raises(InputError, match="systemctl"):
        background.install(wanted)
    tool(tmp_path / "bin", "systemctl", code=1)
    with pytest.raises(InputError, match="no bus here"):
        background.install(wanted)
    assert not any(path.exists() for path in wanted.files)


def test_what_no_service_file_can_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="quotes"):
        service_of("linux", tmp_path, tmp_path, ("cleave", 'join"'), {})


def test_a_launch_agent_has_the_command_and_its_variables(tmp_path: Path) -> None:
    ((path, text),) = service(tmp_path, "darwin").files.items()
    properties = plistlib.loads(text.encode())
    assert path.name == f"{properties['Label']}.plist"
    assert tuple(properties["ProgramArguments"]) == COMMAND
    assert properties["EnvironmentVariables"]["CLEAVE_SERVER"] == SECRET


def test_a_windows_task_runs_a_script_with_the_command(tmp_path: Path) -> None:
    ((path, text),) = service(tmp_path, "win32").files.items()
    assert any(str(path) in part for call in service(tmp_path, "win32").install for part in call)
    assert subprocess.list2cmdline(COMMAND).replace("%", "%%") in text.splitlines()
    assert f'set "CLEAVE_SERVER={SECRET}"' in text.splitlines()


@posix
def test_systemd_accepts_the_unit(tmp_path: Path) -> None:
    analyze = shutil.which("systemd-analyze") or pytest.skip("needs systemd-analyze: apt-get install systemd")
    wanted = service_of(
        "linux", tmp_path / "home", tmp_path / "cleave", (sys.executable, *COMMAND[1:]), {"CLEAVE_SERVER": SECRET}
    )
    for path, text in wanted.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (unit,) = (path for path in wanted.files if path.suffix == ".service")
    checked = subprocess.run([analyze, "--user", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert unit.name not in checked.stderr, checked.stderr


@posix
def test_cleave_join_installs_a_service_with_its_options_and_removes_it(tmp_path: Path) -> None:
    calls = tool(tmp_path / "bin", {"darwin": "launchctl"}.get(sys.platform, "systemctl"))
    (tmp_path / "mine.toml").write_text("run_on_batteries = false\n")
    variables = {**environment(tmp_path / "cleave"), "HOME": str(tmp_path), "PATH": str(tmp_path / "bin")}

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        called = command("join", *arguments)
        return subprocess.run(called, env=variables, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert run("--background", "status").stdout == "not installed\n"
    done = run(SECRET, "--terms", "mine.toml", "--threads", "2", "--background", "install")
    assert done.returncode == 0, done.stderr
    assert SECRET not in done.stdout
    written = "".join(path.read_text() for path in tmp_path.rglob("*device*") if path.is_file())
    for expected in (SECRET, str(tmp_path / "mine.toml"), "--threads=2", str(tmp_path / "cleave")):
        assert expected in written
    assert run("--background", "status").stdout
    assert run("--background", "remove").stdout == "removed\n"
    assert SECRET not in "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert calls.exists()

    mistaken = run(SECRET, "--cpu-usage-limit", "300", "--background", "install")
    assert mistaken.returncode == 2
    assert "cpu_usage_limit" in mistaken.stderr
    assert run("--background", "install").returncode == 2, "there is no address"
