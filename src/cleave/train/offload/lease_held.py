# pyright: standard
"""A lease in force, as this process sees it: what is lent, the gradients on devices, and from where to rebuild.

Every shard has a base: the position in the log at which this process's own copies of its weights and states stand. A
snapshot under way moves it forward when it is complete, not before; a fetch moves all of them to the present. Whatever
happens, base and log together give the present weights. `leases.py` decides; `lease_recovery.py` rebuilds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn, optim

from cleave.core.model.batch import Matrix
from cleave.core.model.decoder import Decoder
from cleave.core.model.shard import Shard
from cleave.core.model.update_rule import Rule
from cleave.core.plan.choose import PassWork
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.errors import LeaseLost
from cleave.train.offload import update_rules
from cleave.train.offload.boundary_log import BoundaryLog
from cleave.train.offload.families import Description
from cleave.train.offload.leased_tensors import LeasedGradient
from cleave.train.offload.update_rules import Group


class FleetSnapshot(Protocol):
    """Weights and states as they were at one moment, on their way here."""

    @property
    def done(self) -> Future[list[Matrix]]: ...
    @property
    def settled(self) -> Future[None]:
        """Done when updates may go on."""
        ...

    @property
    def cancel(self) -> Callable[[], None]: ...


class FleetPassLease(Protocol):
    """The fleet's side of a lease during a pass: `server/resident/pass_lease.py`."""

    plan: ResidentPlan
    parameters: frozenset[int]

    @property
    def lease(self) -> FleetLease: ...
    @property
    def is_current(self) -> bool: ...


class FleetLease(Protocol):
    """The fleet's side of a lease; the requests are words of `server/resident/lease.py`."""

    decoder: Decoder
    plan: ResidentPlan
    parameters: frozenset[int]

    def for_pass(self, plan: ResidentPlan | None = None, numbers: Sequence[int] | None = None) -> FleetPassLease: ...
    def lend(self) -> Future[list[Matrix]]: ...
    def lend_again(self, plan: ResidentPlan, lent: Mapping[int, Any]) -> Future[list[Matrix]]: ...
    def forget_numbers(self) -> None: ...
    def measure(self) -> Future[list[Matrix]]: ...
    def square_sums(self, matrices: list[Matrix]) -> dict[int, float]: ...
    def update(self, rules: Mapping[int, tuple[Rule, float]]) -> Future[list[Matrix]]: ...
    def read(self, parameters: Collection[int], *, gradients: bool) -> Future[list[Matrix]]: ...
    def snapshot(self, parameters: Collection[int]) -> FleetSnapshot: ...
    def values(self, parameters: Collection[int], matrices: list[Matrix], *, gradients: bool) -> Mapping[int, Any]: ...
    def clear_gradients(self, parameters: Collection[int] | None = None) -> None: ...
    def end(self) -> None: ...


@dataclass(slots=True, eq=False)
class Generation:
    """The gradients between two calls of `zero_grad`."""

    begun: int = 0
    """Passes whose gradients devices add, whether or not anybody asks for them."""
    returned: int = 0
    factor: float = 1.0
    is_spent: bool = False
    """Whether the optimizer has stepped with them."""
    gradients: dict[int, LeasedGradient] = field(default_factory=dict)
    norms: dict[int, float] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether gradients on devices are those of the passes that were returned."""
        return self.begun == self.returned

    def scale(self, number: int) -> float:
        """Return what a gradient was multiplied by besides the factor of its passes, as by clipping."""
        return self.gradients[number].factor / self.factor if self.factor else 1.0  # of zeros, any will do


@dataclass(slots=True, eq=False)
class LeasedShard:
    """What one device keeps, and from where it can be rebuilt; it stays the same when another device takes over."""

    shard: Shard
    parameters: frozenset[int]
    every: int
    """Updates between two snapshots."""
    base: int = 0
    """Position in the log of what this process has of it."""
    begun: int = 0
    """Position of its last snapshot, complete or not."""
    under_way: FleetSnapshot | None = None

    def give_up_snapshot(self) -> None:
        """Forget the snapshot under way: its device is gone. The next update may begin another."""
        self.cancel()
        self.begun = self.base

    def cancel(self) -> None:
        under_way, self.under_way = self.under_way, None
        if under_way is not None:
            under_way.cancel()


def lent(fleet: Any, optimizer: optim.Optimizer, group: Group, parameter: nn.Parameter) -> tuple[Any, ...]:
    """Return a parameter and its optimizer states as tensors of the fleet, with their numbers."""
    found = []
    for one in (parameter, *update_rules.states(optimizer, group, parameter)):
        numbers = matrix(one)
        found.append(fleet.tensor(*numbers.shape, "fp32"))
        found[-1].bind(numbers)
    return tuple(found)


def matrix(tensor: torch.Tensor) -> Matrix:
    """Return the numbers of a tensor in fp32, which are not copied if they are in fp32 on the CPU."""
    flat = tensor.detach().cpu().float().contiguous()
    return flat.view(1, -1).numpy() if flat.dim() == 1 else flat.numpy()


def shown_gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """Return a parameter's gradient without fetching anything."""
    with torch._C.DisableTorchFunctionSubclass():
        return parameter.grad


@dataclass(slots=True, eq=False)
class Held:
    """A lease in force."""

    lease: FleetLease
    work: PassWork
    description: Description
    parameters: dict[int, nn.Parameter]
    optimizer: optim.Optimizer
    groups: dict[int, Group]
    states: dict[int, tuple[str, ...]]
    """Names of the optimizer states that devices keep, by parameter."""
    log: BoundaryLog
    shards: tuple[LeasedShard, ...]
    stepped_here: tuple[int, ...] = ()
    """Trained parameters of those shards that this process steps: their numbers change, and are logged too."""
    generation: Generation = field(default_factory=Generation)
    pending: Future[list[Matrix]] | None = None
    """The last update."""
    behind: set[LeasedShard] = field(default_factory=set)
    """Shards that no device has in their present state: they are being recovered, or a recovery was interrupted."""

    @property
    def is_old(self) -> bool:
        """Whether there were updates since this process had all weights."""
        return any(one.base < self.log.position for one in self.shards)

    def is_of(self, description: Description, wanted: Collection[int]) -> bool:
        """Whether these are the parameters, by number in a decoder, that devices should keep."""
        return (
            self.lease.decoder == description.stack
            and self.parameters.keys() == set(wanted)
            and all(one is description.parameters[number] for number, one in self.parameters.items())
        )

    def group(self, number: int) -> Group:
        """Return the group a parameter is in now; groups may be replaced, as by loading a state."""
        parameter, group = self.parameters[number], self.groups[number]
        if not any(group is one for one in self.optimizer.param_groups):
            group = next(one for one in self.optimizer.param_groups if any(p is parameter for p in one["params"]))
            self.groups[number] = group
        return group

    @property
    def tensors(self) -> Iterator[torch.Tensor]:
        """Leased parameters and their optimizer states, unless the caller has cleared those."""
        for number, parameter in self.parameters.items():
            yield parameter
            own = self.optimizer.state.get(parameter, {})
            yield from (own[name] for name in self.states[number] if own.get(name) is not None)

    def lent(self, fleet: Any, number: int) -> tuple[Any, ...]:
        """Return a parameter and its states, as they are here, as tensors of the fleet, to be lent."""
        with torch._C.DisableTorchFunctionSubclass():  # else reading an old one would fetch them all
            return lent(fleet, self.optimizer, self.group(number), self.parameters[number])

    @property
    def shown(self) -> list[int]:
        """Parameters whose gradient, as the caller sees it, is the one on a device."""
        gradients = self.generation.gradients.items()
        return [number for number, one in gradients if shown_gradient(self.parameters[number]) is one]

    def give(self, number: int, gradient: torch.Tensor) -> None:
        """Make a gradient a plain tensor, for whoever has hold of its stand-in."""
        stand_in, parameter = self.generation.gradients[number], self.parameters[number]
        stand_in.numbers = gradient
        if shown_gradient(parameter) is stand_in:
            parameter.grad = gradient

    def forget_unused_states(self) -> None:
        """Drop states that were made for devices and that no step has filled."""
        for parameter in self.parameters.values():
            update_rules.forget_unused(self.optimizer, parameter)

    def write(self, values: Mapping[int, Any]) -> None:
        """Take over weights and states."""
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            for number, one in values.items():
                parameter = self.parameters[number]
                parameter.data.copy_(torch.from_numpy(one.weight).view(parameter.shape))
                own = self.optimizer.state.get(parameter, {})
                for name, matrix in zip(self.states[number], one.states, strict=True):
                    if own.get(name) is not None:
                        own[name].copy_(torch.from_numpy(matrix).view(parameter.shape))

    # -------------------------------------------------------------------------------------------- bases

    def begin_snapshots(self) -> None:
        """Begin the snapshots that are due, right after an update."""
        for one in self.shards:
            if one.under_way is None and self.log.position - one.begun >= one.every:
                one.begun = self.log.position
                one.under_way = self.lease.snapshot(one.parameters)

    def unsettled(self) -> Iterator[Future[None]]:
        """Yield what the next update must wait for."""
        return (one.under_way.settled for one in self.shards if one.under_way is not None)

    def take_snapshots(self) -> bool:
        """Move the bases of shards whose snapshots are complete; say whether there were any."""
        has_changed = False
        for one in self.shards:
            if one.under_way is None or not one.under_way.done.done():
                continue
            under_way, one.under_way = one.under_way, None
            try:
                matrices = under_way.done.result()
            except LeaseLost:
                continue  # the base stays; whoever needs the device next finds out
            self.write(self.lease.values(one.parameters, matrices, gradients=False))
            self._move(one, one.begun)
            has_changed = True
        return has_changed

    def have_all(self) -> None:
        """Note that this process has weights and states as the last update left them."""
        for one in self.shards:
            one.cancel()
            one.begun = self.log.position
            self._move(one, one.begun)

    def cancel_snapshots(self) -> None:
        for one in self.shards:
            one.cancel()

    def _move(self, one: LeasedShard, base: int) -> None:
        one.base = base
        self.log.forget(one.shard, base)
