"""Keep `cleave join` running as a service of this user: a systemd user unit, a launchd agent, or a Windows task.

`service_of` says, without touching anything, which files a system wants and which commands of its own start, stop and
describe the service. Tokens are in files that only this user can read, never on a command line.
"""

from __future__ import annotations

import os
import plistlib
import shlex
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from cleave.errors import InputError

_UNIT: Final = "cleave-device.service"
_LABEL: Final = "org.cleave.device"
_TASK: Final = "Cleave device"
_COMMAND_S: Final = 60.0
_RESTART_S: Final = 60

Command = tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What makes a command a service on one system."""

    files: Mapping[Path, str]
    install: Sequence[Command]
    """Once the files are written."""
    stop: Command
    """Before they are removed."""
    cleared: Sequence[Command] = ()
    """Once they are."""
    status: Command


def service_of(
    platform: str,
    user_home: Path,
    cleave_home: Path,
    command: Sequence[str],
    variables: Mapping[str, str],
    user: int = 0,
) -> Service:
    """Describe the service of a system (`sys.platform`) that runs the command with these environment variables."""
    for text in (*command, *variables.values()):
        if not text.isprintable() or '"' in text:
            raise InputError(f"a service cannot be given {text!r}; leave out quotes and control characters")
    if platform == "win32":
        return _windows(cleave_home, command, variables)
    if platform == "darwin":
        return _macos(user_home, cleave_home, command, variables, user)
    return _linux(user_home, cleave_home, command, variables)


def install(service: Service) -> None:
    """Write the files and start the service, in place of an earlier one; leave nothing behind if that fails."""
    _require(service)
    remove(service)
    try:
        for path, text in service.files.items():
            _write_privately(path, text)
        for command in service.install:
            _run(command)
    except OSError as fault:
        _remove_files(service)
        raise InputError(f"cannot write {fault.filename}: {fault.strerror}; make room or change its rights") from None
    except InputError:
        _remove_files(service)
        raise


def remove(service: Service) -> bool:
    """Stop the service and remove its files; return False if there are none."""
    if not any(path.exists() for path in service.files):
        return False
    _require(service)
    with suppress(InputError):  # it may have been stopped by hand
        _run(service.stop)
    _remove_files(service)
    for command in service.cleared:
        _run(command)
    return True


def status(service: Service) -> str:
    """Return what the system says of the service; empty if it is not installed."""
    if not any(path.exists() for path in service.files):
        return ""
    _require(service)
    done = _start(service.status)
    return (done.stdout or done.stderr).strip()


# ------------------------------------------------------------------------------------------------ systems


def _linux(user_home: Path, cleave_home: Path, command: Sequence[str], variables: Mapping[str, str]) -> Service:
    secrets = cleave_home / "device.env"
    unit = f"""# Written by cleave join --background install; cleave join --background remove takes it away.
[Unit]
Description=Cleave device
StartLimitIntervalSec=0

[Service]
EnvironmentFile={str(secrets).replace("%", "%%")}
ExecStart={" ".join(f'"{_escaped(part)}"' for part in command)}
KillSignal=SIGINT
Restart=always
RestartSec={_RESTART_S}
Nice=10
NoNewPrivileges=yes

[Install]
WantedBy=default.target
"""
    systemctl = ("systemctl", "--user")
    escaped = {name: value.replace("\\", "\\\\") for name, value in variables.items()}
    return Service(
        files={
            user_home / ".config/systemd/user" / _UNIT: unit,
            secrets: "".join(f'{name}="{value}"\n' for name, value in escaped.items()),
        },
        install=((*systemctl, "daemon-reload"), (*systemctl, "enable", _UNIT), (*systemctl, "restart", _UNIT)),
        stop=(*systemctl, "disable", "--now", _UNIT),
        cleared=((*systemctl, "daemon-reload"),),
        status=(*systemctl, "status", "--no-pager", "--lines=5", _UNIT),
    )


def _macos(
    user_home: Path, cleave_home: Path, command: Sequence[str], variables: Mapping[str, str], user: int
) -> Service:
    agent = user_home / "Library/LaunchAgents" / f"{_LABEL}.plist"
    domain = f"gui/{user}"
    properties = {
        "Label": _LABEL,
        "ProgramArguments": list(command),
        "EnvironmentVariables": dict(variables),
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": _RESTART_S,
        "ProcessType": "Background",
        "StandardErrorPath": str(cleave_home / "device.log"),
    }
    return Service(
        files={agent: plistlib.dumps(properties).decode()},
        install=(("launchctl", "bootstrap", domain, str(agent)),),
        stop=("launchctl", "bootout", f"{domain}/{_LABEL}"),
        status=("launchctl", "print", f"{domain}/{_LABEL}"),
    )


def _windows(cleave_home: Path, command: Sequence[str], variables: Mapping[str, str]) -> Service:
    script = cleave_home / "device.cmd"
    doubled = {name: value.replace("%", "%%") for name, value in variables.items()}
    lines = [
        "@echo off",
        *(f'set "{name}={value}"' for name, value in doubled.items()),
        ":join",
        subprocess.list2cmdline(command).replace("%", "%%"),
        f"timeout /t {_RESTART_S} /nobreak >nul",
        "goto join",
    ]
    return Service(
        files={script: "\r\n".join(lines) + "\r\n"},
        install=(
            ("schtasks", "/Create", "/F", "/TN", _TASK, "/SC", "ONLOGON", "/RL", "LIMITED", "/TR", f'"{script}"'),
            ("schtasks", "/Run", "/TN", _TASK),
        ),
        stop=("schtasks", "/End", "/TN", _TASK),
        cleared=(("schtasks", "/Delete", "/F", "/TN", _TASK),),
        status=("schtasks", "/Query", "/V", "/FO", "LIST", "/TN", _TASK),
    )


def _escaped(text: str) -> str:
    """Keep systemd from reading backslashes, specifiers and variables in a command that is meant literally."""
    return text.replace("\\", "\\\\").replace("%", "%%").replace("$", "$$")


# ------------------------------------------------------------------------------------------------ doing it


def _require(service: Service) -> None:
    tool = service.status[0]
    if shutil.which(tool) is None:
        raise InputError(
            f"expected {tool}, which runs services of a user on this system, but it is not installed; keep cleave join "
            "running in a terminal, or see docs/lend-a-device.md"
        )


def _run(command: Command) -> None:
    done = _start(command)
    if done.returncode != 0:
        said = " ".join((done.stderr or done.stdout).split()) or f"code {done.returncode}"
        raise InputError(
            f"{shlex.join(command)} failed: {said[:300]}; keep cleave join running in a terminal if this system has no "
            "services of users"
        )


def _start(command: Command) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as fault:
        raise InputError(f"{shlex.join(command)} failed: {fault}; try it by hand") from None


def _write_privately(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(handle, "w", encoding="utf-8", newline="") as file:
        file.write(text)


def _remove_files(service: Service) -> None:
    for path in service.files:
        path.unlink(missing_ok=True)
