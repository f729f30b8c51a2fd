"""Plans of resident shards, and the cost of an arrangement on given devices.

A stage is a run of sublayers, or one sublayer in slices; each of its shards is held by one or more devices that share
the rows: a column. Chunks of tokens flow through the stages one after another, so a step takes as long as the busiest
device (or the server's links, or a shared medium) plus the time the first chunk needs to get through and back: the
fill. This module judges arrangements; `small_fleet` and `large_fleet` find them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from cleave.core.cost.resident import (
    LOGSUMEXP_BYTES,
    TARGET_BYTES,
    ShardCosts,
    compute_s_per_row,
    readings,
    shard_costs,
    task_s_per_row,
)
from cleave.core.fleet.profiles import Bools, DeviceId, Floats, Ints
from cleave.core.model.keeping import KEEPINGS, Keeping
from cleave.core.model.shard import Shard
from cleave.core.plan.resident.pace import Paces, paces, share_rows
from cleave.core.plan.resident.problem import MANY_OPEN, Problem
from cleave.core.plan.resident.timeline import PLAYED_SEQUENCES, Post, Seating, Station, play
from cleave.core.plan.resident.timeline import Shared as SharedByAll

ColumnLimit = Literal["down", "compute", "up", "latency", "server", "medium", "memory"]


class Holding(NamedTuple):
    """A device that holds a shard."""

    device: DeviceId
    sequences: float
    """its share of the step's sequences: its speed relative to the other devices with the same shard"""
    keeps: Keeping = "nothing"
    """for backward"""


class Column(NamedTuple):
    """A shard, and the devices that share its rows."""

    shard: Shard
    holdings: tuple[Holding, ...]
    is_leased: bool = False
    """its only holder keeps what it trains, with the optimizer state, and applies the update itself"""
    snapshot_every: int = 0
    """steps between two snapshots, if it is leased"""


Holders = tuple[tuple[tuple[Shard, tuple[DeviceId, ...], bool], ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """One shard, or all slices of a sublayer: every column sees every row."""

    columns: tuple[Column, ...]

    @property
    def first(self) -> int:
        """The first sublayer."""
        return self.columns[0].shard.first

    @property
    def count(self) -> int:
        """Number of sublayers."""
        return self.columns[0].shard.count

    @property
    def shards(self) -> tuple[Shard, ...]:
        return tuple(column.shard for column in self.columns)

    @property
    def devices(self) -> tuple[DeviceId, ...]:
        return tuple(holding.device for column in self.columns for holding in column.holdings)

    @property
    def holders(self) -> int:
        """Devices that share its rows, of the slice with the most."""
        return max(len(column.holdings) for column in self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentPlan:
    """Which devices hold which shards, and the predicted seconds and bytes of a step."""

    stages: tuple[Stage, ...]
    chunk: int
    """tokens that travel together"""
    busiest_s: float
    """until the last device, the server or the medium finishes"""
    fill_s: float
    """one chunk forward through all stages and back"""
    down_bytes: float
    """through the server"""
    up_bytes: float
    limit: ColumnLimit
    log_bytes: float = 0.0
    """inputs and output gradients that the server keeps between two snapshots of leased columns"""
    kept_sequences: int = MANY_OPEN
    """as in the problem it was judged on; the same below"""
    lead: int = 0

    @property
    def step_s(self) -> float:
        return self.busiest_s + self.fill_s

    @property
    def has_leases(self) -> bool:
        return any(column.is_leased for stage in self.stages for column in stage.columns)

    @property
    def devices(self) -> frozenset[DeviceId]:
        return frozenset(device for stage in self.stages for device in stage.devices)

    @property
    def leased(self) -> dict[Shard, DeviceId]:
        """Leased shards, and who keeps each."""
        columns = (column for stage in self.stages for column in stage.columns)
        return {column.shard: column.holdings[0].device for column in columns if column.is_leased}

    @property
    def arrangement(self) -> tuple[int, Holders]:
        """Chunk, holders of every shard and leases: equal for plans that differ only in their predictions."""
        return self.chunk, self.holders

    @property
    def holders(self) -> Holders:
        """Devices of every shard, and whether it is leased: while they stay the same, nothing has to move."""
        return tuple(
            tuple(
                (column.shard, tuple(holding.device for holding in column.holdings), column.is_leased)
                for column in stage.columns
            )
            for stage in self.stages
        )


@dataclass(frozen=True, slots=True)
class Draft:
    """A stage during a search: devices are indices into the fleet's profiles, rows are not shared yet."""

    first: int
    count: int
    members: tuple[tuple[int, ...], ...]
    """devices per slice"""
    may_lease: bool = True
    """whether it is leased where the fleet allows it"""


def drafts(stages: Sequence[Stage], names: Sequence[str]) -> list[Draft] | None:
    """Stages of an earlier plan in terms of the current fleet; None if one of their devices is gone."""
    places = {name: number for number, name in enumerate(names)}
    if not all(device in places for stage in stages for device in stage.devices):
        return None
    return [
        Draft(
            stage.first,
            stage.count,
            tuple(tuple(places[holding.device] for holding in column.holdings) for column in stage.columns),
        )
        for stage in stages
    ]


def judge(
    problem: Problem, stages: Sequence[Draft], chunk: int, *, is_played: bool = False, within_s: float = inf
) -> ResidentPlan | None:
    """The plan that these stages make, with rows shared; None if memory does not hold it.

    With `is_played`, its time is that of its timeline, which takes milliseconds instead of microseconds; None if that
    exceeds `within_s`. Where devices share a column, both ways to share its rows are played, and the faster is taken.
    """
    best: ResidentPlan | None = None
    is_shared = is_played and any(len(group) > 1 for stage in stages for group in stage.members)
    for ends_together in (False, True) if is_shared else (False,):
        shared = _share(problem, stages, chunk, ends_together=ends_together)
        found = None if shared is None else _judged(problem, stages, shared, chunk, is_played, within_s)
        if found is not None and (best is None or found.step_s < best.step_s):
            best, within_s = found, min(within_s, found.step_s)
    return best


def _overloads(problem: Problem, shared: _Shared) -> bool:
    """Whether a device that is in several columns lacks the memory for all of them together."""
    held = (shared.rows > 0) * (shared.of.memory_bytes[:, None] + shared.pace.leases.memory_bytes)
    return bool((held.sum(axis=0) > problem.profiles.memory_bytes).any())


def _judged(
    problem: Problem, stages: Sequence[Draft], shared: _Shared, chunk: int, is_played: bool, within_s: float
) -> ResidentPlan | None:
    if _overloads(problem, shared):
        return None
    hops = _hops(problem, shared, chunk)
    limit, busiest_s = _limit(problem, shared, hops, chunk)
    if is_played:
        played_s = _played_s(problem, stages, shared, chunk, within_s)
        if played_s > within_s:
            return None
        busiest_s = played_s - hops.fill_s
    leases = shared.pace.leases
    columns = zip(shared.rows, shared.pace.keeps, leases.every.max(axis=1).tolist(), strict=True)
    return ResidentPlan(
        stages=tuple(
            Stage(
                columns=tuple(
                    Column(
                        Shard(first=stage.first, count=stage.count, index=index, of=len(stage.members)),
                        holdings(problem.profiles.names, own_rows / problem.sums.sequence, own_keeps),
                        is_leased=every > 0,
                        snapshot_every=every,
                    )
                    for index, (own_rows, own_keeps, every) in enumerate(itertools.islice(columns, len(stage.members)))
                )
            )
            for stage in stages
        ),
        chunk=chunk,
        busiest_s=busiest_s,
        fill_s=hops.fill_s,
        down_bytes=float(shared.down.sum()),
        up_bytes=float(shared.up.sum()),
        limit="latency" if hops.waiting_s > busiest_s else limit,
        log_bytes=float(leases.every.max(axis=1) @ shared.of.down_bytes_per_row) * problem.rows,
        kept_sequences=problem.kept_sequences,
        lead=problem.lead,
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Shared:
    """Columns (first axis) with their rows shared among devices (second axis)."""

    of: ShardCosts
    pace: Paces
    memory_bytes: Floats
    """what each device offers each column"""
    ends_s: Floats
    """when each column finishes"""
    rows: Floats
    row_compute_s: Floats
    """seconds of compute per row"""
    down: Floats
    """bytes"""
    up: Floats
    begins: Ints
    """first column of each stage"""

    @property
    def busiest(self) -> int:
        return int(self.ends_s.argmax())

    @property
    def compute_s(self) -> Floats:
        return self.row_compute_s * self.rows


def _share(problem: Problem, stages: Sequence[Draft], chunk: int, *, ends_together: bool = False) -> _Shared | None:
    """Share the rows of every column; None if no member can hold one."""
    profiles, sums = problem.profiles, problem.sums
    columns = [(stage, group) for stage in stages for group in stage.members]
    members = np.zeros((len(columns), len(profiles)), dtype=np.bool_)
    for number, (_, group) in enumerate(columns):
        members[number, list(group)] = True
    runs = np.array([(stage.first, stage.count, len(stage.members)) for stage, _ in columns])
    of = shard_costs(sums, runs[:, 0], runs[:, 1], runs[:, 2], chunk=chunk)
    memory_bytes = _offered(problem, of, members)
    may_lease = np.array([stage.may_lease for stage, _ in columns])
    pace = paces(problem, of, members, chunk, may_lease=may_lease, memory_bytes=memory_bytes)
    ends_s, rows = share_rows(pace, problem.sequences, sums.sequence, of.takes_sequences, ends_together=ends_together)
    if not np.isfinite(ends_s).all():
        return None
    again = np.maximum(rows - pace.kept, 0.0) * of.again_bytes_per_row[:, None]
    return _Shared(
        of=of,
        pace=pace,
        memory_bytes=memory_bytes,
        ends_s=ends_s,
        rows=rows,
        row_compute_s=compute_s_per_row(of, profiles, chunk, sums.terms, pace.keeps),
        down=of.down_bytes_per_row[:, None] * rows + again + np.where(rows > 0, pace.down, 0.0),
        up=of.up_bytes_per_row[:, None] * rows + np.where(rows > 0, pace.up + pace.leases.snapshot_up, 0.0),
        begins=np.concatenate([[0], np.cumsum([len(stage.members) for stage in stages])[:-1]]),
    )


def _offered(problem: Problem, of: ShardCosts, members: Bools) -> Floats:
    """[column, device]: memory for the column; what several columns of a device leave free is divided equally."""
    needed, columns = members * of.memory_bytes[:, None], np.maximum(members.sum(axis=0), 1)
    return of.memory_bytes[:, None] + (problem.profiles.memory_bytes - needed.sum(axis=0)) / columns


def is_cramped(problem: Problem, stages: Sequence[Draft], chunk: int) -> bool:
    """Whether some device has not the memory to keep everything of all its sequences."""
    shared = _share(problem, stages, chunk)
    if shared is None:
        return True
    has_less = shared.of.takes_sequences[:, None] & (shared.pace.keeps < len(KEEPINGS) - 1)
    has_few = _slots(problem, shared) * problem.sums.sequence < shared.rows
    return bool(((shared.rows > 0) & (has_less | has_few)).any())


class _Hops(NamedTuple):
    """Seconds of travel from stage to stage."""

    fill_s: float
    """until the busiest column has its first chunk, and from its last one to the end"""
    journey_s: float
    """one sequence, forward and back"""
    waiting_s: float
    """the latency in that, of all stages"""


def _hops(problem: Problem, shared: _Shared, chunk: int) -> _Hops:
    profiles, sums = problem.profiles, problem.sums
    part, medium = shared.rows / problem.rows, problem.medium_bytes_per_s
    row_bytes = sums.hidden * sums.terms.activation_bytes
    link_s = 1 / np.minimum(profiles.down_bytes_per_s, medium) + 1 / np.minimum(profiles.up_bytes_per_s, medium)
    latency_s = 2 * part @ profiles.latency_s
    compute_s = (part * shared.row_compute_s).sum(axis=1)
    stage_s = np.maximum.reduceat(latency_s + chunk * (part @ (2 * row_bytes * link_s) + compute_s), shared.begins)
    # the busiest column's share of the first chunk is already part of its work
    counted_s = chunk * float(part[shared.busiest] @ shared.pace.row_s[shared.busiest])
    chunks = -(-sums.sequence // chunk)
    return _Hops(
        fill_s=float(stage_s.sum()) - counted_s,
        journey_s=float(stage_s.sum() + (chunks - 1) * stage_s.max()),
        waiting_s=float(np.maximum.reduceat(latency_s, shared.begins).sum()),
    )


def _limit(problem: Problem, shared: _Shared, hops: _Hops, chunk: int) -> tuple[ColumnLimit, float]:
    """The bottleneck of a step, and its seconds without the pipeline's fill."""
    profiles, of, busiest = problem.profiles, shared.of, shared.busiest
    down_bytes, up_bytes = float(shared.down.sum()), float(shared.up.sum())
    parts_s: dict[ColumnLimit, float] = {
        "down": float((shared.down[busiest] / profiles.down_bytes_per_s).sum()),
        "up": float((shared.up[busiest] / profiles.up_bytes_per_s).sum()),
        "compute": float(shared.compute_s[busiest].sum()),
    }
    whole_s: dict[ColumnLimit, float] = {
        max(parts_s, key=lambda name: parts_s[name]): float((shared.ends_s @ (shared.rows > 0)).max()),
        "server": max(
            down_bytes / problem.server.down_bytes_per_s,
            up_bytes / problem.server.up_bytes_per_s,
            2 * len(of) * problem.rows / chunk * problem.server.task_s
            + (down_bytes + up_bytes) * problem.server.byte_s,
        ),
        "medium": (down_bytes + up_bytes) / problem.medium_bytes_per_s,
    }
    limit = max(whole_s, key=lambda name: whole_s[name])
    longest_s = whole_s[limit]
    at_once = float((_slots(problem, shared) * (shared.rows > 0)).sum(axis=1).min())
    in_turn_s = hops.journey_s * problem.sequences / at_once
    if in_turn_s > longest_s + hops.fill_s:
        limit, longest_s = "memory", in_turn_s - hops.fill_s
    together_s = float(shared.compute_s.sum()) / problem.cores
    if together_s > longest_s + hops.fill_s:
        limit, longest_s = "compute", together_s - hops.fill_s
    return limit, longest_s


def _flowing_s(problem: Problem, shared: _Shared, chunk: int) -> float:
    """Seconds of the rows alone, in a full pipeline: of the busiest device, the medium, the cores or the server."""
    of, server, tasks = shared.of, problem.server, 2 * problem.rows / chunk
    moved = float((of.down_bytes_per_row + of.up_bytes_per_row).sum()) * problem.rows
    return max(
        float((shared.rows * shared.pace.row_s).max()),
        moved / problem.medium_bytes_per_s,
        float(shared.compute_s.sum()) / problem.cores,
        len(of) * tasks * server.task_s + moved * server.byte_s,
    )


def _slots(problem: Problem, shared: _Shared) -> Floats:
    """[column, device]: sequences that can be open at once; at least one, as the column fits."""
    of = shared.of
    held = (of.memory_bytes - of.state_bytes)[:, None] + shared.pace.leases.memory_bytes
    room = shared.memory_bytes - held
    slots = np.floor(room / np.maximum(of.state_keeping(shared.pace.keeps), 1.0))
    return np.clip(slots, 1, problem.sequences)


def _played_s(problem: Problem, stages: Sequence[Draft], shared: _Shared, chunk: int, within_s: float) -> float:
    """Seconds of the step's timeline; infinite if they are found to exceed `within_s`."""
    profiles, sums, of = problem.profiles, problem.sums, shared.of
    used = np.flatnonzero(shared.rows.any(axis=0))
    place = {device: number for number, device in enumerate(used.tolist())}
    stations = [
        Station(
            down_bytes_per_s=float(profiles.down_bytes_per_s[device]),
            up_bytes_per_s=float(profiles.up_bytes_per_s[device]),
            latency_s=float(profiles.latency_s[device]),
        )
        for device in used.tolist()
    ]
    columns = [(number, stage) for number, stage in enumerate(stages) for _ in stage.members]
    fixed_s = task_s_per_row(of, profiles, chunk) / 2
    forward_part = of.forward_flops_per_row[:, None] / of.flops_keeping(shared.pace.keeps)
    slots = _slots(problem, shared)
    again = np.clip(1 - shared.pace.kept / np.maximum(shared.rows, 1.0), 0.0, 1.0)
    row_bytes = sums.hidden * sums.terms.activation_bytes
    leases, played = shared.pace.leases, min(problem.sequences, PLAYED_SEQUENCES)
    posts: list[Post] = []
    for number, (stage, draft) in enumerate(columns):
        has_head = draft.first + draft.count == len(sums) and sums.sublayers[-1].kind == "head"
        up_per_row = float(of.up_bytes_per_row[number])
        forward_up = LOGSUMEXP_BYTES if has_head else row_bytes
        seatings: list[Seating] = []
        holders = np.flatnonzero(shared.rows[number])
        for device in holders.tolist():
            arithmetic_s = float(shared.row_compute_s[number, device] - 2 * fixed_s[number, device]) * chunk
            part, each_s = float(forward_part[number, device]), float(fixed_s[number, device]) * chunk
            seatings.append(
                Seating(
                    station=place[device],
                    speed=float(shared.rows[number, device]),
                    slots=int(slots[number, device]),
                    again=float(again[number, device]),
                    forward_s=each_s + part * arithmetic_s,
                    backward_s=each_s + (1 - part) * arithmetic_s,
                    update_s=float(leases.update_s[number, device]),
                )
            )
        posts.append(
            Post(
                stage=stage,
                seatings=tuple(seatings),
                forward_down=chunk * (row_bytes + (TARGET_BYTES if has_head else 0)),
                forward_up=chunk * forward_up,
                backward_down=chunk * (LOGSUMEXP_BYTES if has_head else row_bytes),
                again_down=chunk * row_bytes,
                backward_up=chunk * (up_per_row - forward_up),
                weights_down=float(shared.pace.down[number, holders].max()),
                gradients_up=(gradients_up := float(shared.pace.up[number, holders].max())),
                readings=readings(draft.count, gradients_up),
                is_leased=bool(leases.every[number].any()),
                snapshot_up=float(leases.snapshot_up[number].sum()) * played / problem.sequences,
            )
        )
    return play(
        posts,
        stations,
        sequences=problem.sequences,
        chunks=-(-sums.sequence // chunk),
        lead=problem.lead,
        sequence_s=_flowing_s(problem, shared, chunk) / problem.sequences,
        within_s=within_s,
        shared=SharedByAll(
            task_s=problem.server.task_s,
            byte_s=problem.server.byte_s,
            medium_bytes_per_s=problem.medium_bytes_per_s,
            cores=problem.cores,
        ),
    )


def holdings(names: Sequence[str], sequences: Floats, keeps: Ints) -> tuple[Holding, ...]:
    """Holdings of the devices that have sequences."""
    return tuple(
        Holding(DeviceId(names[i]), float(sequences[i]), KEEPINGS[keeps[i]]) for i in np.flatnonzero(sequences).tolist()
    )
