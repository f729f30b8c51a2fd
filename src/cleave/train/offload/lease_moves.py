# pyright: standard
"""Send weights and states to the devices that are to keep them: when a lease begins, and when its plan changes.

Stages that a new plan leaves on their devices keep their bases and their part of the log. The others are read first, so
that new stages begin with what is here, and only what another device gets is sent. `leases.py` decides when.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import optim

from cleave.core.model.shard import Shard
from cleave.core.plan.choose import PassWork
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.errors import LeaseLost
from cleave.train.offload import update_rules
from cleave.train.offload.boundary_log import BoundaryLog
from cleave.train.offload.codec import TorchCodec
from cleave.train.offload.families import Description
from cleave.train.offload.lease_eligibility import stepped_here
from cleave.train.offload.lease_held import FleetLease, Held, LeasedShard, lent

log = logging.getLogger(__name__)


def lend(
    fleet: Any,
    optimizer: optim.Optimizer,
    description: Description,
    plan: ResidentPlan,
    wanted: Mapping[int, Shard],
    work: PassWork,
) -> Held | None:
    """Begin a lease of parameters; None if gradients are here, which would have to go along, or a device leaves."""
    parameters = {number: description.parameters[number] for number in wanted}
    if any(one.grad is not None for one in parameters.values()):
        return None
    group_of = {id(one): group for group in optimizer.param_groups for one in group["params"]}
    groups = {number: group_of[id(parameter)] for number, parameter in parameters.items()}
    given = {number: lent(fleet, optimizer, groups[number], parameter) for number, parameter in parameters.items()}
    begun: FleetLease = fleet.lease(description.stack, plan, given)
    try:
        fleet.wait(begun.lend())
    except LeaseLost as fault:
        begun.end()
        for parameter in parameters.values():
            update_rules.forget_unused(optimizer, parameter)
        log.info("weights could not be lent: %s", fault)
        return None
    begun.forget_numbers()
    return Held(
        lease=begun,
        work=work,
        description=description,
        parameters=parameters,
        optimizer=optimizer,
        groups=groups,
        states={number: update_rules.state_names(group) for number, group in groups.items()},
        log=BoundaryLog(TorchCodec(), fleet.wire),
        shards=leased_shards(plan, wanted),
        stepped_here=stepped_here(description, wanted),
    )


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
    held.shards, held.stepped_here = tuple(shards), stepped_here(held.description, wanted)
    moved = [number for number, old in device.items() if now[wanted[number]] != old]
    fleet.wait(held.lease.lend_again(plan, {number: held.lent(fleet, number) for number in moved}))
    held.lease.forget_numbers()
