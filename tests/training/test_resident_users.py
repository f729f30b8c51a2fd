"""The laws of `tests/train/offload/test_decoder_users.py` over real devices."""

from __future__ import annotations

import pytest
from tests.train.offload.test_decoder_users import (  # noqa: F401
    test_lora_trains_the_same_and_leaves_the_rest_untrained,
    test_our_loop_trains_the_same_with_micro_batches_in_threads,
    test_trainer_trains_unmodified,
)
from tests.training.test_resident_fleet import Recorded

from cleave import Fleet


@pytest.fixture
def columns(fleet: Fleet) -> Recorded:
    return Recorded(fleet.cluster)
