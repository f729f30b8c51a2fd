"""All ways to do a step, for a plan to be compared with."""

from __future__ import annotations

from cleave.core.plan.rivals.alone import alone
from cleave.core.plan.rivals.case import Case, Rival
from cleave.core.plan.rivals.pipeline import pipelines
from cleave.core.plan.rivals.products import gemms_one_by_one, grouped_gemms, layer_groups
from cleave.core.plan.rivals.replicas import data_parallel
from cleave.core.plan.rivals.sharded import fsdp


def all_rivals(case: Case) -> tuple[Rival, ...]:
    """Cleave's own products first, then the arrangements of other systems."""
    return (
        gemms_one_by_one(case),
        grouped_gemms(case),
        layer_groups(case),
        pipelines(case),
        fsdp(case),
        data_parallel(case),
        alone(case),
    )
