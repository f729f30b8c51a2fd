"""Choose where work is done: on this server, as products on devices, or by resident layers; and say why.

Each choice is made once, before the work starts, from what the cost model predicts for the current fleet. It carries
the plan, which names devices, and the reason in words; the code that does the work only reads that plan. Pure: the same
arguments give the same choice, in this process or another.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from cleave.core.cost.lease import LOG_BYTES
from cleave.core.cost.rates import Server
from cleave.core.cost.terms import live_terms
from cleave.core.cost.wire import WireFormat
from cleave.core.fleet.profiles import DeviceId, Profiles
from cleave.core.model.decoder import Attention, Decoder
from cleave.core.model.gemms import Linear, decoder_attention_flops, decoder_linears
from cleave.core.model.shard import Shard
from cleave.core.model.sublayers import sublayers
from cleave.core.plan.gemm.layer import LinearPlan, judge_linear, least_linear_s, plan_linear
from cleave.core.plan.resident.problem import Leasing, Problem, pose
from cleave.core.plan.resident.small_fleet import judge_again, plan_columns, rehouse
from cleave.core.plan.resident.stages import ResidentPlan, Stage
from cleave.errors import InfeasibleError

WORTH_CHANGING = 0.7
"""Another grain must take less than this share of the standing one's time: models are off, and weights must be sent."""
Arrange = Callable[..., ResidentPlan]
"""`plan_columns`, or another function that places shards."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What choices depend on besides the work and the devices."""

    wire: WireFormat
    medium_bytes_per_s: float = math.inf
    """Shared by all traffic, down and up, as on one Wi-Fi network."""
    cores: float = math.inf
    """How many devices can compute at once; devices on one machine share its cores."""
    server: Server = field(default_factory=Server)
    lenders: frozenset[DeviceId] | None = None
    """Devices that may keep what they train, with its optimizer state; None for all."""
    log_bytes: float = LOG_BYTES
    """Room on the server for the inputs and output gradients since their last snapshots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """The training process: its speed, and whether it may compute what devices could."""

    flops_per_s: float = math.inf
    may_compute: bool = False


# ------------------------------------------------------------------------------------------------ one linear layer


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    plan: LinearPlan | None
    """None if no device is connected, or none can do it."""
    is_remote: bool
    reason: str


def choose_layer(linear: Linear, profiles: Profiles | None, setting: Setting, local: Local) -> LayerChoice:
    """Send a linear layer's products to devices, or keep them on the server."""
    if profiles is None:
        return LayerChoice(plan=None, is_remote=not local.may_compute, reason="no device is connected")
    try:
        plan = plan_linear(profiles, linear, setting.wire, server=setting.server)
    except InfeasibleError as fault:
        return LayerChoice(plan=None, is_remote=not local.may_compute, reason=str(fault))
    return _by_plan(plan, linear, local)


def choose_layer_again(
    linear: Linear, profiles: Profiles, setting: Setting, local: Local, plan: LinearPlan
) -> LayerChoice | None:
    """The same with a plan that is known, by the time it takes on other profiles; None if a device is gone."""
    judged = judge_linear(plan, profiles, linear, setting.wire, setting.server)
    return None if judged is None else _by_plan(judged, linear, local)


def _by_plan(plan: LinearPlan, linear: Linear, local: Local) -> LayerChoice:
    local_s = linear.flops / local.flops_per_s
    is_remote = not local.may_compute or plan.total_s < local_s
    where = "go to devices" if is_remote else "stay on the server"
    reason = (
        f"gemms of {linear.tokens} tokens x {linear.in_width} x {linear.out_width} {where}: "
        f"{plan.total_s * 1e3:.1f} ms on devices, {local_s * 1e3:.1f} ms on the server"
    )
    return LayerChoice(plan=plan, is_remote=is_remote, reason=reason)


# ------------------------------------------------------------------------------------------------ a decoder


@dataclass(frozen=True, slots=True)
class PassWork:
    """A batch through a decoder: the facts that plans depend on."""

    decoder: Decoder
    sequences: int
    sequence: int
    is_trained: bool
    wants_dx: bool = True
    """Whether the gradient of the decoder's input is needed, as where the token table is trained."""
    lease_states: int | None = None
    """Optimizer states per trained weight, if devices may keep them; None: the server updates all weights."""
    unleased: frozenset[int] = frozenset()
    """Trained parameters that the server must update all the same, such as a head tied to the token table."""

    @property
    def linears(self) -> Iterator[Linear]:
        """The linear layers of a step; those that read the same rows are merged."""
        return decoder_linears(self.decoder, self.sequences * self.sequence, is_trained=self.is_trained)

    @property
    def attention_flops(self) -> float:
        """FLOPs of the products of attention, which stay on the server when layers are not resident."""
        return decoder_attention_flops(self.decoder, self.sequences, self.sequence, is_trained=self.is_trained)

    @property
    def flops(self) -> float:
        return sum(linear.flops for linear in self.linears) + self.attention_flops


@dataclass(frozen=True, slots=True, kw_only=True)
class PassChoice:
    is_resident: bool
    """Layers stay on devices; otherwise they are computed product by product."""
    plan: ResidentPlan | None
    """Which devices hold them; None if they must be resident and no device is connected yet."""
    reason: str
    resident_s: float = math.inf
    """Seconds of the batch by the cost model; the same below."""
    gemm_s: float = math.inf
    """A lower bound where that is enough to choose; infinite where gemms do not fit, or were not compared."""
    local_s: float = math.inf

    @property
    def grain(self) -> Literal["resident", "gemm", "server"]:
        if self.is_resident:
            return "resident"
        return "server" if self.local_s < self.gemm_s else "gemm"

    @property
    def modeled_s(self) -> float | None:
        """Seconds of the batch by the cost model; None if nothing could be planned."""
        best_s = self.resident_s if self.is_resident else min(self.gemm_s, self.local_s)
        return best_s if best_s < math.inf else None


def choose_pass(
    work: PassWork,
    profiles: Profiles | None,
    setting: Setting,
    local: Local,
    *,
    must: bool = False,
    previous: ResidentPlan | None = None,
    arrange: Arrange = plan_columns,
    audited: Mapping[str, float] | None = None,
    factors: Mapping[str, float] | None = None,
    standing: str | None = None,
) -> PassChoice:
    """Keep layers resident on devices, or compute them product by product, whichever takes less time.

    With `must`, layers are resident wherever they fit, and nothing is compared. `previous` is kept unless another
    arrangement is clearly faster. `audited` is the share of each device's work that this server recomputes, where it is
    not 0. `factors` say how far each grain's steps were off their model lately; the `standing` grain is kept unless
    another is clearly faster.
    """
    factors = factors or {}
    if profiles is None:
        return PassChoice(is_resident=must, plan=None, reason="no device is connected")
    try:
        plan = plan_pass(work, profiles, setting, previous=previous, arrange=arrange)
    except InfeasibleError as fault:
        return PassChoice(is_resident=False, plan=None, reason=f"no layers can be resident: {fault}")
    audits_s = _audits_s(plan, work, local, audited or {})
    resident_s = resident_seconds(plan, work, local, audited or {})
    local_s = work.flops / local.flops_per_s if local.may_compute else math.inf

    def expected_s(grain: str, seconds: float) -> float:
        return seconds * factors.get(grain, 1.0) * (1.0 if grain != standing else WORTH_CHANGING)

    attention_s = work.attention_flops / local.flops_per_s
    gemm_s = math.inf if must else least_gemms_s(work, profiles, setting) + attention_s
    could_win = expected_s("gemm", gemm_s) < expected_s("resident", resident_s)
    if could_win:
        gemm_s = gemms_s(work, profiles, setting) + attention_s
    limit = f"limit: {plan.limit}" + (f"; {audits_s:.3g} s of audits" if audits_s else "")
    others_s = min(expected_s("gemm", gemm_s), expected_s("server", local_s))
    if not must and others_s < expected_s("resident", resident_s):
        gemm_s = gemm_s if could_win else math.inf  # a bound is no prediction
        best_s = min(gemm_s, local_s)
        where = "product by product" if gemm_s <= local_s else "on this server alone"
        reason = f"predicted {best_s:.3g} s a step {where}, {resident_s:.3g} s with resident layers ({limit})"
        return PassChoice(
            is_resident=False, plan=None, reason=reason, resident_s=resident_s, gemm_s=gemm_s, local_s=local_s
        )
    beside = ""
    if not must:
        at_least = "" if could_win else "at least "
        beside = ", gemms do not fit" if gemm_s == math.inf else f", {at_least}{gemm_s:.3g} s with gemms"
    if local_s < math.inf:
        beside += f", {local_s:.3g} s on this server alone"
    held = "; ".join(_described(stage, work.decoder) for stage in plan.stages)
    reason = f"predicted {resident_s:.3g} s a step ({limit}){beside}; chunks of {plan.chunk} tokens; {held}"
    return PassChoice(is_resident=True, plan=plan, reason=reason, resident_s=resident_s, gemm_s=gemm_s, local_s=local_s)


def resident_seconds(plan: ResidentPlan, work: PassWork, local: Local, audited: Mapping[str, float]) -> float:
    """Seconds of a batch through resident layers, with the audits that this server does."""
    plan_s = plan.step_s
    if not work.is_trained:
        plan_s /= 3 if plan.limit == "compute" else 2  # forward only, while the plan is for forward and backward
    return plan_s + _audits_s(plan, work, local, audited)


def _audits_s(plan: ResidentPlan, work: PassWork, local: Local, audited: Mapping[str, float]) -> float:
    """Seconds in which this server recomputes, on average, if the plan's devices do equal shares."""
    share = sum(audited.get(device, 0.0) for device in plan.devices) / len(plan.devices)
    return work.flops * share / local.flops_per_s


def plan_pass(
    work: PassWork,
    profiles: Profiles,
    setting: Setting,
    *,
    previous: ResidentPlan | None = None,
    arrange: Arrange = plan_columns,
) -> ResidentPlan:
    """Place a decoder's layers; InfeasibleError if they do not fit."""
    return arrange(_problem(work, profiles, setting), previous=previous)


def replan_pass(work: PassWork, profiles: Profiles, setting: Setting, plan: ResidentPlan) -> ResidentPlan | None:
    """The same arrangement with the time it takes on other profiles; None if a device is gone or too small."""
    return judge_again(_problem(work, profiles, setting), plan)


def rehouse_pass(
    work: PassWork, profiles: Profiles, setting: Setting, plan: ResidentPlan, shards: Collection[Shard]
) -> ResidentPlan | None:
    """The same stages with other devices, which keep what they train, for some shards; None if none can."""
    found = rehouse(_problem(work, profiles, setting), plan, shards)
    if found is None or found.leased.keys() != plan.leased.keys():
        return None
    return found


def _problem(work: PassWork, profiles: Profiles, setting: Setting) -> Problem:
    leasing = (
        None
        if work.lease_states is None
        else Leasing(states=work.lease_states, lenders=setting.lenders, log_bytes=setting.log_bytes)
    )
    return pose(
        profiles,
        sublayers(work.decoder, is_trained=work.is_trained, unleased=work.unleased),
        hidden=work.decoder.hidden,
        sequences=work.sequences,
        sequence=work.sequence,
        terms=live_terms(setting.wire),
        wants_dx=work.wants_dx,
        server=setting.server,
        medium_bytes_per_s=min(setting.medium_bytes_per_s, profiles.common_medium_bytes_per_s),
        cores=setting.cores,
        leasing=leasing,
    )


def least_gemms_s(work: PassWork, profiles: Profiles, setting: Setting) -> float:
    """A lower bound on `gemms_s`, found a hundred times faster."""
    least: dict[Linear, float] = {}
    for linear in work.linears:
        if linear not in least:
            least[linear] = least_linear_s(profiles, linear, setting.wire)
    return sum(least[linear] for linear in work.linears)


def gemms_s(work: PassWork, profiles: Profiles, setting: Setting) -> float:
    """Seconds of a step computed product by product; infinite if the fleet cannot hold the blocks."""
    seconds: dict[Linear, float] = {}
    total_s = 0.0
    try:
        for linear in work.linears:
            if linear not in seconds:
                plan = plan_linear(profiles, linear, setting.wire, server=setting.server)
                devices_s = max(
                    plan.devices_s,
                    plan.moved_bytes / min(setting.medium_bytes_per_s, profiles.common_medium_bytes_per_s),
                    float(linear.flops / profiles.flops_per_s.mean() / setting.cores),
                )
                # a product is one task or more on each device; theirs run side by side
                fixed_s = len(linear.roles) * float(profiles.task_s.mean())
                seconds[linear] = devices_s + plan.server_s + fixed_s
            total_s += seconds[linear]
    except InfeasibleError:
        return math.inf
    return total_s


def _described(stage: Stage, decoder: Decoder) -> str:
    first, last = stage.shards[0].first, stage.shards[0].stop - 1
    what = _named(first, decoder) if first == last else f"{_named(first, decoder)} to {_named(last, decoder)}"
    if len(stage.shards) > 1:
        what += f" in {len(stage.shards)} slices"
    return f"{what} on {', '.join(stage.devices)}"


def _named(sublayer: int, decoder: Decoder) -> str:
    if sublayer == len(decoder.parts):
        return "the head"
    layer = sum(isinstance(part, Attention) for part in decoder.parts[: sublayer + 1])
    return f"{'attention' if isinstance(decoder.parts[sublayer], Attention) else 'MLP'} {layer}"
