"""Laws of the probes: each reads what its system tells, on files that look like it, and some on this machine."""

from __future__ import annotations

import os
import pty
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from cleave.device import conditions
from cleave.device.conditions import InputInterrupts, observer, on_batteries, probes_of, terminals
from cleave.device.terms import Terms

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads files of Linux")


def supply(directory: Path, name: str, **files: str) -> None:
    (directory / name).mkdir()
    for file, text in files.items():
        (directory / name / file).write_text(f"{text}\n")


@linux
@pytest.mark.parametrize(
    ("online", "status", "expected"),
    [("0", "Discharging", True), ("1", "Discharging", False), ("1", "Full", False), ("0", "Unknown", None)],
)
def test_a_laptop_runs_on_batteries_without_its_charger(
    tmp_path: Path, online: str, status: str, expected: bool | None
) -> None:
    supply(tmp_path, "ADP1", type="Mains", online=online)
    supply(tmp_path, "BAT0", type="Battery", status=status)
    assert on_batteries(tmp_path) is expected


@linux
def test_the_battery_of_a_mouse_is_not_the_machines(tmp_path: Path) -> None:
    supply(tmp_path, "hidpp_battery_0", type="Battery", scope="Device", status="Discharging")
    assert on_batteries(tmp_path) is False


@linux
def test_a_system_that_hides_its_power_supplies_leaves_it_unknown(tmp_path: Path) -> None:
    assert on_batteries(tmp_path / "missing") is None


@linux
def test_input_at_a_terminal_of_this_machine_is_seen(tmp_path: Path) -> None:
    """The real probe, on a real terminal: one that was made just now and is read."""
    if not os.path.ismount("/dev/pts"):
        pytest.skip("there are no pseudo-terminals here")
    ours, theirs = pty.openpty()
    try:
        name = os.ttyname(theirs)
        os.write(ours, b"typed\n")
        assert os.read(theirs, 100) == b"typed\n"
        sockets = tmp_path / "unix"
        sockets.write_text("Num RefCount\n")
        seen = terminals((name,), sockets)
        assert seen is not None
        assert name in seen.probe
        assert seen.idle_s < 600.0, "the kernel rounds these times to 8 s"
        assert seen.sees_all
        os.utime(name, (time.time() - 3600, time.time()))
        later = terminals((name,), sockets)
        assert later is not None
        assert 3590 < later.idle_s < 7200
        sockets.write_text("0: 2 0 10000 0001 01 21 @/tmp/.X11-unix/X0\n")
        beside_display = terminals((name,), sockets)
        assert beside_display is not None
        assert not beside_display.sees_all, "nobody types into terminals only"
    finally:
        os.close(ours)
        os.close(theirs)


def test_without_terminals_the_probe_has_no_answer(tmp_path: Path) -> None:
    assert terminals((str(tmp_path / "pts[0-9]*"),), tmp_path / "unix") is None


INTERRUPTS = """           CPU0       CPU1
  1:  {keys:9d}         12  IO-APIC   1-edge      i8042
 24:  {disk:9d}          0  IO-APIC   5-edge      nvme0q1
"""


def test_interrupts_of_a_keyboard_are_input_and_those_of_a_disk_are_not(tmp_path: Path) -> None:
    source, now_s = tmp_path / "interrupts", [100.0]
    probe = InputInterrupts(source, lambda: now_s[0])
    source.write_text(INTERRUPTS.format(keys=7, disk=1))
    assert probe.sign() is None, "nothing was seen to change yet"
    source.write_text(INTERRUPTS.format(keys=7, disk=900))
    assert probe.sign() is None
    source.write_text(INTERRUPTS.format(keys=9, disk=900))
    seen = probe.sign()
    assert seen is not None
    assert (seen.idle_s, seen.sees_all) == (0.0, False)
    assert "i8042" in seen.probe
    now_s[0] += 50.0
    seen = probe.sign()
    assert seen is not None
    assert seen.idle_s == 50.0


def command(directory: Path, name: str, text: str) -> None:
    file = directory / name
    file.write_text(f"#!/bin/sh\n{text}\n")
    file.chmod(0o755)


@pytest.mark.skipif(os.name != "posix", reason="needs a shell")
def test_commands_of_the_system_are_read_and_those_that_fail_have_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conditions, "_COMMAND_S", 120.0)  # on however busy a machine
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    probes = (conditions.login_manager, conditions.screen_saver, conditions.human_interface_devices)
    assert [probe() for probe in probes] == [None, None, None]

    since = int((time.time() - 600) * 1e6)
    command(tmp_path, "loginctl", f"printf 'IdleHint=yes\\nIdleSinceHint={since}\\n'")
    command(tmp_path, "xprintidle", "exit 1")
    command(tmp_path, "xssstate", "echo 600000")
    command(tmp_path, "ioreg", """echo '  | | "HIDIdleTime" = 600000000000'""")
    for probe in probes:
        sign = probe()
        assert sign is not None
        assert 600 <= sign.idle_s < 1200
        assert sign.sees_all
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    sign = conditions.screen_saver()
    assert sign is not None
    assert not sign.sees_all
    command(tmp_path, "loginctl", "printf 'IdleHint=no\\nIdleSinceHint=0\\n'")
    assert conditions.login_manager() is None, "some desktops never say that they are idle"


def test_this_machine_is_observed_only_as_far_as_the_terms_need() -> None:
    before = datetime.now()
    now = observer(Terms())()
    assert 0 <= now.hour < 24
    assert abs(now.hour - before.hour - before.minute / 60) < 0.5 or before.hour == 23
    assert (now.on_batteries, tuple(now.signs), now.heat) == (None, (), None)
    assert len(probes_of("linux")) >= 4
    observed = observer(Terms(run_on_batteries=False, run_if_user_active=False, max_temperature=90.0))()
    assert observed.on_batteries in (True, False, None)
    assert all(sign.idle_s >= 0 for sign in observed.signs)
