"""`cleave train`: train a model on a fleet."""

from __future__ import annotations

import argparse
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cleave.cli.arguments import AddVerb, count, count_or_zero, number_or_zero, positive, seed
from cleave.core.cost.wire import WIRE_FORMATS
from cleave.core.model.grain import GRAINS
from cleave.errors import InputError
from cleave.settings import ALONES, OFFLOADS, POLICIES

if TYPE_CHECKING:
    import torch

    from cleave.api.fleet import Fleet
    from cleave.config import TrainConfig
    from cleave.core.schedule.members import Member
    from cleave.events import AnyEvent, EventLog
    from cleave.server.admission.tokens import Keys
    from cleave.train.loop import Traffic


def add_to(add: AddVerb) -> None:
    verb = add(
        "train",
        help="train a model on a fleet",
        description="Train a model on a fleet of devices. Without arguments: a small model, four local devices, and "
        "the sources of Python's own library as text. Every setting can also stand in a TOML file.",
    )
    verb.add_argument("run_file", nargs="?", metavar="RUN.toml", help="settings; flags override them")
    verb.add_argument("--model", metavar="NAME|DIR", help="demo, tiny-llama, opt-125m ..., or a model directory")
    verb.add_argument("--data", metavar="PATH", help="text, .jsonl or .parquet, or a directory of them")
    verb.add_argument("--steps", type=count, metavar="N", help="optimizer updates in all")
    verb.add_argument("--sequence", type=count, metavar="N", help="tokens of one sequence")
    verb.add_argument("--batch", type=count, metavar="N", help="sequences of one micro-batch")
    verb.add_argument("--accumulate", type=count, metavar="N", help="micro-batches of one step")
    verb.add_argument("--in-flight", type=count, metavar="N", help="micro-batches computed at the same time")
    verb.add_argument("--learning-rate", type=positive, metavar="RATE", help="the highest one")
    verb.add_argument("--seed", type=seed, metavar="N", help="of weights, text order and sample")
    verb.add_argument("--wire", choices=WIRE_FORMATS, help="format on the wire (default: fp32)")
    verb.add_argument("--grain", choices=GRAINS, help="a unit of work (default: the faster one)")
    verb.add_argument("--overlap", action="store_true", default=None, help="update weights one by one, during backward")
    verb.add_argument("--offload", choices=OFFLOADS, help="auto keeps gemms not worth sending on the server")
    verb.add_argument("--dtype", choices=["fp32", "bf16"], help="of the parameters (default: fp32)")
    verb.add_argument("--autocast", choices=["bf16"], help="multiply in a lower precision than the parameters'")
    verb.add_argument("--checkpointing", action="store_true", default=None, help="recompute activations in backward")
    verb.add_argument(
        "--devices", type=count_or_zero, metavar="N", help="local devices (default: 4, or 0 with --listen)"
    )
    verb.add_argument("--device-threads", type=count, metavar="N", help="threads of each local device (default: 1)")
    verb.add_argument("--trust", choices=POLICIES, help="how much of resident layers' work to audit")
    verb.add_argument("--listen", metavar="HOST:PORT", help="where devices join, such as 0.0.0.0:7077")
    verb.add_argument("--token", metavar="TEXT", help="what devices must know (default: CLEAVE_TOKEN, or made up)")
    verb.add_argument("--tls", action="store_true", default=None, help="encrypt, with a certificate made for the run")
    verb.add_argument("--tls-certificate", metavar="FILE", help="encrypt, with this certificate and its chain (PEM)")
    verb.add_argument("--tls-key", metavar="FILE", help="the certificate's key (PEM), if it is in another file")
    verb.add_argument("--wait", type=positive, dest="wait_s", metavar="S", help="how long to wait for devices")
    verb.add_argument("--alone", choices=ALONES, help="what to do while no device is there (default: wait)")
    verb.add_argument("--alone-wait", type=positive, dest="alone_wait_s", metavar="S", help="and for how long (3600)")
    verb.add_argument("--eval-every", type=count_or_zero, metavar="N", help="steps between evaluations")
    verb.add_argument("--save-every", type=count_or_zero, metavar="N", help="steps between checkpoints")
    verb.add_argument("--save-minutes", type=number_or_zero, metavar="M", help="and minutes between them (default: 10)")
    verb.add_argument("--keep", type=count, metavar="N", help="checkpoints that stay on disk")
    verb.add_argument("--out", metavar="DIR", help="the run's directory (default: a new one in CLEAVE_HOME)")
    verb.add_argument("--resume", action="store_true", help="go on with the run in --out, or with the newest one")
    verb.add_argument("--json", action="store_true", help="print a summary as JSON at the end")
    verb.set_defaults(run=_run_train)


_NOT_SETTINGS = {"verb", "run", "run_file", "resume", "json"}


def _run_train(options: argparse.Namespace) -> None:
    overrides = {name: value for name, value in vars(options).items() if name not in _NOT_SETTINGS}
    if overrides["listen"] is not None and overrides["devices"] is None:
        overrides["devices"] = 0
    overrides["token"] = overrides["token"] or os.environ.get("CLEAVE_TOKEN")
    run_train(run_file=options.run_file, overrides=overrides, resume=options.resume, as_json=options.json)


_UNENCRYPTED = "tokens and numbers travel in the clear, for anyone on the network to read; add --tls"
_NOTHING_OFFLOADED = (
    "no gemm of this model is worth sending over these links, so the server computes all of it itself; add --offload "
    "always to send them anyway, a larger batch, or devices with faster links"
)


def run_train(*, run_file: str | None, overrides: Mapping[str, object], resume: bool, as_json: bool) -> None:
    """Train; every event goes to the run's event log and, live, to the screen."""
    from rich.console import Console

    from cleave.report import train_summary

    directory = _run_directory(run_file, overrides, resume=resume)
    config = _config(run_file, overrides, directory, resume=resume)
    try:
        from cleave.train import loop
    except ImportError as fault:
        raise InputError(f"training needs {fault.name}, which is not installed; pip install 'cleave[train]'") from None
    run = _TrainingRun(config, directory, resume=resume)
    try:
        with run.view:
            summary = loop.run(
                config, directory, wrap=run.wrap, observe=run.observe, traffic=run.traffic, resume=resume
            )
        run.finished = summary.reason == "done"
        run.tell_audits()
        members = run.fleet.cluster.members() if run.fleet else []
        train_summary.show(summary, members, run.fleet, directory, Console(highlight=False), as_json=as_json)
    finally:
        run.close()


class _TrainingRun:
    """A run's fleet and event log, opened and closed with it."""

    def __init__(self, config: TrainConfig, directory: Path, *, resume: bool) -> None:
        from rich.console import Console

        from cleave.report.train_screen import TrainView

        self._config, self._directory, self._resume = config, directory, resume
        self.fleet: Fleet | None = None
        self.view = TrainView(Console(stderr=True, highlight=False), self.devices)
        self.finished = False
        self._log: EventLog | None = None
        self._pending: list[AnyEvent] = []
        self._steps = 0
        self._lock = threading.RLock()

    def observe(self, event: AnyEvent) -> None:
        """Write an event to the screen and to the log, which is opened once the run's directory exists."""
        from cleave.events import EventLog, Note, StepDone

        with self._lock:
            if self._log is None and self._directory.is_dir():
                self._log = EventLog(self._directory / "events.jsonl", time.time)
                for pending in self._pending:
                    self._log(pending)
            if self._log is None:
                self._pending.append(event)
            else:
                self._log(event)
            self.view(event)
            if isinstance(event, StepDone):
                self._steps += 1
                if self._steps == 1 and self.fleet and not self.fleet.cluster.totals().products:
                    self.observe(Note(text=_NOTHING_OFFLOADED))

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Start the fleet and distribute the model over it."""
        from cleave.api.fleet import Fleet
        from cleave.api.training import distribute
        from cleave.events import Note

        config = self._config
        keys, token = self._keys()
        self.fleet = Fleet(
            config.listen,
            token=token,
            keys=keys,
            tls=config.tls if config.tls_certificate is None else (config.tls_certificate, config.tls_key),
            directory=self._directory,
            wire=config.wire,
            offload=config.offload,
            listener=self.observe,
            alone=config.alone,
            trust=config.trust,
            alone_wait_s=config.alone_wait_s,
        )
        suffix = " with their token" if not keys.is_open else ""
        self.observe(Note(text=f"devices join at {self.fleet.public_url}{suffix}"))
        with self._lock:  # to the screen only, as it contains the token
            self.view(Note(text=f"devices join with: {self.fleet.join_command}"))
        if not keys.is_open and self.fleet.is_reachable and self.fleet.public_url.startswith("ws:"):
            self.observe(Note(text=_UNENCRYPTED))
        if config.devices:
            self.fleet.start_devices(config.devices, threads=config.device_threads)
            _reserve_cores(config.devices * config.device_threads)
        if config.devices or config.alone == "wait":
            self.fleet.wait(max(config.devices, 1), config.wait_s)
        return distribute(model, self.fleet, grain=config.grain)

    def _keys(self) -> tuple[Keys, str]:
        """Return the run's keys and the token to show: the configured one, or a new one if others can reach the server.

        Tokens issued earlier stay valid: the run directory has their hashes, although the tokens cannot be shown again.
        """
        from cleave.server.admission.tokens import FILE, Keys

        keys, chosen = Keys(path=self._directory / FILE), self._config.token
        if chosen:
            known = not keys.is_open and keys.identify(chosen) is not None
            return keys, chosen if known else keys.add("device", chosen)[1]
        if _is_local(self._config.listen):
            return keys, ""
        has_one = any(key.is_valid and key.role == "device" for key in keys.list())
        return keys, "" if has_one and not self._resume else keys.add("device")[1]

    def traffic(self) -> Traffic:
        from cleave.train.loop import Traffic

        if self.fleet is None:
            return Traffic()
        totals = self.fleet.cluster.totals()
        return Traffic(
            devices=totals.devices,
            down_bytes=totals.down_bytes,
            up_bytes=totals.up_bytes,
            waiting_s=totals.waiting_s,
            checking_s=totals.checking_s,
        )

    def tell_audits(self) -> None:
        from cleave.events import Note

        totals = self.fleet.cluster.totals() if self.fleet else None
        if totals is not None and totals.audited_units:
            found = f"wrong results found {totals.wrong_audits} times" if totals.wrong_audits else "all correct"
            self.observe(Note(text=f"audited {totals.audited_units} units: {found}"))

    def devices(self) -> list[Member]:
        return self.fleet.cluster.here() if self.fleet else []

    def close(self) -> None:
        if self.fleet is not None:
            reason = "the run is finished" if self.finished else "the run stopped"
            self.fleet.close(reason, rejoin=not self.finished)
        if self._log is not None:
            self._log.close()


def _reserve_cores(threads: int) -> None:
    """Reserve cores for local devices: torch's threads spin while waiting, which would take theirs."""
    import torch

    torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) - threads)))


def _config(run_file: str | None, overrides: Mapping[str, object], directory: Path, *, resume: bool) -> TrainConfig:
    """Load the settings; a resumed run keeps its own, except those given again."""
    from cleave.config import load_config

    path = Path(run_file) if run_file else None
    if resume and path is None:
        path = directory / "config.toml"
        if not path.is_file():
            raise InputError(f"there is no run to resume in {directory}: it has no config.toml; check --out")
    return load_config(path, overrides)


def _is_local(listen: str) -> bool:
    from cleave.server.admission.gate import is_loopback

    return is_loopback(listen.rpartition(":")[0].strip("[]"))


def _run_directory(run_file: str | None, overrides: Mapping[str, object], *, resume: bool) -> Path:
    """Choose the run's directory: as given, else the newest one when resuming, else a new one named by the time."""
    from cleave.config import load_config

    given = overrides.get("out") or (load_config(Path(run_file), overrides).out if run_file else None)
    if given is not None:
        return Path(str(given))
    home = Path(os.environ.get("CLEAVE_HOME") or Path.home() / ".cleave") / "runs"
    if not resume:
        return home / time.strftime("%Y%m%d-%H%M%S")
    runs = sorted(path for path in home.glob("*") if (path / "config.toml").is_file())
    if not runs:
        raise InputError(f"there is no run to resume in {home}; give its directory with --out")
    return runs[-1]
