"""The composition root of the live commands, `cleave train` and `cleave join`: they alone bring all parts together."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import platform
import secrets
import threading
import time
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cleave.errors import InputError

if TYPE_CHECKING:
    import torch

    from cleave.config import TrainConfig
    from cleave.device.programs.kernels import KernelChoice
    from cleave.events import AnyEvent, EventLog, Listener
    from cleave.fleet import Fleet
    from cleave.server.roster import Member
    from cleave.train.loop import Traffic

_TOKEN_FILE = "token"
_NOTHING_SENT = (
    "no gemm of this model is worth sending over these links, so the server computes all of it itself; add --offload "
    "always to send them anyway, a larger batch, or devices with faster links"
)


def run_train(*, run_file: str | None, overrides: Mapping[str, object], resume: bool, as_json: bool) -> None:
    """Train; every word a run says goes to its event log and, as it is said, to the screen."""
    from rich.console import Console

    from cleave.observe import train_report
    from cleave.observe.train_view import TrainView

    directory = _run_directory(run_file, overrides, resume=resume)
    config = _config(run_file, overrides, directory, resume=resume)
    try:
        from cleave.train import loop
    except ImportError as fault:
        raise InputError(f"training needs {fault.name}, which is not installed; pip install 'cleave[train]'") from None
    run = _Run(config, directory)
    view = TrainView(Console(stderr=True, highlight=False), run.devices)
    run.show = view
    try:
        with view:
            summary = loop.run(
                config, directory, wrap=run.wrap, observe=run.observe, traffic=run.traffic, resume=resume
            )
        run.finished = summary.reason == "done"
        members = run.fleet.cluster.members() if run.fleet else []
        train_report.show(summary, members, run.fleet, directory, Console(highlight=False), as_json=as_json)
    finally:
        run.close()


class _Run:
    """A run's fleet and event log, which begin and end with it."""

    def __init__(self, config: TrainConfig, directory: Path) -> None:
        self._config, self._directory = config, directory
        self.fleet: Fleet | None = None
        self.show: Listener = lambda event: None
        self.finished = False
        self._log: EventLog | None = None
        self._unwritten: list[AnyEvent] = []
        self._steps = 0
        self._lock = threading.RLock()

    def observe(self, event: AnyEvent) -> None:
        """To the log, which begins with the run's directory, and to the screen."""
        from cleave.events import EventLog, Note, StepDone

        with self._lock:
            if self._log is None and self._directory.is_dir():
                self._log = EventLog(self._directory / "events.jsonl", time.time)
                for earlier in self._unwritten:
                    self._log(earlier)
            if self._log is None:
                self._unwritten.append(event)
            else:
                self._log(event)
            self.show(event)
            if isinstance(event, StepDone):
                self._steps += 1
                if self._steps == 1 and self.fleet and not self.fleet.cluster.totals().products:
                    self.observe(Note(text=_NOTHING_SENT))

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Start the fleet, and let it compute the model's gemms."""
        from cleave.events import Note
        from cleave.fleet import Fleet, distribute

        config = self._config
        self.fleet = Fleet(
            config.listen, token=config.token or "", wire=config.wire, offload=config.offload, listener=self.observe
        )
        if config.token:
            path = self._directory / _TOKEN_FILE
            path.touch(mode=0o600)
            path.write_text(config.token + "\n")
        self.observe(Note(text=f"devices join with: {self.fleet.join_command}"))
        if config.devices:
            self.fleet.start_devices(config.devices, threads=config.device_threads)
            _leave_cores_to(config.devices * config.device_threads)
        self.fleet.wait(max(config.devices, 1), config.wait_s)
        return distribute(model, self.fleet)

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
        )

    def devices(self) -> list[Member]:
        return self.fleet.cluster.here() if self.fleet else []

    def close(self) -> None:
        if self.fleet is not None:
            reason = "the run is finished" if self.finished else "the run stopped"
            self.fleet.close(reason, rejoin=not self.finished)
        if self._log is not None:
            self._log.close()


def _leave_cores_to(threads: int) -> None:
    """Torch's threads spin while they wait for each other, which costs twice where local devices want the cores."""
    import torch

    torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) - threads)))


def _config(run_file: str | None, overrides: Mapping[str, object], directory: Path, *, resume: bool) -> TrainConfig:
    """A run that goes on keeps its settings, but for what is given anew; one that others can reach has a token."""
    from cleave.config import load_config

    path = Path(run_file) if run_file else None
    if resume and path is None:
        path = directory / "config.toml"
        if not path.is_file():
            raise InputError(f"there is no run to resume in {directory}: it has no config.toml; check --out")
    config = load_config(path, overrides)
    if config.token is None and not config.listen.startswith(("127.", "localhost:", "[::1]")):
        config = replace(config, token=_kept_token(directory) or secrets.token_urlsafe(9))
    return config


def _kept_token(directory: Path) -> str | None:
    """The token a run made up when it began: devices that wait for it to resume know no other."""
    path = directory / _TOKEN_FILE
    return path.read_text().strip() or None if path.is_file() else None


def _run_directory(run_file: str | None, overrides: Mapping[str, object], *, resume: bool) -> Path:
    """Where a run lives: as given, else the newest one if it goes on, else a new one by the clock."""
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


def run_join(
    *,
    url: str | None,
    memory_bytes: int | None,
    threads: int | None,
    name: str | None,
    token: str,
    kernel: KernelChoice,
    wait_s: float,
    quiet: bool,
    with_parent: bool,
) -> None:
    from cleave.device import join, probe
    from cleave.device.programs.kernels import choose_kernel
    from cleave.device.worker import Contribution, Offer
    from cleave.observe import join_report
    from cleave.transport.allocation import keep_freed_memory

    keep_freed_memory(one_arena=True)
    if not url:
        raise InputError("join needs the address of a server; give cleave join URL, or set CLEAVE_SERVER")
    join.socket_url(url)
    chosen = choose_kernel(kernel, threads)
    offer = Offer(
        name=name or platform.node() or "device",
        token=token,
        flops_per_s=probe.measure_flops_per_s(chosen),
        memory_bytes=probe.usable_memory_bytes(memory_bytes),
    )
    contribution = Contribution()
    with (
        join_report.shown(contribution, offer.flops_per_s, offer.memory_bytes, chosen.name, quiet=quiet) as say,
        contextlib.suppress(KeyboardInterrupt),
    ):
        gc.freeze()  # what is loaded stays; only what comes and goes is worth looking at
        gc.set_threshold(50_000)
        serving = join.serve(url, chosen, offer, contribution, say, wait_s)
        asyncio.run(_while_parent_lives(serving) if with_parent else serving)


async def _while_parent_lives(serving: Coroutine[None, None, None]) -> None:
    """A local device belongs to its server: killed servers leave no processes behind."""
    parent, work = os.getppid(), asyncio.ensure_future(serving)
    while not work.done() and os.getppid() == parent:
        await asyncio.wait([work], timeout=1.0)
    work.cancel()
    await work
