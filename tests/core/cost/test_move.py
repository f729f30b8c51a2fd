"""The law of moving: all links at once, up before down, spread over the steps that the move is made for."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support import fleets

from cleave.core.cost.move import AMORTIZED_STEPS, amortized_s, move_s

MB = 1e6
SAME = np.ones(2)
TWO = fleets.of(1e9 * SAME, np.array([8 * MB, 4 * MB]), np.array([2 * MB, 1 * MB]), 0 * SAME, 1e9 * SAME)


def test_weights_come_up_before_they_go_down_over_all_links_at_once() -> None:
    up, down = np.array([4 * MB, 3 * MB]), np.array([8 * MB, 16 * MB])
    assert move_s(up, down, TWO) == pytest.approx(3 + 4)
    assert move_s(up, down, TWO, medium_bytes_per_s=1 * MB) == pytest.approx(7 + 24)
    assert move_s(0 * up, 0 * down, TWO) == 0


def test_a_move_must_pay_off_within_the_horizon() -> None:
    assert amortized_s(2.0, AMORTIZED_STEPS * 0.5) == pytest.approx(2.5)
