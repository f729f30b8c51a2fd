"""Laws of refusal: a program that does not fit its operands is refused with a reason, before anything is computed."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.device_bench import Bench
from tests.support.one_layer import CHUNK, HIDDEN, PLAIN, ROWS, Layer

from cleave.core.model.decoder import Attention, Mlp, Weight
from cleave.errors import ProtocolError
from cleave.protocol.programs import Backward, Collect, Forward


def _replaced(part: Any, name: str, **changed: Any) -> Any:
    return msgspec.structs.replace(part, **{name: msgspec.structs.replace(getattr(part, name), **changed)})


def malformed(layer: Layer) -> dict[str, dict[str, Any]]:
    """Variants of a forward program that make no sense."""
    attention, mlp, put = layer.attention, layer.mlp, layer.bench.put
    head = layer.maker.head(9, "rms", **PLAIN)
    targets = put(np.zeros((CHUNK, 1), dtype=np.float32))
    small = put(np.zeros((2, 3), dtype=np.float32))
    three_heads = Weight(weight=put(np.zeros((HIDDEN, HIDDEN), dtype=np.float32)))
    with_head: dict[str, Any] = {"head": head, "targets": targets}
    changes: dict[str, dict[str, Any]] = {
        "no part": {"parts": ()},
        "a slice of two": {"is_slice": True},
        "a slice with a head": {"is_slice": True, "parts": (attention,), **with_head},
        "a row below 0": {"first_row": -1},
        "a row beyond the sequence": {"first_row": ROWS},
        "rows beyond the sequence": {"sequence": CHUNK - 1},
        "no sequence": {"sequence": 0},
        "a sequence beyond counting": {"sequence": 1 << 63},
        "a rotary row below 0": {"rotary_row": -1},
        "a rotary row beyond the table": {"rotary_row": ROWS - CHUNK + 1},
        "a rotary row beyond counting": {"rotary_row": 1 << 63},
        "no rotary table": {"rotary": None},
        "a rotary table of another width": {"rotary": small},
        "a mask of another size": {"mask": small},
        "an x of another width": {"x": small},
        "a head without targets": {"head": head},
        "targets without a head": {"targets": targets},
        "targets of another size": {"head": head, "targets": small},
        "words below 0": {**with_head, "head": msgspec.structs.replace(head, first=-1)},
        "words beyond counting": {**with_head, "head": msgspec.structs.replace(head, first=(1 << 64) - 1)},
        "words that end beyond counting": {**with_head, "head": msgspec.structs.replace(head, first=(1 << 31) - 8)},
        "a vocabulary of another width": {**with_head, "head": _replaced(head, "weight", weight=small)},
    }
    parts: dict[str, Attention | Mlp] = {
        "a head_dim of 0": msgspec.structs.replace(attention, head_dim=0),
        "a head_dim below 0": msgspec.structs.replace(attention, head_dim=-4),
        "an odd head_dim": msgspec.structs.replace(attention, head_dim=1),
        "a head_dim that does not divide": msgspec.structs.replace(attention, head_dim=6),
        "a head_dim beyond counting": msgspec.structs.replace(attention, head_dim=1 << 63),
        "a window of 0": msgspec.structs.replace(attention, window=0),
        "a scale that is no number": msgspec.structs.replace(attention, scale=math.nan),
        "an eps below 0": _replaced(mlp, "norm", eps=-1.0),
        "an eps without end": _replaced(mlp, "norm", eps=math.inf),
        "a norm of another width": _replaced(mlp, "norm", weight=small),
        "a norm's bias of another width": _replaced(mlp, "norm", bias=small),
        "queries that are fewer than keys": msgspec.structs.replace(attention, q=attention.k),
        "keys that no equal groups of heads share": msgspec.structs.replace(attention, q=three_heads, o=three_heads),
        "values that are wider than keys": msgspec.structs.replace(attention, v=attention.q),
        "a weight the other way round": _replaced(mlp, "down", is_transposed=True),
        "a weight of another size": _replaced(mlp, "up", weight=small),
        "an output of another size": _replaced(attention, "o", weight=small),
        "a bias of another size": _replaced(mlp, "up", bias=small),
        "an adapter of another size": _replaced(mlp, "up", adapter=(small, small)),
        "an adapter's scale without end": _replaced(mlp, "up", scale=math.inf),
        "a gate of another size": msgspec.structs.replace(mlp, gate=mlp.down),
    }
    return changes | {what: {"parts": (part,)} for what, part in parts.items()}


@pytest.mark.parametrize("what", malformed(Layer()))
def test_a_malformed_program_is_refused_with_a_reason(what: str) -> None:
    layer = Layer()
    changed = malformed(layer)[what]
    for unit in (layer.forward()[0], layer.backward()[-1]):
        with pytest.raises(ProtocolError):
            layer.bench.run(msgspec.structs.replace(unit, **changed))


@pytest.mark.parametrize("what", ["dy", "unknown", "twice", "input"])
def test_a_malformed_backward_is_refused_with_a_reason(what: str) -> None:
    layer = Layer()
    for unit in layer.forward():
        layer.bench.done(unit)
    last, weight = layer.backward()[0], layer.mlp.up.weight
    changed: dict[str, Any] = {
        "dy": {"dy": weight},
        "unknown": {"accumulators": ((1 << 60, 5000),)},
        "twice": {"accumulators": ((weight, 5000), (layer.mlp.down.weight, 5000))},
        "input": {"accumulators": ((last.x, 5000),)},
    }[what]
    with pytest.raises(ProtocolError):
        layer.bench.run(msgspec.structs.replace(last, **changed))


def test_a_state_of_another_segment_is_refused() -> None:
    layer = Layer()
    layer.bench.done(layer.forward()[0])
    twice = layer.through(layer.attention, layer.attention)
    with pytest.raises(ProtocolError, match="expected state"):
        layer.bench.run(list(twice.forward(layer.x, CHUNK, layer.state))[1])
    with pytest.raises(ProtocolError, match="expected state"):
        layer.bench.run(msgspec.structs.replace(layer.forward()[1], sequence=ROWS - 1))


@pytest.mark.parametrize(("rows", "cols"), [(0, 3), (3, -1)])
def test_an_accumulator_of_size_zero_is_refused(rows: int, cols: int) -> None:
    bench = Bench()
    with pytest.raises(ProtocolError, match="at least 1 x 1"):
        bench.run(Collect(accumulator=1, rows=rows, cols=cols))


_integers = st.sampled_from([-1, 0, 1, 2, 3, 4, 12, (1 << 31) - 1, 1 << 63]) | st.integers(1, 30)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.data())
def test_a_program_with_any_numbers_is_computed_waits_or_is_refused(data: st.DataObject) -> None:
    """Any integer in a program may be replaced by any other; the only error is a ProtocolError."""
    layer = Layer()
    head = layer.maker.head(9, "rms", **PLAIN)
    targets = layer.bench.put(np.full((CHUNK, 1), 1e30, dtype=np.float32))
    unit: Forward | Backward = data.draw(st.sampled_from([*layer.forward(), layer.backward()[-1]]))
    if data.draw(st.booleans()):
        unit = msgspec.structs.replace(unit, head=head, targets=targets)
    for _ in range(data.draw(st.integers(1, 3))):
        unit = _mutated(unit, data)
    with suppress(ProtocolError):
        layer.bench.run(unit)


def _mutated(struct: Any, data: st.DataObject) -> Any:
    """Replace one integer somewhere in a struct."""
    names = [name for name in struct.__struct_fields__ if _has_numbers(getattr(struct, name))]
    name = data.draw(st.sampled_from(names))
    value = getattr(struct, name)
    if isinstance(value, int):
        return msgspec.structs.replace(struct, **{name: data.draw(_integers)})
    if isinstance(value, tuple):
        at = data.draw(st.integers(0, len(value) - 1))
        return msgspec.structs.replace(struct, **{name: (*value[:at], _mutated(value[at], data), *value[at + 1 :])})
    return msgspec.structs.replace(struct, **{name: _mutated(value, data)})


def _has_numbers(value: object) -> bool:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return is_number or isinstance(value, msgspec.Struct) or (isinstance(value, tuple) and len(value) > 0)
