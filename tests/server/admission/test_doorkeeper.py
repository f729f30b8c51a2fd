"""Laws of guessing: wrong tokens cost little, from one address or from many, and right ones get in all the same."""

from __future__ import annotations

import asyncio
import itertools
import random
import threading
import time
from pathlib import Path

import pytest

from cleave.server.admission import doorkeeper, tokens
from cleave.server.admission.doorkeeper import WITHIN_S, Doorkeeper, Turns
from cleave.server.admission.tokens import FILE, Keys

SOON_S = 120.0
COST_S = 0.01
CHOSEN = "a token that a person chose"


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    """A run with one token that a person chose, unknown to the server since it started."""
    Keys(path=tmp_path / FILE).add("device", CHOSEN)
    return Keys(path=tmp_path / FILE)


# ------------------------------------------------------------------------------------------------ turns


@pytest.mark.parametrize("addresses", [1, 10, 1000])
def test_wrong_tokens_take_a_small_share_of_one_core_however_many_addresses_guess(addresses: int) -> None:
    turns, spent_s, now_s = Turns(random.Random(0)), 0.0, 0.0
    groups = [f"192.0.2.{number}" for number in range(addresses)]
    while now_s < 1000.0:
        group = turns.choose(groups, now_s)
        if group is not None:
            spent_s += COST_S
            turns.hashed(group, COST_S, now_s, is_right=False)
        now_s += COST_S
    assert spent_s <= 0.035 * now_s
    if addresses == 1:
        assert spent_s / COST_S == pytest.approx(now_s / WITHIN_S, rel=0.1), "one address alone is even slower"


def test_an_address_pauses_longer_after_each_wrong_token_but_no_longer_than_a_hello_waits() -> None:
    turns, pauses, now_s = Turns(random.Random(0)), list[float](), 0.0
    for _ in range(40):
        turns.hashed("192.0.2.1", 0.0, now_s, is_right=False)
        assert turns.choose(["192.0.2.2"], now_s) == "192.0.2.2", "others do not wait for it"
        pause_s = next(step / 8 for step in itertools.count() if turns.choose(["192.0.2.1"], now_s + step / 8))
        pauses.append(pause_s)
        now_s += pause_s
    assert pauses[:3] == [0.5, 1.0, 2.0]
    assert pauses == sorted(pauses)
    assert pauses[-1] == WITHIN_S
    turns.hashed("192.0.2.1", 0.0, now_s, is_right=True)
    assert turns.choose(["192.0.2.1"], now_s), "a right token ends the pauses"


def test_every_waiting_address_has_its_turn_among_endless_new_ones() -> None:
    turns, now_s = Turns(random.Random(0)), 0.0
    for number in range(100_000):
        now_s += 1.0
        chosen = turns.choose(["patient", *(f"new-{number}-{other}" for other in range(50))], now_s)
        if chosen == "patient":
            return
        if chosen is not None:
            turns.hashed(chosen, COST_S, now_s, is_right=False)
    pytest.fail("it never had a turn")


def test_the_record_of_wrong_tokens_is_bounded() -> None:
    turns = Turns(random.Random(0))
    for number in range(20_000):
        turns.hashed(f"group-{number}", 0.0, 0.0, is_right=False)
    assert len(turns._wrong) <= 4096


# ------------------------------------------------------------------------------------------------ the doorkeeper


class Hashes:
    """Counts slow hashes, and how many of them ran at the same time."""

    def __init__(self) -> None:
        self.count = self.most = self._now = 0
        self._lock = threading.Lock()
        self.may_end = threading.Event()
        self.may_end.set()
        self._hash = tokens._hash

    def __call__(self, token: str, salt: str) -> str:
        with self._lock:
            self.count += 1
            self._now += 1
            self.most = max(self.most, self._now)
        self.may_end.wait(SOON_S)
        hashed = self._hash(token, salt)
        with self._lock:
            self._now -= 1
        return hashed


@pytest.fixture
def hashes(monkeypatch: pytest.MonkeyPatch, keys: Keys) -> Hashes:
    counted = Hashes()
    monkeypatch.setattr(tokens, "_hash", counted)
    return counted


async def test_guesses_are_hashed_one_at_a_time_and_within_the_budget(keys: Keys, hashes: Hashes) -> None:
    door = Doorkeeper(keys)
    guesses = [door.identify(f"guess {n}", f"192.0.2.{n}") for n in range(100)]
    asked = [asyncio.create_task(guess) for guess in guesses]
    started_s = time.monotonic()
    await asyncio.wait(asked, timeout=1.0)
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    door.close()
    assert hashes.most == 1
    assert 1 <= hashes.count <= 3 + (5.0 + time.monotonic() - started_s) * 0.03 / 0.002


async def test_a_known_token_never_waits_behind_strangers(tmp_path: Path, keys: Keys, hashes: Hashes) -> None:
    _, drawn = Keys(path=tmp_path / FILE).add("device")
    door = Doorkeeper(keys)
    async with asyncio.timeout(SOON_S):
        assert await door.identify(CHOSEN, "192.0.2.1") is not None
        hashes.may_end.clear()
        guess = asyncio.create_task(door.identify("a guess", "192.0.2.1"))
        while hashes.most == hashes.count == 0:
            await asyncio.sleep(0)
        assert await door.identify(CHOSEN, "192.0.2.1") is not None
        assert await door.identify(drawn, "192.0.2.1") is not None
        assert await door.identify("", "192.0.2.1") is None
        assert not guess.done()
        hashes.may_end.set()
        assert await guess is None
    door.close()


async def test_devices_with_the_same_new_token_cost_one_hash(keys: Keys, hashes: Hashes) -> None:
    door = Doorkeeper(keys)
    async with asyncio.timeout(SOON_S):
        found = await asyncio.gather(*(door.identify(CHOSEN, f"192.0.2.{n}") for n in range(50)))
    door.close()
    assert len(set(found)) == 1
    assert found[0]
    assert hashes.count == 1


async def test_the_right_token_gets_in_from_behind_the_same_address_as_a_guesser(
    keys: Keys, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "_hash", lambda token, salt: "" if token != CHOSEN else keys.list()[0].hash)
    monkeypatch.setattr(doorkeeper, "WITHIN_S", 1e-4)
    monkeypatch.setattr(doorkeeper, "_LOOK_S", 0.0)
    door = Doorkeeper(keys)

    async def guess(name: int) -> None:
        for number in itertools.count():
            await door.identify(f"guess {name} {number}", "192.0.2.1")

    guessers = [asyncio.create_task(guess(n)) for n in range(31)]
    await asyncio.sleep(0)
    async with asyncio.timeout(SOON_S):
        assert await door.identify(CHOSEN, "192.0.2.1")
    for guesser in guessers:
        guesser.cancel()
    await asyncio.gather(*guessers, return_exceptions=True)
    door.close()
