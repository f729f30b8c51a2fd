"""However a model is cut and placed on devices, its losses and gradients equal torch's own.

Families with their peculiarities (grouped and tied heads, windows, biases, fused matrices) in random arrangements, and
in those the planner makes when no device could hold the model.
"""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.support.decoders import NAMES, llama, make, tokens
from tests.support.grids import sample_and_rest
from tests.support.in_process import ROOMY, InProcess, anyhow
from torch import nn

from cleave.core.plan.resident.small_fleet import plan_columns
from cleave.train.offload.distribute import distribute

ALLOWED = 1e-4
DEVICES = (1, 3, 5)


def resident(model: nn.Module, devices: InProcess, **options: Any) -> Any:
    return distribute(model, devices.cluster, **{"offload": "always", "grain": "resident", **options})


def pair(name: str, devices: InProcess) -> tuple[Any, Any]:
    """The same model twice: on devices, and local."""
    reference = make(name)
    return resident(copy.deepcopy(reference), devices), reference


def padded(side: str, length: int = 12) -> dict[str, torch.Tensor]:
    batch, mask = tokens(3, 3, length), torch.ones(3, length, dtype=torch.long)
    for row, pads in enumerate((0, 3, 7)):
        mask[row, slice(0, pads) if side == "left" else slice(length - pads, length)] = 0
    return {"input_ids": batch, "attention_mask": mask, "labels": batch.masked_fill(mask == 0, -100)}


def assert_same_gradients(model: nn.Module, reference: nn.Module, allowed: float = ALLOWED) -> None:
    """Compare gradients relative to their largest entry, leaving out key biases, whose gradients are pure rounding."""
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None and not name.endswith("k_proj.bias"):
            assert ours.grad is not None
            off = (ours.grad - theirs.grad).abs().max() / theirs.grad.abs().max()
            assert off < allowed, f"{name}: {off:.1e}"


def assert_trains_alike(model: nn.Module, reference: nn.Module, allowed: float = ALLOWED, **batch: Any) -> None:
    losses = [one(**batch).loss for one in (model, reference)]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=allowed)
    assert_same_gradients(model, reference, allowed)


def batches(index: int, sequences: int = 3) -> dict[str, torch.Tensor]:
    return {"input_ids": tokens(index, sequences), "labels": tokens(index, sequences)}


# ------------------------------------------------------------------------------------------------ any arrangement


@pytest.mark.grid(strength=1)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("devices", DEVICES)
def test_every_gradient_equals_torchs_however_a_model_is_cut(name: str, devices: int) -> None:
    """Each batch size is planned anew, so each has another arrangement."""
    with InProcess([ROOMY] * devices, arrange=anyhow(devices)) as fleet:
        model, reference = pair(name, fleet)
        for index in range(2):
            for one in (model, reference):
                one.zero_grad()
            assert_trains_alike(model, reference, **batches(index, sequences=2 * index + 1))
        assert len(fleet.plans) >= 2


@pytest.mark.grid(strength=1)
@pytest.mark.parametrize("chunk", [1, 5, 40])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing_for_any_chunk_size(side: str, chunk: int) -> None:
    for name in ("llama", "opt"):
        with InProcess([ROOMY] * 3, arrange=anyhow(chunk, chunk)) as fleet:
            assert_trains_alike(*pair(name, fleet), **padded(side))


@pytest.mark.parametrize("name", ["llama-biased-tied", "mistral", "gpt2"])
def test_without_labels_hidden_states_come_back_and_gradients_go_in(name: str) -> None:
    with InProcess([ROOMY] * 3, arrange=anyhow(11)) as fleet:
        model, reference = pair(name, fleet)
        for one in (model, reference):
            logits = one(input_ids=tokens(0)).logits
            (logits[..., 1:5].square().sum() + logits.logsumexp(-1).mean()).backward()
        assert_same_gradients(model, reference)
        assert fleet.plans


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_evaluation_equals_torch(name: str) -> None:
    with InProcess([ROOMY] * 3, arrange=anyhow(3)) as fleet:
        model, reference = pair(name, fleet)
        for one in (model, reference):
            one.eval()
        with torch.no_grad():
            ours, theirs = (one(input_ids=tokens(1), labels=tokens(1), use_cache=False) for one in (model, reference))
        torch.testing.assert_close(ours.logits, theirs.logits, rtol=1e-4, atol=1e-5)
        assert ours.loss.item() == pytest.approx(theirs.loss.item(), rel=1e-5)


def test_gradients_add_up_over_batches() -> None:
    with InProcess([ROOMY] * 3, arrange=anyhow(4)) as fleet:
        model, reference = pair("qwen2", fleet)
        for index in range(3):
            for one in (model, reference):
                (one(**batches(index, index + 1)).loss / 3).backward()
        assert_same_gradients(model, reference)


def test_several_threads_may_have_batches_in_flight() -> None:
    with InProcess([ROOMY] * 3, arrange=anyhow(5)) as fleet:
        model, reference = pair("llama", fleet)
        with ThreadPoolExecutor(3) as pool:
            done = [pool.submit(lambda index=index: model(**batches(index)).loss.backward()) for index in range(6)]
            for one in done:
                one.result()
        for index in range(6):
            reference(**batches(index)).loss.backward()
        assert_same_gradients(model, reference)


def test_only_adapters_are_trained_when_the_rest_is_frozen(recwarn: pytest.WarningsRecorder) -> None:
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]

    def lora() -> Any:
        torch.manual_seed(2)
        model = get_peft_model(make("llama"), LoraConfig(r=3, target_modules=targets, lora_dropout=0.0))  # type: ignore[arg-type]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0, 0.1)
        return model

    with InProcess([ROOMY] * 3, arrange=anyhow(6)) as fleet:
        model, reference = resident(lora(), fleet), lora()
        for index in range(3):
            for one in (model, reference):
                one.zero_grad()
            assert_trains_alike(model, reference, **batches(index, index + 1))


def test_gradients_stay_close_over_a_narrower_wire() -> None:
    with InProcess([ROOMY] * 3, wire="bf16", arrange=anyhow(7)) as fleet:
        model, reference = pair("llama", fleet)
        losses = [one(**batches(0)).loss for one in (model, reference)]
        for loss in losses:
            loss.backward()
        assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-2)
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            off = (ours.grad - theirs.grad).norm() / theirs.grad.norm()
            assert off < 0.05


# ------------------------------------------------------------------------------------------------ training


STEPS = 20


def losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    seen: list[float] = []
    for step in range(STEPS):
        loss = model(**batches(step % 3, 2)).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.item())
    return seen


@pytest.fixture(scope="module")
def plain() -> list[float]:
    return losses(make("llama"))


@pytest.mark.parametrize("devices", sample_and_rest([3], [1, 5]))
def test_losses_over_many_steps_equal_torchs(devices: int, plain: list[float]) -> None:
    with InProcess([ROOMY] * devices, arrange=anyhow(20 + devices, chunk=8)) as fleet:
        ours = losses(resident(make("llama"), fleet))
    assert plain[-1] < 0.9 * plain[0], "the model must really learn"
    assert ours == pytest.approx(plain, abs=1e-4)


# ------------------------------------------------------------------------------------------------ the planner's own


@pytest.mark.grid(strength=1)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("devices", DEVICES)
def test_the_planners_arrangement_gives_torchs_gradients(name: str, devices: int) -> None:
    with InProcess([ROOMY] * devices, arrange=plan_columns) as fleet:
        assert_trains_alike(*pair(name, fleet), **batches(0, 4))
        assert fleet.plans


def wide() -> nn.Module:
    """A model of about 16 MB with its gradients, more than any device below offers."""
    torch.manual_seed(4)
    return llama(hidden_size=256, intermediate_size=1024, num_hidden_layers=2).train()


@pytest.mark.parametrize("devices", sample_and_rest([3], [5]))
def test_a_model_too_large_for_any_one_device_trains_on_several(devices: int) -> None:
    model = wide()
    trained = 2 * 4 * sum(p.numel() for name, p in model.named_parameters() if "embed" not in name)
    share = trained // 2 + 4_000_000  # plus the workspace of a device
    assert share < trained
    with InProcess([share] * devices, arrange=plan_columns) as fleet:
        assert_trains_alike(resident(copy.deepcopy(model), fleet), model, **batches(1, 4))
        (plan, *_) = fleet.plans
        assert len(plan.stages) > 1 or len(plan.stages[0].slices) > 1, "the model was cut"
        assert len({device for stage in plan.stages for device in stage.devices}) > 1
