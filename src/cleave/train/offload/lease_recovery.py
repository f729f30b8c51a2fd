# pyright: standard
"""Rebuild what a lost device held: replay its shards, each alone, from their bases through the log.

A shard's inputs and the gradients of its outputs are in the log, so that nothing else has to run again. `Regaining`
leaves the lease in force: lost shards are lent to other devices as they are here, all at once, and do there what was
logged; nothing comes up, and what other devices keep stays where it is. `Replay` ends it, where devices cannot hold
more: survivors are fetched, and lost shards come back to this process. `lease_recall.py` decides which.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from cleave.core.model.batch import Batch
from cleave.core.model.decoder import Decoder
from cleave.core.model.shard import Shard, standing_alone
from cleave.core.plan.choose import PassWork
from cleave.core.plan.resident.stages import ResidentPlan, Stage
from cleave.errors import LeaseLost
from cleave.train.offload import update_rules
from cleave.train.offload.boundary_log import LoggedPass, LoggedStep
from cleave.train.offload.lease_held import FleetLease, Held, LeasedShard
from cleave.train.offload.linear import Weights, parameter_format

log = logging.getLogger(__name__)

Totals = dict[int, torch.Tensor]
"""Parameter -> sum of its gradients."""


def fetch_survivors(fleet: Any, held: Held) -> list[LeasedShard]:
    """Fetch what devices have in its present state; return the other shards."""
    while True:
        intact = fleet.intact(held.lease)
        whole = [one for one in held.shards if one.parameters <= intact and one not in held.behind]
        wanted = frozenset[int]().union(*(one.parameters for one in whole))
        try:
            if wanted:
                matrices = fleet.wait(held.lease.read(wanted, gradients=False))
                held.write(held.lease.values(wanted, matrices, gradients=False))
        except LeaseLost:
            continue  # one more is gone
        return [one for one in held.shards if one not in whole]


class _Doing:
    """What both ways to recover share: a shard's part of a logged pass."""

    def __init__(self, fleet: Any, weights: Weights, held: Held) -> None:
        self._fleet, self._weights, self._held = fleet, weights, held

    def _batch(
        self, one: LeasedShard, numbers: tuple[int, ...], logged: LoggedPass, *, has_head: bool, is_leased: bool
    ) -> tuple[Batch[Any], Any]:
        """Return a shard's batch in a logged pass, and the gradient of its output."""
        x, dy = self._held.log.border(logged, one.shard)
        leased = one.parameters if is_leased else ()
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
        return batch, None if has_head else dy

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


@dataclass(frozen=True, slots=True, eq=False)
class _Place:
    """A shard alone on the device that keeps it."""

    alone: Decoder
    numbers: tuple[int, ...]
    """Its parameters' numbers in the whole."""
    plan: ResidentPlan


class Regaining(_Doing):
    """Bring a lease that lost devices up to date, on the devices that are left."""

    def __init__(self, fleet: Any, weights: Weights, held: Held) -> None:
        super().__init__(fleet, weights, held)
        generation = held.generation
        self._has_gradients = bool(generation.gradients) and not generation.is_spent
        is_clean = generation.is_complete
        self._stale = set(held.behind if is_clean else held.shards)
        """Shards whose gradients on devices are not those of the logged passes: a pass was broken off."""

    def regain(self) -> bool:
        """Have devices keep all shards again, as of now; False if they cannot, or if none of them is lost."""
        held = self._held
        was_interrupted = bool(held.behind)
        while True:
            intact = self._fleet.intact(held.lease)
            broken = {one for one in held.shards if not one.parameters <= intact}
            if not broken and not was_interrupted:
                return False
            was_interrupted = False
            held.behind |= broken
            self._stale |= broken
            plan = self._fleet.rehouse(held.work, held.lease, [one.shard for one in held.behind])
            if plan is None:
                return False
            try:
                self._regain(plan)
            except LeaseLost as fault:
                log.info("a recovery begins again: %s", fault)
                continue
            return True

    def _regain(self, plan: ResidentPlan) -> None:
        held = self._held
        for one in held.behind:
            one.give_up_snapshot()
        lent = {number: held.lent(self._fleet, number) for one in held.behind for number in one.parameters}
        lending = held.lease.lend_again(plan, lent)
        self._fleet.wait(lending)
        held.lease.forget_numbers()
        self._at_once(plan, held.behind, self._updates)
        if self._has_gradients:
            self._at_once(plan, self._stale, self._gradients)
        else:
            held.lease.clear_gradients()

    def _at_once(
        self,
        plan: ResidentPlan,
        shards: Collection[LeasedShard],
        doing: Callable[[LeasedShard, _Place], Iterator[Future[Any]]],
    ) -> None:
        """Do something with shards on all devices at the same time, one shard after the other on each."""
        columns = {column.shard: column for stage in plan.stages for column in stage.columns}
        turns: dict[str, list[Iterator[Future[Any]]]] = {}
        for one in sorted(shards, key=lambda one: one.shard):
            alone, numbers = standing_alone(_trained_alone(self._held, one), one.shard)
            column = columns[one.shard]._replace(shard=Shard(first=0, count=one.shard.count))
            place = _Place(alone, numbers, replace(plan, stages=(Stage(columns=(column,)),)))
            turns.setdefault(column.holdings[0].device, []).append(doing(one, place))
        lanes = [itertools.chain.from_iterable(each) for each in turns.values()]
        while lanes:
            pending = [(lane, future) for lane in lanes if (future := next(lane, None)) is not None]
            for _, future in pending:
                self._fleet.wait(future)
            lanes = [lane for lane, _ in pending]

    def _updates(self, one: LeasedShard, place: _Place) -> Iterator[Future[Any]]:
        """Bring a shard from its base to the last update, on its device."""
        lease, steps = self._held.lease, self._held.log.steps(one.base)
        for step in steps:
            lease.clear_gradients(one.parameters)
            for logged in step.passes:
                yield self._begin(one, place, logged)
            factor = step.passes[0].factor  # that of all its passes
            yield lease.update(
                {n: (rule, factor * more) for n, (rule, more) in step.rules.items() if n in one.parameters}
            )
        self._held.behind.discard(one)
        log.info("replayed %d steps of a lost shard on %s", len(steps), ", ".join(place.plan.devices))

    def _gradients(self, one: LeasedShard, place: _Place) -> Iterator[Future[Any]]:
        """Add the gradients of the passes since the last update, on the device."""
        self._held.lease.clear_gradients(one.parameters)
        for logged in self._held.log.open_passes:
            yield self._begin(one, place, logged)
        self._stale.discard(one)

    def _begin(self, one: LeasedShard, place: _Place, logged: LoggedPass) -> Future[Any]:
        has_head = place.alone.head is not None
        batch, dy = self._batch(one, place.numbers, logged, has_head=has_head, is_leased=True)
        lease = self._held.lease.for_pass(place.plan, place.numbers)
        return self._fleet.run(place.alone, batch, place.plan, lease, dy=dy, is_beside=True).returned


def _trained_alone(held: Held, one: LeasedShard) -> Decoder:
    """Return the decoder with nothing trained but what is leased of a shard: other gradients were returned long ago."""
    decoder = held.lease.decoder
    parameters = tuple(
        each._replace(is_trained=each.is_trained and number in one.parameters)
        for number, each in enumerate(decoder.parameters)
    )
    return replace(decoder, parameters=parameters)


class Replay(_Doing):
    """Redo a lost lease's work on whatever devices there are, and bring the results to this process."""

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
        has_head = alone.head is not None
        batch, dy = self._batch(one, numbers, logged, has_head=has_head, is_leased=lease is not None)
        plan, pass_lease = (None, None) if lease is None else (lease.plan, lease.for_pass())
        running = self._fleet.run(alone, batch, plan, pass_lease, is_exact=True)
        self._fleet.wait(running.outputs)
        return self._fleet.wait(running.backward(dy)).parameters
