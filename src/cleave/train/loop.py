# pyright: standard
"""The training loop: text and a model in; AdamW steps, checkpoints and an exported model out.

A plain PyTorch loop. Devices enter only through `wrap`, which may change how the model computes but not what, and
`traffic`, whose running totals are reported with each step. Parameters change only in the optimizer's step, so after
any failure elsewhere (a vanished fleet, a NaN, Ctrl-C) the last finished step can still be saved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from transformers import PreTrainedModel

from cleave.config import TrainConfig
from cleave.core.verify.vouching import Vouching
from cleave.errors import CleaveError, InputError
from cleave.events import Evaluated, Listener, Note, Resumed, RunFinished, RunStarted, StepDone
from cleave.train import saving
from cleave.train.checkpoint import Checkpoint, Position, RandomState
from cleave.train.data import (
    Batches,
    Corpus,
    evaluation_batches,
    library_documents,
    open_corpus,
    read_documents,
    split,
)
from cleave.train.interrupts import Interrupts
from cleave.train.models import build_model, export, generate_text, load_directory, positions
from cleave.train.offload import decoder
from cleave.train.optimizer import adamw, learning_rate
from cleave.train.tensorboard import with_tensorboard
from cleave.train.tokens import ByteTokenizer, Tokenizer, load_tokenizer
from cleave.train.undo import Undo, Watching


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """A snapshot of the fleet: devices connected now, and totals since the start."""

    devices: int = 0
    down_bytes: int = 0
    up_bytes: int = 0
    waiting_s: float = 0.0
    checking_s: float = 0.0
    predicted_s: float | None = None
    """Prediction for the last step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The outcome of a run."""

    step: int
    """Finished steps, including those before a resume."""
    reason: str
    """`done` or `interrupted`."""
    losses: tuple[float, ...]
    evaluation_loss: float | None
    tokens: int
    """Trained on since this start or resume."""
    seconds: float
    parameters: int
    checkpoint: Path | None
    exported: Path | None
    """Path of the finished model, for AutoModelForCausalLM.from_pretrained."""
    prompt: str
    sample: str
    """The finished model's continuation of the prompt, which is held-out text."""


def run(
    config: TrainConfig,
    run_directory: Path,
    *,
    wrap: Callable[[torch.nn.Module], torch.nn.Module],
    observe: Listener,
    traffic: Callable[[], Traffic],
    watching: Watching = lambda: nullcontext(Vouching()),
    resume: bool,
    clock: Callable[[], float] = time.perf_counter,
) -> Summary:
    """Train as configured. All input is validated before `wrap` is called, so `wrap` may start the fleet."""
    found = saving.find(run_directory, resume=resume)
    if found is not None and found.step >= config.steps and (run_directory / "model").is_dir():
        raise InputError(
            f"the run in {run_directory} is finished: {found.step} of {config.steps} steps; "
            "give a larger --steps to continue"
        )
    if found is not None and config.scale_test:
        raise InputError(f"{run_directory} holds a trained model, which a scale test would ruin; give another --out")
    documents = library_documents() if config.data is None else read_documents(config.data)
    model, model_directory = build_model(config.model, config.dtype, config.seed, config.dropout)
    tokenizer = load_tokenizer(model_directory)
    corpus = open_corpus(documents, tokenizer)
    training, evaluation = split(corpus, config.sequence)
    _check_fit(config, model, corpus)
    with ExitStack() as stack:
        if config.tensorboard:
            observe = stack.enter_context(with_tensorboard(run_directory, observe, found.step if found else 0))
        trainer = _Trainer(config, run_directory, model, training, evaluation, observe, traffic, watching, clock)
        trainer.start(
            found,
            resume=resume,
            weights="fresh" if model_directory is None else "pretrained",
            tokenizer="bytes" if isinstance(tokenizer, ByteTokenizer) else "model",
        )
        reason = trainer.train(trainer.wrapped(wrap), stack.enter_context(Interrupts()))
        exported, prompt, sample = None, "", ""
        if reason == "done" and config.scale_test:
            observe(Note(text="this was a scale test: its losses and weights mean nothing, and no model was saved"))
        elif reason == "done":
            exported = _export(model, tokenizer, run_directory)
            if config.sample:
                trainer.drop_optimizer()
                prompt = _prompt(tokenizer.decode((evaluation.tokens if len(evaluation) else training.tokens)[:256]))
                sample = generate_text(load_directory(exported), tokenizer, prompt, config.sample, config.seed)
        return trainer.summary(reason, exported, prompt, sample)


class _Trainer:
    """The mutable state of a run: parameters, optimizer, and the position that matches them."""

    def __init__(
        self,
        config: TrainConfig,
        run_directory: Path,
        model: PreTrainedModel,
        training: Corpus,
        evaluation: Corpus,
        observe: Listener,
        traffic: Callable[[], Traffic],
        watching: Watching,
        clock: Callable[[], float],
    ) -> None:
        self._config, self._directory, self._observe, self._traffic = config, run_directory, observe, traffic
        self._model = model
        self._forward: torch.nn.Module = model
        self._optimizer = adamw(config, model)
        self._batches = Batches(training, config.sequence, config.batch, config.seed)
        self._evaluation = evaluation
        self._evaluated: tuple[int, float | None] = (-1, None)
        self._updating = False
        self._overlaps = False
        self._interrupts: Interrupts | None = None
        self._clock = clock
        self._saver = saving.Saver(config, run_directory, model, self._optimizer, observe, clock)
        self._undo = Undo(watching, self._saver, run_directory, observe)
        torch.manual_seed(config.seed)
        self._position = Position(step=0, next_batch=0, losses=(), random_state=RandomState.capture())
        self._first_step = 0
        self._started_s = clock()
        if config.checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})

    def start(
        self,
        found: Checkpoint | None,
        *,
        resume: bool,
        weights: Literal["fresh", "pretrained"],
        tokenizer: Literal["bytes", "model"],
    ) -> None:
        if found is not None:
            self._position = self._saver.restore(found)
            self._first_step = found.step
        saving.keep_settings(self._config, self._directory)
        self._observe(
            RunStarted(
                model=self._config.model,
                parameters=self._model.num_parameters(),
                steps=self._config.steps,
                first_step=self._position.step + 1,
                tokens_per_step=self._config.tokens_per_step,
                wire=self._config.wire,
                seed=self._config.seed,
                weights="checkpoint" if found is not None else weights,
                tokenizer=tokenizer,
                passes_per_step=self._config.accumulate,
            )
        )
        if found is not None:
            for path in found.damaged:
                self._observe(Note(text=f"{path} is damaged and was skipped"))
            self._observe(Resumed(step=found.step, path=str(found.path)))
        elif resume:
            self._observe(Note(text="there is no checkpoint yet, so the run starts from its first step"))

    def wrapped(self, wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> torch.nn.Module:
        """Distribute the model; a failure ends the run."""
        try:
            return wrap(self._model)
        except BaseException as fault:
            reason = "interrupted" if isinstance(fault, KeyboardInterrupt) else str(fault) or type(fault).__name__
            losses = self._position.losses
            self._observe(RunFinished(step=self._position.step, loss=losses[-1] if losses else None, reason=reason))
            raise

    def train(self, forward: torch.nn.Module, interrupts: Interrupts) -> str:
        """Train to the last step; return `done`, or `interrupted` with a checkpoint of the last finished step."""
        config, self._forward, self._interrupts = self._config, forward, interrupts
        forward.train()
        self._overlaps = config.overlap and self._enable_overlap(forward)
        decoder.know(forward, self._optimizer)
        reason = "stopped"
        try:
            while self._position.step < config.steps or self._evaluated[0] != self._position.step:
                if self._position.step < config.steps:
                    self._step(interrupts)
                if not self._goes_back() and self._is_evaluation_due:
                    self._evaluate()
                if not self._goes_back():
                    self._undo.after_step(self._position)
                    self._saver.after_step(self._position)
            self._saver.save(self._position)
            reason = "done"
        except KeyboardInterrupt:
            interrupts.taken()
            with interrupts.held():  # a second Ctrl-C must not lose the checkpoint
                self._saver.save(self._last_finished())
                again = f"cleave train --resume --out {self._directory}"
                self._observe(Note(text=f"stopped after step {self._position.step}; resume with: {again}"))
            reason = "interrupted"
        except Exception as fault:
            reason = str(fault) or type(fault).__name__
            self._saver.attempt(self._last_finished())  # report the original fault, not a failed save
            raise
        finally:
            losses = self._position.losses
            loss = losses[-1] if losses else None
            self._observe(RunFinished(step=self._position.step, loss=loss, reason=reason))
        return reason

    def _enable_overlap(self, forward: torch.nn.Module) -> bool:
        """Set up per-parameter updates during backward if possible, else report why not; return whether it is."""
        if self._config.clip:
            reason = f"gradients are clipped by global norm (clip {self._config.clip:g}; 0 disables it)"
        elif self._config.accumulate > 1:
            reason = f"a step accumulates {self._config.accumulate} micro-batches"
        else:
            reason = decoder.overlap(forward, self._optimizer)
        if reason is not None:
            self._observe(
                Note(text=f"--overlap has no effect, as weights must be updated at the end of each step: {reason}")
            )
        return reason is None

    def _last_finished(self) -> Position | None:
        """The last finished step to rely on; None if the optimizer was interrupted in the middle of an update."""
        try:
            self._goes_back()
        except CleaveError:  # without a state to go back to, none is worth saving
            return None
        finally:
            self._undo.remember()
        return None if self._updating else self._position

    def _goes_back(self) -> bool:
        """Undo the steps in doubt, if there are any."""
        with self._interrupts.held() if self._interrupts else nullcontext():
            restored = self._undo.go_back(self._position)
            if restored is not None:
                self._position, self._updating, self._evaluated = restored, False, (-1, None)
        return restored is not None

    @property
    def _is_evaluation_due(self) -> bool:
        step, every = self._position.step, self._config.eval_every
        return step >= self._config.steps or (every > 0 and step % every == 0)

    def _step(self, interrupts: Interrupts) -> None:
        """Run one update from the mean gradient of its micro-batches."""
        config, before, start_s = self._config, self._traffic(), self._clock()
        step, first = self._position.step + 1, self._position.next_batch
        self._undo.begin_step(step, is_last=step == config.steps)
        batches = [self._batches.batch(index) for index in range(first, first + config.accumulate)]
        self._optimizer.zero_grad(set_to_none=True)
        rate = learning_rate(config, step)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._updating = self._overlaps  # backward already updates weights then
        loss = math.fsum(self._run_micro_batches(batches)) / config.accumulate
        norm = float(clip_grad_norm_(self._model.parameters(), config.clip or math.inf))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise self._diverged(step, loss, norm)
        with interrupts.held():  # half an update cannot be saved, and a finished one must be reported
            self._updating = True
            self._optimizer.step()
            self._position = Position(
                step=step,
                next_batch=first + config.accumulate,
                losses=(*self._position.losses, loss),
                random_state=RandomState.capture(),
            )
            self._updating = False
            after = self._traffic()
            self._observe(
                StepDone(
                    step=step,
                    loss=loss,
                    learning_rate=rate,
                    gradient_norm=norm,
                    tokens=config.tokens_per_step,
                    seconds=self._clock() - start_s,
                    predicted_s=after.predicted_s,
                    waiting_s=after.waiting_s - before.waiting_s,
                    checking_s=after.checking_s - before.checking_s,
                    devices=after.devices,
                    down_bytes=after.down_bytes - before.down_bytes,
                    up_bytes=after.up_bytes - before.up_bytes,
                )
            )

    def _run_micro_batches(self, batches: list[NDArray]) -> list[float]:
        """Return the micro-batches' losses, in order. Gradients accumulate in `.grad`, which autograd synchronizes."""
        if self._config.in_flight == 1 or len(batches) == 1:
            return [self._micro_batch(batch) for batch in batches]
        pool = ThreadPoolExecutor(self._config.in_flight, "micro-batch")
        try:
            return list(pool.map(self._micro_batch, batches))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # after a fault, the others may wait long for devices

    def _micro_batch(self, batch: NDArray) -> float:
        loss = self._loss(batch)
        (loss / self._config.accumulate).backward()
        return loss.item()

    def _loss(self, batch: NDArray) -> torch.Tensor:
        """Next-token loss; the model's own if devices can compute it, as logits then never reach the server."""
        tokens = torch.from_numpy(batch)
        targets = tokens[:, 1:].contiguous()
        # Autocast is per thread, so it is set here and not around the step.
        with torch.autocast("cpu", torch.bfloat16) if self._config.autocast else nullcontext():
            if decoder.gives_loss(self._forward):
                return self._forward(
                    input_ids=tokens[:, :-1], labels=targets, shift_labels=targets, use_cache=False
                ).loss
            logits = self._forward(input_ids=tokens[:, :-1], use_cache=False).logits
        return cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def _evaluate(self) -> None:
        config = self._config
        if self._evaluated[0] == self._position.step:
            return
        self._forward.eval()
        losses, sequences = 0.0, 0
        for batch in islice(evaluation_batches(self._evaluation, config.sequence, config.batch), config.eval_batches):
            losses += self._loss(batch).item() * len(batch)
            sequences += len(batch)
        self._forward.train()
        loss = losses / sequences if sequences else None
        self._evaluated = (self._position.step, loss)
        if loss is not None:
            self._observe(Evaluated(step=self._position.step, loss=loss))

    def _diverged(self, step: int, loss: float, norm: float) -> CleaveError:
        self._saver.attempt(self._position)
        problem = (
            f"the loss of step {step} is {loss}" if not math.isfinite(loss) else f"step {step}'s gradient is {norm}"
        )
        lower = f"--learning-rate {self._config.learning_rate / 3:.1g}"
        advice = f"start again with {lower}"
        if (saved := self._saver.saved) is not None:
            again = f"cleave train --resume --out {self._directory} {lower}"
            advice = f"step {saved.step} is saved in {saved.path}; go on with: {again}"
        return CleaveError(
            f"{problem}, not a finite number, so training stopped before the model was damaged; {advice}"
        )

    def drop_optimizer(self) -> None:
        """Free optimizer state and gradients, three times the size of the model."""
        self._optimizer.zero_grad(set_to_none=True)
        self._optimizer.state.clear()

    def summary(self, reason: str, exported: Path | None, prompt: str, sample: str) -> Summary:
        return Summary(
            step=self._position.step,
            reason=reason,
            losses=self._position.losses,
            evaluation_loss=self._evaluated[1],
            tokens=(self._position.step - self._first_step) * self._config.tokens_per_step,
            seconds=self._clock() - self._started_s,
            parameters=self._model.num_parameters(),
            checkpoint=self._saver.saved.path if self._saver.saved else None,
            exported=exported,
            prompt=prompt,
            sample=sample,
        )


def _check_fit(config: TrainConfig, model: PreTrainedModel, corpus: Corpus) -> None:
    if config.sequence > positions(model):
        raise InputError(
            f"{config.model} has {positions(model)} positions, but --sequence is {config.sequence}; lower it"
        )
    tokens, rows = int(corpus.tokens.max()) + 1, model.get_input_embeddings().num_embeddings
    if not isinstance(rows, int) or tokens > rows:
        problem = f"the text has token ids up to {tokens - 1}"
        raise InputError(
            f"{problem}, but the vocabulary of {config.model} has {rows}; use the tokenizer that belongs to it"
        )


def _export(model: PreTrainedModel, tokenizer: Tokenizer, run_directory: Path) -> Path:
    try:
        return export(model, tokenizer, run_directory / "model")
    except (OSError, SafetensorError) as fault:
        problem = f"the training is done and saved, but its model cannot be written: {fault}"
        raise CleaveError(f"{problem}; make room, then: cleave train --resume --out {run_directory}") from None


def _prompt(text: str) -> str:
    """Return two whole lines, or the first characters of a text without line ends."""
    return "".join(text.splitlines(keepends=True)[1:3]) or text[:40]
