"""Which links devices share, told by a real cluster from its traffic over shaped channels, in virtual time."""

from __future__ import annotations

import pytest
from tests.support.virtual import run
from tests.support.world import World, layer

from cleave.core.schedule.shared_links import SharedLink
from cleave.transport.base import Channel
from cleave.transport.shaped import Link, Medium, Shaped

MEDIUM = 37.5e6
STEPS = 3


class ShapedWorld(World):
    """A world whose devices are behind links, the next ones to connect behind those listed first."""

    def __init__(self, links: list[Link], medium: Medium | None) -> None:
        super().__init__()
        self._links, self._medium = links, medium

    def reached(self, channel: Channel) -> Channel:
        return Shaped(channel, self._links.pop(0), self._medium)


async def shared_after_steps(links: list[Link], medium: Medium | None = None) -> tuple[SharedLink, ...]:
    world = ShapedWorld(list(links), medium)
    for number in range(len(links)):
        await world.join(f"d{number}", flops_per_s=1e11)
    for step in range(STEPS):
        await world.products(*(layer(10 * step + i, tokens=1000, width=192, out=512) for i in range(2)))
    shared = world.cluster.engine.roster.traffic.shared
    await world.close()
    return shared


def test_devices_on_one_wifi_are_found_to_share_it() -> None:
    links = [Link(down_bytes_per_s=MEDIUM, up_bytes_per_s=MEDIUM, latency_s=1e-3)] * 4
    (link,) = run(shared_after_steps(links, Medium(MEDIUM)), limit_s=600)
    assert link.is_medium
    assert link.devices == {"d0", "d1", "d2", "d3"}
    assert link.down_bytes_per_s == link.up_bytes_per_s == pytest.approx(MEDIUM, rel=0.1)


def test_devices_on_links_of_their_own_share_nothing() -> None:
    rates = [(12.5e6, 2.5e6), (12.5e6, 2.5e6), (25e6, 5e6), (6.25e6, 1.25e6)]
    links = [Link(down_bytes_per_s=down, up_bytes_per_s=up, latency_s=1e-3) for down, up in rates]
    assert run(shared_after_steps(links), limit_s=600) == ()
