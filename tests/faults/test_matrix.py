"""Every fault at every moment: whatever one device does, the others compute all products right, in bounded time.

Four honest devices and one faulty one, which claims to be the fastest and so gets the most work. Everything is real
except the network and the clock (`virtual.py`). A cell of the matrix is a kind of fault in one of its manners, and the
phase in which it strikes, at once or a little later.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from tests.support.grids import covering_sample, sample_and_rest
from tests.support.virtual import run
from tests.support.world import World, layer

from cleave import events
from cleave.errors import ConnectionLost
from cleave.protocol import messages
from cleave.transport.faulty import MANNERS, Fault, Kind, Phase
from cleave.transport.memory import MemoryChannel

LIMIT_S = 90.0
"""Limit on virtual seconds for everything."""
ROUND_S = 20.0
"""Limit on virtual seconds for products, which take milliseconds, and for removing a silent device (about 10 s)."""
HONEST = ("ann", "bob", "cid", "dot")
KINDS: tuple[Kind, ...] = get_args(Kind)
PHASES: tuple[Phase, ...] = get_args(Phase)
SLOW_S, STALL_S = 3.0, 6.0

MEANINGLESS: dict[tuple[Kind, Phase], str] = {
    ("lie", "receiving"): "a liar lies when it returns a result; before, it is as from the beginning (joining)",
    ("lie", "computing"): "a liar lies when it returns a result; before, it is as from the beginning (joining)",
}
ENDS: set[Kind] = {"vanish", "half-open", "stall", "torn-frame", "lie", "deaf"}
"""After these a device is useless, so it must eventually leave the fleet."""


def cells() -> list[Any]:
    """Every kind of fault in every phase; the sample has each kind in every phase, and each of its manners."""
    faults: list[Fault] = []
    for kind in KINDS:
        for phase in PHASES:
            for index, manner in enumerate(MANNERS.get(kind, ("", "")) if (kind, phase) not in MEANINGLESS else ()):
                after = 2 * (index % 2)  # at once, or after some right answers
                faults.append(Fault(kind=kind, phase=phase, after=after, manner=manner, seconds=_seconds(kind, after)))
    axes = [{"at": (fault.kind, fault.phase), "how": (fault.kind, fault.manner, fault.after)} for fault in faults]
    sample = set(covering_sample(axes, 1))
    return [
        pytest.param(
            fault,
            id="-".join(filter(None, (fault.kind, fault.manner, fault.phase, str(fault.after)))),
            marks=() if index in sample else pytest.mark.exhaustive,
        )
        for index, fault in enumerate(faults)
    ]


def _seconds(kind: Kind, after: int) -> float:
    """A device that stalls after some right answers wakes up again, with results nobody waits for anymore."""
    if kind in ("slow", "drip"):
        return SLOW_S
    return STALL_S if kind == "stall" and after else math.inf


def virtually(main: Coroutine[object, object, None]) -> None:
    run(main, limit_s=LIMIT_S)


async def honest(world: World) -> None:
    for name in HONEST:
        await world.join(name)


def check_others(world: World) -> None:
    """Check that all honest devices are connected and never left, and that every departure has a reason."""
    left = world.departures()
    assert set(HONEST) <= world.here() - left.keys(), left
    assert all(left.values()), left


@pytest.mark.parametrize("fault", cells())
def test_one_faulty_device_costs_only_time(fault: Fault) -> None:
    async def main() -> None:
        world = World(seed=fault.after)
        await honest(world)
        faulty = world.dial("eve", (fault,), flops_per_s=4e10)
        if fault.phase != "joining":
            await world.until(lambda: "eve" in world.joined())
        for number in range(3):
            async with asyncio.timeout(ROUND_S):
                await world.products(layer(number))
        assert faulty.channel.struck == [fault], "the fault must have struck"
        check_others(world)
        if fault.kind in ENDS and fault.seconds == math.inf:
            async with asyncio.timeout(ROUND_S):
                await world.until(lambda: "eve" not in world.here())
            assert ("eve" in world.departures()) == ("eve" in world.joined())
        await world.products(layer(20))
        check_others(world)
        await world.close()

    virtually(main())


def test_a_run_is_reproducible_to_the_last_event_and_microsecond() -> None:
    """Otherwise an intermittent failure of a cell could not be investigated."""

    async def main() -> tuple[list[events.AnyEvent], float]:
        world = World(seed=7)
        await honest(world)
        await world.join("eve", (Fault(kind="torn-frame", phase="returning"),), flops_per_s=4e10)
        for number in range(2):
            await world.products(layer(number))
        await world.close()
        return world.events, world.loop.time()

    assert run(main(), limit_s=LIMIT_S) == run(main(), limit_s=LIMIT_S)


# ------------------------------------------------------------------------------------------------ several at once


PAIRS: tuple[tuple[Fault, Fault], ...] = (
    (Fault(kind="vanish", phase="computing"), Fault(kind="vanish", phase="computing")),
    (Fault(kind="vanish", phase="returning"), Fault(kind="lie", phase="returning")),
    (Fault(kind="stall", phase="computing"), Fault(kind="corrupt", phase="returning", manner="payload")),
    (Fault(kind="half-open", phase="receiving"), Fault(kind="flood", phase="computing")),
    (Fault(kind="torn-frame", phase="returning"), Fault(kind="slow", phase="receiving", seconds=SLOW_S)),
    (Fault(kind="replay", phase="returning", after=1), Fault(kind="duplicate", phase="joining")),
    (Fault(kind="lie", phase="joining", manner="scaled"), Fault(kind="lie", phase="joining", manner="scaled")),
)


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0].kind}+{pair[1].kind}")
@pytest.mark.parametrize("is_one_device", [False, True], ids=["two-devices", "one-device"])
def test_two_simultaneous_faults_cost_only_time(pair: tuple[Fault, Fault], is_one_device: bool) -> None:
    async def main() -> None:
        world = World()
        await honest(world)
        for number, script in enumerate((pair,) if is_one_device else ((pair[0],), (pair[1],))):
            world.dial(f"eve {number}", script, flops_per_s=4e10)
        for number in range(3):
            await world.products(layer(number))
        check_others(world)
        await world.close()

    virtually(main())


@pytest.mark.parametrize("seed", sample_and_rest(range(4), range(4, 12)))
def test_one_honest_device_among_many_faulty_ones_is_enough(seed: int) -> None:
    """Random scripts; a device that loses its connection rejoins, like `cleave join`, with a new script."""
    rng = np.random.default_rng(seed)

    def draw() -> Fault:
        kind, phase = KINDS[rng.integers(len(KINDS))], PHASES[rng.integers(len(PHASES))]
        seconds = {"slow": 0.5, "stall": 4.0}.get(kind, math.inf)
        return Fault(kind=kind, phase=phase, after=int(rng.integers(6)), seconds=seconds)

    async def main() -> None:
        world = World(seed=seed)
        await world.join("ann")

        async def come_and_go(name: str) -> None:
            for _ in range(3):
                device = world.dial(name, (draw(), draw()), flops_per_s=float(rng.uniform(5e9, 5e10)))
                await asyncio.wait([device.task])
                await asyncio.sleep(1.0)

        others = [world.loop.create_task(come_and_go(name), name=f"life of {name}") for name in ("eve", "fox", "gus")]
        for number in range(6):
            await world.products(layer(number))
            await asyncio.sleep(1.0)
        for other in others:
            other.cancel()
        assert "ann" in world.here() - world.departures().keys()
        assert all(world.departures().values())
        await world.close()

    run(main(), limit_s=5 * LIMIT_S)


# ------------------------------------------------------------------------------------------------ going and returning


def test_after_all_devices_vanish_one_that_returns_finishes_the_work() -> None:
    async def main() -> None:
        world = World()
        for name in HONEST:
            await world.join(name, (Fault(kind="vanish", phase="computing"),))
        work = world.loop.create_task(world.products(layer(1), layer(2)), name="work")
        await world.until(lambda: any(isinstance(event, events.Paused) for event in world.events))
        assert not world.here()
        await world.join("bob")
        await work
        assert world.here() == {"bob"}
        assert set(world.departures()) == set(HONEST)
        await world.close()

    virtually(main())


def test_work_survives_a_too_small_device_returning_first_after_all_vanish() -> None:
    """A device with no room for anything must not fail work that waits for others."""

    async def main() -> None:
        world = World()
        await world.join("ann", (Fault(kind="vanish", phase="computing"),))
        work = world.loop.create_task(world.products(layer(1)), name="work")
        await world.until(lambda: not world.here())
        world.dial("dwarf", memory_bytes=1)
        await world.until(lambda: "dwarf" in world.joined())
        await world.join("bob")
        await work
        await world.close()

    virtually(main())


@pytest.mark.parametrize("kind", ["vanish", "half-open", "torn-frame"])
def test_a_device_can_leave_and_return_under_its_name(kind: Kind) -> None:
    """Even before the server notices that it left; then it gets another name, until the first is free."""

    async def main() -> None:
        world = World()
        await honest(world)
        fault = Fault(kind=kind, phase="returning", after=1)
        before = await world.join("eve", (fault,), flops_per_s=4e10)
        work = world.loop.create_task(world.products(layer(1), layer(2)), name="work")
        while not before.channel.struck:
            await asyncio.sleep(0.01)
        before.task.cancel()
        await asyncio.wait([before.task])
        again = await world.join("eve", flops_per_s=4e10)
        await work
        await world.products(layer(3))
        assert again.name in world.here()
        assert "eve" in world.departures()
        check_others(world)
        await world.close()

    virtually(main())


# ------------------------------------------------------------------------------------------------ admission


@pytest.mark.parametrize(
    "offer",
    [
        {"flops_per_s": 5e-324},
        {"flops_per_s": 1e-300},
        {"flops_per_s": 9e17},
        {"flops_per_s": math.inf},
        {"flops_per_s": math.nan},
        {"flops_per_s": -1.0},
        {"memory_bytes": 1},
        {"memory_bytes": (1 << 50) - 1},
        {"memory_bytes": 2**64 - 1},
        {"memory_bytes": -(2**63)},
        {"flops_per_s": 5e-324, "memory_bytes": 1},
    ],
    ids=str,
)
def test_a_device_with_absurd_claims_about_itself_harms_no_other(offer: dict[str, Any]) -> None:
    async def main() -> None:
        world = World()
        await honest(world)
        absurd = world.dial("eve", **offer)
        while "eve" not in world.joined() and not absurd.task.done():
            await asyncio.sleep(0.01)
        for number in range(2):
            await world.products(layer(number))
        check_others(world)
        await world.close()

    virtually(main())


@pytest.mark.parametrize("name", ["", "ann", "server", "\0\x1b[2J", "\u202e" * 100, "x" * 60_000, "🔌" * 60])
def test_a_device_may_choose_any_name(name: str) -> None:
    async def main() -> None:
        world = World()
        await honest(world)
        device = await world.join(name)
        await world.products(layer(1))
        assert device.name in world.here()
        assert device.name not in {*HONEST, "server"}
        assert device.name.isprintable()
        check_others(world)
        await world.close()

    virtually(main())


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(1 << 16),
        bytes(4 << 20),
        messages.encode(messages.Leaving(reason="never came")),
        messages.encode(messages.Bye(reason="you go", rejoin=False)),
        messages.encode(messages.Probed(down_s=math.nan)),
        messages.encode(messages.Probed(down_s=0.0, payload=1 << 26)),
        msgspec.msgpack.encode({"type": "hello", "version": 2**63, "name": "", "flops_per_s": 1, "memory_bytes": 1}),
        None,
    ],
    ids=lambda said: "nothing" if said is None else said[:16].hex() or "empty",
)
def test_a_stranger_that_sends_no_hello_is_disconnected_without_effect(said: bytes | None) -> None:
    async def main() -> None:
        world = World()
        await honest(world)
        stranger = world.connect()
        if said is not None:
            await stranger._send(said)  # pyright: ignore[reportPrivateUsage]
        work = world.loop.create_task(world.products(layer(1)), name="work")
        await _until_lost(stranger)
        await work
        await world.products(layer(2))
        assert world.joined() == list(HONEST)
        check_others(world)
        await world.close()

    virtually(main())


async def _until_lost(channel: MemoryChannel) -> None:
    with suppress(ConnectionLost):
        while True:
            await channel.receive()
