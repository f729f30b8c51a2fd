"""A server allowed to compute does so with no device at all, and with the same numbers."""

from __future__ import annotations

import numpy as np

from cleave import Fleet, events


def test_with_no_device_the_server_computes_a_product_itself() -> None:
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((300, 200), (200, 150)))
    told: list[events.AnyEvent] = []
    with Fleet("127.0.0.1:0", alone="compute", listener=told.append) as fleet:
        np.testing.assert_allclose(fleet.matmul(a, b), a @ b, atol=1e-4)
        assert [member.name for member in fleet.cluster.here()] == ["this server"]
        fleet.start_devices(1)
        fleet.wait(1)
        np.testing.assert_allclose(fleet.matmul(a, b), a @ b, atol=1e-4)
    assert any(isinstance(event, events.Paused) for event in told)
    left = [event for event in told if isinstance(event, events.DeviceLeft)]
    assert (left[0].device, left[0].reason) == ("this server", "a device joined")
