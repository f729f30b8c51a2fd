"""`cleave.Fleet` speaks, shows its state, and answers wrong use with its own errors."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import pytest
import torch

import cleave
from cleave import events
from cleave.errors import FleetGoneError, InputError

A = np.ones((4, 3), dtype=np.float32)
SCRIPT = """
import numpy, torch, cleave
with cleave.Fleet.local(1) as fleet:
    cleave.distribute(torch.nn.Sequential(torch.nn.Linear(4, 4)), fleet)
    fleet.matmul(numpy.ones((4, 4)), numpy.ones((4, 4)))
"""


TALKATIVE = """
import logging, cleave
with cleave.Fleet.serve("127.0.0.1:0") as fleet:
    for number in range(5000):
        fleet.say("a line " * 9)
        logging.getLogger("cleave.server").warning("a warning")
"""


def test_a_script_without_logging_sees_devices_join_and_the_grain_chosen() -> None:
    run = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    lines = run.stderr.splitlines()
    assert any(line.startswith("cleave: local-1 joined") for line in lines)
    assert any(line.startswith("cleave: grain gemm: ") for line in lines)
    assert any(line.startswith("cleave: local-1 left") for line in lines)


@pytest.mark.parametrize(
    "silence", ["import logging; logging.basicConfig()", "import os; os.environ['CLEAVE_LOG_LEVEL'] = 'ERROR'"]
)
def test_a_script_decides_what_becomes_of_the_log(silence: str) -> None:
    run = subprocess.run([sys.executable, "-c", silence + SCRIPT], capture_output=True, text=True, check=True)
    assert "joined" not in run.stderr


def test_a_script_whose_output_nobody_reads_goes_on_and_ends() -> None:
    reading, writing = os.pipe()
    process = subprocess.Popen([sys.executable, "-c", TALKATIVE], stderr=writing)
    try:
        os.close(writing)
        assert process.wait(120.0) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reading)


def test_devices_and_status_show_who_is_connected_and_what_they_did() -> None:
    heard: list[events.AnyEvent] = []
    with cleave.Fleet.local(1, listener=heard.append) as fleet:
        assert [device.device for device in fleet.devices] == ["local-1"]
        assert fleet.status().grain is None
        np.testing.assert_allclose(fleet.matmul(A, A.T), A @ A.T)
        model: Any = cleave.distribute(torch.nn.Sequential(torch.nn.Linear(3, 3)), fleet)
        model(torch.from_numpy(A)).sum().backward()
        status = fleet.status()
    assert status.grain == "gemm"
    assert status.products >= 2
    assert status.devices[0].tasks >= 2
    assert status.devices[0].kernel == "numpy"
    assert any(isinstance(event, events.DeviceJoined) for event in heard)


def test_int8_is_another_name_for_q8() -> None:
    with cleave.Fleet("127.0.0.1:0", wire="int8") as fleet:
        assert fleet.wire == fleet.cluster.wire == "q8"


WRONG: dict[str, Callable[[], object]] = {
    "count": lambda: cleave.Fleet.local("four"),  # type: ignore[arg-type]
    "no devices": lambda: cleave.Fleet.local(0),
    "threads": lambda: cleave.Fleet.local(1, threads=0),
    "memory": lambda: cleave.Fleet.local(1, memory=2_000_000_000),  # type: ignore[arg-type]
    "listen": lambda: cleave.Fleet.serve(7077),  # type: ignore[arg-type]
    "token": lambda: cleave.Fleet.serve("127.0.0.1:0", token=5),  # type: ignore[arg-type]
    "wire": lambda: cleave.Fleet.serve("127.0.0.1:0", wire="fp8"),  # type: ignore[arg-type]
    "wire of a plan": lambda: cleave.plan("fleet.csv", gemm=(1, 1, 1), wire="fp8"),  # type: ignore[arg-type]
    "alone_wait_s": lambda: cleave.Fleet.serve("127.0.0.1:0", alone_wait_s=-1),
    "listener": lambda: cleave.Fleet.serve("127.0.0.1:0", listener="me"),  # type: ignore[arg-type]
    "model": lambda: cleave.distribute("a model", "a fleet"),  # type: ignore[type-var, arg-type]
    "fleet": lambda: cleave.distribute(torch.nn.Linear(2, 2), "a fleet"),  # type: ignore[arg-type]
    "undistribute": lambda: cleave.undistribute(None),  # type: ignore[type-var]
    "plan": lambda: cleave.plan(5, gemm=(1, 1, 1)),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("call", WRONG.values(), ids=WRONG.keys())
def test_wrong_types_and_values_raise_input_errors(call: Callable[[], object]) -> None:
    with pytest.raises(InputError, match="expected"):
        call()


def test_operands_that_are_no_matrices_raise_input_errors() -> None:
    with cleave.Fleet("127.0.0.1:0") as fleet:
        for a, b in (([1.0], A), (A, "text"), (A, A), (A, np.array([["x"]]))):
            with pytest.raises(InputError, match="expected"):
                fleet.matmul(a, b)  # type: ignore[type-var]
        with pytest.raises(InputError, match="timeout_s"):
            fleet.wait(1, timeout_s=0)


def test_low_precision_tensors_are_multiplied_and_keep_their_type() -> None:
    with cleave.Fleet.local(1) as fleet:
        product = fleet.matmul(torch.ones(4, 3, dtype=torch.bfloat16), torch.ones(3, 2, dtype=torch.bfloat16))
    assert product.dtype == torch.bfloat16
    assert product.tolist() == [[3.0, 3.0]] * 4


def test_a_device_that_ended_after_it_joined_does_not_fail_the_wait_for_its_replacement() -> None:
    with cleave.Fleet.local(1) as fleet:
        (device,) = psutil.Process().children()
        device.kill()
        device.wait()
        fleet.start_devices(1)
        fleet.wait(1, None)
        assert fleet.matmul(A, A.T).shape == (4, 4)


def test_a_closed_fleet_says_that_it_is_closed() -> None:
    with cleave.Fleet("127.0.0.1:0") as fleet:
        model: Any = cleave.distribute(torch.nn.Sequential(torch.nn.Linear(3, 3)), fleet)
    for use in (
        lambda: fleet.matmul(A, A.T),
        lambda: fleet.wait(1),
        lambda: fleet.start_devices(1),
        lambda: cleave.distribute(torch.nn.Linear(3, 3), fleet),
        lambda: model(torch.from_numpy(A)),
    ):
        with pytest.raises(FleetGoneError, match="closed"):
            use()
    cleave.undistribute(model)
    assert model(torch.from_numpy(A)).shape == (4, 3)
    fleet.close()  # twice is fine


def test_a_local_device_that_dies_at_its_start_ends_the_wait() -> None:
    with cleave.Fleet("127.0.0.1:0") as fleet:
        fleet.start_devices(1, memory="1MB")
        with pytest.raises(FleetGoneError, match="exit code 2"):
            fleet.wait(1, None)
