"""Check the tokens that peers show, without letting wrong ones cost much.

Tokens drawn by Cleave and tokens verified before are recognized at once and never wait behind strangers. Only a token
that a person chose, shown for the first time since the server started, needs a slow hash (`tokens.py`). Those take
turns: one at a time, in a thread of low priority, within a small share of one core, however many addresses guess. Each
address gets turns ever more rarely after wrong tokens.

Whoever has the right token gets in, even from behind the same address as a guesser: turns go to a random address among
those waiting, and within it to a random token, so no number of guesses can keep others from their turn for good; an
address pauses no longer than a hello may wait, so every hello sees at least one turn of its address; and a hello whose
turn did not come is not refused but loses its connection, upon which a device tries again. After one success its token
is recognized, and the waiting is over.
"""

from __future__ import annotations

import asyncio
import math
import os
import random
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from cleave.server.admission.gate import group_of
from cleave.server.admission.tokens import Keys

WITHIN_S = 10.0
"""How long a peer waits for a decision about its token."""
_SHARE = 0.03
"""Part of one core that slow hashes may take in the long run: about three a second ..."""
_BURST_S = 5.0
"""... and, after a quiet time, as many at once as in this many seconds."""
_FIRST_PAUSE_S = 0.5
_FORGET_S = 600.0
_MOST_GROUPS = 4096
_LOOK_S = 0.1
_NICENESS = 19


class Turns:
    """When the next token may be hashed, and from which address group. Pure: the caller supplies the time."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self._paid_s = -math.inf
        """When the hashes so far are paid for, at _SHARE of the time."""
        self._wrong: OrderedDict[str, tuple[int, float]] = OrderedDict()
        """Wrong tokens in a row per group, and when it may have its next turn; the latest last."""

    def choose(self, waiting: Iterable[str], now_s: float) -> str | None:
        """Draw the group whose turn it is; None if none may have one now."""
        if self._paid_s > now_s:
            return None
        rested = [group for group in dict.fromkeys(waiting) if self._wrong.get(group, (0, now_s))[1] <= now_s]
        return self._chance.choice(rested) if rested else None

    def hashed(self, group: str, cost_s: float, now_s: float, *, is_right: bool) -> None:
        """Account for a turn: pay for it, and have the group pause twice as long after each wrong token."""
        self._paid_s = max(self._paid_s, now_s - _BURST_S) + cost_s / _SHARE
        count, not_before_s = self._wrong.pop(group, (0, now_s))
        if is_right:
            return
        count = 1 if now_s - not_before_s > _FORGET_S else count + 1
        self._wrong[group] = count, now_s + min(_FIRST_PAUSE_S * 2.0 ** min(count - 1, 30), WITHIN_S)
        if len(self._wrong) > _MOST_GROUPS:
            self._wrong.popitem(last=False)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    token: str
    group: str
    answer: asyncio.Future[bool]


class Doorkeeper:
    """Decide about tokens for one server, in its event loop."""

    def __init__(self, keys: Keys) -> None:
        self.keys = keys
        self._chance = random.Random()
        self._turns = Turns(self._chance)
        self._waiting: set[_Waiting] = set()
        self._hashing: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "cleave-tokens", initializer=_lower_priority)

    async def identify(self, token: str, address: str) -> str | None:
        """Return the id of the key a device joins with, as `Keys.identify` does."""
        may_ask = self.keys.is_open or await self._is_recognized(token, address)
        return self.keys.identify(token) if may_ask else None

    async def administers(self, token: str, address: str) -> bool:
        return await self._is_recognized(token, address) and self.keys.administers(token)

    def close(self) -> None:
        """Stop deciding: connections that wait for a decision end without one."""
        if self._hashing is not None:
            self._hashing.cancel()
        for one in self._waiting:
            one.answer.cancel()

    async def _is_recognized(self, token: str, address: str) -> bool:
        """Whether the keys can now answer for a token at once; False if it is wrong. Waits for a turn if need be."""
        if self.keys.recognizes(token):
            return True
        waiting = _Waiting(token, group_of(address), asyncio.get_running_loop().create_future())
        self._waiting.add(waiting)
        if self._hashing is None or self._hashing.done():
            self._hashing = asyncio.create_task(self._hash_in_turn())
        try:
            return await waiting.answer
        finally:
            self._waiting.discard(waiting)

    async def _hash_in_turn(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            group = self._turns.choose((one.group for one in self._waiting), loop.time())
            if group is None:
                await asyncio.sleep(_LOOK_S)
                continue
            token = self._chance.choice([one.token for one in self._waiting if one.group == group])
            is_right, cost_s = await loop.run_in_executor(self._thread, self._verify, token)
            self._turns.hashed(group, cost_s, loop.time(), is_right=is_right)
            for one in [one for one in self._waiting if one.token == token]:
                self._waiting.remove(one)
                if not one.answer.done():
                    one.answer.set_result(is_right)

    def _verify(self, token: str) -> tuple[bool, float]:
        started_s = time.thread_time()
        return self.keys.verify(token), time.thread_time() - started_s


def _lower_priority() -> None:
    """Let training go first. Only Linux has priorities of single threads."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
