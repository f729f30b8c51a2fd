"""Programs a device can run: a closed set, on operands named by number.

`Gemm` is one block of a product. `Forward` and `Backward` take some rows of one sequence through parts of a model whose
weights the device holds; `Collect` reads a gradient that backward tasks accumulated; `Hold` sends weights ahead.
`SquareSum`, `Update` and `Copy` serve leased weights, whose optimizer runs on the device. A part is a residual
sublayer, x + f(norm(x)); a head is the last norm, the vocabulary and the loss, so that logits never travel. A slice
(some heads, some MLP columns, some of the vocabulary) returns f(norm(x)) alone, for the server to sum in fp32.

The same structs describe a whole model to the server, where a number refers to a `View` of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from cleave.core.model.decoder import Head, Part, weights_of
from cleave.core.model.keeping import Keeping
from cleave.core.model.update_rule import Rule

Layout = Literal["nt", "nn", "tn"]
"""How the stored operands enter the product: nt A B^T, nn A B, tn A^T B. Neither side ever makes a transposed copy."""


class GemmProgram(msgspec.Struct, frozen=True, kw_only=True, tag_field="program", tag="gemm"):
    """The sum over terms of op(a) op(b): one block of a product whose inner dimension may span several operands."""

    layout: Layout
    terms: tuple[tuple[int, int], ...]
    """(operand a, operand b)"""
    rows: int
    cols: int


# ------------------------------------------------------------------------------------------------ units


class _Unit(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Run rows of one sequence through parts, then through the head if there is one."""

    parts: tuple[Part, ...]
    head: Head | None = None
    x: int
    """rows x hidden: input of the first part"""
    state: int
    """The device's state of this sequence: K and V of each attention, and during backward their gradients."""
    first_row: int
    """First row within the sequence; units of a sequence come in order forward, in reverse order backward."""
    sequence: int
    """Length of the whole sequence, in rows."""
    is_slice: bool = False
    """Return a partial sum of a single part, without the residual."""
    mask: int | None = None
    """1 x sequence: 0 where a key is padding, 1 elsewhere; rows that see no key give 0."""
    rotary: int | None = None
    """positions x 2 head_dim: cosines beside sines, rotated half by half; this unit's rows start at `rotary_row`."""
    rotary_row: int = 0
    targets: int | None = None
    """With a head, rows x 1: index of the target token, negative where there is none."""


class Forward(_Unit, frozen=True, kw_only=True, omit_defaults=True, tag_field="program", tag="forward"):
    """Return rows x hidden; with a head rows x 2: logsumexp over its vocabulary, and the target's logit, 0 where the
    target is not in it. A silent unit only rebuilds a state and returns 1 x 1."""

    is_silent: bool = False
    keeps: Keeping = "nothing"
    """What to keep in the state for backward, the same in every unit of a sequence. What is missing there is
    recomputed, so that results do not depend on it."""


class Backward(_Unit, frozen=True, kw_only=True, omit_defaults=True, tag_field="program", tag="backward"):
    """Return dx, rows x hidden, or 1 x 1 without `wants_dx`; recomputes from x what forward did not keep."""

    dy: int
    """rows x hidden; with a head rows x 2: logsumexp over the whole vocabulary, and the row's dloss."""
    accumulators: tuple[tuple[int, int], ...] = ()
    """(operand, accumulator of its gradient); an accumulator has its operand's shape and starts at zero."""
    wants_dx: bool = True


class Collect(msgspec.Struct, frozen=True, kw_only=True, tag_field="program", tag="collect", omit_defaults=True):
    """Return an accumulator, or a weight or state that updates have changed; the server drops what it needs no more."""

    accumulator: int
    rows: int
    """Of all together."""
    cols: int
    below: tuple[int, ...] = ()
    """Others of as many columns, to be returned below it: small ones need no task each."""
    first_row: int = 0
    """Of an operand alone: where the rows begin, so that a large one can be read in pieces."""


class Hold(msgspec.Struct, frozen=True, kw_only=True, tag_field="program", tag="hold"):
    """Keep operands, sent ahead, for later tasks; return a 1 x 1 zero once they are complete."""

    operands: tuple[int, ...]


class SquareSum(msgspec.Struct, frozen=True, kw_only=True, tag_field="program", tag="square_sum"):
    """Return 1 x n: the sum of squares of each accumulator, for clipping by the norm of all gradients."""

    accumulators: tuple[int, ...]


class Leased(msgspec.Struct, frozen=True, array_like=True):
    """A weight that the device updates itself: operand, accumulator of its gradient, optimizer states."""

    weight: int
    accumulator: int
    states: tuple[int, ...] = ()


class Update(msgspec.Struct, frozen=True, kw_only=True, tag_field="program", tag="update"):
    """Change weights and states in place by a rule, from gradients times `scale`; return a 1 x 1 zero.

    Accumulators stay as they are: the server drops them when the caller clears its gradients.
    """

    rule: Rule
    weights: tuple[Leased, ...]
    scale: float = 1.0


class Copy(msgspec.Struct, frozen=True, kw_only=True, tag_field="program", tag="copy"):
    """Copy operands, to be collected while updates go on; return a 1 x 1 zero. Copies are read like accumulators."""

    copies: tuple[tuple[int, int], ...]
    """(operand, its copy)"""


Program = GemmProgram | Forward | Backward | Collect | Hold | SquareSum | Update | Copy


def operands(program: Program) -> tuple[int, ...]:
    """Operands that must be sent before it can run, weights last; states and accumulators are made by the device."""
    match program:
        case GemmProgram(terms=terms):
            return tuple(operand for term in terms for operand in term)
        case Collect() | SquareSum():
            return ()
        case Update(weights=weights):
            return tuple(number for one in weights for number in (one.weight, *one.states))
        case Copy(copies=copies):
            return tuple(operand for operand, _ in copies)
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
    """Yield the operands of its norms, weights, biases and adapters."""
    for part in (*program.parts, *(() if program.head is None else (program.head,))):
        if part.norm is not None:
            yield from (number for number in (part.norm.weight, part.norm.bias) if number is not None)
        for weight in weights_of(part):
            numbers = (weight.weight, weight.bias, *(weight.adapter or ()))
            yield from (number for number in numbers if number is not None)
