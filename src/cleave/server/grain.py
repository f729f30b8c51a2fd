"""Which grain a model's step is given: layers resident on devices, or the blocks of single products.

The planner is asked for both as the fleet is now; what it foresees is kept beside what was chosen, so that people can
be told why. Plans follow measured rates; who holds what stays, unless another arrangement is clearly faster.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from cleave.core.cost.gemm import WireFormat, handling_s
from cleave.core.cost.resident import Sublayer
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.gemms import Role
from cleave.core.plan.gemm.layer import Linear, moved_bytes, plan_linear
from cleave.core.plan.resident.stages import ColumnPlan, Share, Stage
from cleave.errors import InfeasibleError
from cleave.protocol.decoder import Batch, Stack
from cleave.protocol.programs import Attention, Weight
from cleave.server.segments import Share as Segment
from cleave.server.segments import inner_width, kind_of, sliceable

Grain = Literal["auto", "gemm", "resident"]
_REMEMBERED = 32  # batches of other lengths, each with its plan

Arrange = Callable[..., ColumnPlan]
"""`core/planner/live_columns.plan_columns`, or who arranges columns otherwise."""
Fleet = tuple[int, Profiles | None]
"""A number that changes with it, and the devices."""


@dataclass(frozen=True, slots=True)
class _Call:
    """What plans are made for."""

    stack: Stack
    sequences: int
    sequence: int
    is_trained: bool


@dataclass(frozen=True, slots=True)
class _Planned:
    number: int
    names: tuple[str, ...]
    plan: ColumnPlan


class Grains:
    """Plans of passes; asked from any thread."""

    def __init__(
        self,
        wire: WireFormat,
        *,
        fleet: Callable[[], Fleet],
        medium_bytes_per_s: float,
        arrange: Arrange,
        say: Callable[[str], None],
    ) -> None:
        self._wire: WireFormat = wire
        self._fleet, self._medium, self._arrange, self._say = fleet, medium_bytes_per_s, arrange, say
        self._told = ""
        self._lock = threading.Lock()
        self._planned: dict[_Call, _Planned] = {}
        self._chosen: dict[tuple[_Call, bool], tuple[tuple[str, ...], str | None]] = {}
        self.latest: ColumnPlan | None = None
        """What the last pass follows."""
        self.local_flops_per_s = math.inf
        """Of the process that trains, as far as it is known."""
        self.cores = math.inf
        """How many devices can compute at once: those of this machine share its cores."""
        self.may_stay = False
        """Whether that process may compute what devices could."""

    def why_not(self, stack: Stack, sequences: int, sequence: int, is_trained: bool, *, must: bool) -> str | None:
        """Why gemms are better for such a batch; None: resident layers. Decided anew when other devices are there."""
        call = _Call(stack, sequences, sequence, is_trained)
        number, profiles = self._fleet()
        names = profiles.names if profiles is not None else ()
        found = self._chosen.get((call, must))
        if len(self._chosen) > _REMEMBERED:
            self._chosen.clear()
        if found is None or found[0] != names:
            found = self._chosen[call, must] = (names, self._decide(call, number, profiles, must=must))
            if found[1] is not None and is_trained:
                self._tell(f"gemm on {names}", f"grain gemm: {found[1]}")
        return found[1]

    def _tell(self, key: str, text: str) -> None:
        """What is the same for batches of other lengths is told once."""
        if key != self._told:
            self._told = key
            self._say(text)

    def _decide(self, call: _Call, number: int, profiles: Profiles | None, *, must: bool) -> str | None:
        if profiles is None:
            return None if must else "no device is there"
        try:
            plan, names = self._plan(call, number, profiles)
        except InfeasibleError as fault:
            return f"no layers can be resident: {fault}"
        resident_s = plan.step_s + handling_s(plan.down_bytes, plan.up_bytes)
        if not call.is_trained:
            resident_s /= 3 if plan.limit == "compute" else 2  # forward alone, of what would go back too
        gemm_s = (
            _gemms_s(call, profiles, self._wire, self._medium, self.cores)
            + _attention_flops(call) / self.local_flops_per_s
        )
        local_s = _flops(call) / self.local_flops_per_s if self.may_stay else math.inf
        if not must and min(gemm_s, local_s) < resident_s:
            where = "on devices" if gemm_s < local_s else "on this server"
            best_s = min(gemm_s, local_s)
            return f"{best_s:.3g} s a step {where}, {resident_s:.3g} s with resident layers (limit: {plan.limit})"
        held = "; ".join(_described(stage, names, call.stack) for stage in plan.stages)
        beside = "gemms do not fit" if gemm_s == math.inf else f"{gemm_s:.3g} s with gemms"
        if local_s < math.inf:
            beside += f", {local_s:.3g} s on this server alone"
        if call.is_trained:
            foreseen = f"{resident_s:.3g} s a step foreseen (limit: {plan.limit}), {beside}"
            self._tell(held, f"grain resident: {foreseen}; chunks of {plan.chunk} tokens; {held}")
        return None

    def plan(
        self, stack: Stack, batch: Batch, fleet: Fleet | None = None, *, anew: bool = True
    ) -> tuple[ColumnPlan, tuple[str, ...]]:
        """Who holds what for a batch; InfeasibleError where nothing fits.

        Not `anew`: as planned before, if all of those are still there, as planning takes time.
        """
        number, profiles = fleet or self._fleet()
        if profiles is None:
            raise InfeasibleError("no device is there")
        call = _Call(stack, batch.sequences, batch.sequence, batch.is_trained)
        found = self._planned.get(call)
        if not anew and found is not None and _renumbered(found, profiles.names) is not None:
            return found.plan, found.names
        return self._plan(call, number, profiles, is_usual=fleet is None)

    def _plan(
        self, call: _Call, number: int, profiles: Profiles, *, is_usual: bool = True
    ) -> tuple[ColumnPlan, tuple[str, ...]]:
        with self._lock:
            found = self._planned.get(call)
            if found is None or found.number != number:
                plan = self._arrange(
                    profiles,
                    sublayers(call.stack, is_trained=call.is_trained),
                    hidden=call.stack.hidden,
                    sequences=call.sequences,
                    sequence=call.sequence,
                    wire=self._wire,
                    medium_bytes_per_s=self._medium,
                    cores=self.cores,
                    previous=self._standing(call, profiles.names),
                )
                found = _Planned(number, profiles.names, plan)
            self.latest = found.plan
            if not is_usual:
                return found.plan, found.names
            self._planned.pop(call, None)
            self._planned[call] = found  # the latest last
            if len(self._planned) > _REMEMBERED:
                del self._planned[next(iter(self._planned))]
            return found.plan, found.names

    def _standing(self, call: _Call, names: tuple[str, ...]) -> ColumnPlan | None:
        """Who holds these layers already, for a batch like this one or, with or without a head, for another."""
        found = self._planned.get(call)
        if found is not None:
            return _renumbered(found, names)
        for other, planned in reversed(self._planned.items()):
            if other.stack.hidden == call.stack.hidden and other.stack.parts == call.stack.parts:
                plan = _renumbered(planned, names)
                return plan if plan is None else _with_head(plan, call.stack, other.stack)
        return None


def _with_head(plan: ColumnPlan, stack: Stack, planned: Stack) -> ColumnPlan | None:
    """A plan of the same parts, its head left out if there is none; None where one would be missing."""
    if (stack.head is None) == (planned.head is None):
        return plan
    if planned.head is None:
        return None
    *others, last = plan.stages
    kept = () if last.count == 1 else (replace(last, count=last.count - 1),)
    return replace(plan, stages=(*others, *kept))


def sublayers(stack: Stack, *, is_trained: bool = True) -> list[Sublayer]:
    """A stack as the planner sees it."""
    count = len(stack.parts) + (stack.head is not None)
    return [_sublayer(stack, number, is_trained=is_trained) for number in range(count)]


def _sublayer(stack: Stack, number: int, *, is_trained: bool) -> Sublayer:
    share = Segment(first=number, count=1)
    sizes = [(view.area, stack.parameters[view.parameter].is_trained) for view in share.views(stack)]
    return Sublayer(
        kind=kind_of(stack, number),
        params=sum(size for size, _ in sizes),
        trained=sum(size for size, changes in sizes if changes and is_trained),
        kv_width=sum(share.kv_widths(stack)),
        inner=inner_width(stack, number),
        slices=sliceable(stack, number),
    )


def _renumbered(found: _Planned, names: tuple[str, ...]) -> ColumnPlan | None:
    """A plan for the devices as they are numbered now; None if one of them is gone."""
    place = {name: index for index, name in enumerate(names)}
    if not all(found.names[device] in place for stage in found.plan.stages for device in stage.devices):
        return None
    stages = tuple(
        replace(
            stage,
            slices=tuple(
                tuple(Share(place[found.names[share.device]], share.sequences) for share in column)
                for column in stage.slices
            ),
        )
        for stage in found.plan.stages
    )
    return replace(found.plan, stages=stages)


def _gemms_s(call: _Call, profiles: Profiles, wire: WireFormat, medium_bytes_per_s: float, cores: float) -> float:
    """A step as products alone; without end if the fleet cannot hold their blocks."""
    seconds: dict[Linear, float] = {}
    total_s = 0.0
    try:
        for linear in _linears(call):
            if linear not in seconds:
                down, up = moved_bytes(linear, len(profiles), wire)
                together_s = sum(gemm.flops for gemm in linear.gemms.values()) / profiles.flops_per_s.mean() / cores
                planned_s = max(
                    plan_linear(profiles, linear, wire).total_s, (down + up) / medium_bytes_per_s, together_s
                )
                seconds[linear] = planned_s + handling_s(down, up)
            total_s += seconds[linear]
    except InfeasibleError:
        return math.inf
    return total_s


def _flops(call: _Call) -> float:
    products = sum(gemm.flops for linear in _linears(call) for gemm in linear.gemms.values())
    return products + _attention_flops(call)


def _attention_flops(call: _Call) -> float:
    """Of scores and what follows from them, forward and back, which gemms leave to the server."""
    widths = [_sides(call.stack, part.q)[0] for part in call.stack.parts if isinstance(part, Attention)]
    return 12.0 * call.sequences * call.sequence**2 * sum(widths)


def _linears(call: _Call) -> Iterator[Linear]:
    """The products of a step, those that read the same rows together."""
    stack = call.stack
    groups: list[tuple[Weight, ...]] = []
    for part in stack.parts:
        if isinstance(part, Attention):
            groups += [(part.q, part.k, part.v), (part.o,)]
        else:
            groups += [(part.up,) if part.gate is None else (part.gate, part.up), (part.down,)]
    if stack.head is not None:
        groups.append((stack.head.weight,))
    for group in groups:
        views = [stack.views[weight.weight] for weight in group]
        sides = [_sides(stack, weight) for weight in group]
        is_trained = any(stack.parameters[view.parameter].is_trained for view in views)
        roles: tuple[Role, ...] = ("forward", "grad_input", "grad_weight") if is_trained else ("forward", "grad_input")
        if not call.is_trained:
            roles = ("forward",)
        yield Linear(
            tokens=call.sequences * call.sequence,
            in_width=sides[0][1],
            out_width=sum(out for out, _ in sides),
            roles=roles,
        )


def _sides(stack: Stack, weight: Weight) -> tuple[int, int]:
    """out, in"""
    view = stack.views[weight.weight]
    return (view.width, view.height) if weight.is_transposed else (view.height, view.width)


def _described(stage: Stage, names: tuple[str, ...], stack: Stack) -> str:
    last = stage.first + stage.count - 1
    what = _named(stage.first, stack) if stage.count == 1 else f"{_named(stage.first, stack)} to {_named(last, stack)}"
    if len(stage.slices) > 1:
        what += f" in {len(stage.slices)} slices"
    return f"{what} on {', '.join(names[device] for device in stage.devices)}"


def _named(sublayer: int, stack: Stack) -> str:
    if sublayer == len(stack.parts):
        return "the head"
    layer = sum(isinstance(part, Attention) for part in stack.parts[: sublayer + 1])
    return f"{'attention' if isinstance(stack.parts[sublayer], Attention) else 'MLP'} {layer}"
