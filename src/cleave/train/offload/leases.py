# pyright: standard
"""Leases of a decoder stack: when devices keep weights and optimizer states, and how this process gets them back.

The user's loop stays as it is. After a pass, leased parameters have a `LeasedGradient`; clipping scales it; a hook that
runs before `optimizer.step()` sends the step to the devices and hides the gradient from the optimizer. Parameters are
`LeasedParameter`, and their states `LeasedState`: reading an old one fetches all of them. Whatever does not fit this
pattern ends the lease, and everything is as if there had been none.

Snapshots of weights and states come up while links are idle, and `BoundaryLog` keeps what went in and out of leased
stages since (`lease_held.py`). If a device leaves, its stages are trained again from there, alone, by the remaining
devices: the losses do not change (`lease_recovery.py`). `lease.py` in the server words the requests to devices.
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
from torch.utils.weak import WeakTensorKeyDictionary

from cleave.core.cost.wire import WireFormat
from cleave.core.model.batch import Batch, Matrix
from cleave.core.model.shard import Shard
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.errors import CleaveError, LeaseLost
from cleave.events import Listener, Note
from cleave.train.offload import update_rules
from cleave.train.offload.boundary_log import BoundaryLog, LogFullError
from cleave.train.offload.codec import TorchCodec
from cleave.train.offload.families import Description
from cleave.train.offload.lease_held import FleetLease, Generation, Held, LeasedShard, lent, matrix
from cleave.train.offload.lease_recovery import Replay, fetch_survivors
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
        self._shared = shared
        self._fleet, self._weights, self._tell = fleet, weights, tell
        self._refusal = "" if is_allowed else "leases are switched off"
        self._held: Held | None = None
        self._lock = threading.RLock()
        self._optimizers = WeakTensorKeyDictionary()  # parameter -> optimizer that steps it
        self._watched: weakref.WeakSet[optim.Optimizer] = weakref.WeakSet()
        self._hidden: list[tuple[nn.Parameter, LeasedGradient]] = []
        self._told: set[str] = set()
        self._reads = 0
        self._was_read = self._is_saving = self._is_recovering = False
        watch_steps(self)
        fleet.before_closing(_Hook(weakref.ref(self), Leases._closing))

    # -------------------------------------------------------------------------------------------- what may be leased

    def know(self, optimizer: optim.Optimizer) -> None:
        """Learn which parameters an optimizer steps."""
        if optimizer in self._watched:
            return
        self._watched.add(optimizer)
        itself = weakref.ref(self)
        optimizer.register_state_dict_pre_hook(_Hook(itself, Leases._saving_states))
        optimizer.register_load_state_dict_pre_hook(_Hook(itself, Leases._loading_states))
        reference = weakref.ref(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._optimizers[parameter] = reference

    def states(self, description: Description) -> int | None:
        """Optimizer states per weight if devices may keep weights in the next pass; None if they may not."""
        trained = [one for one in description.parameters if one.requires_grad]
        optimizers = {id(one): one for one in map(self._optimizer_of, trained) if one is not None}
        if self._refusal or len(optimizers) != 1:
            return None
        (optimizer,) = optimizers.values()
        reason = update_rules.why_not(optimizer)
        if reason is not None:
            self._say(f"the optimizer runs on the server: {reason}")
            return None
        return max((len(update_rules.state_names(group)) for group in optimizer.param_groups), default=0)

    def _optimizer_of(self, parameter: nn.Parameter) -> optim.Optimizer | None:
        reference = self._optimizers.get(parameter)
        return None if reference is None else reference()

    def unleased(self, description: Description) -> frozenset[int]:
        """Trained parameters that the server must step itself, whoever holds them."""
        found: set[int] = set()
        for number, parameter in enumerate(description.parameters):
            reason = self._why_not(parameter) if parameter.requires_grad else None
            if reason is not None:
                found.add(number)
                self._say(f"the server steps some weights itself: {reason}")
        return frozenset(found)

    def _leasable(self, description: Description, plan: ResidentPlan) -> dict[int, Shard]:
        """Parameters that devices should keep under a plan, with their shards."""
        decoder, kept_here = description.stack, self.unleased(description)
        return {
            view.parameter: column.shard
            for stage in plan.stages
            for column in stage.columns
            if column.is_leased
            for view in column.shard.views(decoder)
            if decoder.parameters[view.parameter].is_trained and view.parameter not in kept_here
        }

    def _why_not(self, parameter: nn.Parameter) -> str | None:
        if id(parameter) in self._shared:
            return "a weight is used in several places, such as a head tied to the token table"
        if self._optimizer_of(parameter) is None:
            return "a weight is stepped by no optimizer that was seen"
        if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
            return f"a weight is {parameter.dtype} on {parameter.device.type}, not float32 on the CPU"
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return "a weight has hooks on its gradient"
        return None

    # -------------------------------------------------------------------------------------------- a pass

    def for_training(self, description: Description, plan: ResidentPlan | None) -> FleetLease | None:
        """Return the lease under which a pass should run; None if it should run without one."""
        with self._lock:
            is_leased = plan is not None and any(column.is_leased for stage in plan.stages for column in stage.columns)
            wanted = self._leasable(description, plan) if plan is not None and is_leased else {}
            held = self._held
            if held is not None and not self._is_same(held, description, plan, wanted):
                self.end("the plan changed")
                held = None
            if held is not None:
                self._continue(held)
                held = self._held
            if held is None and wanted and plan is not None:
                held = self._begin(description, plan, wanted)
            if held is None:
                return None
            held.generation.begun += 1
            return held.lease

    def _is_same(
        self, held: Held, description: Description, plan: ResidentPlan | None, wanted: Mapping[int, Shard]
    ) -> bool:
        return (
            plan is not None
            and held.lease.decoder == description.stack
            and held.lease.plan.arrangement == plan.arrangement
            and held.parameters.keys() == wanted.keys()
            and all(one is description.parameters[number] for number, one in held.parameters.items())
        )

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

    def _begin(self, description: Description, plan: ResidentPlan, wanted: Mapping[int, Shard]) -> Held | None:
        parameters = {number: description.parameters[number] for number in wanted}
        optimizer = self._optimizer_of(next(iter(parameters.values())))
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
            description=description,
            parameters=parameters,
            optimizer=optimizer,
            groups={number: groups[id(parameter)] for number, parameter in parameters.items()},
            log=BoundaryLog(TorchCodec(), self._fleet.wire),
            shards=_leased_shards(plan, wanted),
            stepped_here=_stepped_here(description, wanted),
        )
        for tensor in held.tensors:
            lease(tensor, self)
        count = sum(one.numel() for one in parameters.values())
        self._say(
            f"devices keep {count / 1e6:.3g} M weights and their optimizer states; snapshots come up every "
            f"{min(one.every for one in held.shards)} steps or more, and weights when they are read or saved"
        )
        return held

    def returned(self, lease: FleetLease, running: Any, batch: Batch[Any], factor: float) -> None:
        """Note that a pass under a lease is complete: its gradients wait on devices, multiplied by a factor.

        Raises LeaseLost if the lease ended meanwhile, and the gradients with it.
        """
        with self._lock:
            held = self._held
            if held is None or held.lease is not lease:
                raise LeaseLost("the lease ended before the pass did")
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
                self.recover("passes of one step have different factors on their loss")

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
            self._refusal = f"the log of leased layers cannot be kept: {reason}"
            self.end(self._refusal)
            self._say(f"{self._refusal}; make room for temporary files, and the next run can use leases again")

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
                self.recover(_NO_BACKWARD)
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
                self.recover(_NO_BACKWARD)
                return None
            if generation.norms is None:
                try:
                    sums = held.lease.square_sums(self._fleet.wait(held.lease.measure()))
                except LeaseLost as fault:
                    self.recover(str(fault))
                    return None
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
                    self._refusal = f"weights are read in every step ({why})"
                    self._say(f"the optimizer runs on the server from now on: {self._refusal}")
                    self.end(self._refusal)

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
                self.recover(why)
                return
            try:
                self._settle(held)
                values = self._read(held, held.lease.parameters, gradients=wants)
            except LeaseLost as fault:
                self.recover(str(fault))
                return
            if held.is_old:  # else the numbers here are current, and may have been changed since they were read
                held.write(values)
            if wants:
                for number, one in values.items():
                    gradient = torch.from_numpy(one.gradient).view(held.parameters[number].shape)
                    self._give(held, number, gradient * generation.gradients[number].factor)
            self._detach(held)

    def _fetch(self, held: Held) -> None:
        """Fetch weights and states; the lease goes on. If a device is gone, recover instead."""
        held.take_snapshots()
        held.cancel_snapshots()  # what comes up now is newer
        try:
            self._settle(held)
            values = self._read(held, held.lease.parameters, gradients=False)
        except LeaseLost as fault:
            self.recover(str(fault))
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
        """Make a gradient a plain tensor, for whoever has hold of its stand-in."""
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
        """End a lease of which a device is gone, or whose gradients are not the caller's: do its work again.

        Weights that are still on a device are fetched. The others are trained again from their bases, shard by shard,
        by whatever devices there are; and so are the gradients since the last update, of all.
        """
        with self._lock:
            held = self._held
            if held is None or self._is_recovering:
                return
            self._say(f"weights that devices kept are recovered: {reason}", again=True)
            with suppress(LeaseLost):
                self._settle(held)
            held.take_snapshots()
            held.cancel_snapshots()
            lost = fetch_survivors(self._fleet, held)
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
                for number in wants if generation.is_spent else ():
                    held.parameters[number].grad = None  # its weights have changed since, and nobody needs it
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


def _leased_shards(plan: ResidentPlan, wanted: Mapping[int, Shard]) -> tuple[LeasedShard, ...]:
    every = {column.shard: column.snapshot_every for stage in plan.stages for column in stage.columns}
    return tuple(
        LeasedShard(shard, frozenset(number for number, other in wanted.items() if other == shard), every[shard])
        for shard in dict.fromkeys(wanted.values())
    )


def _stepped_here(description: Description, wanted: Mapping[int, Shard]) -> tuple[int, ...]:
    """Trained parameters of leased shards that are not leased themselves."""
    decoder = description.stack
    used = {view.parameter for shard in dict.fromkeys(wanted.values()) for view in shard.views(decoder)}
    return tuple(sorted(number for number in used - wanted.keys() if decoder.parameters[number].is_trained))


def _grad(parameter: nn.Parameter) -> torch.Tensor | None:
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


def _is_untouched(gradient: torch.Tensor | None, generation: Generation) -> bool:
    return (
        isinstance(gradient, LeasedGradient)
        and generation.gradients.get(gradient.number) is gradient
        and gradient.factor == generation.factor
    )
