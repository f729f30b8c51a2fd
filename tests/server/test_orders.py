"""Orders of administrators: devices leave and return as told, nothing computed is lost, and tokens lose their power."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from tests.support.virtual import run
from tests.support.world import World, layer

from cleave import Fleet
from cleave.errors import InputError
from cleave.server.admission.tokens import FILE, Keys
from cleave.server.orders import obey

GUARD_S = 120


def order(world: World, do: str, to: str, keys: Keys | None = None) -> None:
    obey(json.dumps({"do": do, "to": to}).encode(), world.cluster, keys or Keys())


def test_a_paused_device_stays_away_until_it_is_resumed() -> None:
    async def main() -> None:
        world = World()
        await world.join("ann")
        bob = await world.join("bob")
        order(world, "pause", "bob")
        await bob.task
        assert world.here() == {"ann"}
        assert world.cluster.status().paused == ("bob",)
        again = world.dial("bob")
        await again.task
        assert "paused" in again.ended
        await world.products(layer(0))
        order(world, "resume", "bob")
        await world.join("bob")
        assert world.here() == {"ann", "bob"}
        assert world.cluster.status().paused == ()
        await world.close()

    run(main(), limit_s=600)


def test_a_drained_device_finishes_the_step_first() -> None:
    async def main() -> None:
        world = World()
        await world.join("ann")
        bob = await world.join("bob")
        made = layer(0)
        staged = [tuple(world.tensor(matrix) for matrix in side) for side in made.operands("forward")]
        done = world.cluster.submit("forward", staged[0], staged[1], world.cluster.choose_layer(made.linear).plan)
        while not world.cluster.engine.is_busy:
            await asyncio.sleep(0)
        order(world, "drain", "bob")
        assert [one.device for one in world.cluster.status().devices if one.is_leaving] == ["bob"]
        await asyncio.wrap_future(done)
        assert world.here() == {"ann", "bob"}
        world.cluster.step_ended()
        await bob.task
        assert world.here() == {"ann"}
        await world.close()

    run(main(), limit_s=600)


def test_a_device_without_work_is_drained_at_once() -> None:
    async def main() -> None:
        world = World()
        ann = await world.join("ann")
        order(world, "drain", "ann")
        await ann.task
        assert "drained" in world.departures()["ann"]
        await world.close()

    run(main(), limit_s=600)


def test_a_banned_device_does_not_come_back() -> None:
    async def main() -> None:
        world = World()
        await world.join("ann")
        bob = await world.join("bob")
        order(world, "ban", "bob")
        await bob.task
        again = world.dial("bob")
        await again.task
        assert "quarantine" in again.ended
        await world.close()

    run(main(), limit_s=600)


def test_a_revoked_token_lets_nobody_join(tmp_path: Path) -> None:
    keys = Keys(path=tmp_path / FILE)
    key, token = keys.add("device")

    async def main() -> None:
        world = World(keys=keys)
        ann = await world.join("ann", token=token)
        assert [one.token for one in world.cluster.status().devices] == [key.id]
        order(world, "revoke", key.id, keys)
        await ann.task
        again = world.dial("ann", token=token)
        await again.task
        assert "token" in again.ended
        await world.close()

    run(main(), limit_s=600)


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"do": "explode", "to": "ann"}', b'{"do": "pause", "to": "nobody"}', b'{"do": "pause"}']
)
def test_what_cannot_be_done_is_a_sentence(body: bytes) -> None:
    async def main() -> None:
        world = World()
        await world.join("ann")
        with pytest.raises(InputError, match="expected"):
            obey(body, world.cluster, Keys())
        assert world.here() == {"ann"}
        await world.close()

    run(main(), limit_s=600)


def test_orders_take_an_admin_token_even_where_nothing_else_does() -> None:
    with Fleet("127.0.0.1:0") as fleet:
        address = fleet.url.replace("ws://", "http://", 1)
        with urllib.request.urlopen(f"{address}/api/status", timeout=GUARD_S) as answer:
            assert answer.status == 200
        body = json.dumps({"do": "resume", "to": "ann"}).encode()
        with pytest.raises(urllib.error.HTTPError) as refusal:
            urllib.request.urlopen(f"{address}/api/orders", data=body, timeout=GUARD_S)
        assert refusal.value.code == 401
        refusal.value.close()
