"""Laws of a column's share of a model (`server/segments.py`): slices hold every number, each once, and no others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.stacks import Builder, decoder

from cleave.core.plan.resident.stages import Stage
from cleave.protocol.decoder import Stack, View
from cleave.protocol.programs import Attention, Head, Mlp, Norm, Part, Weight
from cleave.server.grain import sublayers
from cleave.server.segments import Share, inner_width, sliceable

steady = settings(max_examples=80, deadline=None, derandomize=True)


@st.composite
def stacks(draw: st.DrawFn) -> Stack:
    """One of each part, in every manner a model may have it."""
    builder = Builder(draw(st.integers(1, 3)) * 2, np.random.default_rng(0), is_frozen=draw(st.booleans()))
    how = {
        "bias": draw(st.booleans()),
        "is_transposed": draw(st.booleans()),
        "rank": draw(st.integers(0, 2)),
        "norm": draw(st.sampled_from(["rms", "layer"])),
    }
    attention = builder.attention(
        draw(st.integers(1, 5)), draw(st.integers(1, 3)), draw(st.integers(1, 2)) * 2, beside=draw(st.booleans()), **how
    )
    mlp = builder.mlp(draw(st.integers(1, 9)), gated=draw(st.booleans()), **how)
    return builder.stack([attention, mlp], builder.head(draw(st.integers(1, 9)), bias=draw(st.booleans())))


def shares(stack: Stack, sublayer: int, of: int) -> list[Share]:
    return [Share(first=sublayer, count=1, index=index, of=of) for index in range(of)]


def cells(view: View) -> Iterator[tuple[int, int, int]]:
    return ((view.parameter, row, col) for row in range(*view.rows) for col in range(*view.cols))


def norms(stack: Stack, sublayer: int) -> set[int]:
    """Parameters of a sublayer that every slice needs whole."""
    part = stack.parts[sublayer] if sublayer < len(stack.parts) else stack.head
    assert part is not None
    norm = part.norm
    found = set() if norm is None else {norm.weight, *(() if norm.bias is None else (norm.bias,))}
    return {stack.views[number].parameter for number in found}


def inner_adapters(stack: Stack, sublayer: int) -> set[int]:
    """Of adapters, the side that the cut does not divide: A where outputs are cut, B where inputs are."""
    if sublayer == len(stack.parts):
        return set()
    part = stack.parts[sublayer]
    last = part.o if isinstance(part, Attention) else part.down
    first = (part.q, part.k, part.v) if isinstance(part, Attention) else (part.up, part.gate)
    numbers = [weight.adapter[0] for weight in first if weight is not None and weight.adapter is not None]
    numbers += [] if last.adapter is None else [last.adapter[1]]
    return {stack.views[number].parameter for number in numbers}


@steady
@given(stacks(), st.data())
def test_slices_tile_every_parameter_once_and_each_has_the_norms(stack: Stack, data: st.DataObject) -> None:
    for sublayer in range(len(stack.parts) + 1):
        of = data.draw(st.integers(1, sliceable(stack, sublayer)))
        whole = {cell for view in Share(first=sublayer, count=1).views(stack) for cell in cells(view)}
        everywhere = norms(stack, sublayer) | inner_adapters(stack, sublayer)
        seen: list[tuple[int, int, int]] = []
        for share in shares(stack, sublayer, of):
            mine = [cell for view in share.views(stack) for cell in cells(view)]
            assert len(mine) == len(set(mine)), "no number twice on a device"
            kept = {cell for cell in mine if cell[0] in everywhere}
            assert kept == {cell for cell in whole if cell[0] in everywhere}, "norms are whole in each slice"
            seen += [cell for cell in mine if cell[0] not in everywhere]
        assert len(seen) == len(set(seen)), "no number in two slices"
        assert set(seen) == {cell for cell in whole if cell[0] not in everywhere}, "no number in none"


@steady
@given(stacks(), st.data())
def test_the_shapes_of_a_slice_fit_together(stack: Stack, data: st.DataObject) -> None:
    """As a device will multiply them: out x in, or in x out."""
    for sublayer in range(len(stack.parts) + 1):
        of = data.draw(st.integers(1, sliceable(stack, sublayer)))
        for share in shares(stack, sublayer, of):
            views: list[View] = []

            def name(view: View, views: list[View] = views) -> int:
                views.append(view)
                return len(views) - 1

            parts, head = share.described(stack, name)
            if head is not None:
                _check_linear(views, head.weight, stack.hidden, None)
                continue
            (part,) = parts
            assert (views[part.norm.weight].height, views[part.norm.weight].width) == (1, stack.hidden)
            if isinstance(part, Attention):
                q, k, v = (_check_linear(views, one, stack.hidden, None) for one in (part.q, part.k, part.v))
                assert k == v
                assert k % part.head_dim == 0, "heads are whole"
                assert q % k == 0
                assert [k] == share.kv_widths(stack)
                assert _check_linear(views, part.o, q, None) == stack.hidden
            else:
                inner = _check_linear(views, part.up, stack.hidden, None)
                assert part.gate is None or _check_linear(views, part.gate, stack.hidden, None) == inner
                assert _check_linear(views, part.down, inner, None) == stack.hidden


def _check_linear(views: list[View], weight: Weight, into: int, _: None) -> int:
    """Its output width."""
    view = views[weight.weight]
    out, wide = (view.width, view.height) if weight.is_transposed else (view.height, view.width)
    assert wide == into
    if weight.bias is not None:
        assert (views[weight.bias].height, views[weight.bias].width) == (1, out)
    if weight.adapter is not None:
        a, b = (views[number] for number in weight.adapter)
        assert (a.width, b.height) == (into, out)
        assert a.height == b.width
    return out


@steady
@given(stacks(), st.data())
def test_a_bias_of_a_summed_output_is_added_once(stack: Stack, data: st.DataObject) -> None:
    for sublayer, last in enumerate(_last(part) for part in stack.parts):
        of = data.draw(st.integers(1, sliceable(stack, sublayer)))
        found = [_last(share.described(stack, lambda view: 0)[0][0]).bias for share in shares(stack, sublayer, of)]
        assert [bias is not None for bias in found] == [last.bias is not None, *[False] * (of - 1)]


def _last(part: Part) -> Weight:
    return part.o if isinstance(part, Attention) else part.down


@steady
@given(stacks(), st.data())
def test_slices_of_the_vocabulary_begin_where_the_last_one_ended(stack: Stack, data: st.DataObject) -> None:
    sublayer = len(stack.parts)
    of = data.draw(st.integers(1, sliceable(stack, sublayer)))
    first = 0
    for share in shares(stack, sublayer, of):
        widths: list[View] = []
        _, head = share.described(stack, lambda view, widths=widths: widths.append(view) or len(widths) - 1)
        assert isinstance(head, Head)
        assert head.first == first
        assert widths[head.weight.weight].height > 0
        first += widths[head.weight.weight].height
    assert first == sliceable(stack, sublayer)


@steady
@given(st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_stages_hold_the_sublayers_between_them(counts: list[int]) -> None:
    """Runs of sublayers, with the head last: together, every parameter of the model once."""
    stack = decoder(layers=2).stack
    total = len(stack.parts) + 1
    cuts = [0, *(min(cut, total) for cut in itertools.accumulate(counts)), total]
    stages = [
        Stage(first=first, count=last - first, slices=()) for first, last in itertools.pairwise(cuts) if last > first
    ]
    held = [
        cell
        for stage in stages
        for view in Share(first=stage.first, count=stage.count).views(stack)
        for cell in cells(view)
    ]
    everything = {
        (number, row, col)
        for number, parameter in enumerate(stack.parameters)
        for row in range(parameter.rows)
        for col in range(parameter.cols)
    }
    assert len(held) == len(set(held))
    assert set(held) == everything
    assert [Share(first=s.first, count=s.count).has_head(stack) for s in stages] == [
        s.first + s.count == total for s in stages
    ]


@steady
@given(stacks())
def test_the_planner_sees_each_sublayer_as_it_is(stack: Stack) -> None:
    attention, mlp, head = sublayers(stack)
    assert [one.kind for one in (attention, mlp, head)] == ["attention", "mlp", "head"]
    for number, one in enumerate((attention, mlp, head)):
        views = Share(first=number, count=1).views(stack)
        assert one.params == sum(view.area for view in views)
        assert one.trained == sum(view.area for view in views if stack.parameters[view.parameter].is_trained)
        assert one.inner == inner_width(stack, number)
        assert one.slices == sliceable(stack, number)
    assert (mlp.kv_width, head.kv_width) == (0, 0)
    assert attention.kv_width == Share(first=0, count=1).kv_widths(stack)[0]


def test_a_view_of_a_matrix_that_holds_several_is_cut_within_its_own_part() -> None:
    """GPT-2's q, k and v lie side by side: the second slice of k begins where k begins, and its width further."""
    builder = Builder(4, np.random.default_rng(0))
    stack = builder.stack([builder.attention(2, 1, 2, beside=True)], None)
    views = Share(first=0, count=1, index=1, of=2).views(stack)
    assert [view.cols for view in views if view.height == 4 and view.cols[1] > 4] == [(6, 8), (10, 12)]


def test_parts_are_described_with_the_numbers_they_are_given() -> None:
    stack = decoder(layers=1).stack
    numbers = itertools.count(100)
    given_numbers: set[int] = set()

    def name(view: View) -> int:
        given_numbers.add(number := next(numbers))
        return number

    parts, head = Share(first=0, count=3).described(stack, name)
    assert head is not None
    assert {number for part in (*parts, head) for number in _numbers(part)} == given_numbers


def _numbers(struct: Attention | Mlp | Head) -> Iterator[int]:
    for name in struct.__struct_fields__:
        value = getattr(struct, name)
        if isinstance(value, Weight | Norm):
            yield from (value.weight, *(() if value.bias is None else (value.bias,)))
            if isinstance(value, Weight) and value.adapter is not None:
                yield from value.adapter
        else:
            assert not isinstance(value, msgspec.Struct)
