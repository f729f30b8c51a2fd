"""Steps of a training loop under leases, in virtual time: real planning, leases, engine and ledger, but no numbers.

What `train/offload/leases.py` does with tensors is done here with their names: a lease begins when the plan says so,
ends when the plan moves it, and takes snapshots.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TypeVar

from cleave.core.cost.wire import WireFormat
from cleave.core.model.decoder import Decoder
from cleave.core.model.update_rule import Adam
from cleave.core.plan.choose import Local, PassWork, Setting
from cleave.core.plan.resident.stages import Column, ResidentPlan
from cleave.core.schedule.members import Member
from cleave.core.schedule.tasks import DeviceId
from cleave.server.gemm.trial import ROUNDS_S, trial
from cleave.server.operands import Tensor
from cleave.server.planning import Planning
from cleave.server.resident.lease import Lease
from cleave.sim.fleet import Fleet, batch_of

_RULE = Adam(rate=1e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, step=1, is_decoupled=True, is_ascent=False)
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class Step:
    seconds: float
    plan: ResidentPlan
    lenders: frozenset[DeviceId]
    """Devices that kept weights."""
    measured: frozenset[DeviceId]
    """Devices that had finished work before the step."""


class LeasedSteps:
    """A training loop of one decoder on a fleet."""

    def __init__(self, fleet: Fleet, decoder: Decoder, setting: Setting, *, sequences: int, sequence: int) -> None:
        self._fleet, self._driver, self._decoder, self._setting = fleet, fleet.driver, decoder, setting
        self._work = PassWork(decoder, sequences, sequence, is_trained=True, lease_states=2)
        roster = self._driver.engine.roster
        self.planning = Planning(
            setting, fleet=lambda: (roster.number, roster.profiles()), tell=lambda choice: None, lenders=self._measured
        )
        self.lease: Lease | None = None
        self._age: dict[Column, int] = {}
        """Steps since a column's last snapshot."""
        self._updated: Future[object] | None = None

    def step(self) -> Step:
        began, measured = self._driver.now, self._measured()
        self._try_out()
        plan = self.planning.choose_pass(self._work, Local(), must=True).plan
        assert plan is not None
        self._place(plan)
        batch = batch_of(
            self._decoder,
            self._fleet.operands,
            sequences=self._work.sequences,
            sequence=self._work.sequence,
            wire=self._setting.wire,
            wants_dx=True,
        )
        if self.lease is not None:
            leased = self.lease.parameters
            operands = (None if number in leased else one for number, one in enumerate(batch.operands))
            batch = replace(batch, operands=tuple(operands))
        pass_lease = None if self.lease is None else self.lease.for_pass(plan)
        run = self._fleet.resident(self._decoder, batch, plan, pass_lease)
        self._wait(run.returned)
        if self.lease is not None:
            self._wait(self.lease.measure())
            self._update(self.lease, plan)
        self.planning.step_ended()
        lenders = frozenset[DeviceId]() if self.lease is None else self.lease.devices
        return Step(self._driver.now - began, plan, lenders, measured)

    def _try_out(self) -> None:
        for member in self._driver.engine.roster.members.values():
            if not (member.is_measured or member.is_tried):
                member.is_tried = True
                self._try_round(member, ROUNDS_S)

    def _try_round(self, member: Member, rounds_s: Sequence[float]) -> None:
        if rounds_s:
            run = self._fleet.blocks(*trial(DeviceId(member.name), member.flops.value, rounds_s[0], self._tensor))
            run.done.add_done_callback(lambda _: self._try_round(member, rounds_s[1:]))

    def _place(self, plan: ResidentPlan) -> None:
        if self.lease is not None and self.lease.plan.holders != plan.holders:
            self._wait(self.lease.read(self.lease.parameters, gradients=False))
            self.lease.end()
            self.lease = None
        leased = _leased(plan)
        if self.lease is None and leased:
            numbers = {view.parameter for column in leased for view in column.shard.views(self._decoder)}
            self.lease = Lease(
                self._decoder,
                plan,
                {number: self._lent(number) for number in sorted(numbers)},
                operands=self._fleet.operands,
                ids=self._fleet.ids,
                fleet=self._fleet.view,
                post=self._driver.post,
            )
            self._age = dict.fromkeys(leased, 0)
            self._wait(self.lease.lend())

    def _lent(self, number: int) -> tuple[Tensor, ...]:
        one = self._decoder.parameters[number]
        return tuple(self._tensor(one.rows, one.cols, "fp32") for _ in range(3))

    def _tensor(self, rows: int, cols: int, format: WireFormat = "bf16") -> Tensor:
        return self._fleet.operands.tensor(rows, cols, format)

    def _update(self, lease: Lease, plan: ResidentPlan) -> None:
        """Update, and begin the snapshots that are due."""
        lease.update(dict.fromkeys(lease.parameters, (_RULE, 1.0)))
        lease.clear_gradients()
        for column in _leased(plan):
            self._age[column] = self._age.get(column, 0) + 1
            if self._age[column] >= column.snapshot_every:
                self._age[column] = 0
                lease.snapshot({view.parameter for view in column.shard.views(self._decoder)})

    def _measured(self) -> frozenset[DeviceId]:
        members = self._driver.engine.roster.members.values()
        return frozenset(DeviceId(member.name) for member in members if member.is_measured)

    def _wait(self, future: Future[_Result]) -> _Result:
        self._driver.run_until(future.done)
        return future.result()


def _leased(plan: ResidentPlan) -> list[Column]:
    return [column for stage in plan.stages for column in stage.columns if column.is_leased]
