"""Progress, not noise, keeps a device alive: however a device holds up the others, a run loses bounded time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any

import pytest
from tests.faults.test_passes import arranged, assert_nothing_is_left, assert_same, expected, go
from tests.support import stallers
from tests.support.doomed import Moment
from tests.support.plans import Layout
from tests.support.stacks import decoder
from tests.support.stallers import MANNERS, Manner
from tests.support.virtual import run
from tests.support.world import World, layer

from cleave.core.schedule.lateness import OVERDUE, lost_s
from cleave.server.admission.tokens import Keys

LIMIT_S = 600.0
MATES: Layout = [(5, [["ann", "bob"]])]
MOMENTS: dict[str, Moment] = {
    "weights": Moment("forward", "told"),
    "forward": Moment("forward", "returning", 1),
    "backward": Moment("backward", "returning"),
    "collect": Moment("collect", "returning"),
}
RIGHT: tuple[Manner, ...] = ("claims slow", "claims fast")
"""Manners that only lie about durations."""
OVERHEAD_S = 3.0
"""For ticks, heartbeats and doing the work again; in virtual time, predictions are about 0."""


def virtually(main: Coroutine[object, object, None]) -> None:
    for seed in (0, 1):
        expected(True, seed)
    run(main, limit_s=LIMIT_S)


def bound_s(manner: Manner) -> float:
    return lost_s(0.0, moves_bytes=manner in ("noise", "drip")) + OVERHEAD_S


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("manner", MANNERS)
def test_a_pass_loses_bounded_time_to_a_staller(manner: Manner, moment: str) -> None:
    async def main() -> None:
        world = World(arrange=arranged(MATES))
        ann = await stallers.join(world, "ann", MOMENTS[moment], manner)
        bob = await world.join("bob")
        for number in range(3):
            started = world.loop.time()
            assert_same(await go(world, decoder(), seed=number % 2), seed=number % 2)
            assert world.loop.time() - started < bound_s(manner)
            world.cluster.step_ended()
        assert bob.name in world.here()
        if manner in RIGHT:
            assert ann.name in world.here(), "its results are right and on time"
        await assert_nothing_is_left(world, [bob])
        await world.close()

    virtually(main())


@pytest.mark.parametrize("manner", ["deaf", "pings"])
def test_six_stallers_at_once_cost_no_more_than_one(manner: Manner) -> None:
    """Failure 19."""

    async def main() -> None:
        eves = [f"eve{number}" for number in range(6)]
        world = World(arrange=arranged([(5, [["ann", "bob", *eves]])]))
        for name in eves:
            await stallers.join(world, name, Moment("backward", "told"), manner)
        for name in ("ann", "bob"):
            await world.join(name)
        for number in range(4):
            started = world.loop.time()
            await go(world, decoder(), sequences=8, seed=number % 2)
            assert world.loop.time() - started < bound_s(manner)
            world.cluster.step_ended()
        assert {"ann", "bob"} <= world.here()
        await world.close()

    virtually(main())


@pytest.mark.parametrize("manner", [manner for manner in MANNERS if manner not in RIGHT])
def test_who_stalls_in_every_pass_and_rejoins_at_once_costs_less_and_less(manner: Manner) -> None:
    passes, each_s = 24, 4.0

    async def main() -> None:
        world = World(arrange=arranged(MATES))
        await world.join("bob")

        async def live() -> None:
            while True:
                device = world.dial("ann", wrap=lambda inner: stallers.Staller(inner, MOMENTS["backward"], manner))
                await asyncio.wait([device.task])
                await asyncio.sleep(0.2)

        ann = world.loop.create_task(live(), name="life of ann")
        await world.until(lambda: "ann" in world.joined())
        lost: list[float] = []
        for number in range(passes):
            started = world.loop.time()
            assert_same(await go(world, decoder(), seed=number % 2), seed=number % 2)
            lost.append(world.loop.time() - started)
            await asyncio.sleep(each_s)
        assert max(lost) < bound_s(manner)
        assert 1 <= sum(seconds > 1.0 for seconds in lost) <= 8, "three stalls, then one between pauses that double"
        ann.cancel()
        await asyncio.wait([ann])
        await world.close()

    virtually(main())


@pytest.mark.parametrize("manner", ["pings", "noise", "deaf"])
def test_the_only_device_that_stalls_is_disconnected_so_that_another_can_take_over(manner: Manner) -> None:
    async def main() -> None:
        world = World(arrange=arranged([(5, [["ann"]])]))
        await stallers.join(world, "ann", MOMENTS["backward"], manner)
        work = asyncio.ensure_future(go(world, decoder()))
        started = world.loop.time()
        await world.until(lambda: "ann" not in world.here())
        most_s = lost_s(0.0, moves_bytes=manner == "noise", slack=OVERDUE) + OVERHEAD_S
        assert world.loop.time() - started < most_s
        await world.join("bob")
        assert_same(await work)
        await world.close()

    virtually(main())


def test_the_only_device_is_kept_while_it_returns_results_however_slowly() -> None:
    async def main() -> None:
        world = World(arrange=arranged([(5, [["ann"]])]))
        await stallers.join(world, "ann", MOMENTS["collect"], "drip")
        work = asyncio.ensure_future(go(world, decoder()))
        await asyncio.sleep(5 * lost_s(0.0, moves_bytes=True, slack=OVERDUE))
        assert world.here() == {"ann"}
        assert not world.departures()
        work.cancel()
        await world.close()

    virtually(main())


@pytest.mark.parametrize("manner", ["pings", "drip", "deaf", "tardy"])
def test_products_lose_bounded_time_to_a_staller(manner: Manner) -> None:
    async def main() -> None:
        world = World()
        for name in ("ann", "bob"):
            await world.join(name)
        await stallers.join(world, "eve", Moment("gemm", "returning", 1), manner, flops_per_s=4e10)
        for number in range(8):
            started = world.loop.time()
            await world.products(layer(number))
            assert world.loop.time() - started < bound_s(manner)
            await asyncio.sleep(0.5)
        assert {"ann", "bob"} <= world.here()
        await world.close()

    virtually(main())


@pytest.mark.parametrize("claimed", ["slow", "fast", "zero", "negative", "nan", "inf"])
@pytest.mark.parametrize("grain", ["gemm", "resident"])
def test_absurd_durations_stop_neither_planning_nor_anyone_else(grain: str, claimed: str) -> None:
    """Failure 1: one message made a rate 0, and the planner divided by it."""

    async def main() -> None:
        world = World()
        for name in ("ann", "bob"):
            await world.join(name)
        script = (stallers.Fault(kind="misreport", phase="joining", manner=claimed),)
        await world.join("eve", script, flops_per_s=4e10)
        for number in range(4):
            if grain == "gemm":
                await world.products(layer(number))
            else:
                assert_same(await go(world, decoder(), seed=number % 2), seed=number % 2)
                world.cluster.step_ended()
            profiles = world.cluster.profiles
            assert profiles is not None
            for rates in (profiles.flops_per_s, profiles.down_bytes_per_s, profiles.up_bytes_per_s):
                assert 0 < rates.min() <= rates.max() < math.inf
        await world.join("cid")  # everyone is planned anew
        await world.products(layer(9))
        assert_same(await go(world, decoder()))
        assert {"ann", "bob"} <= world.here()
        await world.close()

    virtually(main())


def test_a_new_name_does_not_help_who_claims_much_and_returns_nothing(tmp_path: Any) -> None:
    """Failure 6: every stay costs a little time, and the pauses between them double."""

    async def main() -> None:
        keys = Keys(path=tmp_path / "keys.json")
        tokens = [keys.add("device")[1] for _ in range(2)]
        world = World(keys=keys)
        for name in ("ann", "bob"):
            await world.join(name, token=tokens[0])
        await world.products(layer(1))
        is_over = False

        async def come_and_go() -> None:
            number = 0
            while not is_over:
                number += 1
                device = world.dial(
                    f"eve-{number}",
                    wrap=lambda inner: stallers.Staller(inner, Moment("gemm", "told"), "pings"),
                    flops_per_s=9.9e17,
                    token=tokens[1],
                )
                await asyncio.wait([device.task])
                await asyncio.sleep(0.2)

        eve = world.loop.create_task(come_and_go(), name="life of eve")
        while world.loop.time() < 100.0:
            await world.products(layer(2))
            await asyncio.sleep(2.0)
        is_over = True
        eve.cancel()
        await asyncio.wait([eve])
        stays = [name for name in world.joined() if name.startswith("eve")]
        assert 1 < len(stays) < 7, "pauses of 2, 4, 8, ... s"
        newcomer = await world.join("cid", token=tokens[0])
        assert newcomer.name in world.here(), "another token does not wait"
        await world.close()

    virtually(main())


def test_a_server_that_was_stopped_keeps_its_devices() -> None:
    """Failure 15: the silence of a server that was stopped is not that of its devices."""

    async def main() -> None:
        world = World()
        for name in ("ann", "bob"):
            await world.join(name)
        for _ in range(5):
            await asyncio.sleep(3.0)
            world.loop._now_s += 30.0  # type: ignore[attr-defined]  # stopped: no timer and no message in between
        await world.products(layer(1))
        assert world.here() == {"ann", "bob"}
        assert not world.departures()
        await world.close()

    virtually(main())


def test_a_newcomer_has_as_long_to_answer_as_any_other_device() -> None:
    """What it did not say before it was asked does not count as silence."""

    async def main() -> None:
        world = World()
        for name, silent_s in (("ann", 0.0), ("bob", 15.0), ("eve", math.inf)):
            newcomer = await world.join(name)
            newcomer.channel._silent_until_s = world.loop.time() + silent_s
        await asyncio.sleep(60.0)
        assert world.departures() == {"eve": "silent for 12 s"}
        await world.close()

    virtually(main())


@pytest.mark.parametrize("rate", [1e3, 1e16])
def test_plans_can_be_made_with_a_device_at_either_end_of_what_is_believed(rate: float) -> None:
    async def main() -> None:
        world = World()
        for name in ("ann", "bob", "eve"):
            await world.join(name)
        with_eve = world.cluster.engine.roster
        for one in (eve := with_eve.members["eve"]).flops, eve.down, eve.up:
            for _ in range(100):
                one.add(*((1e11, 1e11 / rate) if rate > 1e9 else (1.0, 1.0)))
                if rate < 1e9:
                    eve.flops.halve()
        with_eve.measured("eve")
        assert eve.flops.value == pytest.approx(rate, rel=0.01)
        assert eve.up.value == pytest.approx(min(rate, 20e9), rel=0.01)
        await world.products(layer(1))
        assert_same(await go(world, decoder()))
        assert world.here() == {"ann", "bob", "eve"}
        await world.close()

    virtually(main())
