"""What waits in the system's buffers can be asked at any time."""

from __future__ import annotations

import asyncio
import socket

from cleave.transport.kernel_queue import unacknowledged_bytes


def test_nothing_waits_in_a_closed_connection() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            _, writer = await asyncio.open_connection(sock=ours)
            assert unacknowledged_bytes(writer.transport) == 0
            writer.close()
            await writer.wait_closed()
            assert unacknowledged_bytes(writer.transport) == 0

    asyncio.run(main())
