"""What people train with: an unmodified Trainer, LoRA through PEFT, models other than language models, offload auto."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.models import make, tokens
from torch import nn

from cleave import Fleet, distribute, events
from cleave.errors import ModelError


def test_trainer_trains_unmodified(fleet: Fleet, tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    def train(model: nn.Module) -> list[float]:
        data = [{"input_ids": row, "labels": row} for row in tokens(7, 16)]
        arguments = TrainingArguments(
            output_dir=str(tmp_path),
            max_steps=6,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            seed=3,
            disable_tqdm=True,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(model=model, args=arguments, train_dataset=data)
            trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    plain = train(make("llama"))
    before = fleet.cluster.totals().products
    ours = train(distribute(make("llama"), fleet, grain="gemm"))
    assert fleet.cluster.totals().products > before
    assert plain[-1] < plain[0]
    assert ours == pytest.approx(plain, abs=1e-3)


def test_lora_sends_frozen_weights_once() -> None:
    from peft import LoraConfig, get_peft_model

    def lora() -> nn.Module:
        torch.manual_seed(2)
        return get_peft_model(
            make("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0)
        )

    def train(model: nn.Module, seen: Any) -> list[float]:
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        losses: list[float] = []
        for step in range(6):
            batch = tokens(step % 2)
            loss = model(input_ids=batch, labels=batch).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            seen()
        return losses

    plain = train(lora(), lambda: None)
    model = lora()
    frozen_bytes = sum(4 * m.weight.numel() for m in model.modules() if _is_frozen_linear(m))
    sent: list[int] = []
    with Fleet.local(1, offload="always") as fleet:
        ours = train(distribute(model, fleet, grain="gemm"), lambda: sent.append(fleet.cluster.totals().down_bytes))
    steps = [after - before for before, after in zip([0, *sent], sent, strict=False)]
    assert ours == pytest.approx(plain, abs=1e-4)
    assert steps[0] > frozen_bytes
    assert max(steps[2:]) < steps[0] - 0.95 * frozen_bytes


def _is_frozen_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and not module.weight.requires_grad


class Vision(nn.Module):
    """A small vision transformer: patches, attention through nn.MultiheadAttention, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(48, 64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        self.norm = nn.LayerNorm(64)
        self.classify = nn.Linear(64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = images.unfold(2, 4, 4).unfold(3, 4, 4).permute(0, 2, 3, 1, 4, 5).flatten(1, 2).flatten(2)
        x = self.patch(patches)
        y = self.norm(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        x = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return self.classify(x.mean(1))


@pytest.mark.parametrize("kind", ["vision", "perceptron"])
def test_models_other_than_language_models_train(fleet: Fleet, kind: str) -> None:
    generator = torch.Generator().manual_seed(5)
    images = torch.randn(8, 3, 16, 16, generator=generator)
    labels = torch.randint(0, 10, (8,), generator=generator)

    def build() -> nn.Module:
        torch.manual_seed(6)
        if kind == "vision":
            return Vision()
        return nn.Sequential(
            nn.Flatten(), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def train(model: nn.Module) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses: list[float] = []
        for _ in range(10):
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain = train(build())
    ours = train(distribute(build(), fleet, grain="gemm"))
    assert plain[-1] < plain[0]
    assert ours == pytest.approx(plain, abs=1e-4)


def test_a_model_without_gemms_is_refused(fleet: Fleet) -> None:
    with pytest.raises(ModelError, match="nothing to send"):
        distribute(nn.Sequential(nn.Conv2d(3, 4, 3)), fleet, grain="gemm")


def test_offload_auto_keeps_small_gemms_and_says_so() -> None:
    said: list[str] = []

    def listen(event: events.AnyEvent) -> None:
        if isinstance(event, events.Note):
            said.append(event.text)

    with Fleet.local(1, offload="auto", listener=listen) as fleet:
        model = distribute(make("llama"), fleet, grain="gemm")
        batch = tokens(0)
        model(input_ids=batch, labels=batch).loss.backward()
        assert fleet.cluster.totals().products == 0
    assert any("stay on the server" in text for text in said)
