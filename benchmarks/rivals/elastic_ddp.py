# pyright: standard
"""torch DDP as torchrun restarts it: every rank saves a checkpoint after each step and resumes from it.

`torchrun --nnodes MIN:MAX ... -m benchmarks.rivals.elastic_ddp JSON`, in the namespace of each device. The global batch
is cut among as many ranks as there are.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.rivals.shape import Work
from benchmarks.rivals.step_log import StepLog
from benchmarks.rivals.work import adamw, batch, build, loss_of


def main(given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    log = StepLog(Path(given["out"]) / f"torchrun-{given['rank']}.jsonl")
    dist.init_process_group("gloo", timeout=timedelta(seconds=given["timeout_s"]))
    model: Any = build(Work(**given["work"]))
    optimizer = adamw(model)

    def saved(step: int) -> Path:
        return Path(given["out"]) / f"torchrun-{given['rank']}-{step}.pt"

    # Ranks may have stopped one step apart, so each keeps two checkpoints, and all take the latest that all have.
    latest = max((number for number in range(given["steps"]) if saved(number).exists()), default=0)
    agreed = torch.tensor([latest])
    dist.all_reduce(agreed, dist.ReduceOp.MIN)
    step = int(agreed.item())
    if step > 0:
        state = torch.load(saved(step), weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    parallel: Any = torch.nn.parallel.DistributedDataParallel(model)
    log.begin()
    while step < given["steps"]:
        tokens = batch(step).chunk(dist.get_world_size())[dist.get_rank()]
        loss = loss_of(parallel(input_ids=tokens).logits, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.end(step, loss.item(), devices=dist.get_world_size())
        step += 1
        partial = saved(step).with_suffix(".partial")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, partial)
        partial.rename(saved(step))
        saved(step - 2).unlink(missing_ok=True)
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
