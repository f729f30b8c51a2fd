"""Choices and plans for work, made off the loop and cached.

Callers ask once, before the work starts, and pass the plan down with it. Plans follow a snapshot of the fleet that is
replaced at step boundaries, or when one of its devices has left: a device that joins does not cost everyone a new plan.
Devices keep the layers they hold unless another arrangement is clearly faster, and plans of products stand until they
became slower. Large fleets are planned in another process, as planning would keep the GIL from the event loop; a step
does not wait for another plan of its products while it has one whose devices are all there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ParamSpec, TypeVar

import numpy as np

from cleave.core.cost.rates import Server
from cleave.core.fleet.profiles import DeviceId, Profiles
from cleave.core.model.decoder import Decoder
from cleave.core.model.gemms import Linear
from cleave.core.model.shard import Shard
from cleave.core.plan.advice import Advice, advise
from cleave.core.plan.choose import (
    Arrange,
    LayerChoice,
    Local,
    PassChoice,
    PassWork,
    Setting,
    choose_pass,
    plan_pass,
    rehouse_pass,
    replan_pass,
    resident_seconds,
)
from cleave.core.plan.experience import OFF, Experience
from cleave.core.plan.resident.small_fleet import plan_columns
from cleave.core.plan.resident.stages import ResidentPlan, Stage
from cleave.core.plan.wrong_term import Terms, wrong_term
from cleave.errors import InfeasibleError
from cleave.server.layer_plans import SEARCHED_EVERY, SLOWER, LayerPlans, Snapshot
from cleave.server.plan_process import PlanProcess

_FEW_DEVICES = 12
"""Fleets up to this size are planned in milliseconds, in the calling thread."""
_STALE_S = 10.0
"""Time after which work without steps, such as evaluation, adopts a changed fleet."""
_ADVISED_DEVICES = 32
"""Fleets up to this size get advice, which takes half a dozen plans."""
_REMODELED_DEVICES = 128
"""Fleets up to this size are modeled again after every step, with the rates that it taught."""
_RECONSIDERED_EVERY = 2
"""Steps between two choices of a grain whose steps take far longer than predicted."""
_MOST_REMEMBERED = 32
"""Batch lengths whose plans are cached."""

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class _Chosen:
    number: int
    names: tuple[str, ...]
    choice: PassChoice
    searched_step: int
    """Step before which the arrangement was last compared with others."""
    searched_s: float
    """Time of the arrangement then."""
    lenders: frozenset[DeviceId] | None
    """Devices that were allowed to keep what they train."""


class Planning:
    """Choose and plan work, from any thread."""

    def __init__(
        self,
        setting: Setting,
        *,
        fleet: Callable[[], Snapshot],
        tell: Callable[[PassChoice], None],
        arrange: Arrange = plan_columns,
        audited: Callable[[], Mapping[str, float]] = dict,
        lenders: Callable[[], frozenset[DeviceId] | None] = lambda: None,
    ) -> None:
        """`tell` receives each new choice of a grain for training; `audited` is as in `choose_pass`.

        `lenders` says which devices may keep what they train; None for all.
        """
        self._setting, self._fleet, self._tell, self._arrange = setting, fleet, tell, arrange
        self._audited, self._lenders = audited, lenders
        self._process, self._adviser = PlanProcess(), PlanProcess()
        self._layers = LayerPlans(self._process, is_planned_here=self._is_planned_here)
        self._lock = threading.RLock()
        self._adopted: Snapshot = (-1, None)
        self._adopted_at = 0.0
        self._may_lend: frozenset[DeviceId] | None = None
        """The devices of `lenders`, adopted with the fleet."""
        self._passes: dict[tuple[PassWork, Local, bool], _Chosen] = {}
        self._standing: dict[PassWork, ResidentPlan] = {}
        """Latest plan per kind of work, newest last."""
        self._told = ""
        self.experience = Experience()
        self._assumed: Terms | None = None
        """Terms of the latest plan for training."""
        self._steps = 0
        self._reconsidered = 0
        """The step at which the grain was last chosen."""
        self.kept = ""
        """Why work stayed on this server since the last step boundary; empty if none did."""
        self.latest: ResidentPlan | None = None
        """The plan of the last pass."""
        self._trained: tuple[PassWork, Local, bool] | None = None
        """Arguments of the last choice for training."""

    def step_ended(self) -> None:
        """Mark a step boundary: adopt the current fleet."""
        with self._lock:
            self._steps += 1
            self._adopt(self._fleet())
            self.kept = ""

    def server_costs(self, task_s: float, byte_s: float) -> None:
        """Use measured costs of the server from the next plan on: core seconds per task and per byte."""
        self._serve(replace(self._setting.server, task_s=task_s, byte_s=byte_s))

    def server_links(self, down_bytes_per_s: float, up_bytes_per_s: float) -> None:
        """Use measured rates of the server's own link from the next plan on; infinite where it was no limit."""
        self._serve(replace(self._setting.server, down_bytes_per_s=down_bytes_per_s, up_bytes_per_s=up_bytes_per_s))

    def _serve(self, server: Server) -> None:
        with self._lock:
            self._setting = replace(self._setting, server=server)

    def share_cores(self, cores: float) -> None:
        """Limit how many devices compute at once, as those on this machine share its cores."""
        with self._lock:
            self._setting = replace(self._setting, cores=cores)
            self._passes.clear()

    def layer(self, linear: Linear, local: Local) -> LayerChoice:
        """Choose where a linear layer's products are computed, and by which devices."""
        with self._lock:
            choice = self._layers.choose(linear, local, self._current(), self._setting, self._steps)
            if not choice.is_remote:
                self.kept = choice.reason
            return choice

    def choose_pass(self, work: PassWork, local: Local, *, must: bool = False) -> PassChoice:
        """Choose whether layers stay on devices for such a batch, and which devices hold them."""
        with self._lock:
            number, profiles = self._current()
            names = profiles.names if profiles is not None else ()
            known = self._passes.get((work, local, must))
            is_same = known is not None and known.names == names
            if known is not None and is_same and not self._is_off(known):  # rates fluctuate: keep the grain
                has_lenders = work.lease_states is None or known.lenders == self._may_lend
                if profiles is None or not known.choice.is_resident or (known.number == number and has_lenders):
                    return known.choice
                plan = self._still_good(work, profiles, known) if has_lenders else None
                searched_step, searched_s = known.searched_step, known.searched_s
                if plan is None:
                    plan = self._place(work, profiles)
                    searched_step, searched_s = self._steps, plan.step_s
                seconds = resident_seconds(plan, work, local, self._audited())
                choice = replace(known.choice, plan=plan, resident_s=seconds)
            else:
                if not is_same:
                    self.experience.forget()
                self._reconsidered = self._steps
                standing = known.choice.grain if known is not None and is_same else None
                choice = self._choose(work, profiles, local, must=must, standing=standing)
                searched_step, searched_s = self._steps, 0.0 if choice.plan is None else choice.plan.step_s
                if work.is_trained:
                    self._tell_once(choice, names)
            if len(self._passes) >= _MOST_REMEMBERED:
                self._passes.clear()
            lenders = self._may_lend
            self._passes[work, local, must] = _Chosen(number, names, choice, searched_step, searched_s, lenders)
            if work.is_trained:
                self._trained = (work, local, must)
            if work.is_trained and profiles is not None:
                self._assumed = Terms(profiles=profiles, server=self._setting.server)
            if choice.plan is not None:
                self._remember(work, choice.plan)
            return choice

    def _still_good(self, work: PassWork, profiles: Profiles, known: _Chosen) -> ResidentPlan | None:
        """Return a choice's arrangement with its time by new rates; None if it is time to search for another one."""
        standing = known.choice.plan
        if standing is None or self._steps - known.searched_step >= SEARCHED_EVERY:
            return None
        plan = self._call(profiles, replan_pass, work, profiles, self._pass_setting, standing)
        if plan is None or plan.arrangement != standing.arrangement:  # as when memory no longer holds a lease
            return None
        return plan if plan.step_s <= known.searched_s * SLOWER else None

    def _is_off(self, known: _Chosen) -> bool:
        """Whether steps take so much longer than predicted that the grain should be reconsidered, now and then."""
        is_due = self._steps - self._reconsidered > _RECONSIDERED_EVERY
        return is_due and self.experience.factor(known.choice.grain) > OFF

    def _choose(
        self, work: PassWork, profiles: Profiles | None, local: Local, *, must: bool, standing: str | None
    ) -> PassChoice:
        return self._call(
            profiles,
            choose_pass,
            work,
            profiles,
            self._pass_setting,
            local,
            must=must,
            previous=self._previous(work),
            arrange=self._arrange,
            audited=self._audited(),
            factors={grain: self.experience.factor(grain) for grain in ("resident", "gemm", "server")},
            standing=standing,
        )

    def wrong_term(self, choice: PassChoice, local: Local, profiles: Profiles) -> str:
        """Say which term of the latest plan for training was wrong, by what is known now; empty if none explains it."""
        with self._lock:
            assumed, setting = self._assumed, self._pass_setting
        if assumed is None:
            return ""

        def judge(terms: Terms) -> float | None:
            return self.modeled_s(choice, local, terms.profiles, replace(setting, server=terms.server))

        return wrong_term(assumed, Terms(profiles=profiles, server=setting.server), judge)

    def advice(self) -> tuple[Advice, ...]:
        """Say what more or fewer devices would change; nothing where no batch was planned, or where that takes long."""
        profiles = self._fleet()[1]
        with self._lock:
            trained, setting = self._trained, self._pass_setting
        if trained is None or profiles is None or len(profiles) > _ADVISED_DEVICES:
            return ()
        work, local, must = trained
        audited, ask = self._audited(), self._adviser.call if self._is_portable else _here

        def judge(fleet: Profiles) -> float | None:
            lenders = setting.lenders
            if lenders:  # what is not there would be like what is
                lenders |= set(map(DeviceId, fleet.names)).difference(profiles.names)
            asked = replace(setting, lenders=lenders)
            choice = ask(choose_pass, work, fleet, asked, local, must=must, arrange=self._arrange, audited=audited)
            return choice.modeled_s

        return advise(profiles, judge)

    def modeled_s(
        self, choice: PassChoice, local: Local, profiles: Profiles | None, setting: Setting | None = None
    ) -> float | None:
        """Seconds of a choice by the cost model, for other profiles; None where that cannot be told or takes long."""
        with self._lock:
            work = next((work for work, plan in self._standing.items() if plan is choice.plan), None)
        if work is None or choice.plan is None or profiles is None or len(profiles) > _REMODELED_DEVICES:
            return None
        plan = replan_pass(work, profiles, setting or self._pass_setting, choice.plan)
        return None if plan is None else resident_seconds(plan, work, local, self._audited())

    def remodel(self, choice: PassChoice, local: Local, profiles: Profiles | None) -> PassChoice | None:
        """Return a choice with its time by the cost model as it is now; None where `modeled_s` is None.

        Later passes get that time too, until they are planned again, and those of other lengths get theirs in
        proportion: what experience adds is measured by this model, and predicts nothing on top of an older one.
        """
        now_s, then_s = self.modeled_s(choice, local, profiles), choice.modeled_s
        if not now_s or not then_s:
            return None
        remodeled = replace(choice, resident_s=now_s)
        with self._lock:
            for key, known in self._passes.items():
                old = known.choice
                if old is choice:
                    self._passes[key] = replace(known, choice=remodeled)
                elif old.is_resident:
                    self._passes[key] = replace(known, choice=replace(old, resident_s=old.resident_s * now_s / then_s))
        return remodeled

    def plan_again(self, work: PassWork, unable: Collection[str], barred: Collection[str]) -> ResidentPlan:
        """Place layers on other devices than `unable` ones and, where possible, than `barred` ones, found wrong.

        Raises InfeasibleError if no device can do it.
        """
        _, profiles = self._fleet()
        plan: ResidentPlan | None = None
        if barred:
            with suppress(InfeasibleError):
                plan = self._place(work, _without(profiles, {*unable, *barred}))
        plan = plan or self._place(work, _without(profiles, unable))
        with self._lock:
            self._remember(work, plan)
        return plan

    def settle(self) -> None:
        """Wait for the plans that are being searched for beside the work."""
        self._layers.settle()

    def rehouse(
        self, work: PassWork, plan: ResidentPlan, shards: Collection[Shard], unable: Collection[str]
    ) -> ResidentPlan | None:
        """Place some leased shards of a plan on other devices than `unable` ones, and leave the rest; None if none can.

        The plan found stands from then on.
        """
        try:
            profiles = _without(self._fleet()[1], unable)
        except InfeasibleError:
            return None
        found = self._call(profiles, rehouse_pass, work, profiles, self._pass_setting, plan, shards)
        if found is not None:
            with self._lock:
                self._passes.clear()
                self._remember(work, found)
        return found

    def close(self) -> None:
        self._layers.close()
        self._process.close()
        self._adviser.close()

    # -------------------------------------------------------------------------------------------- the fleet

    def _current(self) -> Snapshot:
        """Return the adopted fleet; replace it if it was empty, one of its devices has left, or it is stale."""
        number, profiles = self._adopted
        latest = self._fleet()
        if latest[0] != number:
            is_stale = time.monotonic() - self._adopted_at > _STALE_S
            if profiles is None or latest[1] is None or is_stale or not set(profiles.names) <= set(latest[1].names):
                self._adopt(latest)
        return self._adopted

    def _adopt(self, latest: Snapshot) -> None:
        self._adopted_at, self._may_lend = time.monotonic(), self._lenders()
        self._adopted = latest

    def _call(
        self,
        profiles: Profiles | None,
        function: Callable[_Arguments, _Result],
        *args: _Arguments.args,
        **kwargs: _Arguments.kwargs,
    ) -> _Result:
        call = _here if self._is_planned_here(profiles) else self._process.call
        return call(function, *args, **kwargs)

    def _is_planned_here(self, profiles: Profiles | None) -> bool:
        is_small = profiles is None or len(profiles) <= _FEW_DEVICES
        return is_small or not self._is_portable

    @property
    def _is_portable(self) -> bool:
        """Whether another process can plan; an unusual arrangement, as in tests, may not get there."""
        return self._arrange is plan_columns

    # -------------------------------------------------------------------------------------------- arrangements

    def _place(self, work: PassWork, profiles: Profiles) -> ResidentPlan:
        previous, arrange = self._previous(work), self._arrange
        return self._call(profiles, plan_pass, work, profiles, self._pass_setting, previous=previous, arrange=arrange)

    @property
    def _pass_setting(self) -> Setting:
        return replace(self._setting, lenders=self._may_lend)

    def _remember(self, work: PassWork, plan: ResidentPlan) -> None:
        self.latest = plan
        self._standing.pop(work, None)
        self._standing[work] = plan
        if len(self._standing) > _MOST_REMEMBERED:
            del self._standing[next(iter(self._standing))]

    def _previous(self, work: PassWork) -> ResidentPlan | None:
        """Return the plan by which devices hold these layers, for such a batch or another one of the same decoder."""
        with self._lock:
            found, standing = self._standing.get(work), list(self._standing.items())
        if found is not None:
            return found
        for other, plan in reversed(standing):
            if other.decoder.hidden == work.decoder.hidden and other.decoder.parts == work.decoder.parts:
                return _for_decoder(plan, work.decoder, other.decoder)
        return None

    def _tell_once(self, choice: PassChoice, names: tuple[str, ...]) -> None:
        """Report a choice and its reason, but only once if batches differ only in length."""
        if not names:
            return
        plan = choice.plan
        key = f"gemm on {names}" if plan is None else repr([(stage.shards, stage.devices) for stage in plan.stages])
        if key != self._told:
            self._told = key
            self._tell(choice)


def _here(function: Callable[_Arguments, _Result], *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
    return function(*args, **kwargs)


def _without(profiles: Profiles | None, devices: Collection[str]) -> Profiles:
    if profiles is None:
        raise InfeasibleError("no connected device can do it")
    if not devices:
        return profiles
    others = np.flatnonzero([name not in devices for name in profiles.names])
    if not len(others):
        raise InfeasibleError("no connected device can do it")
    return profiles.take(others)


def _for_decoder(plan: ResidentPlan, decoder: Decoder, planned: Decoder) -> ResidentPlan | None:
    """Adapt a plan for the same parts: drop its head if the decoder has none; None if a head is missing."""
    if (decoder.head is None) == (planned.head is None):
        return plan
    if planned.head is None:
        return None
    *others, last = plan.stages
    if last.count == 1:
        return replace(plan, stages=tuple(others))
    (column,) = last.columns  # only single sublayers are sliced
    without_head = column._replace(shard=replace(column.shard, count=column.shard.count - 1))
    return replace(plan, stages=(*others, Stage(columns=(without_head,))))
