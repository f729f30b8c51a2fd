"""A run's view of the fleet: which devices are connected, and which could take over a block.

A lost block is offered to the devices that hold one of its operands and to those that are free soonest, so the cost of
placing it does not grow with the fleet. Read-only; lives with the engine.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from collections.abc import Set as AbstractSet

import numpy as np

from cleave.core.cost.wire import WireFormat
from cleave.core.plan.gemm.layer import Block, Extent
from cleave.core.plan.gemm.reassign import plan_redo
from cleave.core.schedule.ledger import Ledger
from cleave.core.schedule.members import Roster
from cleave.core.schedule.tasks import DeviceId, Operand
from cleave.errors import InfeasibleError
from cleave.server.operands import Cut

_CANDIDATES = 16
"""Devices of each kind considered for a lost block."""


class FleetView:
    def __init__(self, ledger: Ledger, roster: Roster) -> None:
        self._ledger, self._roster = ledger, roster

    @property
    def late(self) -> AbstractSet[DeviceId]:
        return self._ledger.late

    @property
    def number(self) -> int:
        """Grows whenever the fleet changes."""
        return self._roster.number

    def __contains__(self, device: DeviceId) -> bool:
        return device in self._ledger

    def is_only(self, devices: Collection[DeviceId]) -> bool:
        """Whether no other device is connected."""
        return sum(device in self._ledger for device in devices) == len(self._roster.members)

    def holds(self, device: DeviceId, operand: Operand) -> bool:
        return self._ledger.holds(device, operand.id)

    def memory_bytes(self, device: DeviceId) -> int:
        return self._roster.members[device].memory_bytes

    def up_bytes_per_s(self, device: DeviceId) -> float:
        """Rate of a device's uplink; 0 if it has left."""
        member = self._roster.members.get(device)
        return 0.0 if member is None else member.up.value

    def helpers(self) -> Iterator[tuple[DeviceId, float]]:
        """Yield devices that are not late, with FLOP/s: first those free soonest, then all others, each by speed."""
        near = self._ledger.least_busy(_CANDIDATES)
        yield from self._by_speed(near)
        seen = set(near)
        others = (device for device in map(DeviceId, self._roster.members) if device not in seen)
        yield from self._by_speed(device for device in others if device not in self._ledger.late)

    def _by_speed(self, devices: Iterable[DeviceId]) -> list[tuple[DeviceId, float]]:
        found = [(device, self._roster.members[device].flops.value) for device in devices]
        return sorted(found, key=lambda one: -one[1])

    def reassign(
        self,
        extent: Extent,
        a: Iterable[Cut],
        b: Iterable[Cut],
        wire: WireFormat,
        now: float,
        *,
        avoid: Collection[DeviceId] = (),
    ) -> list[Block]:
        """Cut an extent into blocks for the devices that finish it soonest; InfeasibleError if none can hold one."""
        if not self._roster.members:
            raise InfeasibleError("no device is connected")
        holds_a, holds_b = self._holders(a), self._holders(b)
        near = list(dict.fromkeys([*list(holds_a | holds_b)[:_CANDIDATES], *self._ledger.least_busy(_CANDIDATES)]))
        able = [device for device in near if device not in self._ledger.late and device not in avoid]
        try:
            return self._planned(able, extent, wire, holds_a, holds_b, now)
        except InfeasibleError:  # a larger device may hold what these cannot
            everyone = [device for device in map(DeviceId, self._roster.members) if device not in avoid]
            return self._planned(everyone or able or near, extent, wire, holds_a, holds_b, now)

    def _planned(
        self,
        devices: list[DeviceId],
        extent: Extent,
        wire: WireFormat,
        holds_a: Collection[DeviceId],
        holds_b: Collection[DeviceId],
        now: float,
    ) -> list[Block]:
        if not devices:
            raise InfeasibleError("no device is connected")
        return plan_redo(
            self._roster.select(devices),
            extent,
            wire,
            holds_a=np.array([device in holds_a for device in devices]),
            holds_b=np.array([device in holds_b for device in devices]),
            backlog_s=np.array([self._ledger.backlog_s(device, now) for device in devices]),
        )

    def _holders(self, cuts: Iterable[Cut]) -> set[DeviceId]:
        """Devices that hold all of these slices."""
        found: set[DeviceId] | None = None
        for cut in cuts:
            slice = cut.tensor.slices.get((cut.rows, cut.cols))
            holders = set(self._ledger.holders(slice.operand.id)) if slice is not None else set[DeviceId]()
            found = holders if found is None else found & holders
        return found or set()
