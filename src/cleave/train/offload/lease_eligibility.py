# pyright: standard
"""Which parameters devices may keep: those that one known optimizer steps, in fp32, used in one place, without hooks.

Optimizers are learned from their steps. What the server must step itself is said once, with the reason.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping

from torch import float32, nn, optim
from torch.utils.weak import WeakTensorKeyDictionary

from cleave.core.model.shard import Shard
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.train.offload import update_rules
from cleave.train.offload.families import Description


class Eligibility:
    def __init__(self, shared: Collection[int], say: Callable[[str], None], *, refusal: str) -> None:
        """`shared` are the ids of parameters that several modules use; a `refusal` rules out all leases."""
        self._shared, self._say, self.refusal = shared, say, refusal
        self._optimizers = WeakTensorKeyDictionary()  # parameter -> optimizer that steps it
        self._known: weakref.WeakKeyDictionary[optim.Optimizer, int] = weakref.WeakKeyDictionary()
        """Optimizers, and how many parameters they step."""

    def learn(self, optimizer: optim.Optimizer) -> bool:
        """Learn which parameters an optimizer steps; return whether it is new."""
        known, count = self._known.get(optimizer), sum(len(group["params"]) for group in optimizer.param_groups)
        if known == count:
            return False
        self._known[optimizer] = count
        reference = weakref.ref(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                self._optimizers[parameter] = reference
        return known is None

    def optimizer_of(self, parameter: nn.Parameter) -> optim.Optimizer | None:
        reference = self._optimizers.get(parameter)
        return None if reference is None else reference()

    def states(self, description: Description) -> int | None:
        """Optimizer states per weight if devices may keep weights in the next pass; None if they may not."""
        trained = [one for one in description.parameters if one.requires_grad]
        optimizers = {id(one): one for one in map(self.optimizer_of, trained) if one is not None}
        if self.refusal or not optimizers:
            return None
        if len(optimizers) > 1:
            self._say(f"the optimizer runs on the server: {len(optimizers)} optimizers step the layers, expected one")
            return None
        (optimizer,) = optimizers.values()
        reason = update_rules.why_not(optimizer)
        if reason is not None:
            self._say(f"the optimizer runs on the server: {reason}")
            return None
        return max((len(update_rules.state_names(group)) for group in optimizer.param_groups), default=0)

    def unleased(self, description: Description) -> frozenset[int]:
        """Trained parameters that the server must step itself, whoever holds them."""
        found: set[int] = set()
        for number, parameter in enumerate(description.parameters):
            reason = self._why_not(parameter) if parameter.requires_grad else None
            if reason is not None:
                found.add(number)
                self._say(f"the server steps some weights itself: {reason}")
        return frozenset(found)

    def leasable(self, description: Description, plan: ResidentPlan) -> dict[int, Shard]:
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
        if self.optimizer_of(parameter) is None:
            return "a weight is stepped by no optimizer that was seen"
        if parameter.dtype != float32 or parameter.device.type != "cpu":
            return f"a weight is {parameter.dtype} on {parameter.device.type}, not float32 on the CPU"
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            return "a weight has hooks on its gradient"
        return None


def stepped_here(description: Description, wanted: Mapping[int, Shard]) -> tuple[int, ...]:
    """Trained parameters of leased shards that are not leased themselves."""
    decoder = description.stack
    used = {view.parameter for shard in dict.fromkeys(wanted.values()) for view in shard.views(decoder)}
    return tuple(sorted(number for number in used - wanted.keys() if decoder.parameters[number].is_trained))
