"""What `cleave join` does when there is no server."""

from __future__ import annotations

import pytest
from tests.support.commands import free_port

from cleave.device.conditions import observer
from cleave.device.join import serve
from cleave.device.kernels import NumpyKernel
from cleave.device.terms import Terms
from cleave.device.volunteer import Volunteer
from cleave.device.worker import Contribution, Offer
from cleave.errors import ConnectionLost
from cleave.transport.address import parse_address


async def test_a_server_that_is_never_reached_is_told_with_the_time_waited_and_what_to_do() -> None:
    address = f"127.0.0.1:{free_port()}"
    offer = Offer(name="early", token="", flops_per_s=1e9, memory_bytes=1 << 26)
    told: list[str] = []
    volunteer = Volunteer(Terms(), observer(Terms()), lambda share: offer.memory_bytes)
    with pytest.raises(ConnectionLost, match=rf"{address}.* 0\.01 s.*start the server, or check the address"):
        await serve(parse_address(address), NumpyKernel(), offer, Contribution(), told.append, 0.01, volunteer)
    assert not told, "it did not even try again"
