"""The laws of `tests/train/test_stack_users.py`, over real devices."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cleave import Fleet

sys.path.append(str(Path(__file__).parents[1] / "train"))

from test_resident_fleet import Recorded
from test_stack_users import *  # noqa: F403


@pytest.fixture
def columns(fleet: Fleet) -> Recorded:
    return Recorded(fleet.cluster)
