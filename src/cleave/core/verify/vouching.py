"""Whose unchecked work the weights rest on, and how far to go back when one of them is found wrong.

A sample of audits finds a liar sooner or later; what it returned before that went into the weights unchecked. So the
training loop marks its steps, keeps a **restore point** from before the first unchecked work of every token, and goes
back there once a device of that token is **convicted**: an audit found it wrong. From then on all work of the token's
devices is audited before it is used, whatever names they join under, so a token can cause this once.

Keys are ids of tokens. Steps are counted from 1; a restore point is the number of finished steps. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

_MOST_RESTORE_POINTS: Final = 4
"""Beyond this many, tokens share the newest one: each costs a checkpoint on disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What must outlive the server's process. All by key."""

    convicted: frozenset[str] = frozenset()
    since: dict[str, int] = field(default_factory=lambda: dict[str, int]())
    """First step that used unchecked work."""
    points: dict[str, int] = field(default_factory=lambda: dict[str, int]())
    """Restore point from before that step."""


@dataclass(frozen=True, slots=True)
class Doubt:
    """Steps from `step` on are in doubt: they rest on unchecked work of a device found wrong, or of its token."""

    step: int
    device: str


class Vouching:
    def __init__(self) -> None:
        self.can_go_back = False
        """Whether the training loop keeps restore points; if not, nothing can be undone, and no doubt is raised."""
        self._step = 0
        self.is_last_step = False
        """Everything but work of the owner's machines is audited then: who lies all the time is found at last."""
        self._since: dict[str, int] = {}
        """First step that used unchecked work, by key."""
        self._points: dict[str, int] = {}
        """Restore point from before that step, by key."""
        self._wanted: set[str] = set()
        """Keys without a restore point whose devices are audited only for lack of it."""
        self._convicted: set[str] = set()
        self.doubt: Doubt | None = None

    # -------------------------------------------------------------------------------------------- asked by the server

    def may_go_unchecked(self, key: str) -> bool:
        """Whether work of the token's proven devices may be used without an audit; else ask for a restore point."""
        if key in self._convicted:
            return False
        if not self.can_go_back or key in self._points:
            return True
        self._wanted.add(key)
        return False

    def used_unchecked(self, key: str) -> None:
        self._since.setdefault(key, self._step)

    def is_convicted(self, key: str) -> bool:
        return key in self._convicted

    def convict(self, key: str, device: str) -> None:
        """Distrust a token for the rest of the run, and doubt every step since its first unchecked work."""
        self._convicted.add(key)
        since = self._since.pop(key, None)
        if since is not None and self.can_go_back and (self.doubt is None or since < self.doubt.step):
            self.doubt = Doubt(since, device)

    # -------------------------------------------------------------------------------------------- asked by training

    @property
    def record(self) -> Record:
        return Record(convicted=frozenset(self._convicted), since=dict(self._since), points=dict(self._points))

    def recall(self, record: Record, step: int) -> None:
        """Take over the record of an earlier process; training continues after this step."""
        self._convicted, self._since, self._points = set(record.convicted), dict(record.since), dict(record.points)
        self.went_back(step)

    def begin_step(self, step: int, *, is_last: bool = False) -> None:
        self._step, self.is_last_step = step, is_last

    @property
    def wants_restore_point(self) -> bool:
        return bool(self._wanted)

    @property
    def restore_points(self) -> frozenset[int]:
        """Checkpoints that must not be removed."""
        return frozenset(self._points.values())

    def keep_restore_point(self, step: int) -> None:
        """Let the devices that waited for it go unchecked: the state after this step is kept."""
        points = self.restore_points
        step = max(points) if len(points) >= _MOST_RESTORE_POINTS else step
        self._points |= dict.fromkeys(self._wanted, step)
        self._wanted.clear()

    def went_back(self, step: int) -> None:
        """Clear the doubt: training continues from the state after this step, and later unchecked work is undone."""
        self.doubt = None
        self._since = {key: since for key, since in self._since.items() if since <= step}
        self._points = {
            key: point for key, point in self._points.items() if point <= step and key not in self._convicted
        }
