"""Batches through the real engine in virtual time, for fleets and models that are small enough for every event."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import inf

from cleave.core.cost.rates import Pace
from cleave.core.fleet.profiles import Profiles
from cleave.core.plan import choose
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.errors import InfeasibleError
from cleave.sim.course import Attendance, Course
from cleave.sim.devices import Device
from cleave.sim.driver import SimulationStuck
from cleave.sim.fleet import Fleet, batch_of
from cleave.sim.setting import Setting
from cleave.sim.stack import decoder_of
from cleave.sim.world import World

_LIMIT_S = 30 * 86_400.0
"""A batch that takes longer does not fit."""
_HOUR_S = 3600.0
_REJOIN_S = 1.0


class EngineCourse:
    """A fleet that works through batches, one after another."""

    def __init__(self, setting: Setting, world: World) -> None:
        self._setting, self._world = setting, world
        self._model = decoder_of(setting.model)
        profiles = setting.profiles
        capacities = dict(zip(profiles.medium, profiles.medium_bytes_per_s.tolist(), strict=True))
        self._fleet = Fleet(
            setting=choose.Setting(
                wire=setting.wire, server=setting.server, medium_bytes_per_s=profiles.common_medium_bytes_per_s
            ),
            server=setting.server,
            media={name: bytes_per_s for name, bytes_per_s in capacities.items() if name},
            disconnected=self._rejoin,
        )
        self._attendance = Attendance(profiles.names, world.lives())
        truth = world.truth(0.0)
        self.devices = [
            Device(_pace(truth, number), int(truth.memory_bytes[number]), truth.medium[number])
            for number in range(len(profiles))
        ]
        """In the order of the profiles, whether or not they are there."""
        self.plan: ResidentPlan | None = None
        """Of the latest batch."""
        self._departures = self._joins = self._replans = 0
        self._waited_s = 0.0
        for number, is_there in enumerate(self._attendance.present):
            if is_there:
                self._join(number)
        driver = self._fleet.driver
        driver.run_until(lambda: driver.is_quiet)
        self._attend()
        if not world.is_still:
            driver.call_at(_HOUR_S, self._drift)
        for number, name in enumerate(profiles.names):
            self._stall(number, world.stalls(name))

    def run(self, batches: int) -> Course:
        took, ended = list[float](), list[float]()
        for _ in range(batches):
            took.append(self.batch())
            ended.append(self._fleet.driver.now)
        return Course(
            method="engine",
            batch_s=tuple(took),
            ended_s=tuple(ended),
            changes=tuple(self._attendance.history),
            departures=self._departures,
            joins=self._joins,
            replans=self._replans,
            waited_s=self._waited_s,
        )

    def batch(self, leaving: str | None = None, after_s: float = 0.0) -> float:
        """Seconds of a batch; with `leaving`, that device leaves for good after some of them."""
        driver, setting = self._fleet.driver, self._setting
        asked = driver.now
        while not driver.devices:
            self._attendance.next_at()  # raises if none will come
            self._wait(lambda: bool(driver.devices))
        began = driver.now
        self._waited_s += began - asked
        batch = batch_of(
            self._model,
            self._fleet.operands,
            sequences=setting.sequences,
            sequence=setting.sequence,
            wire=setting.wire,
            wants_dx=not setting.model.adapter_rank,  # adapters leave the token table as it is
        )
        if leaving is not None:
            driver.leave(leaving, began + after_s)
        run = self._fleet.resident(self._model, batch, self.plan)
        self._wait(run.returned.done)
        run.returned.result()
        if self.plan is not None and run.plan is not None and run.plan.arrangement != self.plan.arrangement:
            self._replans += 1
        self.plan = run.plan
        return driver.now - began

    def _wait(self, is_over: Callable[[], bool]) -> None:
        driver = self._fleet.driver
        try:
            driver.run_until(is_over, driver.now + _LIMIT_S)
        except SimulationStuck as fault:
            raise InfeasibleError(driver.waits[-1] if driver.waits else str(fault)) from None

    # -------------------------------------------------------------------------------------------- the world

    def _join(self, number: int) -> None:
        device, profiles = self.devices[number], self._setting.profiles
        self._fleet.driver.join(profiles.names[number], device, believed=_pace(profiles, number))

    def _rejoin(self, name: str, reason: str) -> None:
        """Let a device that was disconnected join again after a pause, if it is still there."""
        driver, number = self._fleet.driver, self._setting.profiles.names.index(name)

        def happen() -> None:
            if self._attendance.present[number] and name not in driver.devices:
                self._join(number)

        driver.call_at(driver.now + _REJOIN_S, happen)

    def _attend(self) -> None:
        """Let devices join and leave, and await the next change."""
        driver = self._fleet.driver
        for change in self._attendance.until(driver.now):
            if change.joins:
                self._joins += 1
                self._join(change.device)
            else:
                self._departures += 1
                driver.leave(self._setting.profiles.names[change.device])
        if (at := self._attendance.soonest) < inf:
            driver.call_at(at, self._attend)

    def _drift(self) -> None:
        driver = self._fleet.driver
        truth = self._world.truth(driver.now)
        for number, device in enumerate(self.devices):
            device.pace = _pace(truth, number)
        driver.call_at(driver.now + _HOUR_S, self._drift)

    def _stall(self, number: int, stalls: Iterator[tuple[float, float]]) -> None:
        """Await the next stall of a device."""
        found = next(stalls, None)
        if found is None:
            return
        at, seconds = found

        def happen() -> None:
            self.devices[number].stalled_until = at + seconds
            self._stall(number, stalls)

        self._fleet.driver.call_at(at, happen)


def _pace(profiles: Profiles, number: int) -> Pace:
    return Pace(
        float(profiles.flops_per_s[number]),
        float(profiles.down_bytes_per_s[number]),
        float(profiles.up_bytes_per_s[number]),
        float(profiles.latency_s[number]),
        float(profiles.task_s[number]),
    )
