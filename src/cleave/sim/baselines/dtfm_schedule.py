"""DT-FM's scheduler: who computes which stage of which pipeline, over links of very different speed.

Source: DS3Lab/DT-FM, scheduler/heuristic_evolutionary_solver/scheduler.py (arXiv:2206.01288). Devices are partitioned
into S groups of R, a group per stage; only communication counts. With c_dp and c_pp the bytes of a stage's gradients
and of the activations that a pipeline passes on in a batch,

    data cost       the largest over groups and devices d of  sum over d' of 2 (delay + c_dp / (R bandwidth))
    edge            the least over perfect matchings of two groups of  max (delay + c_pp / bandwidth)
    pipeline cost   the shortest path through all groups along such edges
    score           data cost + 2 x pipeline cost

Partitions evolve: five labels of one parent go into the other, sizes are repaired, devices move along a cycle of groups
(away go those with a fast link inside their group, to where their links are slow), and the child replaces the worse
parent. Mended: the published test compares a score with a truth value, so the child stayed nearly always; here it stays
if it is better. Changed: one cycle a child, from a random group; paths through more than 12 groups by nearest neighbor
and 2-opt (the published dynamic programme has 2^S states); matchings of more than 16 devices pair near devices with far
ones, which is an upper bound of the edge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations, pairwise, permutations

import numpy as np

from cleave.core.fleet.profiles import Bools, Floats, Ints, Profiles

_EXACT_TOUR, _EXACT_MATCHING, _ALL_MATCHINGS = 12, 16, 4
_CROSSED = 5
_LONGEST_CYCLE = 8


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Links:
    """Delay and seconds per byte between any two devices, and how far a device is from others on the whole."""

    between: Callable[[Ints, Ints], tuple[Floats, Floats]]
    """By arrays of numbers that broadcast."""
    distance_s: Floats


def access_links(profiles: Profiles) -> Links:
    """Links that are as fast as the slower direction of either end, half a round trip of each apart."""
    byte_s = 1 / np.minimum(profiles.down_bytes_per_s, profiles.up_bytes_per_s)
    half_s = profiles.latency_s / 2

    def between(one: Ints, other: Ints) -> tuple[Floats, Floats]:
        return half_s[one] + half_s[other], np.maximum(byte_s[one], byte_s[other])

    return Links(between=between, distance_s=half_s)


def table_links(delay_s: Floats, bytes_per_s: Floats) -> Links:
    """Links from square tables."""
    byte_s = 1 / bytes_per_s

    def between(one: Ints, other: Ints) -> tuple[Floats, Floats]:
        return delay_s[one, other], byte_s[one, other]

    return Links(between=between, distance_s=delay_s.mean(axis=1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes of a batch: gradients of a stage, activations between two stages of one pipeline, one way."""

    gradient_bytes: float
    activation_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    population: int
    trials: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Schedule:
    """Stages in order; a column is a pipeline."""

    groups: Ints
    """Shape (stages, pipelines): numbers of devices."""
    data_s: float
    pipe_s: float

    @property
    def score_s(self) -> float:
        return self.data_s + 2 * self.pipe_s


def reduction_s(groups: Ints, links: Links, gradient_bytes: float) -> Floats:
    """Seconds per device to exchange the gradients of its stage within its group; the group takes the longest."""
    count = groups.shape[1]
    delay_s, byte_s = links.between(groups[:, :, None], groups[:, None, :])
    each_s = 2 * (delay_s + gradient_bytes / count * byte_s)
    return (each_s * ~np.eye(count, dtype=np.bool_)).sum(axis=2)


def evolve(
    groups: Ints, movable: Bools, links: Links, traffic: Traffic, budget: Budget, rng: np.random.Generator
) -> Schedule:
    """The best schedule found, beginning with the partition given and random ones.

    `movable` has the shape of `groups`; a first and last group whose devices may not move stay at the ends.
    """
    ends = ends_of(movable)
    population = [groups, *(_shuffled(groups, movable, rng) for _ in range(budget.population - 1))]
    schedules = [schedule(one, links, traffic, ends) for one in population]
    for _ in range(budget.trials if len(groups) > 1 and movable.any() else 0):
        first, second = (int(number) for number in rng.integers(len(population), size=2))
        child = _crossed(population[first], population[second], movable, rng)
        child = _cycled(child, movable, links, traffic, rng)
        found = schedule(child, links, traffic, ends)
        worse = first if schedules[first].score_s > schedules[second].score_s else second
        if found.score_s < schedules[worse].score_s:
            population[worse], schedules[worse] = child, found
    return min(schedules, key=lambda one: one.score_s)


def ends_of(movable: Bools) -> tuple[int, int] | None:
    """The first and the last group, if those have to stay where they are."""
    return (0, len(movable) - 1) if not movable.all() and len(movable) > 1 else None


def schedule(groups: Ints, links: Links, traffic: Traffic, ends: tuple[int, int] | None = None) -> Schedule:
    """Score a partition; order its groups along the shortest path and match their devices."""
    data_s = float(reduction_s(groups, links, traffic.gradient_bytes).max())
    if groups.shape[1] > _EXACT_MATCHING:
        distance_s = links.distance_s[groups]
        groups = np.take_along_axis(groups, np.argsort(distance_s, axis=1, kind="stable"), axis=1)
    edges = _edges(groups, links, traffic.activation_bytes)
    order = tour(edges, ends)
    pipe_s = sum(float(edges[here, there]) for here, there in pairwise(order))
    rows = [groups[order[0]]]
    for number in order[1:]:
        rows.append(groups[number][_match(rows[-1], groups[number], links, traffic.activation_bytes)[1]])
    return Schedule(groups=np.array(rows), data_s=data_s, pipe_s=pipe_s)


# ------------------------------------------------------------------------------------------------------ matching


def _edges(groups: Ints, links: Links, moved_bytes: float) -> Floats:
    count = len(groups)
    if groups.shape[1] > _EXACT_MATCHING:
        delay_s, byte_s = links.between(groups[:, None, :], groups[None, :, ::-1])
        edges = (delay_s + moved_bytes * byte_s).max(axis=2)
        return np.maximum(edges, edges.T)
    if groups.shape[1] <= _ALL_MATCHINGS:
        delay_s, byte_s = links.between(groups[:, None, None, :], groups[None, :, _orders(groups.shape[1])])
        return (delay_s + moved_bytes * byte_s).max(axis=3).min(axis=2)
    edges = np.zeros((count, count))
    for here, there in combinations(range(count), 2):
        edges[here, there] = edges[there, here] = _match(groups[here], groups[there], links, moved_bytes)[0]
    return edges


def has_long_matchings(count: int) -> bool:
    """Whether groups of this size are matched one pair of groups at a time."""
    return _ALL_MATCHINGS < count <= _EXACT_MATCHING


def _orders(count: int) -> Ints:
    return np.array(list(permutations(range(count))), dtype=np.int64)


def _match(here: Ints, there: Ints, links: Links, moved_bytes: float) -> tuple[float, Ints]:
    """The edge between two groups, and for each device here the place of its partner there."""
    delay_s, byte_s = links.between(here[:, None], there[None, :])
    costs = delay_s + moved_bytes * byte_s
    if len(here) > _EXACT_MATCHING:
        near, far = (
            np.argsort(links.distance_s[here], kind="stable"),
            np.argsort(-links.distance_s[there], kind="stable"),
        )
        partners = np.empty_like(near)
        partners[near] = far
        return float(costs[np.arange(len(here)), partners].max()), partners
    return bottleneck(costs)


def bottleneck(costs: Floats) -> tuple[float, Ints]:
    """The perfect matching whose largest cost is least, by bisection over the costs."""
    least = max(costs.min(axis=0).max(), costs.min(axis=1).max())
    partners = _perfect(costs <= least)
    if partners is not None:
        return float(least), partners
    levels = np.unique(costs[costs > least])
    low, high = 0, len(levels) - 1
    best = _perfect(costs <= levels[high])
    assert best is not None
    while low < high:
        middle = (low + high) // 2
        partners = _perfect(costs <= levels[middle])
        if partners is None:
            low = middle + 1
        else:
            high, best = middle, partners
    return float(levels[high]), best


def _perfect(allowed: Bools) -> Ints | None:
    """A perfect matching by augmenting paths, if there is one: the column of each row."""
    count = len(allowed)
    options: list[list[int]] = [np.flatnonzero(row).tolist() for row in allowed]
    owner = [-1] * count

    def place(row: int, seen: set[int]) -> bool:
        for col in options[row]:
            if col not in seen:
                seen.add(col)
                if owner[col] < 0 or place(owner[col], seen):
                    owner[col] = row
                    return True
        return False

    if not all(place(row, set()) for row in range(count)):
        return None
    partners = np.empty(count, dtype=np.int64)
    partners[owner] = np.arange(count)
    return partners


# ------------------------------------------------------------------------------------------------------ path


def tour(edges: Floats, ends: tuple[int, int] | None = None) -> list[int]:
    """A short open path through all nodes, between the ends if those are given."""
    if len(edges) <= 2:
        return list(range(len(edges)))
    return _shortest(edges, ends) if len(edges) <= _EXACT_TOUR else _improved(edges, ends)


def _shortest(edges: Floats, ends: tuple[int, int] | None) -> list[int]:
    """Held and Karp: the shortest path over each set of nodes to each of its nodes."""
    count = len(edges)
    sets = 1 << count
    length, before = np.full((sets, count), np.inf), np.zeros((sets, count), dtype=np.int64)
    for node in range(count) if ends is None else (ends[0],):
        length[1 << node, node] = 0.0
    masks = np.arange(sets)
    sizes = sum((masks >> node) & 1 for node in range(count))
    for size in range(2, count + 1):
        chosen = masks[sizes == size]
        for node in range(count):
            having = chosen[(chosen >> node) & 1 == 1]
            ways = length[having ^ (1 << node)] + edges[:, node]
            before[having, node] = ways.argmin(axis=1)
            length[having, node] = ways.min(axis=1)
    last = int(length[-1].argmin()) if ends is None else ends[1]
    path, mask = [last], sets - 1
    while len(path) < count:
        previous = int(before[mask, path[-1]])
        mask ^= 1 << path[-1]
        path.append(previous)
    return path[::-1]


def _improved(edges: Floats, ends: tuple[int, int] | None) -> list[int]:
    """Nearest neighbor, then 2-opt: reverse the part that shortens the path most until none does."""
    start = int(edges.sum(axis=1).argmax()) if ends is None else ends[0]
    left = set(range(len(edges))) - {start} - ({ends[1]} if ends else set())
    path = [start]
    while left:
        path.append(min(left, key=lambda node: edges[path[-1], node]))
        left.remove(path[-1])
    order = np.array(path + ([ends[1]] if ends else []))
    count = len(order)
    first, last = np.triu_indices(count, 1)
    if ends is not None:  # they stay where they are
        inner = (first > 0) & (last < count - 1)
        first, last = first[inner], last[inner]
    for _ in range(count * count):
        before, after = order[np.maximum(first - 1, 0)], order[np.minimum(last + 1, count - 1)]
        head, tail = order[first], order[last]
        gain = np.where(first > 0, edges[before, head] - edges[before, tail], 0.0)
        gain += np.where(last < count - 1, edges[tail, after] - edges[head, after], 0.0)
        best = int(gain.argmax()) if len(gain) else 0
        if not len(gain) or gain[best] <= 1e-12 * edges.max():
            break
        order[first[best] : last[best] + 1] = order[first[best] : last[best] + 1][::-1].copy()
    return order.tolist()


# ------------------------------------------------------------------------------------------------------ evolution


def _shuffled(groups: Ints, movable: Bools, rng: np.random.Generator) -> Ints:
    mixed = groups.copy()
    mixed[movable] = rng.permutation(groups[movable])
    return mixed


def _crossed(one: Ints, other: Ints, movable: Bools, rng: np.random.Generator) -> Ints:
    """The other partition, with five devices put into the groups they have in the first."""
    stages, pipelines = one.shape
    label = {device: number for number, row in enumerate(other.tolist()) for device in row}
    first = {device: number for number, row in enumerate(one.tolist()) for device in row}
    moved = rng.permutation(one[movable])[:_CROSSED].tolist()
    for device in moved:
        label[device] = first[device]
    members: list[list[int]] = [[] for _ in range(stages)]
    surplus: list[int] = []
    fixed = set(one[~movable].tolist())
    for device, number in sorted(label.items(), key=lambda item: item[0] not in fixed):
        if len(members[number]) < pipelines:
            members[number].append(device)
        else:
            surplus.append(device)
    for row in members:
        while len(row) < pipelines:
            row.append(surplus.pop())
    return np.array(members)


def _cycled(groups: Ints, movable: Bools, links: Links, traffic: Traffic, rng: np.random.Generator) -> Ints:
    """Move devices along a cycle of groups: from each the one with the fastest link inside, to where links are slow.

    The cycle is cut where the sum of gains is largest, counting the move that closes it.
    """
    open_rows = np.flatnonzero(movable.all(axis=1))
    if len(open_rows) < 2:
        return groups
    rows = groups.copy()
    start = row = int(rng.choice(open_rows))
    moves: list[tuple[int, int]] = []
    sums, gained, visited = [0.0], 0.0, {start}
    while len(moves) < _LONGEST_CYCLE:
        delay_s, byte_s = links.between(rows[row][:, None, None], rows[open_rows][None])
        costs = delay_s + traffic.activation_bytes * byte_s
        here = int(np.flatnonzero(open_rows == row)[0])
        inside = costs[:, here, :].copy()
        np.fill_diagonal(inside, np.inf)
        fastest = inside.min(axis=1) if rows.shape[1] > 1 else np.zeros(1)
        place = int(fastest.argmin())
        gains = costs[place].mean(axis=1) - fastest[place]
        closing = gained + float(gains[open_rows == start][0]) if row != start else 0.0
        sums.append(closing)
        moves.append((row, place))
        gains[[int(np.flatnonzero(open_rows == one)[0]) for one in visited]] = -np.inf
        if not np.isfinite(gains).any():
            break
        target = int(gains.argmax())
        gained += float(gains[target])
        row = int(open_rows[target])
        visited.add(row)
    used = int(np.argmax(sums))
    if used < 2:
        return groups
    places = moves[:used]
    devices = [int(rows[row, place]) for row, place in places]
    for (row, place), device in zip(places, devices[-1:] + devices[:-1], strict=True):
        rows[row, place] = device
    return rows
