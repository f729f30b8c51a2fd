"""A bounded queue with a thread of its own, so that nobody waits for a terminal, a pipe or a disk that is stuck.

Terminals, event logs and curves are written through it. Knows neither files nor text.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Sink(Generic[_Item]):
    """Hand items to `take` in order, in a daemon thread; while it is stuck, keep the newest items that fit into `room`.

    `size` is what an item counts against `room` (default: 1). `take` must not raise.
    """

    def __init__(
        self, take: Callable[[_Item], object], *, name: str, room: int, size: Callable[[_Item], int] = lambda item: 1
    ) -> None:
        self._take, self._name, self._room, self._size = take, name, room, size
        self._items: deque[_Item] = deque()
        self._filled = 0
        self._taking = False
        self._taken = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self.dropped = 0
        """Items discarded so far for want of room, oldest first."""

    @property
    def waiting(self) -> int:
        """Items not yet written, with the one being written."""
        return len(self._items) + self._taking

    def put(self, item: _Item) -> None:
        """Queue an item; never waits."""
        with self._changed:
            self._items.append(item)
            self._filled += self._size(item)
            while self._filled > self._room and len(self._items) > 1:
                self._filled -= self._size(self._items.popleft())
                self.dropped += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def drain(self, patience_s: float) -> bool:
        """Wait until everything is written; give up, with False, once nothing was for `patience_s`."""
        with self._changed:
            while self.waiting:
                before = self._taken
                if not self._changed.wait_for(lambda before=before: self._taken > before, patience_s):
                    return False
        return True

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items)
                item = self._items.popleft()
                self._filled -= self._size(item)
                self._taking = True
            self._take(item)
            with self._changed:
                self._taking = False
                self._taken += 1
                self._changed.notify_all()
