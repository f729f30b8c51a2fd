"""Fleets of real processes over real sockets, shared by the tests of a module, as starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cleave import Fleet


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet.local(3, offload="always") as started:
        yield started
