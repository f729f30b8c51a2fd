"""What `cleave view` answers, and to whom."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest

from cleave.report.viewing import viewer
from cleave.run_files import EVENTS

LOG = b'{"event":"note","time_s":0,"text":"hello"}\n'


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ThreadingHTTPServer]:
    (tmp_path / EVENTS).write_bytes(LOG)
    with viewer(tmp_path / EVENTS) as made:
        threading.Thread(target=made.serve_forever, daemon=True).start()
        yield made
        made.shutdown()


def get(server: ThreadingHTTPServer, path: str, host: str = "127.0.0.1") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", path, headers={"Host": f"{host}:{server.server_port}"})
    answer = connection.getresponse()
    found = answer.status, answer.read()
    connection.close()
    return found


def test_the_log_and_the_page_are_there_and_nothing_else(server: ThreadingHTTPServer) -> None:
    assert get(server, "/api/events") == (200, LOG)
    assert get(server, "/")[0] == get(server, "/", "localhost")[0] == 200
    assert {get(server, path)[0] for path in ("/join", "/web/../viewing.py", "/etc/passwd")} == {404}


def test_a_name_that_others_point_at_this_machine_gets_nothing(server: ThreadingHTTPServer) -> None:
    status, body = get(server, "/api/events", "evil.example")
    assert status == 403
    assert LOG not in body


def test_a_log_that_is_gone_is_said_and_no_traceback(
    server: ThreadingHTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / EVENTS).unlink()
    assert get(server, "/api/events")[0] == 404
    assert "Traceback" not in capsys.readouterr().err
