"""A training run under abuse of its entrance: `python benchmarks/abuse.py` (about 6 minutes).

One real `cleave train` (tiny-llama, two local devices) that never stops, and one attack after the other, by
`abuser.py` in a process of low priority; before and after each attack the run is left alone for a while, which
is what its steps are compared with. Beside steps: memory and descriptors of the server, bytes added to the event log,
how long an honest device takes to join meanwhile, checkpoints saved, and the attacker's own share of the machine.

The token that joins was drawn; the run also has a token that a person chose, so that a guess costs as much as it can.
All traffic is on loopback, which the gate takes for one address with larger limits: ten times the arrivals (200 a
second), 4,096 connections and 256 strangers at once, where another address has 20, 64 and 32. So an attack from here
is worth that of ten addresses.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import psutil

from abuser import Done, join
from cleave.errors import CleaveError
from cleave.events import AnyEvent, CheckpointSaved, StepDone, read_events
from cleave.server.admission.tokens import FILE, Keys
from cleave.transport.websocket import dial

_STRANGERS, _GUESSES = ("strangers", 25.0, 1000), ("guesses", 25.0, 0)
_ATTACKS = (("joins", 100.0, 10_000), _STRANGERS, _GUESSES, _STRANGERS, _GUESSES)
"""Kind, seconds at most, and how many."""
_QUIET_S = 20.0
_SAMPLE_S = 0.25
_JOIN_EVERY_S = 2.0
_PATIENCE_S = 120.0
_CHOSEN = "a token that a person chose"
_SETTINGS = """
model = "tiny-llama"
data = '{data}'
sequence = 64
batch = 4
steps = 1_000_000
warmup_steps = 1_000_000
eval_every = 0
sample = 0
save_every = 25
"""


@dataclass(kw_only=True)
class Period:
    """What was seen of the server in one stretch of time."""

    name: str
    start_s: float = field(default_factory=time.time)
    end_s: float = 0.0
    rss_bytes: list[int] = field(default_factory=lambda: list[int]())
    descriptors: list[int] = field(default_factory=lambda: list[int]())
    joins_s: list[float] = field(default_factory=lambda: list[float]())
    failed_joins: int = 0
    log_bytes: int = 0
    attack: Done | None = None

    def steps_s(self, seen: list[AnyEvent]) -> list[float]:
        return [event.seconds for event in self._during(seen) if isinstance(event, StepDone)]

    def saves(self, seen: list[AnyEvent]) -> int:
        return sum(isinstance(event, CheckpointSaved) for event in self._during(seen))

    def _during(self, seen: list[AnyEvent]) -> list[AnyEvent]:
        return [event for event in seen if self.start_s <= event.time_s <= self.end_s]


def main() -> None:
    with tempfile.TemporaryDirectory() as home:
        directory, out = Path(home), Path(home) / "run"
        text = directory / "text.txt"
        text.write_text("the quick brown fox jumps over the lazy dog. " * 2000)
        (directory / "run.toml").write_text(_SETTINGS.format(data=text))
        Keys(path=out / FILE).add("device", _CHOSEN)
        _, token = Keys(path=out / FILE).add("device")
        address = f"127.0.0.1:{_free_port()}"
        flags = ["--devices", "2", "--listen", address, "--out", str(out)]
        with (directory / "said").open("wb") as said:
            server = subprocess.Popen(
                [sys.executable, "-m", "cleave", "train", str(directory / "run.toml"), *flags],
                env={**os.environ, "CLEAVE_HOME": home, "CLEAVE_TOKEN": _CHOSEN, "OMP_NUM_THREADS": "1"},
                stdout=said,
                stderr=said,
            )
        try:
            _wait_until(lambda: _steps(out) >= 30, server)
            periods = _take_turns(server, out, address, token)
        finally:
            server.send_signal(signal.SIGINT)
            server.wait(_PATIENCE_S)
        _report(periods, list(read_events(out / "events.jsonl")), "Traceback" in (directory / "said").read_text())


def _take_turns(server: subprocess.Popen[bytes], out: Path, address: str, token: str) -> list[Period]:
    periods = [_watch(server, out, address, token, "undisturbed", None)]
    for kind, seconds, count in _ATTACKS:
        command = [sys.executable, str(Path(__file__).with_name("abuser.py")), kind, address, token]
        periods.append(_watch(server, out, address, token, kind, [*command, str(seconds), str(count)]))
        periods.append(_watch(server, out, address, token, "undisturbed", None))
    return periods


def _watch(
    server: subprocess.Popen[bytes], out: Path, address: str, token: str, name: str, command: list[str] | None
) -> Period:
    """Observe the server until the attack ends, or for a while if there is none."""
    attacker = subprocess.Popen(command, stdout=subprocess.PIPE) if command else None
    period, process, log = Period(name=name), psutil.Process(server.pid), out / "events.jsonl"
    log_bytes = log.stat().st_size
    joining = threading.Thread(target=lambda: asyncio.run(_join_now_and_then(period, address, token)))
    joining.start()
    until = time.monotonic() + _QUIET_S
    while attacker.poll() is None if attacker else time.monotonic() < until:
        if server.poll() is not None:
            raise SystemExit(f"the server ended with exit code {server.returncode}")
        period.rss_bytes.append(process.memory_info().rss)
        period.descriptors.append(process.num_fds())
        time.sleep(_SAMPLE_S)
    period.end_s = time.time()
    period.log_bytes = log.stat().st_size - log_bytes
    joining.join()
    if attacker is not None:
        period.attack = msgspec.json.decode(attacker.communicate()[0], type=Done)
    return period


async def _join_now_and_then(period: Period, address: str, token: str) -> None:
    """Join as an honest device every few seconds, and leave again."""
    while not period.end_s:
        started = time.perf_counter()
        try:
            async with asyncio.timeout(_PATIENCE_S):
                channel = await dial(f"ws://{address}/ws")
                dialed_s = time.perf_counter() - started
                try:
                    period.joins_s.append(dialed_s + await join(channel, "honest", token))
                finally:
                    await channel.close()
        except (CleaveError, TimeoutError):
            period.failed_joins += 1
        await asyncio.sleep(_JOIN_EVERY_S)


def _report(periods: list[Period], seen: list[AnyEvent], has_traceback: bool) -> None:
    say = sys.stdout.write
    say("| case | median step | x undisturbed | steps | checkpoints | honest joins: median, worst, failed | ")
    say("RSS MB, end (peak) | descriptors, most | event log KB | attack | its CPU |\n")
    say(f"|{'---|' * 11}\n")
    for index, period in enumerate(periods):
        steps_s = period.steps_s(seen)
        around = [p for p in periods[max(0, index - 1) : index + 2] if p.name == "undisturbed"]
        quiet_s = statistics.median([step_s for p in around for step_s in p.steps_s(seen)])
        median_s = statistics.median(steps_s) if steps_s else float("nan")
        joins_s = period.joins_s or [float("nan")]
        done, cpu = "", ""
        if period.attack is not None:
            done = ", ".join(f"{count} {what}" for what, count in period.attack.done.items())
            cpu = f"{period.attack.cpu_s / period.attack.seconds:.0%} of a core"
        say(
            f"| {period.name} | {1000 * median_s:.0f} ms | {median_s / quiet_s:.2f} | {len(steps_s)} | "
            f"{period.saves(seen)} | {statistics.median(joins_s):.2f} s, {max(joins_s):.2f} s, {period.failed_joins} | "
            f"{period.rss_bytes[-1] / 1e6:.0f} ({max(period.rss_bytes) / 1e6:.0f}) | {max(period.descriptors)} | "
            f"{period.log_bytes / 1e3:.0f} | {done} | {cpu} |\n"
        )
    say(f"\ntracebacks in the server's output: {'yes' if has_traceback else 'none'}\n")


def _wait_until(condition: Callable[[], bool], server: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + _PATIENCE_S
    while not condition():
        if time.monotonic() > give_up or server.poll() is not None:
            raise SystemExit("the server did not start")
        time.sleep(_SAMPLE_S)


def _steps(out: Path) -> int:
    log = out / "events.jsonl"
    return sum(isinstance(event, StepDone) for event in read_events(log)) if log.exists() else 0


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    main()
