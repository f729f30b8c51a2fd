"""Plans count about as many tasks that read gradients as the engine submits."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
from tests.support.virtual_fleet import shape

from cleave.core.cost.rates import Pace
from cleave.core.cost.resident import readings
from cleave.core.cost.wire import encoded_bytes
from cleave.core.plan.choose import Setting
from cleave.core.schedule.tasks import Task
from cleave.server.resident.tasks import ReadWork
from cleave.sim.devices import Device, Job, LineName
from cleave.sim.fleet import Fleet, batch_of
from cleave.sim.stack import decoder_of

WIRE = "bf16"


@dataclass(slots=True, eq=False)
class Noting(Device):
    """A device that notes which gradients it sends."""

    read: set[Task] = field(default_factory=lambda: set[Task]())

    def size(self, line: LineName, job: Job) -> int:
        if line == "up" and isinstance(job.task.work, ReadWork):
            self.read.add(job.task)
        return Device.size(self, line, job)


@pytest.mark.parametrize("rank", [0, 8, 64])
@pytest.mark.parametrize("hidden", [64, 256, 512])
def test_plans_count_the_tasks_that_read_gradients(hidden: int, rank: int) -> None:
    model = replace(shape(layers=4, hidden=hidden, inner=3 * hidden, words=256), adapter_rank=rank)
    decoder = decoder_of(model)
    device = Noting(Pace(1e12, 1e8, 1e8, 0.001), 4 << 30)
    fleet = Fleet([device], setting=Setting(wire=WIRE))
    run = fleet.resident(decoder, batch_of(decoder, fleet.operands, sequences=1, sequence=32, wire=WIRE, wants_dx=True))
    fleet.driver.run_until(run.returned.done)
    gradients = sum(encoded_bytes(WIRE, one.rows, one.cols) for one in decoder.parameters if one.is_trained)
    counted = readings(2 * model.layers + 1, gradients)
    assert len(device.read) / 2 <= counted <= 2 * len(device.read)
