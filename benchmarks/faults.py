"""Cost of faults: recovery of blocks compared with a layer or a restart, malicious devices, verification in a step."""

from __future__ import annotations

import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from cleave import events
from cleave.api.fleet import Fleet
from cleave.api.training import distribute

Say = Callable[[str], None]
_HERE = Path(__file__).parent
_PATIENCE_S = 120.0


def run(scenario: dict[str, Any], say: Say) -> None:
    recovery_s, layer_s = _recovery(scenario, say)
    _restart(scenario["training"], recovery_s, layer_s, say)
    _rogues(scenario, say)
    _checking(scenario, say)


# ------------------------------------------------------------------------------------------------ recovery


class _Watch:
    """Events with their arrival times; each wakes the waiter."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, events.AnyEvent]] = []
        self._changed = threading.Condition()

    def __call__(self, event: events.AnyEvent) -> None:
        with self._changed:
            self._seen.append((time.perf_counter(), event))
            self._changed.notify_all()

    def moments(self, kind: type[events.Event], since: float) -> list[tuple[float, Any]]:
        return [(moment, event) for moment, event in self._seen if isinstance(event, kind) and moment >= since]


def _recovery(scenario: dict[str, Any], say: Say) -> tuple[float, float]:
    """Kill devices in the middle of a step; measure from the kill to the return of the last lost block."""
    devices, killed = scenario["devices"], scenario["killed"]
    watch = _Watch()
    say("## Devices killed in the middle of a step\n")
    say("| kill | blocks lost | noticed after | recovered after | loss, difference to plain torch |")
    say("|---|---|---|---|---|")
    taken: list[float] = []
    step = scenario["checking"][0]
    torch.manual_seed(0)
    model, plain = _model(step), _model(step)
    plain.load_state_dict(model.state_dict())
    with Fleet("127.0.0.1:0", offload="always", listener=watch) as fleet:
        alive = fleet.start_devices(devices)
        fleet.wait(devices)
        distribute(model, fleet, grain="gemm")
        ours, theirs = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(plain.parameters())
        rng, number = random.Random(0), 0
        _step(model, ours, step, number)
        _step(plain, theirs, step, number)
        while len(taken) < scenario["kills"] and number < 5 * scenario["kills"]:
            number += 1
            killer = _Killer(alive[:killed], rng.uniform(0.0, 0.1))
            layer = model.model.layers[len(model.model.layers) // 2]
            hook = layer.register_forward_pre_hook(killer.strike_soon)
            loss = _step(model, ours, step, number)
            hook.remove()
            gap = abs(loss - _step(plain, theirs, step, number))
            killer.done.wait()
            recovered = watch.moments(events.Recovered, killer.moment)
            if recovered:  # otherwise they were killed between two products, and nothing was lost
                noticed = max(moment for moment, _ in watch.moments(events.DeviceLeft, killer.moment))
                blocks = sum(event.blocks for _, event in recovered)
                taken.append(max(moment for moment, _ in recovered) - killer.moment)
                noticed_ms, recovered_ms = (noticed - killer.moment) * 1e3, taken[-1] * 1e3
                say(f"| {len(taken)} | {blocks} | {noticed_ms:.0f} ms | {recovered_ms:.0f} ms | {gap:.1e} |")
            alive = alive[killed:] + fleet.start_devices(killed)
            fleet.wait(devices)
        layer_s = statistics.median(_layer_s(model, step) for _ in range(5))
    return statistics.median(taken), layer_s


class _Killer:
    """Kills processes some time after the step has reached a layer."""

    def __init__(self, victims: list[int], after_s: float) -> None:
        self._victims, self._after_s = victims, after_s
        self.moment = 0.0
        self.done = threading.Event()

    def strike_soon(self, *_: object) -> None:
        if self._victims and not self.moment:
            self.moment = time.perf_counter()
            threading.Timer(self._after_s, self._strike).start()

    def _strike(self) -> None:
        self.moment = time.perf_counter()
        for victim in self._victims:
            os.kill(victim, signal.SIGKILL)
        self.done.set()


def _layer_s(model: Any, step: dict[str, Any]) -> float:
    """Seconds of one decoder layer, forward and backward: the cost of recovery if a layer is its unit."""
    layer = model.model.layers[1]
    x = torch.randn(1, step["tokens"], step["hidden"], requires_grad=True)
    places = torch.arange(step["tokens"])[None]
    started = time.perf_counter()
    out = layer(x, position_embeddings=model.model.rotary_emb(x, places))
    (out[0] if isinstance(out, tuple) else out).sum().backward()
    return time.perf_counter() - started


# ------------------------------------------------------------------------------------------------ a restart


def _restart(training: dict[str, Any], recovery_s: float, layer_s: float, say: Say) -> None:
    """Kill the server of the same run; measure from the kill until the resumed run finishes the interrupted step."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "-m", "cleave", "train", "--out", directory, "--steps", str(training["steps"])]
        command += ["--save-every", str(training["save_every"]), "--devices", "6"]
        log = Path(directory) / "events.jsonl"
        environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
        first = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        target = training["killed_after_step"]
        _wait_for_step(log, target, first)
        first.send_signal(signal.SIGKILL)
        killed = time.time()
        first.wait()
        again = [*command, "--resume"]
        second = subprocess.Popen(again, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        done = _wait_for_step(log, target + 1, second)
        restart_s = done - killed
        second.wait()
    say("\n## Compared with other ways to recover\n")
    say("| way | time | times longer |")
    say("|---|---|---|")
    say(f"| lost blocks only, from the kill (median of the above) | {recovery_s * 1e3:.0f} ms | 1 |")
    say(f"| recompute the layer, forward and backward | {layer_s * 1e3:.0f} ms | {layer_s / recovery_s:.1f} |")
    since = training["save_every"]
    say(f"| restart from a checkpoint (one every {since} steps) | {restart_s:.1f} s | {restart_s / recovery_s:.0f} |")


def _wait_for_step(log: Path, step: int, process: subprocess.Popen[bytes]) -> float:
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        if log.exists():
            for event in events.read_events(log):
                if isinstance(event, events.StepDone) and event.step == step:
                    return event.time_s
        time.sleep(0.02)
    raise RuntimeError(f"step {step} never came")


# ------------------------------------------------------------------------------------------------ rogues


def _rogues(scenario: dict[str, Any], say: Say) -> None:
    """Alternate steps of the same fleet: alone, with a flooding device, with a half-open one."""
    step = scenario["checking"][0]
    times: dict[str, list[float]] = {"none": [], "flood": [], "half-open": []}
    with Fleet("127.0.0.1:0", offload="always") as fleet:
        fleet.start_devices(2)
        fleet.wait(2)
        torch.manual_seed(0)
        model = distribute(_model(step), fleet, grain="gemm")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(3):
            _step(model, optimizer, step, 0)
        for _ in range(scenario["rogues"]["rounds"]):
            for kind, taken in times.items():
                with _rogue(fleet, kind):
                    started = time.perf_counter()
                    for number in range(scenario["rogues"]["steps"]):
                        _step(model, optimizer, step, number)
                    taken.append((time.perf_counter() - started) / scenario["rogues"]["steps"])
    say("\n## A rogue next to two honest devices\n")
    steps = scenario["rogues"]["steps"]
    say(f"Mean of {steps} steps, including the cost of a rogue's joining; median over rounds.\n")
    say("| rogue | step | relative to none |")
    say("|---|---|---|")
    base = statistics.median(times["none"])
    for kind, taken in times.items():
        median = statistics.median(taken)
        say(f"| {kind} | {median:.2f} s | {median / base:.2f} |")


@contextmanager
def _rogue(fleet: Fleet, kind: str) -> Generator[None]:
    if kind == "none":
        yield
        return
    process = subprocess.Popen([sys.executable, str(_HERE / "chaos_device.py"), fleet.url, kind])
    try:
        time.sleep(2.0)  # until it has joined
        yield
    finally:
        process.kill()
        process.wait()
        while fleet.cluster.devices > 2:
            time.sleep(0.1)


# ------------------------------------------------------------------------------------------------ checking


def _checking(scenario: dict[str, Any], say: Say) -> None:
    say("\n## Checking every result\n")
    say("| step | wire | step, median | checking (server CPU) | share of the step |")
    say("|---|---|---|---|---|")
    for step in scenario["checking"]:
        for wire in ("fp32", "bf16"):
            with Fleet.local(2, wire=wire, offload="always") as fleet:
                torch.manual_seed(0)
                model = distribute(_model(step), fleet, grain="gemm")
                optimizer = torch.optim.AdamW(model.parameters())
                taken: list[float] = []
                checking: list[float] = []
                for number in range(scenario["rounds"] + 2):
                    before, started = fleet.cluster.totals().checking_s, time.perf_counter()
                    _step(model, optimizer, step, number)
                    if number >= 2:
                        taken.append(time.perf_counter() - started)
                        checking.append(fleet.cluster.totals().checking_s - before)
            step_s, checked_s = statistics.median(taken), statistics.median(checking)
            share = sum(checking) / sum(taken)
            say(f"| {step['name']} | {wire} | {step_s:.2f} s | {checked_s * 1e3:.0f} ms | {share:.1%} |")


# ------------------------------------------------------------------------------------------------ a step


def _model(step: dict[str, Any]) -> Any:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=step["hidden"],
            intermediate_size=step["ffn"],
            num_hidden_layers=step["layers"],
            num_attention_heads=4,
            max_position_embeddings=256,
        )
    )


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: dict[str, Any], seed: int) -> float:
    generator = torch.Generator().manual_seed(seed)
    batch = torch.randint(0, 256, (step["tokens"] // 256, 256), generator=generator)
    loss = model(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()
