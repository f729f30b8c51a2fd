"""Fine-tune with LoRA (PEFT): the frozen weights travel to the devices once, then only small adapters change.

    python examples/lora_peft.py

The Llama here is tiny and has random weights, so that nothing is downloaded. Replace `make_model` by
`AutoModelForCausalLM.from_pretrained("path/or/name")` to fine-tune a real one.
"""

import inspect

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import cleave

SEQUENCE, BATCH, STEPS = 128, 4, 12


def make_model() -> PreTrainedModel:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,  # one token per byte
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=SEQUENCE,
            initializer_range=0.05,
        )
    )


def main() -> None:
    tokens = torch.tensor(list(inspect.getsource(inspect).encode()))
    settings = LoraConfig(r=16, lora_alpha=32, target_modules=["q_proj", "v_proj", "up_proj", "down_proj"])
    model = get_peft_model(make_model(), settings)
    model.print_trainable_parameters()
    optimizer = torch.optim.AdamW((weight for weight in model.parameters() if weight.requires_grad), lr=5e-3)

    with cleave.Fleet.local(2) as fleet:
        cleave.distribute(model, fleet)  # grain="auto": keep whole layers on devices if that is faster
        for step in range(1, STEPS + 1):
            starts = torch.randint(len(tokens) - SEQUENCE, (BATCH,))
            batch = torch.stack([tokens[start : start + SEQUENCE] for start in starts.tolist()])
            loss = model(input_ids=batch, labels=batch).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            print(f"step {step:2}: loss {loss.item():.4f}")
        cleave.undistribute(model)

    model.save_pretrained("adapter")  # the adapter alone; PeftModel.from_pretrained loads it onto the base model
    print("saved the adapter to adapter/")


if __name__ == "__main__":
    main()
