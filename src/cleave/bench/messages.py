"""What the process of a cell says to the one that started it: one JSON object per line."""

from __future__ import annotations

import msgspec

from cleave.bench.records import Step
from cleave.bench.scenario import Cell


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A cell to run; without devices, in plain torch."""

    cell: Cell
    has_devices: bool
    token: str = ""
    join_s: float = 60.0
    """Seconds within which all devices should have joined."""
    threads: int = 1
    device_cores: int | None = None
    """Cores that all devices share, if they are real processes of this machine."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="message", tag=str.lower):
    """Base of all messages but `Step`."""


class Listening(Message, frozen=True, kw_only=True):
    url: str


class Joined(Message, frozen=True, kw_only=True):
    """All devices have joined, and training starts."""

    seconds: float


class Finished(Message, frozen=True, kw_only=True):
    peak_rss_bytes: int
    events: dict[str, int] = {}
    choices: tuple[str, ...] = ()


class Failed(Message, frozen=True, kw_only=True):
    reason: str


AnyMessage = Listening | Joined | Step | Finished | Failed
