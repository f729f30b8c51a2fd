"""What a departure costs where devices keep weights, in virtual time: what is lost moves once, the rest not at all."""

from __future__ import annotations

from typing import Any

from tests.support.decoders import make, tokens
from tests.support.leased_training import OPTIMIZERS
from tests.support.plans import leased
from tests.support.virtual_training import VirtualTraining

from cleave.core.cost.lease import ADAM_STATES, snapshot_bytes
from cleave.core.cost.rates import Pace
from cleave.sim.devices import Device
from cleave.train.offload import decoder as stack
from cleave.train.offload.distribute import distribute
from cleave.train.offload.leased_tensors import LeasedParameter


class Trained:
    """A small model on simulated devices, of which three keep a stage each."""

    def __init__(self, spare: int = 1) -> None:
        names = [f"d{number}" for number in range(3 + spare)]
        self.devices = {name: Device(Pace(1e7, 1e5, 1e5, 1e-4), 1 << 30) for name in names}
        self.fleet = VirtualTraining(self.devices, wire="fp32", arrange=leased((1, 2, 2)))
        fleet: Any = self.fleet
        self.model: Any = distribute(make("llama"), fleet, offload="always", grain="resident")
        self.optimizer = OPTIMIZERS["adamw"](self.model.parameters())
        stack.know(self.model, self.optimizer)
        self._steps = 0

    def step(self) -> tuple[float, int, int]:
        """Train for a step; return its seconds, and bytes down and up."""
        self._steps += 1
        began, down, up = self.fleet.driver.now, self._down, self._up
        batch = tokens(self._steps, 3)
        self.model(input_ids=batch, labels=batch).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self.fleet.driver.now - began, self._down - down, self._up - up

    def leave(self, name: str, after_s: float) -> None:
        self.fleet.driver.leave(name, self.fleet.driver.now + after_s)

    @property
    def keepers(self) -> list[str]:
        plan = self.fleet.planning.latest
        assert plan is not None
        return [plan.leased[shard] for shard in sorted(plan.leased)]

    @property
    def leased(self) -> int:
        """Numbers that devices keep."""
        return sum(one.numel() for one in self.model.parameters() if isinstance(one, LeasedParameter))

    @property
    def _down(self) -> int:
        return sum(device.down_bytes for device in self.devices.values())

    @property
    def _up(self) -> int:
        return sum(device.up_bytes for device in self.devices.values())


def test_a_spare_device_takes_over_what_was_lost_and_all_others_stay_where_they_are() -> None:
    trained = Trained()
    usual_s, usual_down, usual_up = [trained.step() for _ in range(3)][-1]
    leased, before = trained.leased, trained.keepers
    trained.leave("d1", usual_s / 2)
    _, down, up = trained.step()
    assert before == ["d0", "d1", "d2"]
    assert trained.keepers == ["d0", "d3", "d2"]
    assert trained.leased == leased > 0
    assert up <= 2 * usual_up, "the step broken off and the step itself: nothing is fetched, a replay returns nothing"
    assert down < usual_down * 5 + snapshot_bytes(leased, ADAM_STATES), "others' weights are not sent again"
    again_s, again_down, again_up = trained.step()
    assert again_up == usual_up, "the next step is leased as ever"
    assert again_down < 1.03 * usual_down, "and gets no weights; headers grow with the numbers of operands in them"
    assert again_s < 1.01 * usual_s


def test_a_device_that_keeps_a_stage_takes_another_one_if_none_is_to_spare() -> None:
    trained = Trained(spare=0)
    usual_s, _, _ = [trained.step() for _ in range(3)][-1]
    leased = trained.leased
    trained.leave("d1", usual_s / 2)
    trained.step()
    trained.step()
    first, middle, last = trained.keepers
    assert (first, last) == ("d0", "d2")
    assert middle in (first, last)
    assert trained.leased == leased


def test_stages_that_are_lost_together_are_trained_again_at_the_same_time() -> None:
    def taken_s(*gone: str) -> float:
        trained = Trained(spare=2)
        usual_s = [trained.step()[0] for _ in range(6)][-1]
        for name in gone:
            trained.fleet.driver.leave(name)
        trained.fleet.driver.catch_up()
        return trained.step()[0] - usual_s

    one_s, other_s, both_s = taken_s("d1"), taken_s("d2"), taken_s("d1", "d2")
    assert both_s < 0.8 * (one_s + other_s)


def test_a_device_that_leaves_between_two_steps_is_replaced_before_the_next() -> None:
    trained = Trained()
    usual = [trained.step() for _ in range(3)][-1]
    trained.fleet.driver.leave("d2")
    trained.fleet.driver.catch_up()
    _, _, up = trained.step()
    assert trained.keepers == ["d0", "d1", "d3"]
    assert up <= 1.5 * usual[2]
