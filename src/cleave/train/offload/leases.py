# pyright: standard
"""Leases of a decoder stack: when devices keep weights and optimizer states, and how this process gets them back.

The user's loop stays as it is. After a pass, leased parameters have a `LeasedGradient`; clipping scales it; a hook that
runs before `optimizer.step()` sends the step to the devices and hides the gradient from the optimizer. Parameters are
`LeasedParameter`, and their states `LeasedState`: reading an old one fetches all of them. Whatever does not fit this
pattern ends the lease, and everything is as if there had been none.

Snapshots of weights and states come up while links are idle, and `BoundaryLog` keeps what went in and out of leased
stages since (`lease_held.py`). If a device leaves, another one trains its stages again from there, and the lease goes
on: losses do not change (`lease_recovery.py`). `lease_eligibility.py` knows what may be leased; `lease.py` in the
server words the requests to devices.
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn, optim

from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Batch, Matrix
from cleave.core.model.shard import Shard
from cleave.core.plan.choose import PassWork
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.errors import CleaveError, LeaseLost
from cleave.events import Listener, Note
from cleave.train.offload import update_rules
from cleave.train.offload.boundary_log import BoundaryLog, LogFullError
from cleave.train.offload.codec import TorchCodec
from cleave.train.offload.families import Description
from cleave.train.offload.lease_eligibility import Eligibility, stepped_here
from cleave.train.offload.lease_held import FleetLease, FleetPassLease, Generation, Held, LeasedShard, lent, matrix
from cleave.train.offload.lease_moves import leased_shards, move
from cleave.train.offload.lease_recovery import Regaining, Replay, fetch_survivors
from cleave.train.offload.leased_tensors import LeasedGradient, lease, release
from cleave.train.offload.linear import Weights, parameter_format
from cleave.train.offload.step_hooks import watch_steps

_MOST_READS = 3
"""Steps in a row in which weights are read after which leases are given up: every read fetches all of them."""

_NO_BACKWARD = "a pass in training was not followed by backward"

log = logging.getLogger(__name__)


class Leases:
    def __init__(
        self, fleet: Any, weights: Weights, tell: Listener, *, shared: Collection[int], is_allowed: bool
    ) -> None:
        """`shared` are the ids of parameters that several modules use."""
        self._fleet, self._weights, self._tell = fleet, weights, tell
        self.eligibility = Eligibility(shared, self._say, refusal="" if is_allowed else "leases are switched off")
        self._held: Held | None = None
        self._lock = threading.RLock()
        self._hidden: list[tuple[nn.Parameter, LeasedGradient]] = []
        self._told: set[str] = set()
        self._reads = 0
        self._was_read = self._is_saving = self._is_recovering = False
        watch_steps(self)
        fleet.before_closing(_Hook(weakref.ref(self), Leases._closing))

    def know(self, optimizer: optim.Optimizer) -> None:
        """Learn which parameters an optimizer steps."""
        if self.eligibility.learn(optimizer):
            itself = weakref.ref(self)
            optimizer.register_state_dict_pre_hook(_Hook(itself, Leases._saving_states))
            optimizer.register_load_state_dict_pre_hook(_Hook(itself, Leases._loading_states))

    # -------------------------------------------------------------------------------------------- a pass

    def for_training(
        self, description: Description, plan: ResidentPlan | None, work: PassWork
    ) -> FleetPassLease | None:
        """Return the lease under which a pass should run; None if it should run without one."""
        with self._lock:
            is_leased = plan is not None and plan.has_leases
            wanted = self.eligibility.leasable(description, plan) if plan is not None and is_leased else {}
            held = self._held
            if held is not None and self._fleet.intact(held.lease) != held.lease.parameters:
                self.recover("a device that kept some left")  # the plan is for the others already
                held = self._held
            if held is not None and not self._is_of(held, description, wanted):
                self.end("the plan changed")
            elif held is not None:
                self._continue(held)
            held = self._held
            if held is not None and plan is not None and held.lease.plan.holders != plan.holders:
                self._move(held, plan, wanted)
                held = self._held
            elif held is not None and plan is not None:
                held.lease.plan = plan  # with chunks and shares of rows by newer rates
            if held is None and wanted and plan is not None:
                held = self._begin(description, plan, wanted, work)
            return None if held is None else self._for_pass(held)

    def _for_pass(self, held: Held) -> FleetPassLease:
        held.generation.begun += 1
        return held.lease.for_pass()

    def begin_again(self, lease: FleetPassLease, fault: LeaseLost) -> FleetPassLease | None:
        """Recover what a pass lost; return the lease under which to run it again, None if that has ended."""
        with self._lock:
            held = self._held
            if held is None or held.lease is not lease.lease:
                return None
            if lease.is_current:
                self.recover(str(fault))
            return self._for_pass(held) if self._held is held else None

    def _is_of(self, held: Held, description: Description, wanted: Mapping[int, Shard]) -> bool:
        """Whether a lease is of the parameters that devices should keep."""
        return (
            held.lease.decoder == description.stack
            and held.parameters.keys() == wanted.keys()
            and all(one is description.parameters[number] for number, one in held.parameters.items())
        )

    def _move(self, held: Held, plan: ResidentPlan, wanted: Mapping[int, Shard]) -> None:
        """Follow another plan; end the lease if there are gradients on devices, or devices leave meanwhile."""
        if held.generation.begun:
            self.end("the plan changed")
            return
        try:
            self._settle(held)
            move(self._fleet, held, plan, wanted)
        except LeaseLost as fault:
            self.recover(str(fault))
            self.end("the plan changed")
            return
        self._weights.touched()
        log.info("the lease goes on under another plan")

    def _continue(self, held: Held) -> None:
        """Begin new gradients if the caller cleared the last ones, or add to them; else end the lease."""
        generation = held.generation
        if not generation.gradients:
            return
        present = [_grad(parameter) for parameter in held.parameters.values()]
        if all(one is None for one in present):
            held.lease.clear_gradients()
            held.log.forget_open()
            held.generation = Generation()
        elif generation.is_spent or not all(_is_untouched(one, generation) for one in present):
            self.end("gradients were kept after a step, or some were changed and others not")

    def _begin(
        self, description: Description, plan: ResidentPlan, wanted: Mapping[int, Shard], work: PassWork
    ) -> Held | None:
        parameters = {number: description.parameters[number] for number in wanted}
        optimizer = self.eligibility.optimizer_of(next(iter(parameters.values())))
        assert optimizer is not None, "it was asked for above"
        if any(one.grad is not None for one in parameters.values()):
            return None  # gradients that are here would have to go along
        groups = {id(one): group for group in optimizer.param_groups for one in group["params"]}
        given = {
            number: lent(self._fleet, optimizer, groups[id(parameter)], parameter)
            for number, parameter in parameters.items()
        }
        begun: FleetLease = self._fleet.lease(description.stack, plan, given)
        try:
            self._fleet.wait(begun.lend())
        except LeaseLost as fault:
            begun.end()
            log.info("weights could not be lent: %s", fault)
            return None
        begun.forget_numbers()
        held = self._held = Held(
            lease=begun,
            work=work,
            description=description,
            parameters=parameters,
            optimizer=optimizer,
            groups={number: groups[id(parameter)] for number, parameter in parameters.items()},
            log=BoundaryLog(TorchCodec(), self._fleet.wire),
            shards=leased_shards(plan, wanted),
            stepped_here=stepped_here(description, wanted),
        )
        for tensor in held.tensors:
            lease(tensor, self)
        count = sum(one.numel() for one in parameters.values())
        self._say(
            f"devices keep {count / 1e6:.3g} M weights and their optimizer states; snapshots are fetched every "
            f"{min(one.every for one in held.shards)} steps or more, weights when they are read or saved"
        )
        return held

    def returned(self, lease: FleetPassLease, running: Any, batch: Batch[Any], factor: float) -> None:
        """Note that a pass under a lease is complete: its gradients wait on devices, multiplied by a factor.

        Raises LeaseLost if the lease ended meanwhile, and the gradients with it.
        """
        with self._lock:
            held = self._held
            if held is None or held.lease is not lease.lease or not lease.is_current:
                raise LeaseLost("the lease ended before the pass did, or its devices left")
            generation = held.generation
            stages = {column.shard: n for n, stage in enumerate(held.lease.plan.stages) for column in stage.columns}
            borders = [(one.shard, *running.boundary(stages[one.shard])) for one in held.shards]
            generation.returned += 1
            generation.norms = None
            is_first = not generation.gradients
            if is_first:
                generation.factor = factor
                for number, parameter in held.parameters.items():
                    generation.gradients[number] = LeasedGradient(self, number, parameter, factor)
                    parameter.grad = generation.gradients[number]
            try:
                held.log.add_pass(batch, factor, borders, self._changing(held))
            except LogFullError as full:
                self._make_room(held, batch, factor, borders, str(full))
            if self._held is held and not is_first and factor != generation.factor:
                self._rebuild(held, "passes of one step have different factors on their loss")

    def _changing(self, held: Held) -> dict[int, tuple[Matrix, WireFormat]]:
        """Return the parameters of leased shards that this process steps, as devices have them in this pass."""
        parameters = ((number, held.description.parameters[number]) for number in held.stepped_here)
        return {number: (matrix(one), parameter_format(self._fleet, one)) for number, one in parameters}

    def _make_room(self, held: Held, batch: Batch[Any], factor: float, borders: list[Any], reason: str) -> None:
        """Fetch weights, so that the log can be emptied; if even that does not help, end the lease."""
        self._fetch(held)
        if self._held is not held:
            return
        try:
            held.log.add_pass(batch, factor, borders, self._changing(held))
        except LogFullError:
            refusal = self.eligibility.refusal = f"the log of leased layers cannot be kept: {reason}"
            self.end(refusal)
            self._say(f"{refusal}; make room for temporary files, and the next run can use leases again")

    # -------------------------------------------------------------------------------------------- the optimizer

    def stepping(self, optimizer: optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Before a step: have devices do the leased part of it, and hide those gradients from the optimizer."""
        with self._lock:
            if self._is_recovering:
                return
            held = self._held
            if held is None or optimizer is not held.optimizer:
                return
            closure = args[1] if len(args) > 1 else kwargs.get("closure")
            reason = "the optimizer's step calls the model again" if closure else update_rules.why_not(optimizer)
            generation = held.generation
            present = {number: _grad(parameter) for number, parameter in held.parameters.items()}
            if reason is None and generation.begun != generation.returned:
                self._rebuild(held, _NO_BACKWARD)
                return
            if reason is None and not all(
                one is None or one is generation.gradients.get(n) for n, one in present.items()
            ):
                reason = "some gradients were replaced"
            if reason is None and generation.is_spent:
                reason = "the optimizer stepped twice with the same gradients"
            if reason is not None:
                self.end(reason)
                return
            stepped = {number: one for number, one in present.items() if isinstance(one, LeasedGradient)}
            if not stepped:
                return
            try:
                for settled in held.unsettled():
                    self._fleet.wait(settled)
            except LeaseLost as fault:
                self.recover(str(fault))
                self.stepping(optimizer, args, kwargs)
                return
            rules = {
                number: (
                    update_rules.next_rule(optimizer, held.group(number), held.parameters[number]),
                    gradient.factor,
                )
                for number, gradient in stepped.items()
            }
            held.log.add_update({number: (rule, f / generation.factor) for number, (rule, f) in rules.items()})
            generation.is_spent = True
            held.pending = held.lease.update(rules)
            self._hidden = [(held.parameters[number], gradient) for number, gradient in stepped.items()]
            for parameter, _ in self._hidden:
                parameter.grad = None

    def stepped(self, optimizer: optim.Optimizer) -> None:
        """After a step: show gradients again, learn about the optimizer, and see to snapshots."""
        with self._lock:
            if self._is_recovering:
                return
            self.know(optimizer)
            for parameter, gradient in self._hidden:
                parameter.grad = gradient
            self._hidden = []
            self._reads, self._was_read = self._reads + 1 if self._was_read else 0, False
            held = self._held
            if held is not None and optimizer is held.optimizer:
                held.take_snapshots()
                held.begin_snapshots()

    # -------------------------------------------------------------------------------------------- the keeper

    def norm(self, number: int) -> float | None:
        """Return the norm of a gradient on its device; None if the lease ended, and the gradient is here."""
        with self._lock:
            held = self._held
            if held is None:
                return None
            generation = held.generation
            if generation.begun != generation.returned:
                self._rebuild(held, _NO_BACKWARD)
                return None
            if generation.norms is None:
                try:
                    sums = held.lease.square_sums(self._fleet.wait(held.lease.measure()))
                except LeaseLost as fault:
                    self.recover(str(fault))
                    return self.norm(number)
                generation.norms = {each: math.sqrt(total) for each, total in sums.items()}
            return generation.norms[number]

    @property
    def is_saving(self) -> bool:
        """Whether the model is being saved: views of its weights are read then, not written."""
        return self._is_saving

    def watch_saving(self, model: nn.Module) -> list[Any]:
        """Bring everything up to date whenever a model is saved; return hooks to remove."""
        itself = weakref.ref(self)
        return [
            model.register_state_dict_pre_hook(_Hook(itself, Leases._begin_saving)),
            model.register_state_dict_post_hook(_Hook(itself, Leases._end_saving)),
        ]

    def _begin_saving(self, *_: object) -> None:
        self.refresh("")
        self._is_saving = True

    def _end_saving(self, *_: object) -> None:
        self._is_saving = False

    def refresh(self, why: str) -> None:
        """Bring this process's copies of weights and states up to date; `why` is empty if that is part of a run."""
        with self._lock:
            held = self._held
            if held is None or not held.is_old:
                return
            self._fetch(held)
            if why:
                log.info("fetched leased weights: %s", why)
                self._was_read = True
                if self._reads >= _MOST_READS:
                    refusal = self.eligibility.refusal = f"weights are read in every step ({why})"
                    self._say(f"the optimizer runs on the server from now on: {refusal}")
                    self.end(refusal)

    def end(self, why: str) -> None:
        """End the lease: weights, states and gradients are here again, as if there had been none."""
        with self._lock:
            held = self._held
            if held is None:
                return
            log.info("lease ends: %s", why)
            generation = held.generation
            wants = any(_grad(held.parameters[number]) is one for number, one in generation.gradients.items())
            if wants and generation.begun != generation.returned:
                self._rebuild(held, why)
                return
            try:
                self._settle(held)
                values = self._read(held, held.lease.parameters, gradients=wants)
            except LeaseLost as fault:
                self.recover(str(fault))
                self.end(why)
                return
            if held.is_old:  # else the numbers here are current, and may have been changed since they were read
                held.write(values)
            if wants:
                for number, one in values.items():
                    gradient = torch.from_numpy(one.gradient).view(held.parameters[number].shape)
                    self._give(held, number, gradient * generation.gradients[number].factor)
            self._detach(held)

    def _fetch(self, held: Held) -> None:
        """Fetch weights and states; the lease goes on, unless devices are gone and it cannot."""
        held.take_snapshots()
        held.cancel_snapshots()  # what comes up now is newer
        try:
            self._settle(held)
            values = self._read(held, held.lease.parameters, gradients=False)
        except LeaseLost as fault:
            self.recover(str(fault))
            if self._held is held and not self._is_recovering:
                self._fetch(held)
            return
        held.write(values)
        held.have_all()
        self._weights.touched()

    def _settle(self, held: Held) -> None:
        """Wait until the last update is done everywhere."""
        pending, held.pending = held.pending, None
        if pending is not None:
            self._fleet.wait(pending)

    def _read(self, held: Held, parameters: Collection[int], *, gradients: bool) -> Mapping[int, Any]:
        matrices = self._fleet.wait(held.lease.read(parameters, gradients=gradients))
        return held.lease.values(parameters, matrices, gradients=gradients)

    def _give(self, held: Held, number: int, gradient: torch.Tensor) -> None:
        """Turn a gradient into a plain tensor, for code that holds its stand-in."""
        stand_in = held.generation.gradients[number]
        stand_in.numbers = gradient
        parameter = held.parameters[number]
        if _grad(parameter) is stand_in:
            parameter.grad = gradient

    def _detach(self, held: Held) -> None:
        self._held = None
        for tensor in held.tensors:
            release(tensor)
        for parameter in held.parameters.values():
            update_rules.forget_unused(held.optimizer, parameter)
        held.log.close()
        held.lease.end()
        self._weights.touched()

    def recover(self, reason: str) -> None:
        """Recover from lost devices: others take over their shards and replay the log, and the lease goes on.

        If they cannot, the lease ends.
        """
        with self._lock:
            held = self._held
            if held is None or self._is_recovering:
                return
            with suppress(LeaseLost):
                self._settle(held)
            held.take_snapshots()
            regaining = Regaining(self._fleet, self._weights, held)
            self._is_recovering = True
            try:
                is_back = regaining.regain()
            finally:
                self._is_recovering = False
            if not is_back:
                self._rebuild(held, reason, regaining.behind)
                return
            self._say(f"weights that devices kept are recovered on others: {reason}", again=True)
            generation = held.generation
            generation.begun = generation.returned
            if generation.is_spent:
                self._drop_spent(held)

    def _drop_spent(self, held: Held) -> None:
        """Drop gradients that the optimizer has stepped with: no device has those of a lost shard."""
        for number, gradient in held.generation.gradients.items():
            if _grad(held.parameters[number]) is gradient:
                held.parameters[number].grad = None
        held.generation = Generation()

    def _rebuild(self, held: Held, reason: str, behind: Collection[LeasedShard] = ()) -> None:
        """End a lease of which a device is gone, or whose gradients are not the caller's: do its work again.

        Weights that are still on a device are fetched, except those of shards that are `behind`. The others are trained
        again from their bases, shard by shard, by whatever devices there are; and so are the gradients since the last
        update, of all.
        """
        self._say(f"weights that devices kept are recovered: {reason}", again=True)
        with suppress(LeaseLost):
            self._settle(held)
        held.take_snapshots()
        held.cancel_snapshots()
        lost = fetch_survivors(self._fleet, held, behind)
        held.lease.end()  # survivors need room for what is lost
        generation = held.generation
        self._held, self._is_recovering = None, True
        try:
            for tensor in held.tensors:
                release(tensor)
            wants = [n for n, one in generation.gradients.items() if _grad(held.parameters[n]) is one]
            replay = Replay(self._fleet, self._weights, held)
            with self._fleet.rescue():
                for one in lost:
                    replay.updates(one)
                self._weights.touched()
                if wants and not generation.is_spent:
                    for number, total in replay.gradients().items():
                        clipped = generation.gradients[number].factor / generation.factor
                        self._give(held, number, total * clipped)
            if generation.is_spent:
                self._drop_spent(held)
        finally:
            self._is_recovering = False
        for parameter in held.parameters.values():
            update_rules.forget_unused(held.optimizer, parameter)
        held.log.close()

    # -------------------------------------------------------------------------------------------- hooks

    def _saving_states(self, *_: object) -> None:
        self.refresh("")

    def _loading_states(self, *_: object) -> None:
        self.end("the optimizer's state was loaded")

    def _closing(self) -> None:
        try:
            self.end("the fleet closes")
        except CleaveError as fault:
            self._say(f"weights that devices kept could not be fetched: {fault}; resume from the last checkpoint")

    def _say(self, text: str, *, again: bool = False) -> None:
        if again or text not in self._told:
            self._told.add(text)
            self._tell(Note(text=text))


class _Hook:
    """A method of an object that need not live as long as the hook."""

    def __init__(self, of: Callable[[], Leases | None], method: Callable[..., None]) -> None:
        self._of, self._method = of, method

    def __call__(self, *args: Any) -> None:
        found = self._of()
        if found is not None:
            self._method(found, *args)

    def __reduce__(self) -> Any:
        return _Hook, (_nobody, _nothing)


def _nobody() -> None:
    return None


def _nothing(*_: object) -> None:
    pass


def _grad(parameter: nn.Parameter) -> torch.Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def _is_untouched(gradient: torch.Tensor | None, generation: Generation) -> bool:
    return (
        isinstance(gradient, LeasedGradient)
        and generation.gradients.get(gradient.number) is gradient
        and gradient.factor == generation.factor
    )
