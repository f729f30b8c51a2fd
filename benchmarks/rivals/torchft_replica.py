# pyright: standard, reportMissingImports=false
"""A torchft replica in its device's namespace: data parallel with a quorum per step, over gloo.

`torchrun ... -m benchmarks.rivals.torchft_replica JSON`, with a lighthouse in the server's namespace. Every device is a
replica group of one rank. A step is logged when it was committed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from benchmarks.rivals.shape import Work
from benchmarks.rivals.step_log import LEAST_STEPS, StepLog
from benchmarks.rivals.work import adamw, batch, build, loss_of
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torchft.ddp import DistributedDataParallel
from torchft.manager import Manager
from torchft.optim import OptimizerWrapper
from torchft.process_group import ProcessGroupGloo


def main(given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    rank, count = given["rank"], given["count"]
    model: Any = build(Work(**given["work"]))
    inner = adamw(model)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    if "MASTER_ADDR" not in os.environ:  # torchrun sets it
        store = TCPStore(given["address"], 29600, is_master=True)
        os.environ |= {"MASTER_ADDR": given["address"], "MASTER_PORT": str(store.port), "RANK": "0", "WORLD_SIZE": "1"}
    os.environ["TORCHFT_LIGHTHOUSE"] = given["lighthouse"]
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=given["timeout_s"])),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=1,
        replica_id=f"device{rank}",
        timeout=timedelta(seconds=given["timeout_s"]),
        quorum_timeout=timedelta(seconds=60),
        hostname=given["address"],
        init_sync=False,
    )
    parallel: Any = DistributedDataParallel(manager, model)
    optimizer = OptimizerWrapper(manager, inner)
    log = StepLog(Path(given["out"]) / f"torchft-{rank}.jsonl")
    log.begin()
    began_s = time.monotonic()
    while (step := manager.current_step()) < LEAST_STEPS or (
        step < given["steps"] and time.monotonic() - began_s < given["budget_s"]
    ):
        tokens = batch(step).chunk(count)[rank]
        optimizer.zero_grad()
        loss = loss_of(parallel(input_ids=tokens).logits, tokens)
        loss.backward()
        optimizer.step()
        if manager.current_step() != step:
            log.end(step, loss.item(), devices=manager.num_participants())
    os._exit(0)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
