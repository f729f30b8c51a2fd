"""What a device can be told to compute: a closed set of programs, on operands named by number.

`Gemm` is one block of a product. `Forward` and `Backward` take some rows of one sequence through parts of a model whose
weights the device holds; `Collect` reads a gradient that backward tasks added to; `Hold` brings weights ahead. A part
is a residual sublayer, x + f(norm(x)); a head is the last norm, the vocabulary and the loss, so that logits never
travel. A slice (some heads, some MLP columns, some of the vocabulary) returns f(norm(x)) alone, to be added up by the
server in fp32.

The same structs describe a whole model to the server, where a number is that of a `View` of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from cleave.core.model.decoder import Head, Part, weights_of

Layout = Literal["nt", "nn", "tn"]
"""How the stored operands enter the product: nt A B^T, nn A B, tn A^T B. No side ever transposes a copy."""


class GemmProgram(msgspec.Struct, frozen=True, kw_only=True, tag_field="program", tag="gemm"):
    """The sum over terms of op(a) op(b): one block of a product whose inner side may be several operands end to end."""

    layout: Layout
    terms: tuple[tuple[int, int], ...]
    """(operand a, operand b)"""
    rows: int
    cols: int


# ------------------------------------------------------------------------------------------------ units


class _Unit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Rows of one sequence through parts, and through the head if there is one."""

    parts: tuple[Part, ...]
    head: Head | None = None
    x: int
    """rows x hidden: what enters the first part"""
    state: int
    """What the device keeps for this sequence: K and V of each attention, with their gradients once there is one."""
    first_row: int
    """Where the rows begin in their sequence: forward they come in order, backward in reverse."""
    sequence: int
    """Rows of the whole sequence."""
    is_slice: bool = False
    """Without the residual: a partial sum, of one part alone."""
    mask: int | None = None
    """1 x sequence: 0 where a key is padding, 1 elsewhere; rows that see no key give 0."""
    rotary: int | None = None
    """positions x 2 head_dim: cosines beside sines, rotated half by half; this unit's begin at row `rotary_row`."""
    rotary_row: int = 0
    targets: int | None = None
    """With a head, rows x 1: the number of the right word, negative where there is none."""


class Forward(_Unit, frozen=True, kw_only=True, omit_defaults=True, tag_field="program", tag="forward"):
    """Returns rows x hidden; with a head rows x 2: logsumexp over its vocabulary, and the target's logit, 0 where the
    target is not in it. Silent: it is only to rebuild a state, and returns 1 x 1."""

    is_silent: bool = False


class Backward(_Unit, frozen=True, kw_only=True, omit_defaults=True, tag_field="program", tag="backward"):
    """Returns dx, rows x hidden, or 1 x 1 if nobody wants it; recomputes what is inside from x."""

    dy: int
    """rows x hidden; with a head rows x 2: logsumexp over the whole vocabulary, and dloss of the row."""
    accumulators: tuple[tuple[int, int], ...] = ()
    """(operand, where its gradient is added up): an accumulator has the shape of its operand and starts from zero."""
    wants_dx: bool = True


class Collect(msgspec.Struct, frozen=True, kw_only=True, tag_field="program", tag="collect"):
    """Returns an accumulator; the server drops it once it has all of it."""

    accumulator: int
    rows: int
    cols: int


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag_field="program", tag="hold"):
    """Operands for later, sent ahead with it: returns a 1 x 1 zero once they are whole."""

    operands: tuple[int, ...]


Program = GemmProgram | Forward | Backward | Collect | Hold


def operands(program: Program) -> tuple[int, ...]:
    """What must have been sent before it can run, weights last; states and accumulators are a device's own."""
    match program:
        case GemmProgram(terms=terms):
            return tuple(operand for term in terms for operand in term)
        case Collect():
            return ()
        case Hold(operands=ahead):
            return ahead
        case Forward() | Backward():
            brought = (
                program.x,
                program.dy if isinstance(program, Backward) else None,
                program.mask,
                program.rotary,
                program.targets,
            )
            return (*(number for number in brought if number is not None), *parameters(program))


def parameters(program: Forward | Backward) -> Iterator[int]:
    """Its weights, biases and adapters."""
    for part in (*program.parts, *(() if program.head is None else (program.head,))):
        if part.norm is not None:
            yield from (number for number in (part.norm.weight, part.norm.bias) if number is not None)
        for weight in weights_of(part):
            numbers = (weight.weight, weight.bias, *(weight.adapter or ()))
            yield from (number for number in numbers if number is not None)
