"""`cleave train` as a person runs it: devices and servers in separate processes, killed and joined by hand."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import psutil
import pytest
from tests.live.conftest import Start
from tests.support.commands import (
    PATIENCE_S,
    departures,
    free_port,
    joined,
    last_step,
    local_devices,
    losses,
    run,
    wait_until,
)
from tests.support.runs import train

from cleave.config import load_config
from cleave.events import CheckpointSaved, read_events

NEAR = 1e-4


def assert_losses_are_plain_torchs(run_directory: Path, steps: int) -> None:
    """Repeat the run in this process without a fleet, and compare the loss of every step."""
    config = load_config(run_directory / "config.toml", {"steps": steps})
    plain, ours = train(config, run_directory.parent / "plain").losses, losses(run_directory)
    assert sorted(ours) == list(range(1, steps + 1))
    assert [ours[step] for step in sorted(ours)] == pytest.approx(plain, abs=NEAR)


def test_a_killed_server_resumes_with_the_same_losses_and_leaves_no_device_behind(
    tmp_path: Path, settings: str, start: Start
) -> None:
    out = tmp_path / "run"
    server = start("server", "train", settings, "--devices", "2", "--save-every", "3", "--out", str(out))
    wait_until(lambda: last_step(out) >= 5, server)
    devices = local_devices(server)
    assert len(devices) == 2
    server.kill()
    server.wait()
    assert not psutil.wait_procs(devices.values(), PATIENCE_S)[1]
    assert any(isinstance(event, CheckpointSaved) for event in read_events(out / "events.jsonl"))

    steps = last_step(out) + 2
    resumed = run(tmp_path, "train", "--resume", "--out", str(out), "--steps", str(steps), "--json")
    assert resumed.returncode == 0, resumed.stderr
    assert json.loads(resumed.stdout)["steps"] == steps
    assert_losses_are_plain_torchs(out, steps)


def test_a_killed_device_costs_no_step_and_changes_no_loss(tmp_path: Path, settings: str, start: Start) -> None:
    out = tmp_path / "run"
    server = start("server", "train", settings, "--devices", "2", "--save-every", "0", "--out", str(out))
    wait_until(lambda: last_step(out) >= 3, server)
    name, device = local_devices(server).popitem()
    device.kill()
    wait_until(lambda: departures(out).get(name), server)
    done = last_step(out)
    wait_until(lambda: last_step(out) >= done + 3, server)
    server.send_signal(signal.SIGINT)
    assert server.wait(PATIENCE_S) == 0
    assert_losses_are_plain_torchs(out, last_step(out))


def test_a_late_joiner_gets_work_and_an_interrupt_ends_device_and_run(
    tmp_path: Path, settings: str, start: Start
) -> None:
    out, address = tmp_path / "run", f"127.0.0.1:{free_port()}"
    server = start("server", "train", settings, "--devices", "1", "--listen", address, "--out", str(out))
    wait_until(lambda: last_step(out) >= 2, server)
    late = start("late", "join", address, "--name", "late", "--threads", "1", "--memory", "1GB")
    wait_until(lambda: "late" in joined(out), server)
    done = last_step(out)
    wait_until(lambda: last_step(out) >= done + 3, server)
    late.send_signal(signal.SIGINT)
    assert late.wait(PATIENCE_S) == 0
    said = (tmp_path / "late.out").read_text()
    assert "joined" in said
    assert "contributed" in said
    wait_until(lambda: "late" in departures(out), server)
    assert "stopped by its owner" in departures(out)["late"]
    server.send_signal(signal.SIGINT)
    assert server.wait(PATIENCE_S) == 0
    assert f"--resume --out {out}" in (tmp_path / "server.out").read_text()
