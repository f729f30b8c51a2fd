"""Fleets of real processes over real sockets, shared by the tests of a module, as starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from cleave import Fleet


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Devices, server and tests share two cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet.local(3, offload="always") as started:
        yield started
