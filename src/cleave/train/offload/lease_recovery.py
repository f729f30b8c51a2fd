# pyright: standard
"""Rebuild what a lost device took along: train its shards again, alone, from their bases through the log.

A shard's inputs and the gradients of its outputs are in the log, so that nothing else has to run again. The updates are
the optimizer's own, with the rules that were logged. `leases.py` decides when, and what becomes of the lease.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from cleave.core.model.decoder import Decoder
from cleave.core.model.shard import standing_alone
from cleave.errors import LeaseLost
from cleave.train.offload import update_rules
from cleave.train.offload.boundary_log import LoggedPass
from cleave.train.offload.lease_held import Held, LeasedShard
from cleave.train.offload.linear import Weights, parameter_format

Totals = dict[int, torch.Tensor]
"""Parameter -> sum of its gradients."""


def fetch_survivors(fleet: Any, held: Held) -> list[LeasedShard]:
    """Fetch what is still on devices; return the shards that are not."""
    while True:
        intact = fleet.intact(held.lease)
        whole = [one for one in held.shards if one.parameters <= intact]
        wanted = frozenset[int]().union(*(one.parameters for one in whole))
        try:
            if wanted:
                matrices = fleet.wait(held.lease.read(wanted, gradients=False))
                held.write(held.lease.values(wanted, matrices, gradients=False))
        except LeaseLost:
            continue  # one more is gone
        return [one for one in held.shards if one not in whole]


class Replay:
    """A lease's work done again, by whatever devices there are."""

    def __init__(self, fleet: Any, weights: Weights, held: Held) -> None:
        self._fleet, self._weights, self._held = fleet, weights, held

    def updates(self, lost: LeasedShard) -> None:
        """Bring a shard from its base to the last update."""
        held = self._held
        for step in held.log.steps(lost.base):
            total = self._sum(lost, step.passes)
            for number in lost.parameters & step.rules.keys() & total.keys():
                rule, factor = step.rules[number]
                update_rules.apply(held.optimizer, rule, held.parameters[number], total[number] * factor)
            self._weights.touched()

    def gradients(self) -> Totals:
        """Compute the gradients of the passes since the last update."""
        total: Totals = {}
        for one in self._held.shards:
            total |= self._sum(one, self._held.log.open_passes)
        return total

    def _sum(self, one: LeasedShard, passes: Iterable[LoggedPass]) -> Totals:
        alone, numbers = standing_alone(self._held.lease.decoder, one.shard)
        total: Totals = {}
        for logged in passes:
            for number, gradient in self._gradients_of(one, alone, numbers, logged).items():
                total[number] = gradient if number not in total else total[number] + gradient
        return total

    def _gradients_of(self, one: LeasedShard, alone: Decoder, numbers: tuple[int, ...], logged: LoggedPass) -> Totals:
        """Compute the gradients of a shard in a pass again, from what crossed its borders."""
        held = self._held
        x, dy = held.log.border(logged, one.shard)
        has_head = alone.head is not None
        batch = replace(
            logged.batch,
            x=x,
            operands=tuple(self._operand(logged, number) for number in numbers),
            targets=logged.batch.targets if has_head else None,
            scales=logged.batch.scales if has_head else None,
            wants_dx=False,
            is_trained=True,
            is_piecemeal=False,
        )
        running = self._fleet.run(alone, batch, None, is_exact=True)
        self._fleet.wait(running.outputs)
        found = self._fleet.wait(running.backward(None if has_head else dy)).parameters
        return {
            number: torch.from_numpy(matrix).view(held.parameters[number].shape) * logged.factor
            for number, matrix in zip(numbers, found, strict=True)
            if matrix is not None and number in one.parameters
        }

    def _operand(self, logged: LoggedPass, number: int) -> Any:
        """Return a parameter as its device had it in a pass; frozen ones travelled in the wire's format."""
        held = self._held
        if number in logged.parameters:
            matrix, format = held.log.parameter(logged, number)
            operand = self._fleet.tensor(*matrix.shape, format)
            operand.bind(matrix)
            return operand
        parameter = held.description.parameters[number]
        format = "fp32" if number in held.parameters else parameter_format(self._fleet, parameter)
        return self._weights.operand(parameter, format)
