"""One attack on a server's entrance: `python benchmarks/abuser.py KIND HOST:PORT TOKEN SECONDS COUNT`.

The kinds are joins, strangers and guesses. Runs at low priority, from several loopback addresses, and at its end prints
as JSON what it did and how much CPU time that took itself, which is not what is measured but shares the machine's cores
with it.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import sys
import time
from collections import Counter
from contextlib import suppress

import msgspec

from cleave.errors import CleaveError
from cleave.protocol import messages
from cleave.transport.base import Channel
from cleave.transport.websocket import dial

_GUESSES_PER_S = 100.0
_STAYS_AT_ONCE = 64
_RECONNECTS_PER_S = 150.0  # below what the gate lets in from this machine
_LAST_PROBE_BYTES, _MEASURED_S = 1 << 20, 0.3  # the server stops after this size, or earlier on a slow link
_UPGRADE = (
    b"GET /ws HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==\r\n\r\n"
)
_FRAME = b"\x82\xff" + (64 << 10).to_bytes(8, "big") + bytes(4) + bytes(64 << 10)
"""The largest message that a stranger may send."""
_OPENINGS = {"silent": b"", "half a request": b"GET /ws HTTP/1.1\r\nHost: ", "large frames": _UPGRADE}


class Done(msgspec.Struct, kw_only=True):
    """What an attack did, and what it cost the attacker."""

    done: dict[str, int] = {}
    cpu_s: float = 0.0
    seconds: float = 1.0


class Attack:
    def __init__(self, server: str, token: str, seconds: float, count: int) -> None:
        self.done: Counter[str] = Counter()
        self._host, _, port = server.rpartition(":")
        self._port, self._url, self._token, self._count = int(port), f"ws://{server}/ws", token, count
        self._until = time.monotonic() + seconds
        self._numbers = itertools.count()

    @property
    def _is_over(self) -> bool:
        return time.monotonic() >= self._until

    # -------------------------------------------------------------------------------------------- joins

    async def joins(self) -> None:
        """Join under one new name after another, and leave at once."""
        await asyncio.gather(*(self._come_and_go() for _ in range(_STAYS_AT_ONCE)))

    async def _come_and_go(self) -> None:
        while not self._is_over and (number := next(self._numbers)) < self._count:
            try:
                channel = await dial(self._url)
                try:
                    await join(channel, f"stay-{number}", self._token)
                    await channel.send(messages.Leaving(reason="next"))
                finally:
                    await channel.close()
                self.done["joined and left"] += 1
            except CleaveError:
                self.done["turned away"] += 1
                await asyncio.sleep(0.05)

    # -------------------------------------------------------------------------------------------- strangers

    async def strangers(self) -> None:
        """Keep many connections open that never show a token; replace each one that the server closes."""
        pace = asyncio.Semaphore(1)
        kinds = itertools.cycle(_OPENINGS)
        tasks = [asyncio.create_task(self._stand(number, next(kinds), pace)) for number in range(self._count)]
        await asyncio.sleep(self._until - time.monotonic())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _stand(self, number: int, kind: str, pace: asyncio.Semaphore) -> None:
        address = (f"127.0.{1 + number // 250}.{1 + number % 250}", 0)
        while True:
            async with pace:
                await asyncio.sleep(1 / _RECONNECTS_PER_S)
            with suppress(OSError):
                reader, writer = await asyncio.open_connection(self._host, self._port, local_addr=address)
                self.done[kind] += 1
                try:
                    writer.write(_OPENINGS[kind])
                    if kind == "large frames":
                        writer.write(_FRAME * 16)
                    while await reader.read(4096):
                        pass
                finally:
                    writer.transport.abort()

    # -------------------------------------------------------------------------------------------- guesses

    async def guesses(self) -> None:
        """Show wrong tokens at a steady rate, each over a connection of its own."""
        tasks: set[asyncio.Task[None]] = set()
        started = time.monotonic()
        while not self._is_over:
            due = int((time.monotonic() - started) * _GUESSES_PER_S)
            for _ in range(due - self.done["guessed"]):
                self.done["guessed"] += 1
                tasks.add(task := asyncio.create_task(self._guess()))
                task.add_done_callback(tasks.discard)
            await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _guess(self) -> None:
        with suppress(CleaveError):
            channel = await dial(self._url)
            try:
                await channel.send(_hello("guesser", secrets.token_urlsafe(8)))
                answer = (await channel.receive()).message
                self.done["refused" if isinstance(answer, messages.Refused) else "let in"] += 1
            finally:
                await channel.close()


async def join(channel: Channel, name: str, token: str) -> float:
    """Join as a device, slow enough to get little work; return the seconds until its link had been measured."""
    started, took_s, probe_bytes = time.perf_counter(), 0.0, 0
    await channel.send(_hello(name, token))
    answer = (await channel.receive()).message
    if not isinstance(answer, messages.Welcome):
        raise CleaveError(f"expected a welcome, got {answer}")
    with suppress(TimeoutError):
        while probe_bytes < _LAST_PROBE_BYTES:
            async with asyncio.timeout(_MEASURED_S if probe_bytes else None):
                received = await channel.receive()
            if not isinstance(received.message, messages.Probe) or received.message.answer < probe_bytes:
                break  # work, or a heartbeat: it has joined
            probe_bytes = received.message.answer
            await channel.send(messages.Probed(down_s=received.link_s, payload=probe_bytes), bytes(probe_bytes))
            took_s = time.perf_counter() - started
    return took_s


def _hello(name: str, token: str) -> messages.Hello:
    return messages.Hello(
        version=messages.VERSION, name=name, token=token, flops_per_s=1e8, memory_bytes=1 << 28, kernel="numpy"
    )


def main() -> None:
    os.nice(10)
    kind, server, token, seconds, count = sys.argv[1:]
    attack = Attack(server, token, float(seconds), int(count))

    async def run() -> None:
        await getattr(attack, kind)()

    started = time.monotonic()
    asyncio.run(run())
    took_s = time.monotonic() - started
    sys.stdout.buffer.write(msgspec.json.encode(Done(done=attack.done, cpu_s=time.process_time(), seconds=took_s)))


if __name__ == "__main__":
    main()
