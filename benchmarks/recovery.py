"""Kill one device in the middle of a step: how long Cleave, torchft, hivemind, a torchrun restart and others take.

`python -m benchmarks.recovery FLEET.csv`, on a testbed. The time lost is that from the last step finished before the
kill to the first one finished after it, less the median of the steps before. A rival that never finishes another step
has a reason instead, and how long its other devices took to notice.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shlex
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.rivals.peers import Peers, PeerSystem
from benchmarks.rivals.shape import MODELS, Work
from benchmarks.rivals.turns import RIVALS_PYTHON, Cleave, Forks, Limits, cleave_forks, environment, rival_forks
from benchmarks.rivals.variants import Variant
from benchmarks.testbed import SERVER, Testbed
from benchmarks.testbed.bed import read_fleet

from cleave.core.fleet.profiles import Profiles
from cleave.errors import CleaveError

_BEFORE: Final = 4
"""Steps before the kill."""
_AFTER: Final = 2
_VICTIM: Final = 1
"""The number of the killed device."""
_LOOK_S: Final = 0.02
_STARTING_S: Final = 180.0
"""For imports on cores that others use, too."""
SYSTEMS: Final = ("cleave", "torchft", "hivemind", "torchrun", "gpipe", "ddp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """What a kill did to one system."""

    system: str
    normal_s: float
    """Median of the steps before the kill, without the first."""
    lost_s: float | None
    """None if no step finished afterwards."""
    after_s: float | None
    """A step later on, with the devices that were left."""
    outcome: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Where a kill takes place."""

    forks: Forks
    testbed: Testbed
    profiles: Profiles
    work: Work
    out: Path
    limit_s: float
    reduce_s: float
    """Seconds after which a rival gives up waiting for others; a reduction must fit in it."""

    @property
    def victim(self) -> str:
        return self.testbed.devices[_VICTIM]


def kill_in_a_step(scene: Scene, ends: Callable[[], list[float]]) -> tuple[list[float], float, str]:
    """Wait for steps, kill the victim half way through the next, wait for more.

    Return the moments at which steps ended, that of the kill, and what went wrong, if anything.
    """
    started_s = time.monotonic()
    while len(seen := ends()) < _BEFORE:
        if time.monotonic() > started_s + _STARTING_S + scene.limit_s:
            return seen, 0.0, f"finished only {len(seen)} steps in {time.monotonic() - started_s:.0f} s"
        time.sleep(_LOOK_S)
    usual_s = statistics.median(_durations(seen))
    while time.monotonic() < seen[-1] + usual_s / 2:
        time.sleep(_LOOK_S / 4)
    killed_s = time.monotonic()
    scene.testbed.kill(scene.victim)
    until_s = killed_s + scene.limit_s
    while True:
        seen = ends()
        finished = sum(end > killed_s for end in seen)
        if finished >= _AFTER:
            return seen, killed_s, ""
        if time.monotonic() > until_s:
            return seen, killed_s, f"{finished} further steps in {scene.limit_s:.0f} s"
        time.sleep(_LOOK_S)


def judge(system: str, ends: Sequence[float], killed_s: float, fault: str) -> Recovery:
    """Say what was lost."""
    before = [end for end in ends if end <= killed_s] if killed_s else list(ends)
    after = [end for end in ends if end > killed_s] if killed_s else []
    normal_s = statistics.median(_durations(before)) if len(before) > 1 else float("nan")
    if not after:
        return Recovery(system=system, normal_s=normal_s, lost_s=None, after_s=None, outcome=fault)
    return Recovery(
        system=system,
        normal_s=normal_s,
        lost_s=after[0] - before[-1] - normal_s,
        after_s=after[1] - after[0] if len(after) > 1 else None,
        outcome=fault or "goes on with the others",
    )


def _durations(ends: Sequence[float]) -> list[float]:
    return [end - start for start, end in itertools.pairwise(ends)]


def of_cleave(scene: Scene) -> Recovery:
    limits = Limits(steps=_BEFORE + _AFTER + 1, budget_s=10 * scene.limit_s)
    with closing(cleave_forks(scene.out)) as forks:
        ours = Cleave(forks, scene.testbed, scene.work, scene.out, limits, "auto")
        server = ours.start()
        try:
            return judge("Cleave", *kill_in_a_step(scene, lambda: [said["ended_s"] for said in ours.steps()]))
        finally:
            ours.stop(server)


def of_peers(scene: Scene, system: PeerSystem) -> Recovery:
    limits = Limits(steps=_BEFORE + _AFTER + 1, budget_s=10 * scene.limit_s, reduce_s=scene.reduce_s)
    count = len(scene.testbed.devices)
    peers = Peers(
        system, scene.forks, scene.testbed, scene.profiles, scene.work, scene.out, limits, least_devices=count - 1
    )
    try:
        peers.start()
        return judge(system, *kill_in_a_step(scene, lambda: [line["ended_s"] for line in peers.steps(0)]))
    finally:
        peers.close()


def of_torchrun(scene: Scene) -> Recovery:
    """Restart torch DDP: every device under torchrun, with a rendezvous that does not wait for the missing one."""
    for path in scene.out.glob("torchrun-*"):
        path.unlink()
    count = len(scene.testbed.devices)
    first = scene.testbed.address(scene.testbed.devices[0])
    patience = "last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=600,timeout=600"
    with (scene.out / "torchrun.log").open("ab") as log:
        for rank, name in enumerate(scene.testbed.devices):
            given = {
                "rank": rank,
                "work": asdict(scene.work),
                "steps": _BEFORE + _AFTER + 1,
                "timeout_s": scene.limit_s,  # its agents stop all workers as soon as one has failed
                "out": str(scene.out),
            }
            command: list[str | Path] = [
                *(RIVALS_PYTHON, "-m", "torch.distributed.run", "--nnodes", f"{count - 1}:{count}"),
                *("--nproc-per-node", "1", "--max-restarts", "5", "--rdzv-backend", "c10d", "--rdzv-id", "recovery"),
                *("--rdzv-endpoint", f"{first}:29400", "--rdzv-conf", f"{patience},is_host={str(rank == 0).lower()}"),
                *("--local-addr", scene.testbed.address(name)),
                *("-m", "benchmarks.rivals.elastic_ddp", json.dumps(given)),
            ]
            scene.testbed.start(name, command, env=environment(), stdout=log, stderr=log)
    path = scene.out / "torchrun-0.jsonl"

    def ends() -> list[float]:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line)["ended_s"] for line in lines if line.endswith("}")]

    try:
        recovery = judge("torchrun restart of DDP", *kill_in_a_step(scene, ends))
    finally:
        _clear(scene)
    return recovery


def of_torch(scene: Scene, variant: Variant) -> Recovery:
    """Kill a rank of a torch rival that knows no recovery, and see how the others learn of it."""
    for path in scene.out.glob("rank-*"):
        path.unlink()
    given: dict[str, Any] = {
        "count": len(scene.testbed.devices),
        "master": scene.testbed.address(scene.testbed.devices[0]),
        "port": 29500,
        "work": asdict(scene.work),
        "variant": asdict(variant),
        "timeout_s": scene.reduce_s,
        "budget_s": 10 * scene.limit_s,
        "steps": _BEFORE + _AFTER + 1,
        "out": str(scene.out),
        "log": True,
    }
    for rank, name in enumerate(scene.testbed.devices):
        scene.forks.start(scene.testbed, name, "worker", given | {"rank": rank})
    path = scene.out / "rank-0.jsonl"

    def ends() -> list[float]:
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line)["ended_s"] for line in lines if line.endswith("}")]

    try:
        seen, killed_s, fault = kill_in_a_step(scene, ends)
        noticed: list[str] = []
        for rank, name in enumerate(scene.testbed.devices):
            told = scene.out / f"rank-{rank}.json"
            if rank != _VICTIM and told.exists():
                record = json.loads(told.read_text(encoding="utf-8"))
                noticed.append(f"{name} ended after {record['failed_s'] - killed_s:.1f} s")
        if killed_s:
            waiting = len(scene.testbed.devices) - 1 - len(noticed)
            fault = "; ".join([*noticed, *([f"{waiting} still wait after {scene.limit_s:.0f} s"] if waiting else [])])
            fault = f"the run is over: {fault}"
        return judge(variant.name, seen, killed_s, fault)
    finally:
        _clear(scene)


def _clear(scene: Scene) -> None:
    for place in (*scene.testbed.devices, SERVER):
        scene.testbed.kill(place)


def main(words: list[str] | None = None) -> int:
    options = _parser().parse_args(words)
    for each in (signal.SIGINT, signal.SIGTERM):  # also where a shell started this in its background
        signal.signal(each, signal.default_int_handler)
    recoveries: list[Recovery] = []
    work = Work(model=options.model, lora=options.lora)
    try:
        with tempfile.TemporaryDirectory(prefix="cleave-recovery-") as scratch:
            for recovery in _kills(options, work, Path(options.keep or scratch)):
                print(recovery, file=sys.stderr, flush=True)
                recoveries.append(recovery)
    except CleaveError as fault:
        print(f"error: {fault}", file=sys.stderr)
        if not recoveries:
            return 2
    except KeyboardInterrupt:
        if not recoveries:
            return 130
    title = f"{options.fleet.stem}, {work.model}, {'LoRA' if work.lora else 'full'}"
    load = f"load average {os.getloadavg()[1]:.0f} on {os.cpu_count()} cores"
    command = _shown(sys.argv[1:] if words is None else words)
    print(f"# The second device killed in a step: {title}\n\n`{command}`; {load}\n")
    print("| | s a step before | s lost | s a step after | what happens |\n|---|---|---|---|---|")
    for each in recoveries:
        lost, after = ("" if value is None else f"{value:.1f}" for value in (each.lost_s, each.after_s))
        print(f"| {each.system} | {each.normal_s:.1f} | {lost} | {after} | {each.outcome} |")
    return 0


def _kills(options: argparse.Namespace, work: Work, out: Path) -> Iterator[Recovery]:
    profiles = read_fleet(options.fleet)
    out.mkdir(parents=True, exist_ok=True)
    ranks = (tuple(range(len(profiles))),)
    with Testbed(profiles) as testbed, closing(rival_forks(out)) as forks:
        scene = Scene(
            forks=forks,
            testbed=testbed,
            profiles=profiles,
            work=work,
            out=out,
            limit_s=options.limit,
            reduce_s=options.timeout,
        )
        runs: dict[str, Callable[[], Recovery]] = {
            "cleave": lambda: of_cleave(scene),
            "torchft": lambda: of_peers(scene, "torchft"),
            "hivemind": lambda: of_peers(scene, "hivemind"),
            "torchrun": lambda: of_torchrun(scene),
            "gpipe": lambda: of_torch(scene, Variant(kind="gpipe", wire="bf16", pipelines=ranks, micro_batches=8)),
            "ddp": lambda: of_torch(scene, Variant(kind="ddp")),
        }
        for _ in range(options.rounds):
            for system in options.systems:
                yield runs[system]()


def _shown(given: list[str]) -> str:
    """The command that measured this, without where it kept its logs."""
    words = list(given)
    if "--keep" in words:
        at = words.index("--keep")
        del words[at : at + 2]
    return shlex.join(["python", "-m", "benchmarks.recovery", *words])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.recovery",
        description="Kill one device in a step, on a testbed, and compare the time lost.",
    )
    parser.add_argument("fleet", type=Path, help="fleet CSV")
    parser.add_argument("--model", choices=MODELS, default="demo", help="model to train (default: demo)")
    parser.add_argument("--lora", action="store_true", help="train LoRA of rank 8 on q and v instead of all weights")
    parser.add_argument("--systems", nargs="+", choices=SYSTEMS, default=SYSTEMS, help="systems to run (default: all)")
    parser.add_argument("--rounds", type=int, default=1, help="kills of every system (default: 1)")
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds to wait for steps, and for recovery (default: 120)"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=15.0,
        help="seconds rivals wait in a reduction before they give up (default: 15)",
    )
    parser.add_argument("--keep", type=Path, help="directory for logs (default: a temporary one)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
