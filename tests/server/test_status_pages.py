"""What a server says of itself: to load balancers, to Prometheus, to `cleave status`."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest

from cleave import Fleet
from cleave.cli.main import main
from cleave.errors import ConnectionLost, InputError
from cleave.server.admission.tokens import FILE, Keys
from cleave.server.step_clock import StepTime
from cleave.transport.address import Address, parse_address
from cleave.transport.http import get

SAMPLE = re.compile(r'cleave_(\w+)(\{device="[^"\n]+",trust="\w+"\})? (\S+)')
MATRIX = np.ones((256, 256), dtype=np.float32)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Address]]:
    """A fleet that has computed something, behind TLS and a token, and its address for administrators."""
    directory = tmp_path_factory.mktemp("run")
    person = Keys(path=directory / FILE)
    _, admin = person.add("admin")
    _, device = person.add("device")
    keys = Keys(path=directory / FILE)
    with Fleet("127.0.0.1:0", token=device, keys=keys, tls=True, directory=directory, offload="always") as fleet:
        fleet.start_devices(1)
        fleet.wait(1)
        fleet.matmul(MATRIX, MATRIX)
        yield fleet, dataclasses.replace(parse_address(fleet.url), token=admin)


def test_anybody_may_ask_whether_the_server_is_up(place: tuple[Fleet, Address]) -> None:
    _, address = place
    assert get(dataclasses.replace(address, token=""), "/healthz") == b"ok\n"


def test_metrics_have_types_and_the_figures_of_the_status(place: tuple[Fleet, Address]) -> None:
    fleet, address = place
    lines = get(address, "/metrics").decode().splitlines()
    samples = [SAMPLE.fullmatch(line) for line in lines if not line.startswith("#")]
    values = {found[1]: float(found[3]) for found in samples if found}
    assert len(values) == len(samples), "one device, so one sample per name, and each well formed"
    assert {line.split()[2] for line in lines if line.startswith("# TYPE")} == {f"cleave_{name}" for name in values}
    assert values["devices"] == 1
    assert values["products_total"] == fleet.status().products == 1
    assert values["device_done_flops_total"] == fleet.devices[0].done_flops > 0


def test_the_command_shows_devices_and_has_json(
    place: tuple[Fleet, Address], capsys: pytest.CaptureFixture[str]
) -> None:
    fleet, address = place
    assert main(["status", address.url, "--token", address.token, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(dataclasses.asdict(fleet.status())))
    assert main(["status", address.url, "--token", address.token]) == 0
    shown = capsys.readouterr().out
    assert fleet.devices[0].device in shown
    assert "1 device" in shown


def test_every_field_of_the_status_is_documented(place: tuple[Fleet, Address]) -> None:
    fleet, _ = place
    page = (Path(__file__).parents[2] / "docs" / "dashboard.md").read_text()
    told = set(re.findall(r"`(\w+)`", page))
    status = dataclasses.asdict(fleet.status())
    assert {*status, *status["devices"][0], *(field.name for field in dataclasses.fields(StepTime))} <= told


def test_a_device_token_and_a_wrong_certificate_are_refused(place: tuple[Fleet, Address]) -> None:
    fleet, address = place
    with pytest.raises(InputError, match="admin token"):
        get(dataclasses.replace(address, token=fleet.token), "/api/status")
    url, _, pin = address.url.partition("#sha256:")
    other = f"{url}#sha256:{'0' if pin[0] != '0' else '1'}{pin[1:]}"
    with pytest.raises(InputError, match="another certificate"):
        get(dataclasses.replace(address, url=other), "/api/status")


@pytest.mark.parametrize("option", [[], ["--json"]])
def test_another_kind_of_server_is_a_sentence(option: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"\xff\x1b[2J")

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        assert main(["status", f"127.0.0.1:{server.server_port}", *option]) == 2
    told = capsys.readouterr()
    assert "expected the status of a Cleave server" in told.err
    assert "\x1b[2J" not in told.out + told.err


def test_a_server_that_is_gone_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConnectionLost, match=r"127\.0\.0\.1:1"):
        get(parse_address("127.0.0.1:1"), "/healthz")
    assert main(["status", "127.0.0.1:1"]) == 2
    assert main(["status"]) == 2
    assert "CLEAVE_SERVER" in capsys.readouterr().err
