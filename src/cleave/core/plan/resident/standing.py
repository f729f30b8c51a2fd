"""A plan's columns on devices other than it was made for: slower or faster than believed, fewer, or back again.

The columns stay; only their rows move. The law is that of the plan (`cover.weigh`), with other rates. A device that
leaves takes the gradients of its rows along, so its column mates do them all; where it had none, the step needs
another plan.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from cleave.core.cost.rates import Server
from cleave.core.cost.resident import sum_up
from cleave.core.cost.terms import lean_terms
from cleave.core.fleet.profiles import Bools, Floats, Ints, Profiles
from cleave.core.model.sublayers import sublayers_of
from cleave.core.plan.resident.cover import Group, StageCover, Table, make_table, share_by_pace, weigh
from cleave.core.plan.resident.large_fleet import ModelPlan
from cleave.core.plan.resident.stages import drafts


class Loads(NamedTuple):
    """Per device: what a step asks of it."""

    down_bytes: Floats
    up_bytes: Floats
    memory_bytes: Floats
    compute_s: Floats


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StandingColumns:
    """Rounds of columns, and the rates they are judged on."""

    tables: tuple[Table, ...]
    rounds: tuple[tuple[StageCover, ...], ...]
    server: Server

    @property
    def step_s(self) -> float:
        return sum(weigh(table, stages, self.server).seconds for table, stages in self._parts())

    @property
    def devices(self) -> Ints:
        """Indices of the devices that hold columns."""
        return np.unique(np.concatenate([group.devices for _, _, group in self._groups()]))

    def loads(self) -> Loads:
        size = len(self.tables[0].profiles)
        down, up, memory, compute = (np.zeros(size) for _ in range(4))
        for table, kind, (devices, rows) in self._groups():
            of, profiles = table.of, table.profiles
            again_bytes = float(of.again_bytes_per_row[kind])
            kept = table.gained_s[kind, devices] * profiles.down_bytes_per_s[devices] / again_bytes
            again = np.maximum(rows - kept, 0.0) * again_bytes
            down[devices] += of.down_bytes_per_row[kind] * rows + again + table.times * of.sync_down_bytes[kind]
            up[devices] += of.up_bytes_per_row[kind] * rows + of.sync_up_bytes[kind]
            held = of.memory_bytes[kind] + np.minimum(kept, rows) * of.kept_bytes_per_row[kind]
            memory[devices] = np.maximum(memory[devices], held)
            compute[devices] += table.compute_s[kind, devices] * rows
        return Loads(down, up, memory, compute)

    def takeover_s(self) -> Floats:
        """Seconds per device in which its column mates redo a whole step of it.

        NaN where a device holds nothing, infinite where it has no mates.
        """
        taken = np.full(len(self.tables[0].profiles), np.nan)
        for table, kind, (devices, rows) in self._groups():
            rate = 1 / table.row_s[kind, devices]
            latency_s = float(table.profiles.latency_s[devices].max())
            seconds = rows / (rate.sum() - rate) + latency_s if len(devices) > 1 else np.full(1, np.inf)
            taken[devices] = np.fmax(taken[devices], seconds)
        return taken

    def without(self, gone: Bools) -> StandingColumns | None:
        """The same columns without some devices, whose rows go to their mates; None if a column has nobody left."""
        rounds: list[tuple[StageCover, ...]] = []
        for table, stages in self._parts():
            found: list[StageCover] = []
            for stage in stages:
                groups: list[Group] = []
                for devices, rows in stage.groups:
                    stays = ~gone[devices]
                    if stays.all():
                        groups.append(Group(devices, rows))
                        continue
                    if not stays.any():
                        return None
                    members = devices[stays]
                    groups.append(share_by_pace(table, stage.kind, members, 1 / table.row_s[stage.kind, members]))
                found.append(replace(stage, groups=tuple(groups)))
            rounds.append(tuple(found))
        return StandingColumns(tables=self.tables, rounds=tuple(rounds), server=self.server)

    def on(self, profiles: Profiles) -> StandingColumns:
        """The same columns and rows on devices of other rates."""
        tables = tuple(
            make_table(
                profiles,
                table.sums,
                table.rows,
                table.chunk,
                is_held=table.times == 1,
                kept_sequences=table.kept_sequences,
                only=_runs(stages),
            )
            for table, stages in self._parts()
        )
        rounds = tuple(
            tuple(replace(stage, kind=table.kind(stage.first, stage.count, len(stage.groups))) for stage in stages)
            for table, stages in zip(tables, self.rounds, strict=True)
        )
        return StandingColumns(tables=tables, rounds=rounds, server=self.server)

    def seat(self, newcomer: int, lost: Collection[int]) -> int | None:
        """The column that needs a device most, of those that lost one and fit it; None if it has a seat or fits none.

        Columns are numbered through all rounds.
        """
        if len(self.columns_of(newcomer)):
            return None
        best: tuple[float, int] | None = None
        for number, (table, kind, group) in enumerate(self._groups()):
            if number in lost and table.fits[kind, newcomer]:
                busy_s = float((table.row_s[kind, group.devices] * group.rows).max())
                if best is None or busy_s > best[0]:
                    best = busy_s, number
        return None if best is None else best[1]

    def seated(self, newcomer: int, column: int) -> StandingColumns:
        """The same columns with another device in one of them."""
        left, rounds = column, list[tuple[StageCover, ...]]()
        for table, stages in self._parts():
            found = list(stages)
            for place, stage in enumerate(stages):
                if 0 <= left < len(stage.groups):
                    members = np.append(stage.groups[left].devices, newcomer)
                    group = share_by_pace(table, stage.kind, members, 1 / table.row_s[stage.kind, members])
                    groups = (*stage.groups[:left], group, *stage.groups[left + 1 :])
                    found[place] = replace(stage, groups=groups)
                left -= len(stage.groups)
            rounds.append(tuple(found))
        return StandingColumns(tables=self.tables, rounds=tuple(rounds), server=self.server)

    def columns_of(self, device: int) -> list[int]:
        """Numbers of the columns that a device shares in."""
        devices = [group.devices for _, _, group in self._groups()]
        until = np.cumsum([len(one) for one in devices])
        return np.searchsorted(until, np.flatnonzero(np.concatenate(devices) == device), side="right").tolist()

    def measured(self) -> StandingColumns:
        """The same columns with rows shared by the true speed of their devices, as once the server has measured it."""
        rounds = tuple(
            tuple(
                replace(
                    stage,
                    groups=tuple(
                        share_by_pace(table, stage.kind, devices, 1 / table.row_s[stage.kind, devices])
                        for devices, _ in stage.groups
                    ),
                )
                for stage in stages
            )
            for table, stages in self._parts()
        )
        return StandingColumns(tables=self.tables, rounds=rounds, server=self.server)

    def _parts(self) -> Iterator[tuple[Table, tuple[StageCover, ...]]]:
        return zip(self.tables, self.rounds, strict=True)

    def _groups(self) -> Iterator[tuple[Table, int, Group]]:
        for table, stages in self._parts():
            for stage in stages:
                for group in stage.groups:
                    yield table, stage.kind, group


def _runs(stages: tuple[StageCover, ...]) -> set[tuple[int, int, int]]:
    return {(stage.first, stage.count, len(stage.groups)) for stage in stages}


def standing(plan: ModelPlan, profiles: Profiles, server: Server) -> StandingColumns:
    """The columns of a plan on devices of these rates, which must include all of the plan's."""
    terms, sublayers = lean_terms(plan.wire), sublayers_of(plan.shape)
    firsts = list(accumulate((sum(stage.count for stage in one.plan.stages) for one in plan.rounds), initial=0))
    tables: list[Table] = []
    rounds: list[tuple[StageCover, ...]] = []
    for part, first, until in zip(plan.rounds, firsts[:-1], firsts[1:], strict=True):
        drafted = drafts(part.plan.stages, profiles.names)
        assert drafted is not None, "the profiles include the plan's devices"
        runs = [(draft.first - first, draft.count, len(draft.members)) for draft in drafted]
        sums = sum_up(sublayers[first:until], hidden=plan.shape.hidden, sequence=plan.sequence, terms=terms)
        is_held = len(plan.rounds) == 1
        table = make_table(
            profiles,
            sums,
            plan.tokens,
            part.plan.chunk,
            is_held=is_held,
            kept_sequences=part.recipe.kept_sequences,
            only=set(runs),
        )
        tables.append(table)
        rounds.append(
            tuple(
                StageCover(
                    first=run[0],
                    count=run[1],
                    kind=table.kind(*run),
                    groups=tuple(
                        Group(
                            np.array(members, dtype=np.int64),
                            np.array([one.sequences for one in column.holdings]) * plan.sequence,
                        )
                        for members, column in zip(draft.members, stage.columns, strict=True)
                    ),
                )
                for run, draft, stage in zip(runs, drafted, part.plan.stages, strict=True)
            )
        )
    return StandingColumns(tables=tuple(tables), rounds=tuple(rounds), server=server)
