"""`cleave join`: lend this machine to a server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import platform
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import TYPE_CHECKING

from cleave.cli.arguments import AddVerb, count, positive, size_bytes
from cleave.errors import InputError

if TYPE_CHECKING:
    from cleave.device.kernels import KernelChoice
    from cleave.device.terms import Terms


def add_to(add: AddVerb) -> None:
    verb = add(
        "join",
        help="lend this machine to a server",
        description="Lend this machine to a server. It measures itself, joins, computes, and shows what it "
        "contributes. Ctrl-C leaves cleanly. The server prints the whole command to run.",
        usage="cleave join ADDRESS [OPTION ...]",
        examples=(
            "cleave join '192.168.1.20:7077#TOKEN.PIN'",
            "cleave join '192.168.1.20:7077#TOKEN.PIN' --memory 2GB --threads 2",
            "cleave join wss://train.example.org:443 --token TOKEN",
        ),
    )
    verb.add_argument(
        "url",
        nargs="?",
        metavar="ADDRESS",
        help="address of the server, as it prints it: HOST:PORT#TOKEN.PIN, or a ws:// or wss:// URL (default: "
        "CLEAVE_SERVER)",
    )
    limits = verb.add_argument_group("what to lend")
    limits.add_argument(
        "--memory",
        type=size_bytes,
        metavar="SIZE",
        help="memory to use at most, the program included, such as 2GB (default: a quarter of what is free)",
    )
    limits.add_argument("--threads", type=count, metavar="N", help="processor threads to use (default: all)")
    limits.add_argument(
        "--kernel",
        choices=["auto", "numpy", "torch"],
        default="auto",
        help="library that computes; auto is torch on a GPU, else numpy (default: auto)",
    )
    terms = verb.add_argument_group("your terms", "The device leaves while they do not hold, and waits until they do.")
    terms.add_argument(
        "--terms",
        type=Path,
        metavar="FILE",
        help="TOML file of terms, see docs/lend-a-device.md (default: ~/.cleave/terms.toml if there is one, or "
        "terms.toml in CLEAVE_HOME)",
    )
    terms.add_argument("--not-on-batteries", action="store_true", help="compute only with external power")
    terms.add_argument(
        "--when-idle",
        type=positive,
        metavar="MIN",
        help="minutes without input before this machine computes (default: no need to be idle)",
    )
    terms.add_argument(
        "--cpu-usage-limit", type=positive, metavar="PERCENT", help="share of the time to compute in (default: 100)"
    )
    terms.add_argument(
        "--max-bytes-sec-down", type=size_bytes, metavar="SIZE", help="bytes a second to receive (default: no limit)"
    )
    terms.add_argument(
        "--max-bytes-sec-up", type=size_bytes, metavar="SIZE", help="bytes a second to send (default: no limit)"
    )
    connection = verb.add_argument_group("connection")
    connection.add_argument("--name", metavar="TEXT", help="name shown on the server (default: the host name)")
    connection.add_argument(
        "--token", metavar="TEXT", help="token of the run, if not in the address (default: CLEAVE_TOKEN)"
    )
    connection.add_argument(
        "--wait",
        type=positive,
        default=30.0,
        metavar="S",
        help="seconds to try to reach the server the first time, before giving up (default: 30)",
    )
    connection.add_argument("--quiet", action="store_true", help="print only errors")
    connection.add_argument(
        "--with-parent", action="store_true", help="leave when the process that started this one ends"
    )
    verb.add_argument(
        "--background",
        choices=["install", "remove", "status"],
        help="join with these options whenever you are logged in, as a service; remove it; or show its status "
        "(default: join now, in this terminal)",
    )
    verb.set_defaults(run=_run_join)


def _run_join(options: argparse.Namespace) -> None:
    if options.background is not None:
        _run_background(options)
        return
    if options.threads is not None:  # BLAS libraries read these when numpy is imported, below
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
            os.environ[variable] = str(options.threads)

    run_join(
        url=options.url or os.environ.get("CLEAVE_SERVER"),
        memory_bytes=options.memory,
        threads=options.threads,
        terms=lambda: _terms(options),
        terms_path=_terms_path(options),
        name=options.name,
        token=options.token,
        kernel=options.kernel,
        wait_s=options.wait,
        quiet=options.quiet,
        with_parent=options.with_parent,
    )


def _run_background(options: argparse.Namespace) -> None:
    from cleave import run_files
    from cleave.device import background
    from cleave.printable import printable
    from cleave.transport.address import parse_address

    url = options.url or os.environ.get("CLEAVE_SERVER") or ""
    token = options.token or os.environ.get("CLEAVE_TOKEN")
    if options.background == "install":
        _terms(options)  # to find mistakes now
        parse_address(url)
    variables = {"CLEAVE_SERVER": url, "CLEAVE_TOKEN": token, "CLEAVE_HOME": os.environ.get("CLEAVE_HOME")}
    service = background.service_of(
        sys.platform,
        Path.home(),
        run_files.home().absolute(),
        (sys.executable, "-m", "cleave", "join", *_lent(options)),
        {name: value for name, value in variables.items() if value},
        os.getuid() if hasattr(os, "getuid") else 0,
    )
    match options.background:
        case "install":
            background.install(service)
            files = " and ".join(str(path) for path in service.files)
            _write(f"installed and started; it is in {files}\nto check on it: cleave join --background status")
        case "remove":
            _write("removed" if background.remove(service) else "there is no such service; nothing was removed")
        case _:
            lines = map(printable, background.status(service).splitlines())
            _write("\n".join(lines) or "not installed")


def _write(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _lent(options: argparse.Namespace) -> list[str]:
    """Return what to lend, and on which terms, as command-line arguments."""
    values = {
        "--memory": options.memory,
        "--threads": options.threads,
        "--kernel": options.kernel,
        "--terms": options.terms and options.terms.absolute(),
        "--when-idle": options.when_idle,
        "--cpu-usage-limit": options.cpu_usage_limit,
        "--max-bytes-sec-down": options.max_bytes_sec_down,
        "--max-bytes-sec-up": options.max_bytes_sec_up,
        "--name": options.name,
    }
    given = [f"{name}={value}" for name, value in values.items() if value is not None]
    return [*given, "--not-on-batteries"] if options.not_on_batteries else given


def _terms_path(options: argparse.Namespace) -> Path:
    from cleave import run_files

    return options.terms or run_files.home() / "terms.toml"


def _terms(options: argparse.Namespace) -> Terms:
    from cleave.config import load_settings
    from cleave.device.terms import Terms

    path = _terms_path(options)
    overrides = {
        "run_on_batteries": False if options.not_on_batteries else None,
        "run_if_user_active": False if options.when_idle else None,
        "idle_time_to_run": options.when_idle,
        "cpu_usage_limit": options.cpu_usage_limit,
        "max_bytes_sec_down": options.max_bytes_sec_down,
        "max_bytes_sec_up": options.max_bytes_sec_up,
    }
    return load_settings(Terms, path if options.terms or path.exists() else None, overrides)


def run_join(
    *,
    url: str | None,
    memory_bytes: int | None,
    threads: int | None,
    terms: Callable[[], Terms],
    terms_path: Path,
    name: str | None,
    token: str | None,
    kernel: KernelChoice,
    wait_s: float,
    quiet: bool,
    with_parent: bool,
) -> None:
    from cleave import memory, run_files
    from cleave.device import join, probe
    from cleave.device.conditions import observer
    from cleave.device.kernels import choose_kernel, unused_gpu
    from cleave.device.terms_file import TermsFile
    from cleave.device.transfers import Transfers
    from cleave.device.volunteer import Volunteer
    from cleave.device.worker import Contribution, Offer
    from cleave.report import join as join_report
    from cleave.transport.address import parse_address
    from cleave.transport.allocation import keep_freed_memory

    keep_freed_memory(one_arena=True)
    if not url:
        raise InputError("expected the address of a server; copy the join command that the server prints")
    address = parse_address(url)
    terms()  # to find mistakes now
    chosen = choose_kernel(kernel, threads)
    offer = Offer(
        name=name or platform.node() or "device",
        token=token or address.token or os.environ.get("CLEAVE_TOKEN", ""),
        flops_per_s=probe.measure_flops_per_s(chosen),
        memory_bytes=probe.usable_memory_bytes(memory_bytes),
    )

    def volunteer_now() -> Volunteer:
        now = terms()
        rooms = {
            1.0: offer.memory_bytes,
            **{
                share: probe.usable_memory_bytes(int(memory.total_bytes() * share), name)
                for name, share in now.limits.items()
                if name.startswith("ram_max_used")
            },
        }
        transfers = Transfers(run_files.home()) if now.daily_xfer_limit_mb else None
        return Volunteer(now, observer(now), rooms.__getitem__, transfers)

    file = TermsFile(terms_path, volunteer_now)
    volunteer = file.read()
    volunteer.file = file
    contribution = Contribution()
    with (
        join_report.shown(
            contribution,
            offer.flops_per_s,
            offer.memory_bytes,
            chosen.name,
            lambda: volunteer.paused,
            quiet=quiet,
        ) as say,
        contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError),
    ):
        if kernel == "auto" and (hint := unused_gpu(chosen)):
            say(hint)
        if volunteer.terms.limits:
            say(f"your terms: {volunteer.terms}")
        gc.freeze()  # exempt everything loaded so far from collection
        gc.set_threshold(50_000)
        serving = join.serve(address, chosen, offer, contribution, say, wait_s, volunteer)
        asyncio.run(until_stopped(_while_parent_lives(serving) if with_parent else serving))


async def until_stopped(serving: Coroutine[None, None, None]) -> None:
    """Leave as cleanly as on Ctrl-C when the system stops this process, or its terminal is closed."""
    task = asyncio.current_task()
    assert task is not None
    for name in ("SIGTERM", "SIGHUP"):
        with contextlib.suppress(AttributeError, NotImplementedError, RuntimeError):  # as on Windows
            number = getattr(signal, name)
            if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
                asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    await serving


async def _while_parent_lives(serving: Coroutine[None, None, None]) -> None:
    """Stop when the parent process is gone, so that a killed server leaves no local devices behind."""
    parent, work = os.getppid(), asyncio.ensure_future(serving)
    while not work.done() and os.getppid() == parent:
        await asyncio.wait([work], timeout=1.0)
    work.cancel()
    await work
