"""`cleave probe`: measure this machine as a device, and write its profile."""

from __future__ import annotations

import argparse
import asyncio
import os
import platform
from pathlib import Path

from cleave.cli.arguments import AddVerb, count, positive
from cleave.errors import InputError


def add_to(add: AddVerb) -> None:
    verb = add(
        "probe",
        help="measure this machine as a device",
        description="Measure this machine as a device: what a task costs whatever its size, FLOP/s on few and many "
        "rows, and what handling a byte costs, from a sweep over blocks of products and decoder blocks. Takes about 20 "
        "seconds; close other programs first.",
        examples=(
            "cleave probe --out laptop.csv",
            "cleave emulate 127.0.0.1:7077 --fleet fleet.csv --calibrate laptop.csv",
        ),
    )
    verb.add_argument("--out", metavar="PROFILE.csv", help="fleet file to write, with this machine as its one device")
    verb.add_argument("--name", metavar="TEXT", help="name of the device in that file (default: the host name)")
    verb.add_argument("--threads", type=count, metavar="N", help="processor threads to use (default: all)")
    verb.add_argument(
        "--kernel",
        choices=["auto", "numpy", "torch"],
        default="auto",
        help="library that computes; auto is torch on a GPU, else numpy (default: auto)",
    )
    links = verb.add_argument_group("link of the device in the file, which only a server can measure")
    links.add_argument(
        "--down", type=positive, default=1e9, metavar="RATE", help="bytes per second to the device (default: 1e9)"
    )
    links.add_argument(
        "--up", type=positive, default=1e9, metavar="RATE", help="bytes per second from the device (default: 1e9)"
    )
    links.add_argument(
        "--latency", type=positive, default=1e-3, metavar="S", help="seconds of a round trip (default: 0.001)"
    )
    verb.add_argument("--json", action="store_true", help="print the measurements as JSON")
    verb.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> None:
    if options.threads is not None:  # BLAS libraries read these when numpy is imported, below
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
            os.environ[variable] = str(options.threads)
    from cleave.core.fleet.profiles import write_csv
    from cleave.device.kernels import choose_kernel
    from cleave.device.probe import usable_memory_bytes
    from cleave.emulate.fit import fit, profile_of
    from cleave.emulate.sweep import sweep
    from cleave.report import probe as probe_report

    if options.out is not None:
        _check_writable(Path(options.out))  # before 20 seconds of measuring
    kernel = choose_kernel(options.kernel, options.threads)
    with probe_report.measuring(quiet=options.json) as step:
        samples = asyncio.run(sweep(kernel, step))
    found = fit(samples)
    profile = profile_of(
        found,
        name=options.name or platform.node() or "device",
        memory_bytes=usable_memory_bytes(None),
        down_bytes_per_s=options.down,
        up_bytes_per_s=options.up,
        latency_s=options.latency,
    )
    if options.out is not None:
        Path(options.out).write_text(write_csv(profile))
    probe_report.show(samples, found, kernel.name, options.out, as_json=options.json)


def _check_writable(path: Path) -> None:
    try:
        with path.open("a"):
            pass
    except OSError as fault:
        raise InputError(f"cannot write the profile to {path}: {fault.strerror}; choose another --out") from None
