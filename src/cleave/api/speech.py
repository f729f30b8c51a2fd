"""What a `Fleet` logs by default: one log line per event, on the logger `cleave.fleet`.

A program that configured logging decides what becomes of it. In one that did not, lines go to standard error, from the
level of CLEAVE_LOG_LEVEL on (default: INFO), so that a first script shows who joins and which grain is chosen.

Lines are written in a thread of their own: neither training nor the server waits for a terminal that is stopped, or for
a handler that is slow.
"""

from __future__ import annotations

import logging
import os
import sys

from cleave import events
from cleave.report.event_text import describe
from cleave.sink import Sink
from cleave.terminal import PATIENCE_S, send

_LOG = logging.getLogger("cleave.fleet")
_WARNINGS = (events.ResultRefused, events.DeviceLate, events.Paused)
_MOST_LINES = 10_000


def log_event(event: events.AnyEvent) -> None:
    """Say what happened; never waits."""
    text = describe(event)
    if text is None:
        return
    level = logging.WARNING if isinstance(event, _WARNINGS) else logging.INFO
    if _LOG.isEnabledFor(level) if _is_configured() else level >= _least_level():
        _LINES.put((level, text))


def finish() -> None:
    """Wait until what was said is written, but not long for a reader that does not read."""
    _LINES.drain(PATIENCE_S)


def _write(line: tuple[int, str]) -> None:
    level, text = line
    if _is_configured():
        _LOG.log(level, "%s", text)
    elif sys.stderr is not None:
        send(sys.stderr, f"cleave: {text}\n")


class _Unconfigured(logging.Handler):
    """Take warnings of all of Cleave's loggers where no logging is configured; `logging.lastResort` would block."""

    def emit(self, record: logging.LogRecord) -> None:
        if not _is_configured() and record.levelno >= max(logging.WARNING, _least_level()):
            _LINES.put((record.levelno, self.format(record)))


def _is_configured() -> bool:
    """Whether the program has log handlers of its own."""
    loggers = (_LOG, _ALL, logging.getLogger())
    return any(handler is not _UNCONFIGURED for logger in loggers for handler in logger.handlers)


def _least_level() -> int:
    name = os.environ.get("CLEAVE_LOG_LEVEL", "INFO").upper()
    return logging.getLevelNamesMapping().get(name, logging.INFO)


_ALL = logging.getLogger("cleave")
_UNCONFIGURED = _Unconfigured()
_ALL.addHandler(_UNCONFIGURED)
_LINES: Sink[tuple[int, str]] = Sink(_write, name="cleave.fleet", room=_MOST_LINES)
