"""The laws of `tests/train/offload/test_decoder.py` over real devices: processes at the other end of sockets."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
from tests.train.offload.test_decoder import (  # noqa: F401  # tests that more than arithmetic could break
    test_a_base_model_alone_runs_as_a_stack,
    test_a_retained_graph_may_run_backward_twice,
    test_autocast_rounds_no_worse_than_torch,
    test_each_pass_uses_the_weights_of_the_last_step,
    test_each_sequence_may_have_its_own_positions,
    test_evaluation_keeps_its_logits,
    test_frozen_parameters_get_no_gradient,
    test_generation_gives_the_same_tokens,
    test_gradients_accumulate_scaled_clipped_and_seen_by_hooks,
    test_micro_batches_in_threads_give_the_same_gradients,
    test_padding_changes_nothing,
    test_the_loss_and_all_gradients_equal_torchs,
    test_two_batches_may_be_in_flight_before_either_runs_backward,
    test_without_labels_hidden_states_come_back_and_gradients_go_in,
)

from cleave import Fleet
from cleave.core.model.batch import Batch
from cleave.core.model.decoder import Decoder
from cleave.core.plan.choose import PassChoice
from cleave.core.plan.resident.stages import ResidentPlan
from cleave.server.cluster import Cluster
from cleave.server.resident.pass_lease import PassLease
from cleave.train.offload.resident import Pass


class Recorded:
    """A cluster that records its passes and counts its products."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.wire, self.tensor = cluster.wire, cluster.tensor
        self.choose_layer, self.step_ended = cluster.choose_layer, cluster.step_ended
        self.lease, self.place, self.intact, self.rescue = cluster.lease, cluster.place, cluster.intact, cluster.rescue
        self.rehouse = cluster.rehouse
        self.before_closing = cluster.before_closing
        self.refusal: str | None = None
        self.passes: list[tuple[Decoder, Batch]] = []
        self.products = 0

    def submit(self, *args: Any, **options: Any) -> Future[Any]:
        self.products += 1
        return self._cluster.submit(*args, **options)

    def choose_pass(self, *args: Any, **options: Any) -> PassChoice:
        if self.refusal is not None:
            return PassChoice(is_resident=False, plan=None, reason=self.refusal)
        return self._cluster.choose_pass(*args, **options)

    def run(
        self,
        stack: Decoder,
        batch: Batch,
        plan: ResidentPlan | None,
        lease: PassLease | None = None,
        **options: Any,
    ) -> Pass:
        self.passes.append((stack, batch))
        return self._cluster.run(stack, batch, plan, lease, **options)

    def wait(self, future: Future[Any]) -> Any:
        return self._cluster.wait(future)


@pytest.fixture
def columns(fleet: Fleet) -> Recorded:
    return Recorded(fleet.cluster)
