# pyright: standard
"""Defer SIGINT and SIGTERM past the few lines that must not be interrupted."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Raise SIGINT and SIGTERM as KeyboardInterrupt, at once or at the end of a `held` block.

    Python swallows exceptions raised while an object is finalized, and a training step finalizes thousands. So an
    interrupt stays pending until `taken` is called, and is raised again after the next held block.
    """

    def __init__(self) -> None:
        self._held = self._pending = False
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._arrived) or signal.SIG_DFL
        return self

    def __exit__(self, *fault: object) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # pyright: ignore[reportArgumentType]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Defer interrupts to the end of the block."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._pending:
            raise KeyboardInterrupt

    def taken(self) -> None:
        """Acknowledge a caught KeyboardInterrupt, so that it is not raised again."""
        self._pending = False

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self._pending = True
        if not self._held:
            raise KeyboardInterrupt
