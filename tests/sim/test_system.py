"""Closed forms, determinism and the methods of the simulator."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.support.virtual_fleet import shape

from cleave.api.planning import load_fleet
from cleave.core.cost.rates import Pace, Server
from cleave.core.fleet.profiles import Profiles
from cleave.core.model.shapes import named
from cleave.core.plan.resident.large_fleet import plan_resident
from cleave.core.plan.resident.standing import standing
from cleave.sim.churn import constant, of_each
from cleave.sim.cleave import Run, simulate_cleave, suits_engine
from cleave.sim.columns import ColumnsCourse
from cleave.sim.devices import Device
from cleave.sim.engine_course import EngineCourse
from cleave.sim.fleet import Fleet, batch_of
from cleave.sim.setting import Setting
from cleave.sim.stack import decoder_of
from cleave.sim.world import Noise, World

FAST = 1e15
MODEL = shape(layers=2, hidden=128, inner=256, words=512)


def fleet(
    count: int = 1, *, flops: float = 1e10, down: float = 1e6, up: float = 5e5, latency_s: float = 0.0
) -> Profiles:
    uneven = 1 + np.arange(count) % 3
    return Profiles(
        names=tuple(f"d{number}" for number in range(count)),
        flops_per_s=flops * uneven,
        down_bytes_per_s=down * uneven,
        up_bytes_per_s=up * uneven,
        latency_s=np.full(count, latency_s),
        memory_bytes=np.full(count, 4e9),
    )


def setting(profiles: Profiles, *, sequences: int = 4, server: Server | None = None, seed: int = 0) -> Setting:
    return Setting(
        model=MODEL,
        tokens=sequences * 64,
        sequence=64,
        profiles=profiles,
        server=server or Server(),
        seed=seed,
    )


def batch_s(profiles: Profiles, **options: object) -> float:
    course = EngineCourse(setting(profiles, **options), World(profiles))  # type: ignore[arg-type]
    return course.batch()


# ------------------------------------------------------------------------------------------------ closed forms


def test_one_device_with_boundless_links_takes_the_time_of_its_flops() -> None:
    profiles = fleet(flops=1e9, down=FAST, up=FAST)
    course = EngineCourse(setting(profiles), World(profiles))
    seconds = course.batch()
    assert seconds == pytest.approx(course.devices[0].computed_s, rel=1e-6)
    assert course.devices[0].computed_s > 3 * 2 * 256 * MODEL.params_per_layer * 2 / 1e9, "forward, backward and more"


def test_one_device_of_boundless_speed_takes_the_time_of_its_busier_link() -> None:
    profiles = fleet(flops=FAST, down=FAST, up=1e5)
    course = EngineCourse(setting(profiles), World(profiles))
    assert course.batch() == pytest.approx(course.devices[0].up_bytes / 1e5, rel=0.01)
    trained = sum(one.rows * one.cols for one in decoder_of(MODEL).parameters)
    rows = 256 * 128 * 2 + 256 * 8  # dx of every row in 16 bits, and its logsumexp and target logit
    assert course.devices[0].up_bytes == pytest.approx(2 * trained + rows, rel=0.01)


def test_latency_only_adds_time() -> None:
    near, far = (batch_s(fleet(latency_s=latency)) for latency in (0.0, 0.5))
    assert near < far < near + 0.5 * 2 * 4 * 64, "at most a round trip per task"


def test_the_servers_links_limit_all_devices_together() -> None:
    profiles = fleet(4, flops=FAST, down=FAST, up=FAST)
    course = EngineCourse(setting(profiles, server=Server(up_bytes_per_s=1e5)), World(profiles))
    seconds = course.batch()
    assert seconds == pytest.approx(sum(device.up_bytes for device in course.devices) / 1e5, rel=0.02)


def test_devices_on_one_medium_share_it_both_ways() -> None:
    model, devices = decoder_of(MODEL), [Device(Pace(FAST, 1e5, 1e5, 0.0), 4 << 30, "wifi") for _ in range(2)]
    simulated = Fleet(devices, media={"wifi": 1e5})
    run = simulated.resident(model, batch_of(model, simulated.operands, sequences=4, sequence=64))
    simulated.driver.run_until(run.returned.done)
    moved = sum(device.down_bytes + device.up_bytes for device in devices)
    assert moved / 1e5 <= simulated.driver.now * (1 + 1e-9)
    assert simulated.driver.now < 1.01 * moved / 1e5
    simulated.check_idle()


# ------------------------------------------------------------------------------------------------ the world


def test_the_same_seed_gives_the_same_digits_and_another_does_not() -> None:
    profiles = fleet(4)

    def outcome(seed: int, method: str) -> tuple[object, ...]:
        world = World(
            profiles,
            seed=seed,
            noise=Noise(spread=0.3, drift=0.1, stalls_per_hour=60.0),
            stays=lambda: of_each(profiles.names, seed, lambda rng: constant(rng, 2.0, 60.0)),
        )
        run = Run(world=world, batches=3, has_churn=True, method=method)  # type: ignore[arg-type]
        found = simulate_cleave(setting(profiles, seed=seed), run)
        assert found.fits, found.reason
        return found.batch_s, found.recovery_s, dict(found.detail)

    for method in ("engine", "law"):
        assert outcome(1, method) == outcome(1, method)
        assert outcome(1, method) != outcome(2, method)


def test_noise_is_a_factor_of_median_one_that_does_not_depend_on_the_others() -> None:
    many, few = fleet(2000), fleet(10)
    truth = World(many, seed=5, noise=Noise(spread=0.3)).truth(0.0)
    logs = np.log(truth.up_bytes_per_s / many.up_bytes_per_s)
    assert abs(np.mean(logs)) < 4 * 0.3 / np.sqrt(2000)
    assert np.std(logs) == pytest.approx(0.3, rel=0.1)
    alone = World(few, seed=5, noise=Noise(spread=0.3)).truth(0.0)
    np.testing.assert_array_equal(alone.up_bytes_per_s, truth.up_bytes_per_s[:10])


def test_rates_drift_from_hour_to_hour() -> None:
    world = World(fleet(4), noise=Noise(drift=0.2))
    assert world.truth(10.0) is world.truth(3599.0)
    assert not np.array_equal(world.truth(0.0).flops_per_s, world.truth(3600.0).flops_per_s)


def test_a_stall_delays_a_batch_by_no_more_than_it_lasts() -> None:
    profiles = fleet(flops=1e9)
    usual = EngineCourse(setting(profiles), World(profiles)).batch()
    course = EngineCourse(setting(profiles), World(profiles))
    course.devices[0].stalled_until = 7.0
    assert usual < course.batch() <= usual + 7.0


# ------------------------------------------------------------------------------------------------ methods


def test_small_settings_go_through_the_engine_and_large_ones_do_not() -> None:
    assert suits_engine(setting(fleet(4)), batches=1)
    assert not suits_engine(setting(fleet(64)), batches=1)
    assert not suits_engine(setting(fleet(4)), batches=100_000)


def test_a_played_plan_takes_the_planned_time_where_memory_is_short_too() -> None:
    profiles = load_fleet(Path(__file__).parents[2] / "benchmarks" / "fleets" / "mixed8.csv")
    chosen = Setting(model=named("opt-1.3b"), tokens=65536, sequence=1024, profiles=profiles)
    found = simulate_cleave(chosen, Run(world=World(profiles), method="law"))
    assert found.detail["method"] == "timeline"
    assert found.batch_s == pytest.approx(found.detail["planned_s"], rel=1e-6)


def test_columns_on_believed_rates_take_the_planned_time() -> None:
    profiles = fleet(64, flops=1e9)
    plan = plan_resident(profiles, MODEL, 64 * 64, sequence=64)
    columns = standing(plan, profiles, Server())
    assert columns.step_s == pytest.approx(plan.step_s)
    assert columns.loads().up_bytes.sum() == pytest.approx(plan.up_bytes)
    assert columns.loads().down_bytes.sum() == pytest.approx(plan.down_bytes)
    assert (columns.loads().memory_bytes <= profiles.memory_bytes).all()


def test_slower_devices_and_departures_only_lengthen_a_step() -> None:
    profiles = fleet(64, flops=1e9)
    plan = plan_resident(profiles, MODEL, 64 * 64, sequence=64)
    columns = standing(plan, profiles, Server())
    slower = columns.on(replace(profiles, up_bytes_per_s=profiles.up_bytes_per_s / 2))
    assert slower.step_s > columns.step_s
    takeover_s = columns.takeover_s()
    with_mates = np.flatnonzero(np.isfinite(takeover_s))
    assert len(with_mates)
    gone = np.zeros(64, dtype=np.bool_)
    gone[with_mates[0]] = True
    left = columns.without(gone)
    assert left is not None
    assert with_mates[0] not in left.devices
    assert left.measured().step_s >= 0.99 * columns.measured().step_s
    gone[:] = True
    assert columns.without(gone) is None


def test_without_changes_every_batch_of_a_course_takes_the_same_time() -> None:
    profiles = fleet(64, flops=1e9)
    chosen = setting(profiles, sequences=64)
    plan = plan_resident(profiles, MODEL, chosen.tokens, sequence=64)
    course = ColumnsCourse(chosen, World(profiles), plan).run(5)
    assert course.batch_s == pytest.approx((plan.step_s,) * 5)
    assert course.departures == course.joins == course.replans == 0


def test_churn_costs_time_and_departures_come_at_their_rate() -> None:
    profiles = fleet(64, flops=1e9)
    chosen = setting(profiles, sequences=64)
    plan = plan_resident(profiles, MODEL, chosen.tokens, sequence=64)
    rate = 0.5 * 3600 / plan.step_s / 64  # one departure every other batch
    world = World(profiles, stays=lambda: of_each(profiles.names, 0, lambda rng: constant(rng, rate, plan.step_s)))
    course = ColumnsCourse(chosen, world, plan).run(200)
    assert course.mean_s > plan.step_s
    expected = sum(course.batch_s) / 3600 * rate * 64
    assert abs(course.departures - expected) < 5 * np.sqrt(expected)
    assert min(course.recovery_s) > 0


def test_a_model_that_fits_nowhere_does_not_fit() -> None:
    profiles = replace(fleet(2), memory_bytes=np.full(2, 10.0))
    found = simulate_cleave(setting(profiles))
    assert not found.fits
    assert found.batch_s is None
    assert found.reason
