"""Seats and accounts: a device's progress on one sequence, and the gradients it sums over all of its sequences.

A sequence takes a **seat** at every shard: one device, which keeps its K and V. The gradients of the shard's weights
add up on that device in an **account**, over all its seats, and are read once. If a device leaves after returning part
of its account, the accounts that replace it are read only for the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from cleave.core.model.batch import Direction
from cleave.core.model.keeping import Keeping
from cleave.core.model.shard import Shard
from cleave.core.schedule.desks import Desk
from cleave.core.schedule.tasks import DeviceId


def _none() -> dict[Direction, int]:
    return {"forward": 0, "backward": 0}


@dataclass(slots=True, eq=False)
class Account:
    """One device's sum of the gradients of a shard's weights."""

    shard: Shard
    device: DeviceId
    part: object = None
    """The part to read, if a departed device had returned the rest; None: all of it."""
    is_closed: bool = False
    """Nothing may be added: the account is being read or was read."""
    is_read: bool = False
    seats: list[Seat] = field(default_factory=lambda: list[Seat]())


@dataclass(slots=True, eq=False)
class Seat:
    """A sequence's place at a shard: the units one device was given for it, and how far it got."""

    shard: Shard
    sequence: int
    desk: Desk
    account: Account
    sent: dict[Direction, int] = field(default_factory=_none)
    received: dict[Direction, int] = field(default_factory=_none)
    done: dict[Direction, int] = field(default_factory=_none)
    """Units whose results are stored, and finished silent units."""

    @property
    def keeps(self) -> Keeping:
        return self.desk.keeps

    @property
    def device(self) -> DeviceId:
        return self.desk.device

    @property
    def under_way(self) -> int:
        """Units handed out and not done."""
        return sum(self.sent.values()) - sum(self.done.values())


class Accounts:
    """Accounts that have not been read."""

    def __init__(self, trained: Collection[Shard]) -> None:
        """`trained` are the shards with gradients; accounts of other shards are never read."""
        self._trained = frozenset(trained)
        self._at: dict[Shard, dict[Account, None]] = {}
        self._partial: dict[Shard, dict[Account, None]] = {}
        """Accounts of which only a part will be read."""
        self._of: dict[DeviceId, dict[Account, None]] = {}
        self._unread = 0
        """Number of accounts of shards with gradients."""

    @property
    def are_read(self) -> bool:
        return not self._unread

    def is_trained(self, shard: Shard) -> bool:
        return shard in self._trained

    def is_read(self, shard: Shard) -> bool:
        return shard not in self._trained or not self._at.get(shard)

    def at(self, shard: Shard) -> list[Account]:
        return list(self._at.get(shard, ()))

    def partial(self, shard: Shard) -> list[Account]:
        """Accounts that replace what a departed device had not returned."""
        return list(self._partial.get(shard, ()))

    def of(self, device: DeviceId) -> list[Account]:
        return list(self._of.get(device, ()))

    def may_open(self, shard: Shard, device: DeviceId, part: object) -> bool:
        """Whether the device has room for the account: it can hold one per shard at a time."""
        return all(other.part is part for other in self._open(shard, device) if other.seats)

    def open(self, shard: Shard, device: DeviceId, part: object) -> Account:
        """Return the device's open account of the shard's gradients, or of this part of them; open one if needed."""
        for account in self._open(shard, device):
            if account.part is part:
                return account
        account = Account(shard, device, part)
        self._at.setdefault(shard, {})[account] = None
        self._of.setdefault(device, {})[account] = None
        if part is not None:
            self._partial.setdefault(shard, {})[account] = None
        self._unread += shard in self._trained
        return account

    def drop(self, account: Account) -> None:
        """Forget an account that was read, or that will never be."""
        del self._at[account.shard][account]
        del self._of[account.device][account]
        self._partial.get(account.shard, {}).pop(account, None)
        self._unread -= account.shard in self._trained

    def _open(self, shard: Shard, device: DeviceId) -> Iterator[Account]:
        for account in self._of.get(device, ()):
            if account.shard == shard and not account.is_closed:
                yield account

    def check(self) -> None:
        """Assert the invariants; a violation is our bug."""
        accounts = [account for at in self._at.values() for account in at]
        assert not [account for account in accounts if account.is_read]
        assert self._unread == sum(account.shard in self._trained for account in accounts)
        assert sum(len(of) for of in self._of.values()) == len(accounts)
        for account in accounts:
            assert account in self._of[account.device]
            assert (account in self._partial.get(account.shard, ())) == (account.part is not None)
