"""The server of a fleet on two machines: wait for a device to join over TLS, then train on it.

python examples/two_machines_tls/serve.py
"""

import argparse
import secrets

import torch
from torch import nn

import cleave


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model on devices of other machines.")
    parser.add_argument("--listen", default="0.0.0.0:7077", metavar="HOST:PORT", help="where devices join")
    parser.add_argument("--steps", type=int, default=50)
    options = parser.parse_args()

    # A token lets devices in. With tls=True the server makes a certificate, and the join command carries its
    # fingerprint, so that the device knows it talks to this server and to nobody in between. trust="own" says that both
    # machines are yours; leave it out for others, whose work on resident layers is then recomputed here.
    token = secrets.token_urlsafe(16)
    with cleave.Fleet.serve(options.listen, token=token, tls=True, trust="own") as fleet:
        print("on the other machine, run:", fleet.join_command, flush=True)
        fleet.wait(1, timeout_s=3600)

        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256))
        cleave.distribute(model, fleet)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        inputs = torch.randn(512, 256)
        targets = inputs.roll(1, dims=1)  # learn to shift each row by one
        for step in range(1, options.steps + 1):
            loss = nn.functional.mse_loss(model(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 10 == 0:
                print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
