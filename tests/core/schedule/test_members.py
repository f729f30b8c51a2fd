"""Laws of the roster: snapshots show healthy devices as measured, and are built only on demand after a change."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cleave.core.fleet.profiles import MEASURED, Profiles
from cleave.core.schedule.lateness import Elapsed
from cleave.core.schedule.members import STAND_IN, FixedCost, Member, Observation, PastMembers, Rate, Roster
from cleave.errors import FleetError

NAMES = ["ann", "bob", "eve", "dan", "zoe"]


def join(
    roster: Roster, name: str, *, flops_per_s: float = 1e9, address: str = "", key: str = "", party: str = ""
) -> Member:
    return roster.add(
        name=name,
        kernel="numpy",
        memory_bytes=10**9,
        flops_per_s=flops_per_s,
        latency_s=0.01,
        down_bytes_per_s=10e6,
        up_bytes_per_s=1e6,
        address=address,
        key=key,
        party=party,
    )


def shown(profiles: Profiles) -> dict[str, tuple[float, ...]]:
    rows = zip(*(getattr(profiles, column).tolist() for column in MEASURED), strict=True)
    return dict(zip(profiles.names, rows, strict=True))


class RosterMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.late: set[str] = set()
        self.roster = Roster(self.late)
        self.seen: tuple[int, Profiles | None] = (0, None)
        self.then: dict[str, tuple[float, ...]] = {}
        """Profiles as of the last snapshot, late devices included."""
        self.must_change = False

    @rule(name=st.sampled_from(NAMES), flops_per_s=st.floats(1e6, 1e12))
    def joins(self, name: str, flops_per_s: float) -> None:
        if name not in self.roster.members:
            join(self.roster, name, flops_per_s=flops_per_s)
            self.must_change = True

    @rule(name=st.sampled_from(NAMES))
    def leaves(self, name: str) -> None:
        if name in self.roster.members:
            self.late.discard(name)
            self.roster.remove(name)
            self.must_change = True

    @precondition(lambda self: self.roster.members)
    @rule(data=st.data(), seconds=st.floats(0.01, 100.0))
    def is_measured(self, data: st.DataObject, seconds: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.roster.members)))
        member = self.roster.members[name]
        member.flops.add(1e9, seconds)
        member.up.add(1e6, seconds)
        member.heard(seconds / 100)
        self.roster.measured(name)

    @precondition(lambda self: self.roster.members)
    @rule(data=st.data())
    def becomes_late_or_recovers(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.roster.members)))
        member = self.roster.members[name]
        before = member.rates
        self.late ^= {name}
        self.roster.lateness_changed(name)
        factor = 0.5 if name in self.late else 1.0
        flops_per_s, *links = before
        assert member.rates == pytest.approx([max(flops_per_s * factor, 1e3), *links])
        self.must_change = True

    @invariant()
    def a_snapshot_shows_the_healthy_devices_as_measured(self) -> None:
        number, before = self.seen
        assert self.roster.number >= number
        profiles = self.roster.profiles()
        assert profiles is self.roster.profiles(), "it is built once"
        members = self.roster.members
        moved = [name for name, member in members.items() if self.has_moved(name, member)]
        has_changed = profiles is not before
        assert has_changed == (self.roster.number > number) == (self.must_change or bool(moved))
        self.must_change = False
        if not has_changed:
            return
        self.seen = (self.roster.number, profiles)
        self.then = {name: tuple(member.measured) for name, member in members.items()}
        if profiles is None:
            assert not members
            return
        healthy = members.keys() - self.late or members.keys()
        assert shown(profiles) == {name: values for name, values in self.then.items() if name in healthy}
        assert all(np.isnan(profiles.watts))
        assert len(profiles.country) == len(profiles.device_class) == len(profiles)

    def has_moved(self, name: str, member: Member) -> bool:
        profiles = self.seen[1]
        if profiles is None or name not in profiles.names:
            return False
        rows = zip(member.measured, self.then[name], (1.3, 1.3, 1.3, 3.0, 1.3, 3.0, 3.0), strict=True)
        least = (0.0, 0.0, 0.0, 0.0, 0.0, 5e-3, 0.0)
        return any(
            now > far * then + small or then > far * now + small
            for (now, then, far), small in zip(rows, least, strict=True)
        )


TestRoster = RosterMachine.TestCase
TestRoster.settings = settings(max_examples=80, stateful_step_count=40, deadline=None, derandomize=True)


class _Counted(AbstractSet[str]):
    """An empty set that counts how often it is read: once per snapshot built."""

    def __init__(self) -> None:
        self.reads = 0

    def __contains__(self, name: object) -> bool:
        return False

    def __iter__(self) -> Iterator[str]:
        self.reads += 1
        return iter(())

    def __len__(self) -> int:
        return 0


def test_joins_of_many_devices_build_one_snapshot() -> None:
    roster = Roster(late := _Counted())
    for number in range(1000):
        join(roster, f"device-{number}")
    assert late.reads == 0
    profiles = roster.profiles()
    assert profiles is not None
    assert len(profiles) == 1000
    assert roster.number >= 1000
    roster.profiles()
    assert late.reads == 1


def test_a_snapshot_does_not_change_with_later_measurements() -> None:
    roster = Roster()
    member = join(roster, "ann")
    profiles = roster.profiles()
    assert profiles is not None
    before = shown(profiles)
    member.up.add(1e9, 1.0)
    roster.measured("ann")
    join(roster, "bob")
    assert shown(profiles) == before
    with pytest.raises(ValueError, match="read-only"):
        profiles.latency_s[0] = 1.0


@pytest.mark.parametrize("flops_per_s", [np.inf, np.nan])
def test_a_device_whose_profile_is_invalid_cannot_join(flops_per_s: float) -> None:
    roster = Roster()
    join(roster, "ann")
    with pytest.raises(FleetError, match="bob"):
        join(roster, "bob", flops_per_s=flops_per_s)
    assert list(roster.members) == ["ann"]
    profiles = roster.profiles()
    assert profiles is not None
    assert profiles.names == ("ann",)


# ------------------------------------------------------------------------------------------------ names


def test_equal_names_get_numbers_and_a_free_one_is_reused() -> None:
    roster = Roster()
    for expected in ("phone", "phone-2", "phone-3"):
        with roster.reserved("phone") as name:
            assert name == expected
            join(roster, name)
    roster.remove("phone-2")
    with roster.reserved("phone") as name:
        assert name == "phone-2"
    with roster.reserved("phone") as name, roster.reserved("phone") as other:
        assert (name, other) == ("phone-2", "phone-4"), "a reserved name is taken"


def test_devices_cannot_take_the_servers_names() -> None:
    roster = Roster()
    for reserved in ("server", STAND_IN):
        with roster.reserved(reserved) as name:
            assert name == f"{reserved}-2"
    with roster.reserved(STAND_IN, own=True) as name:
        assert name == STAND_IN


@given(st.text(max_size=100))
def test_any_text_becomes_a_valid_name(text: str) -> None:
    roster = Roster()
    for _ in range(2):
        with roster.reserved(text) as name:
            join(roster, name)
    assert roster.profiles() is not None


# ------------------------------------------------------------------------------------------------ past members


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=60))
def test_the_oldest_faultless_devices_are_forgotten_first(script: list[tuple[int, bool]]) -> None:
    past = PastMembers(maximum=4)
    expected: dict[str, Member] = {}
    for number, is_wrong in script:
        name = f"device-{number}"
        assert past.pop(name) is expected.pop(name, None)
        member = join(Roster(), name)
        past.add(member)
        expected[name] = member
        if len(expected) > 4:
            faultless = [other for other, known in expected.items() if not known.wrong]
            del expected[next(iter(faultless), next(iter(expected)))]
        if is_wrong:  # found by an audit after it left
            member.wrong += 1
        assert dict(past) == expected
        assert len(past) == len(expected)


def test_a_returning_device_keeps_its_record_and_at_the_same_address_its_trust() -> None:
    roster = Roster()
    first = join(roster, "ann", flops_per_s=1e9, address="here")
    first.tasks, first.wrong = 7, 1
    for _ in range(20):
        first.flops.add(1e8, 1.0)
    shown_by_work = first.flops.value
    roster.remove("ann")
    stranger = join(roster, "ann", address="elsewhere")
    assert (stranger.tasks, stranger.wrong) == (7, 1)
    assert stranger.trust is not first.trust
    assert stranger.flops.value == 1e9
    roster.remove("ann")
    roster.past.pop("ann")
    roster.past.add(first)
    again = join(roster, "ann", flops_per_s=1e9, address="here")
    assert again.trust is first.trust
    assert again.flops.value == pytest.approx(shown_by_work), "a probe does not override rates measured at work"
    assert "ann" not in roster.past


def test_a_device_waits_twice_as_long_after_each_bad_stay() -> None:
    roster = Roster()
    pauses: list[float] = []
    for _ in range(10):
        join(roster, "ann", address="here")
        roster.end_stay("ann", 100.0, is_bad=True)
        roster.remove("ann")
        pauses.append(roster.pause_s("ann", "here", "", now=100.0))
    assert pauses[:4] == [2.0, 4.0, 8.0, 16.0]
    assert max(pauses) == 300.0
    assert roster.pause_s("ann", "here", "", now=1000.0) == 0.0
    assert roster.pause_s("ann", "elsewhere", "", now=100.0) == 0.0


def test_another_name_does_not_shorten_the_pause_of_a_token() -> None:
    roster = Roster()
    for number in range(3):
        join(roster, f"mallory-{number}", address=f"10.0.0.{number}", party="token")
        roster.end_stay(f"mallory-{number}", 100.0, is_bad=True)
        roster.remove(f"mallory-{number}")
    assert roster.pause_s("someone-else", "elsewhere", "token", now=100.0) == 8.0
    assert roster.pause_s("someone-else", "elsewhere", "other token", now=100.0) == 0.0
    assert roster.pause_s("our own", "", "", now=100.0) == 0.0, "the server's own devices have no party"


def test_a_device_that_has_helped_does_not_wait_for_others_with_its_token() -> None:
    roster = Roster()
    join(roster, "ann", address="here", party="token").tasks = 1
    roster.end_stay("ann", 100.0, is_bad=False)
    roster.remove("ann")
    join(roster, "mallory", address="there", party="token")
    roster.end_stay("mallory", 100.0, is_bad=True)
    roster.remove("mallory")
    assert roster.pause_s("ann", "here", "token", now=100.0) == 0.0
    assert roster.pause_s("ann", "there", "token", now=100.0) == 2.0, "anyone may claim her name"


def test_only_a_stay_with_much_work_makes_good_for_a_bad_one() -> None:
    roster = Roster()
    for tasks, pause_s in ((0, 2.0), (1, 4.0), (1000, 4.0)):
        member = join(roster, "ann", address="here", party="token")
        member.tasks += tasks
        roster.end_stay("ann", 0.0, is_bad=False)
        roster.remove("ann")
        join(roster, "ann", address="here", party="token")
        roster.end_stay("ann", 0.0, is_bad=True)
        roster.remove("ann")
        assert roster.pause_s("ann", "here", "token", now=0.0) == pause_s


def test_stalls_add_up_and_only_work_clears_them() -> None:
    member = join(Roster(), "ann")
    assert [member.stalled() for _ in range(2)] == [False, False]
    member.tasks += 99
    assert member.stalled(), "too little work between"
    member.tasks += 200
    assert not member.stalled()


def test_a_liar_under_the_name_and_address_of_a_device_spoils_only_its_own_record() -> None:
    roster = Roster()
    liar = join(roster, "ann", address="here", key="liar's", party="liar's")
    while not liar.trust.is_lost:
        liar.trust.wrong()
    roster.end_stay("ann", 100.0, is_bad=True)
    roster.remove("ann")
    assert roster.is_quarantined("ann", "here", "liar's")
    assert roster.pause_s("ann", "here", "liar's", 100.0) > 0.0
    assert not roster.is_quarantined("ann", "here", "ann's")
    assert roster.pause_s("ann", "here", "ann's", 100.0) == 0.0
    honest = join(roster, "ann", address="here", key="ann's", party="ann's")
    assert not honest.trust.is_lost


# ------------------------------------------------------------------------------------------------ rates


def test_a_rate_follows_a_device_that_slows_down_and_ignores_impossible_measurements() -> None:
    rate = Rate(100.0, 1000.0, 1e6)
    for amount, seconds in ((np.inf, 1.0), (1.0, 0.0), (-1.0, 1.0), (1.0, np.nan), (np.nan, 1.0)):
        rate.add(amount, seconds)
    assert rate.value == pytest.approx(100.0)
    rate.add(100.0, 10.0)
    assert rate.value > 20.0, "a single outlier moves it little"
    for _ in range(60):
        rate.add(100.0, 10.0)
    assert rate.value == pytest.approx(10.0, rel=0.05)
    rate.add(1e9, 1e-9)
    assert rate.value <= 1e6


WORK = Observation(flops=1e9, compute_s=0.1, down_bytes=1000, down_s=1e-3, up_bytes=1000, up_s=1e-3)
LIES = st.floats(allow_nan=True, allow_infinity=True) | st.sampled_from([0.0, -1.0, 1e30, 1e300, 1e308, 5e-324])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.lists(st.tuples(LIES, LIES, LIES, st.floats(0, 1e5), st.booleans()), min_size=1, max_size=30))
def test_no_report_makes_a_profile_unusable(reports: list[tuple[float, float, float, float, bool]]) -> None:
    """Whatever a device says about its speed, others can still be planned with it."""
    roster = Roster()
    join(roster, "ann", flops_per_s=9.9e17)
    join(roster, "bob")
    for flops, compute_s, down_s, observed_s, is_late in reports:
        seen = Observation(
            flops=flops, compute_s=compute_s, down_bytes=1000, down_s=down_s, up_bytes=10**6, up_s=0.1
        ).bounded(Elapsed(observed_s, observed_s if is_late else 0.0), 1e6)
        assert 0 <= seen.compute_s <= 2 * observed_s
        assert 0 <= seen.down_s <= observed_s
        roster.observe("ann", seen, 1.0)
        roster.weaken("ann")
    profiles = roster.profiles()
    assert profiles is not None
    checked = profiles.take(np.array([0, 1]))  # raises for zero, infinity and NaN
    for rates in (checked.flops_per_s, checked.down_bytes_per_s, checked.up_bytes_per_s):
        assert rates.min() >= 999.0
    assert roster.members["ann"].pace.seconds(1 << 30, 1e15, 1 << 30) < 1e13
    assert np.isfinite(roster.members["ann"].compute_s)


def test_a_late_result_counts_with_the_time_it_took_whatever_its_device_claims() -> None:
    roster = Roster()
    member = join(roster, "ann")
    claims = Observation(flops=1e9, compute_s=1e-6, down_bytes=100, down_s=1e-6, up_bytes=100, up_s=1e-6)
    for _ in range(20):
        roster.observe("ann", claims.bounded(Elapsed(8.0, 8.0), 1e6), 1.0)
    assert member.flops.value < 1e6, "a million operations took eight seconds"
    reading = Observation(flops=0.0, compute_s=0.0, down_bytes=0, down_s=0.0, up_bytes=8000, up_s=1e-6)
    assert reading.bounded(Elapsed(8.0, 8.0), 0.0).up_s == pytest.approx(8.0)
    assert claims.bounded(Elapsed(8.0, 0.0), 1e6) == claims, "on time"


def test_a_newcomers_claim_is_believed_up_to_a_multiple_of_the_fastest_at_work() -> None:
    roster = Roster()
    assert join(roster, "first", flops_per_s=9.9e17).flops.value == 1e15
    ann = join(roster, "ann", flops_per_s=1e10)
    roster.observe("ann", WORK, 1.0)
    most = 4 * ann.flops.value
    assert join(roster, "liar", flops_per_s=9.9e17).flops.value == pytest.approx(most)
    assert join(roster, "next", flops_per_s=9.9e17).flops.value == pytest.approx(most), "claims do not add up"
    assert join(roster, "honest", flops_per_s=1e9).flops.value == pytest.approx(1e9)


def test_a_fast_newcomer_is_soon_believed() -> None:
    roster = Roster()
    join(roster, "ann", flops_per_s=1e10)
    roster.observe("ann", WORK, 1.0)
    member = join(roster, "gpu", flops_per_s=1e13)
    for _ in range(20):
        roster.observe("gpu", replace(WORK, flops=1e11, compute_s=0.01), 1.0)
    assert member.flops.value > 9e12


def test_a_download_that_began_before_any_task_does_not_change_a_rate() -> None:
    """As of a newcomer's probe, whose bytes its first result reports too."""
    roster = Roster()
    member = join(roster, "ann")
    before = member.down.value
    seen = Observation(
        flops=1e9, compute_s=0.1, down_bytes=int(before), down_s=1.0, up_bytes=0, up_s=0.0, payload_bytes=0
    )
    roster.observe(member.name, seen.bounded(Elapsed(longest_s=0.5, late_s=0.0), 1e9), 1.0)
    assert member.down.value == before
    late = replace(seen, down_s=1e9, compute_s=1e-3).bounded(Elapsed(longest_s=8.0, late_s=8.0), 1e9)
    assert late.compute_s == pytest.approx(8.0), "a device that was late is not excused by what it claims"
    roster.observe(member.name, replace(seen, down_s=0.25).bounded(Elapsed(longest_s=0.5, late_s=0.0), 1e9), 1.0)
    assert member.down.value > 2 * before


def quota_s(compute_s: float, quota_s: float, since_s: float, period_s: float = 0.1) -> float:
    """Seconds of a task on a processor that may run for `quota_s` in every period, of which `since_s` is over."""
    left_s = max(quota_s - since_s, 0.0)
    if compute_s <= left_s:
        return compute_s
    periods, rest_s = divmod(compute_s - left_s, quota_s)
    return period_s - since_s + periods * period_s + rest_s


@pytest.mark.parametrize("fixed_s", [2e-3, 20e-3])
def test_the_fixed_cost_of_a_task_is_learned_where_equal_tasks_take_equally_long(fixed_s: float) -> None:
    cost, rng = FixedCost(), np.random.default_rng(0)
    for number in range(64):
        compute_s = (0.03, 0.06)[number % 2]
        cost.add(compute_s * 1e9, (fixed_s + compute_s) * rng.uniform(0.98, 1.02))
    assert cost.task_s == pytest.approx(fixed_s, rel=0.15, abs=1e-3)


@pytest.mark.parametrize("compute_s", [5e-3, 15e-3, 30e-3, 60e-3])
@pytest.mark.parametrize("quota", [0.01875, 0.0375])
def test_a_quota_does_not_pass_for_a_fixed_cost(quota: float, compute_s: float) -> None:
    """Its tasks end now early, now late in a period: a line through them would say up to 50 ms."""
    cost, rng = FixedCost(), np.random.default_rng(0)
    for number in range(64):
        own_s = compute_s * (1 + number % 2)
        cost.add(own_s * 1e9, quota_s(own_s, quota, rng.uniform(0, 0.1)))
    assert cost.task_s < 5e-3
