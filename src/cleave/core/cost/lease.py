"""Laws of leases: a device that keeps the weights it trains, with their optimizer state, and updates them itself.

A leased weight crosses a link only in snapshots: neither does it come down nor its gradient go up in a step. It takes
memory for the optimizer state, a pass over memory for the update, and a snapshot now and then, so that the server can
rebuild it from there with the inputs and output gradients it has logged since. Only what a column with a single holder
trains can be leased, as gradients of several holders must be added up. Knows no plans and no devices.
"""

from __future__ import annotations

import numpy as np

from cleave.core.cost.rates import Real, read_bytes_per_s
from cleave.core.cost.terms import Terms
from cleave.core.cost.wire import DEVICE_BYTES
from cleave.core.fleet.profiles import Bools, Floats, Ints

ADAM_STATES = 2
"""Optimizer states per trained weight: the two running means of Adam and AdamW."""
LOG_BYTES = 200e9
"""Room on the server for the inputs and output gradients of leased columns, by default."""
LIVE_LOG_BYTES = 8e9
"""The same on a live server, whose temporary files may share a small disk."""
LEAST_EVERY, MOST_EVERY = 16, 256
"""Steps between two snapshots of a column. More often than the least, they would cost as much as synchronizing; less
often than the most, a lost column would take too long to replay."""
_WORTH_LENDING = 0.1
"""A column with a smaller share of weights that can be leased is synchronized as a whole."""
_SNAPSHOT_SHARE = 0.05
"""Share of a column's time that its uplink may spend on snapshots."""


def lease_bytes(terms: Terms, lent: Real, states: int) -> Real:
    """Memory that leasing so many weights takes on top of training them: fp32 weights, and optimizer states."""
    return (DEVICE_BYTES - terms.resident_bytes + DEVICE_BYTES * states) * lent


def update_s(lent: Floats, states: int, flops_per_s: Floats) -> Floats:
    """Seconds of an update: it reads gradient, weight and states once, and writes weight and states."""
    return (3 + 2 * states) * DEVICE_BYTES * lent / read_bytes_per_s(flops_per_s)


def snapshot_bytes(lent: Real, states: int) -> Real:
    """Bytes of a snapshot: weights and states in fp32, so that a replay from it is exact."""
    return DEVICE_BYTES * (1 + states) * lent


def most_steps_logged(log_bytes: float, step_bytes: Floats) -> Floats:
    """Steps whose inputs and output gradients fit into a column's part of the log: `step_bytes` each."""
    return np.minimum(np.floor(log_bytes / step_bytes), MOST_EVERY)


def is_worth_leasing(lent: Floats, trained: Floats, most_steps: Floats, states: int, terms: Terms) -> Bools:
    """Whether enough of what is trained can be leased, and snapshots send up less than gradients would."""
    return (lent > _WORTH_LENDING * trained) & (snapshot_bytes(1.0, states) <= terms.gradient_bytes * most_steps)


def snapshot_every(snapshot_s: Floats, busy_s: Floats, most_steps: Floats) -> Ints:
    """Steps between snapshots that take `snapshot_s` of the uplink, for a column that is busy for `busy_s` a step."""
    wanted = np.ceil(snapshot_s / (_SNAPSHOT_SHARE * busy_s))
    return np.maximum(np.minimum(np.maximum(wanted, LEAST_EVERY), most_steps), 1).astype(np.int64)
