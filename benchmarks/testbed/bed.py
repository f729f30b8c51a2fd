"""Build a testbed, run commands in it, count its bytes, and take it down again whatever happens.

A watcher process (`removal.py`) is started before anything is made and removes everything when this process closes the
testbed or dies. Several testbeds can stand side by side: every one has namespaces and a hub of its own.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

from benchmarks.testbed import cores, removal
from benchmarks.testbed.layout import SERVER, Layout, TestbedError, batches_of, layout_of

from cleave.core.fleet.profiles import Profiles, read_csv
from cleave.errors import InputError

_numbers: Final = itertools.count()
_NEEDED: Final = ("ip", "tc")
_ENTER: Final = 'echo $$ > "$0" && exec "$@"'
"""Shell command that joins the control group named first, then becomes the command after it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes over a device's link so far, headers included."""

    down_bytes: int
    up_bytes: int

    def __sub__(self, earlier: Traffic) -> Traffic:
        return Traffic(down_bytes=self.down_bytes - earlier.down_bytes, up_bytes=self.up_bytes - earlier.up_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserved:
    """Cores of every place's own; fractions are slower machines."""

    device: float
    server: float


def read_fleet(path: Path) -> Profiles:
    """Read a fleet CSV."""
    try:
        return read_csv(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as fault:
        raise InputError(f"cannot read {path}: {fault}; give the path of a fleet CSV") from None


class Testbed:
    """A context manager: the namespaces exist inside the `with` block."""

    __test__ = False

    def __init__(self, profiles: Profiles, reserved: Reserved | None = None) -> None:
        """Without `reserved`, all places share this machine's cores."""
        _check_means()
        if reserved is not None:
            _check_cores(reserved, len(profiles))
        self._reserved = reserved
        self._groups: dict[str, Path] = {}
        self.layout: Layout = layout_of(profiles, removal.owned_prefix(next(_numbers)))
        self.devices: tuple[str, ...] = profiles.names
        self._watcher: subprocess.Popen[bytes] | None = None
        self._started: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Testbed:
        removal.remove_abandoned()
        watcher = [sys.executable, "-I", removal.__file__, self.layout.hub.removesuffix("hub"), str(os.getpid())]
        self._watcher = subprocess.Popen(watcher, stdin=subprocess.PIPE, start_new_session=True)
        try:
            for command, lines in batches_of(self.layout):
                _run_batch(command, lines)
            if self._reserved is not None:
                for place in (SERVER, *self.devices):
                    share = self._reserved.server if place == SERVER else self._reserved.device
                    self._groups[place] = cores.reserve(self.layout.namespace(place), share)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs in the testbed and remove it."""
        if self._watcher is not None:
            assert self._watcher.stdin is not None
            self._watcher.stdin.close()
            self._watcher.wait()
            self._watcher = None
        for process in self._started:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
        self._started.clear()

    def address(self, place: str) -> str:
        """The IP address of `server` or of a device."""
        return self.layout.address(place)

    def start(
        self,
        place: str,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> subprocess.Popen[bytes]:
        """Start a command in a place; its process id is the command's own."""
        entering = [] if (group := self.group(place)) is None else ["sh", "-c", _ENTER, str(group)]
        process = subprocess.Popen(
            [*entering, "ip", "netns", "exec", self.layout.namespace(place), *map(str, command)],
            env={**os.environ, **self.variables(place), **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
        )
        self._started.append(process)
        return process

    def group(self, place: str) -> Path | None:
        """The file that takes the ids of the processes of a place, where its cores are reserved."""
        return self._groups.get(place)

    def variables(self, place: str) -> dict[str, str]:
        """What a command learns about its place from its environment."""
        number = -1 if place == SERVER else self.devices.index(place)
        return {
            "TESTBED_NAME": place,
            "TESTBED_NUMBER": str(number),
            "TESTBED_DEVICES": str(len(self.devices)),
            "TESTBED_ADDRESS": self.address(place),
            "TESTBED_SERVER": self.address(SERVER),
        }

    def traffic(self) -> dict[str, Traffic]:
        """Bytes of every device so far, as the hub's ports counted them."""
        shown = subprocess.run(
            ["ip", "-n", self.layout.hub, "-s", "-j", "link", "show"], check=True, capture_output=True, text=True
        )
        counted = {link["ifname"]: link["stats64"] for link in json.loads(shown.stdout)}
        return {
            port.name: Traffic(
                down_bytes=counted[port.interface]["tx"]["bytes"], up_bytes=counted[port.interface]["rx"]["bytes"]
            )
            for port in self.layout.ports
        }

    def kill(self, place: str) -> None:
        """End every process of a place with SIGKILL; its sockets close, so its peers learn of it."""
        for pid in removal.processes(self.layout.namespace(place)):
            os.kill(pid, signal.SIGKILL)

    def unplug(self, place: str) -> None:
        """Cut a place's link without a word to its peers, as a power failure does."""
        _run_batch(("ip", "-n", self.layout.namespace(place)), ["link set eth0 down"])


def _check_means() -> None:
    if not sys.platform.startswith("linux"):
        raise TestbedError(f"a testbed needs Linux, but this is {sys.platform}; run it on a Linux machine")
    missing = [name for name in _NEEDED if shutil.which(name) is None]
    if missing:
        raise TestbedError(
            f"a testbed needs the commands ip and tc, but there is no {' and no '.join(missing)} here; install iproute2"
        )
    if os.geteuid() != 0:
        raise TestbedError(
            f"a testbed needs root for its network namespaces, but runs as user {os.geteuid()}; run it with sudo"
        )


def _check_cores(reserved: Reserved, devices: int) -> None:
    needed, present = reserved.server + devices * reserved.device, os.cpu_count() or 1
    if min(reserved.device, reserved.server) <= 0 or needed > present:
        raise TestbedError(
            f"expected shares of {present} cores for {devices} devices and the server, got {reserved.device:g} each "
            f"and {reserved.server:g}, together {needed:g}; give smaller ones"
        )
    if refusal := cores.why_not():
        raise TestbedError(f"cores cannot be reserved here: {refusal}; run without reserved cores")


def _run_batch(command: tuple[str, ...], lines: Sequence[str]) -> None:
    done = subprocess.run(
        [*command, "-batch", "-"], input="\n".join(lines) + "\n", capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        said = " ".join(done.stderr.split())
        raise TestbedError(
            f"{' '.join(command[:1])} cannot set up the testbed: {said}; it needs CAP_NET_ADMIN, CAP_SYS_ADMIN and a "
            "kernel with veth, bridge and tbf (ifb, u32 and mirred for a shared medium)"
        )
