"""`cleave join` against a server that means harm: nothing it says controls a volunteer's terminal or causes a crash."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.support.commands import PATIENCE_S, command, environment
from tests.support.samples import HOSTILE_TEXTS
from websockets.asyncio.server import ServerConnection, serve

from cleave.protocol import messages
from cleave.protocol.messages import AnyMessage

EVIL = " ".join(text[:60] for text in HOSTILE_TEXTS)
WELCOME = messages.Welcome(version=messages.VERSION, name=EVIL)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ([messages.Refused(reason=EVIL)], 2),
        ([WELCOME, messages.Idle(reason=EVIL), messages.Bye(reason=EVIL, rejoin=False)], 0),
    ],
    ids=["refused", "welcome-idle-bye"],
)
async def test_a_hostile_server_prints_nothing_but_plain_text(
    tmp_path: Path, script: list[AnyMessage], code: int
) -> None:
    async def answer(connection: ServerConnection) -> None:
        await connection.recv()
        for message in script:
            await connection.send(messages.encode(message))
        await connection.wait_closed()

    async with asyncio.timeout(PATIENCE_S), serve(answer, "127.0.0.1", 0) as server:
        port = next(iter(server.sockets)).getsockname()[1]
        process = await asyncio.create_subprocess_exec(
            *command("join", f"127.0.0.1:{port}", "--memory", "200MB", "--threads", "1"),
            env={**environment(tmp_path), "COLUMNS": "5000"},
            stderr=asyncio.subprocess.PIPE,
        )
        _, told = await process.communicate()
    assert process.returncode == code, told.decode()
    assert all(line.isprintable() for line in told.decode().split("\n"))
    assert "[/x] [bold red]not markup[/] [link=file:///etc/passwd]here" in told.decode()
    assert "Traceback" not in told.decode()
