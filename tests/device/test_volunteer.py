"""Laws of a device on its owner's terms: the real join loop and worker over memory channels, in virtual time."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from tests.support import virtual
from tests.support.commands import command, environment

from cleave.config import load_settings
from cleave.device.join import serve
from cleave.device.kernels import NumpyKernel
from cleave.device.terms import Conditions, Heat, Sign, Terms
from cleave.device.terms_file import TermsFile
from cleave.device.transfers import Transfers
from cleave.device.volunteer import Volunteer
from cleave.device.worker import Contribution, Offer
from cleave.errors import ConnectionLost
from cleave.protocol import messages
from cleave.protocol.numbers import NumpyCodec
from cleave.protocol.programs import GemmProgram
from cleave.transport.address import parse_address
from cleave.transport.base import Channel
from cleave.transport.memory import MemoryChannel, memory_pair
from cleave.transport.shaped import Link, Shaped

LIMIT_S = 3600.0
OBEYED_S = 5.0
REJOINED_S = 20.0
MEMORY_BYTES = 1_000_000

AWAY = Sign(probe="the display", idle_s=3600.0, sees_all=True)
TYPING = Sign(probe="the keyboard", idle_s=2.0, sees_all=False)
FINE = Conditions(hour=23.0, on_batteries=False, signs=(AWAY,), heat=Heat(sensor="cpu", celsius=50.0))
TERMS = Terms(run_on_batteries=False, run_if_user_active=False, start_hour=22.0, end_hour=6.0, max_temperature=80.0)
VIOLATIONS = {
    "run_on_batteries": replace(FINE, on_batteries=True),
    "run_if_user_active": replace(FINE, signs=(AWAY, TYPING)),
    "start_hour": replace(FINE, hour=6.5),
    "max_temperature": replace(FINE, heat=Heat(sensor="cpu", celsius=85.0)),
}
UNKNOWN = {
    "run_on_batteries": replace(FINE, on_batteries=None),
    "run_if_user_active": replace(FINE, signs=(replace(AWAY, sees_all=False),)),
    "max_temperature": replace(FINE, heat=None),
}


@dataclass
class World:
    """A device in its join loop, conditions that a test sets, and the server's ends of what it dialed."""

    volunteer: Volunteer
    now: Conditions = FINE
    dialed: asyncio.Queue[MemoryChannel] = field(default_factory=lambda: asyncio.Queue[MemoryChannel]())
    hellos: list[messages.Hello] = field(default_factory=list[messages.Hello])
    told: list[str] = field(default_factory=list[str])
    contribution: Contribution = field(default_factory=Contribution)

    async def connect(self, url: str, link: Link | None) -> Channel:
        server, device = memory_pair()
        self.dialed.put_nowait(server)
        return device if link is None else Shaped(device, link, end="device")

    async def joined(self, within_s: float = REJOINED_S) -> MemoryChannel:
        """Welcome the device, which must dial within that time."""
        async with asyncio.timeout(within_s):
            server = await self.dialed.get()
            hello = (await server.receive()).message
            assert isinstance(hello, messages.Hello)
            self.hellos.append(hello)
            await server.send(messages.Welcome(version=messages.VERSION, name=hello.name))
            return server

    async def stays_away(self, seconds: float = 600.0) -> None:
        with pytest.raises(TimeoutError):
            await self.joined(within_s=seconds)


def device(terms: Terms, memory_bytes: Callable[[float], int] = lambda share: MEMORY_BYTES) -> World:
    world: list[World] = []
    world.append(World(Volunteer(terms, lambda: world[0].now, memory_bytes)))
    return world[0]


@asynccontextmanager
async def lent(world: World) -> AsyncGenerator[None]:
    offer = Offer(name="ann", token="", flops_per_s=1e9, memory_bytes=MEMORY_BYTES)
    serving = asyncio.ensure_future(
        serve(
            parse_address("127.0.0.1:7077"),
            NumpyKernel(),
            offer,
            world.contribution,
            world.told.append,
            60.0,
            world.volunteer,
            world.connect,
        )
    )
    try:
        yield
    finally:
        serving.cancel()
        with suppress(asyncio.CancelledError):
            await serving


def in_virtual_time(test: Coroutine[object, object, None]) -> None:
    virtual.run(test, limit_s=LIMIT_S)


async def store(server: Channel, operand: int, rows: int, cols: int) -> None:
    payload = NumpyCodec().encode(np.ones((rows, cols), dtype=np.float32), "fp32")
    await server.send(
        messages.Store(
            operand=operand, rows=rows, cols=cols, format="fp32", first_row=0, strip_rows=rows, payload=len(payload)
        ),
        payload.data,
    )


async def task(server: Channel, number: int, rows: int) -> None:
    """Ask for the product of operands 1 and 2, of which the device has to return `rows` x `rows` numbers."""
    program = GemmProgram(layout="nt", terms=((1, 2),), rows=rows, cols=rows)
    await server.send(messages.RunTask(task=number, priority=1, program=program, format="fp32"))


async def result(server: Channel, number: int) -> messages.Result:
    received = (await server.receive()).message
    assert isinstance(received, messages.Result)
    assert received.task == number
    return received


async def until_closed(server: Channel) -> None:
    with suppress(ConnectionLost):
        while True:
            await server.receive()


@pytest.mark.parametrize("term", list(VIOLATIONS))
def test_while_terms_are_violated_no_server_is_dialed_and_the_owner_is_told_why_once(term: str) -> None:
    async def test() -> None:
        world = device(TERMS)
        world.now = VIOLATIONS[term]
        async with lent(world):
            await world.stays_away()
            assert world.volunteer.paused
            world.now = FINE
            await world.joined()
        (paused,) = [text for text in world.told if text.startswith("paused")]
        assert term in paused

    in_virtual_time(test())


@pytest.mark.parametrize(
    ("term", "now"), [*VIOLATIONS.items(), *UNKNOWN.items()], ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_device_leaves_within_seconds_of_a_violation_and_takes_no_task_before_the_terms_hold(
    term: str, now: Conditions
) -> None:
    async def test() -> None:
        world = device(TERMS)
        async with lent(world):
            server = await world.joined()
            await store(server, 1, 8, 8)
            await store(server, 2, 8, 8)
            await task(server, 1, 8)
            await result(server, 1)
            world.now = now
            async with asyncio.timeout(OBEYED_S):
                leaving = (await server.receive()).message
                assert isinstance(leaving, messages.Leaving)
                assert term in leaving.reason
                with pytest.raises(ConnectionLost):
                    await server.receive()
            with pytest.raises(ConnectionLost):
                await task(server, 2, 8)
            await world.stays_away()
            assert world.contribution.tasks == 1
            world.now = FINE
            server = await world.joined()
            await store(server, 1, 8, 8)
            await store(server, 2, 8, 8)
            await task(server, 3, 8)
            await result(server, 3)
        assert world.told[-1].startswith("joined")

    in_virtual_time(test())


def test_a_server_learns_which_term_was_violated_and_nothing_that_was_observed() -> None:
    async def test() -> None:
        world = device(TERMS)
        async with lent(world):
            server = await world.joined()
            world.now = VIOLATIONS["run_if_user_active"]
            leaving = (await server.receive()).message
            await world.stays_away()
        assert leaving == messages.Leaving(reason="its owner's terms: run_if_user_active")
        assert "the keyboard had input 2 seconds ago" in world.told[-1], "the probe that fired is shown"

    in_virtual_time(test())


def test_a_device_leaves_in_time_even_while_a_result_blocks_its_uplink() -> None:
    async def test() -> None:
        world = device(replace(TERMS, max_bytes_sec_up=1000.0))
        async with lent(world):
            server = await world.joined()
            await store(server, 1, 300, 2)
            await store(server, 2, 300, 2)
            await task(server, 1, 300)  # a result that takes six minutes
            await asyncio.sleep(30.0)
            world.now = VIOLATIONS["run_on_batteries"]
            async with asyncio.timeout(OBEYED_S):
                with pytest.raises(ConnectionLost):
                    await server.receive()

    in_virtual_time(test())


def test_a_device_does_not_come_and_go_with_conditions_that_flicker() -> None:
    async def test() -> None:
        world = device(TERMS)
        async with lent(world):
            server = await world.joined()
            world.now = VIOLATIONS["run_on_batteries"]
            await until_closed(server)
            for _ in range(20):
                world.now = VIOLATIONS["run_on_batteries"]
                await asyncio.sleep(3.0)
                world.now = FINE
                await world.stays_away(5.0)

    in_virtual_time(test())


@pytest.mark.parametrize("term", list(VIOLATIONS))
def test_a_device_that_lost_its_server_does_not_dial_again_while_terms_are_violated(term: str) -> None:
    async def test() -> None:
        world = device(TERMS)
        async with lent(world):
            server = await world.joined()
            await server.close("restarting")
            world.now = VIOLATIONS[term]
            await world.stays_away()
            world.now = FINE
            await world.joined()

    in_virtual_time(test())


def test_bytes_per_second_are_kept_in_both_directions() -> None:
    async def test() -> None:
        clock = asyncio.get_running_loop().time
        world = device(Terms(max_bytes_sec_down=1000.0, max_bytes_sec_up=500.0))
        async with lent(world):
            server = await world.joined(within_s=60.0)
            began_s = clock()
            await store(server, 1, 100, 25)  # 10,000 bytes
            await store(server, 2, 100, 25)
            await task(server, 1, 100)
            await result(server, 1)
            assert clock() - began_s >= (2 * 10_000) / 1000.0 + 40_000 / 500.0

    in_virtual_time(test())


def test_the_daily_limit_ends_a_stay_and_holds_after_a_restart(tmp_path: Path) -> None:
    async def test() -> None:
        for stay in range(2):
            world = device(Terms(daily_xfer_limit_mb=0.5))
            world.volunteer.transfers = Transfers(tmp_path)
            async with lent(world):
                if stay == 0:
                    server = await world.joined()
                    for operand in range(15):
                        await store(server, operand, 100, 100)  # 40,000 bytes
                        await asyncio.sleep(0.1)
                    await until_closed(server)
                await world.stays_away()
            assert any("daily_xfer_limit_mb" in text for text in world.told)

    in_virtual_time(test())


@pytest.mark.parametrize("percent", [100.0, 25.0])
def test_a_limited_processor_rests_between_chunks_and_offers_what_remains(percent: float) -> None:
    async def test() -> None:
        clock = asyncio.get_running_loop().time
        world = device(Terms(cpu_usage_limit=percent))
        async with lent(world):
            server = await world.joined()
            await store(server, 1, 8, 8)
            await store(server, 2, 8, 8)
            await task(server, 0, 8)
            await result(server, 0)
            began_s, said_s = clock(), 0.0
            for number in range(1, 51):
                await task(server, number, 8)
                said_s += (await result(server, number)).compute_s
            took_s = clock() - began_s
        share = percent / 100
        assert world.hellos[0].flops_per_s == pytest.approx(1e9 * share)
        computed_s = said_s * share
        assert computed_s <= 1.1 * share * took_s
        assert said_s == pytest.approx(took_s, rel=0.1), "the server is told how fast the device is, rest included"

    in_virtual_time(test())


def test_memory_follows_the_user_by_leaving_and_rejoining_with_another_offer() -> None:
    async def test() -> None:
        terms = Terms(ram_max_used_busy_frac=0.2, ram_max_used_idle_frac=0.8)
        world = device(terms, lambda share: int(1000 * share))
        async with lent(world):
            server = await world.joined()
            world.now = replace(FINE, signs=(AWAY, TYPING))
            async with asyncio.timeout(OBEYED_S):
                leaving = (await server.receive()).message
            assert isinstance(leaving, messages.Leaving)
            assert "ram_max_used_busy_frac" in leaving.reason
            await world.joined()
        assert [hello.memory_bytes for hello in world.hellos] == [800, 200]

    in_virtual_time(test())


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="other systems keep no freed memory")
def test_a_paused_device_gives_its_memory_back_to_the_system() -> None:
    """Measured in a process of its own, which keeps freed memory as `cleave join` does."""
    measuring = (sys.executable, "-m", "tests.support.paused_memory")
    measured = subprocess.run(measuring, capture_output=True, text=True, check=True, timeout=240).stdout
    before, full, after = json.loads(measured)
    assert full - before > 150_000_000, "else there is nothing to free"
    assert after - before < 0.1 * (full - before)


def test_cleave_join_reads_its_terms_and_dials_nobody_while_they_are_violated(tmp_path: Path) -> None:
    """The real command with the real clock, beside a port that would take its call."""
    hour = datetime.now().hour
    (tmp_path / "terms.toml").write_text(f"start_hour = {(hour + 3) % 24}\nend_hour = {(hour + 4) % 24}\n")
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        address = f"127.0.0.1:{listening.getsockname()[1]}"
        joining = subprocess.Popen(
            command("join", address, "--memory", "500MB"), env=environment(tmp_path), stderr=subprocess.PIPE, text=True
        )
        try:
            assert joining.stderr is not None
            lines = iter(joining.stderr)
            paused = next(line for line in lines if line.startswith("paused"))
            assert f"{(hour + 3) % 24:02}:00" in paused
            assert "start_hour" in paused
            with pytest.raises(BlockingIOError):
                listening.accept()
        finally:
            joining.kill()
            joining.communicate()


def test_terms_that_change_are_obeyed_within_seconds_and_terms_that_cannot_be_read_forbid(tmp_path: Path) -> None:
    path = tmp_path / "terms.toml"

    async def test() -> None:
        world = device(Terms())

        def load() -> Volunteer:
            terms = load_settings(Terms, path if path.exists() else None, {})
            return Volunteer(terms, lambda: world.now, lambda share: int(1000 * share))

        file = world.volunteer.file = TermsFile(path, load)
        file.read()
        async with lent(world):
            server, is_here = await world.joined(), True
            for text, is_allowed in (
                ("run_on_batteries = false", True),
                ("max_bytes_sec_up = 1e6", True),
                ("start_hour = 1\nend_hour = 2", False),
                ("start_hour = 1\nend_hours = 2", False),
                ("ram_max_used_busy_frac = 0.5\nram_max_used_idle_frac = 0.5", True),
                ("run_if_user_active = false", True),
                (None, True),
            ):
                if text is None:
                    path.unlink()
                else:
                    path.write_text(text)
                if is_here:
                    async with asyncio.timeout(OBEYED_S):
                        leaving = (await server.receive()).message
                    assert leaving == messages.Leaving(reason="its owner's terms: revised")
                    await until_closed(server)
                is_here = is_allowed
                if is_here:
                    server = await world.joined()
                else:
                    await world.stays_away()
        told = "\n".join(world.told)
        assert "your terms: run_on_batteries = false" in told
        assert "01:00 to 02:00" in told
        assert "end_hours" in told
        assert world.told[-3].endswith("none")
        assert [hello.memory_bytes for hello in world.hellos[-3:]] == [500, 1000, 1000]

    in_virtual_time(test())


def test_without_terms_nothing_is_observed() -> None:
    async def test() -> None:
        def observe() -> Conditions:
            raise AssertionError("nothing needs to be known")

        world = device(Terms())
        world.volunteer.observe = observe
        async with lent(world):
            server = await world.joined()
            await asyncio.sleep(100.0)
            await server.send(messages.Probe(answer=0))
            assert isinstance((await server.receive()).message, messages.Probed)

    in_virtual_time(test())
