"""Devices ordered by time, soonest first: any change costs O(log devices), and nothing visits all of them.

A binary heap that knows the position of each device, so that times can change and devices can leave at any point.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator

from cleave.core.schedule.tasks import DeviceId

_Entry = tuple[float, int, DeviceId]
"""Time, number of the change that set it, device: no two entries are equal."""


class Soonest:
    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._places: dict[DeviceId, int] = {}
        """device -> index of its entry in the heap"""
        self._changes = 0

    def __len__(self) -> int:
        return len(self._heap)

    def moment(self, device: DeviceId) -> float:
        """The device's time; infinity if none is set."""
        place = self._places.get(device)
        return math.inf if place is None else self._heap[place][0]

    def put(self, device: DeviceId, moment: float) -> None:
        """Set a device's time; of equal times, the one set first comes first."""
        place = self._places.get(device)
        if place is None:
            place = len(self._heap)
            self._heap.append((math.inf, 0, device))  # placeholder
        elif self._heap[place][0] == moment:
            return
        self._changes += 1
        self._settle(place, (moment, self._changes, device))

    def put_earlier(self, device: DeviceId, moment: float) -> None:
        """Set a device's time unless it has an earlier one."""
        if moment < self.moment(device):
            self.put(device, moment)

    def discard(self, device: DeviceId) -> None:
        place = self._places.pop(device, None)
        if place is not None:
            last = self._heap.pop()
            if place < len(self._heap):
                self._settle(place, last)

    def pop_before(self, moment: float) -> list[DeviceId]:
        """Remove and return the devices whose times are before the given one, soonest first."""
        due: list[DeviceId] = []
        while self._heap and self._heap[0][0] < moment:
            device = self._heap[0][2]
            self.discard(device)
            due.append(device)
        return due

    def in_order(self) -> Iterator[DeviceId]:
        """Devices, soonest first; the first n cost O(n log n). Do not change anything while iterating."""
        frontier = [(self._heap[0], 0)] if self._heap else []
        while frontier:
            (_, _, device), place = heapq.heappop(frontier)
            yield device
            for child in range(2 * place + 1, min(2 * place + 3, len(self._heap))):
                heapq.heappush(frontier, (self._heap[child], child))

    def _settle(self, place: int, entry: _Entry) -> None:
        """Put an entry into a free slot and sift it up or down."""
        heap, places = self._heap, self._places
        while place > 0 and entry < heap[above := (place - 1) // 2]:
            heap[place] = heap[above]
            places[heap[place][2]] = place
            place = above
        while (below := 2 * place + 1) < len(heap):
            if below + 1 < len(heap) and heap[below + 1] < heap[below]:
                below += 1
            if entry < heap[below]:
                break
            heap[place] = heap[below]
            places[heap[place][2]] = place
            place = below
        heap[place] = entry
        places[entry[2]] = place
