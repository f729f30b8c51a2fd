"""The piece of a model that a device holds: a run of sublayers, or one slice of a single sublayer.

A slice holds some heads (with the K and V heads they share), some MLP columns, or some of the vocabulary; every slice
has complete norms, and a bias that is added to a partial sum belongs to the first slice. A `Shard` is only numbers, so
it can name a piece of any model; together with a `Decoder` it knows its rectangles of parameters (`views`) and its
parts in terms of operands (`cut`). Operands get their numbers from the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from cleave.core.model.decoder import Attention, Decoder, Head, Mlp, Norm, Part, Range, View, Weight

Name = Callable[[View], int]
"""Maps a rectangle of a parameter to its operand."""


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shard:
    """Sublayers [first, first + count), or slice `index` of `of` of one sublayer."""

    first: int
    count: int
    index: int = 0
    of: int = 1

    def __post_init__(self) -> None:
        assert self.first >= 0, self
        assert self.count > 0, self
        assert 0 <= self.index < self.of, self
        assert self.of == 1 or self.count == 1, self

    @property
    def stop(self) -> int:
        """One past the last sublayer."""
        return self.first + self.count

    @property
    def is_slice(self) -> bool:
        return self.of > 1

    def has_head(self, decoder: Decoder) -> bool:
        return self.stop > len(decoder.parts)

    def attentions(self, decoder: Decoder) -> Iterator[Attention]:
        return (part for part in decoder.parts[self.first : self.stop] if isinstance(part, Attention))

    def kv_widths(self, decoder: Decoder) -> tuple[int, ...]:
        """Width of K (and of V) in each attention of the shard."""
        return tuple(
            part.head_dim * _size(_within(decoder.kv_heads(part), self.index, self.of))
            for part in self.attentions(decoder)
        )

    def views(self, decoder: Decoder) -> list[View]:
        """Every rectangle of the shard, each once."""
        found: dict[View, None] = {}

        def name(view: View) -> int:
            found[view] = None
            return 0

        self.cut(decoder, name)
        return list(found)

    def cut(self, decoder: Decoder, name: Name) -> tuple[tuple[Part, ...], Head | None]:
        """Parts and head of the shard, with weights given as operands."""
        knife = _Knife(decoder, name, self.index, self.of)
        parts = tuple(knife.part(part) for part in decoder.parts[self.first : self.stop])
        head = decoder.head if self.has_head(decoder) else None
        return parts, None if head is None else knife.head(head)


def standing_alone(decoder: Decoder, shard: Shard) -> tuple[Decoder, tuple[int, ...]]:
    """Describe a shard that is no slice as a decoder of its own; also return its parameters' numbers in the whole."""
    assert not shard.is_slice, "a slice is no decoder"
    views: dict[View, int] = {}
    numbers: dict[int, int] = {}

    def name(view: View) -> int:
        own = numbers.setdefault(view.parameter, len(numbers))
        return views.setdefault(view._replace(parameter=own), len(views))

    parts, head = shard.cut(decoder, name)
    alone = Decoder(
        hidden=decoder.hidden,
        parts=parts,
        head=head,
        parameters=tuple(decoder.parameters[number] for number in numbers),
        views=tuple(views),
    )
    return alone, tuple(numbers)


def most_slices(decoder: Decoder, sublayer: int) -> int:
    """Maximum number of slices of a sublayer: its K and V heads, MLP columns or words."""
    match decoder.sublayers[sublayer]:
        case Attention() as part:
            return decoder.kv_heads(part)
        case Mlp(up=up):
            return decoder.out_width(up)
        case Head(weight=weight):
            return decoder.out_width(weight)


class _Knife:
    """Cuts slice `index` of `of` out of sublayers; 0 of 1 is the whole sublayer."""

    def __init__(self, decoder: Decoder, name: Name, index: int, of: int) -> None:
        self._decoder, self._name, self._index, self._of = decoder, name, index, of

    def part(self, part: Part) -> Part:
        if isinstance(part, Mlp):
            inner = self._range(self._decoder.out_width(part.up))
            return replace(
                part,
                norm=self._norm(part.norm),
                gate=None if part.gate is None else self._weight(part.gate, out=inner),
                up=self._weight(part.up, out=inner),
                down=self._weight(part.down, inner=inner),
            )
        heads = self._range(self._decoder.kv_heads(part))
        group = self._decoder.out_width(part.q) // self._decoder.out_width(part.k)
        keys = None if heads is None else (heads[0] * part.head_dim, heads[1] * part.head_dim)
        queries = None if keys is None else (keys[0] * group, keys[1] * group)
        return replace(
            part,
            norm=self._norm(part.norm),
            q=self._weight(part.q, out=queries),
            k=self._weight(part.k, out=keys),
            v=self._weight(part.v, out=keys),
            o=self._weight(part.o, inner=queries),
        )

    def head(self, head: Head) -> Head:
        words = self._range(self._decoder.out_width(head.weight))
        return replace(
            head,
            norm=None if head.norm is None else self._norm(head.norm),
            weight=self._weight(head.weight, out=words),
            first=0 if words is None else words[0],
        )

    def _range(self, width: int) -> Range | None:
        """The slice's part of a width; None means all of it."""
        return None if self._of == 1 else _within(width, self._index, self._of)

    def _norm(self, norm: Norm) -> Norm:
        return replace(
            norm, weight=self._whole(norm.weight), bias=None if norm.bias is None else self._whole(norm.bias)
        )

    def _weight(self, weight: Weight, out: Range | None = None, inner: Range | None = None) -> Weight:
        is_partial = inner is not None and self._index > 0
        rows, cols = (inner, out) if weight.is_transposed else (out, inner)
        return replace(
            weight,
            weight=self._rectangle(weight.weight, rows, cols),
            bias=None if weight.bias is None or is_partial else self._rectangle(weight.bias, None, out),
            adapter=None
            if weight.adapter is None
            else (self._rectangle(weight.adapter[0], None, inner), self._rectangle(weight.adapter[1], out, None)),
        )

    def _whole(self, number: int) -> int:
        return self._name(self._decoder.views[number])

    def _rectangle(self, number: int, rows: Range | None, cols: Range | None) -> int:
        view = self._decoder.views[number]
        return self._name(View(view.parameter, _shifted(view.rows, rows), _shifted(view.cols, cols)))


def _within(width: int, index: int, of: int) -> Range:
    return width * index // of, width * (index + 1) // of


def _size(of: Range) -> int:
    return of[1] - of[0]


def _shifted(whole: Range, part: Range | None) -> Range:
    return whole if part is None else (whole[0] + part[0], whole[0] + part[1])
