# pyright: standard
"""Continue a lease under another plan: only what changes its stage or device is fetched and sent again.

Stages that the plan leaves on their devices keep their bases and their part of the log. The others are read first, so
that new stages begin with what is here, and only what another device gets is sent. `leases.py` decides when.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cleave.core.model.shard import Shard
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.train.offload.lease_held import Held, LeasedShard


def leased_shards(plan: ResidentPlan, wanted: Mapping[int, Shard]) -> tuple[LeasedShard, ...]:
    """Return what devices keep under a plan, from parameters and their shards."""
    every = {column.shard: column.snapshot_every for stage in plan.stages for column in stage.columns}
    return tuple(
        LeasedShard(shard, frozenset(number for number, other in wanted.items() if other == shard), every[shard])
        for shard in dict.fromkeys(wanted.values())
    )


def move(fleet: Any, held: Held, plan: ResidentPlan, wanted: Mapping[int, Shard]) -> None:
    """Change the plan of a lease without gradients on devices, whose last update is done.

    Raises LeaseLost if a device leaves meanwhile; the lease can then be recovered.
    """
    now, before = plan.leased, held.lease.plan.leased
    staying = {one.shard: one for one in held.shards if now.get(one.shard) == before[one.shard]}
    going = [one for one in held.shards if one.shard not in staying]
    device = {number: before[one.shard] for one in going for number in one.parameters}
    held.take_snapshots()
    for one in going:
        one.cancel()
    if device:
        matrices = fleet.wait(held.lease.read(device.keys(), gradients=False))
        held.write(held.lease.values(device.keys(), matrices, gradients=False))
    position = held.log.position
    for one in going:
        held.log.forget(one.shard, position)
    shards: list[LeasedShard] = []
    for one in leased_shards(plan, wanted):
        known = staying.get(one.shard)
        if known is None:
            one.base = one.begun = position
        else:
            known.every = one.every
        shards.append(known or one)
    held.shards = tuple(shards)
    moved = [number for number, old in device.items() if now[wanted[number]] != old]
    fleet.wait(held.lease.lend_again(plan, {number: held.lent(fleet, number) for number in moved}))
    held.lease.forget_numbers()
