"""The timeline of a plan against the real engine in virtual time, and the laws it follows on its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.support.virtual_fleet import decoder

from cleave.core.cost.rates import Pace
from cleave.core.plan.resident.timeline import (
    Post,
    Seating,
    Shared,
    Station,
    play,
    row_priority,
    sequences_ahead,
)
from cleave.sim.devices import Device
from cleave.sim.fleet import Fleet, batch_of

MBIT = 1e6 / 8
TASK_S = 0.002  # of a task, as the roster assumes of devices that it has not measured
FLEETS = {
    "home": [(100, 20), (100, 20), (200, 40), (50, 10)],
    "mixed": [(20, 5), (40, 8), (50, 10), (80, 15), (100, 20), (100, 40), (150, 30), (200, 40)],
    "fast": [(300, 300)] * 4,
}
MODELS = {"demo": (4, 256, 768, 256), "larger": (6, 768, 2304, 2048)}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("fleet", FLEETS)
def test_a_prediction_agrees_with_the_engine_in_virtual_time(fleet: str, model: str) -> None:
    devices = Fleet(Device(Pace(40e9, down * MBIT, up * MBIT, 0.002, TASK_S), 4 << 30) for down, up in FLEETS[fleet])
    layers, hidden, inner, words = MODELS[model]
    stack = decoder(layers=layers, hidden=hidden, inner=inner, words=words)
    for _ in range(2):
        began = devices.driver.now
        run = devices.resident(stack, batch_of(stack, devices.operands, sequences=16, sequence=128))
        devices.driver.run_until(run.returned.done)
        plan = run.plan
        assert plan is not None
        assert devices.driver.now - began == pytest.approx(plan.step_s, rel=0.04)


def one_stage(**changes: float) -> Post:
    seating = Seating(station=0, speed=1.0, slots=99, again=0.0, forward_s=0.1, backward_s=0.2)
    post = Post(
        stage=0,
        seatings=(seating,),
        forward_down=1000.0,
        forward_up=1000.0,
        backward_down=1000.0,
        again_down=1000.0,
        backward_up=1000.0,
        weights_down=10_000.0,
        gradients_up=5_000.0,
        readings=2,
    )
    return replace(post, **changes)


STATION = Station(down_bytes_per_s=10_000.0, up_bytes_per_s=5_000.0, latency_s=0.0)


def test_one_chunk_on_one_device_takes_the_sum_of_its_parts() -> None:
    # weights 1.0, x 0.1, forward 0.1, y 0.2, dy 0.1, backward 0.2, dx 0.2, gradients 1.0
    seconds = play([one_stage()], [STATION], sequences=1, chunks=1, shared=Shared())
    assert seconds == pytest.approx(2.9)


def test_the_server_handles_one_result_at_a_time() -> None:
    # as above; the server takes 0.5 for y, which waits 0.1 while it handles the answer to the weights, for dx, and for
    # the second part of the gradients
    seconds = play([one_stage()], [STATION], sequences=1, chunks=1, shared=Shared(task_s=0.5))
    assert seconds == pytest.approx(2.9 + 0.6 + 0.5 + 0.5)


def test_latency_counts_once_per_round_trip() -> None:
    far = replace(STATION, latency_s=1.0)
    near_s, far_s = (play([one_stage()], [one], sequences=1, chunks=1, shared=Shared()) for one in (STATION, far))
    assert far_s == pytest.approx(near_s + 3.0)  # x and y, dy and dx, gradients; weights travel beside x


def leased(**changes: float) -> Post:
    (seating,) = one_stage().seatings
    seatings = (replace(seating, update_s=0.25),)
    return replace(one_stage(weights_down=0.0, gradients_up=0.0, **changes), seatings=seatings, is_leased=True)


def test_a_leased_shard_is_updated_instead_of_synchronized() -> None:
    # update 0.25, while x comes in 0.1; forward 0.1, y 0.2, dy 0.1, backward 0.2, dx 0.2
    assert play([leased()], [STATION], sequences=1, chunks=1, shared=Shared()) == pytest.approx(1.05)


def test_latency_of_a_leased_shard_counts_for_the_update_and_for_the_square_sum() -> None:
    far = replace(STATION, latency_s=1.0)
    near_s, far_s = (play([leased()], [one], sequences=1, chunks=1, shared=Shared()) for one in (STATION, far))
    assert far_s == pytest.approx(near_s + 3.0)  # the update travels beside x; y, dy and dx; the square sum


def test_a_snapshot_uses_the_time_in_which_its_link_is_idle() -> None:
    def seconds(snapshot_up: float) -> float:
        post = leased(snapshot_up=snapshot_up)
        slow = replace(post.seatings[0], forward_s=0.5, backward_s=1.0)
        return play([replace(post, seatings=(slow,))], [STATION], sequences=8, chunks=1, shared=Shared())

    idle_s = seconds(0.0) - 8 * 0.4  # results keep the uplink busy for 0.4 a sequence
    assert seconds(0.5 * idle_s * 5_000) == pytest.approx(seconds(0.0), rel=0.05)
    assert seconds((idle_s + 2.0) * 5_000) == pytest.approx(seconds(0.0) + 2.0, rel=0.05)


def test_sequences_beyond_those_played_take_what_one_takes_in_a_full_pipeline() -> None:
    posts, stations = [one_stage()], [STATION]
    few = play(posts, stations, sequences=32, chunks=1, shared=Shared(), sequence_s=0.4)
    many = play(posts, stations, sequences=100, chunks=1, shared=Shared(), sequence_s=0.4)
    assert many == pytest.approx(few + 68 * 0.4)


def test_forward_goes_before_backward_of_sequences_that_are_far_enough_behind() -> None:
    forward = row_priority(5, 3, is_backward=False)
    assert row_priority(2, 3, is_backward=True) < forward < row_priority(3, 3, is_backward=True)
    assert row_priority(99, 0, is_backward=True) > row_priority(98, 0, is_backward=True)


def test_a_lead_of_nothing_lets_backward_of_any_sequence_go_before_forward_of_later_ones() -> None:
    assert sequences_ahead([2, 1, 3], 0) == [0, 0, 0]
    assert sequences_ahead([2, 1, 3], 2) == [12, 8, 6]
    assert all(row_priority(n, 0, is_backward=True) < row_priority(n, 0, is_backward=False) for n in range(9))
