"""The planner predicts the bytes a step moves: payloads exactly, except for norms that every slice holds. Headers add a
few percent, as they describe whole runs of sublayers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from tests.faults.test_passes import Layout, arranged, go
from tests.support.virtual import run
from tests.support.world import World

from cleave.core.plan.resident.small_fleet import plan_columns
from cleave.core.plan.resident.stages import Problem, ResidentPlan, drafts, judge
from cleave.protocol.frames import Buffer
from cleave.protocol.messages import AnyMessage
from cleave.transport.base import Channel, Received
from cleave.transport.faulty import FaultyChannel

from tests.support.stacks import SmallDecoder, decoder  # isort: skip

HEADERS, NORMS = 0.03, 0.001


def judged(layout: Layout, chunk: int) -> Callable[..., ResidentPlan]:
    """An arrangement with the bytes the planner predicts for it."""

    def arrange(problem: Problem, **_: object) -> ResidentPlan:
        plan = judge(problem, drafts(arranged(layout)(problem).stages, problem.profiles.names) or [], chunk)
        assert plan is not None
        return plan

    return arrange


ARRANGEMENTS: dict[str, Callable[..., ResidentPlan]] = {
    "planned": plan_columns,
    "alone": judged([(9, [["ann"]])], 64),
    "mates": judged([(9, [["ann", "bob"]])], 64),
    "pipeline": judged([(3, [["ann"]]), (4, [["bob"]]), (2, [["cid"]])], 100),
    "slices": judged([(1, [["ann"], ["bob"]]), (7, [["cid"]]), (1, [["bob"], ["ann"], ["cid"]])], 64),
    "slices with mates": judged([(1, [["ann"], ["bob"]]), (6, [["ann", "cid"]]), (2, [["bob", "cid"]])], 256),
}


class Counting(FaultyChannel):
    """An honest channel that counts payload bytes."""

    def __init__(self, inner: Channel) -> None:
        super().__init__(inner, (), np.random.default_rng(0))
        self.down_bytes = self.up_bytes = 0

    async def receive(self) -> Received:
        received = await super().receive()
        self.down_bytes += len(received.payload)
        return received

    async def send(self, message: AnyMessage, payload: Buffer = b"") -> None:
        self.up_bytes += len(payload)
        await super().send(message, payload)


@pytest.fixture(scope="module")
def model() -> SmallDecoder:
    return decoder(hidden=128, head_dim=32, inner=384, layers=4, words=512)


@pytest.mark.parametrize("name", ARRANGEMENTS)
def test_a_step_moves_the_predicted_bytes(name: str, model: SmallDecoder) -> None:
    async def main() -> None:
        world = World(arrange=ARRANGEMENTS[name])
        counters: list[Counting] = []

        def count(inner: Channel) -> Counting:
            counters.append(Counting(inner))
            return counters[-1]

        for number, device in enumerate(("ann", "bob", "cid")):
            world.dial(device, wrap=count)
            await world.until(lambda number=number: len(world.joined()) > number)
        before = world.cluster.totals()
        for counter in counters:
            counter.down_bytes = counter.up_bytes = 0  # forget the probe
        await go(world, model, sequences=4, sequence=256)
        after, plan = world.cluster.totals(), world.cluster.planning.latest
        assert plan is not None
        assert sum(counter.down_bytes for counter in counters) == pytest.approx(plan.down_bytes, rel=NORMS)
        assert sum(counter.up_bytes for counter in counters) == pytest.approx(plan.up_bytes, rel=NORMS)
        assert after.down_bytes - before.down_bytes == pytest.approx(plan.down_bytes, rel=HEADERS)
        assert after.up_bytes - before.up_bytes == pytest.approx(plan.up_bytes, rel=HEADERS)
        await world.close()

    run(main(), limit_s=300.0)
