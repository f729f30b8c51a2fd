"""Devices that compute nothing: right shapes, no memory, and admitted only by a server that was started for them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from tests.support.emulation import activity_of, devices, emulated
from tests.support.models import make, tokens

from cleave import Fleet, distribute
from cleave.cli.main import main
from cleave.core.cost.wire import WIRE_FORMATS, encoded_bytes
from cleave.core.model.grain import Grain
from cleave.core.schedule.rectangles import Rectangle
from cleave.device.programs.gemm import Chunk
from cleave.device.store import OperandStore
from cleave.device.worker import Refusal
from cleave.emulate.arithmetic import HollowKernel, Zeros
from cleave.emulate.fleet import EmulatedFleet, Terms
from cleave.errors import ProtocolError
from cleave.protocol.messages import Store
from cleave.transport.address import parse_address


def test_a_hollow_store_accounts_for_bytes_and_allocates_none() -> None:
    store = OperandStore(HollowKernel(), 10 << 40)
    for number, shape in enumerate([(1 << 20, 1 << 20), (1 << 19, 1 << 21), (1 << 20, 1 << 20)]):
        rows, cols = shape  # four terabytes each
        payload = bytes(4 * cols)
        store.write(
            Store(operand=number, rows=rows, cols=cols, format="fp32", first_row=0, strip_rows=1, payload=len(payload)),
            payload,
        )
        assert store.used_bytes == 4 * rows * cols
        store.drop((number,))  # kept as spare, and used again for a matrix of as many bytes
    store.make_state(9, (1 << 20,), 1 << 18)
    assert store.used_bytes > 1 << 39


def test_a_strip_of_the_wrong_length_is_refused_all_the_same() -> None:
    kernel = HollowKernel()
    with pytest.raises(ProtocolError, match="expected 48 bytes, got 47"):
        kernel.write(kernel.allocate(3, 4), bytes(47), "fp32")


@pytest.mark.parametrize("format", WIRE_FORMATS)
async def test_zeros_have_the_length_of_the_result_and_share_one_buffer(format: str) -> None:
    zeros, skipped = Zeros(), []
    part = Rectangle(0, 10, 0, 30)
    chunk = Chunk(lambda: pytest.fail("nothing computes"), part, 1.0, skip=lambda: skipped.append(1))
    one, two = await zeros.answer(chunk, format), await zeros.answer(chunk, format)
    assert len(one) == encoded_bytes(format, 10, 30)
    assert np.shares_memory(one, two)
    assert not one.any()
    assert skipped == [1, 1]
    large = await zeros.answer(Chunk(chunk.run, Rectangle(0, 4096, 0, 4096), 1.0), format)
    assert len(large) == encoded_bytes(format, 4096, 4096)


@pytest.mark.parametrize("grain", ["gemm", "resident"])
def test_a_server_started_for_it_completes_steps_on_devices_that_compute_nothing(grain: Grain) -> None:
    said: list[str] = []
    with Fleet.serve(
        "127.0.0.1:0", offload="always", scale_test=True, listener=lambda event: said.append(str(event))
    ) as fleet:
        assert fleet.is_scale_test
        assert any("SCALE TEST" in text for text in said)
        with emulated(fleet.url, devices(5), computes=False) as activity:
            fleet.wait(5)
            model, batch = distribute(make("wide-llama"), fleet, grain=grain), tokens(0, 8, 96)
            for _ in range(2):
                model(input_ids=batch, labels=batch).loss.backward()
            assert fleet.status().checking_s == 0
    assert activity.contribution.tasks > 0
    assert activity.losses == 0


def test_an_ordinary_server_refuses_devices_that_compute_nothing() -> None:
    with Fleet.serve("127.0.0.1:0") as fleet:
        assert not fleet.is_scale_test
        profiles = devices(3)

        async def join() -> None:
            terms = Terms(address=parse_address(fleet.url))
            with pytest.raises(Refusal, match="--scale-test"):
                await EmulatedFleet(profiles, terms, Zeros(), activity_of(profiles)).run()

        asyncio.run(join())


def test_a_scale_test_saves_no_model_and_takes_no_trained_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["train", "--model", "tiny-llama", "--sequence", "32", "--batch", "2", "--devices", "1"]
    assert main([*given, "--steps", "1", "--scale-test", "--out", str(tmp_path / "test")]) == 0
    assert "no model was saved" in capsys.readouterr().err
    assert not (tmp_path / "test" / "model").exists()
    assert not (tmp_path / "test" / "checkpoints").exists()
    assert main([*given, "--steps", "1", "--out", str(tmp_path / "trained")]) == 0
    before = (tmp_path / "trained" / "config.toml").read_bytes()
    again = ["train", "--resume", "--steps", "2", "--scale-test", "--out", str(tmp_path / "trained")]
    capsys.readouterr()
    assert main(again) == 2
    assert "another --out" in capsys.readouterr().err
    assert (tmp_path / "trained" / "config.toml").read_bytes() == before
