"""A lease as one pass sees it: which views are leased, and the operands that devices have for them.

Passes that train the whole decoder see the whole lease. A replay sees one shard of it as a decoder of its own, whose
parameters have other numbers. Either ends with the round that it began in: after a recovery, what an older pass would
add to gradients is no longer wanted. The whole protocol that a pass needs of a lease is here; `lease.py` has the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cleave.core.model.decoder import View
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.core.schedule.tasks import DeviceId, Operand

if TYPE_CHECKING:
    from cleave.server.resident.lease import Lease, LeasedRun


class PassLease:
    def __init__(self, lease: Lease, plan: ResidentPlan, numbers: Sequence[int] | None = None) -> None:
        """`numbers` are the lease's own for the parameters of the pass's decoder; None if they are the same."""
        self.lease, self.plan = lease, plan
        self._numbers, self._round, self._sums = numbers, lease.round, lease.sums
        self.parameters = (
            lease.parameters
            if numbers is None
            else frozenset(place for place, number in enumerate(numbers) if number in lease.parameters)
        )
        self._wholes = frozenset(self._number(place) for place in self.parameters)

    @property
    def is_current(self) -> bool:
        """Whether nothing has been recovered since the pass began."""
        return self._round == self.lease.round

    @property
    def is_held(self) -> bool:
        """Whether devices still hold what the pass needs of the lease."""
        return self.is_current and not self.lease.is_over and self._wholes <= self.lease.intact

    @property
    def devices(self) -> frozenset[DeviceId]:
        return self.lease.devices_of(self._wholes)

    def follow(self, run: LeasedRun) -> None:
        """Note the pass that is about to run."""
        self.lease.follow(run)

    # -------------------------------------------------------------------------------------------- the engine's thread

    def __contains__(self, view: View) -> bool:
        return self._view(view) in self.lease

    def weight(self, view: View) -> Operand:
        return self.lease.weight(self._view(view))

    def accumulator(self, view: View) -> Operand:
        return self.lease.accumulator(self._view(view), self._sums)

    def kept_bytes(self, device: DeviceId) -> int:
        """Memory that the lease takes on a device beside what the pass itself counts: weights and their gradients."""
        return self.lease.kept_bytes(device) + self.lease.other_bytes(device, self._wholes)

    def passes_leave(self, device: DeviceId, free_bytes: int) -> None:
        """Note the memory that passes leave free on a device, with what is kept there now."""
        if self._numbers is None:
            self.lease.passes_leave(device, free_bytes)

    def _number(self, place: int) -> int:
        return place if self._numbers is None else self._numbers[place]

    def _view(self, view: View) -> View:
        return view if self._numbers is None else view._replace(parameter=self._numbers[view.parameter])
