"""Laws of shards: slices of a sublayer hold each of its numbers exactly once, and no others."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.stacks import Builder, decoder, decoders

from cleave.core.model.decoder import Attention, Decoder, Head, Mlp, Norm, Part, View, Weight
from cleave.core.model.shard import Shard, most_slices

steady = settings(max_examples=80, deadline=None, derandomize=True)


def slices_of(model: Decoder, sublayer: int, of: int) -> list[Shard]:
    return [Shard(first=sublayer, count=1, index=index, of=of) for index in range(of)]


def cells(view: View) -> Iterator[tuple[int, int, int]]:
    return ((view.parameter, row, col) for row in range(*view.rows) for col in range(*view.cols))


def norms(model: Decoder, sublayer: int) -> set[int]:
    """Parameters of a sublayer that every slice needs in full."""
    part = model.parts[sublayer] if sublayer < len(model.parts) else model.head
    assert part is not None
    norm = part.norm
    found = set() if norm is None else {norm.weight, *(() if norm.bias is None else (norm.bias,))}
    return {model.views[number].parameter for number in found}


def inner_adapters(model: Decoder, sublayer: int) -> set[int]:
    """The adapter side that slicing does not divide: A when outputs are sliced, B when inputs are."""
    if sublayer == len(model.parts):
        return set()
    part = model.parts[sublayer]
    last = part.o if isinstance(part, Attention) else part.down
    first = (part.q, part.k, part.v) if isinstance(part, Attention) else (part.up, part.gate)
    numbers = [weight.adapter[0] for weight in first if weight is not None and weight.adapter is not None]
    numbers += [] if last.adapter is None else [last.adapter[1]]
    return {model.views[number].parameter for number in numbers}


@steady
@given(decoders(), st.data())
def test_slices_tile_every_parameter_once_and_each_includes_the_norms(model: Decoder, data: st.DataObject) -> None:
    for sublayer in range(len(model.parts) + 1):
        of = data.draw(st.integers(1, most_slices(model, sublayer)))
        whole = {cell for view in Shard(first=sublayer, count=1).views(model) for cell in cells(view)}
        everywhere = norms(model, sublayer) | inner_adapters(model, sublayer)
        seen: list[tuple[int, int, int]] = []
        for shard in slices_of(model, sublayer, of):
            mine = [cell for view in shard.views(model) for cell in cells(view)]
            assert len(mine) == len(set(mine)), "no number is twice on a device"
            kept = {cell for cell in mine if cell[0] in everywhere}
            assert kept == {cell for cell in whole if cell[0] in everywhere}, "norms are whole in each slice"
            seen += [cell for cell in mine if cell[0] not in everywhere]
        assert len(seen) == len(set(seen)), "no number is in two slices"
        assert set(seen) == {cell for cell in whole if cell[0] not in everywhere}, "every number is in some slice"


@steady
@given(decoders(), st.data())
def test_the_shapes_of_a_slice_fit_together(model: Decoder, data: st.DataObject) -> None:
    """As a device multiplies them: out x in, or in x out."""
    for sublayer in range(len(model.parts) + 1):
        of = data.draw(st.integers(1, most_slices(model, sublayer)))
        for shard in slices_of(model, sublayer, of):
            views: list[View] = []

            def name(view: View, views: list[View] = views) -> int:
                views.append(view)
                return len(views) - 1

            parts, head = shard.cut(model, name)
            if head is not None:
                _check_linear(views, head.weight, model.hidden, None)
                continue
            (part,) = parts
            assert (views[part.norm.weight].height, views[part.norm.weight].width) == (1, model.hidden)
            if isinstance(part, Attention):
                q, k, v = (_check_linear(views, one, model.hidden, None) for one in (part.q, part.k, part.v))
                assert k == v
                assert k % part.head_dim == 0, "heads are whole"
                assert q % k == 0
                assert (k,) == shard.kv_widths(model)
                assert _check_linear(views, part.o, q, None) == model.hidden
            else:
                inner = _check_linear(views, part.up, model.hidden, None)
                assert part.gate is None or _check_linear(views, part.gate, model.hidden, None) == inner
                assert _check_linear(views, part.down, inner, None) == model.hidden


def _check_linear(views: list[View], weight: Weight, into: int, _: None) -> int:
    """Check the shapes of a linear layer and return its output width."""
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
@given(decoders(), st.data())
def test_the_bias_of_a_summed_output_is_added_once(model: Decoder, data: st.DataObject) -> None:
    for sublayer, last in enumerate(_last(part) for part in model.parts):
        of = data.draw(st.integers(1, most_slices(model, sublayer)))
        found = [_last(shard.cut(model, lambda view: 0)[0][0]).bias for shard in slices_of(model, sublayer, of)]
        assert [bias is not None for bias in found] == [last.bias is not None, *[False] * (of - 1)]


def _last(part: Part) -> Weight:
    return part.o if isinstance(part, Attention) else part.down


@steady
@given(decoders(), st.data())
def test_each_vocabulary_slice_begins_where_the_previous_one_ended(model: Decoder, data: st.DataObject) -> None:
    sublayer = len(model.parts)
    of = data.draw(st.integers(1, most_slices(model, sublayer)))
    first = 0
    for shard in slices_of(model, sublayer, of):
        widths: list[View] = []
        _, head = shard.cut(model, lambda view, widths=widths: widths.append(view) or len(widths) - 1)
        assert isinstance(head, Head)
        assert head.first == first
        assert widths[head.weight.weight].height > 0
        first += widths[head.weight.weight].height
    assert first == most_slices(model, sublayer)


@steady
@given(st.lists(st.integers(1, 3), min_size=1, max_size=5))
def test_stages_together_hold_every_parameter_once(counts: list[int]) -> None:
    """Runs of sublayers, with the head last, hold every parameter of the model once."""
    model = decoder(layers=2).decoder
    total = len(model.parts) + 1
    cuts = [0, *(min(cut, total) for cut in itertools.accumulate(counts)), total]
    shards = [Shard(first=first, count=last - first) for first, last in itertools.pairwise(cuts) if last > first]
    held = [cell for shard in shards for view in shard.views(model) for cell in cells(view)]
    everything = {
        (number, row, col)
        for number, parameter in enumerate(model.parameters)
        for row in range(parameter.rows)
        for col in range(parameter.cols)
    }
    assert len(held) == len(set(held))
    assert set(held) == everything
    assert [shard.has_head(model) for shard in shards] == [shard.stop == total for shard in shards]


def test_slicing_a_fused_matrix_stays_within_each_of_its_parts() -> None:
    """GPT-2's q, k and v lie side by side: the second slice of k begins one slice width after the start of k."""
    builder = Builder(4, np.random.default_rng(0))
    model = builder.decoder([builder.attention(2, 1, 2, beside=True)], None)
    views = Shard(first=0, count=1, index=1, of=2).views(model)
    assert [view.cols for view in views if view.height == 4 and view.cols[1] > 4] == [(6, 8), (10, 12)]


def test_parts_use_the_operand_numbers_they_are_given() -> None:
    model = decoder(layers=1).decoder
    numbers = itertools.count(100)
    given_numbers: set[int] = set()

    def name(view: View) -> int:
        given_numbers.add(number := next(numbers))
        return number

    parts, head = Shard(first=0, count=3).cut(model, name)
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
