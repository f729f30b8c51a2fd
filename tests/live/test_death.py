"""Death of the server: killed without warning or out of disk space, it loses neither work nor devices."""

from __future__ import annotations

import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.live.conftest import Start
from tests.support.commands import PATIENCE_S, Process, free_port, joined, last_step, losses, run, wait_until
from tests.support.runs import train

from cleave.config import load_config
from cleave.events import CheckpointSaved, Resumed, StepDone, read_events

pytestmark = pytest.mark.slow


def test_an_independent_device_rejoins_a_killed_server_and_losses_stay_the_same(
    tmp_path: Path, settings: str, start: Start
) -> None:
    out, address = tmp_path / "broken", f"127.0.0.1:{free_port()}"
    device = start("device", "join", address, "--name", "faithful", "--threads", "1", "--wait", str(PATIENCE_S))
    flags = ["--listen", address, "--devices", "0", "--wait", str(PATIENCE_S), "--save-every", "3"]
    server = start("server", "train", settings, *flags, "--out", str(out))
    _kill_after(5, server, out)
    server = start("server", "train", "--resume", "--out", str(out))
    _kill_after(5, server, out)
    assert device.poll() is None
    steps = last_step(out) + 2

    resumed = run(tmp_path, "train", "--resume", "--out", str(out), "--steps", str(steps))
    assert resumed.returncode == 0, resumed.stderr
    assert device.wait(PATIENCE_S) == 0
    assert len(joined(out)) >= 3
    assert set(joined(out)) == {"faithful"}
    assert sum(isinstance(event, Resumed) for event in read_events(out / "events.jsonl")) == 2
    plain = train(load_config(Path(settings), {"steps": steps}), tmp_path / "plain").losses
    ours = losses(out)
    assert sorted(ours) == list(range(1, steps + 1))
    assert [ours[step] for step in sorted(ours)] == pytest.approx(plain, abs=1e-4)


def test_a_temporarily_full_disk_costs_no_step_and_no_event(
    tmp_path: Path,
    settings: str,
    mount_disk: Callable[[int], Path],
    start: Start,
) -> None:
    disk, said = mount_disk(16 << 20), tmp_path / "server.out"
    out, balloon = disk / "run", disk / "balloon"
    server = start("server", "train", settings, "--devices", "1", "--save-every", "2", "--out", str(out))
    wait_until(lambda: last_step(out) >= 3, server)
    _fill(balloon)
    for fact in ("cannot write the checkpoint", f"cannot write {out / 'events.jsonl'}"):
        wait_until(lambda fact=fact: fact in " ".join(said.read_text().split()), server)
    balloon.unlink()
    reached = last_step(out)
    wait_until(lambda: any(step > reached for step in _saved(out)), server)
    assert "Traceback" not in said.read_text()
    server.send_signal(signal.SIGINT)
    assert server.wait(PATIENCE_S) == 0
    done = [event.step for event in read_events(out / "events.jsonl") if isinstance(event, StepDone)]
    assert done == list(range(1, len(done) + 1))
    assert _saved(out)[-1] == len(done)


def _fill(balloon: Path) -> None:
    with suppress(OSError), balloon.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _kill_after(steps: int, server: Process, out: Path) -> None:
    reached = last_step(out)
    wait_until(lambda: last_step(out) >= reached + steps, server)
    server.kill()
    assert server.wait() == -signal.SIGKILL


def _saved(out: Path) -> list[int]:
    return [event.step for event in read_events(out / "events.jsonl") if isinstance(event, CheckpointSaved)]
