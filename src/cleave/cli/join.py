"""`cleave join`: lend this machine to a server."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import platform
import signal
from collections.abc import Coroutine
from typing import TYPE_CHECKING

from cleave.cli.arguments import AddVerb, count, positive, size_bytes
from cleave.errors import InputError

if TYPE_CHECKING:
    from cleave.device.kernels import KernelChoice


def add_to(add: AddVerb) -> None:
    verb = add(
        "join",
        help="lend this machine to a server",
        description="Lend this machine to a server. It measures itself, joins, computes, and shows what it "
        "contributes. Ctrl-C leaves cleanly. The server prints the whole command.",
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
        help="seconds to keep trying to reach the server at first (default: 30)",
    )
    connection.add_argument("--quiet", action="store_true", help="print only errors")
    connection.add_argument(
        "--with-parent", action="store_true", help="leave when the process that started this one ends"
    )
    verb.set_defaults(run=_run_join)


def _run_join(options: argparse.Namespace) -> None:
    if options.threads is not None:  # BLAS libraries read these when numpy is imported, below
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
            os.environ[variable] = str(options.threads)

    run_join(
        url=options.url or os.environ.get("CLEAVE_SERVER"),
        memory_bytes=options.memory,
        threads=options.threads,
        name=options.name,
        token=options.token,
        kernel=options.kernel,
        wait_s=options.wait,
        quiet=options.quiet,
        with_parent=options.with_parent,
    )


def run_join(
    *,
    url: str | None,
    memory_bytes: int | None,
    threads: int | None,
    name: str | None,
    token: str | None,
    kernel: KernelChoice,
    wait_s: float,
    quiet: bool,
    with_parent: bool,
) -> None:
    from cleave.device import join, probe
    from cleave.device.kernels import choose_kernel, unused_gpu
    from cleave.device.worker import Contribution, Offer
    from cleave.report import join as join_report
    from cleave.transport.address import parse_address
    from cleave.transport.allocation import keep_freed_memory

    keep_freed_memory(one_arena=True)
    if not url:
        raise InputError("expected the address of a server; copy the join command that the server prints")
    address = parse_address(url)
    chosen = choose_kernel(kernel, threads)
    offer = Offer(
        name=name or platform.node() or "device",
        token=token or address.token or os.environ.get("CLEAVE_TOKEN", ""),
        flops_per_s=probe.measure_flops_per_s(chosen),
        memory_bytes=probe.usable_memory_bytes(memory_bytes),
    )
    contribution = Contribution()
    with (
        join_report.shown(contribution, offer.flops_per_s, offer.memory_bytes, chosen.name, quiet=quiet) as say,
        contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError),
    ):
        if kernel == "auto" and (hint := unused_gpu(chosen)):
            say(hint)
        gc.freeze()  # exempt everything loaded so far from collection
        gc.set_threshold(50_000)
        serving = join.serve(address, chosen, offer, contribution, say, wait_s)
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
