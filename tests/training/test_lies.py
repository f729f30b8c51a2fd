"""The losses under liars are those of plain torch, in both grains and at every level that audits.

Real training runs on real workers in this process; only the draws that sample audits are scripted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from tests.support.in_process import ROOMY, InProcess
from tests.support.plans import arranged
from tests.support.runs import TEXT, train

from cleave.config import TrainConfig
from cleave.core.model.grain import Grain
from cleave.core.verify.trust import PROBATION, Level
from cleave.events import AnyEvent, Event, ResultRefused, RolledBack, StepDone
from cleave.train.loop import Summary
from cleave.train.offload.distribute import distribute
from cleave.transport.lying import Lie, Manner

Told = TypeVar("Told", bound=Event)
LAYOUT = [(2, [["d0"]]), (3, [["d1"]])]
"""The liars have work at any speed; the third device takes over from them."""
STEPS = 12
UNCHECKED_AFTER = PROBATION + 1
"""Step after which proven devices go unchecked: the one in which that was first possible, and its state was kept."""
CAUGHT_AT = 9
"""Step in which the sample finds the liar."""


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    data = tmp_path / "text.txt"
    data.write_text(TEXT)
    return TrainConfig(
        model="tiny-llama",
        data=data,
        steps=STEPS,
        sequence=32,
        batch=4,
        warmup_steps=2,
        eval_every=0,
        eval_batches=1,
        save_every=0,
        tensorboard=False,
        sample=0,
    )


@pytest.fixture
def plain(config: TrainConfig, tmp_path: Path) -> Summary:
    return train(config, tmp_path / "plain")


class Killed(Exception):
    pass


class Sample:
    """Audits nothing of proven devices until told to."""

    def __init__(self) -> None:
        self.finds = False

    def __call__(self) -> float:
        return 0.0 if self.finds else 0.999


def train_on(
    config: TrainConfig,
    directory: Path,
    *,
    trust: Level,
    grain: Grain,
    lies: dict[int, Lie],
    begin_after: int = 0,
    caught_at: int = CAUGHT_AT,
    resume: bool = False,
    killed_after: int = STEPS + 1,
) -> tuple[Summary, list[AnyEvent]]:
    """Train on three devices that begin to lie after a step; the sample finds everything from `caught_at` on."""
    seen: list[AnyEvent] = []
    sample = Sample()
    for lie in lies.values():
        lie.is_on = begin_after == 0

    def act(event: AnyEvent) -> None:
        if isinstance(event, StepDone):
            sample.finds |= event.step == caught_at - 1
            if event.step == killed_after:
                raise Killed
            for lie in lies.values():
                lie.is_on |= event.step >= begin_after

    with InProcess(
        [ROOMY] * 3, arrange=arranged(LAYOUT, chunk=32), trust=trust, lies=lies, draw=sample, listener=seen.append
    ) as fleet:
        summary = train(
            config,
            directory,
            wrap=lambda model: distribute(
                model, fleet.cluster, offload="always", tell=lambda event: None, immediate=False, grain=grain
            ),
            events=seen,
            act=act,
            resume=resume,
            watching=fleet.cluster.vouching,
        )
    return summary, seen


def told(events: list[AnyEvent], kind: type[Told]) -> Iterator[Told]:
    return (event for event in events if isinstance(event, kind))


LIES: dict[str, Callable[[], dict[int, Lie]]] = {
    "flips its weight gradients": lambda: {0: Lie(("collect",), "flipped")},
    "scales its weight gradients by 0.999": lambda: {0: Lie(("collect",), factor=0.999)},
    "scales its weight gradients by 0.9, after some honest ones": lambda: {0: Lie(("collect",), factor=0.9, skip=3)},
    "flips every 3rd input gradient": lambda: {0: Lie(("backward",), "flipped", every=3)},
    "changes one row, forward": lambda: {0: Lie(("forward",), "one row")},
    "two that agree": lambda: {0: Lie(("collect",), "flipped"), 1: Lie(("collect",), "flipped")},
}


@pytest.mark.parametrize("lies", LIES)
def test_of_strangers_no_lie_counts(lies: str, config: TrainConfig, plain: Summary, tmp_path: Path) -> None:
    made = LIES[lies]()
    summary, events = train_on(config, tmp_path / "run", trust="stranger", grain="resident", lies=made)
    assert all(lie.told for lie in made.values())
    assert {event.device for event in told(events, ResultRefused)} == {f"d{number}" for number in made}
    assert not list(told(events, RolledBack)), "nothing unchecked was used"
    assert summary.losses == pytest.approx(plain.losses, abs=1e-4)
    assert summary.evaluation_loss == pytest.approx(plain.evaluation_loss, abs=1e-4)


@pytest.mark.parametrize("manner", ["flipped", "scaled", "one row"])
def test_no_lie_counts_in_products(manner: Manner, config: TrainConfig, plain: Summary, tmp_path: Path) -> None:
    lies = {number: Lie(("product",), manner, factor=0.999, skip=5, every=10, most=2) for number in range(2)}
    summary, events = train_on(config, tmp_path / "run", trust="own", grain="gemm", lies=lies)
    wrong = {event.device for event in told(events, ResultRefused)}
    assert wrong
    assert wrong <= {f"d{number}" for number, lie in lies.items() if lie.told}
    assert summary.losses == pytest.approx(plain.losses, abs=1e-4)


@pytest.mark.parametrize("lies", LIES)
def test_what_a_known_device_did_unchecked_is_undone_when_it_is_found_wrong(
    lies: str, config: TrainConfig, plain: Summary, tmp_path: Path
) -> None:
    settings = replace(config, save_every=2, keep=1)
    summary, seen = train_on(
        settings, tmp_path / "run", trust="known", grain="resident", lies=LIES[lies](), begin_after=UNCHECKED_AFTER
    )
    back = next(told(seen, RolledBack))
    assert (back.step, back.from_step) == (UNCHECKED_AFTER, CAUGHT_AT)
    before = [event.loss for event in told(seen, StepDone)][:CAUGHT_AT]
    assert before != pytest.approx(plain.losses[:CAUGHT_AT], abs=1e-6), "the lies did have an effect"
    assert summary.losses == pytest.approx(plain.losses, abs=1e-4)
    assert summary.evaluation_loss == pytest.approx(plain.evaluation_loss, abs=1e-4)
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [f"step-{STEPS:06d}"], "neither states with lies nor restore points that nobody needs"


def test_a_resumed_run_undoes_what_was_unchecked_before(config: TrainConfig, plain: Summary, tmp_path: Path) -> None:
    lie = Lie(("collect",), "flipped")
    first = replace(config, save_every=1, keep=1)
    with pytest.raises(Killed):
        train_on(
            first,
            tmp_path / "run",
            trust="known",
            grain="resident",
            lies={0: lie},
            begin_after=UNCHECKED_AFTER,
            killed_after=CAUGHT_AT - 2,
        )
    assert lie.told
    summary, seen = train_on(
        config,
        tmp_path / "run",
        trust="stranger",
        grain="resident",
        lies={0: Lie(("collect",), "flipped")},
        resume=True,
    )
    back = next(told(seen, RolledBack))
    assert back.step == UNCHECKED_AFTER
    assert summary.losses == pytest.approx(plain.losses, abs=1e-4)


def test_whoever_lies_all_the_time_is_found_in_the_last_step_at_the_latest(
    config: TrainConfig, plain: Summary, tmp_path: Path
) -> None:
    summary, seen = train_on(
        replace(config, save_every=2, keep=1),
        tmp_path / "run",
        trust="known",
        grain="resident",
        lies={0: Lie(("collect",), "flipped")},
        begin_after=UNCHECKED_AFTER,
        caught_at=STEPS + 1,
    )
    back = next(told(seen, RolledBack))
    assert (back.step, back.from_step) == (UNCHECKED_AFTER, STEPS)
    assert summary.losses == pytest.approx(plain.losses, abs=1e-4)
