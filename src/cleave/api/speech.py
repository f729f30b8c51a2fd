"""What a `Fleet` says by default: one log line per event, on the logger `cleave.fleet`.

A program that configured logging decides what becomes of it. In one that did not, lines go to standard error, from the
level of CLEAVE_LOG_LEVEL on (default: INFO), so that a first script shows who joins and which grain is chosen.
"""

from __future__ import annotations

import logging
import os
import sys

from cleave import events
from cleave.report.event_text import describe

_LOG = logging.getLogger("cleave.fleet")
_WARNINGS = (events.ResultRefused, events.DeviceLate, events.Paused)


def log_event(event: events.AnyEvent) -> None:
    text = describe(event)
    if text is None:
        return
    level = logging.WARNING if isinstance(event, _WARNINGS) else logging.INFO
    if _LOG.hasHandlers():
        _LOG.log(level, "%s", text)
    elif level >= _least_level():
        sys.stderr.write(f"cleave: {text}\n")


def _least_level() -> int:
    name = os.environ.get("CLEAVE_LOG_LEVEL", "INFO").upper()
    return logging.getLevelNamesMapping().get(name, logging.INFO)
