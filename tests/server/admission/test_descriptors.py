"""A server that may open few files: strangers at its door cost neither its checkpoints nor its newcomers."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from tests.server.admission.test_gate import TOKEN, joined

pytest.importorskip("resource")
LIMIT = 96
FILES_OF_A_SAVE = 12
SERVER = f"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, ({LIMIT} // 2, {LIMIT}))
from cleave.server.admission.tokens import Keys
from cleave.server.cluster import Cluster
from cleave.server.service import Service
keys = Keys({TOKEN!r})
service = Service("127.0.0.1:0", lambda loop: Cluster(loop, wire="fp32", keys=keys), keys=keys)
service.start()
print(service.port, resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
for line in sys.stdin:
    try:
        files = [open("/dev/null") for _ in range({FILES_OF_A_SAVE})]
        [file.close() for file in files]
        print("saved", flush=True)
    except OSError as fault:
        print(fault, flush=True)
service.stop("done", rejoin=False)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], flush=True)
"""


@pytest.fixture
def server() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


async def test_strangers_leave_a_server_with_few_descriptors_its_saves_and_its_newcomers(
    server: subprocess.Popen[str],
) -> None:
    assert server.stdin is not None
    assert server.stdout is not None
    port, soft = map(int, server.stdout.readline().split())
    assert soft == LIMIT, "it raises its own limit as far as it may"
    with ExitStack() as open_sockets:
        for _ in range(4 * LIMIT):
            open_sockets.enter_context(socket.create_connection(("127.0.0.1", port), 20.0))
        assert await joined(f"ws://127.0.0.1:{port}/ws", TOKEN) == "welcome"  # all others were accepted before
        server.stdin.write("save\n")
        server.stdin.flush()
        assert server.stdout.readline() == "saved\n"
    server.stdin.close()
    assert int(server.stdout.readline()) == LIMIT // 2, "and restores it"
