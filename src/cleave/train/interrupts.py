# pyright: standard
"""Ctrl-C and a polite kill, kept out of the few lines that must not be broken off."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Ctrl-C and a polite kill as KeyboardInterrupt, at once or, where held, right after.

    Python swallows what is raised while an object is finalized, and a training step finalizes thousands. So an
    interrupt stays pending until it is `taken`, and comes again after the next lines that hold it.
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
        self._held = True
        try:
            yield
        finally:
            self._held = False
        if self._pending:
            raise KeyboardInterrupt

    def taken(self) -> None:
        """Whoever caught the KeyboardInterrupt acts on it now."""
        self._pending = False

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self._pending = True
        if not self._held:
            raise KeyboardInterrupt
