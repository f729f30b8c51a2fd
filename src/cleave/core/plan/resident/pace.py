"""Pace of devices in columns: seconds per row, what synchronizing or updating weights adds, and how rows are shared.

Vectorized over columns (first axis) and devices (second axis), for `arrangements`, which searches, and `stages`, which
judges. A column that one device holds alone may be leased (`core/cost/lease.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cleave.core.cost.lease import (
    is_worth_leasing,
    lease_bytes,
    most_steps_logged,
    snapshot_bytes,
    snapshot_every,
    update_s,
)
from cleave.core.cost.resident import ShardCosts, compute_s_per_row
from cleave.core.fleet.profiles import Bools, Floats, Ints
from cleave.core.plan.resident.problem import Problem

_NEVER_S = 1e30
_LARGEST_SHARE = 1.5  # sequences of a device in a column, relative to an equal share


class Paces(NamedTuple):
    """Seconds of devices (second axis) in columns (first axis)."""

    row_s: Floats
    """per row"""
    before_s: Floats
    """weights down, or a leased column's update"""
    after_s: Floats
    """gradients up, or a leased column's answer, once every sequence has passed the column"""
    down: Floats
    """bytes of weights"""
    up: Floats
    """bytes of gradients"""
    able: Bools
    """members whose memory holds the column"""
    kept: Floats
    """rows whose x stays on the device for backward"""
    keeps: Ints
    """index into KEEPINGS"""
    leases: Leases


class Leases(NamedTuple):
    """Leased columns (first axis) on devices (second axis); zeros where a column is synchronized."""

    lent: Floats
    """trained numbers that stay on the device"""
    memory_bytes: Floats
    update_s: Floats
    every: Ints
    """steps between two snapshots"""
    snapshot_up: Floats
    """bytes of snapshots in a step, on average"""


def paces(
    problem: Problem,
    of: ShardCosts,
    members: Bools,
    chunk: int,
    *,
    may_lease: Bools | None = None,
    memory_bytes: Floats | None = None,
) -> Paces:
    """Pace of each device in each column; `members` has a row per column and an entry per device.

    A column with a single holder is leased where that is allowed and fits, unless `may_lease` says otherwise. Each
    device offers a column all of its memory, or as much of it as `memory_bytes` says.
    """
    profiles, terms = problem.profiles, problem.sums.terms
    down, up = profiles.down_bytes_per_s, profiles.up_bytes_per_s
    free = (profiles.memory_bytes if memory_bytes is None else memory_bytes) - of.memory_bytes[:, None]
    able = members & (free >= 0)
    mates = np.maximum(able.sum(axis=1), 1)
    lent, lease_memory = _lent(problem, of, able, free, may_lease)
    free = free - lease_memory
    keeps, kept_bytes = _keeps(problem, of, free, mates)
    kept = np.maximum(free - kept_bytes, 0.0) / of.kept_bytes_per_row[:, None]
    rows = problem.rows / mates
    again = np.clip(1 - kept / rows[:, None], 0.0, 1.0) * of.again_bytes_per_row[:, None]
    row_s = np.maximum((of.down_bytes_per_row[:, None] + again) / down, of.up_bytes_per_row[:, None] / up)
    row_s = np.maximum(row_s, compute_s_per_row(of, profiles, chunk, terms, keeps))
    leases = _leases(problem, of, lent, lease_memory, row_s)
    synchronised = of.trained[:, None] - lent
    sync_down, sync_up = terms.weight_bytes * synchronised, terms.gradient_bytes * synchronised
    # one holder takes all rows, so that its snapshots are a share of each
    up_s = (of.up_bytes_per_row[:, None] + leases.snapshot_up / problem.rows) / up
    return Paces(
        row_s=np.maximum(row_s, up_s),
        before_s=sync_down / down + leases.update_s,
        after_s=sync_up / up + np.where(lent > 0, profiles.latency_s, 0.0),
        down=sync_down,
        up=sync_up,
        able=able,
        kept=kept,
        keeps=keeps,
        leases=leases,
    )


def _lent(
    problem: Problem, of: ShardCosts, able: Bools, free: Floats, may_lease: Bools | None
) -> tuple[Floats, Floats]:
    """[column, device]: numbers that are leased, and the memory that takes."""
    leasing, terms = problem.leasing, problem.sums.terms
    if leasing is None:
        return np.zeros(free.shape), np.zeros(free.shape)
    memory = np.asarray(lease_bytes(terms, of.lent, leasing.states))[:, None]
    wanted = is_worth_leasing(of.lent, of.trained, _most_steps(problem, of), leasing.states, terms)
    wanted &= able.sum(axis=1) == 1
    if may_lease is not None:
        wanted &= may_lease
    is_leased = wanted[:, None] & able & leasing.may_lend(problem.profiles.names) & (free >= memory)
    return np.where(is_leased, of.lent[:, None], 0.0), np.where(is_leased, memory, 0.0)


def _leases(problem: Problem, of: ShardCosts, lent: Floats, memory_bytes: Floats, row_s: Floats) -> Leases:
    profiles, leasing = problem.profiles, problem.leasing
    if leasing is None:
        return Leases(lent, memory_bytes, lent, np.zeros(lent.shape, dtype=np.int64), lent)
    snapshot = np.asarray(snapshot_bytes(lent, leasing.states))
    most_steps = _most_steps(problem, of)[:, None]
    every = snapshot_every(snapshot / profiles.up_bytes_per_s, problem.rows * row_s, most_steps)
    return Leases(
        lent=lent,
        memory_bytes=memory_bytes,
        update_s=update_s(lent, leasing.states, profiles.flops_per_s),
        every=np.where(lent > 0, every, 0),
        snapshot_up=snapshot / every,
    )


def _most_steps(problem: Problem, of: ShardCosts) -> Floats:
    """Steps of each column that the server can log, if every device holds a leased one."""
    assert problem.leasing is not None
    part_bytes = problem.leasing.log_bytes / len(problem.profiles)
    return most_steps_logged(part_bytes, problem.rows * of.down_bytes_per_row)


def _keeps(problem: Problem, of: ShardCosts, free: Floats, mates: Ints) -> tuple[Ints, Floats]:
    """What each device keeps in each column, and the bytes of that: what spares most beside its sequences and their x.

    Only in training with the loss on devices does backward follow forward at once.
    """
    if not problem.kept_sequences or problem.sums.sublayers[-1].kind != "head" or not problem.sums.is_trained:
        return np.zeros(free.shape, dtype=np.int64), np.zeros(free.shape)
    share = np.minimum(np.ceil(_LARGEST_SHARE * problem.sequences / mates), problem.sequences)[:, None]
    sequences = np.minimum(share, problem.kept_sequences)
    x_bytes = share * problem.sums.sequence * of.kept_bytes_per_row[:, None]  # what is not kept is sent again
    return most_kept(of, free, sequences, (sequences - 1) * of.state_bytes[:, None] + x_bytes)


def most_kept(of: ShardCosts, free: Floats, sequences: Floats, beside: Floats) -> tuple[Ints, Floats]:
    """[shard, device]: the keeping of so many open sequences that spares most, and its bytes.

    Memory has to hold `beside` too; only shards with attention have a state to keep activations in. `sequences` and
    `beside` have a row per shard.
    """
    kept = sequences * of.kept_bytes
    fits = (free[:, :, None] >= (kept + beside)[:, None]) & of.takes_sequences[:, None, None]
    keeps = np.where(fits, of.spared_flops_per_row[:, None], 0.0).argmax(axis=2)
    return keeps, np.take_along_axis(kept, keeps, axis=1)


def share_rows(
    pace: Paces, sequences: int, sequence: int, whole: Bools, *, ends_together: bool = False
) -> tuple[Floats, Floats]:
    """(seconds until each column finishes, rows per device); infinite if no member can hold the column.

    All devices with rows finish them together: sum (T - before) / row_s = rows; a negative share becomes 0. Gradients
    go up after that, and the slowest uplink ends the step, so members whose gradients would take too long get no rows.
    With `ends_together`, those with slower uplinks get fewer rows, as if gradients went up as soon as a device has done
    its own: in a pipeline that spares links which are busy with activations. Where rows come as whole sequences
    (`whole`, an entry per column), the leftover ones go to the devices that would finish first.
    """
    before_s = pace.before_s + pace.after_s if ends_together else pace.before_s
    rate = np.where(pace.able, 1 / pace.row_s, 0.0)
    order = np.argsort(np.where(pace.able, pace.after_s, _NEVER_S), axis=1, kind="stable")
    rates, after = (np.take_along_axis(one, order, axis=1) for one in (rate, pace.after_s))
    speed = np.maximum(np.cumsum(rates, axis=1), 1 / _NEVER_S)
    filled = np.cumsum(rates * np.take_along_axis(before_s, order, axis=1), axis=1)
    passed = (sequences * sequence + filled) / speed
    members = (passed if ends_together else passed + after).argmin(axis=1)[:, None]
    is_member = np.argsort(order, axis=1) <= members
    rows = rate * np.maximum(np.take_along_axis(passed, members, axis=1) - before_s, 0.0) * is_member
    rows *= (sequences * sequence / np.maximum(rows.sum(axis=1), 1 / _NEVER_S))[:, None]
    if whole.any():
        pieces = np.floor(rows[whole] / sequence * (1 + 1e-9))
        sequence_s = sequence * pace.row_s[whole]
        can_more = pace.able[whole] & is_member[whole]
        one_more = np.where(can_more, before_s[whole] + (pieces + 1) * sequence_s, _NEVER_S)
        rank = np.argsort(np.argsort(one_more, axis=1, kind="stable"), axis=1, kind="stable")
        left = np.where(pace.able[whole].any(axis=1), sequences - pieces.sum(axis=1), 0)
        pieces += rank < left[:, None]
        rows[whole] = pieces * sequence
    has_rows = rows > 0
    end = np.where(has_rows, pace.before_s + rows * pace.row_s, 0.0).max(axis=1)
    end += np.where(has_rows, pace.after_s, 0.0).max(axis=1)
    return np.where(pace.able.any(axis=1), end, np.inf), rows
