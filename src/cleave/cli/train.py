"""`cleave train`: train a model on a fleet."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path
from typing import Any

from cleave.cli.arguments import AddVerb, count, count_or_zero, number_or_zero, positive, probability, seed, trust
from cleave.config import TrainConfig
from cleave.core.cost.wire import WIRE_NAMES
from cleave.core.model.grain import GRAINS
from cleave.core.model.lease import LEASE_MODES
from cleave.core.verify.trust import LEVELS
from cleave.errors import InputError
from cleave.settings import ALONES, OFFLOADS

_DEFAULTS: dict[str, object] = {field.name: field.default for field in fields(TrainConfig)}


def add_to(add: AddVerb) -> None:
    verb = add(
        "train",
        help="train a model on a fleet",
        description="Train a model on a fleet of devices. Without arguments it is the demo: a small model, four device "
        "processes on this machine, and the source code of Python's standard library as text. Settings can also come "
        "from a TOML file; their names there are those of the options, with _ for -.",
        usage="cleave train [RUN.toml] [OPTION ...]",
        examples=(
            "cleave train",
            "cleave train --model opt-125m --data my-texts/ --listen 0.0.0.0:7077 --tls --trust own",
            "cleave train run.toml --steps 500 --out my-run",
            "cleave train --resume --out my-run",
        ),
    )
    verb.add_argument("run_file", nargs="?", metavar="RUN.toml", help="file with settings; options override it")
    _add_model(_adder(verb, "model and text"))
    _add_work(_adder(verb, "devices and their work"))
    _add_joining(_adder(verb, "who may join"))
    files = verb.add_argument_group("progress and files")
    _add_progress(_adding(files))
    files.add_argument("--resume", action="store_true", help="continue the run in --out, or the newest one")
    files.add_argument("--json", action="store_true", help="print a summary as JSON at the end")
    verb.set_defaults(run=_run_train)


def _adder(verb: argparse.ArgumentParser, title: str) -> Callable[..., None]:
    return _adding(verb.add_argument_group(title))


def _adding(group: argparse._ArgumentGroup) -> Callable[..., None]:  # pyright: ignore[reportPrivateUsage]
    """Return a function that adds a setting to the group, with its default from `TrainConfig` in the help."""

    def add(flag: str, help: str, default: str | None = None, **options: Any) -> None:
        name = options.get("dest") or flag.removeprefix("--").replace("-", "_")
        if options.get("action") != "store_true":
            help = f"{help} (default: {default or _DEFAULTS[name]})"
        group.add_argument(flag, help=help.replace("%", "%%"), default=None, **options)

    return add


def _add_model(add: Callable[..., None]) -> None:
    add(
        "--model",
        "preset (demo, tiny-llama, tiny-opt, tiny-gpt2), size with fresh weights (opt-125m ... opt-175b, llama-2-7b "
        "...), Hugging Face directory, or Hugging Face name",
        metavar="NAME|DIR",
    )
    add(
        "--data",
        "text, .jsonl or .parquet file, or a directory of them",
        "the source code of Python's standard library",
        metavar="PATH",
    )
    add("--steps", "optimizer updates in total", type=count, metavar="N")
    add("--sequence", "tokens per sequence", type=count, metavar="N")
    add("--batch", "sequences per micro-batch", type=count, metavar="N")
    add("--accumulate", "micro-batches per step", type=count, metavar="N")
    add("--in-flight", "micro-batches computed at the same time", type=count, metavar="N")
    add("--learning-rate", "peak learning rate, after the warm-up", type=positive, metavar="RATE")
    add(
        "--dropout",
        "dropout probability; layers stay resident on devices only at 0",
        "0 for fresh weights; a loaded model keeps its own",
        type=probability,
        metavar="P",
    )
    add("--seed", "seed for weights, data order and the text sample", type=seed, metavar="N")
    add("--dtype", "dtype of the parameters", choices=["fp32", "bf16"])
    add("--autocast", "compute products in a lower precision", "off", choices=["bf16"])
    add("--checkpointing", "recompute activations in the backward pass instead of keeping them", action="store_true")


def _add_work(add: Callable[..., None]) -> None:
    add(
        "--devices",
        "device processes to start on this machine",
        "4, or 0 with --listen",
        type=count_or_zero,
        metavar="N",
    )
    add("--device-threads", "threads per local device", type=count, metavar="N")
    add("--grain", "unit of work: blocks of products (gemm), resident layers, or the faster one", choices=GRAINS)
    add("--wire", "number format on the wire; q8 is 8 bits, int8 its former name", choices=WIRE_NAMES)
    add(
        "--offload",
        "auto: keep on the server what is not worth sending; always: send every product",
        choices=OFFLOADS,
    )
    add(
        "--scale-test",
        "measure this server alone: devices of cleave emulate --compute none may join, nothing is checked, no loss is "
        "real, and no model is saved",
        action="store_true",
    )
    add(
        "--lease",
        "auto: own devices may keep layers and update them where that is faster; never: the server updates all weights",
        choices=LEASE_MODES,
    )
    add("--overlap", "update each weight during backward, as soon as its gradient arrives", action="store_true")


def _add_joining(add: Callable[..., None]) -> None:
    add("--listen", "address where devices join, such as 0.0.0.0:7077", "this machine only", metavar="HOST:PORT")
    add("--token", "secret that devices need to join", "CLEAVE_TOKEN, or a new one", metavar="TEXT")
    add(
        "--trust",
        "who joins with that token: your own machines (nothing is audited), people you know (a sample is audited), or "
        "strangers (all their work on resident layers is, which is no faster than this server alone)",
        "stranger; own for devices started here",
        type=trust,
        choices=LEVELS,
    )
    add("--tls", "encrypt, with a self-signed certificate that devices pin", action="store_true")
    add("--tls-certificate", "encrypt, with this certificate and its chain (PEM)", "none", metavar="FILE")
    add("--tls-key", "key of that certificate (PEM), if it is not in the same file", "none", metavar="FILE")
    add(
        "--wait",
        "seconds to wait for the first devices before giving up",
        "no limit; 60 for local devices",
        type=positive,
        dest="wait_s",
        metavar="S",
    )
    add("--alone", "while no device is connected: wait for one, or compute on the server", choices=ALONES)
    add(
        "--alone-wait",
        "seconds without a device before the run saves and stops",
        "no limit with --listen, else 3600",
        type=positive,
        dest="alone_wait_s",
        metavar="S",
    )


def _add_progress(add: Callable[..., None]) -> None:
    add("--eval-every", "steps between evaluations, 0 for only at the end", type=count_or_zero, metavar="N")
    add("--save-every", "steps between checkpoints, 0 for none", type=count_or_zero, metavar="N")
    add("--save-minutes", "minutes between checkpoints, 0 for none", type=number_or_zero, metavar="M")
    add("--keep", "checkpoints to keep, the newest ones", type=count, metavar="N")
    add("--out", "run directory", "a new one in ~/.cleave/runs, or in runs/ of CLEAVE_HOME", metavar="DIR")


_NOT_SETTINGS = {"verb", "run", "run_file", "resume", "json"}


def _run_train(options: argparse.Namespace) -> None:
    overrides = {name: value for name, value in vars(options).items() if name not in _NOT_SETTINGS}
    overrides["token"] = overrides["token"] or os.environ.get("CLEAVE_TOKEN")
    run_train(run_file=options.run_file, overrides=overrides, resume=options.resume, as_json=options.json)


def run_train(*, run_file: str | None, overrides: Mapping[str, object], resume: bool, as_json: bool) -> None:
    """Train; every event goes to the run's event log and, live, to the screen."""
    from cleave.extras import install_command
    from cleave.report import train_summary
    from cleave.report.plain import plain_console

    directory = _run_directory(run_file, overrides, resume=resume)
    config = _config(run_file, overrides, directory, resume=resume)
    _check_writable(directory)
    _check_data(config)
    try:
        from cleave import run_files
        from cleave.server.service import bind

        with run_files.locked(directory) if directory.is_dir() else nullcontext():  # a run's own server holds its port
            bind(config.address).close()  # fails before a model is built, not after
        from cleave.cli.training_run import TrainingRun
        from cleave.train import loop
    except ModuleNotFoundError as fault:
        command = install_command("train")
        raise InputError(f"training needs {fault.name}, which is not installed; install it with: {command}") from None
    run = TrainingRun(config, directory)
    try:
        with run.view:
            summary = loop.run(
                config,
                directory,
                wrap=run.wrap,
                observe=run.observe,
                traffic=run.traffic,
                watching=run.watching,
                resume=resume,
            )
        run.finished = summary.reason == "done"
        run.tell_audits()
        bill = run.tell_energy(summary.seconds)
        devices = run.fleet.cluster.members() if run.fleet else []
    finally:
        run.close()  # before the summary, for which a reader may make us wait
    train_summary.show(
        summary,
        run.view.figures,
        devices,
        directory,
        plain_console(),
        bill=bill,
        can_be_joined=run.fleet is not None and run.fleet.is_reachable,
        as_json=as_json,
    )


def _config(run_file: str | None, overrides: Mapping[str, object], directory: Path, *, resume: bool) -> TrainConfig:
    """Load the settings; a resumed run keeps its own, except those given again."""
    from cleave.config import load_config

    path = Path(run_file) if run_file else None
    if resume and path is None:
        path = directory / "config.toml"
        if not path.is_file():
            raise InputError(f"there is no run to resume in {directory}: it has no config.toml; check --out")
    return load_config(path, overrides)


def _run_directory(run_file: str | None, overrides: Mapping[str, object], *, resume: bool) -> Path:
    """Choose the run's directory: as given, else the newest one when resuming, else a new one named by the time."""
    from cleave.config import load_config
    from cleave.run_files import new_run, newest_run, runs_home
    from cleave.runs.reading import has_checkpoint

    given = overrides.get("out") or (load_config(Path(run_file), overrides).out if run_file else None)
    if given is not None:
        return Path(str(given))
    if not resume:
        return new_run()
    newest = newest_run(prefer=has_checkpoint)
    if newest is None:
        raise InputError(f"there is no run to resume in {runs_home()}; give its directory with --out")
    return newest


def _check_data(config: TrainConfig) -> None:
    """Fail before torch is imported, not after."""
    if config.data is not None and not config.data.exists():
        from cleave.train.data import read_documents

        read_documents(config.data)  # says what is wrong


def _check_writable(directory: Path) -> None:
    """Fail before a model is built, not after."""
    paths = (directory, *directory.absolute().parents)
    existing = next((path for path in paths if os.path.exists(path)), Path())  # noqa: PTH110
    if not existing.is_dir():
        raise InputError(f"cannot write the run to {directory}: {existing} is a file; give another --out")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise InputError(f"cannot write the run to {directory}: no permission for {existing}; give another --out")
