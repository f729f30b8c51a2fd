"""Devices may leave, fail or lag at any moment of a pass: losses and gradients stay the same, and nothing is left over.

Everything is real except the network and the clock. One device alone, undisturbed, gives the result that every other
run must match (`tests/training` shows that it is right). A cell is an arrangement, one of its devices, the moment it
meets its fate, and that fate.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Literal, get_args

import numpy as np
import pytest
from tests.support import plans
from tests.support.doomed import DoomedChannel, Moment
from tests.support.grids import sample_and_rest
from tests.support.plans import Layout
from tests.support.stacks import SmallDecoder, decoder
from tests.support.virtual import run
from tests.support.world import ROOMY, Device, World

from cleave import events
from cleave.core.model.batch import Gradients, Matrix
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.errors import FleetGoneError
from cleave.server.resident import tasks
from cleave.transport.base import Channel

LIMIT_S = 300.0
ALLOWED = 2e-5
"""Tolerance relative to a matrix's largest entry, since sums are computed in another order."""
SEQUENCES, SEQUENCE, CHUNK = 4, 6, 4
Fate = Literal["vanish", "leave", "half-open", "fail", "stall", "slow"]
FATES: tuple[Fate, ...] = get_args(Fate)
STALL_S = 6.0

LAYOUTS: dict[str, Layout] = {
    "mates": [(5, [["ann", "bob"]])],
    "pipeline": [(2, [["ann"]]), (3, [["bob"]])],
    "slices": [(1, [["ann"], ["bob"]]), (3, [["ann", "cid"]]), (1, [["bob"], ["cid"], ["ann"]])],
    "mixed": [(1, [["ann", "bob"], ["bob", "cid"]]), (3, [["cid", "ann"]]), (1, [["ann", "cid"], ["bob"]])],
}
MOMENTS: dict[str, Moment] = {
    "before": Moment("forward", "told"),
    "computing": Moment("forward", "returning"),
    "forward": Moment("forward", "returned", 2),
    "turning": Moment("backward", "told"),
    "backward": Moment("backward", "returned", 1),
    "ending": Moment("backward", "returning", 3),
    "reading": Moment("collect", "told"),
    "half read": Moment("collect", "returned"),
}


def arranged(layout: Layout, chunk: int = CHUNK) -> Callable[..., ResidentPlan]:
    return plans.arranged(layout, chunk)


def names(layout: Layout) -> list[str]:
    return sorted({name for _, slices in layout for column in slices for name in column})


# ------------------------------------------------------------------------------------------------ a pass and its laws


async def go(
    world: World, model: SmallDecoder, *, seed: int = 0, sequences: int = SEQUENCES, sequence: int = SEQUENCE
) -> tuple[Matrix, Gradients]:
    """Run a batch forward and back; without a head, from a random gradient."""
    batch = model.batch(world.cluster, seed=seed, sequences=sequences, sequence=sequence)
    running = world.cluster.run(model.decoder, batch)
    outputs = await asyncio.wrap_future(running.outputs)
    dy = None
    if model.decoder.head is None:
        dy = np.random.default_rng(seed + 100).normal(0, 1 / len(outputs), outputs.shape).astype(np.float32)
    return outputs.copy(), await asyncio.wrap_future(running.backward(dy))


@functools.cache
def expected(has_head: bool, seed: int) -> tuple[Matrix, Gradients]:
    async def main() -> tuple[Matrix, Gradients]:
        world = World(arrange=arranged([(5 if has_head else 4, [["ann"]])], SEQUENCE))
        await world.join("ann")
        found = await go(world, decoder(has_head=has_head), seed=seed)
        await world.close()
        return found

    return run(main(), limit_s=LIMIT_S)


def virtually(main: Coroutine[object, object, None]) -> None:
    for has_head in (True, False):
        for seed in (0, 1):
            expected(has_head, seed)  # in its own loop, before this one
    run(main, limit_s=LIMIT_S)


def assert_same(found: tuple[Matrix, Gradients], has_head: bool = True, seed: int = 0) -> None:
    assert_alike(found, expected(has_head, seed))


def assert_alike(found: tuple[Matrix, Gradients], other: tuple[Matrix, Gradients]) -> None:
    (outputs, gradients), (those, these) = found, other
    _near(outputs, those)
    assert gradients.dx is not None
    assert these.dx is not None
    _near(gradients.dx, these.dx)
    for ours, theirs in zip(gradients.parameters, these.parameters, strict=True):
        assert ours is not None
        assert theirs is not None
        _near(ours, theirs)


def _near(ours: Matrix, theirs: Matrix) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=ALLOWED * max(float(np.abs(theirs).max()), 1e-2))


async def assert_nothing_is_left(world: World, devices: Sequence[Device]) -> None:
    """Check that no task is left, and that connected devices soon drop all states and accumulators of the pass."""
    ledger = world.cluster.engine.ledger
    ledger.check()
    assert not ledger.is_busy
    async with asyncio.timeout(60.0):
        while any(_has_made(device) for device in devices if device.name in world.here()):
            await asyncio.sleep(1.0)  # virtual, until all messages are through


def _has_made(device: Device) -> bool:
    store = device.worker._store  # pyright: ignore[reportPrivateUsage]
    held = store._operands.values()  # pyright: ignore[reportPrivateUsage]
    return bool(store._states) or any(one.is_accumulator for one in held)  # pyright: ignore[reportPrivateUsage]


def recovered(world: World) -> set[str]:
    return {event.device for event in world.events if isinstance(event, events.Recovered)}


async def doom(
    world: World, name: str, moment: Moment, fate: Fate, *, others: Sequence[Device] = (), memory_bytes: int = ROOMY
) -> Device:
    """Join a device that meets its fate at the given moment; `others` vanish with it."""
    device: Device

    async def meet() -> bool:
        for other in others:
            await other.channel._inner.close()  # pyright: ignore[reportPrivateUsage]
        match fate:
            case "vanish":
                await channel().end()
            case "leave":
                world.loop.create_task(device.worker.leave("someone needs it"))
            case "half-open":
                channel().stall(math.inf)
            case "stall":
                channel().stall(world.loop.time() + STALL_S)
            case "slow":
                channel().delay(2.0)
            case "fail":
                return False
        return True

    def channel() -> DoomedChannel:
        assert isinstance(device.channel, DoomedChannel)
        return device.channel

    def wrap(inner: Channel) -> DoomedChannel:
        return DoomedChannel(inner, moment, meet)

    device = world.dial(name, wrap=wrap, memory_bytes=memory_bytes)
    await world.until(lambda: name in world.joined())
    return device


# ------------------------------------------------------------------------------------------------ the matrix


def cells() -> list[Any]:
    """Every device of every arrangement at every moment; fates rotate so that each occurs at each moment."""
    found: list[Any] = []
    for has_head in (True, False):
        for layout in LAYOUTS if has_head else ("slices",):
            for victim in names(LAYOUTS[layout]):
                for moment in MOMENTS:
                    fate = FATES[len(found) % len(FATES)]
                    end = "loss" if has_head else "hidden"
                    found.append(
                        pytest.param(
                            layout, victim, moment, fate, has_head, id=f"{end}-{layout}-{victim}-{moment}-{fate}"
                        )
                    )
    return found


@pytest.mark.grid
@pytest.mark.parametrize(("layout", "victim", "moment", "fate", "has_head"), cells())
def test_a_pass_gives_the_same_result_whatever_happens_to_one_device(
    layout: str, victim: str, moment: str, fate: Fate, has_head: bool
) -> None:
    async def main() -> None:
        world = World(arrange=arranged(LAYOUTS[layout]))
        devices: list[Device] = []
        for name in [*names(LAYOUTS[layout]), "zoe"]:  # zoe stands in for a lost device
            is_doomed = name == victim
            devices.append(await (doom(world, name, MOMENTS[moment], fate) if is_doomed else world.join(name)))
        doomed = next(device for device in devices if device.name == victim)
        assert_same(await go(world, decoder(has_head=has_head)), has_head)
        assert isinstance(doomed.channel, DoomedChannel)
        assert doomed.channel.is_met, "the moment must have come"
        if moment in ("forward", "half read"):  # the next pass is undisturbed too
            assert_same(await go(world, decoder(has_head=has_head), seed=1), has_head, seed=1)
        await assert_nothing_is_left(world, devices)
        await world.close()

    virtually(main())


# ------------------------------------------------------------------------------------------------ several at once


@pytest.mark.grid(strength=1)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("layout", ["pipeline", "mixed"])
def test_two_devices_vanishing_at_once_cost_only_time(layout: str, moment: str) -> None:
    async def main() -> None:
        world = World(arrange=arranged(LAYOUTS[layout]))
        honest = [await world.join(name) for name in ("bob", "cid", "zoe")]
        await doom(world, "ann", MOMENTS[moment], "vanish", others=honest[:1])
        assert_same(await go(world, decoder()))
        assert world.here() == {"cid", "zoe"}
        await assert_nothing_is_left(world, honest)
        await world.close()

    virtually(main())


@pytest.mark.grid(strength=1)
@pytest.mark.parametrize("has_head", [True, False], ids=["loss", "hidden"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_after_all_devices_vanish_later_ones_finish_the_pass(moment: str, has_head: bool) -> None:
    """Under the names of the vanished devices, whose former results must not count."""

    async def main() -> None:
        world = World(arrange=arranged(LAYOUTS["slices"]))
        honest = [await world.join(name) for name in ("bob", "cid")]
        await doom(world, "ann", MOMENTS[moment], "vanish", others=honest)
        work = asyncio.ensure_future(go(world, decoder(has_head=has_head)))
        await world.until(lambda: any(isinstance(event, events.Paused) for event in world.events))
        assert not world.here()
        again = [await world.join(name) for name in ("bob", "cid", "ann")]
        assert_same(await work, has_head)
        await assert_nothing_is_left(world, again)
        await world.close()

    virtually(main())


@pytest.mark.grid(strength=1)
@pytest.mark.parametrize("has_head", [True, False], ids=["loss", "hidden"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_the_only_device_leaves_returns_and_starts_over(moment: str, has_head: bool) -> None:
    """With the very same plan: stored activations may be kept, partial sums may not."""

    async def main() -> None:
        world = World(arrange=arranged([(1, [["ann"], ["ann"]]), (3, [["ann"]]), (1, [["ann"], ["ann"]])]))
        await doom(world, "ann", MOMENTS[moment], "vanish")
        work = asyncio.ensure_future(go(world, decoder(has_head=has_head)))
        await world.until(lambda: "ann" in world.departures())
        again = await world.join("ann")
        assert_same(await work, has_head)
        await assert_nothing_is_left(world, [again])
        await world.close()

    virtually(main())


@pytest.mark.parametrize("seed", sample_and_rest(range(2), range(2, 5)))
def test_one_device_that_stays_is_enough_however_the_others_come_and_go(seed: int) -> None:
    rng = np.random.default_rng(seed)
    moments = list(MOMENTS.values())

    async def main() -> None:
        world = World(arrange=arranged(LAYOUTS["mixed"]))
        ann = await world.join("ann")

        async def come_and_go(name: str) -> None:
            for _ in range(4):
                moment = moments[rng.integers(len(moments))]
                fate: Fate = FATES[rng.integers(len(FATES))]
                device = await doom(world, name, moment, fate)
                await asyncio.wait([device.task], timeout=20.0)
                device.task.cancel()
                await asyncio.wait([device.task])
                await world.until(lambda: name not in world.here())
                await asyncio.sleep(1.0)

        others = [world.loop.create_task(come_and_go(name), name=f"life of {name}") for name in ("bob", "cid")]
        for number in range(6):
            assert_same(await go(world, decoder(has_head=number % 3 > 0), seed=number % 2), number % 3 > 0, number % 2)
            await asyncio.sleep(1.0)
        for other in others:
            other.cancel()
        await assert_nothing_is_left(world, [ann])
        await world.close()

    virtually(main())


@pytest.fixture
def one_gradient_per_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read every gradient by a task of its own, as those of larger models are: more moments to leave at."""
    monkeypatch.setattr(tasks, "STACK_BYTES", 0)


@pytest.mark.usefixtures("one_gradient_per_task")
@pytest.mark.grid(strength=1)
@pytest.mark.parametrize("second", [0, 1, 4, 9, 14])
@pytest.mark.parametrize("first", [0, 1, 5, 9])
def test_one_who_adds_a_lost_gradient_to_its_own_may_leave_in_turn(first: int, second: int) -> None:
    """Sequences of both then owe what they had added to, whether it is their own sum or one they share."""

    async def main() -> None:
        world = World(arrange=arranged([(5, [["ann", "bob", "cid"]])]))
        cid = await world.join("cid")
        await doom(world, "bob", Moment("collect", "returned", second), "vanish")
        await doom(world, "ann", Moment("collect", "returned", first), "vanish")
        assert_same(await go(world, decoder()))
        assert {"ann", "bob"} <= world.departures().keys()
        assert_same(await go(world, decoder(), seed=1), seed=1)
        await assert_nothing_is_left(world, [cid])
        await world.close()

    virtually(main())


@pytest.mark.parametrize("second", [0, 1])
def test_one_who_adds_a_stack_of_lost_gradients_to_its_own_may_leave_in_turn(second: int) -> None:
    async def main() -> None:
        world = World(arrange=arranged([(5, [["ann", "bob", "cid"]])]))
        cid = await world.join("cid")
        await doom(world, "bob", Moment("collect", "returned", second), "vanish")
        await doom(world, "ann", Moment("collect", "returned", 0), "vanish")
        assert_same(await go(world, decoder()))
        assert {"ann", "bob"} <= world.departures().keys()
        await assert_nothing_is_left(world, [cid])
        await world.close()

    virtually(main())


# ------------------------------------------------------------------------------------------------ reports, endings


@pytest.mark.parametrize("layout", ["mates", "pipeline"])
def test_a_recovery_is_reported_once(layout: str) -> None:
    async def main() -> None:
        world = World(arrange=arranged(LAYOUTS[layout]))
        for name in ("bob", "zoe"):
            await world.join(name)
        await doom(world, "ann", MOMENTS["backward"], "vanish")
        assert_same(await go(world, decoder()))
        (event,) = [event for event in world.events if isinstance(event, events.Recovered)]
        assert event.device == "ann"
        assert event.blocks > 0, "some of its units had been done"
        assert event.seconds > 0
        await world.close()

    virtually(main())


def test_a_departure_between_passes_needs_no_recovery() -> None:
    async def main() -> None:
        world = World(arrange=arranged(LAYOUTS["mates"]))
        ann, bob = [await world.join(name) for name in ("ann", "bob")]
        assert_same(await go(world, decoder()))
        await ann.channel.close("it has gone")
        await world.until(lambda: "ann" in world.departures())
        assert_same(await go(world, decoder(), seed=1), seed=1)
        assert not recovered(world)
        await assert_nothing_is_left(world, [bob])
        await world.close()

    virtually(main())


def test_a_stalled_device_that_wakes_up_stays_and_its_stale_results_do_not_count() -> None:
    """A lagging device gives up its sequences; its results for them no longer count when it wakes up."""

    async def main() -> None:
        world = World(arrange=arranged(LAYOUTS["mates"]))
        bob = await world.join("bob")
        ann = await doom(world, "ann", MOMENTS["computing"], "stall")
        assert_same(await go(world, decoder()))
        assert any(isinstance(event, events.DeviceLate) and event.device == "ann" for event in world.events)
        assert world.loop.time() < STALL_S, "nobody waited for it"
        await asyncio.sleep(2 * STALL_S)
        assert world.here() == {"ann", "bob"}, "being late is not a fault"
        assert_same(await go(world, decoder(), seed=1), seed=1)
        await assert_nothing_is_left(world, [ann, bob])
        await world.close()

    virtually(main())


def test_a_pass_left_without_devices_eventually_ends_with_a_reason() -> None:
    async def main() -> None:
        world = World(gone_s=20.0, arrange=arranged(LAYOUTS["mates"]))
        await doom(world, "ann", MOMENTS["backward"], "vanish")
        with pytest.raises(FleetGoneError, match="start devices"):
            await go(world, decoder())
        await world.join("bob")
        assert_same(await go(world, decoder()))
        await world.close()

    virtually(main())


def test_closing_the_server_ends_a_pass_with_a_reason() -> None:
    async def main() -> None:
        world = World(arrange=arranged(LAYOUTS["mates"]))
        await doom(world, "ann", MOMENTS["computing"], "half-open")
        work = asyncio.ensure_future(go(world, decoder()))
        later = asyncio.ensure_future(go(world, decoder(), seed=1))
        await asyncio.sleep(1.0)
        await world.close()
        for one in (work, later):
            with pytest.raises(FleetGoneError, match="the server closed"):
                await one

    virtually(main())


def test_a_useless_device_is_not_asked_again_and_work_waits_for_another() -> None:
    async def main() -> None:
        world = World(arrange=arranged(LAYOUTS["mates"]))

        class Useless(DoomedChannel):
            async def _come(self, when: Any, task: int) -> bool:
                return when != "returning"

        async def never() -> bool:
            return False

        world.dial("ann", wrap=lambda inner: Useless(inner, MOMENTS["before"], never))
        await world.until(lambda: "ann" in world.joined())
        work = asyncio.ensure_future(go(world, decoder()))
        await world.until(lambda: any(isinstance(event, events.Paused) for event in world.events))
        await world.join("bob")
        assert_same(await work)
        await world.close()

    virtually(main())


def test_a_device_that_can_only_run_forward_is_not_asked_forever() -> None:
    class Halfway(DoomedChannel):
        async def _come(self, when: Any, task: int) -> bool:
            return when != "returning" or self._kinds[task] != "backward"

    async def main() -> None:
        world = World(arrange=arranged([(5, [["ann"]])]))

        async def never() -> bool:
            return False

        world.dial("ann", wrap=lambda inner: Halfway(inner, MOMENTS["before"], never))
        await world.until(lambda: "ann" in world.joined())
        with pytest.raises(FleetGoneError, match="no connected device"):
            await go(world, decoder())
        await world.close()

    virtually(main())


# ------------------------------------------------------------------------------------------------ little memory


TIGHT: dict[str, Layout] = {
    "columns": [(2, [["ann"]]), (2, [["ann"]]), (1, [["ann"], ["ann"]])],
    "pipeline": [(2, [["ann"]]), (2, [["bob"]]), (1, [["ann"], ["bob"]])],
    "mates": [(2, [["ann", "bob"]]), (3, [["bob", "ann"]])],
}
LITTLE = 18_040
"""Bytes one device needs for the whole small decoder, with one sequence open."""
LARGE = decoder(hidden=128, head_dim=32, inner=768, words=512)
"""About 6 MB with its gradients; devices need 3 MB of workspace on top."""


@pytest.mark.parametrize("second", [0, 1, 5])
def test_two_half_read_departures_are_recovered_in_memory_for_one_account(
    second: int, one_gradient_per_task: None
) -> None:
    """The replacement for one is read before the replacement for the other begins."""

    async def main() -> None:
        world = World(arrange=arranged([(5, [["ann", "bob", "cid"]])]))
        await doom(world, "ann", Moment("collect", "returned", 2), "vanish", memory_bytes=LITTLE)
        await doom(world, "bob", Moment("collect", "returned", second), "vanish", memory_bytes=LITTLE)
        world.dial("cid", memory_bytes=LITTLE)
        await world.until(lambda: "cid" in world.joined())
        await go(world, decoder(), sequences=6)
        assert {"ann", "bob"} <= world.departures().keys()
        await world.close()

    virtually(main())


@functools.cache
def with_room() -> tuple[Matrix, Gradients]:
    async def main() -> tuple[Matrix, Gradients]:
        world = World(arrange=arranged([(5, [["ann"]])], SEQUENCE))
        await world.join("ann")
        found = await go(world, LARGE)
        await world.close()
        return found

    return run(main(), limit_s=LIMIT_S)


@pytest.mark.grid
@pytest.mark.parametrize("moment", ["never", "backward", "half read"])
@pytest.mark.parametrize("layout", TIGHT)
@pytest.mark.parametrize("memory_bytes", [4_500_000, 6_000_000, 7_000_000, 9_000_000])
def test_a_pass_is_right_with_just_enough_memory_and_fails_with_a_reason_below(
    layout: str, moment: str, memory_bytes: int
) -> None:
    """With any amount of memory, nothing waits forever and no honest device is disconnected."""
    expected_here = with_room()

    async def main() -> None:
        world = World(gone_s=5.0, arrange=arranged(TIGHT[layout]))
        if moment == "never":
            ann = world.dial("ann", memory_bytes=memory_bytes)
        else:
            ann = await doom(world, "ann", MOMENTS[moment], "vanish", memory_bytes=memory_bytes)
        bob = world.dial("bob", memory_bytes=memory_bytes)
        await world.until(lambda: len(world.joined()) == 2)
        work = asyncio.ensure_future(go(world, LARGE))
        await asyncio.wait([work], timeout=LIMIT_S / 2)
        assert work.done(), "nothing waits forever"
        if isinstance(fault := work.exception(), FleetGoneError):
            assert memory_bytes < 9_000_000, fault
            assert "MB" in str(fault), "the error says how much memory is missing"
        else:
            assert_alike(work.result(), expected_here)
            await assert_nothing_is_left(world, [ann, bob])
        assert "bob" in world.here(), world.departures()
        await world.close()

    virtually(main())


@pytest.mark.parametrize("seed", sample_and_rest(range(4), range(4, 10)))
def test_for_any_memory_sizes_the_model_fits_or_the_error_says_why(seed: int) -> None:
    """From too little for anything to enough for the whole model on each device."""
    rng, expected_here = np.random.default_rng(seed), with_room()

    async def main() -> None:
        world = World(gone_s=5.0)
        count = 1 + seed % 4
        sizes = [int(rng.uniform(3.3e6, 8e6)) for _ in range(count)]
        devices = [world.dial(f"d{number}", memory_bytes=size) for number, size in enumerate(sizes)]
        await world.until(lambda: len(world.joined()) == count)
        work = asyncio.ensure_future(go(world, LARGE))
        await asyncio.wait([work], timeout=LIMIT_S / 2)
        assert work.done(), (sizes, "nothing waits forever")
        if isinstance(fault := work.exception(), FleetGoneError):
            assert "add devices or memory" in str(fault), (sizes, fault)
        else:
            assert_alike(work.result(), expected_here)
            await assert_nothing_is_left(world, devices)
        assert len(world.here()) == count, (sizes, world.departures())
        await world.close()

    virtually(main())
