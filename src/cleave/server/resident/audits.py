"""Audits: which work on resident layers the server recomputes, because it cannot be checked otherwise.

An audit covers an account: all that one device did for one shard in a pass. Whether to audit it depends on the level of
the device's token and on its record; a sample is drawn when its first result arrives, and no message reveals it. From
then on its results are kept with the messages that led to them. When the account has been read, or the pass is about to
end, they are replayed off the loop (`audit_case.py`), one account at a time. A pass hands out nothing before its audits
have finished. A failed audit makes it begin again, and convicts the device's token (`core/verify/vouching.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass

from cleave import events
from cleave.core.model.batch import Direction
from cleave.core.schedule.accounts import Account
from cleave.core.schedule.members import Member, Roster
from cleave.core.schedule.tasks import DeviceId
from cleave.core.verify.trust import audited_share
from cleave.core.verify.vouching import Vouching
from cleave.server.contract import Audit, Blame, Requests, Run, Tell
from cleave.server.resident.audit_case import AuditCase
from cleave.server.resident.held_shard import HeldShard


@dataclass(slots=True)
class AuditTotals:
    """Totals over all passes of a server."""

    units: int = 0
    """Units recomputed."""
    wrong: int = 0
    """Accounts found wrong."""
    busy_s: float = 0.0
    """CPU seconds spent on audits."""


class Audits:
    """The audits of one pass at a time; lives with the engine."""

    def __init__(
        self,
        *,
        can_replay: bool,
        draw: Callable[[], float],
        roster: Roster,
        vouching: Vouching,
        totals: AuditTotals,
    ) -> None:
        """`draw` returns a random number between 0 and 1; without `can_replay` nothing is audited."""
        self.can_replay = can_replay
        self.covers_all = False
        """Audit every account of the pass, whoever it is of."""
        self._draw, self._roster, self._vouching, self._totals = draw, roster, vouching, totals
        self._cases: dict[Account, AuditCase | None] = {}
        """None: not audited, or already concluded."""
        self._open = 0
        """Cases not concluded yet."""
        self._queue: deque[AuditCase] = deque()
        self._running: AuditCase | None = None

    def case_of(
        self,
        account: Account,
        held: HeldShard,
        direction: Direction,
        *,
        barred: Collection[DeviceId],
        is_trained: bool,
    ) -> AuditCase | None:
        """Return the case that collects an account's results; None if it is not audited.

        `barred` devices take part only because no other can, and are always audited. Unless `is_trained`, weights do
        not depend on the pass.
        """
        if account not in self._cases:
            chosen = self._is_chosen(account, direction, is_barred=account.device in barred, is_trained=is_trained)
            self._cases[account] = AuditCase(account, held) if chosen else None
            self._open += chosen
        return self._cases[account]

    @property
    def are_open(self) -> bool:
        return self._open > 0

    def close(self, account: Account, run: Run) -> Requests:
        """Queue the audit of an account to which nothing more will be added."""
        case = self._cases.get(account)
        if case is not None and not case.is_queued:
            case.is_queued = True
            self._queue.append(case)
            yield from self._go_on(run)

    def settle(self, run: Run) -> Requests:
        """Audit all remaining accounts at the end of a pass, including those of departed devices."""
        for account in list(self._cases):
            yield from self.close(account, run)

    def drop(self) -> None:
        """Drop all audits: the pass begins again, or has ended."""
        for case in self._cases.values():
            if case is not None:
                case.is_dropped = True
        self._cases.clear()
        self._open = 0
        self._queue.clear()
        self._running = None

    def conclude(self, case: AuditCase, reason: str, run: Run) -> Requests:
        """Record the outcome of an audit; `reason` says what is wrong, empty if nothing is."""
        if case.is_dropped:
            return
        self._running = None
        self._cases[case.account] = None
        self._open -= 1
        device, units = case.account.device, len(case.units)
        self._totals.units += units
        yield Tell(events.Audited(device=device, units=units, is_right=not reason))
        member = self._member(device)
        if not reason:
            if member is not None:
                member.trust.audited_right(case.directions)
        else:
            self._totals.wrong += 1
            yield from self.convict(device, reason)
        yield from self._go_on(run)

    def convict(self, device: DeviceId, reason: str) -> Requests:
        """Count work found wrong, and distrust the device's token from now on."""
        member = self._member(device)
        if member is None or member.key is None:
            yield Blame(device, reason)
            return
        yield Blame(device, reason, is_final=self._vouching.is_convicted(member.key))
        member.trust.audited_wrong()
        self._vouching.convict(member.key, device)

    def _go_on(self, run: Run) -> Requests:
        if self._running is None and self._queue:
            self._running = self._queue.popleft()
            yield Audit(run, self._running)

    def _is_chosen(self, account: Account, direction: Direction, *, is_barred: bool, is_trained: bool) -> bool:
        member = self._roster.members.get(account.device)
        if not self.can_replay or member is None or member.key is None:  # no key: the server itself
            return False
        if self.covers_all or is_barred or (self._vouching.is_last_step and member.level != "own"):
            return True
        share = audited_share(member.level, member.trust, direction, len(self._roster.members))
        if 0 < share < 1 and not self._vouching.may_go_unchecked(member.key):
            return True
        chosen = self._draw() < share
        if not chosen and is_trained and member.level != "own":
            self._vouching.used_unchecked(member.key)
        return chosen

    def _member(self, device: DeviceId) -> Member | None:
        return self._roster.members.get(device) or self._roster.past.get(device)
