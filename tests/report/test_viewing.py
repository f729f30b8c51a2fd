"""What `cleave view` answers, and to whom."""

from __future__ import annotations

import http.client
import subprocess
import threading
import urllib.request
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from tests.support.commands import command, environment

from cleave.cli.main import main
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


def test_a_mistake_is_one_sentence_that_says_what_to_do(
    server: ThreadingHTTPServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, fact in (
        (["nowhere", "--dir", str(tmp_path)], "nowhere"),
        ([str(tmp_path / EVENTS), "--port", "70000"], "65535"),
        ([str(tmp_path / EVENTS), "--port", str(server.server_port)], str(server.server_port)),
    ):
        assert main(["view", *arguments]) == 2
        (sentence,) = capsys.readouterr().err.splitlines()
        assert fact in sentence


def test_the_command_says_where_and_answers_there(tmp_path: Path) -> None:
    (tmp_path / EVENTS).write_bytes(LOG)
    viewing = subprocess.Popen(
        command("view", str(tmp_path / EVENTS)), env=environment(tmp_path), stdout=subprocess.PIPE, text=True
    )
    try:
        assert viewing.stdout is not None
        address = next(word for word in viewing.stdout.readline().split() if word.startswith("http://"))
        with urllib.request.urlopen(f"{address}api/events", timeout=30) as answer:
            assert answer.read() == LOG
    finally:
        viewing.kill()
        viewing.communicate()
