"""Laws of waiting: whatever becomes of the stand-in, work that nobody can do is given up in the end."""

from __future__ import annotations

import asyncio

from tests.support.virtual import run

from cleave import events
from cleave.errors import FleetGoneError
from cleave.server.vacancy import Vacancy
from cleave.transport.base import Channel


class Scene:
    """A vacancy whose stand-in joins at once and stays until it is dismissed."""

    def __init__(self) -> None:
        self.told: list[events.AnyEvent] = []
        self.given_up: list[FleetGoneError] = []
        self.is_empty, self.is_waiting = True, True
        self.dismissed = asyncio.Event()
        self.vacancy = Vacancy(
            asyncio.get_running_loop(),
            wait_s=30.0,
            stand_in=self._stand_in,
            serve=self._serve,
            is_empty=lambda: self.is_empty,
            is_waiting=lambda: self.is_waiting,
            give_up=self.given_up.append,
            listener=self.told.append,
        )

    async def _serve(self, channel: Channel, name: str) -> None:
        self.is_empty = False
        await self.dismissed.wait()

    async def _stand_in(self, channel: Channel) -> None:
        await self.dismissed.wait()


def test_work_that_the_stand_in_cannot_do_is_given_up() -> None:
    async def main() -> None:
        scene = Scene()
        scene.vacancy.wait("no connected device can do it")
        await asyncio.sleep(1)
        scene.vacancy.wait("the stand-in lacks memory")
        await asyncio.sleep(31)
        assert len(scene.given_up) == 1
        scene.dismissed.set()

    run(main(), limit_s=100)


def test_work_that_waits_when_the_stand_in_leaves_is_given_up_though_another_device_is_connected() -> None:
    async def main() -> None:
        scene = Scene()
        scene.vacancy.wait("no connected device can do it")
        await asyncio.sleep(1)
        scene.dismissed.set()
        await asyncio.sleep(31)
        assert len(scene.given_up) == 1

    run(main(), limit_s=100)
