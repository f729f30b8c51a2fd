"""`python -m benchmarks.testbed FLEET.csv -- COMMAND`: run a command in the namespace of every device of a fleet.

With `--server COMMAND`, that runs in the server's namespace, and the devices' commands are stopped when it ends. With
`--check`, measure every link instead. Commands find their place in the environment: TESTBED_NAME, TESTBED_NUMBER,
TESTBED_ADDRESS, TESTBED_SERVER (the server's address).
"""

from __future__ import annotations

import argparse
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, Final

from benchmarks.testbed.bed import Testbed, read_fleet
from benchmarks.testbed.check import measure
from benchmarks.testbed.layout import SERVER

from cleave.errors import CleaveError

_STOPPING_S: Final = 5.0


def main(words: list[str] | None = None) -> int:
    given = sys.argv[1:] if words is None else words
    cut = given.index("--") if "--" in given else len(given)
    options, command = _parser().parse_args(given[:cut]), given[cut + 1 :]
    try:
        with Testbed(read_fleet(options.fleet)) as testbed:
            if options.check:
                return _check(testbed, options.seconds)
            return _run(testbed, shlex.split(options.server or ""), command)
    except CleaveError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _check(testbed: Testbed, seconds: float) -> int:
    print("| link | Mbit/s set | Mbit/s payload | with headers / set | bucket, kB | ahead of the rate at most, kB |")
    print("|---|---|---|---|---|---|")
    for each in measure(testbed, seconds):
        ahead = "" if each.let_through_bytes is None else f"{each.let_through_bytes / 1e3:.1f}"
        print(
            f"| {each.what} | {each.configured_bytes_per_s / 125e3:.1f} | {each.measured_bytes_per_s / 125e3:.1f} | "
            f"{each.share:.3f} | {each.burst_bytes / 1e3:.1f} | {ahead} |",
            flush=True,
        )
    return 0


def _run(testbed: Testbed, server: list[str], command: list[str]) -> int:
    if not server and not command:
        raise CleaveError("expected a command after --, or --server, or --check, got none of them; give one")
    started: dict[str, subprocess.Popen[bytes]] = {}
    readers: list[threading.Thread] = []
    for place, words in ((SERVER, server), *((name, command) for name in testbed.devices)):
        if words:
            process = testbed.start(place, words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            assert process.stdout is not None
            started[place] = process
            readers.append(threading.Thread(target=_relay, args=(place, process.stdout), daemon=True))
            readers[-1].start()
    if server:
        worst = started[SERVER].wait()
        for process in started.values():
            if process.poll() is None:
                process.terminate()
        for process in started.values():
            try:
                process.wait(_STOPPING_S)
            except subprocess.TimeoutExpired:
                process.kill()
    else:
        worst = max((process.wait() for process in started.values()), key=abs)
    for reader in readers:
        reader.join(_STOPPING_S)
    return worst if worst >= 0 else 128 - worst


def _relay(place: str, lines: IO[bytes]) -> None:
    for line in lines:
        print(f"[{place}] {line.decode(errors='replace').rstrip()}", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.testbed",
        description="Run a command for every device of a fleet, each in a network namespace with rate-limited links.",
        epilog="Everything after -- is the devices' command. Latency is not emulated: kernels without netem cannot.",
    )
    parser.add_argument("fleet", type=Path, help="fleet CSV; its down, up and medium rates become the links")
    parser.add_argument("--server", help="command for the server's namespace; the devices stop when it ends")
    parser.add_argument("--check", action="store_true", help="measure every link and medium, and print a table")
    parser.add_argument(
        "--seconds", type=float, default=1.0, help="seconds of transfer per link and way for --check (default: 1)"
    )
    return parser


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
