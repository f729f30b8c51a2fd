"""Train a plain PyTorch model in a plain PyTorch loop, with every matrix product computed by two local devices.

    python examples/own_loop.py

The model predicts the next byte of a text from the 16 bytes before it. It is trained twice from the same weights: on
this machine alone, then on the fleet. The losses agree, because devices compute the same products.
"""

import copy
import inspect

import torch
from torch import nn

import cleave

WINDOW, STEPS = 16, 20


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(256, 32),
        nn.Flatten(),
        nn.Linear(WINDOW * 32, 512),
        nn.GELU(),
        nn.Linear(512, 256),
    )


def train(model: nn.Module, text: bytes) -> list[float]:
    """The loop is ordinary PyTorch and knows nothing of the fleet."""
    windows = torch.tensor(list(text)).unfold(0, WINDOW + 1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(STEPS):
        batch = windows[torch.randint(len(windows), (128,), generator=generator)]
        loss = nn.functional.cross_entropy(model(batch[:, :-1]), batch[:, -1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def main() -> None:
    text = inspect.getsource(inspect).encode()  # any text will do; this one is on every machine
    model = make_model()
    alone = train(copy.deepcopy(model), text)

    with cleave.Fleet.local(2) as fleet:  # two processes on this machine, over real sockets
        cleave.distribute(model, fleet)  # the same model; its linear layers now use the fleet
        on_fleet = train(model, text)
        cleave.undistribute(model)  # back to a plain model, to save or to use without a fleet

    for step in range(0, STEPS, 5):
        print(f"step {step + 1:2}: loss {on_fleet[step]:.4f} on the fleet, {alone[step]:.4f} alone")
    apart = max(abs(one - other) for one, other in zip(alone, on_fleet, strict=True))
    print(f"largest difference: {apart:.0e}")


if __name__ == "__main__":
    main()
