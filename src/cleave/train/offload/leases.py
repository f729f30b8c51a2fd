# pyright: standard
"""Leases of a decoder stack: when devices keep weights and optimizer states, and when this process needs them back.

The user's loop stays as it is. After a pass, leased parameters have a `LeasedGradient`; clipping scales it; a hook that
runs before `optimizer.step()` sends the step to the devices and hides the gradient from the optimizer. Parameters are
`LeasedParameter`, and their states `LeasedState`: reading an old one fetches all of them. Whatever does not fit this
pattern ends the lease, and everything is as if there had been none; where that happens in every step, leases are given
up. `lease_eligibility.py` knows what may be leased, `lease_moves.py` sends it to devices, and `lease_recall.py` brings
it back, whatever became of them.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor, nn, optim

from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Batch, Matrix
from cleave.core.model.shard import Shard
from cleave.core.plan.choose import PassWork
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.errors import CleaveError, LeaseLost
from cleave.events import Listener, Note
from cleave.train.offload import update_rules
from cleave.train.offload.boundary_log import LogFullError
from cleave.train.offload.families import Description
from cleave.train.offload.lease_eligibility import Eligibility
from cleave.train.offload.lease_held import FleetPassLease, Generation, Held, matrix, shown_gradient
from cleave.train.offload.lease_moves import lend, move
from cleave.train.offload.lease_recall import Recall
from cleave.train.offload.leased_step import CALLS_MODEL, next_rules, why_not_on_devices
from cleave.train.offload.leased_tensors import LeasedGradient, lease
from cleave.train.offload.linear import Weights, parameter_format
from cleave.train.offload.step_hooks import watch_steps
from cleave.train.offload.weak_hook import WeakHook

_MOST_DISTURBED = 3
"""Steps in a row in which the caller needs what devices keep, after which leases are given up: they would cost more."""

_NO_BACKWARD = "a pass in training was not followed by backward"

log = logging.getLogger(__name__)


class Leases:
    def __init__(
        self, fleet: Any, weights: Weights, tell: Listener, *, shared: Collection[int], is_allowed: bool
    ) -> None:
        """`shared` are the ids of parameters that several modules use."""
        self._fleet, self._weights, self._tell = fleet, weights, tell
        self.eligibility = Eligibility(shared, self._say, refusal="" if is_allowed else "leases are switched off")
        self._recall = Recall(fleet, weights, lambda text: self._say(text, again=True))
        self._lock = threading.RLock()
        self._hidden: list[tuple[nn.Parameter, LeasedGradient]] = []
        self._told: set[str] = set()
        self._disturbance = ""
        """What the caller has done in this step that fetches everything or ends the lease."""
        self._disturbed_steps = 0
        """Steps with one in a row, before this one."""
        self._stepped_by: Callable[[], optim.Optimizer | None] = lambda: None
        """The optimizer whose steps count."""
        self._is_saving = False
        watch_steps(self)
        fleet.before_closing(WeakHook(weakref.ref(self), Leases._closing))

    def know(self, optimizer: optim.Optimizer) -> None:
        """Learn which parameters an optimizer steps."""
        if self.eligibility.learn(optimizer):
            itself = weakref.ref(self)
            optimizer.register_state_dict_pre_hook(WeakHook(itself, Leases._saving_states))
            optimizer.register_load_state_dict_pre_hook(WeakHook(itself, Leases._loading_states))

    # -------------------------------------------------------------------------------------------- a pass

    def for_training(
        self, description: Description, plan: ResidentPlan | None, work: PassWork
    ) -> FleetPassLease | None:
        """Return the lease under which a pass should run; None if it should run without one."""
        with self._lock:
            is_leased = plan is not None and plan.has_leases
            wanted = self.eligibility.leasable(description, plan) if plan is not None and is_leased else {}
            held = self._recall.held
            if held is not None and (held.behind or self._fleet.intact(held.lease) != held.lease.parameters):
                self._recall.recover("a device that kept some left")  # the plan is for the others already
                held = self._recall.held
            if held is not None and not held.is_of(description, wanted):
                self._recall.end("the plan changed")
            elif held is not None:
                self._continue(held)
            held = self._recall.held
            if held is not None and plan is not None and held.lease.plan.holders != plan.holders:
                self._move(held, plan, wanted)
                held = self._recall.held
            elif held is not None and plan is not None:
                held.lease.plan = plan  # with chunks and shares of rows by newer rates
            if held is not None:
                held.work = work
            elif wanted and plan is not None:
                held = self._begin(description, plan, wanted, work)
            return None if held is None else self._for_pass(held)

    def _begin(
        self, description: Description, plan: ResidentPlan, wanted: Mapping[int, Shard], work: PassWork
    ) -> Held | None:
        optimizer = self.eligibility.optimizer_of(description.parameters[next(iter(wanted))])
        assert optimizer is not None, "what nobody steps is not leasable"
        held = self._recall.held = lend(self._fleet, optimizer, description, plan, wanted, work)
        if held is None:
            return None
        self._stepped_by = weakref.ref(optimizer)
        for tensor in held.tensors:
            lease(tensor, self)
        count = sum(one.numel() for one in held.parameters.values())
        self._say(
            f"devices keep {count / 1e6:.3g} M weights and their optimizer states; snapshots come up every "
            f"{min(one.every for one in held.shards)} steps or more, and weights when they are read or saved"
        )
        return held

    def _for_pass(self, held: Held) -> FleetPassLease:
        held.generation.begun += 1
        return held.lease.for_pass()

    def begin_again(self, lease: FleetPassLease, fault: LeaseLost) -> FleetPassLease | None:
        """Recover what a pass lost; return the lease under which to run it again, None if that has ended."""
        with self._lock:
            held = self._recall.held
            if held is None or held.lease is not lease.lease:
                return None
            if lease.is_current:
                self._recall.recover(str(fault))
            return self._for_pass(held) if self._recall.held is held else None

    def _move(self, held: Held, plan: ResidentPlan, wanted: Mapping[int, Shard]) -> None:
        """Follow another plan; end the lease if there are gradients on devices, or devices leave meanwhile."""
        if held.generation.begun:
            self._recall.end("the plan changed")
            return
        try:
            self._recall.settle(held)
            move(self._fleet, held, plan, wanted)
        except LeaseLost as fault:
            self._recall.recover(str(fault))
            self._recall.end("the plan changed")
            return
        self._weights.touched()
        log.info("the lease goes on under another plan")

    def _continue(self, held: Held) -> None:
        """Begin new gradients if the caller cleared the last ones, or add to them; else end the lease."""
        generation = held.generation
        if not generation.gradients:
            return
        present = [shown_gradient(parameter) for parameter in held.parameters.values()]
        if all(one is None for one in present):
            held.lease.clear_gradients()
            held.log.forget_open()
            held.generation = Generation()
        elif generation.is_spent or not all(_is_untouched(one, generation) for one in present):
            self.end("gradients were kept after a step, or some were changed and others not")

    def returned(self, lease: FleetPassLease, running: Any, batch: Batch[Any], factor: float) -> None:
        """Note that a pass under a lease is complete: its gradients wait on devices, to be multiplied by a factor.

        Raises LeaseLost if they are not there, or cannot be added to others: the pass then has to run again.
        """
        with self._lock:
            held = self._recall.held
            if held is None or held.lease is not lease.lease or not lease.is_current:
                raise LeaseLost("the lease ended before the pass did, or its devices left")
            generation = held.generation
            if generation.gradients and factor != generation.factor:
                self._rebuild(held, "passes of one step have different factors on their loss")
                raise LeaseLost("devices add up passes with one factor on their loss only")
            stages = {column.shard: n for n, stage in enumerate(held.lease.plan.stages) for column in stage.columns}
            borders = [(one.shard, *running.boundary(stages[one.shard])) for one in held.shards]
            try:
                held.log.add_pass(batch, factor, borders, self._changing(held))
            except LogFullError:
                self._recall.fetch(held)  # so that the log can be emptied
                self._add_pass_now(held, lease, batch, factor, borders)
            generation.returned += 1
            generation.norms = None
            if not generation.gradients:
                generation.factor = factor
                for number, parameter in held.parameters.items():
                    generation.gradients[number] = LeasedGradient(self, number, parameter, factor)
                    parameter.grad = generation.gradients[number]

    def _add_pass_now(
        self, held: Held, lease: FleetPassLease, batch: Batch[Any], factor: float, borders: list[Any]
    ) -> None:
        """Log a pass after weights were fetched; if that made no room, end the lease. Raises LeaseLost if it ended."""
        if self._recall.held is not held or not lease.is_current:
            raise LeaseLost("devices left while weights were fetched")
        try:
            held.log.add_pass(batch, factor, borders, self._changing(held))
        except LogFullError as full:
            refusal = self.eligibility.refusal = f"the log of leased layers cannot be kept: {full}"
            self._recall.end(refusal)
            self._say(f"{refusal}; make room for temporary files, and the next run can use leases again")
            raise LeaseLost(refusal) from full

    def _changing(self, held: Held) -> dict[int, tuple[Matrix, WireFormat]]:
        """Return the parameters of leased shards that this process steps, as devices have them in this pass."""
        parameters = ((number, held.description.parameters[number]) for number in held.stepped_here)
        return {number: (matrix(one), parameter_format(self._fleet, one)) for number, one in parameters}

    # -------------------------------------------------------------------------------------------- the optimizer

    def stepping(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Before a step: have devices do the leased part of it, and hide those gradients from the optimizer."""
        with self._lock:
            if self._recall.is_recovering:
                return
            has_closure = (args[1] if len(args) > 1 else kwargs.get("closure")) is not None
            if has_closure and optimizer is self._stepped_by():
                self._is_too_often(f"{CALLS_MODEL}, in every step")
            held = self._recall.held
            if held is None or optimizer is not held.optimizer:
                return
            reason = why_not_on_devices(held, has_closure=has_closure)
            if reason is not None:
                self.end(reason)
                return
            if not held.generation.is_complete:
                self._rebuild(held, _NO_BACKWARD)
                return
            rules = next_rules(held)
            if not rules:
                return
            try:
                for settled in held.unsettled():
                    self._fleet.wait(settled)
            except LeaseLost as fault:
                self._recall.recover(str(fault))
                self.stepping(optimizer, args, kwargs)
                return
            generation = held.generation
            for number in rules:
                update_rules.count_step(optimizer, held.parameters[number])
            held.log.add_update({number: (rule, generation.scale(number)) for number, (rule, _) in rules.items()})
            generation.is_spent = True
            held.pending = held.lease.update(rules)
            self._hidden = [(held.parameters[number], generation.gradients[number]) for number in rules]
            for parameter, _ in self._hidden:
                parameter.grad = None

    def stepped(self, optimizer: optim.Optimizer) -> None:
        """After a step: show gradients again, learn about the optimizer, and see to snapshots."""
        with self._lock:
            if self._recall.is_recovering:
                return
            self.know(optimizer)
            for parameter, gradient in self._hidden:
                parameter.grad = gradient
            self._hidden = []
            if optimizer is self._stepped_by():
                self._disturbed_steps = self._disturbed_steps + 1 if self._disturbance else 0
                self._disturbance = ""
            held = self._recall.held
            if held is not None and optimizer is held.optimizer:
                held.take_snapshots()
                held.begin_snapshots()

    # -------------------------------------------------------------------------------------------- the keeper

    def norm(self, gradient: LeasedGradient) -> float | None:
        with self._lock:
            held = self._recall.held
            if held is None or held.generation.gradients.get(gradient.number) is not gradient:
                return None
            generation = held.generation
            if not generation.is_complete:
                self._rebuild(held, _NO_BACKWARD)
                return None
            if generation.norms is None:
                try:
                    sums = held.lease.square_sums(self._fleet.wait(held.lease.measure()))
                except LeaseLost as fault:
                    self._recall.recover(str(fault))
                    return self.norm(gradient)
                generation.norms = {each: math.sqrt(total) for each, total in sums.items()}
            return generation.norms[gradient.number]

    @property
    def is_saving(self) -> bool:
        """Whether the model is being saved: views of its weights are read then, not written."""
        return self._is_saving

    def watch_saving(self, model: nn.Module) -> list[Any]:
        """Bring everything up to date whenever a model is saved; return hooks to remove."""
        itself = weakref.ref(self)
        return [
            model.register_state_dict_pre_hook(WeakHook(itself, Leases._begin_saving)),
            model.register_state_dict_post_hook(WeakHook(itself, Leases._end_saving)),
        ]

    def _begin_saving(self, *_: object) -> None:
        self.refresh("the model was saved")
        self._is_saving = True

    def _end_saving(self, *_: object) -> None:
        self._is_saving = False

    def refresh(self, why: str) -> None:
        with self._lock:
            held = self._recall.held
            if held is None or not held.is_old or self._recall.is_recovering:
                return
            self._recall.fetch(held)
            log.info("fetched leased weights: %s", why)
            if self._is_too_often(f"weights are read in every step ({why})"):
                self.finish(self.eligibility.refusal)

    def end(self, why: str) -> None:
        with self._lock:
            if self._recall.held is not None:
                self._is_too_often(f"{why}, in every step")
                self._recall.end(why)

    def _rebuild(self, held: Held, why: str) -> None:
        """End the lease, as gradients on devices are not what the caller wants them to be."""
        self._is_too_often(f"{why}, in every step")
        self._recall.rebuild(held, why)

    def finish(self, why: str) -> None:
        """End the lease for a reason that is not the caller's."""
        with self._lock:
            self._recall.end(why)

    def _is_too_often(self, disturbance: str) -> bool:
        """Note what the caller has done; whether that happens so often that leases are given up."""
        self._disturbance = self._disturbance or disturbance  # what follows from the first is no news
        if self._disturbed_steps < _MOST_DISTURBED:
            return False
        self.eligibility.refusal = self._disturbance
        self._say(f"the optimizer runs on the server from now on: {self._disturbance}")
        return True

    # -------------------------------------------------------------------------------------------- hooks

    def _saving_states(self, *_: object) -> None:
        self.refresh("the optimizer's state was saved")

    def _loading_states(self, *_: object) -> None:
        self.finish("the optimizer's state was loaded")

    def _closing(self) -> None:
        try:
            self.finish("the fleet closes")
        except CleaveError as fault:
            self._say(f"weights that devices kept could not be fetched: {fault}; resume from the last checkpoint")

    def _say(self, text: str, *, again: bool = False) -> None:
        if again or text not in self._told:
            self._told.add(text)
            self._tell(Note(text=text))


def _is_untouched(gradient: Tensor | None, generation: Generation) -> bool:
    return (
        isinstance(gradient, LeasedGradient)
        and generation.gradients.get(gradient.number) is gradient
        and gradient.factor == generation.factor
    )
