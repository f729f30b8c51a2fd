"""The work and the fleet that columns are planned for.

`pose` puts a `Problem` together; `stages` judges arrangements on it, `small_fleet` searches for the best one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from cleave.core.cost.lease import LOG_BYTES
from cleave.core.cost.rates import Server
from cleave.core.cost.resident import SublayerSums, sum_up
from cleave.core.cost.terms import Terms
from cleave.core.fleet.profiles import Bools, DeviceId, Profiles
from cleave.core.model.sublayers import Sublayer
from cleave.errors import InputError

MANY_OPEN = 16
"""Open sequences that keep every stage of a pipeline busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leasing:
    """Under which conditions devices may keep what they train, with its optimizer state."""

    states: int
    """optimizer states per trained weight: 2 for Adam, 1 for SGD with momentum, 0 for plain SGD"""
    lenders: frozenset[DeviceId] | None = None
    """devices that may; None for all"""
    log_bytes: float = LOG_BYTES
    """room on the server for the inputs and output gradients since the last snapshots"""

    def may_lend(self, names: Sequence[str]) -> Bools:
        return np.array([self.lenders is None or name in self.lenders for name in names], dtype=np.bool_)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Problem:
    """The work and the fleet that arrangements are judged on."""

    sums: SublayerSums
    sequences: int
    profiles: Profiles
    server: Server
    medium_bytes_per_s: float
    """one medium shared by all traffic, such as a Wi-Fi network"""
    cores: float = inf
    """how many devices can compute at once; devices on one machine share its cores"""
    leasing: Leasing | None = None
    """None: weights and gradients are synchronized in every step"""
    kept_sequences: int = MANY_OPEN
    """sequences that a device must have room for to keep their activations for backward; 0: it keeps none"""
    lead: int = 0
    """how far forward may be ahead of backward (`timeline.sequences_ahead`)"""

    @property
    def rows(self) -> int:
        return self.sequences * self.sums.sequence


def pose(
    profiles: Profiles,
    sublayers: Sequence[Sublayer],
    *,
    hidden: int,
    sequences: int,
    sequence: int,
    terms: Terms,
    wants_dx: bool = True,
    server: Server | None = None,
    medium_bytes_per_s: float = inf,
    cores: float = inf,
    leasing: Leasing | None = None,
) -> Problem:
    """The problem of taking a batch of equal sequences through some sublayers; InputError if there is nothing to do."""
    if not sublayers or min(hidden, sequences, sequence) < 1:
        raise InputError(
            f"expected sublayers, hidden numbers and sequences from 1 up, got {len(sublayers)} sublayers, "
            f"hidden {hidden}, {sequences} sequences of {sequence}; give a model and a batch"
        )
    return Problem(
        sums=sum_up(sublayers, hidden=hidden, sequence=sequence, terms=terms, wants_dx=wants_dx),
        sequences=sequences,
        profiles=profiles,
        server=server or Server(),
        medium_bytes_per_s=medium_bytes_per_s,
        cores=cores,
        leasing=leasing,
    )
