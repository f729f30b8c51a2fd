# pyright: standard
"""Defer SIGINT and SIGTERM past the few lines that must not be interrupted."""

from __future__ import annotations

import _thread
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Interrupts:
    """Raise SIGINT and SIGTERM as KeyboardInterrupt, at once or at the end of a `held` block.

    Python swallows exceptions raised while an object is finalized, and a training step finalizes thousands. So an
    interrupt stays pending until `taken` is called, and is raised again after the next held block or `remind_s`
    seconds, as the main thread may wait for devices without end.
    """

    def __init__(self, remind_s: float = 5.0) -> None:
        self._held = self._pending = False
        self._remind_s = remind_s
        self._reminder: threading.Timer | None = None
        self._previous: dict[int, object] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._arrived) or signal.SIG_DFL
        return self

    def __exit__(self, *fault: object) -> None:
        self.taken()
        for number, previous in self._previous.items():
            signal.signal(number, previous)  # pyright: ignore[reportArgumentType]

    @contextmanager
    def held(self) -> Iterator[None]:
        """Defer interrupts to the end of the block, or of the outermost one."""
        was_held, self._held = self._held, True
        try:
            yield
        finally:
            self._held = was_held
        if self._pending and not was_held:
            raise KeyboardInterrupt

    def taken(self) -> None:
        """Acknowledge a caught KeyboardInterrupt, so that it is not raised again."""
        self._pending = False
        if self._reminder is not None:
            self._reminder.cancel()
            self._reminder = None

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self._pending = True
        if self._reminder is not None:
            self._reminder.cancel()
        self._reminder = threading.Timer(self._remind_s, self._remind, [number])
        self._reminder.daemon = True
        self._reminder.start()
        if not self._held:
            raise KeyboardInterrupt

    def _remind(self, number: int) -> None:
        """Send the signal again, to the main thread: a wait of another one would not be interrupted."""
        if not self._pending:
            return
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        else:  # Windows
            _thread.interrupt_main(signal.Signals(number))
