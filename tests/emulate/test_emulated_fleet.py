"""Emulated devices with a real cluster: in virtual time they take what their profiles say; over sockets they train."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.emulation import FAST, activity_of, devices, emulated
from tests.support.models import make, tokens
from tests.support.plans import arranged
from tests.support.virtual import run
from tests.support.world import World, layer
from torch import nn

from cleave import Fleet
from cleave.device.replay import replay
from cleave.device.worker import Refusal
from cleave.emulate.arithmetic import SharedThreads
from cleave.emulate.devices import DeviceProfile
from cleave.emulate.fleet import Activity, EmulatedFleet, Stays, Terms
from cleave.errors import ConnectionLost
from cleave.server.admission.tokens import Keys
from cleave.server.cluster import Cluster
from cleave.server.service import Service
from cleave.train.offload.distribute import distribute
from cleave.transport.address import parse_address
from cleave.transport.base import Channel
from cleave.transport.shaped import Link, Medium, Shaped

SLOWER = 20.0
NOWHERE = Terms(address=parse_address("127.0.0.1:1"))


def law(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run(main(), limit_s=1000)


class Emulated(World):
    """A world of emulated devices only."""

    def emulate(
        self, profiles: Sequence[DeviceProfile], stays: dict[str, Stays] | None = None, terms: Terms = NOWHERE
    ) -> Activity:
        async def connect(link: Link, medium: Medium | None) -> Channel:
            return Shaped(self.connect(), link, medium, end="device")

        activity = activity_of(profiles)
        fleet = EmulatedFleet(profiles, terms, SharedThreads(1), activity, connect=connect)
        self.emulating = asyncio.ensure_future(fleet.run(stays))
        return activity

    async def products_s(self) -> float:
        """Virtual seconds of the three products of a layer."""
        started_s = self.loop.time()
        await self.products(layer(0, tokens=2000))
        return self.loop.time() - started_s


@pytest.mark.parametrize("slower", ["flops_per_s", "down_bytes_per_s", "up_bytes_per_s"])
def test_a_step_takes_longer_by_what_the_profile_is_slower(slower: str) -> None:
    async def main() -> None:
        profile = replace(FAST, flops_per_s=1e9, down_bytes_per_s=1e7, up_bytes_per_s=1e7)
        times: list[float] = []
        for factor in (1.0, SLOWER):
            world = Emulated()
            world.emulate([replace(profile, **{slower: getattr(profile, slower) / factor})])
            await world.until(lambda world=world: len(world.joined()) == 1)
            times.append(await world.products_s())
            await world.close()
        # y, dx and dw: 3 x 2 x 2000 x 96 x 128 operations; x and dy go down twice, y and dx up, 2000 rows each
        least_s = {
            "flops_per_s": 3 * 2 * 2000 * 96 * 128 / 1e9,
            "down_bytes_per_s": 2 * 4 * 2000 * (96 + 128) / 1e7,
            "up_bytes_per_s": 4 * 2000 * (96 + 128) / 1e7,
        }[slower]
        assert SLOWER * least_s < times[1] < 1.5 * SLOWER * least_s + times[0]

    law(main)


def test_a_medium_is_shared_by_the_devices_that_name_it() -> None:
    async def main() -> None:
        times: list[float] = []
        for medium in ("", "wifi"):
            world = Emulated()
            profile = replace(FAST, down_bytes_per_s=1e6, up_bytes_per_s=1e6)
            if medium:
                profile = replace(profile, medium=medium, medium_bytes_per_s=1e6)
            world.emulate(devices(4, profile))
            await world.until(lambda world=world: len(world.joined()) == 4)
            times.append(await world.products_s())
            await world.close()
        assert times[1] > 2 * times[0]

    law(main)


def test_devices_come_and_go_as_their_stays_say() -> None:
    async def main() -> None:
        world = Emulated()
        stays: dict[str, Stays] = {"d0": ((0.0, 1000.0),), "d1": ((5.0, 20.0), (60.0, 70.0))}
        activity = world.emulate(devices(2), stays)
        present: list[int] = []
        for moment_s in (3.0, 10.0, 30.0, 65.0, 80.0):
            await asyncio.sleep(moment_s - world.loop.time())
            present.append(world.cluster.devices)
        assert present == [1, 2, 1, 2, 1]
        assert (activity.joins, activity.departures, activity.losses) == (3, 2, 0)
        await world.products(layer(0))
        await world.close()
        await world.emulating
        assert activity.connected == 0

    law(main)


def test_a_claim_overstates_the_speed_and_nothing_else() -> None:
    async def main() -> None:
        world = Emulated()
        world.emulate(devices(1), terms=replace(NOWHERE, claim=20.0))
        await world.until(lambda: len(world.joined()) == 1)
        (member,) = world.cluster.here()
        assert member.flops.value == 20 * FAST.flops_per_s
        assert member.memory_bytes == FAST.memory_bytes
        assert member.up.value < 1.1 * FAST.up_bytes_per_s
        await world.close()

    law(main)


def test_a_server_that_is_gone_ends_all_devices_with_one_sentence() -> None:
    async def main() -> None:
        async def connect(link: Link, medium: Medium | None) -> Channel:
            raise ConnectionLost("cannot reach it: refused")

        profiles = devices(30)
        fleet = EmulatedFleet(profiles, NOWHERE, SharedThreads(1), activity_of(profiles), connect=connect)
        with pytest.raises(ConnectionLost, match=r"refused; gave up after 30 s"):
            await fleet.run()
        assert asyncio.get_running_loop().time() < 100

    law(main)


# ------------------------------------------------------------------------------------------------ over sockets


@contextmanager
def real(url: str) -> Iterator[None]:
    """A device of its own process."""
    process = subprocess.Popen([sys.executable, "-m", "cleave", "join", url, "--name", "real", "--quiet"])
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    seen: list[float] = []
    for step in range(5):
        batch = tokens(step % 2, 8, 96)
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


def test_real_and_emulated_devices_in_one_run_give_the_losses_of_plain_torch() -> None:
    plain = losses(make("wide-llama"))
    layout = [(1, [["real"]]), (1, [["d0"], ["d1"]]), (1, [["d2", "real"]]), (99, [["d1"]])]

    def make_cluster(loop: asyncio.AbstractEventLoop) -> Cluster:
        return Cluster(loop, arrange=arranged(layout, 40), keys=Keys(trust="own"), replay=replay)

    service = Service("127.0.0.1:0", make_cluster)
    service.start()
    url = f"ws://{service.address}"
    try:
        with emulated(url, devices(3)) as activity, real(url):
            assert service.cluster.wait_for_devices(4, 60.0)
            ours = losses(distribute(make("wide-llama"), service.cluster, grain="resident"))
            assert all(member.tasks > 0 for member in service.cluster.members())
    finally:
        service.stop("done", rejoin=False)
    assert activity.joins == 3
    assert plain[-1] < plain[0], "the model must really learn"
    assert max(abs(a - b) for a, b in zip(ours, plain, strict=True)) < 1e-4


def test_products_of_emulated_devices_pass_the_servers_checks() -> None:
    with Fleet.serve("127.0.0.1:0", offload="always") as fleet, emulated(fleet.url, devices(3)) as activity:
        fleet.wait(3)
        x = np.random.default_rng(0).standard_normal((700, 300), dtype=np.float32)
        np.testing.assert_allclose(fleet.matmul(x, x.T), x @ x.T, rtol=0, atol=1e-3)
    assert activity.contribution.tasks > 0


def test_a_refusal_of_the_first_device_ends_the_emulation_with_the_servers_reason() -> None:
    with Fleet.serve("127.0.0.1:0", token="secret") as fleet:
        profiles = devices(3)

        async def main() -> None:
            terms = Terms(address=parse_address(fleet.url), token="wrong")
            with pytest.raises(Refusal, match="token"):
                await EmulatedFleet(profiles, terms, SharedThreads(1), activity_of(profiles)).run()

        asyncio.run(main())
