"""What `cleave train` puts around the training loop: a fleet, an event log, a screen, and a claim on the directory."""

from __future__ import annotations

import math
import os
import shlex
import sys
import threading
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING

from cleave import run_files, settings
from cleave.api.fleet import Fleet
from cleave.api.run_bill import run_bill
from cleave.config import TrainConfig
from cleave.core.verify.vouching import Vouching
from cleave.events import AnyEvent, EnergyUsed, EventLog, Note, Paused, StepDone, Throttle
from cleave.report.plain import plain_console
from cleave.report.train_screen import TrainView
from cleave.server.admission.gate import is_loopback
from cleave.server.admission.tokens import FILE, Keys
from cleave.terminal import is_kept
from cleave.train.loop import Traffic

if TYPE_CHECKING:
    import torch

    from cleave.core.carbon.bill import Bill
    from cleave.core.schedule.members import Member

_UNENCRYPTED = "tokens and numbers travel in the clear, for anyone on the network to read; add --tls"
_STRANGERS = (
    "devices that join are strangers: this server recomputes all their work on resident layers; if they are your own "
    "machines, add --trust own"
)
_LOCAL_WAIT_S = 60.0
_BILL_EVERY_S = 60.0


class TrainingRun:
    """A run's fleet and event log, opened and closed with it."""

    def __init__(self, config: TrainConfig, directory: Path) -> None:
        self._config, self._directory = config, directory
        self.fleet: Fleet | None = None
        self.view = TrainView(plain_console(stderr=True), self._devices)
        self.finished = False
        self._log: EventLog | None = None
        self._pending: list[AnyEvent] = []
        self._throttle = Throttle(time.monotonic)
        self._lock = threading.RLock()
        self._began_s = self._billed_s = time.monotonic()
        run_files.claim(directory)  # before anything is written there

    def observe(self, event: AnyEvent) -> None:
        """Write an event to the screen and to the log, unless there are too many of its kind."""
        with self._lock:
            for each in self._throttle(event):
                self._write(each)
        if isinstance(event, StepDone) and time.monotonic() - self._billed_s >= _BILL_EVERY_S:
            self.tell_energy(time.monotonic() - self._began_s)

    def _write(self, event: AnyEvent) -> None:
        """Write an event to the screen and to the log, which is opened once the run's directory exists."""
        if self._log is None and self._directory.is_dir():
            self._log = EventLog(self._directory / run_files.EVENTS, time.time)
            for pending in self._pending:
                self._log(pending)
        if self._log is None:
            self._pending.append(event)
        else:
            self._log(event)
        self.view(event)

    def wrap(self, model: torch.nn.Module) -> torch.nn.Module:
        """Start the fleet and distribute the model over it."""
        from cleave.api.training import distribute

        config = self._config
        keys, token = run_keys(config, self._directory)
        self.fleet = fleet = Fleet(
            config.address,
            token=token,
            keys=keys,
            tls=config.tls if config.tls_certificate is None else (config.tls_certificate, config.tls_key),
            directory=self._directory,
            wire=config.wire,
            offload=config.offload,
            listener=self.observe,
            alone=config.alone,
            trust=config.trust,
            scale_test=config.scale_test,
            alone_wait_s=config.alone_wait_s or (settings.ALONE_WAIT_S if config.listen is None else math.inf),
        )
        run_files.claim(self._directory, fleet.public_url)
        suffix = " with their token" if not keys.is_open else ""
        self.observe(Note(text=f"devices join at {fleet.public_url.partition('#')[0]}{suffix}"))
        count = config.local_devices
        if fleet.is_reachable or not count:
            self._show_join_command(fleet, has_token=not keys.is_open)
        if not keys.is_open and fleet.is_reachable and fleet.public_url.startswith("ws:"):
            self.observe(Note(text=_UNENCRYPTED))
        if fleet.is_reachable and config.trust is None:
            self.observe(Note(text=_STRANGERS))
        if count:
            fleet.start_devices(count, threads=config.device_threads)
            _reserve_cores(count * config.device_threads)
            fleet.wait(count, config.wait_s or _LOCAL_WAIT_S)
        elif config.alone == "wait":
            limit = "" if config.wait_s is None else f" within {config.wait_s:.0f} s"
            self.observe(Paused(reason=f"waiting for a device to join{limit}; Ctrl-C stops"))
            fleet.wait(1, config.wait_s)
        return distribute(model, fleet, grain=config.grain, lease=config.lease)

    def _show_join_command(self, fleet: Fleet, *, has_token: bool) -> None:
        """Show the join command, unless standard error goes to a file, where its token would stay for others to read.

        Pipes get it: what reads them (`docker logs`, systemd's journal, a script) is how people without a terminal see
        it, and is the owner's to protect.
        """
        if has_token and is_kept(sys.stderr):
            self.view.show_token_command(f"cleave token add --out {shlex.quote(str(self._directory))}")
        else:
            self.view.show_join_page(fleet.join_page, is_local=not fleet.is_reachable)
            self.view.show_join_command(fleet.join_command, is_local=not fleet.is_reachable)

    def traffic(self) -> Traffic:
        if self.fleet is None:
            return Traffic()
        totals = self.fleet.cluster.totals()
        return Traffic(
            devices=totals.devices,
            down_bytes=totals.down_bytes,
            up_bytes=totals.up_bytes,
            waiting_s=totals.waiting_s,
            checking_s=totals.checking_s,
            predicted_s=totals.predicted_s,
        )

    def watching(self) -> AbstractContextManager[Vouching]:
        return self.fleet.cluster.vouching() if self.fleet else nullcontext(Vouching())

    def tell_audits(self) -> None:
        totals = self.fleet.cluster.totals() if self.fleet else None
        if totals is not None and totals.audited_units:
            found = f"wrong results found {totals.wrong_audits} times" if totals.wrong_audits else "all correct"
            self.observe(Note(text=f"audited {totals.audited_units} units: {found}"))

    def tell_energy(self, wall_s: float) -> Bill | None:
        """Log the energy and emissions of what devices did in `wall_s`."""
        self._billed_s = time.monotonic()
        bill = run_bill(self.fleet.cluster.members(), wall_s) if self.fleet else None
        if bill is not None:
            whole = bill.footprint
            self.observe(
                EnergyUsed(
                    energy_j=whole.energy_j,
                    devices_j=whole.devices.energy_j,
                    network_j=whole.network.energy_j,
                    server_j=whole.server.energy_j,
                    kgco2e=whole.kgco2e,
                    embodied_kgco2e=whole.embodied_kgco2e,
                )
            )
        return bill

    def _devices(self) -> list[Member]:
        return self.fleet.cluster.here() if self.fleet else []

    def close(self) -> None:
        if self.fleet is not None:
            reason = "the run is finished" if self.finished else "the run stopped"
            self.fleet.close(reason, rejoin=not self.finished)
        for note in self._throttle.rest():
            self._write(note)
        if self._log is not None:
            self._log.close()
        run_files.release(self._directory)


def run_keys(config: TrainConfig, directory: Path) -> tuple[Keys, str]:
    """Return the run's keys and the token to show: the configured one, or a new one if others can reach the server.

    Tokens issued earlier stay valid: the run directory has their hashes, although the tokens cannot be shown again.
    """
    trust = config.trust or settings.TRUST
    keys, chosen = Keys(path=directory / FILE, trust=trust), config.token
    known = keys.identify(chosen) if chosen and not keys.is_open else None
    if chosen and known:
        keys.set_trust(known, trust)
        return keys, chosen
    if not chosen and _is_local(config.address) and keys.is_open:
        return keys, ""
    return keys, keys.add("device", chosen or None, trust)[1]


def _is_local(listen: str) -> bool:
    return is_loopback(listen.rpartition(":")[0].strip("[]"))


def _reserve_cores(threads: int) -> None:
    """Reserve cores for local devices: torch's threads spin while waiting, which would take theirs."""
    import torch

    torch.set_num_threads(max(1, min(torch.get_num_threads(), (os.cpu_count() or 1) - threads)))
