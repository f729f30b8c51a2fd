"""`cleave.Fleet`: a server in this process and its devices, used as one big multiplier."""

from __future__ import annotations

import math
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

import numpy as np

from cleave import events, settings
from cleave.api import speech
from cleave.api.checks import check_choice, check_count, check_seconds, check_text, checked_trust, checked_wire
from cleave.core.cost.wire import WireFormat, WireName
from cleave.core.model.gemms import Linear
from cleave.core.verify.trust import Level
from cleave.device.join import stand_in
from cleave.device.replay import replay
from cleave.errors import FleetGoneError, InputError
from cleave.report.quantities import plural
from cleave.run_files import EVENTS
from cleave.server.admission import certificate
from cleave.server.admission.gate import CROWDED
from cleave.server.admission.tokens import Keys
from cleave.server.cluster import Cluster
from cleave.server.service import Service
from cleave.server.status import DeviceStatus, FleetStatus
from cleave.settings import ALONES, OFFLOADS, Alone, Offload
from cleave.transport.address import join_command, join_page
from cleave.transport.shaped import Link, shaping

if TYPE_CHECKING:
    import torch

Tls = bool | tuple[str | Path, str | Path | None]
"""False: off; True: with a self-signed certificate; or the PEM files of a certificate and its key."""
_Array = TypeVar("_Array", "np.ndarray[Any, Any]", "torch.Tensor")
_FIRST_DEVICE_S = 60.0
_LOOK_S = 1.0
"""Seconds between looks at local devices while waiting; also lets Ctrl-C through where waiting blocks it."""
_HERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}
"""Address to dial from this machine, if the server listens on all of them."""


SCALE_TEST = (
    "SCALE TEST: devices may answer without computing and nothing is checked, so losses and weights mean nothing, and "
    "no model is saved"
)


class Fleet:
    """A server in this process and its devices. Create it with `local` or `serve`; close it, or use `with`.

    It logs who joins and leaves, which grain is chosen and why (logger `cleave.fleet`; standard error if logging is
    not configured). `devices` and `status()` show the present state; a `listener` gets every event, in the server's own
    thread: a slow one keeps devices waiting.
    """

    def __init__(
        self,
        listen: str,
        *,
        token: str = "",
        keys: Keys | None = None,
        tls: Tls = False,
        directory: Path | None = None,
        wire: WireName = settings.WIRE,
        offload: Offload = settings.OFFLOAD,
        listener: events.Listener | None = None,
        alone: Alone = settings.ALONE,
        alone_wait_s: float = settings.ALONE_WAIT_S,
        links: Link | None = None,
        trust: Level | None = None,
        scale_test: bool = False,
    ) -> None:
        """Start the server.

        `token` is shown in the join command, and is the only key unless `keys` are given. `directory` keeps what must
        outlive this process, such as a self-signed certificate. `links` emulates slower networks for all devices.
        `trust` says who joins with `token`, or without one: `own` machines, `known` people, or strangers, the default;
        devices started here are `own` unless it is given. It decides how much of their work on resident layers is
        audited: nothing, a sample, or everything; all gemm results are verified in any case. `keys` have their own.
        A `scale_test` measures this server alone: devices may answer without computing, nothing is checked, and results
        mean nothing.
        """
        check_text("listen", listen, "0.0.0.0:7077")
        check_text("token", token, "a secret")
        check_choice("offload", offload, OFFLOADS)
        joining = checked_trust(trust, settings.TRUST)
        self._local_trust: Level = checked_trust(trust, "own")
        check_choice("alone", alone, ALONES)
        check_seconds("alone_wait_s", alone_wait_s)
        if listener is not None and not callable(listener):
            raise InputError(f"expected listener to be a function of one event, got {listener!r}")
        self.wire: WireFormat = checked_wire(wire)
        self.offload: Offload = offload
        self.token = token
        self.medium_bytes_per_s = links.medium_bytes_per_s if links is not None else math.inf
        """Capacity shared by all devices in both directions, if known; each device alone may measure all of it."""
        self._user_listener = listener
        self._processes: list[subprocess.Popen[bytes]] = []
        self._keys = keys = keys or Keys(token, trust=joining)
        self._certificate = _certificate(tls, directory, listen.rpartition(":")[0].strip("[]"))

        def make(loop: Any) -> Cluster:
            return Cluster(
                loop,
                wire=self.wire,
                keys=keys,
                codec=_fastest_codec(),
                listener=self._listen,
                alone_wait_s=alone_wait_s,
                stand_in=stand_in,
                stands_in=alone == "compute",
                medium_bytes_per_s=self.medium_bytes_per_s,
                replay=replay,
                is_scale_test=scale_test,
            )

        wrap = None if links is None else shaping(links)
        self._service = Service(
            listen,
            make,
            keys=keys,
            certificate=self._certificate,
            limits=CROWDED if scale_test else None,
            wrap=wrap,
            say=self.say,
            events=directory / EVENTS if directory is not None else None,
        )
        self._service.start()
        self.cluster = self._service.cluster
        self.is_scale_test = scale_test
        """Whether results mean nothing, as devices may answer without computing."""
        if scale_test:
            self.say(SCALE_TEST)
        if keys.is_open and self.is_reachable:
            self.say("anyone who can reach this server may join it and see what devices see; set a token")

    @classmethod
    def serve(
        cls,
        listen: str = "0.0.0.0:7077",
        *,
        token: str = "",
        tls: Tls = False,
        wire: WireName = settings.WIRE,
        offload: Offload = settings.OFFLOAD,
        alone: Alone = settings.ALONE,
        alone_wait_s: float = settings.ALONE_WAIT_S,
        trust: Level | None = None,
        listener: events.Listener | None = None,
        scale_test: bool = False,
    ) -> Fleet:
        """Serve devices at an address of this machine; run `join_command` on theirs.

        `token` is a secret that devices need to join; without one, anyone who reaches the server may. `tls` encrypts,
        with a self-signed certificate or with the PEM files given. `wire` is the number format on the wire. `offload`
        "auto" keeps on the server what is not worth sending. `trust` says who joins: `own` machines, `known` people, or
        strangers, the default, all of whose work on resident layers is recomputed here. `alone` is what to do while no
        device is connected: wait, for at most `alone_wait_s` seconds, or compute on the server. `scale_test` measures
        this server alone: devices of `cleave emulate --compute none` may join, nothing is checked, no result is real.
        """
        return cls(
            listen,
            token=token,
            tls=tls,
            wire=wire,
            offload=offload,
            alone=alone,
            alone_wait_s=alone_wait_s,
            trust=trust,
            listener=listener,
            scale_test=scale_test,
        )

    @classmethod
    def local(
        cls,
        count: int,
        *,
        wire: WireName = settings.WIRE,
        offload: Offload = settings.OFFLOAD,
        threads: int = settings.DEVICE_THREADS,
        memory: str | None = None,
        links: Link | None = None,
        trust: Level | None = None,
        listener: events.Listener | None = None,
    ) -> Fleet:
        """Start `count` devices on this machine, as real processes over real sockets.

        `threads` and `memory` (such as "2GB") limit each device; `links` emulates slower networks.
        """
        _check_devices(count, threads, memory)
        fleet = cls("127.0.0.1:0", wire=wire, offload=offload, links=links, trust=trust, listener=listener)
        try:
            fleet.start_devices(count, threads=threads, memory=memory)
            fleet.wait(count)
        except BaseException:
            fleet.close()
            raise
        return fleet

    @property
    def url(self) -> str:
        """Address for devices on this machine, whatever name the certificate is for."""
        host = _HERE.get(self._service.host, self._service.host)
        return self._url(host, pinned=self._certificate is not None)

    @property
    def public_url(self) -> str:
        """Address for devices on other machines, or on this one if the server listens only locally."""
        named = self._certificate.name if self._certificate is not None else None
        host = _own_address() if self._service.host in _HERE else self._service.host
        return self._url(named or host, pinned=self._certificate is not None and self._certificate.is_own)

    def _url(self, host: str, *, pinned: bool) -> str:
        scheme = "ws" if self._certificate is None else "wss"
        pin = f"#sha256:{self._certificate.fingerprint}" if self._certificate is not None and pinned else ""
        return f"{scheme}://{f'[{host}]' if ':' in host else host}:{self._service.port}{pin}"

    @property
    def join_command(self) -> str:
        """Command that joins another machine, token included."""
        return join_command(self.public_url, self.token)

    @property
    def join_page(self) -> str:
        """Link that joins a browser, token included."""
        return join_page(self.public_url, self.token)

    @property
    def is_reachable(self) -> bool:
        """Whether other machines can join."""
        return not self._service.is_local

    @property
    def devices(self) -> tuple[DeviceStatus, ...]:
        """The connected devices."""
        return self.status().devices

    def status(self) -> FleetStatus:
        """Return the present state: devices, grain and totals."""
        return self.cluster.status()

    def say(self, text: str) -> None:
        self._listen(events.Note(text=text))

    def _listen(self, event: events.AnyEvent) -> None:
        speech.log_event(event)
        if self._user_listener is not None:
            self._user_listener(event)

    def check_open(self) -> None:
        """Raise FleetGoneError if the fleet is closed."""
        self.cluster.check_open()

    def start_devices(
        self, count: int, *, threads: int = settings.DEVICE_THREADS, memory: str | None = None
    ) -> list[int]:
        """Start `cleave join` processes on this machine; return their process ids."""
        self.check_open()
        _check_devices(count, threads, memory)
        started: list[int] = []
        if not self.is_reachable:  # all devices are on this machine
            self.cluster.planning.share_cores((os.cpu_count() or 1) / threads)
        lent = self._keys.lend(self._local_trust)
        for _ in range(count):
            number = len(self._processes) + 1
            command = [sys.executable, "-m", "cleave", "join", self.url, "--name", _local_name(number)]
            command += [
                "--quiet",
                "--with-parent",
                "--threads",
                str(threads),
                *(["--memory", memory] if memory else []),
            ]
            environment = {**os.environ, "CLEAVE_TOKEN": lent}
            # In a session of its own (not on Windows), so that Ctrl-C reaches this process alone, which says goodbye.
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment, start_new_session=True)
            self._processes.append(process)
            started.append(process.pid)
        return started

    def wait(self, count: int = 1, timeout_s: float | None = _FIRST_DEVICE_S) -> None:
        """Wait until `count` devices are connected, without limit if `timeout_s` is None.

        Raises FleetGoneError on timeout, or when local devices failed to start and the rest are too few.
        """
        self.check_open()
        check_count("count", count)
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s)
        give_up_at = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while (left_s := give_up_at - time.monotonic()) > 0:
            if self.cluster.wait_for_devices(count, min(left_s, _LOOK_S)):
                return
            self.check_open()
            joined = {member.name for member in self.cluster.members()}
            living = sum(process.poll() is None for process in self._processes)
            for number, process in enumerate(self._processes, start=1):
                failed = (process.poll() or 0) > 0  # a negative code is a signal: whoever sent it may start another
                if failed and living < count and _local_name(number) not in joined:
                    raise FleetGoneError(
                        f"{_local_name(number)} ended with exit code {process.returncode} before it joined; its own "
                        "message, above, says why"
                    )
        raise FleetGoneError(
            f"expected {plural(count, 'device')} within {timeout_s:.0f} s, but {self.cluster.devices or 'none'} "
            "joined; start one with cleave join, or wait longer"
        )

    def matmul(self, a: _Array, b: _Array) -> _Array:
        """Compute a @ b in fp32 on the fleet; takes torch or numpy matrices and returns the same kind."""
        self.check_open()
        left, right = _as_float32("a", a), _as_float32("b", b)
        if left.ndim != 2 or right.ndim != 2 or left.shape[1] != right.shape[0]:
            raise InputError(f"expected matrices M x K and K x N, got {left.shape} and {right.shape}; reshape them")
        # As the input gradient of a layer with weight B, C = A B needs no transposed copy.
        one, two = self.cluster.tensor(*left.shape), self.cluster.tensor(*right.shape)
        one.bind(np.ascontiguousarray(left))
        two.bind(np.ascontiguousarray(right))
        linear = Linear(tokens=left.shape[0], in_width=right.shape[1], out_width=right.shape[0], roles=("grad_input",))
        self.cluster.planning.step_ended()  # lets every product use the devices connected now
        plan = self.cluster.choose_layer(linear).plan
        (result,) = self.cluster.wait(self.cluster.submit("grad_input", (one,), (two,), plan))
        if isinstance(a, np.ndarray):
            return result
        import torch

        return torch.from_numpy(result).to(device=a.device, dtype=a.dtype)

    def close(self, reason: str = "done", *, rejoin: bool = False) -> None:
        """Say goodbye to every device and stop the server; with `rejoin`, devices wait for it to return."""
        self.cluster.prepare_closing()
        self._service.stop(reason, rejoin=rejoin)
        if rejoin:  # remote devices wait for this server to return; local ones end with it
            for process in self._processes:
                process.terminate()
        for process in self._processes:
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        speech.finish()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _certificate(tls: Tls, directory: Path | None, host: str) -> certificate.Certificate | None:
    if isinstance(tls, tuple):
        chain, key = tls
        return certificate.given(Path(chain), Path(key) if key is not None else None)
    kept = directory / certificate.FILE if directory is not None else None
    return certificate.own(kept, [host, _own_address()]) if tls else None


def _local_name(number: int) -> str:
    return f"local-{number}"


def _check_devices(count: object, threads: object, memory: object) -> None:
    check_count("count", count)
    check_count("threads", threads)
    if memory is not None:
        check_text("memory", memory, "2GB")


def _as_float32(name: str, x: np.ndarray[Any, Any] | torch.Tensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    try:
        return np.asarray(x if isinstance(x, np.ndarray) else x.detach().float().cpu(), dtype=np.float32)
    except (AttributeError, TypeError, ValueError):
        kind = f"{type(x).__module__}.{type(x).__qualname__}"
        raise InputError(f"expected {name} to be a numpy array or a torch tensor of numbers, got a {kind}") from None


def _own_address() -> str:
    """Return this machine's address on its network. Connecting a datagram socket sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return socket.gethostname()


def _fastest_codec() -> Any:
    from importlib.util import find_spec

    if find_spec("torch") is None:
        return None
    from cleave.train.offload.codec import TorchCodec

    return TorchCodec()
