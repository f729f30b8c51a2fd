"""Readings: what is still missing of the gradients that devices sum up.

Usually an account has its accumulators to itself. If a device leaves while gradients are being read, the account that
makes up for it adds to what its device has not begun to return; the sum then travels once. An accumulator that several
accounts add to belongs to all of them: whatever is missing of it, all of their sequences would have to compute again.
"""

from __future__ import annotations

from dataclasses import dataclass

from cleave.core.schedule.accounts import Account
from cleave.core.schedule.rectangles import Rectangle, total
from cleave.core.schedule.tasks import Operand


@dataclass(slots=True, eq=False)
class Accumulator:
    """The gradient of one view as a device sums it up, and the parts of it that are missing."""

    operand: Operand
    wanted: list[Rectangle]
    accounts: list[Account]
    """Accounts that add to it: several, if sequences of a departed device came after the first was closed."""
    stack: Stack = ()
    """Those that one task reads together, this one included; groups that task. Empty before they are read."""
    has_arrived: bool = False
    """Whether some of its stack has."""
    keeping: int = 0
    """Parts that arrived and are being added."""

    @property
    def is_complete(self) -> bool:
        """Whether all of it arrived."""
        return not total(self.wanted)

    @property
    def is_added(self) -> bool:
        """Whether all of it arrived and was added."""
        return self.is_complete and not self.keeping

    def may_join(self, own: Accumulator, account: Account) -> bool:
        """Whether a new account may add to this instead of to its own accumulator of the same view."""
        is_own = own.accounts == [account]
        return is_own and bool(own.wanted) and own.wanted == self.wanted and not self.has_arrived


Stack = tuple[Accumulator, ...]


@dataclass(slots=True, eq=False)
class Reading:
    """An account's accumulators, in the order of the shard's trained views."""

    accumulators: list[Accumulator]
    has_begun: bool = False

    @property
    def wanted(self) -> dict[int, list[Rectangle]]:
        """Missing parts."""
        return {index: list(one.wanted) for index, one in enumerate(self.accumulators)}

    @property
    def is_complete(self) -> bool:
        """Whether all of it arrived."""
        return self.has_begun and all(one.is_complete for one in self.accumulators)

    @property
    def is_added(self) -> bool:
        """Whether all of it arrived and was added."""
        return self.has_begun and all(one.is_added for one in self.accumulators)

    @property
    def is_adding(self) -> bool:
        """Whether parts that arrived are still being added."""
        return any(one.keeping for one in self.accumulators)
