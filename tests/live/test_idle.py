"""When devices sit idle, the server, the device and the summary say why and what would change it."""

from __future__ import annotations

import signal
from pathlib import Path

from tests.live.conftest import Start
from tests.support.commands import PATIENCE_S, departures, free_port, joined, last_step, wait_until


def test_a_server_that_needs_no_devices_tells_itself_and_them(tmp_path: Path, settings: str, start: Start) -> None:
    out, address = tmp_path / "run", f"127.0.0.1:{free_port()}"
    server = start("server", "train", settings, "--listen", address, "--offload", "auto", "--out", str(out))
    wait_until(lambda: "waiting for a device to join" in (tmp_path / "server.out").read_text(), server)
    device = start("device", "join", address, "--name", "spare", "--threads", "1", "--memory", "1GB")
    wait_until(lambda: "offload always" in (tmp_path / "device.out").read_text(), device)
    late = start("late", "join", address, "--name", "late", "--threads", "1", "--memory", "1GB")
    wait_until(lambda: "offload always" in (tmp_path / "late.out").read_text(), late)
    assert set(joined(out)) == {"spare", "late"}
    assert last_step(out) >= 1
    late.send_signal(signal.SIGTERM)
    assert late.wait(PATIENCE_S) == 0
    wait_until(lambda: departures(out).get("late"), server)
    assert "stopped by its owner" in departures(out)["late"]
    server.send_signal(signal.SIGINT)
    assert server.wait(PATIENCE_S) == 0
    said = (tmp_path / "server.out").read_text()
    assert "devices have no work" in said
    assert "spare had no work" in said
