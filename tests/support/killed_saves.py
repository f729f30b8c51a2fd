"""A process that forks others to save checkpoints and kills them; `test_checkpoint` runs it, once per law.

It is a separate process because forking is safe only with a single thread, and forking spares each victim the import
of torch. A step's number determines its contents, so a restored checkpoint can be compared bit for bit.

    python -m tests.support.killed_saves at-random DIRECTORY KILLS
    python -m tests.support.killed_saves at-each-operation DIRECTORY SITUATION...
"""

from __future__ import annotations

import os
import random
import select
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from cleave.train.checkpoint import Position, RandomState, latest, path_of, restore, save

OPERATIONS = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.listdir", "os.scandir", "shutil.rmtree"}
KEEP = 2
SITUATIONS: dict[str, tuple[Sequence[int], Sequence[int], int]] = {
    "first": ([], [], 1),
    "next": ([3], [], 4),
    "next-of-many": ([1, 2, 3], [], 4),
    "same": ([4], [], 4),
    "same-of-many": ([3, 4], [], 4),
    "over-damage": ([3, 4], [4], 4),
}
"""Steps saved before, those of them whose checkpoints are damaged, and the step to save."""


def of_step(step: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Position]:
    torch.manual_seed(step)
    random.seed(step)
    model = torch.nn.Linear(200, 200)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.rand(1, 200)).sum().backward()
    optimizer.step()
    losses = tuple(float(index) for index in range(step))
    return model, optimizer, Position(step=step, next_batch=step, losses=losses, random_state=RandomState.capture())


def save_step(run: Path, step: int) -> None:
    save(run, *of_step(step), keep=KEEP)


def check(run: Path, at_least: int) -> int:
    """Check the law: the latest intact checkpoint is not of an earlier step, and holds what its step saved."""
    found = latest(run)
    assert found is not None, f"step {at_least} is lost: {sorted(path.name for path in run.rglob('*'))}"
    assert found.step >= at_least, f"step {at_least} was saved, {found.step} came back"
    model, optimizer, _ = of_step(0)
    position = restore(found, model, optimizer)
    expected, momentum, saved = of_step(found.step)
    assert position == saved
    assert all(torch.equal(value, expected.state_dict()[name]) for name, value in model.state_dict().items())
    buffers, originals = (
        [one.state_dict()["state"][index]["momentum_buffer"] for index in (0, 1)] for one in (optimizer, momentum)
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(buffers, originals, strict=True))
    return found.step


def forked(act: Callable[[], object]) -> int:
    """Process id of a forked child that acts and exits."""
    child = os.fork()
    if child:
        return child
    try:
        act()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def at_random(run: Path, kills: int) -> None:
    """Let each victim save step after step, some of them twice, and kill it a moment after one of its saves."""
    chance = random.Random(kills)
    step = reported = in_the_middle = 0
    for _ in range(kills):
        reading, writing = os.pipe()

        def save_on(first: int = step + 1, seed: int = chance.getrandbits(32), report: int = writing) -> None:
            own, number = random.Random(seed), first
            while True:
                save_step(run, number)
                os.write(report, number.to_bytes(4, "little"))
                number += own.randrange(2)

        victim = forked(save_on)
        os.close(writing)
        for _ in range(chance.randrange(1, 4)):
            reported = int.from_bytes(os.read(reading, 4), "little")
        select.select([], [], [], chance.uniform(0, 0.03))  # any moment will do: the law holds at all of them
        os.kill(victim, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(victim, 0)[1]) == signal.SIGKILL
        while more := os.read(reading, 4):
            reported = int.from_bytes(more, "little")
        os.close(reading)
        in_the_middle += any(path.name.startswith(".") for path in (run / "checkpoints").iterdir())
        step = check(run, reported)
    print(f"{kills} kills, {in_the_middle} in the middle of a save, {step} steps")  # noqa: T201


def at_each_operation(directory: Path, names: Sequence[str]) -> None:
    """Kill a save before its first disk operation, before its second, and so on until one completes."""
    kills = 0
    for name in names:
        before, damaged, step = SITUATIONS[name]
        start = directory / name / "start"
        for number in before:
            save(start, *of_step(number), keep=99)
        for number in damaged:
            (path_of(start, number) / "state.json").write_bytes(b"{")
        start.mkdir(parents=True, exist_ok=True)
        good = max(set(before) - set(damaged), default=0)
        operation, ended = 0, False
        while not ended:
            run = directory / name / "run"
            shutil.copytree(start, run)
            ended = dies_at(run, step, operation)
            if good or ended:
                check(run, step if ended else good)
            second = operation % 7  # the save after a crash may be killed too, also while it cleans up
            kills += (not ended) + (not dies_at(run, step, second))
            if good or ended:
                check(run, step if ended else good)
            save_step(run, step)
            check(run, step)
            left = sorted(path.name for path in (run / "checkpoints").iterdir())
            assert len(left) <= max(KEEP, 1), left
            assert all(path.startswith("step-") for path in left), left
            shutil.rmtree(run)
            operation += 1
    print(f"{kills} kills")  # noqa: T201


def dies_at(run: Path, step: int, operation: int) -> bool:
    """Save in a child killed before a given disk operation; return whether the save completed nonetheless."""

    def save_dying() -> None:
        count = 0

        def strike(event: str, arguments: object) -> None:
            nonlocal count
            if event in OPERATIONS:
                if count == operation:
                    os.kill(os.getpid(), signal.SIGKILL)
                count += 1

        what = of_step(step)
        sys.addaudithook(strike)
        save(run, *what, keep=KEEP)

    status = os.waitpid(forked(save_dying), 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0
    return not os.WIFSIGNALED(status)


if __name__ == "__main__":
    torch.set_num_threads(1)
    of_step(0)  # makes torch load lazily imported parts once, so that no child has to
    if sys.argv[1] == "at-random":
        at_random(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        at_each_operation(Path(sys.argv[2]), sys.argv[3:])
