"""Nobody has to look: a run trains, saves and ends while its output is a pipe that nobody reads."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.commands import PATIENCE_S, Process, command, departures, environment, joined, last_step, wait_until

from cleave.device.kernels import NumpyKernel
from cleave.device.worker import Contribution, Offer, Worker
from cleave.events import RunFinished, read_events
from cleave.run_files import running
from cleave.transport.address import parse_address
from cleave.transport.websocket import dial

pytestmark = pytest.mark.skipif(not hasattr(fcntl, "F_SETPIPE_SZ"), reason="needs pipes of a given size")
_PIPE_BYTES = 4096
_AT_ONCE, _ROUNDS = 15, 2
_NAME = "a-device-with-a-name-of-nearly-sixty-characters-{:03d}"


async def _come_and_go(url: str, out: Path, numbers: range) -> None:
    """Join with so many devices, see them in the log, and leave."""
    kernel, workers = NumpyKernel(), list[Worker]()
    for number in numbers:
        offer = Offer(name=_NAME.format(number), token="", flops_per_s=1e9, memory_bytes=1 << 26)
        workers.append(Worker(await dial(url), kernel, offer, Contribution()))
        await workers[-1].join()
    works = [asyncio.ensure_future(worker.run()) for worker in workers]
    async with asyncio.timeout(PATIENCE_S):
        while not {_NAME.format(number) for number in numbers} <= set(joined(out)):
            await asyncio.sleep(0.05)
    for worker in workers:
        await worker.leave("leaving for a reason that is long enough to fill a line of a terminal of eighty columns")
    for work in works:
        work.cancel()
    await asyncio.gather(*works, return_exceptions=True)


@pytest.fixture
def unread(tmp_path: Path, settings: str, request: pytest.FixtureRequest) -> Iterator[Process]:
    """A run with one device of its own, whose standard error is a pipe or a terminal that nobody reads."""
    reading, writing = pty.openpty() if request.param == "terminal" else os.pipe()
    if request.param == "pipe":
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    words = command("train", settings, "--listen", "127.0.0.1:0", "--devices", "1", "--out", str(tmp_path / "run"))
    with (tmp_path / "summary").open("wb") as summary:
        process = subprocess.Popen(words, env=environment(tmp_path), stdout=summary, stderr=writing)
    os.close(writing)
    yield process
    process.kill()
    process.wait()
    os.close(reading)


@pytest.mark.parametrize("unread", ["pipe"], indirect=True)
def test_a_run_whose_output_nobody_reads_trains_on_and_ends_well(tmp_path: Path, unread: Process) -> None:
    out = tmp_path / "run"
    wait_until(lambda: (out / "events.jsonl").exists() and last_step(out) >= 1, unread)
    claim = running(out)
    assert claim is not None
    assert claim.url is not None
    url = parse_address(claim.url).url
    for first in range(0, _AT_ONCE * _ROUNDS, _AT_ONCE):
        asyncio.run(_come_and_go(url, out, range(first, first + _AT_ONCE)))
    wait_until(lambda: len(departures(out)) == _AT_ONCE * _ROUNDS, unread)
    reached = last_step(out)
    wait_until(lambda: last_step(out) >= reached + 3, unread)
    _interrupt(unread, tmp_path)


@pytest.mark.parametrize("unread", ["terminal"], indirect=True)
def test_a_stopped_terminal_stops_neither_the_run_nor_ctrl_c(tmp_path: Path, unread: Process) -> None:
    wait_until(lambda: last_step(tmp_path / "run") >= 30, unread)
    _interrupt(unread, tmp_path)


def _interrupt(process: Process, directory: Path) -> None:
    """Stop a run as Ctrl-C does; it saves, reports and ends."""
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0
    assert list((directory / "run" / "checkpoints").iterdir())
    assert any(isinstance(event, RunFinished) for event in read_events(directory / "run" / "events.jsonl"))
    assert "interrupted" in (directory / "summary").read_text()
