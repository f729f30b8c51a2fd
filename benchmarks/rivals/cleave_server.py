# pyright: standard
"""Cleave's side of the comparison: a server in its namespace that trains the same work on the devices that join.

Forked by `forks.py`. Writes a JSON line after every step, with the moment at which it ended, its loss, and what the
planner predicted and believes about the devices' links.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from benchmarks.rivals.shape import Work
from benchmarks.rivals.work import adamw, batch, build

import cleave

_LEAST_STEPS = 5


def main(given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    with cleave.Fleet.serve(
        f"{given['address']}:{given['port']}", wire=given["wire"], offload="always", trust="own", alone_wait_s=60
    ) as fleet:
        fleet.wait(given["devices"], timeout_s=given["joining_s"])
        model = cleave.distribute(build(Work(**given["work"])), fleet, grain=given["grain"])
        optimizer = adamw(model)
        began_s = time.monotonic()
        for number in range(given["steps"]):
            tokens, cpu_s = batch(number), time.process_time()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ended_s = time.monotonic()
            status = fleet.status()
            said = {
                "began_s": began_s,
                "ended_s": ended_s,
                "loss": loss.item(),
                "server_cpu_s": time.process_time() - cpu_s,
                "grain": status.grain,
                "predicted_s": status.steps[-1].predicted_s if status.steps else None,
                "links": {each.device: [each.down_bytes_per_s, each.up_bytes_per_s] for each in status.devices},
                "flops_per_s": {each.device: each.flops_per_s for each in status.devices},
            }
            with Path(given["out"], "cleave.jsonl").open("a", encoding="utf-8") as lines:
                lines.write(json.dumps(said) + "\n")
            if ended_s - began_s > given["budget_s"] and number >= _LEAST_STEPS:
                break
        time.sleep(1)  # let the other side look at the devices before they leave
    os._exit(0)
