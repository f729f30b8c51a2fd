"""Audits of resident layers: liars are caught, honest devices are not accused, and no wrong result is handed out.

Everything is real except the network and the clock. The expected result of a pass is that of one honest device alone.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Literal, get_args

import numpy as np
import pytest
from tests.support import plans
from tests.support.plans import Layout
from tests.support.stacks import decoder
from tests.support.virtual import run
from tests.support.world import Device, World

from cleave import Fleet, events
from cleave.config import load_config
from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Gradients, Matrix
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.core.verify.trust import PROBATION, Level
from cleave.device.replay import replay
from cleave.errors import FleetGoneError, InputError
from cleave.protocol.messages import AnyMessage, Drop, RunTask, Store
from cleave.server.admission.tokens import Keys
from cleave.server.cluster import Cluster
from cleave.server.resident.audit_case import Message, Replay
from cleave.transport.base import Channel, Received
from cleave.transport.lying import Lie, LyingChannel, Manner

LIMIT_S = 600.0
SEQUENCES, SEQUENCE, CHUNK = 4, 6, 4
LAYOUTS: dict[str, Layout] = {
    "mates": [(5, [["ann", "eve"]])],
    "pipeline": [(2, [["eve"]]), (3, [["ann"]])],
    "slices": [(1, [["ann"], ["eve"]]), (3, [["bob"]]), (1, [["eve"], ["bob"]])],
}
HONEST = ("ann", "bob")
Kind = Literal["forward", "backward", "collect"]


class Watched(World):
    """A world whose cluster audits devices."""

    def __init__(
        self,
        layout: Layout = LAYOUTS["mates"],
        trust: Level = "known",
        *,
        wire: WireFormat = "fp32",
        seed: int = 0,
        gone_s: float = 60.0,
        replay: Replay = replay,
    ) -> None:
        super().__init__()
        self.cluster = Cluster(
            self.loop,
            wire=wire,
            alone_wait_s=gone_s,
            listener=self._hear,
            arrange=arranged(layout),
            keys=Keys(trust=trust),
            replay=replay,
            draw=np.random.default_rng(seed).random,
        )

    async def join_all(self, *names: str) -> None:
        for name in names:
            await self.join(name)

    async def join_liar(self, lie: Lie) -> Device:
        device = self.dial("eve", wrap=lambda inner: OverheardChannel(inner, lie))
        await self.until(lambda: "eve" in self.joined())
        return device

    def refused(self) -> list[str]:
        return [event.device for event in self.events if isinstance(event, events.ResultRefused)]

    def audited(self) -> Counter[str]:
        """Audited units per device."""
        found: Counter[str] = Counter()
        for event in self.events:
            if isinstance(event, events.Audited):
                found[event.device] += event.units
        return found


def arranged(layout: Layout) -> Callable[..., ResidentPlan]:
    return plans.arranged(layout, CHUNK)


class OverheardChannel(LyingChannel):
    """Also records what the device is sent."""

    def __init__(self, inner: Channel, lie: Lie) -> None:
        super().__init__(inner, lie)
        self.heard: list[AnyMessage] = []

    async def receive(self) -> Received:
        received = await super().receive()
        if isinstance(received.message, RunTask | Store | Drop):
            self.heard.append(received.message)
        return received


# ------------------------------------------------------------------------------------------------ a pass


async def go(
    world: World, *, has_head: bool = True, seed: int = 0, sequences: int = SEQUENCES
) -> tuple[Matrix, Gradients]:
    """Run a batch forward and back; without a head, from a random gradient."""
    model = decoder(has_head=has_head)
    batch = model.batch(world.cluster, seed=seed, sequences=sequences, sequence=SEQUENCE)
    running = world.cluster.run(model.decoder, batch)
    outputs = await asyncio.wrap_future(running.outputs)
    dy = None
    if not has_head:
        dy = np.random.default_rng(seed + 100).normal(0, 1, outputs.shape).astype(np.float32)
    return outputs.copy(), await asyncio.wrap_future(running.backward(dy))


async def evaluate(world: World, sequences: int = SEQUENCES) -> Matrix:
    model = decoder()
    batch = model.batch(world.cluster, sequences=sequences, sequence=SEQUENCE, is_trained=False, wants_dx=False)
    return await asyncio.wrap_future(world.cluster.run(model.decoder, batch).outputs)


@functools.cache
def expected(has_head: bool, seed: int, wire: WireFormat) -> tuple[Matrix, Gradients]:
    async def main() -> tuple[Matrix, Gradients]:
        world = Watched([(5, [["ann"]])], "own", wire=wire)
        await world.join("ann")
        found = await go(world, has_head=has_head, seed=seed)
        await world.close()
        return found

    return run(main(), limit_s=LIMIT_S)


def virtually(main: Coroutine[object, object, None]) -> None:
    for has_head in (True, False):
        for seed in (0, 1):
            expected(has_head, seed, "fp32")  # in its own loop, before this one
    run(main, limit_s=LIMIT_S)


def assert_same(found: tuple[Matrix, Gradients], *, has_head: bool = True, seed: int = 0) -> None:
    (outputs, gradients), (those, these) = found, expected(has_head, seed, "fp32")
    assert gradients.dx is not None
    assert these.dx is not None
    pairs = [(outputs, those), (gradients.dx, these.dx), *zip(gradients.parameters, these.parameters, strict=True)]
    largest = max(float(np.abs(theirs).max()) for _, theirs in pairs if theirs is not None)
    for ours, theirs in pairs:
        assert ours is not None
        assert theirs is not None
        atol = 2e-5 * max(float(np.abs(theirs).max()), 0.1 * largest)  # some gradients are pure rounding
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=atol)


# ------------------------------------------------------------------------------------------------ honest devices


def test_a_finished_pass_is_freed_without_the_garbage_collector() -> None:
    """Gradients and weights are large, and a collection may be long in coming."""

    async def main() -> None:
        world = Watched(LAYOUTS["slices"], "own")
        await world.join_all("ann", "bob", "eve")
        model = decoder()
        gc.disable()
        try:
            running = world.cluster.run(
                model.decoder, model.batch(world.cluster, sequences=SEQUENCES, sequence=SEQUENCE)
            )
            await asyncio.wrap_future(running.outputs)
            await asyncio.wrap_future(running.backward(None))
            freed = weakref.ref(running)
            del running
            await world.until(lambda: freed() is None)
        finally:
            gc.enable()
        await world.close()

    virtually(main())


@pytest.mark.parametrize("has_head", [True, False])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_audits_find_honest_devices_right_and_change_no_result(layout: str, has_head: bool) -> None:
    async def main() -> None:
        world = Watched(LAYOUTS[layout], "stranger")
        await world.join_all(*HONEST, "eve")
        for seed in (0, 1):
            assert_same(await go(world, has_head=has_head, seed=seed), has_head=has_head, seed=seed)
        assert not world.refused()
        assert all(member.trust.suspicion == 0 for member in world.cluster.here())
        await world.close()

    virtually(main())


@pytest.mark.parametrize("wire", get_args(WireFormat))
def test_audits_find_honest_devices_right_on_every_wire(wire: WireFormat) -> None:
    async def main() -> None:
        world = Watched(LAYOUTS["slices"], "stranger", wire=wire)
        await world.join_all(*HONEST, "eve")
        for seed in range(3):
            await go(world, seed=seed)
        assert world.audited().keys() == {*HONEST, "eve"}
        assert not world.refused()
        await world.close()

    virtually(main())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_strict_policy_audits_every_unit_of_every_pass(layout: str) -> None:
    chunks = -(-SEQUENCE // CHUNK)
    units = 2 * chunks * SEQUENCES * sum(len(slices) for _, slices in LAYOUTS[layout])

    async def main() -> None:
        world = Watched(LAYOUTS[layout], "stranger")
        await world.join_all(*HONEST, "eve")
        for number in (1, 2, 3):
            await go(world)
            assert world.audited().total() == number * units
        assert world.cluster.totals().audited_units == 3 * units
        await evaluate(world)
        assert world.audited().total() == 3 * units + units // 2
        await world.close()

    virtually(main())


def test_only_a_sample_is_audited_of_devices_found_right_before() -> None:
    async def main() -> None:
        world = Watched(LAYOUTS["pipeline"])
        await world.join_all("ann", "eve")
        for _ in range(PROBATION):
            before = world.audited()
            await go(world)
            assert (world.audited() - before).keys() == {"ann", "eve"}, "newcomers are always audited"
        before = len(world.events)
        for _ in range(60):
            await evaluate(world, sequences=1)
        audits = sum(isinstance(event, events.Audited) for event in world.events[before:])
        assert 3 <= audits <= 24, "about one in five passes"
        await world.close()

    virtually(main())


def test_the_none_policy_audits_nothing() -> None:
    async def main() -> None:
        world = Watched(trust="own")
        await world.join_all("ann", "eve")
        await go(world)
        assert not world.audited()
        await world.close()

    virtually(main())


def test_an_unknown_audit_policy_is_refused() -> None:
    with pytest.raises(InputError, match=r"trust.*blind"):
        Fleet("127.0.0.1:0", trust="blind")  # pyright: ignore[reportArgumentType]
    assert load_config(None, {}).trust is None
    for name, former in (("own", "none"), ("known", "sample"), ("stranger", "strict")):
        assert load_config(None, {"trust": name}).trust == load_config(None, {"trust": former}).trust == name
    with pytest.raises(InputError, match="trust"):
        load_config(None, {"trust": "blind"})


def test_no_message_reveals_that_a_device_is_audited() -> None:
    async def heard(trust: Level) -> list[AnyMessage]:
        world = Watched(LAYOUTS["slices"], trust)
        await world.join_all(*HONEST)
        device = await world.join_liar(Lie((), "zeros"))
        await go(world)
        await asyncio.sleep(1.0)  # virtual, until all messages are through
        await world.close()
        assert bool(world.audited()) == (trust == "stranger")
        assert isinstance(device.channel, OverheardChannel)
        return device.channel.heard

    assert run(heard("own"), limit_s=LIMIT_S) == run(heard("stranger"), limit_s=LIMIT_S)


# ------------------------------------------------------------------------------------------------ liars


@pytest.mark.grid
@pytest.mark.parametrize("manner", get_args(Manner))
@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_lie_is_caught_and_the_pass_is_right_without_the_liar(layout: str, kind: Kind, manner: Manner) -> None:
    async def main() -> None:
        world = Watched(LAYOUTS[layout])
        await world.join_all(*HONEST)
        lie = Lie((kind,), manner)
        await world.join_liar(lie)
        assert_same(await go(world))
        assert lie.told
        assert world.refused() == ["eve"]
        assert {member.name: member.wrong for member in world.cluster.here()} == {"ann": 0, "bob": 0, "eve": 1}
        await world.close()

    virtually(main())


@pytest.mark.parametrize(
    ("kind", "skip"), [*itertools.product(("forward", "backward"), range(4)), ("collect", 0), ("collect", 1)]
)
def test_a_single_wrong_result_is_caught(kind: Kind, skip: int) -> None:
    """One chunk of one sequence, or the gradients of one width among others."""

    async def main() -> None:
        world = Watched(LAYOUTS["pipeline"])
        await world.join_all(*HONEST)
        lie = Lie((kind,), skip=skip, most=1)
        await world.join_liar(lie)
        assert_same(await go(world))
        assert lie.told == 1
        assert world.refused() == ["eve"]
        await world.close()

    virtually(main())


@pytest.mark.parametrize("kind", ["forward", "backward"])
def test_without_a_head_outputs_and_gradients_are_right_despite_a_liar(kind: Kind) -> None:
    async def main() -> None:
        world = Watched(LAYOUTS["pipeline"])
        await world.join_all(*HONEST)
        await world.join_liar(Lie((kind,)))
        assert_same(await go(world, has_head=False), has_head=False)
        assert "eve" in world.refused()
        await world.close()

    virtually(main())


def test_an_evaluation_loss_is_right_despite_a_liar() -> None:
    async def main() -> None:
        world = Watched(LAYOUTS["pipeline"])
        await world.join_all(*HONEST)
        await world.join_liar(Lie(("forward",)))
        np.testing.assert_allclose(await evaluate(world), expected(True, 0, "fp32")[0], rtol=0, atol=1e-4)
        assert world.refused() == ["eve"]
        await world.close()

    virtually(main())


def test_a_constant_liar_is_quarantined_and_none_of_its_results_are_used() -> None:
    async def main() -> None:
        world = Watched()
        await world.join_all(*HONEST)
        await world.join_liar(Lie(("collect",)))
        for number in range(4):
            assert_same(await go(world, seed=number % 2), seed=number % 2)
        assert "quarantined" in world.departures()["eve"]
        assert world.here() == set(HONEST)
        await world.close()

    virtually(main())


@pytest.mark.parametrize("seed", range(2))
def test_an_occasional_liar_is_eventually_quarantined(seed: int) -> None:
    async def main() -> None:
        world = Watched(LAYOUTS["pipeline"], seed=seed)
        await world.join("ann")
        lie, moods = Lie(("forward",), "flipped", is_on=False), np.random.default_rng(seed)
        await world.join_liar(lie)
        passes = 0
        while "eve" in world.here():
            passes += 1
            assert passes < 2000
            await evaluate(world, sequences=1)
            lie.is_on = bool(moods.random() < 0.5)
        assert "quarantined" in world.departures()["eve"]
        assert set(world.refused()) == {"eve"}
        await world.close()

    virtually(main())


def test_a_liar_that_leaves_before_its_audit_is_suspect_when_it_returns() -> None:
    async def main() -> None:
        world = Watched(LAYOUTS["pipeline"])
        await world.join_all(*HONEST)
        lie = Lie(("forward",))
        device = await world.join_liar(lie)
        running = asyncio.ensure_future(go(world))
        while lie.told < 4:
            await asyncio.sleep(1e-4)  # virtual
        await device.channel.close("it has seen enough")
        assert_same(await running)
        assert world.refused() == ["eve"]
        await world.join("eve")
        suspicion = next(member.trust.suspicion for member in world.cluster.here() if member.name == "eve")
        assert suspicion > 0.5
        await world.close()

    virtually(main())


# ------------------------------------------------------------------------------------------------ proven liars


@pytest.mark.parametrize("kind", get_args(Kind))
@pytest.mark.parametrize("trust", get_args(Level))
def test_one_nan_of_a_proven_device_costs_a_pass_and_is_blamed_on_it(kind: Kind, trust: Level) -> None:
    async def main() -> None:
        world = Watched(LAYOUTS["pipeline"], trust)
        await world.join_all(*HONEST)
        lie = Lie((kind,), "nan", is_on=False, most=1)
        await world.join_liar(lie)
        for _ in range(PROBATION + 1):
            await go(world)
        lie.is_on = True
        assert_same(await go(world))
        assert lie.told == 1
        assert world.refused() == ["eve"]
        await world.close()

    virtually(main())


@pytest.mark.parametrize("trust", get_args(Level))
def test_a_nan_that_is_the_models_own_is_handed_out_and_blamed_on_nobody(trust: Level) -> None:
    async def main() -> None:
        world = Watched(LAYOUTS["pipeline"], trust)
        await world.join_all(*HONEST, "eve")
        model = decoder()
        batch = model.batch(world.cluster, sequences=SEQUENCES, sequence=SEQUENCE)
        batch.x[3, 2] = np.nan
        running = world.cluster.run(model.decoder, batch)
        outputs = await asyncio.wrap_future(running.outputs)
        gradients = await asyncio.wrap_future(running.backward(None))
        assert np.isnan(outputs).any()
        assert any(np.isnan(one).any() for one in gradients.parameters if one is not None)
        assert not world.refused()
        await world.close()

    virtually(main())


def test_a_liar_that_returns_under_new_names_is_audited_in_everything_from_then_on() -> None:
    async def main() -> None:
        world = Watched([(5, [["ann", "eve", "eva", "evi"]])])
        await world.join("ann")
        for number, name in enumerate(("eve", "eva", "evi")):
            lie = Lie(("collect",), "flipped", is_on=False)
            world.dial(name, wrap=lambda inner, lie=lie: LyingChannel(inner, lie))
            await world.until(lambda name=name: name in world.joined())
            for _ in range(PROBATION):  # behaves while it is new
                await go(world)
            lie.is_on = True
            passes = 0
            while name not in world.refused():
                found = await go(world)
                passes += 1
                assert number == 0 or passes == 1, "only the first one was ever used unchecked"
                assert passes < 2000
            assert_same(found)
            if number:
                assert "quarantined" in world.departures()[name], "at its first lie, as others of its token lied before"
        await world.close()

    virtually(main())


# ------------------------------------------------------------------------------------------------ a single device


def test_the_only_device_redoes_the_pass_after_one_lie() -> None:
    async def main() -> None:
        world = Watched()
        await world.join_liar(Lie(("backward",), most=1))
        assert_same(await go(world))
        assert world.refused() == ["eve"]
        assert world.audited()["eve"] == 2 * 2 * 2 * SEQUENCES, "the whole pass, both times"
        await world.close()

    virtually(main())


def test_a_pass_whose_only_device_always_lies_fails() -> None:
    async def main() -> None:
        world = Watched(gone_s=5.0)
        await world.join_liar(Lie(("collect",)))
        with pytest.raises(FleetGoneError):
            await go(world)
        assert world.refused() == ["eve"] * 2, "the second time, its token was convicted"
        await world.close()

    virtually(main())


# ------------------------------------------------------------------------------------------------ during an audit


@pytest.mark.parametrize("is_liar", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_device_may_leave_while_it_is_audited(layout: str, is_liar: bool) -> None:
    async def main() -> None:
        device: Device

        def leaving(inbox: Iterable[Message]) -> Iterator[Matrix]:
            world.loop.create_task(device.channel.close("it leaves"))
            return replay(inbox)

        world = Watched(LAYOUTS[layout], replay=leaving)
        await world.join_all(*HONEST)
        device = await world.join_liar(Lie(("collect",) if is_liar else ()))
        assert_same(await go(world))
        assert world.here() == set(HONEST)
        assert_same(await go(world, seed=1), seed=1)
        assert world.refused() == (["eve"] if is_liar else [])
        await world.close()

    virtually(main())


def test_closing_the_server_does_not_wait_for_audits() -> None:
    async def main() -> None:
        def closing(inbox: Iterable[Message]) -> Iterator[Matrix]:
            world.loop.create_task(world.cluster.close("it is over", rejoin=False))
            return replay(inbox)

        world = Watched(replay=closing)
        await world.join("ann")
        with pytest.raises(FleetGoneError):
            await go(world)
        await world.close()

    virtually(main())


def test_an_audit_that_fails_ends_the_pass() -> None:
    async def main() -> None:
        def failing(inbox: Iterable[Message]) -> Iterator[Matrix]:
            raise MemoryError

        world = Watched(replay=failing)
        await world.join("ann")
        with pytest.raises(Exception, match="could not be audited"):
            await go(world)
        assert not world.refused()
        await world.close()

    virtually(main())
