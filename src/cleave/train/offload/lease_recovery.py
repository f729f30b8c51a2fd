# pyright: standard
"""Rebuild what a lost device took along: train its shards again, alone, from their bases through the log.

A shard's inputs and the gradients of its outputs are in the log, so that nothing else has to run again. Where devices
can keep the shard meanwhile, it is lent to them again: weights and states go down once and come up once, and only what
was logged travels in between. Elsewhere gradients come up in each step and this process applies the updates, with the
optimizer's own arithmetic and the rules that were logged. `leases.py` decides when.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import torch

from cleave.core.model.batch import Batch
from cleave.core.model.decoder import Decoder
from cleave.core.model.shard import standing_alone
from cleave.core.plan.choose import PassWork
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.errors import LeaseLost
from cleave.train.offload import update_rules
from cleave.train.offload.boundary_log import LoggedPass, LoggedStep
from cleave.train.offload.lease_held import FleetLease, Held, LeasedShard
from cleave.train.offload.linear import Weights, parameter_format

log = logging.getLogger(__name__)

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
        steps = self._held.log.steps(lost.base)
        try:
            is_done = bool(steps) and self._update_on_devices(lost, steps)
        except LeaseLost as fault:
            log.info("a replay on devices begins again here: %s", fault)
            is_done = False
        if not is_done:
            self._update_here(lost, steps)

    def _update_on_devices(self, lost: LeasedShard, steps: list[LoggedStep]) -> bool:
        """Lend the shard to devices that do the logged steps, and fetch it; False if none can keep it."""
        held = self._held
        alone, numbers = standing_alone(held.lease.decoder, lost.shard)
        own = {number: place for place, number in enumerate(numbers) if number in lost.parameters}
        plan = self._place(alone, steps[0].passes[0].batch, frozenset(own.values()))
        if plan is None:
            return False
        given = {own[number]: held.lent(self._fleet, number) for number in own}
        lease: FleetLease = self._fleet.lease(alone, plan, given)
        try:
            self._fleet.wait(lease.lend())
            for step in steps:
                for logged in step.passes:
                    self._run(lost, alone, numbers, logged, lease)
                factor = step.passes[0].factor  # that of all its passes
                rules = {own[n]: (rule, factor * more) for n, (rule, more) in step.rules.items() if n in own}
                self._fleet.wait(lease.update(rules))
                lease.clear_gradients()
            matrices = self._fleet.wait(lease.read(lease.parameters, gradients=False))
            values = lease.values(lease.parameters, matrices, gradients=False)
        finally:
            lease.end()
        held.write({number: values[place] for number, place in own.items()})
        self._weights.touched()
        log.info("replayed %d steps of a lost shard on %d devices", len(steps), len(plan.devices))
        return True

    def _place(self, alone: Decoder, batch: Batch[Any], lent: Collection[int]) -> ResidentPlan | None:
        """Plan for devices that keep all of a shard; None if there are none."""
        trained = {number for number, one in enumerate(alone.parameters) if one.is_trained}
        states = max(len(update_rules.state_names(group)) for group in self._held.optimizer.param_groups)
        unleased = frozenset(trained.difference(lent))
        plan = self._fleet.place(PassWork(alone, batch.sequences, batch.sequence, True, False, states, unleased))
        if plan is None or not all(column.is_leased for stage in plan.stages for column in stage.columns):
            return None
        return plan

    def _update_here(self, lost: LeasedShard, steps: list[LoggedStep]) -> None:
        held = self._held
        for step in steps:
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
        """Compute the gradients of a shard in a pass again."""
        found = self._run(one, alone, numbers, logged, None)
        return {
            number: torch.from_numpy(matrix).view(self._held.parameters[number].shape) * logged.factor
            for number, matrix in zip(numbers, found, strict=True)
            if matrix is not None and number in one.parameters
        }

    def _run(
        self, one: LeasedShard, alone: Decoder, numbers: tuple[int, ...], logged: LoggedPass, lease: FleetLease | None
    ) -> tuple[Any, ...]:
        """Run a shard in a pass again, from what crossed its borders; return the gradients that come back."""
        x, dy = self._held.log.border(logged, one.shard)
        has_head = alone.head is not None
        leased = () if lease is None else one.parameters
        batch = replace(
            logged.batch,
            x=x,
            operands=tuple(None if number in leased else self._operand(logged, number) for number in numbers),
            targets=logged.batch.targets if has_head else None,
            scales=logged.batch.scales if has_head else None,
            wants_dx=False,
            is_trained=True,
            is_piecemeal=False,
        )
        plan = None if lease is None else lease.plan
        running = self._fleet.run(alone, batch, plan, lease, is_exact=True)
        self._fleet.wait(running.outputs)
        return self._fleet.wait(running.backward(None if has_head else dy)).parameters

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
