"""A column's share of a model: which rectangles of which parameters it holds, and its parts in terms of operands.

A stage is a run of sublayers: the parts in order, and last the head if there is one. A slice of one sublayer holds some
heads (with those of K and V they share), some MLP columns, or some of the vocabulary. A bias that is added to a partial
sum belongs to the first slice. Pure: operands get their numbers from whoever asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from msgspec.structs import replace

from cleave.core.cost.resident import SublayerKind
from cleave.protocol.decoder import Range, Stack, View
from cleave.protocol.programs import Attention, Head, Mlp, Norm, Part, Weight

Name = Callable[[View], int]
"""The operand of a rectangle of a parameter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Sublayers [first, first + count), or the `index`-th of `of` slices of one."""

    first: int
    count: int
    index: int = 0
    of: int = 1

    def has_head(self, stack: Stack) -> bool:
        return self.first + self.count > len(stack.parts)

    def attentions(self, stack: Stack) -> Iterator[Attention]:
        return (part for part in self._parts(stack) if isinstance(part, Attention))

    def _parts(self, stack: Stack) -> tuple[Part, ...]:
        return stack.parts[self.first : self.first + self.count]

    def views(self, stack: Stack) -> list[View]:
        """Every rectangle it holds, each once."""
        found: dict[View, None] = {}

        def name(view: View) -> int:
            found[view] = None
            return 0

        self.described(stack, name)
        return list(found)

    def kv_widths(self, stack: Stack) -> list[int]:
        """Of each attention in it."""
        widths = [_heads(part, stack) * part.head_dim for part in self.attentions(stack)]
        if self.of == 1:
            return widths
        return [
            part.head_dim * _size(_cut(_heads(part, stack), self.index, self.of)) for part in self.attentions(stack)
        ]

    def described(self, stack: Stack, name: Name) -> tuple[tuple[Part, ...], Head | None]:
        cutter = _Cutter(stack, name, self.index, self.of)
        parts = tuple(cutter.part(part) for part in self._parts(stack))
        return parts, cutter.head(stack.head) if self.has_head(stack) and stack.head is not None else None


def kind_of(stack: Stack, sublayer: int) -> SublayerKind:
    if sublayer == len(stack.parts):
        return "head"
    return "attention" if isinstance(stack.parts[sublayer], Attention) else "mlp"


def sliceable(stack: Stack, sublayer: int) -> int:
    """Into how many slices a sublayer can be cut."""
    if sublayer == len(stack.parts):
        assert stack.head is not None
        return _width(stack, stack.head.weight)
    part = stack.parts[sublayer]
    return _heads(part, stack) if isinstance(part, Attention) else _width(stack, part.up)


def inner_width(stack: Stack, sublayer: int) -> int:
    """The widest activation inside a sublayer."""
    if sublayer == len(stack.parts):
        assert stack.head is not None
        return _width(stack, stack.head.weight)
    part = stack.parts[sublayer]
    return _width(stack, part.q if isinstance(part, Attention) else part.up)


class _Cutter:
    def __init__(self, stack: Stack, name: Name, index: int, of: int) -> None:
        self._stack, self._name, self._index, self._of = stack, name, index, of

    def part(self, part: Part) -> Part:
        if isinstance(part, Mlp):
            inner = self._range(_width(self._stack, part.up))
            return replace(
                part,
                norm=self._norm(part.norm),
                gate=None if part.gate is None else self._weight(part.gate, out=inner),
                up=self._weight(part.up, out=inner),
                down=self._weight(part.down, inner=inner),
            )
        heads = self._range(_heads(part, self._stack))
        group = _width(self._stack, part.q) // _width(self._stack, part.k)
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
        words = self._range(_width(self._stack, head.weight))
        return replace(
            head,
            norm=None if head.norm is None else self._norm(head.norm),
            weight=self._weight(head.weight, out=words),
            first=0 if words is None else words[0],
        )

    def _range(self, width: int) -> Range | None:
        """Of a slice; None is all of it."""
        return None if self._of == 1 else _cut(width, self._index, self._of)

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
        return self._name(self._stack.views[number])

    def _rectangle(self, number: int, rows: Range | None, cols: Range | None) -> int:
        view = self._stack.views[number]
        return self._name(View(view.parameter, _within(view.rows, rows), _within(view.cols, cols)))


def _heads(part: Attention, stack: Stack) -> int:
    """Of K and V: those of Q come in equal groups for each."""
    return _width(stack, part.k) // part.head_dim


def _width(stack: Stack, weight: Weight) -> int:
    """Of what a linear map gives."""
    view = stack.views[weight.weight]
    return _size(view.cols if weight.is_transposed else view.rows)


def _cut(width: int, index: int, of: int) -> Range:
    return width * index // of, width * (index + 1) // of


def _size(of: Range) -> int:
    return of[1] - of[0]


def _within(whole: Range, part: Range | None) -> Range:
    return whole if part is None else (whole[0] + part[0], whole[0] + part[1])
