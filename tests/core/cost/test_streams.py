"""Laws of streams: what deviates from a run's wire, and that plans count what is sent."""

from __future__ import annotations

from typing import get_args

import pytest

from cleave.core.cost.streams import Stream, stream_bytes, stream_format
from cleave.core.cost.terms import lean_terms, live_terms
from cleave.core.cost.wire import WIRE_FORMATS, WireFormat, encoded_bytes

each_wire = pytest.mark.parametrize("wire", WIRE_FORMATS)


@each_wire
def test_only_small_streams_and_logit_gradients_deviate_from_the_wire(wire: WireFormat) -> None:
    deviating = {stream for stream in get_args(Stream) if stream_format(stream, wire) != wire}
    small = {"vector", "table"} if wire != "fp32" else set[str]()
    assert deviating == (small | {"logit gradient"} if wire == "q8" else small)


def test_logit_gradients_take_16_bits_where_others_take_8() -> None:
    assert stream_format("logit gradient", "q8") == "bf16"


@each_wire
@pytest.mark.parametrize("terms", [live_terms, lean_terms])
def test_plans_count_the_bytes_that_are_sent(wire: WireFormat, terms: object) -> None:
    assert callable(terms)
    found = terms(wire)
    rows, cols = 1000, 4096
    for counted, stream in (
        (found.activation_bytes, "activation"),
        (found.weight_bytes, "weight"),
        (found.gradient_bytes, "weight gradient"),
    ):
        assert counted == stream_bytes(stream, wire)
        assert counted * rows * cols == encoded_bytes(stream_format(stream, wire), rows, cols)


@pytest.mark.parametrize(("cols", "most"), [(2048, 1.0), (768, 1.0), (1600, 1.0), (1000, 1.002), (100, 1.02)])
def test_q8_takes_what_plans_count_except_for_short_last_blocks(cols: int, most: float) -> None:
    assert 1.0 <= encoded_bytes("q8", 7, cols) / (7 * cols * stream_bytes("activation", "q8")) <= most
