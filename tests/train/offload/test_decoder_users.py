"""What people train decoders with, unaware of the stack: Trainer, LoRA through PEFT, our own loop."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.decoders import NAMES, make, tokens
from tests.support.local_columns import LocalColumns
from torch import nn
from transformers import AutoModelForCausalLM

from cleave.config import TrainConfig
from cleave.errors import ModelError
from cleave.train.loop import Traffic, run
from cleave.train.offload.distribute import distribute, undistribute

_TARGETS = {"gpt2": ["c_attn", "c_fc"], "opt": ["q_proj", "fc1"], "llama": ["q_proj", "v_proj", "down_proj", "lm_head"]}


def resident(model: nn.Module, columns: Any) -> Any:
    return distribute(model, columns, offload="always", grain="resident")


@pytest.fixture
def columns() -> LocalColumns:
    return LocalColumns()


@pytest.mark.parametrize(("name", "autocast"), [("llama", False), ("gpt2", False), ("qwen2", True)])
def test_trainer_trains_unmodified(name: str, autocast: bool, tmp_path: Path, columns: LocalColumns) -> None:
    from transformers import Trainer, TrainingArguments

    def train(model: nn.Module) -> list[float]:
        rows = tokens(7, 16)
        data = [
            {"input_ids": row, "labels": row, "attention_mask": torch.ones(12), "unused": index}
            for index, row in enumerate(rows)
        ]
        arguments = TrainingArguments(
            output_dir=str(tmp_path / "run"),
            max_steps=4,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=True,
            learning_rate=1e-2,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=2,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            bf16=autocast,
            seed=3,
            disable_tqdm=True,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = Trainer(model=model, args=arguments, train_dataset=data, eval_dataset=data[:4])
            trainer.train()
            trainer.save_model(str(tmp_path / "saved"))
        return [entry[kind] for entry in trainer.state.log_history for kind in ("loss", "eval_loss") if kind in entry]

    model = resident(make(name), columns)
    plain, ours = train(make(name)), train(model)
    assert ours == pytest.approx(plain, abs=0.05 if autocast else 1e-4)
    assert sum(stack.head is not None for stack, _ in columns.passes) == 4 * 2
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    assert type(loaded) is type(make(name))
    assert undistribute(model)(input_ids=tokens(0), labels=tokens(0)).logits is not None


@pytest.mark.parametrize("name", ["llama", "opt", "gpt2"])
def test_lora_trains_the_same_and_leaves_the_rest_untrained(name: str, columns: LocalColumns) -> None:
    from peft import LoraConfig, get_peft_model

    def lora() -> Any:
        torch.manual_seed(2)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = get_peft_model(make(name), LoraConfig(r=3, target_modules=_TARGETS[name], init_lora_weights=False))
        return model.train()

    reference = lora()
    model = resident(lora(), columns)
    for one in (model, reference):
        one(input_ids=tokens(0), labels=tokens(0)).loss.backward()
    for (key, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), key
        if ours.grad is not None:
            assert (ours.grad - theirs.grad).abs().max() < 1e-5 * theirs.grad.abs().max(), key
    (stack, batch), *_ = columns.passes
    assert stack.head is not None
    assert not batch.wants_dx
    assert sum(one.is_trained for one in stack.parameters) == sum(one.requires_grad for one in model.parameters())

    with model.disable_adapter(), reference.disable_adapter(), torch.no_grad():
        ours, theirs = (one(input_ids=tokens(0), use_cache=False).logits for one in (model, reference))
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert len(columns.passes) == 2
    model.merge_adapter()
    torch.testing.assert_close(
        model(input_ids=tokens(0)).logits, reference(input_ids=tokens(0)).logits, rtol=1e-3, atol=1e-5
    )
    assert len(columns.passes) == 3


@pytest.mark.parametrize("options", [{"use_dora": True}, {"lora_bias": True, "bias": "none"}, {"lora_dropout": 0.2}])
def test_adapters_beyond_plain_lora_are_refused(options: dict[str, Any], columns: LocalColumns) -> None:
    from peft import LoraConfig, get_peft_model

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = get_peft_model(make("llama"), LoraConfig(r=2, target_modules=["q_proj"], **options)).train()
    with pytest.raises(ModelError, match="cannot stay on devices"):
        resident(model, columns)


def test_adapters_may_be_added_after_distributing(columns: LocalColumns) -> None:
    from peft import LoraConfig, get_peft_model

    model: Any = get_peft_model(resident(make("llama"), columns), LoraConfig(r=2, target_modules=["q_proj"]))
    model(input_ids=tokens(0), labels=tokens(0)).loss.backward()
    (stack, _), *_ = columns.passes
    assert sum(one.is_trained for one in stack.parameters) == 2 * 3


@pytest.mark.parametrize("name", NAMES)
def test_saved_models_do_not_remember_the_fleet(name: str, tmp_path: Path, columns: LocalColumns) -> None:
    reference: Any = make(name)
    model = resident(copy.deepcopy(reference), columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(loaded) is type(reference)
    for ours, theirs in zip(loaded.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_our_loop_trains_the_same_with_micro_batches_in_threads(tmp_path: Path, columns: LocalColumns) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)

    def losses(name: str, wrap: Any) -> tuple[float, ...]:
        config = TrainConfig(
            model="tiny-llama",
            data=text,
            steps=3,
            batch=2,
            sequence=16,
            accumulate=4,
            in_flight=2,
            sample=0,
            warmup_steps=1,
            checkpointing=True,
        )
        ended = run(
            config, tmp_path / name, wrap=wrap, observe=lambda event: None, traffic=lambda: Traffic(), resume=False
        )
        return (*ended.losses, ended.evaluation_loss or 0.0)

    plain = losses("plain", lambda model: model)
    ours = losses("ours", lambda model: resident(model, columns))
    assert ours == pytest.approx(plain, abs=1e-4)
    assert sum(batch.is_trained for _, batch in columns.passes) == 3 * 4
