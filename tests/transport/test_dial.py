"""Laws of dialing a server: a wrong address and an absent or foreign server are different errors, with a reason."""

from __future__ import annotations

import asyncio

import pytest
from tests.support.channels import SOON_S

from cleave.errors import ConnectionLost, InputError
from cleave.server.service import Service
from cleave.transport.websocket import dial


@pytest.mark.parametrize(
    "url",
    [
        "",
        "127.0.0.1:7077",
        "http://127.0.0.1:7077/ws",
        "ws:///ws",
        "ws://127.0.0.1:99999/ws",
        "ws://127.0.0.1:port/ws",
        "ws://[::1/ws",
        "ws://a..b:7077/ws",
        "ws://127.0.0.1:7077/ws#there",
    ],
)
async def test_an_invalid_address_is_an_input_error(url: str) -> None:
    with pytest.raises(InputError, match=r"expected the address of a server such as ws://192\.168\.1\.20:7077, got"):
        await dial(url)


async def test_an_absent_server_is_a_lost_connection_with_a_one_sentence_reason() -> None:
    async def nothing(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    server = await asyncio.start_server(nothing, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    with pytest.raises(ConnectionLost, match=f"cannot reach ws://127.0.0.1:{port}/ws: .+"):
        await dial(f"ws://127.0.0.1:{port}/ws")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi",
        b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 101 OK\r\nUpgrade: \x1b[2J\xc2\x9b31m\r\nConnection: \x1b[2J\r\n\r\n",
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
        b"SSH-2.0-OpenSSH_9.6\r\n",
        b"\x00\x01\x02\x03",
        b"",
    ],
    ids=["200", "404", "escapes", "101-without-key", "ssh", "binary", "hangs-up"],
)
async def test_a_server_other_than_cleave_is_a_lost_connection(answer: bytes) -> None:
    async def reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()
        await writer.wait_closed()

    async with asyncio.timeout(SOON_S), await asyncio.start_server(reply, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(ConnectionLost, match=f"ws://127.0.0.1:{port}/ws .*Cleave server: .+") as lost:
            await dial(f"ws://127.0.0.1:{port}/ws")
        assert str(lost.value).isprintable()


async def test_another_path_of_a_cleave_server_is_a_lost_connection(service: Service) -> None:
    for path in ("", "/", "/api/status", "/wss"):
        with pytest.raises(ConnectionLost, match=f"ws://{service.address}{path} .*Cleave server: .+"):
            await dial(f"ws://{service.address}{path}")
