"""Laws of resident parts: any parts in any chunks agree with torch's autograd, and slices add up to the whole."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.device_bench import Bench, Journey, assert_close
from tests.support.plain_parts import HOW, KINDS, Maker, Plain, attentions, mlps, rotary_table

from cleave.core.model.batch import Matrix
from cleave.core.model.decoder import Attention, Head, Mlp, Part
from cleave.device.kernels import Array, Kernel, NumpyKernel, TorchKernel
from cleave.device.programs import head as head_program

HIDDEN, HEAD_DIM = 12, 4
steady = settings(max_examples=50, deadline=None, derandomize=True)
kernels: st.SearchStrategy[Kernel] = st.sampled_from(["numpy", "torch"]).map(
    lambda name: NumpyKernel() if name == "numpy" else TorchKernel("cpu")
)
masks = st.sampled_from(["none", "left", "right", "all"])


def mask_of(kind: str, rows: int) -> Matrix | None:
    mask = np.ones((1, rows), dtype=np.float32)
    match kind:
        case "left":
            mask[:, : rows // 2] = 0
        case "right":
            mask[:, rows // 2 :] = 0
        case "all":
            mask[:] = 0
        case _:
            return None
    return mask


@steady
@given(kernels, st.integers(1, 19), st.integers(1, 19), masks, st.integers(0, 2**31), st.data())
def test_a_run_of_parts_in_chunks_agrees_with_autograd(
    kernel: Kernel, rows: int, chunk: int, mask: str, seed: int, data: st.DataObject
) -> None:
    kernel.tile_elements = data.draw(st.sampled_from([1, 40, 1 << 18]))
    bench = Bench(kernel)
    maker = Maker(bench, HIDDEN, seed)
    parts: tuple[Part, ...] = tuple(
        data.draw(st.lists(st.one_of(attentions(maker, HEAD_DIM), mlps(maker)), min_size=1, max_size=3))
    )
    x, dy = maker.normal(rows, HIDDEN), maker.normal(rows, HIDDEN)
    table, hides = rotary_table(rows, HEAD_DIM), mask_of(mask, rows)
    plain, entering = Plain(bench), torch.from_numpy(x).double().requires_grad_()
    expected = entering
    for part in parts:
        expected = expected + plain.part(part, expected, hides, table)
    expected.backward(torch.from_numpy(dy).double())
    trained = data.draw(st.sampled_from([maker.trained, maker.trained[::3], []]))
    went = Journey(bench=bench, parts=parts, mask=hides, rotary=table).go(x, dy, chunk, trained)
    assert_close(went.y, expected.detach().float().numpy())
    assert entering.grad is not None
    assert_close(went.dx, entering.grad.float().numpy())
    for number in trained:
        assert_close(went.gradients[number], plain.gradient(number))


# ------------------------------------------------------------------------------------------------ heads


@steady
@given(kernels, st.integers(1, 9), st.integers(1, 9), st.integers(1, 23), st.none() | KINDS, HOW, st.integers(0, 2**31))
def test_slices_of_a_vocabulary_give_the_loss_and_its_gradients(
    kernel: Kernel, rows: int, chunk: int, words: int, kind: Any, how: dict[str, bool], seed: int
) -> None:
    bench = Bench(kernel)
    maker = Maker(bench, HIDDEN, seed)
    whole = maker.head(words, kind, **how)
    x, scales = maker.normal(rows, HIDDEN), maker.normal(rows, 1)
    targets = maker.rng.integers(-1, words, (rows, 1)).astype(np.float32)
    scales[targets < 0] = 0

    plain, entering = Plain(bench), torch.from_numpy(x).double().requires_grad_()
    logits = plain.logits(whole, entering)
    index = torch.from_numpy(targets).long()
    chosen = torch.where(index < 0, 0.0, logits.gather(1, index.clamp(min=0)))
    logsumexp = logits.logsumexp(1, keepdim=True)
    ((logsumexp - chosen) * torch.from_numpy(scales).double()).sum().backward()

    before, ends = len(maker.trained), sorted({0, words // 3, words // 2, words})
    cuts = [slice(first, last) for first, last in itertools.pairwise(ends)]
    heads = [Head(weight=maker.cut(whole.weight, cut), norm=whole.norm, first=cut.start) for cut in cuts]
    journeys = [Journey(bench=bench, parts=(), head=head, is_slice=True, targets=targets) for head in heads]
    found = [
        np.concatenate([bench.done(unit) for unit in journey.forward(x, chunk, bench.number())]) for journey in journeys
    ]
    together = np.logaddexp.reduce([each[:, 0] for each in found]).reshape(-1, 1)
    assert_close(together, logsumexp.detach().float().numpy())
    assert_close(sum(each[:, 1:] for each in found), chosen.detach().float().numpy())

    norms = [] if whole.norm is None else [n for n in (whole.norm.weight, whole.norm.bias) if n is not None]
    trained = [*norms, *maker.trained[before:]]
    went = [
        journey.back(x, np.concatenate([together, scales], axis=1), chunk, trained_of(head, trained), bench.number())
        for journey, head in zip(journeys, heads, strict=True)
    ]
    assert entering.grad is not None
    assert_close(sum(dx for dx, _ in went), entering.grad.float().numpy())
    for number in norms:
        assert_close(sum(gradients[number] for _, gradients in went), plain.gradient(number))
    axis = 1 if whole.weight.is_transposed else 0
    parts = [gradients[head.weight.weight] for head, (_, gradients) in zip(heads, went, strict=True)]
    assert_close(np.concatenate(parts, axis=axis), plain.gradient(whole.weight.weight))


def trained_of(head: Head, trained: list[int]) -> list[int]:
    weight = head.weight
    own = {weight.weight, weight.bias, *(weight.adapter or ())}
    if head.norm is not None:
        own |= {head.norm.weight, head.norm.bias}
    return [number for number in trained if number in own]


@pytest.mark.parametrize("rows", [1, 40])
def test_bands_of_logits_change_nothing(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for size in (head_program.LOGITS_BYTES, 4 * 50 * 7, 1):
        monkeypatch.setattr(head_program, "LOGITS_BYTES", size)
        bench = Bench()
        maker = Maker(bench, HIDDEN, 3)
        head = maker.head(50, "rms", bias=True, adapter=False, is_transposed=False)
        x, dy, targets = maker.normal(rows, HIDDEN), maker.normal(rows, 2), np.arange(rows, dtype=np.float32)[:, None]
        journey = Journey(bench=bench, parts=(), head=head, targets=targets)
        found.append(journey.go(x, dy, rows, maker.trained))
    for went in found[1:]:
        assert_close(went.y, found[0].y)
        assert_close(went.dx, found[0].dx)
        for number, gradient in went.gradients.items():
            assert_close(gradient, found[0].gradients[number])


@pytest.mark.parametrize("kernel", ["numpy", "torch"])
@pytest.mark.parametrize("chunk", [3, 10])
def test_parts_and_a_head_train_a_small_model(kernel: str, chunk: int) -> None:
    bench = Bench(NumpyKernel() if kernel == "numpy" else TorchKernel("cpu"))
    maker, rows, words = Maker(bench, HIDDEN, 5), 10, 17
    how = {"bias": False, "adapter": False, "is_transposed": False}
    parts: tuple[Part, ...] = (
        maker.attention(4, 2, HEAD_DIM, "rms", is_rotary=True, **how),
        maker.mlp(20, "rms", "silu", gated=True, **how),
    )
    head = maker.head(words, "rms", **how)
    x, table = maker.normal(rows, HIDDEN), rotary_table(rows, HEAD_DIM)
    targets = maker.rng.integers(0, words, (rows, 1)).astype(np.float32)
    plain, entering = Plain(bench), torch.from_numpy(x).double().requires_grad_()
    y = entering
    for part in parts:
        y = y + plain.part(part, y, None, table)
    logits = plain.logits(head, y)
    torch.nn.functional.cross_entropy(logits, torch.from_numpy(targets[:, 0]).long()).backward()
    logsumexp = logits.logsumexp(1, keepdim=True).detach().float().numpy()
    dy = np.concatenate([logsumexp, np.full_like(targets, 1 / rows)], axis=1)
    journey = Journey(bench=bench, parts=parts, head=head, rotary=table, targets=targets)
    went = journey.go(x, dy, chunk, maker.trained)
    assert_close(went.y[:, :1], logsumexp)
    assert entering.grad is not None
    assert_close(went.dx, entering.grad.float().numpy(), 1e-5)
    for number in maker.trained:
        assert_close(went.gradients[number], plain.gradient(number), 1e-5)


# ------------------------------------------------------------------------------------------------ slices


@steady
@given(kernels, st.integers(1, 12), st.integers(1, 12), st.integers(0, 2**31), st.data())
def test_slices_of_a_part_add_up_to_the_whole(
    kernel: Kernel, rows: int, chunk: int, seed: int, data: st.DataObject
) -> None:
    bench = Bench(kernel)
    maker = Maker(bench, HIDDEN, seed)
    part = data.draw(st.one_of(attentions(maker, HEAD_DIM), mlps(maker)))
    x, dy, table = maker.normal(rows, HIDDEN), maker.normal(rows, HIDDEN), rotary_table(rows, HEAD_DIM)
    norms = [number for number in (part.norm.weight, part.norm.bias) if number is not None]
    last = part.o if isinstance(part, Attention) else part.down
    whole = Journey(bench=bench, parts=(part,), rotary=table).go(x, dy, chunk, maker.trained)
    pieces = _slices(maker, part, data.draw(st.integers(1, 3)))
    went = []
    for piece in pieces:
        weight = piece.o if isinstance(piece, Attention) else piece.down
        journey = Journey(bench=bench, parts=(piece,), is_slice=True, rotary=table)
        went.append((weight, journey.go(x, dy, chunk, [weight.weight, *norms])))
    assert_close(x + sum(each.y for _, each in went), whole.y)
    assert_close(dy + sum(each.dx for _, each in went), whole.dx)
    for number in norms:
        assert_close(sum(each.gradients[number] for _, each in went), whole.gradients[number])
    gradients = [each.gradients[weight.weight] for weight, each in went]
    assert_close(np.concatenate(gradients, axis=0 if last.is_transposed else 1), whole.gradients[last.weight])


def _slices(maker: Maker, part: Part, count: int) -> list[Part]:
    """Slices by whole groups of heads, or by columns of the MLP."""
    shape = maker.bench.operands
    if isinstance(part, Mlp):
        width = shape[part.up.weight].shape[1 if part.up.is_transposed else 0]
        ends = np.unique(np.linspace(0, width, count + 1).astype(int)).tolist()
        return [
            Mlp(
                norm=part.norm,
                up=maker.cut(part.up, slice(first, last)),
                gate=None if part.gate is None else maker.cut(part.gate, slice(first, last)),
                down=maker.cut(part.down, width=slice(first, last)),
                activation=part.activation,
            )
            for first, last in itertools.pairwise(ends)
        ]
    axis = 1 if part.q.is_transposed else 0
    queries, keys = shape[part.q.weight].shape[axis], shape[part.k.weight].shape[axis]
    ends = np.unique(np.linspace(0, keys // part.head_dim, count + 1).astype(int)).tolist()
    sliced: list[Part] = []
    for first, last in itertools.pairwise(ends):
        key_cut = slice(first * part.head_dim, last * part.head_dim)
        query_cut = slice(key_cut.start * queries // keys, key_cut.stop * queries // keys)
        sliced.append(
            Attention(
                norm=part.norm,
                q=maker.cut(part.q, query_cut),
                k=maker.cut(part.k, key_cut),
                v=maker.cut(part.v, key_cut),
                o=maker.cut(part.o, width=query_cut),
                head_dim=part.head_dim,
                scale=part.scale,
                is_rotary=part.is_rotary,
                window=part.window,
            )
        )
    return sliced


# ------------------------------------------------------------------------------------------------ cost, range


class Counted:
    """The numpy kernel, counting its products."""

    def __init__(self) -> None:
        self.flops = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def matmul(self, a: Array, b: Array) -> Array:
        product = np.matmul(a, b)
        self.flops += 2.0 * product.size * a.shape[-1]
        return product


@steady
@given(st.integers(1, 12), st.integers(1, 12), st.booleans(), st.booleans(), st.integers(0, 2**31), st.data())
def test_reported_flops_are_those_of_the_products_computed(
    rows: int, chunk: int, with_head: bool, is_silent: bool, seed: int, data: st.DataObject
) -> None:
    kernel = NumpyKernel()
    kernel.ops = counted = Counted()
    kernel.tile_elements = data.draw(st.sampled_from([1, 40, 1 << 18]))
    bench = Bench(kernel)
    maker = Maker(bench, HIDDEN, seed)
    parts: tuple[Part, ...] = tuple(
        data.draw(st.lists(st.one_of(attentions(maker, HEAD_DIM), mlps(maker)), min_size=1, max_size=3))
    )
    head = maker.head(9, "rms", bias=True, adapter=True, is_transposed=False) if with_head else None
    targets = np.zeros((rows, 1), dtype=np.float32) if with_head else None
    x, dy = maker.normal(rows, HIDDEN), maker.normal(rows, 2 if with_head else HIDDEN)
    journey = Journey(bench=bench, parts=parts, head=head, targets=targets, rotary=rotary_table(rows, HEAD_DIM))
    state = bench.number()
    for unit in journey.forward(x, chunk, state, is_silent=is_silent):
        bench.done(unit)
    assert bench.flops == counted.flops
    journey.back(x, dy, chunk, data.draw(st.sampled_from([maker.trained, maker.trained[::2]])), state)
    assert bench.flops == counted.flops


def test_erf_is_right_to_single_precision() -> None:
    x = np.linspace(-6, 6, 20_001, dtype=np.float32)
    expected = np.array([math.erf(each) for each in x.tolist()])
    np.testing.assert_allclose(NumpyKernel().erf(x), expected, rtol=0, atol=4e-7)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu"])
def test_huge_activations_give_no_nan(activation: Any) -> None:
    bench = Bench()
    maker = Maker(bench, HIDDEN, 0)
    part = maker.mlp(9, "layer", activation, gated=True, bias=True, adapter=False, is_transposed=False)
    weight = bench.store.get(part.gate.weight if part.gate is not None else 0)
    assert weight is not None
    weight.array *= 1e4
    went = Journey(bench=bench, parts=(part,)).go(maker.normal(5, HIDDEN), maker.normal(5, HIDDEN), 5, maker.trained)
    assert np.isfinite(went.y).all()
    assert np.isfinite(went.dx).all()
