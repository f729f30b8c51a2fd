"""Observe this machine for the volunteer's terms: power, input of users, heat and the time of day.

One idle probe alone is wrong somewhere: a terminal does not see a mouse, a screen saver no remote login. So every probe
that works on this system is asked, and each says how long ago it saw input and whether it sees all of it. A probe that
cannot tell has no answer, as has a command that takes too long: `terms.py` then objects.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

import psutil

from cleave.device.terms import Conditions, Heat, Sign, Terms

_COMMAND_S = 1.0
_TERMINALS = ("/dev/tty[0-9]*", "/dev/pts/[0-9]*", "/dev/ttys[0-9]*")
_DISPLAYS = ("/.X11-unix/X", "/wayland-")
"""What is in the names of the sockets of graphical sessions."""
_INPUT_INTERRUPTS = re.compile(r"i8042|keyboard|mouse|touch|hid|elan|syna|atml|wacom", re.IGNORECASE)
_PLAUSIBLE_C = range(1, 150)

IdleProbe = Callable[[], Sign | None]


def observer(terms: Terms) -> Callable[[], Conditions]:
    """Return a function that observes what these terms need to know; it may take a second or two."""
    idle_probes = probes_of(sys.platform) if terms.depends_on_user else ()

    def observe() -> Conditions:
        now = datetime.now()
        return Conditions(
            hour=now.hour + now.minute / 60 + now.second / 3600,
            on_batteries=None if terms.run_on_batteries else on_batteries(),
            signs=[sign for probe in idle_probes if (sign := probe()) is not None],
            heat=heat() if terms.max_temperature else None,
        )

    return observe


def probes_of(platform: str) -> Sequence[IdleProbe]:
    """The idle probes of a system."""
    if platform == "win32":
        return (last_input_of_windows,)
    if platform == "darwin":
        return (human_interface_devices, terminals)
    return (login_manager, screen_saver, terminals, InputInterrupts().sign)


# ------------------------------------------------------------------------------------------------ power and heat


def on_batteries(supplies: Path = Path("/sys/class/power_supply")) -> bool | None:
    """Whether this machine runs on batteries; False if it has none."""
    if sys.platform.startswith("linux"):
        return _linux_on_batteries(supplies)
    try:
        battery = cast("Any", psutil.sensors_battery())
    except (AttributeError, NotImplementedError, OSError):
        return None
    if battery is None:  # there is none
        return False
    return None if battery.power_plugged is None else not battery.power_plugged


def _linux_on_batteries(supplies: Path) -> bool | None:
    """Read the kernel's list: psutil counts the battery of a wireless mouse as the machine's."""
    try:
        names = list(supplies.iterdir())
    except OSError:
        return None
    kinds = [(_line(name / "type"), name) for name in names if _line(name / "scope") != "Device"]
    batteries = [_line(name / "status") for kind, name in kinds if kind in ("Battery", "UPS")]
    if not batteries:
        return False
    if any(_line(name / "online") not in ("0", "") for kind, name in kinds if kind in ("Mains", "USB", "Wireless")):
        return False
    if "Discharging" in batteries:
        return True
    return False if all(status in ("Charging", "Full", "Not charging") for status in batteries) else None


def heat() -> Heat | None:
    """The hottest sensor of this machine; None where the system does not tell."""
    try:
        chips = psutil.sensors_temperatures()
    except (AttributeError, NotImplementedError, OSError):  # psutil has it on Linux and FreeBSD only
        return None
    sensors = [
        Heat(sensor=f"{chip} {sensor.label}".strip(), celsius=sensor.current)
        for chip, found in chips.items()
        for sensor in found
        if int(sensor.current) in _PLAUSIBLE_C
    ]
    return max(sensors, key=lambda sensor: sensor.celsius, default=None)


# ------------------------------------------------------------------------------------------------ input


def terminals(patterns: Iterable[str] = _TERMINALS, sockets: Path = Path("/proc/net/unix")) -> Sign | None:
    """When terminals were last read, local and remote ones; all input there is if nobody has a graphical session."""
    ages = [(time.time() - at_s, name) for name, at_s in _read_times(patterns)]
    if not ages:
        return None
    idle_s, name = min(ages)
    return Sign(probe=f"the terminal {name}", idle_s=max(0.0, idle_s), sees_all=not _may_have_display(sockets))


def login_manager() -> Sign | None:
    """systemd's logind. Only its "idle" counts: some desktops never tell it that they are."""
    told = _output("loginctl", "show-session", "--property=IdleHint", "--property=IdleSinceHint") or ""
    since = re.search(r"^IdleSinceHint=([1-9]\d*)$", told, re.MULTILINE)
    if since is None or "IdleHint=yes" not in told.splitlines():
        return None
    return Sign(probe="logind", idle_s=max(0.0, time.time() - int(since[1]) / 1e6), sees_all=True)


def screen_saver() -> Sign | None:
    """The X screen saver's clock; under Wayland it sees only some windows."""
    if not os.environ.get("DISPLAY"):
        return None
    told = _output("xprintidle") or _output("xssstate", "-i") or ""
    if not told.strip().isdigit():
        return None
    is_x11 = not os.environ.get("WAYLAND_DISPLAY")
    return Sign(probe="the X screen saver", idle_s=int(told) / 1e3, sees_all=is_x11)


class InputInterrupts:
    """Interrupts of keyboards and touchpads that are not behind USB: they show input, their absence shows nothing."""

    def __init__(self, source: Path = Path("/proc/interrupts"), clock: Callable[[], float] = time.monotonic) -> None:
        self._source, self._clock = source, clock
        self._counts: dict[str, int] | None = None
        self._last: tuple[float, str] | None = None

    def sign(self) -> Sign | None:
        counts, before = dict(self._read()), self._counts
        self._counts = counts
        for name, count in counts.items() if before is not None else ():
            if count != cast("dict[str, int]", before).get(name, count):
                self._last = self._clock(), name
        if self._last is None:
            return None
        at_s, name = self._last
        return Sign(probe=f"the input device {name}", idle_s=self._clock() - at_s, sees_all=False)

    def _read(self) -> Iterator[tuple[str, int]]:
        try:
            lines = self._source.read_text(errors="replace").splitlines()[1:]
        except OSError:
            return
        for line in lines:
            if _INPUT_INTERRUPTS.search(line):
                words = line.split()[1:]
                numbers = next((i for i, word in enumerate(words) if not word.isdigit()), len(words))
                yield " ".join(words[numbers:][-1:]), sum(map(int, words[:numbers]))


def human_interface_devices() -> Sign | None:
    """The clock that macOS keeps for its screen saver."""
    told = re.search(r'"HIDIdleTime" = (\d+)', _output("ioreg", "-c", "IOHIDSystem", "-d", "4") or "")
    return Sign(probe="HIDIdleTime", idle_s=int(told[1]) / 1e9, sees_all=True) if told else None


def last_input_of_windows() -> Sign | None:
    class LastInput(ctypes.Structure):
        _fields_ = (("size", ctypes.c_uint), ("tick_ms", ctypes.c_uint))

    windows: Any = getattr(ctypes, "windll", None)
    last = LastInput(ctypes.sizeof(LastInput), 0)
    if windows is None or not windows.user32.GetLastInputInfo(ctypes.byref(last)):
        return None
    elapsed_ms = (windows.kernel32.GetTickCount() - last.tick_ms) % 2**32
    return Sign(probe="GetLastInputInfo", idle_s=elapsed_ms / 1e3, sees_all=True)


def _read_times(patterns: Iterable[str]) -> Iterator[tuple[str, float]]:
    for pattern in patterns:
        path = Path(pattern)
        for name in path.parent.glob(path.name):
            try:
                yield str(name), name.stat().st_atime
            except OSError:  # closed meanwhile
                continue


def _may_have_display(sockets: Path) -> bool:
    try:
        text = sockets.read_text(errors="replace")
    except OSError:
        return True
    return any(name in text for name in _DISPLAYS)


def _output(command: str, *arguments: str) -> str | None:
    """What a command of the system prints; None if it is missing, fails or hangs."""
    path = shutil.which(command)
    if path is None:
        return None
    try:
        done = subprocess.run(
            [path, *arguments], capture_output=True, text=True, timeout=_COMMAND_S, check=True, stdin=subprocess.DEVNULL
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    return done.stdout


def _line(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
