"""Search for a good cover: bisect the times, and vary the other parameters of a recipe one at a time.

The share of the step for synchronization, the length of columns, the number of devices, the chunk, what devices keep,
the slack of late columns: each is varied around the best recipe so far, from a typical start. A candidate that cannot
beat the best costs one pass. `large_fleet` calls it for each round of a step. The fluid bound it starts from is here
too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from cleave.core.cost.lease import lease_bytes
from cleave.core.cost.rates import Server
from cleave.core.cost.resident import SublayerSums, shard_costs
from cleave.core.fleet.profiles import Profiles
from cleave.core.plan.resident.cover import Cover, Group, Recipe, StageCover, Table, cover, make_table, weigh
from cleave.core.plan.resident.problem import MANY_OPEN
from cleave.core.plan.resident.stages import Stage, drafts

CHUNKS = (16, 32, 64, 128, 256, 512, 1024)
_KEPT = (4, 8, MANY_OPEN)
"""Open sequences of which devices keep activations, if of any."""

_USUAL_CHUNK = 64
_COARSE, _FINE = 1.03, 1.006
_MOST_SECONDS = 1e8
_FEW = 256  # up to this many devices, one more or less matters
_SPLITS = np.linspace(0.02, 0.9, 45)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    recipe: Recipe
    cover: Cover


def area_bound_s(
    profiles: Profiles,
    of: SublayerSums,
    tokens: int,
    *,
    is_held: bool,
    lease_states: int | None = None,
    may_keep: bool = True,
    tolerance: float = 1e-3,
) -> float:
    """The least time in which devices with one rectangle r x w each could tile the plane, ignoring borders.

    A rectangle moves 2 h r numbers each way for rows and w for weights, in separate parts of the time; a leased one has
    all rows, and its weights do not move. The head's rows cost less, so it is left out of the area; memory counts only
    if weights are held (`is_held`). Activations are all kept for backward, unless `may_keep` says otherwise.
    """
    terms = of.terms
    head = sum(sublayer.params for sublayer in of.sublayers if sublayer.kind == "head")
    params = float(of.sums[0, -1]) - head
    area = tokens * params
    row_s = 2 * of.hidden * terms.activation_bytes / np.minimum(profiles.down_bytes_per_s, profiles.up_bytes_per_s)
    trained = min((one.trained / one.params for one in of.sublayers if one.kind != "head"), default=1.0)
    sync_s = np.maximum(terms.gradient_bytes / profiles.up_bytes_per_s, terms.weight_bytes / profiles.down_bytes_per_s)
    sync_s *= trained
    number_bytes = terms.resident_bytes + terms.accumulator_bytes * trained
    most = np.minimum(profiles.memory_bytes / number_bytes if is_held else np.inf, params)
    param_flops = _least_flops_per_param(of, may_keep)
    may_lease = is_held and lease_states is not None
    leased_bytes = number_bytes + trained * float(lease_bytes(terms, 1.0, lease_states or 0))
    most_leased = np.minimum(profiles.memory_bytes / leased_bytes, params)

    def reached(seconds: float) -> float:
        flowing = seconds * (1 - _SPLITS[:, None])
        # use the next split's synchronization, so that the bound holds for splits in between
        weights = np.minimum(seconds * np.append(_SPLITS[1:], 1.0)[:, None] / sync_s, most)
        rows = np.minimum(flowing / row_s, tokens)
        done = np.minimum(rows * weights, flowing * profiles.flops_per_s / param_flops).max(axis=0)
        if may_lease:
            leased = np.minimum(tokens * most_leased, seconds * profiles.flops_per_s / param_flops)
            done = np.maximum(done, np.where(tokens * row_s <= seconds, leased, 0.0))
        return float(done.sum())

    low, high = 1e-6, _MOST_SECONDS
    while high / low > 1 + tolerance:
        middle = float(np.sqrt(low * high))
        low, high = (low, middle) if reached(middle) >= area else (middle, high)
    return low


def _least_flops_per_param(of: SublayerSums, may_keep: bool) -> float:
    """FLOPs per row and parameter, in the sublayer where they are fewest; without the head."""
    inner = np.array([number for number, one in enumerate(of.sublayers) if one.kind != "head"], dtype=np.int64)
    if len(inner) == 0:
        return 1.0
    costs = shard_costs(of, inner, np.ones_like(inner), np.ones_like(inner), chunk=1)
    spared = costs.spared_flops_per_row.max(axis=1) if may_keep else 0.0
    return float(((costs.flops_per_row - spared) / costs.params).min())


def covers_of(table: Table, stages: tuple[Stage, ...]) -> tuple[StageCover, ...] | None:
    """The stages of a plan in terms of a table; None if one of their devices is not in it, or can no longer hold its.

    The table begins with the first stage's first sublayer.
    """
    drafted, first = drafts(stages, table.profiles.names), stages[0].first
    covers: list[StageCover] = []
    for stage, draft in zip(stages, drafted or (), strict=True) if drafted is not None else ():
        kind = table.kind(draft.first - first, draft.count, len(draft.members))
        groups = tuple(
            Group(np.array(members), np.array([one.sequences for one in column.holdings]) * table.sums.sequence)
            for members, column in zip(draft.members, stage.columns, strict=True)
        )
        if not all(table.fits[kind, group.devices].all() for group in groups):
            return None
        covers.append(StageCover(first=draft.first - first, count=draft.count, kind=kind, groups=groups))
    return tuple(covers) or None


class Search:
    """The best cover so far, and the tables used to find it."""

    def __init__(self, profiles: Profiles, part: SublayerSums, tokens: int, server: Server, *, is_held: bool) -> None:
        self._profiles = profiles
        self._part = part
        self._tokens = tokens
        self._server = server
        self._is_held = is_held
        self._tables: dict[tuple[int, int], Table] = {}
        self._best: Found | None = None
        self._start_s = area_bound_s(profiles, part, tokens, is_held=is_held, may_keep=False)

    @cached_property
    def bound_s(self) -> float:
        """What no plan of these sublayers can beat."""
        return area_bound_s(self._profiles, self._part, self._tokens, is_held=self._is_held)

    def repeated(self, recipe: Recipe, stages: tuple[Stage, ...]) -> Found | None:
        """Search with an earlier recipe; keep the stages it gave then if none are faster."""
        self._bisect(recipe, _FINE)
        standing = self._standing(recipe, stages)
        if standing is not None:
            self._remember(recipe, standing)
        return self._best

    def _standing(self, recipe: Recipe, stages: tuple[Stage, ...]) -> tuple[StageCover, ...] | None:
        """The same columns on the current fleet, if all of their devices are connected and can still hold them."""
        return covers_of(self._table(recipe), stages)

    def best(self) -> Found | None:
        """The faster of two searches: of columns that keep no activations, and of columns that do, where they can."""
        bare = self._found(0)
        if bare is None or not self._is_held or not self._part.is_trained:
            return bare
        self._best = None
        keeping = self._found(MANY_OPEN)
        return bare if keeping is None or bare.cover.seconds <= keeping.cover.seconds else keeping

    def _found(self, kept: int) -> Found | None:
        """Scan columns of every length coarsely, then vary one parameter at a time around the best."""
        length = len(self._part)
        usual = Recipe(chunk=min(_USUAL_CHUNK, self._part.sequence), kept_sequences=kept)
        for least in (0, 1, 2, 4, 8, length):
            for selected in (1.0, 0.25) if len(self._profiles) >= 1024 else (1.0, 0.5):
                self._try(replace(usual, least_count=least, selected=selected), _COARSE)
                if self._best is None:  # if all devices with slices cannot hold it, nothing can
                    return None
        for tolerance in (_COARSE, _FINE):
            for recipe in self._around():
                self._try(recipe, tolerance)
        if self._best is not None:
            self._bisect(self._best.recipe, _FINE)
        return self._best

    def _around(self) -> Iterator[Recipe]:
        """Variations of the best recipe, which may change after each one."""

        def best() -> Recipe | None:
            return self._best.recipe if self._best else None

        for factor in (0.3, 0.6, 0.8, 0.9, 1.1, 1.2, 1.5):
            if recipe := best():
                yield replace(recipe, sync_share=min(recipe.sync_share * factor, 0.9))
        for chunk in CHUNKS:
            if (recipe := best()) and chunk <= self._part.sequence:
                yield replace(recipe, chunk=chunk)
        for kept in _KEPT:
            if (recipe := best()) and recipe.kept_sequences:
                yield replace(recipe, kept_sequences=kept)
        for factor in (0.25, 0.5, 0.75, 0.9, 1.3, 2.0, 4.0):
            if (recipe := best()) and recipe.selected * factor <= 1:
                yield replace(recipe, selected=recipe.selected * factor)
        for fewer in (1, 2, 3) if len(self._profiles) <= _FEW else ():
            if (recipe := best()) and (selected := recipe.selected - fewer / len(self._profiles)) > 0:
                yield replace(recipe, selected=selected)
        for share in (0.0, 0.3, 0.6, 0.9):
            if (recipe := best()) and self._best:
                yield replace(recipe, slack_s=share * self._best.cover.fill_s)
                yield replace(
                    recipe, slack_s=share * self._best.cover.fill_s, sync_share=max(recipe.sync_share - 0.06, 0.02)
                )
        if recipe := best():
            yield replace(recipe, order="weights" if recipe.order == "work" else "work")

    def _try(self, recipe: Recipe, tolerance: float) -> None:
        """Bisect a recipe's times only if one pass shows that it can beat the best."""
        if self._best is None:
            self._bisect(recipe, tolerance)
            return
        same = (recipe.chunk, recipe.least_count) == (self._best.recipe.chunk, self._best.recipe.least_count)
        hoped_s = self._best.cover.seconds - (0.8 * self._best.cover.fill_s if same else 0.0)
        if self._attempt(recipe, hoped_s / tolerance):
            self._bisect(recipe, tolerance, hoped_s / tolerance)

    def _bisect(self, recipe: Recipe, tolerance: float, high_s: float | None = None) -> None:
        low_s = self._start_s * 0.5
        if high_s is None:
            high_s = self._best.cover.seconds if self._best else self._start_s * 1.5
            if not self._attempt(recipe, max(high_s, _MOST_SECONDS)):
                return
            while not self._attempt(recipe, high_s):
                low_s, high_s = high_s, high_s * 1.5
        low_s = min(low_s, high_s)
        while high_s / low_s > tolerance:
            middle_s = max(float(np.sqrt(low_s * high_s)), high_s * 0.85)
            low_s, high_s = (low_s, middle_s) if self._attempt(recipe, middle_s) else (middle_s, high_s)

    def _attempt(self, recipe: Recipe, seconds: float) -> bool:
        """Whether such a cover exists; remember it if it is the best."""
        stages = cover(self._table(recipe), recipe, seconds)
        if stages is not None:
            self._remember(recipe, stages)
        return stages is not None

    def _remember(self, recipe: Recipe, stages: tuple[StageCover, ...]) -> None:
        found = weigh(self._table(recipe), stages, self._server)
        if self._best is None or found.seconds < self._best.cover.seconds:
            self._best = Found(recipe=recipe, cover=found)

    def _table(self, recipe: Recipe) -> Table:
        key = recipe.chunk, recipe.kept_sequences
        if key not in self._tables:
            self._tables[key] = make_table(
                self._profiles,
                self._part,
                self._tokens,
                recipe.chunk,
                is_held=self._is_held,
                kept_sequences=recipe.kept_sequences,
            )
        return self._tables[key]
