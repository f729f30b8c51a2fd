"""A shard as operands: its parts as described to devices, and its demand on a device."""

from __future__ import annotations

from dataclasses import dataclass

from cleave.core.cost.demand import ShardDemand, shard_demand
from cleave.core.model.batch import Batch
from cleave.core.model.decoder import Decoder, Head, Part, View
from cleave.core.model.shard import Shard
from cleave.core.schedule.tasks import Operand
from cleave.server.operands import Operands, Tensor
from cleave.server.resident.pass_lease import PassLease


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldShard:
    parts: tuple[Part, ...]
    head: Head | None
    operands: tuple[Operand, ...]
    """The weights, each once."""
    trained: tuple[tuple[View, int], ...]
    """Trained views whose gradients are read, with the operands of their weights."""
    leased: tuple[tuple[View, int], ...]
    """Trained views whose gradients stay on the device, the same way."""
    demand: ShardDemand


def hold(
    decoder: Decoder,
    shard: Shard,
    batch: Batch[Tensor],
    operands: Operands,
    lease: PassLease | None = None,
    *,
    is_trained: bool,
) -> HeldShard:
    """Cut a shard out of a batch's parameters; `is_trained` includes a backward pass in its demand."""
    held: dict[int, Operand] = {}
    views: dict[View, int] = {}

    def name(view: View) -> int:
        if lease is not None and view in lease:
            operand = lease.weight(view)
        else:
            operand = operands.slice(batch.operands[view.parameter], view.rows, view.cols).operand
        held[operand.id] = operand
        views[view] = operand.id
        return operand.id

    parts, head = shard.cut(decoder, name)
    trained = [(view, id) for view, id in views.items() if decoder.parameters[view.parameter].is_trained]
    return HeldShard(
        parts=parts,
        head=head,
        operands=tuple(held.values()),
        trained=tuple((view, id) for view, id in trained if lease is None or view not in lease),
        leased=tuple((view, id) for view, id in trained if lease is not None and view in lease),
        demand=shard_demand(decoder, shard, batch.sequence, is_trained=is_trained),
    )
