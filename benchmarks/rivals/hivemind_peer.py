# pyright: standard, reportMissingImports=false
"""A hivemind peer in its device's namespace: gradients averaged among all peers, fp16 on the wire.

Tuned for a small fleet: a short matchmaking window, frequent progress
reports, uplinks told to its load balancing, weights averaged rarely. A step here is one of hivemind's epochs: it ends
when the peers have gathered the global batch between them.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import hivemind
import torch
from benchmarks.rivals.shape import SEQUENCES, Work
from benchmarks.rivals.step_log import LEAST_STEPS, StepLog
from benchmarks.rivals.work import adamw, batch, build, loss_of
from hivemind.compression import Float16Compression

_STATE_EVERY = 8
_MATCHMAKING_S = 2.0


def main(given: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    meeting = Path(given["out"]) / "hivemind-peers.json"
    rank, count = given["rank"], given["count"]
    while rank > 0 and not meeting.exists():
        time.sleep(0.1)
    dht = hivemind.DHT(
        host_maddrs=[f"/ip4/{given['address']}/tcp/0"],
        initial_peers=json.loads(meeting.read_text()) if rank > 0 else None,
        start=True,
    )
    if rank == 0:
        partial = meeting.with_suffix(".partial")
        partial.write_text(json.dumps([str(address) for address in dht.get_visible_maddrs()]))
        partial.rename(meeting)
    model: Any = build(Work(**given["work"]))
    own = SEQUENCES // count
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="rivals",
        batch_size_per_step=own,
        target_batch_size=SEQUENCES,
        optimizer=adamw(model),
        matchmaking_time=_MATCHMAKING_S,
        averaging_timeout=given["timeout_s"],
        average_state_every=_STATE_EVERY,
        grad_compression=Float16Compression(),
        averager_opts={"bandwidth": given["up_bytes_per_s"], "request_timeout": 1.0},
        tracker_opts={"min_refresh_period": 0.2, "default_refresh_period": 0.5, "max_refresh_period": 2.0},
    )
    _meet(Path(given["out"]), rank, count)
    log = StepLog(Path(given["out"]) / f"hivemind-{rank}.jsonl")
    log.begin()
    epoch, began_s = 0, time.monotonic()
    while epoch < LEAST_STEPS or (epoch < given["steps"] and time.monotonic() - began_s < given["budget_s"]):
        tokens = batch(epoch).chunk(count)[rank]
        loss = loss_of(model(input_ids=tokens).logits, tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if optimizer.local_epoch != epoch:
            log.end(epoch, loss.item(), devices=optimizer.tracker.global_progress.num_peers)
            epoch = optimizer.local_epoch
    os._exit(0)  # its helpers take long to say goodbye


def _meet(out: Path, rank: int, count: int) -> None:
    """Wait until all peers have their optimizers, so that none trains alone at first."""
    (out / f"hivemind-ready-{rank}").touch()
    while len(list(out.glob("hivemind-ready-*"))) < count:
        time.sleep(0.1)
