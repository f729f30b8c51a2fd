"""A run trains as plain torch would, and nothing that stops it costs a finished step."""

from __future__ import annotations

import math
import re
import signal
import threading
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests.support.runs import TEXT, at_steps, before_forward, train
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from cleave.config import TrainConfig, load_config
from cleave.errors import CleaveError, InputError, ModelError
from cleave.events import AnyEvent, CheckpointSaved, Evaluated, Note, Resumed, RunFinished, RunStarted, StepDone
from cleave.train import checkpoint, saving
from cleave.train.data import Batches, open_corpus, split
from cleave.train.interrupts import Interrupts
from cleave.train.loop import Traffic, run
from cleave.train.models import build_model, generate_text
from cleave.train.optimizer import learning_rate
from cleave.train.tokens import ByteTokenizer

Limit = Callable[[int | None], None]


class Vanished(Exception):
    """Stands for any error a fleet may raise in the middle of a step."""


@pytest.fixture
def config(tmp_path: Path) -> TrainConfig:
    data = tmp_path / "text.txt"
    data.write_text(TEXT)
    return TrainConfig(
        model="tiny-llama",
        data=data,
        steps=6,
        sequence=32,
        batch=4,
        warmup_steps=2,
        eval_every=0,
        eval_batches=1,
        save_every=0,
        tensorboard=False,
        sample=0,
    )


def _vanish() -> None:
    raise Vanished("the fleet is gone")


def test_losses_equal_those_of_a_plain_torch_loop(config: TrainConfig, tmp_path: Path) -> None:
    config = replace(config, accumulate=2, weight_decay=0.0)
    model, _ = build_model(config.model, "fp32", config.seed)
    training, _ = split(open_corpus([TEXT], ByteTokenizer()), config.sequence)
    batches = Batches(training, config.sequence, config.batch, config.seed)
    optimizer = torch.optim.AdamW(model.parameters(), betas=config.betas, weight_decay=0.0)
    losses: list[float] = []
    norms: list[float] = []
    for step in range(config.steps):
        optimizer.param_groups[0]["lr"] = learning_rate(config, step + 1)
        optimizer.zero_grad()
        tokens = torch.from_numpy(batches.batch(2 * step)), torch.from_numpy(batches.batch(2 * step + 1))
        both = torch.cat(tokens)
        loss = cross_entropy(model(input_ids=both[:, :-1]).logits.flatten(0, 1), both[:, 1:].flatten())
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)))
        optimizer.step()
        losses.append(loss.item())
    events: list[AnyEvent] = []
    assert train(config, tmp_path / "run", events=events).losses == pytest.approx(losses, abs=1e-5)
    assert [event.gradient_norm for event in events if isinstance(event, StepDone)] == pytest.approx(norms, rel=1e-3)
    assert losses[-1] < losses[0] - 1


def test_concurrent_micro_batches_give_the_losses_of_sequential_ones(config: TrainConfig, tmp_path: Path) -> None:
    config = replace(config, accumulate=3)
    threads: set[str] = set()
    meet = threading.Barrier(3, timeout=60)

    def hook(*_: object) -> None:
        threads.add(threading.current_thread().name)
        meet.wait()

    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        model.register_forward_pre_hook(hook)
        return model

    serial = train(config, tmp_path / "serial")
    together = train(replace(config, in_flight=3, eval_batches=0), tmp_path / "together", wrap=wrap)
    assert len(threads) >= 3
    assert together.losses == pytest.approx(serial.losses, abs=1e-5)


def test_an_interrupted_and_resumed_run_has_exactly_the_same_losses(config: TrainConfig, tmp_path: Path) -> None:
    # The named OPT sizes have dropout, so the random state matters too; here a tiny model gets some.
    model, _ = build_model("tiny-gpt2", "fp32", 1)
    model.config.resid_pdrop = 0.2
    model.save_pretrained(tmp_path / "model")
    config = replace(config, model=str(tmp_path / "model"), accumulate=2)
    whole = train(config, tmp_path / "whole")
    events: list[AnyEvent] = []
    with pytest.raises(Vanished):
        train(config, tmp_path / "broken", wrap=before_forward(8, _vanish), events=events)
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [3]
    torch.manual_seed(99)
    resumed = train(config, tmp_path / "broken", resume=True, events=events)
    assert resumed.losses == whole.losses
    assert [event.loss for event in events if isinstance(event, StepDone)] == list(whole.losses)
    assert [event.step for event in events if isinstance(event, Resumed)] == [3]
    assert resumed.evaluation_loss == whole.evaluation_loss
    assert resumed.tokens == 3 * config.tokens_per_step


def test_a_run_killed_between_checkpoints_continues_from_the_last_one(config: TrainConfig, tmp_path: Path) -> None:
    config = replace(config, save_every=2)
    whole = train(config, tmp_path / "whole")
    with pytest.raises(Vanished):
        train(config, tmp_path / "killed", wrap=before_forward(6, _vanish))
    (checkpoint.path_of(tmp_path / "killed", 5) / "state.json").unlink()  # as if killed while saving step 5
    events: list[AnyEvent] = []
    assert train(config, tmp_path / "killed", resume=True, events=events).losses == whole.losses
    assert any(isinstance(event, Note) and "step-000005 is damaged" in event.text for event in events)
    assert [event.step for event in events if isinstance(event, Resumed)] == [4]


def test_a_run_killed_before_its_first_checkpoint_starts_again(config: TrainConfig, tmp_path: Path) -> None:
    whole = train(config, tmp_path / "whole")
    with pytest.raises(Vanished):
        train(config, tmp_path / "killed", wrap=before_forward(1, _vanish))
    assert train(config, tmp_path / "killed", resume=True).losses == whole.losses


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_saves_the_last_finished_step_and_says_how_to_resume(
    config: TrainConfig, tmp_path: Path, number: signal.Signals
) -> None:
    handler = signal.getsignal(number)
    events: list[AnyEvent] = []
    wrap = before_forward(5, lambda: signal.raise_signal(number))
    summary = train(config, tmp_path / "run", wrap=wrap, events=events)
    assert (summary.reason, summary.step, summary.exported) == ("interrupted", 4, None)
    assert summary.checkpoint == checkpoint.path_of(tmp_path / "run", 4)
    assert any(isinstance(event, Note) and f"--resume --out {tmp_path / 'run'}" in event.text for event in events)
    assert signal.getsignal(number) == handler
    assert train(config, tmp_path / "run", resume=True).losses == train(config, tmp_path / "whole").losses


def test_a_run_started_with_sigint_ignored_ends_only_on_sigterm(config: TrainConfig, tmp_path: Path) -> None:
    """As it is under nohup, or in the background of a script."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    numbers = {2: signal.SIGINT, 4: signal.SIGTERM}
    actions = {step: lambda number=number: signal.raise_signal(number) for step, number in numbers.items()}
    try:
        summary = train(config, tmp_path / "run", act=at_steps(actions))
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
    assert (summary.reason, summary.step) == ("interrupted", 4)


@pytest.mark.parametrize(("minutes", "saved"), [(0, [6]), (0.5, [1, 2, 3, 4, 5, 6]), (2, [2, 4, 6]), (2.5, [3, 6])])
def test_a_checkpoint_is_written_when_its_interval_has_passed(
    config: TrainConfig, tmp_path: Path, minutes: float, saved: list[int]
) -> None:
    now_s = 0.0

    def a_minute_a_step(event: AnyEvent) -> None:
        nonlocal now_s
        now_s += 60 * isinstance(event, StepDone)

    events: list[AnyEvent] = []
    config = replace(config, save_minutes=minutes)
    train(config, tmp_path / "run", events=events, act=a_minute_a_step, clock=lambda: now_s)
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == saved


def test_a_full_disk_is_reported_once_and_saves_resume_when_there_is_room(
    config: TrainConfig, tmp_path: Path, limit_files: Limit
) -> None:
    config = replace(config, save_every=1)
    events: list[AnyEvent] = []
    act = at_steps({2: lambda: limit_files(1000), 5: lambda: limit_files(None)})
    summary = train(config, tmp_path / "run", events=events, act=act)
    assert summary.losses == train(config, tmp_path / "whole").losses
    notes = [event.text for event in events if isinstance(event, Note)]
    assert len(notes) == 1
    assert "cannot write the checkpoint" in notes[0]
    assert "training continues" in notes[0]
    assert [event.step for event in events if isinstance(event, CheckpointSaved)] == [1, 5, 6]


def test_a_full_disk_costs_tensorboard_no_step(config: TrainConfig, tmp_path: Path, limit_files: Limit) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    act = at_steps({2: lambda: limit_files(500), 5: lambda: limit_files(None)})
    summary = train(replace(config, tensorboard=True), tmp_path / "run", act=act)
    read = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    assert [event.value for event in read.Scalars("loss/training")] == pytest.approx(summary.losses)


def test_a_full_disk_at_the_end_raises_one_sentence_and_costs_no_older_checkpoint(
    config: TrainConfig, tmp_path: Path, limit_files: Limit
) -> None:
    events: list[AnyEvent] = []
    act = at_steps({5: lambda: limit_files(1000)})
    with pytest.raises(CleaveError, match=r"cannot write the checkpoint .*step-000006"):
        train(replace(config, save_every=4), tmp_path / "run", events=events, act=act)
    limit_files(None)
    assert not any(isinstance(event, Note) for event in events)
    assert train(config, tmp_path / "run", resume=True).losses == train(config, tmp_path / "whole").losses


def test_a_model_that_cannot_be_exported_at_the_end_is_exported_by_a_resume(
    config: TrainConfig, tmp_path: Path, limit_files: Limit
) -> None:
    def fill(event: AnyEvent) -> None:
        if isinstance(event, RunFinished):
            limit_files(1000)

    with pytest.raises(CleaveError, match=r"done and saved, .*; make room, then: cleave train --resume --out"):
        train(config, tmp_path / "run", act=fill)
    limit_files(None)
    assert train(config, tmp_path / "run", resume=True).exported == tmp_path / "run" / "model"


def test_a_full_disk_does_not_hide_the_error_that_stopped_the_run(
    config: TrainConfig, tmp_path: Path, limit_files: Limit
) -> None:
    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        steps = 0

        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            nonlocal steps
            steps += 1
            return gradient * (math.inf if steps == 4 else 1)

        next(model.parameters()).register_hook(spoil)
        return model

    events: list[AnyEvent] = []
    act = at_steps({3: lambda: limit_files(1000)})
    with pytest.raises(CleaveError, match=r"step 4's gradient is .*step 2 is saved"):
        train(replace(config, save_every=2), tmp_path / "run", wrap=wrap, events=events, act=act)
    assert sum(isinstance(event, Note) for event in events) == 1


def test_the_settings_file_stays_intact_on_a_full_disk(config: TrainConfig, tmp_path: Path, limit_files: Limit) -> None:
    train(replace(config, steps=1), tmp_path / "run")
    before = (tmp_path / "run" / "config.toml").read_bytes()
    limit_files(100)
    with pytest.raises(InputError, match=r"cannot write .*config\.toml: .*; make room there"):
        train(replace(config, steps=2), tmp_path / "run", resume=True)
    saving.keep_settings(replace(config, steps=1), tmp_path / "run")  # unchanged settings need no room
    limit_files(None)
    assert (tmp_path / "run" / "config.toml").read_bytes() == before
    assert not [path for path in (tmp_path / "run").iterdir() if path.name.startswith(".")]


def test_a_finished_run_is_not_resumed_but_trains_on_with_more_steps(config: TrainConfig, tmp_path: Path) -> None:
    train(replace(config, steps=1), tmp_path / "run")
    with pytest.raises(InputError, match=r"1 of 1 steps.*--steps"):
        train(replace(config, steps=1), tmp_path / "run", resume=True)
    assert train(replace(config, steps=2), tmp_path / "run", resume=True).step == 2


def test_a_run_with_damaged_checkpoints_does_not_start_over(config: TrainConfig, tmp_path: Path) -> None:
    train(replace(config, steps=1), tmp_path / "run")
    (checkpoint.path_of(tmp_path / "run", 1) / "state.json").unlink()
    for resume in (True, False):
        with pytest.raises(InputError, match=rf"{re.escape(str(tmp_path / 'run'))}\b.*damaged.*: step-000001\b"):
            train(config, tmp_path / "run", resume=resume)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_swallows_in_a_finalizer_is_not_lost(config: TrainConfig, tmp_path: Path) -> None:
    def strike() -> None:
        weakref.finalize(lambda: None, signal.raise_signal, signal.SIGINT)  # the lambda dies at once

    summary = train(config, tmp_path / "run", wrap=before_forward(3, strike))
    assert (summary.reason, summary.step) == ("interrupted", 3)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_that_python_swallows_ends_a_wait_without_end() -> None:
    with Interrupts(remind_s=0.05):
        weakref.finalize(lambda: None, signal.raise_signal, signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            threading.Event().wait()


def test_a_second_interrupt_waits_for_the_first_ones_save(config: TrainConfig, tmp_path: Path) -> None:
    wrap = before_forward(3, lambda: signal.raise_signal(signal.SIGINT))
    events: list[AnyEvent] = []

    def impatient(event: AnyEvent) -> None:
        if isinstance(event, CheckpointSaved):
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(config, tmp_path / "run", wrap=wrap, events=events, act=impatient)
    assert any(isinstance(event, Note) and "resume with" in event.text for event in events)
    good = checkpoint.latest(tmp_path / "run")
    assert good is not None
    assert good.step == 2


def test_an_interrupt_during_an_update_waits_for_its_end(config: TrainConfig, tmp_path: Path) -> None:
    count = 0

    def strike(*_: object) -> None:
        nonlocal count
        count += 1
        if count == 3:
            signal.raise_signal(signal.SIGINT)

    hook = register_optimizer_step_pre_hook(strike)
    events: list[AnyEvent] = []
    try:
        summary = train(config, tmp_path / "run", events=events)
    finally:
        hook.remove()
    assert (summary.reason, summary.step) == ("interrupted", 3)
    assert [event.step for event in events if isinstance(event, StepDone)] == [1, 2, 3]
    assert train(config, tmp_path / "run", resume=True).losses == train(config, tmp_path / "whole").losses


def test_a_failed_update_is_never_saved(config: TrainConfig, tmp_path: Path) -> None:
    count = 0

    def fail(*_: object) -> None:
        nonlocal count
        count += 1
        if count == 3:
            raise MemoryError

    hook = register_optimizer_step_post_hook(fail)
    try:
        with pytest.raises(MemoryError):
            train(config, tmp_path / "run")
    finally:
        hook.remove()
    assert checkpoint.latest(tmp_path / "run") is None


@pytest.mark.parametrize("in_flight", [1, 2])
def test_a_non_finite_loss_stops_before_the_update_and_loses_nothing(
    config: TrainConfig, tmp_path: Path, in_flight: int
) -> None:
    config = replace(config, accumulate=2, in_flight=in_flight)
    spoil = False

    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        def hook(module: object, inputs: object, output: object) -> None:
            if spoil:
                output.logits = output.logits * math.nan  # pyright: ignore

        model.register_forward_hook(hook)
        return model

    events: list[AnyEvent] = []

    def observe(event: AnyEvent) -> None:
        nonlocal spoil
        events.append(event)
        spoil = isinstance(event, StepDone) and event.step == 3

    with pytest.raises(CleaveError, match=r"loss of step 4 is nan.*step-000003; go on with: .*--learning-rate 0\.0007"):
        run(config, tmp_path / "run", wrap=wrap, observe=observe, traffic=Traffic, resume=False)
    assert isinstance(events[-1], RunFinished)
    assert (events[-1].step, "nan" in events[-1].reason) == (3, True)
    resumed = train(config, tmp_path / "run", resume=True)
    assert resumed.losses == pytest.approx(train(config, tmp_path / "whole").losses, abs=1e-6)


def test_a_non_finite_gradient_stops_the_first_step_with_advice(config: TrainConfig, tmp_path: Path) -> None:
    def wrap(model: torch.nn.Module) -> torch.nn.Module:
        next(model.parameters()).register_hook(lambda gradient: gradient * math.inf)
        return model

    with pytest.raises(CleaveError, match=r"step 1's gradient is (inf|nan).*start again with --learning-rate"):
        train(config, tmp_path / "run", wrap=wrap)
    assert checkpoint.latest(tmp_path / "run") is None


def test_settings_given_on_resume_take_effect(config: TrainConfig, tmp_path: Path) -> None:
    train(replace(config, steps=3), tmp_path / "run")
    events: list[AnyEvent] = []
    train(replace(config, learning_rate=1e-9, weight_decay=0.0), tmp_path / "run", resume=True, events=events)
    assert all(event.learning_rate <= 1e-9 for event in events if isinstance(event, StepDone))
    written = load_config(tmp_path / "run" / "config.toml", {})
    assert (written.learning_rate, written.weight_decay) == (1e-9, 0.0)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-opt", "tiny-gpt2"])
def test_the_exported_model_loads_with_hugging_face_and_gives_the_same_logits(
    config: TrainConfig, tmp_path: Path, name: str
) -> None:
    trained: list[torch.nn.Module] = []

    def keep(model: torch.nn.Module) -> torch.nn.Module:
        trained.append(model)
        return model

    summary = train(replace(config, model=name, steps=2), tmp_path / "run", wrap=keep)
    loaded = AutoModelForCausalLM.from_pretrained(summary.exported)
    tokens = torch.arange(64).view(1, 64)
    assert torch.equal(loaded(input_ids=tokens).logits, trained[0].eval()(input_ids=tokens).logits)
    assert loaded.config.use_cache


def test_a_model_with_its_own_tokenizer_is_exported_with_it(config: TrainConfig, tmp_path: Path) -> None:
    words = {word: index for index, word in enumerate(sorted({*TEXT.split(), "?"}))}
    raw = Tokenizer(models.WordLevel(words, unk_token="?"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="?").save_pretrained(tmp_path / "own")
    model = build_model("tiny-opt", "fp32", 1)[0]
    model.resize_token_embeddings(len(words))
    model.save_pretrained(tmp_path / "own")
    summary = train(replace(config, model=str(tmp_path / "own"), steps=1, sample=5), tmp_path / "run")
    assert summary.exported is not None
    assert AutoTokenizer.from_pretrained(summary.exported).encode("sheep") == [words["sheep"]]
    assert set(summary.sample.split()) <= words.keys()


def test_events_describe_the_run_and_the_bytes_of_each_step(config: TrainConfig, tmp_path: Path) -> None:
    events: list[AnyEvent] = []
    calls = 0

    def traffic() -> Traffic:
        nonlocal calls
        calls += 1
        return Traffic(devices=3, down_bytes=100 * calls, up_bytes=10 * calls, waiting_s=0.5 * calls)

    config = replace(config, steps=2, eval_every=1, save_every=1)
    run(config, tmp_path / "run", wrap=lambda model: model, observe=events.append, traffic=traffic, resume=False)
    kinds = [type(event) for event in events]
    assert kinds == [RunStarted, *2 * [StepDone, Evaluated, CheckpointSaved], RunFinished]
    steps = [event for event in events if isinstance(event, StepDone)]
    moved = [(event.devices, event.down_bytes, event.up_bytes, event.waiting_s) for event in steps]
    assert moved == [(3, 100, 10, 0.5)] * 2
    assert events[-1] == RunFinished(step=2, loss=steps[-1].loss, reason="done")
    assert load_config(tmp_path / "run" / "config.toml", {}) == config


def test_the_learning_rate_rises_linearly_and_falls_as_a_cosine_to_its_minimum() -> None:
    config = TrainConfig(steps=100, warmup_steps=10, learning_rate=1.0, minimum_learning_rate_share=0.1)
    rates = [learning_rate(config, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[54] == pytest.approx(0.55)
    assert rates[-1] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in pairwise(rates[9:]))
    assert learning_rate(replace(config, warmup_steps=0, steps=1), 1) == pytest.approx(0.1)


@pytest.mark.parametrize(
    "change", [{"dtype": "bf16"}, {"autocast": "bf16"}, {"checkpointing": True}, {"clip": 0.0}, {"model": "tiny-opt"}]
)
def test_every_precision_checkpointing_and_clipping_setting_trains(
    config: TrainConfig, tmp_path: Path, change: dict[str, object]
) -> None:
    config = load_config(None, {"data": config.data, "model": config.model} | change | {"steps": 8, "sequence": 32})
    config = replace(config, tensorboard=False, sample=0, warmup_steps=2, batch=4)
    summary = train(config, tmp_path / "run")
    assert summary.losses[-1] < summary.losses[0] - 0.5
    assert summary.evaluation_loss is not None
    assert summary.evaluation_loss < summary.losses[0]


def test_gradient_checkpointing_changes_no_loss(config: TrainConfig, tmp_path: Path) -> None:
    plain = train(config, tmp_path / "plain").losses
    saving = train(replace(config, checkpointing=True), tmp_path / "saving").losses
    assert saving == pytest.approx(plain, abs=1e-6)


def test_the_sample_depends_on_the_seed_and_leaves_the_random_state_alone() -> None:
    model, _ = build_model("tiny-llama", "fp32", 1)
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    texts = [generate_text(model, ByteTokenizer(), "the ", 20, seed) for seed in (1, 1, 2)]
    assert torch.equal(torch.rand(1), expected)
    assert texts[0] == texts[1] != texts[2]
    assert generate_text(model, ByteTokenizer(), "", 5, 1)
    assert generate_text(model, ByteTokenizer(), "x" * 1024, 5, 1) == ""


def test_tensorboard_gets_the_losses_where_it_is_installed(config: TrainConfig, tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    summary = train(replace(config, steps=2, tensorboard=True), tmp_path / "run")
    read = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    read.Reload()
    assert [event.value for event in read.Scalars("loss/training")] == pytest.approx(summary.losses)


def _must_not_start(model: torch.nn.Module) -> torch.nn.Module:
    raise AssertionError("bad input must be told before the fleet is started")


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"data": Path("absent.txt")}, InputError, r"absent\.txt"),
        ({"sequence": 1025}, InputError, r"tiny-llama .*\b1024\b.*--sequence .*\b1025\b"),
        ({"model": "tiny-lama"}, ModelError, "tiny-llama"),
        ({"model": "tiny-gpt2", "sequence": 1024, "data": "short"}, InputError, r"\b9 tokens.*\b1025\b.*--sequence"),
    ],
)
def test_bad_input_is_reported_before_the_fleet_starts(
    config: TrainConfig, tmp_path: Path, change: dict[str, object], error: type[CleaveError], said: str
) -> None:
    if change.get("data") == "short":
        (tmp_path / "short").write_text("too short")
        change["data"] = tmp_path / "short"
    wrong = load_config(None, {"model": "tiny-llama", "data": config.data} | change)
    with pytest.raises(error, match=said):
        train(wrong, tmp_path / "run", wrap=_must_not_start)
    assert not (tmp_path / "run").exists()


def test_text_with_more_tokens_than_the_models_vocabulary_is_refused(config: TrainConfig, tmp_path: Path) -> None:
    model, _ = build_model("tiny-opt", "fp32", 1)
    model.resize_token_embeddings(100)
    model.save_pretrained(tmp_path / "small")
    with pytest.raises(InputError, match=r"\b118\b.*small .*\b100\b.*tokenizer"):
        train(replace(config, model=str(tmp_path / "small")), tmp_path / "run", wrap=_must_not_start)


def test_a_run_is_never_overwritten_and_never_resumed_from_nothing(config: TrainConfig, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no run .*absent.*--out"):
        train(config, tmp_path / "absent", resume=True)
    train(replace(config, steps=1), tmp_path / "run")
    with pytest.raises(InputError, match=r"/run .*--resume.*--out"):
        train(config, tmp_path / "run")
