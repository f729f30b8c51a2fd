"""`cleave view`: the dashboard of a run that is not training, or of a simulated one, from its event log alone."""

from __future__ import annotations

import shutil
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cleave.disk import open_regular
from cleave.web import HEADERS, File, files

_NOTHING = File(b"null", "application/json")
"""The state of a fleet that is no more."""
_LIVE = ("/api/status", "/api/plan", "/api/activity", "/api/advice")
_OWN_NAMES = ("127.0.0.1", "localhost")


def viewer(events: Path, port: int = 0) -> ThreadingHTTPServer:
    """Serve the dashboard of an event log to this machine alone; `serve_forever` answers, `server_port` is where."""
    pages = files()

    class Answer(_Answer):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if self.headers.get("Host", "").lower().partition(":")[0] not in _OWN_NAMES:  # DNS rebinding
                self.send_error(HTTPStatus.FORBIDDEN, "open the address that cleave view printed")
            elif path == "/api/events":
                self.send_log(events)
            elif path in _LIVE:
                self.send_file(_NOTHING)
            elif path in pages and path != "/join":
                self.send_file(pages[path])
            else:
                self.send_error(HTTPStatus.NOT_FOUND)

    return ThreadingHTTPServer(("127.0.0.1", port), Answer)


class _Answer(BaseHTTPRequestHandler):
    def handle(self) -> None:
        with suppress(ConnectionError):  # the browser went away meanwhile
            super().handle()

    def send_file(self, file: File) -> None:
        self._begin(file.content_type)
        self.wfile.write(file.content)

    def send_log(self, path: Path) -> None:
        try:
            log = open_regular(path)
        except OSError as fault:
            self.send_error(HTTPStatus.NOT_FOUND, f"the event log cannot be read: {fault.strerror}")
            return
        with log:
            self._begin("application/x-ndjson")
            shutil.copyfileobj(log, self.wfile)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing of requests."""

    def _begin(self, content_type: str) -> None:
        self.send_response(200)
        for name, value in {**HEADERS, "Content-Type": content_type}.items():
            self.send_header(name, value)
        self.end_headers()
