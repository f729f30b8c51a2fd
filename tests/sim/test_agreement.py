"""The simulator against a real cluster with real workers on emulated links: the same plan takes the same time.

Everything live is real except the clock and the wires: workers compute, results are checked, bytes are paced by
`transport/shaped` and `emulate/pacing`. Both run in virtual time, so that the speed of this machine does not matter.
"""

from __future__ import annotations

import asyncio

import pytest
from tests.support.emulation import activity_of
from tests.support.plans import Layout, arranged, plan_of, stage_of
from tests.support.stacks import SmallDecoder, decoder
from tests.support.virtual import run
from tests.support.world import World

from cleave.core.cost.rates import Pace
from cleave.core.plan import choose
from cleave.core.plan.resident.stages import Stage
from cleave.emulate.arithmetic import SharedThreads
from cleave.emulate.devices import DeviceProfile
from cleave.emulate.fleet import EmulatedFleet, Terms
from cleave.sim.devices import Device
from cleave.sim.fleet import Fleet, batch_of
from cleave.transport.address import parse_address
from cleave.transport.base import Channel
from cleave.transport.shaped import Link, Medium, Shaped

SEQUENCES, SEQUENCE = 8, 64
BATCHES = 2
LATENCY_S = 0.02
DEVICES = {
    "ann": (2e8, 4e5, 1e5),
    "bob": (1e8, 2e5, 2e5),
    "cid": (4e8, 1e5, 5e4),
    "dot": (5e7, 3e5, 1e5),
}
"""FLOP/s, bytes/s down and up."""
LAYOUTS: dict[str, Layout] = {
    "one device": [(5, [["ann"]])],
    "a shared column": [(5, [["ann", "bob"]])],
    "a pipeline": [(2, [["ann"]]), (2, [["bob"]]), (1, [["cid"]])],
    "a pipeline of shared columns": [(2, [["ann", "bob"]]), (3, [["cid", "dot"]])],
}


class Emulated(World):
    """A world of emulated devices over shaped channels in memory."""

    def emulate(self, profiles: list[DeviceProfile]) -> None:
        async def connect(link: Link, medium: Medium | None) -> Channel:
            return Shaped(self.connect(), link, medium, end="device")

        terms = Terms(address=parse_address("127.0.0.1:1"))
        fleet = EmulatedFleet(profiles, terms, SharedThreads(1), activity_of(profiles), connect=connect)
        self.emulating = asyncio.ensure_future(fleet.run())


def names(layout: Layout) -> list[str]:
    return sorted({name for _, slices in layout for column in slices for name in column})


def profile(name: str) -> DeviceProfile:
    flops, down, up = DEVICES[name]
    links = {"down_bytes_per_s": down, "up_bytes_per_s": up, "latency_s": LATENCY_S}
    return DeviceProfile(name=name, flops_per_s=flops, memory_bytes=1 << 30, **links)


def live_s(layout: Layout, chunk: int, model: SmallDecoder) -> list[float]:
    """Virtual seconds of each batch on the real cluster."""

    async def main() -> list[float]:
        world = Emulated(arrange=arranged(layout, chunk))
        profiles = [profile(name) for name in names(layout)]
        world.emulate(profiles)
        await world.until(lambda: len(world.joined()) == len(profiles))
        took: list[float] = []
        for seed in range(BATCHES):
            began = world.loop.time()
            batch = model.batch(world.cluster, seed=seed, sequences=SEQUENCES, sequence=SEQUENCE)
            running = world.cluster.run(model.decoder, batch)
            await asyncio.wrap_future(running.outputs)
            await asyncio.wrap_future(running.backward(None))
            took.append(world.loop.time() - began)
            world.cluster.step_ended()
        await world.close()
        return took

    return run(main(), limit_s=1e5)


def simulated_s(layout: Layout, chunk: int, model: SmallDecoder) -> list[float]:
    """The same in the simulator."""
    fleet = Fleet(setting=choose.Setting(wire="fp32"))
    for name in names(layout):
        flops, down, up = DEVICES[name]
        fleet.driver.join(name, Device(Pace(flops, down, up, LATENCY_S), 1 << 30))
    fleet.driver.run_until(lambda: fleet.driver.is_quiet)
    first, stages = 0, list[Stage]()
    for count, slices in layout:
        stages.append(stage_of(first, count, slices))
        first += count
    plan = plan_of(stages, chunk)
    took: list[float] = []
    for _ in range(BATCHES):
        began = fleet.driver.now
        batch = batch_of(
            model.decoder, fleet.operands, sequences=SEQUENCES, sequence=SEQUENCE, wire="fp32", wants_dx=True
        )
        done = fleet.resident(model.decoder, batch, plan)
        fleet.driver.run_until(done.returned.done)
        took.append(fleet.driver.now - began)
    return took


@pytest.mark.parametrize("chunk", [16, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_takes_as_long_as_on_a_real_cluster(layout: str, chunk: int) -> None:
    model = decoder(has_head=True, hidden=128)
    live, simulated = (seconds(LAYOUTS[layout], chunk, model) for seconds in (live_s, simulated_s))
    # what is left: in attention, devices compute scores of tiles whole, also where a row sees none of their keys
    assert simulated == pytest.approx(live, rel=0.03)
