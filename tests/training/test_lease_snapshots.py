"""Snapshots of leased weights, and what follows from them and the log: the same training whenever devices leave."""

from __future__ import annotations

import io
import logging
from collections.abc import Sequence

import pytest
import torch
from tests.support.doomed import Kind, Moment, When
from tests.support.in_process import ROOMY
from tests.support.leased_training import ROOM, Told, compare
from torch import nn, optim

from cleave.train.offload import lease_recovery
from cleave.train.offload.lease_held import Held
from cleave.train.offload.leased_tensors import LeasedParameter, LeasedState
from cleave.train.offload.leases import Leases

TIGHT = (ROOMY, 47_420, 130_000)
"""Memory in which the second device has no room for a copy of what it is lent, and the third for some of it."""

SPARE = (60_000, ROOMY, 90_000, ROOMY, ROOMY)
"""Memory with which only the fourth and fifth device can take over the stage of the second."""


class Bases:
    """Waits for snapshots after each step, and notes how far back a shard would have to be replayed from."""

    def __init__(self) -> None:
        self.behind: list[int] = []

    def __call__(self, step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
        held = _held(model)
        if held is not None:
            self.behind.append(max(held.log.position - one.base for one in held.shards))
            for one in held.shards:
                if one.under_way is not None:
                    one.under_way.done.exception(60)


def _held(model: nn.Module) -> Held | None:
    keepers = [one._cleave_keeper for one in model.parameters() if isinstance(one, LeasedParameter)]
    assert all(isinstance(one, Leases) for one in keepers)
    return keepers[0]._recall.held if keepers else None  # type: ignore[attr-defined]


@pytest.mark.parametrize("optimizer", ["groups", "momentum"])
def test_losses_stay_those_of_torch_over_20_steps_with_snapshots(optimizer: str) -> None:
    bases = Bases()
    assert compare(Told(), optimizer=optimizer, passes=2, steps=20, every=3, after_step=bases) > 0
    assert max(bases.behind) == 3, "a snapshot every 3 steps, complete with the step after"
    assert bases.behind.count(1) >= 6


@pytest.mark.parametrize(
    ("kind", "when", "number", "memory_bytes"),
    [
        ("copy", "told", 0, ROOM),
        ("copy", "returning", 1, ROOM),
        ("collect", "told", 0, ROOM),
        ("collect", "returning", 7, ROOM),
        ("collect", "returning", 2, TIGHT),
    ],
)
def test_a_device_that_leaves_during_a_snapshot_changes_no_loss(
    kind: Kind, when: When, number: int, memory_bytes: Sequence[int]
) -> None:
    told = Told()
    compare(told, dooms={1: Moment(kind, when, number)}, every=2, memory_bytes=memory_bytes)
    assert told.has("recovered")


def test_a_device_without_room_copies_nothing_and_its_snapshots_are_complete_before_the_next_update() -> None:
    told, bases = Told(), Bases()
    compare(told, dooms={1: Moment("copy", "told", 0)}, every=1, memory_bytes=TIGHT, after_step=bases)
    assert not told.has("recovered"), "it would have left with the first copy"
    assert max(bases.behind) <= 2


@pytest.mark.parametrize("memory_bytes", [ROOM, TIGHT])
def test_snapshots_that_nobody_waits_for_change_no_loss(memory_bytes: Sequence[int]) -> None:
    assert compare(Told(), every=1, memory_bytes=memory_bytes) > 0


def test_a_device_that_leaves_after_snapshots_is_rebuilt_from_the_last_one() -> None:
    told, bases = Told(), Bases()
    compare(told, dooms={1: Moment("update", "told", 5)}, every=2, steps=7, after_step=bases)
    assert told.has("recovered")
    assert max(bases.behind) <= 3


@pytest.mark.parametrize(("kind", "number"), [("forward", 14), ("backward", 13)])
def test_another_device_that_leaves_during_a_replay_changes_no_loss(kind: Kind, number: int) -> None:
    told = Told()
    compare(told, dooms={1: Moment("update", "told", 3), 2: Moment(kind, "told", number)}, every=2)
    assert told.has("recovered")


def _step_twice(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    if step == 1:
        optimizer.step()


def test_two_steps_with_the_same_gradients_are_both_done() -> None:
    compare(Told(), after_step=_step_twice, dooms={0: Moment("update", "returned", 3)})


def _skip(step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
    if step == 1:
        optimizer.zero_grad()


def test_gradients_that_were_given_up_are_not_replayed() -> None:
    told = Told()
    compare(told, after_backward=_skip, dooms={1: Moment("update", "told", 2)})
    assert told.has("recovered")


class States:
    """Reads optimizer states directly in mid-step, and saves them."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.leased = 0

    def __call__(self, step: int, model: nn.Module, optimizer: optim.Optimizer) -> None:
        states = [optimizer.state[one]["exp_avg_sq"] for one in model.parameters() if one in optimizer.state]
        self.leased += sum(isinstance(one, LeasedState) for one in states)
        if step == 2:
            self.norms += [one.sum().item() for one in states]
        if step == 3:
            file = io.BytesIO()
            torch.save(optimizer.state_dict(), file)
            file.seek(0)
            saved = [one["exp_avg_sq"] for _, one in sorted(torch.load(file)["state"].items())]
            self.norms += [one.sum().item() for one in saved]
            assert not any(isinstance(one, LeasedState) for one in saved)


def test_states_that_are_read_directly_in_mid_step_are_current() -> None:
    read = States()
    assert compare(Told(), after_backward=read) > 0
    half = len(read.norms) // 2
    assert read.leased
    assert read.norms[:half] == pytest.approx(read.norms[half:], rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("moment", [None, Moment("update", "told", 2), Moment("backward", "returning", 5)])
def test_a_lost_shard_is_trained_again_on_devices_that_keep_it_meanwhile(
    moment: Moment | None, caplog: pytest.LogCaptureFixture
) -> None:
    """At `moment`, the device that trains it again leaves as well, and another one takes over."""
    told, dooms = Told(), {1: Moment("update", "told", 4)}
    if moment is not None:
        dooms |= {3: moment, 4: moment}
    with caplog.at_level(logging.INFO, logger=lease_recovery.__name__):
        compare(told, dooms=dooms, memory_bytes=SPARE, optimizer="momentum")
    assert told.has("recovered")
    assert any("replayed 5 steps" in one.message for one in caplog.records)
    assert any("begins again" in one.message for one in caplog.records) == (moment is not None)
