"""The composition root of the live commands, `cleave train` and `cleave join`: they alone bring all parts together."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import platform
import sys
import threading
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cleave.errors import InputError

if TYPE_CHECKING:
    import torch

    from cleave.config import TrainConfig
    from cleave.device.programs.kernels import KernelChoice
    from cleave.events import AnyEvent, EventLog, Listener
    from cleave.fleet import Fleet
    from cleave.server.keys import Key, Keys, Role
    from cleave.server.roster import Member
    from cleave.train.loop import Traffic

_UNSAFE = "tokens and numbers travel in the clear, for anyone on the network to read; add --tls"
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
    run = _Run(config, directory, resume=resume)
    view = TrainView(Console(stderr=True, highlight=False), run.devices)
    run.show = view
    try:
        with view:
            summary = loop.run(
                config, directory, wrap=run.wrap, observe=run.observe, traffic=run.traffic, resume=resume
            )
        run.finished = summary.reason == "done"
        run.tell_audits()
        members = run.fleet.cluster.members() if run.fleet else []
        train_report.show(summary, members, run.fleet, directory, Console(highlight=False), as_json=as_json)
    finally:
        run.close()


class _Run:
    """A run's fleet and event log, which begin and end with it."""

    def __init__(self, config: TrainConfig, directory: Path, *, resume: bool) -> None:
        self._config, self._directory, self._resume = config, directory, resume
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
        secret = " with their token" if not keys.is_open else ""
        self.observe(Note(text=f"devices join at {self.fleet.public_url}{secret}"))
        with self._lock:  # to the screen alone: it has the token in it
            self.show(Note(text=f"devices join with: {self.fleet.join_command}"))
        if not keys.is_open and self.fleet.is_reachable and self.fleet.public_url.startswith("ws:"):
            self.observe(Note(text=_UNSAFE))
        if config.devices:
            self.fleet.start_devices(config.devices, threads=config.device_threads)
            _leave_cores_to(config.devices * config.device_threads)
        if config.devices or config.alone == "wait":
            self.fleet.wait(max(config.devices, 1), config.wait_s)
        return distribute(model, self.fleet, grain=config.grain)

    def _keys(self) -> tuple[Keys, str]:
        """The run's keys, and the token to show: the one that was chosen, or one made up where others can come in.

        What a device was given before stays good: its hash is in the run directory, though nobody knows it any more.
        """
        from cleave.server.keys import FILE, Keys

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
            found = f"{totals.wrong_audits} times they were wrong" if totals.wrong_audits else "all were right"
            self.observe(Note(text=f"the server computed {totals.audited_units} units of devices again: {found}"))

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
    """A run that goes on keeps its settings, but for what is given anew."""
    from cleave.config import load_config

    path = Path(run_file) if run_file else None
    if resume and path is None:
        path = directory / "config.toml"
        if not path.is_file():
            raise InputError(f"there is no run to resume in {directory}: it has no config.toml; check --out")
    return load_config(path, overrides)


def _is_local(listen: str) -> bool:
    from cleave.server.entrance import is_loopback

    return is_loopback(listen.rpartition(":")[0].strip("[]"))


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


def run_token_add(*, out: str, role: Role, as_json: bool) -> None:
    """Make a token for a run and show it, this once."""
    key, token = _keys_of(out, must_exist=False).add(role)
    told = f"{role} token {key.id}: {token}\nit is not shown again; only its hash is kept"
    _print({**_described(key), "token": token}, told, as_json=as_json)


def run_token_list(*, out: str, as_json: bool) -> None:
    keys = [_described(key) for key in _keys_of(out).list()]
    lines = [f"{key['id']}  {key['role']:6}  made {key['created']}  {key['state']}" for key in keys]
    _print({"tokens": keys}, "\n".join(lines), as_json=as_json)


def run_token_revoke(*, out: str, id: str, as_json: bool) -> None:
    key = _keys_of(out).revoke(id)
    _print(_described(key), f"{key.role} token {key.id} is revoked", as_json=as_json)


def _keys_of(out: str, *, must_exist: bool = True) -> Keys:
    from cleave.server.keys import FILE, Keys

    path = Path(out) / FILE
    if must_exist and not path.is_file():
        raise InputError(f"expected a run with tokens in {out}, but there is no {path}; check --out, or add one first")
    return Keys(path=path)


def _described(key: Key) -> dict[str, str]:
    """A key as people see it: never its hash."""
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created_s))
    return {"id": key.id, "role": key.role, "created": made, "state": "valid" if key.is_valid else "revoked"}


def _print(facts: Mapping[str, object], told: str, *, as_json: bool) -> None:
    sys.stdout.write(f"{json.dumps(facts) if as_json else told}\n")


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
