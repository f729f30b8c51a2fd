"""Rival ways to do a step, each in one small function: its time, or why it does not fit.

Gemm by gemm (single or grouped), gemms inside groups of devices that take layers in turn, and the arrangements of known
systems: GPipe times data parallel, FSDP-like streaming, data parallel alone. All share the assumptions of Cleave's
columns: the same byte formulas, recomputation in backward, the optimizer on the server, the head and the server's links
included. Where a time is a lower bound or a fluid estimate, it favors the rival. No blocks are made here: `step`
chooses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import ceil, inf
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cleave.core.cost.bound import bound_2d, bound_3d, least_time, volume_within
from cleave.core.cost.gemm import UnitCosts, best_inner, unit_costs
from cleave.core.cost.rates import Server
from cleave.core.cost.resident import ShardCosts, effective_flops_per_s, shard_costs, sum_up
from cleave.core.cost.terms import RUNTIME_BYTES, Terms, lean_terms
from cleave.core.cost.wire import WireFormat
from cleave.core.fleet.profiles import Floats, Profiles
from cleave.core.model.gemms import Gemm, step_gemms
from cleave.core.model.shapes import ModelShape
from cleave.core.model.sublayers import sublayers_of

_LAYERS_PER_STAGE = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 80)
_GROUPS = (4, 16, 64)
_FLUID = 1e-3  # tolerance of bisected fluid times
_SAMPLE = 512
"""Fluid estimates sample about this many devices of larger fleets, evenly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    profiles: Profiles
    shape: ModelShape
    tokens: int
    sequence: int
    wire: WireFormat
    server: Server

    @property
    def terms(self) -> Terms:
        return lean_terms(self.wire)

    @property
    def held_bytes(self) -> float:
        """Bytes of a parameter on a device: weight and gradient."""
        return self.terms.resident_bytes + self.terms.accumulator_bytes

    @property
    def sync_s(self) -> Floats:
        """Seconds per device to send one parameter's gradient up and its new weight down."""
        down, up = self.profiles.down_bytes_per_s, self.profiles.up_bytes_per_s
        return self.terms.weight_bytes / down + self.terms.gradient_bytes / up

    @property
    def flops_per_s(self) -> Floats:
        """FLOP/s per device for whole sequences through its weights."""
        return effective_flops_per_s(self.profiles.flops_per_s, self.sequence, self.terms)

    def shard(self, first: int, count: int) -> ShardCosts:
        """Costs of a run of sublayers on one device."""
        sums = sum_up(sublayers_of(self.shape), hidden=self.shape.hidden, sequence=self.sequence, terms=self.terms)
        return shard_costs(sums, *(np.array([number]) for number in (first, count, 1)), chunk=self.sequence)

    @property
    def whole(self) -> ShardCosts:
        """Costs of everything that devices hold or stream: the token table stays on the server."""
        return self.shard(0, 2 * self.shape.layers + 1)

    @property
    def params(self) -> float:
        return float(self.whole.params[0])

    @property
    def flops(self) -> float:
        """FLOPs of a step, with recomputation in backward."""
        return self.tokens * float(self.whole.flops_per_row[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    name: str
    step_s: float
    """infinite if it does not fit"""
    arrangement: str
    """how it would be done, or why it does not fit"""

    @property
    def fits(self) -> bool:
        return self.step_s < inf


def all_rivals(case: Case) -> tuple[Rival, ...]:
    return (
        gemms_one_by_one(case),
        grouped_gemms(case),
        layer_groups(case),
        gpipe(case),
        fsdp(case),
        data_parallel(case),
    )


# ------------------------------------------------------------------------------------------------------ by gemms


def gemms_one_by_one(case: Case) -> Rival:
    """Every gemm cut in 2D over the whole fleet, one after another."""
    unit = unit_costs(case.profiles, case.wire, case.server)
    seconds = {what.gemm: 0.0 for what in step_gemms(case.shape, case.tokens, grouped=False)}
    for gemm in seconds:
        seconds[gemm] = bound_2d(unit.with_boundless_memory(), gemm, case.server)
    total_s = sum(what.count * seconds[what.gemm] for what in step_gemms(case.shape, case.tokens, grouped=False))
    return Rival(
        name="gemms one by one",
        step_s=total_s + attention_by_heads_s(case),
        arrangement="each gemm over the whole fleet in 2D (lower bound), attention by heads",
    )


def grouped_gemms(case: Case) -> Rival:
    """Cleave's grain "gemm": q/k/v and gate/up grouped, the inner dimension split where that pays."""
    unit = unit_costs(case.profiles, case.wire, case.server)
    seconds: dict[Gemm, float] = {}
    for what in step_gemms(case.shape, case.tokens):
        if what.gemm not in seconds:
            flat = bound_2d(unit.with_boundless_memory(), what.gemm, case.server)
            seconds[what.gemm] = min(flat, bound_3d(unit, what.gemm, case.server))
    total_s = sum(what.count * seconds[what.gemm] for what in step_gemms(case.shape, case.tokens))
    return Rival(
        name="grouped gemms",
        step_s=total_s + attention_by_heads_s(case),
        arrangement="q/k/v and gate/up as one gemm, 3D where it pays (lower bound), attention by heads",
    )


def layer_groups(case: Case) -> Rival:
    """The fleet in groups, each with its own layers and 3D gemms inside; a fluid estimate without fill or borders."""
    best_s, best_groups = inf, 1
    attention_s = attention_by_heads_s(case)
    for groups in sorted({min(groups, case.shape.layers) for groups in _GROUPS}):
        total_s = attention_s
        for what in _distinct(case):
            times = what.count / groups if what.count > 1 else 1
            total_s += times * _fluid_s(case, what.gemm, groups if what.count > 1 else 1)
        if total_s < best_s:
            best_s, best_groups = total_s, groups
    return Rival(
        name="layer groups",
        step_s=best_s,
        arrangement="fewer devices than groups of layers"
        if best_s == inf
        else f"{best_groups} groups of devices with {_plural(ceil(case.shape.layers / best_groups), 'layer')} each, "
        "3D gemms inside (fluid estimate)",
    )


@dataclass(frozen=True, slots=True)
class _Often:
    gemm: Gemm
    count: int


def _distinct(case: Case) -> Iterable[_Often]:
    counts: dict[tuple[Gemm, bool], int] = {}
    for what in step_gemms(case.shape, case.tokens):
        key = what.gemm, what.count > 1
        counts[key] = counts.get(key, 0) + what.count
    return [_Often(gemm, count) for (gemm, _), count in counts.items()]


def _fluid_s(case: Case, gemm: Gemm, copies: int) -> float:
    """Seconds of `copies` equal gemms at once over all devices, or over a sample with its share of the work."""
    step = max(len(case.profiles) // _SAMPLE, 1)
    sample = np.argsort(case.profiles.up_bytes_per_s, kind="stable")[step // 2 :: step]
    some: UnitCosts = unit_costs(case.profiles, case.wire, replace(case.server, flops_per_s=0.0)).take(sample)
    some = some.with_boundless_memory()
    share = len(sample) / len(case.profiles)
    work = gemm.flops / 2 * copies * share
    seconds = least_time(lambda t: float(volume_within(some, t, gemm).sum()), work, _FLUID)
    if not case.server.is_capped or seconds == inf:  # more groups than devices
        return seconds
    volume = volume_within(some, seconds, gemm)
    inner = best_inner(some, seconds, float(min(gemm.m, gemm.n)), float(max(gemm.m, gemm.n)), gemm.k)
    area = volume / inner
    down, up = some.wire_bytes * float((2 * inner * np.sqrt(area)).sum()), some.wire_bytes * float(area.sum())
    return max(seconds, down / share / case.server.down_bytes_per_s, up / share / case.server.up_bytes_per_s)


def attention_by_heads_s(case: Case) -> float:
    """Seconds of scores and contexts, divided by heads and sequences among the devices in any number."""
    shape, profiles, size = case.shape, case.profiles, case.terms.activation_bytes
    one = case.sequence * shape.head_dim
    shared = 2 * shape.kv_heads / shape.heads
    heads = shape.layers * case.tokens / case.sequence * shape.heads
    total_s = 0.0
    for down, up, flops in ((1 + shared, 1.0, 2.0), (3 + shared, 1 + shared, 5.0)):
        per_s = np.maximum(
            np.maximum(down * size * one / profiles.down_bytes_per_s, up * size * one / profiles.up_bytes_per_s),
            flops * case.sequence * one / profiles.flops_per_s,
        )
        total_s += heads / float((1 / per_s).sum())
    return total_s


# ------------------------------------------------------------------------------------------------------ by layers


def gpipe(case: Case) -> Rival:
    """Replicated pipelines of whole layers per device, the head on one more, micro-batches of one sequence."""
    shape, profiles, terms = case.shape, case.profiles, case.terms
    row_bytes = shape.hidden * terms.activation_bytes
    down, up = profiles.down_bytes_per_s, profiles.up_bytes_per_s
    link_s = np.maximum(2 * row_bytes / down, 2 * row_bytes / up)
    last = case.shard(2 * shape.layers, 1)
    head = float(last.params[0])
    head_s = np.maximum(np.maximum(row_bytes / down, row_bytes / up), last.flops_per_row[0] / case.flops_per_s)
    best_s, arrangement = inf, ""
    for layers in (layers for layers in _LAYERS_PER_STAGE if layers <= shape.layers):
        stages = ceil(shape.layers / layers)
        params = layers * shape.params_per_layer
        needed = case.held_bytes * max(params, head) * 1.05 + RUNTIME_BYTES
        able = np.flatnonzero(profiles.memory_bytes >= needed)
        if len(able) < stages + 1:
            continue
        row_s = np.maximum(link_s, case.shard(0, 2 * layers).flops_per_row[0] / case.flops_per_s)
        order = able[np.argsort(row_s[able], kind="stable")]
        pipes = len(order) // (stages + 1)
        teams = order[: pipes * (stages + 1)].reshape(pipes, stages + 1)
        slowest_s = np.maximum(row_s[teams[:, :-1]].max(axis=1), head_s[teams[:, -1]])
        replicas = np.arange(1, pipes + 1)
        batches = np.maximum(case.tokens / case.sequence / replicas, 1)
        flowing_s = case.tokens / np.cumsum(1 / slowest_s) * (1 + stages / batches)
        renewing_s = np.maximum.accumulate(case.sync_s[teams].max(axis=1)) * max(params, head)
        moved = case.tokens * row_bytes * 2 * (stages + 0.5)
        renewed = replicas * case.params * terms.weight_bytes
        total_s = np.maximum(flowing_s, _server_s(case.server, moved)) + np.maximum(
            renewing_s, renewed / min(case.server.down_bytes_per_s, case.server.up_bytes_per_s)
        )
        pick = int(total_s.argmin())
        if total_s[pick] < best_s:
            best_s = float(total_s[pick])
            arrangement = (
                f"{_plural(pick + 1, 'pipeline')} of {stages} stages of {_plural(layers, 'layer')} and one for the head"
            )
    return Rival(
        name="GPipe x data parallel",
        step_s=best_s,
        arrangement=arrangement or "too few devices hold a layer with its gradient, or the head with its own",
    )


def data_parallel(case: Case) -> Rival:
    """The whole model on every device that can hold it; they share the rows."""
    profiles = case.profiles
    states = float(case.whole.state_bytes[0])
    able = np.flatnonzero(profiles.memory_bytes >= case.held_bytes * case.params * 1.02 + states)
    name = "data parallel"
    if len(able) == 0:
        need = f"{(case.held_bytes * case.params + states) / 1e9:.3g} GB"
        most = f"{profiles.memory_bytes.max() / 1e9:.3g} GB"
        return Rival(name=name, step_s=inf, arrangement=f"a device needs {need}, the largest offers {most}")
    renewing_s = case.sync_s * case.params
    order = able[np.argsort(renewing_s[able], kind="stable")]
    computing_s = case.flops / np.cumsum(case.flops_per_s[order])
    used = np.arange(1, len(order) + 1)
    total_s = renewing_s[order] + computing_s
    total_s = np.maximum(total_s, _server_s(case.server, used * case.params * case.terms.weight_bytes))
    pick = int(total_s.argmin())
    return Rival(
        name=name, step_s=float(total_s[pick]), arrangement=f"{_plural(pick + 1, 'device')} with the whole model"
    )


def fsdp(case: Case) -> Rival:
    """Weights streamed layer by layer to every device, for forward and for backward; gradients back.

    In between, a device keeps the input of every layer; if its rows do not fit at once, it takes several passes.
    """
    shape, profiles, terms = case.shape, case.profiles, case.terms
    largest = max(shape.params_per_layer, shape.head_gemm_params)
    free = profiles.memory_bytes - 2 * terms.resident_bytes * largest - 3 * RUNTIME_BYTES
    held = free / (terms.working_bytes * shape.hidden * shape.layers * case.sequence)
    able = np.flatnonzero(held >= 1)
    name = "FSDP-like"
    if len(able) == 0:
        return Rival(name=name, step_s=inf, arrangement="no device holds two layers and the inputs of one sequence")
    streaming_s = case.params * np.maximum(
        2 * terms.weight_bytes / profiles.down_bytes_per_s, terms.gradient_bytes / profiles.up_bytes_per_s
    )
    order = able[np.argsort(streaming_s[able], kind="stable")]
    speed = np.cumsum(case.flops_per_s[order])
    used = np.arange(1, len(order) + 1)
    densest = np.maximum.accumulate(case.flops_per_s[order] / held[order])
    passes = np.ceil(case.tokens / case.sequence * densest / speed - 1e-9)
    served_s = _server_s(case.server, passes * used * case.params * terms.weight_bytes, twice_down=True)
    total_s = np.maximum(np.maximum(passes * streaming_s[order], case.flops / speed), served_s)
    pick = int(total_s.argmin())
    often = "twice" if passes[pick] == 1 else f"twice in each of {passes[pick]:.0f} passes"
    return Rival(
        name=name,
        step_s=float(total_s[pick]),
        arrangement=f"{_plural(pick + 1, 'device')} streaming all weights {often}",
    )


def _server_s(server: Server, moved: NDArray[np.floating[Any]] | float, *, twice_down: bool = False) -> Floats:
    down = 2.0 if twice_down else 1.0
    return np.maximum(down * np.asarray(moved) / server.down_bytes_per_s, moved / server.up_bytes_per_s)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
