"""Every gradient of every parameter equals torch's own, whatever the family, precision and checkpointing."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from tests.support.models import make, tokens
from torch import nn

from cleave import Fleet, distribute, undistribute


def backward(model: nn.Module, autocast: bool) -> float:
    model.zero_grad()
    batch = tokens(0)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(input_ids=batch, labels=batch).loss
    loss.backward()
    return loss.item()


def worst_difference(model: nn.Module, reference: nn.Module, order: float = float("inf")) -> float:
    """Largest difference relative to a gradient's largest entry, or to its norm (order 2).

    A key bias shifts all scores of a query alike, so its gradient is zero up to rounding, and is left out.
    """
    differences: list[float] = []
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None
        assert theirs.grad is not None
        if not name.endswith("k_proj.bias"):
            ours_flat, theirs_flat = ours.grad.float().flatten(), theirs.grad.float().flatten()
            off = torch.linalg.vector_norm(ours_flat - theirs_flat, order)
            differences.append((off / torch.linalg.vector_norm(theirs_flat, order)).item())
    return max(differences)


@pytest.mark.grid
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("family", ["llama", "tied-llama", "opt", "gpt2"])
def test_gradients_equal_torch(fleet: Fleet, family: str, autocast: bool, checkpointing: str) -> None:
    reference: Any = make(family)
    model = distribute(copy.deepcopy(reference), fleet, grain="gemm")
    if checkpointing != "none":
        for one in (model, reference):
            one.gradient_checkpointing_enable({"use_reentrant": checkpointing == "reentrant"})
    optimizers = [torch.optim.SGD(one.parameters(), 1e-3) for one in (model, reference)]
    for _ in range(2):  # the second time, layers that share their input are grouped into one product
        ours, theirs = backward(model, autocast), backward(reference, autocast)
        assert abs(ours - theirs) < (2e-2 if autocast else 1e-5)
        if autocast:  # rounding differs, as group sums are not rounded in between; a ReLU may go either way
            assert worst_difference(model, reference, 2) < 0.08
        else:
            assert worst_difference(model, reference) < 1e-4
        for optimizer in optimizers:
            optimizer.step()


def test_bf16_parameters_train(fleet: Fleet) -> None:
    reference = make("llama").to(torch.bfloat16)
    model = distribute(copy.deepcopy(reference), fleet, grain="gemm")
    assert abs(backward(model, False) - backward(reference, False)) < 2e-2
    assert worst_difference(model, reference) < 0.1
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in model.parameters())


def test_layers_that_share_their_input_become_one_product(fleet: Fleet) -> None:
    model = distribute(make("llama"), fleet, grain="gemm")
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    counts: list[int] = []
    for _ in range(3):
        before = fleet.cluster.totals().products
        backward(model, False)
        optimizer.step()
        counts.append(fleet.cluster.totals().products - before)
    layers = 2 * 7 + 1
    groups = 2 * 4 + 1
    assert counts[0] == 3 * layers
    assert counts[1] == counts[2] == 3 * groups


def test_gradients_accumulate_and_hooks_see_them_once(fleet: Fleet) -> None:
    reference = make("llama")
    model = distribute(copy.deepcopy(reference), fleet, grain="gemm")
    calls: list[str] = []
    weight: Any = model.model.layers[0].mlp.up_proj.weight
    weight.register_hook(lambda grad: calls.append("tensor"))
    weight.register_post_accumulate_grad_hook(lambda parameter: calls.append("accumulated"))
    for one in (model, reference):
        for index in range(2):
            batch = tokens(index)
            (one(input_ids=batch, labels=batch).loss / 2).backward()
    assert worst_difference(model, reference) < 1e-4
    assert calls == ["tensor", "accumulated"] * 2


def test_immediate_mode_supports_autograd_grad(fleet: Fleet) -> None:
    reference = make("llama")
    model = distribute(copy.deepcopy(reference), fleet, grain="gemm", immediate=True)
    batch = tokens(0)
    gradients = []
    for one in (model, reference):
        loss = one(input_ids=batch, labels=batch).loss
        gradients.append(torch.autograd.grad(loss, [one.lm_head.weight, one.model.layers[0].mlp.up_proj.weight]))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_failed_backward_leaves_nothing_behind(fleet: Fleet) -> None:
    reference = make("llama")
    model: Any = distribute(copy.deepcopy(reference), fleet, grain="gemm")

    def explode(grad: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("a hook failed")

    hook = model.model.embed_tokens.weight.register_hook(explode)
    with pytest.raises(RuntimeError, match="a hook failed"):
        backward(model, False)
    hook.remove()
    backward(model, False)
    backward(reference, False)
    assert worst_difference(model, reference) < 1e-4


def test_undistribute_restores_classes_and_state(fleet: Fleet) -> None:
    original = make("gpt2")
    classes = [type(module) for module in original.modules()]
    names = list(original.state_dict())
    model = distribute(original, fleet, grain="gemm")
    assert list(model.state_dict()) == names
    assert [type(module) for module in model.modules()] != classes
    undistribute(model)
    assert [type(module) for module in model.modules()] == classes
    before = fleet.cluster.totals().products
    backward(model, False)
    assert fleet.cluster.totals().products == before


def test_changed_weights_are_never_stale(fleet: Fleet) -> None:
    """Changed by an optimizer that leaves no trace, by `.data` or by loading: the next product uses the new numbers."""
    layer = nn.Linear(48, 40)
    model = distribute(nn.Sequential(layer), fleet, grain="gemm")
    x = torch.randn(8, 48)

    def is_fresh() -> bool:
        return torch.allclose(model(x), nn.functional.linear(x, layer.weight, layer.bias), atol=1e-5)

    assert is_fresh()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1, fused=True)
    model(x).square().sum().backward()
    optimizer.step()
    assert is_fresh()
    layer.weight.data += 1.0
    assert is_fresh()
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})
    assert is_fresh()
    layer.weight.requires_grad_(False)
    assert is_fresh()
    layer.weight.data.mul_(2.0)
    assert is_fresh()


def test_generation_and_evaluation_equal_torch(fleet: Fleet) -> None:
    reference: Any = make("llama").eval()
    model: Any = distribute(copy.deepcopy(reference), fleet, grain="gemm")
    prompt = tokens(3, 1, 8)
    settings = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(prompt, **settings), reference.generate(prompt, **settings))
    with torch.no_grad():
        torch.testing.assert_close(model(prompt).logits, reference(prompt).logits, rtol=1e-4, atol=1e-5)
    with torch.inference_mode():
        torch.testing.assert_close(model(prompt).logits, reference(prompt).logits, rtol=1e-4, atol=1e-5)


def test_a_copy_of_a_distributed_model_computes_too(fleet: Fleet) -> None:
    model = distribute(make("llama"), fleet, grain="gemm")
    twin = copy.deepcopy(model)
    for parameter in twin.parameters():
        parameter.data.mul_(0.5)
    assert backward(twin, False) != backward(model, False)
    undistribute(model)
    assert abs(backward(undistribute(twin), False) - backward(copy.deepcopy(twin), False)) < 1e-6


class Scaled(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(input)


def test_layers_with_a_custom_forward_are_left_alone(fleet: Fleet) -> None:
    scaled, plain = Scaled(16, 16), nn.Linear(16, 16)
    model = distribute(nn.Sequential(scaled, plain), fleet, grain="gemm")
    x = torch.randn(4, 16)
    expected = nn.functional.linear(2 * nn.functional.linear(x, scaled.weight, scaled.bias), plain.weight, plain.bias)
    assert type(scaled) is Scaled
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


def test_a_pickled_distributed_model_computes_locally(fleet: Fleet) -> None:
    model = distribute(make("llama"), fleet, grain="gemm")
    loaded = pickle.loads(pickle.dumps(model))
    before = fleet.cluster.totals().products
    batch = tokens(0)
    alone = loaded(input_ids=batch).logits
    assert fleet.cluster.totals().products == before
    torch.testing.assert_close(alone, model(input_ids=batch).logits, rtol=1e-4, atol=1e-5)
