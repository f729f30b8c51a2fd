"""Train with `transformers.Trainer`: distribute the model, then use the Trainer as always.

python examples/trainer.py
"""

import inspect
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import cleave

SEQUENCE = 128


def examples(text: bytes) -> list[dict[str, torch.Tensor]]:
    """Cut a text into training examples of one token per byte. The Trainer takes any list of dictionaries."""
    pieces = torch.tensor(list(text)).split(SEQUENCE)[:-1]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=SEQUENCE,
        )
    )
    with cleave.Fleet.local(2) as fleet, tempfile.TemporaryDirectory() as directory:
        cleave.distribute(model, fleet)
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=directory,
                max_steps=12,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                learning_rate=2e-3,
                logging_steps=3,
                save_strategy="no",
                report_to="none",
                disable_tqdm=True,
                use_cpu=True,  # the server computes on the CPU; devices may have GPUs
            ),
            train_dataset=examples(inspect.getsource(inspect).encode()),
        )
        trainer.train()
        cleave.undistribute(model)
        trainer.save_model("trained")
    print("saved the model to trained/")


if __name__ == "__main__":
    main()
