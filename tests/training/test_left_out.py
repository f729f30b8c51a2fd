"""Devices that plans leave out are measured again now and then, as no work would show what they can do."""

from __future__ import annotations

import time

from tests.support.decoders import make
from tests.support.in_process import ROOMY, InProcess
from tests.support.leased_training import OPTIMIZERS, Told, train
from tests.support.plans import arranged

from cleave.server.gemm.trial import ROUNDS_S
from cleave.server.layer_plans import SEARCHED_EVERY
from cleave.train.offload.distribute import distribute, undistribute

BOTH_LEAVE_OUT_D2 = [(2, [["d0"]]), (99, [["d1"]])]


def test_a_device_that_plans_leave_out_is_measured_again() -> None:
    with InProcess([ROOMY] * 3, arrange=arranged(BOTH_LEAVE_OUT_D2, chunk=8), trust="own", listener=Told()) as fleet:
        model = distribute(make("llama"), fleet.cluster, offload="always", tell=Told(), grain="resident")
        left_out = fleet.cluster.engine.roster.members["d2"]

        def wait_for(tasks: int) -> None:
            deadline = time.monotonic() + 60
            while left_out.tasks < tasks:
                assert time.monotonic() < deadline, f"{left_out.tasks} of {tasks} tasks"
                time.sleep(0.01)

        train(model, OPTIMIZERS["sgd"](model.parameters()), steps=1)
        wait_for(len(ROUNDS_S))
        train(model, OPTIMIZERS["sgd"](model.parameters()), steps=SEARCHED_EVERY - 1)
        assert left_out.tasks == len(ROUNDS_S)
        train(model, OPTIMIZERS["sgd"](model.parameters()), steps=1)
        wait_for(2 * len(ROUNDS_S))
        undistribute(model)
