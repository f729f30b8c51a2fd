"""The verbs. Parses, calls `app`, turns errors into one sentence and exit code 2. Knows no planning and no printing.

Imports of the parts happen inside the verbs, so that `cleave --help` needs nothing but argparse.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from cleave import __version__
from cleave.errors import CleaveError

_BAD_INPUT = 2
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(_BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


_AddVerb = Callable[..., _Parser]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code is 0, or 2 with one sentence on standard error if the input is at fault."""
    parser = _parser()
    options = parser.parse_args(arguments)
    _set_log_level()
    if options.verb is None:
        parser.print_help()
        return 0
    try:
        options.run(options)
    except CleaveError as fault:
        print(f"cleave {options.verb}: {fault}", file=sys.stderr)  # noqa: T201
        return _BAD_INPUT
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away, as `| head` does
        sys.stderr.close()
        return 0
    return 0


def _set_log_level() -> None:
    import logging
    import os

    level = os.environ.get("CLEAVE_LOG_LEVEL", "ERROR").upper()
    known = logging.getLevelNamesMapping()
    logging.basicConfig(level=known.get(level, logging.ERROR), format="%(asctime)s %(name)s %(levelname)s %(message)s")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="cleave", description="Train foundation models on idle laptops, desktops and phones.")
    parser.add_argument("--version", action="version", version=f"cleave {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", parser_class=_Parser)
    parser.set_defaults(verb=None)
    _add_train(verbs.add_parser)
    _add_join(verbs.add_parser)
    _add_token(verbs.add_parser)
    _add_plan(verbs.add_parser)
    _add_fleet(verbs.add_parser)
    return parser


def _add_train(add: _AddVerb) -> None:
    verb = add(
        "train",
        help="train a model on a fleet",
        description="Train a model on a fleet of devices. Without arguments: a small model, four local devices, and "
        "the sources of Python's own library as text. Every setting can also stand in a TOML file.",
    )
    verb.add_argument("run_file", nargs="?", metavar="RUN.toml", help="settings; flags override them")
    verb.add_argument("--model", metavar="NAME|DIR", help="demo, tiny-llama, opt-125m ..., or a model directory")
    verb.add_argument("--data", metavar="PATH", help="text, .jsonl or .parquet, or a directory of them")
    verb.add_argument("--steps", type=_count, metavar="N", help="optimizer updates in all")
    verb.add_argument("--sequence", type=_count, metavar="N", help="tokens of one sequence")
    verb.add_argument("--batch", type=_count, metavar="N", help="sequences of one micro-batch")
    verb.add_argument("--accumulate", type=_count, metavar="N", help="micro-batches of one step")
    verb.add_argument("--in-flight", type=_count, metavar="N", help="micro-batches computed at the same time")
    verb.add_argument("--learning-rate", type=_rate, metavar="RATE", help="the highest one")
    verb.add_argument("--seed", type=_seed, metavar="N", help="of weights, text order and sample")
    verb.add_argument("--wire", choices=["fp32", "bf16", "fp16", "int8"], help="format on the wire (default: fp32)")
    verb.add_argument("--grain", choices=["auto", "gemm", "resident"], help="a unit of work (default: the faster one)")
    verb.add_argument("--overlap", action="store_true", default=None, help="update weights one by one, during backward")
    verb.add_argument("--offload", choices=["auto", "always"], help="auto keeps gemms not worth sending on the server")
    verb.add_argument("--dtype", choices=["fp32", "bf16"], help="of the parameters (default: fp32)")
    verb.add_argument("--autocast", choices=["bf16"], help="multiply in a lower precision than the parameters'")
    verb.add_argument("--checkpointing", action="store_true", default=None, help="recompute activations in backward")
    verb.add_argument("--devices", type=_devices, metavar="N", help="local devices (default: 4, or 0 with --listen)")
    verb.add_argument("--device-threads", type=_count, metavar="N", help="threads of each local device (default: 1)")
    verb.add_argument(
        "--trust", choices=["sample", "strict", "none"], help="how much of resident layers' work to audit"
    )
    verb.add_argument("--listen", metavar="HOST:PORT", help="where devices join, such as 0.0.0.0:7077")
    verb.add_argument("--token", metavar="TEXT", help="what devices must know (default: CLEAVE_TOKEN, or made up)")
    verb.add_argument("--tls", action="store_true", default=None, help="encrypt, with a certificate made for the run")
    verb.add_argument("--tls-certificate", metavar="FILE", help="encrypt, with this certificate and its chain (PEM)")
    verb.add_argument("--tls-key", metavar="FILE", help="the certificate's key (PEM), if it is in another file")
    verb.add_argument("--wait", type=_rate, dest="wait_s", metavar="S", help="how long to wait for devices")
    verb.add_argument(
        "--alone", choices=["wait", "compute"], help="what to do while no device is there (default: wait)"
    )
    verb.add_argument("--alone-wait", type=_rate, dest="alone_wait_s", metavar="S", help="and for how long (3600)")
    verb.add_argument("--eval-every", type=_devices, metavar="N", help="steps between evaluations")
    verb.add_argument("--save-every", type=_devices, metavar="N", help="steps between checkpoints")
    verb.add_argument("--save-minutes", type=_minutes, metavar="M", help="and minutes between them (default: 10)")
    verb.add_argument("--keep", type=_count, metavar="N", help="checkpoints that stay on disk")
    verb.add_argument("--out", metavar="DIR", help="the run's directory (default: a new one in CLEAVE_HOME)")
    verb.add_argument("--resume", action="store_true", help="go on with the run in --out, or with the newest one")
    verb.add_argument("--json", action="store_true", help="print a summary as JSON at the end")
    verb.set_defaults(run=_run_train)


_NOT_SETTINGS = {"verb", "run", "run_file", "resume", "json"}


def _run_train(options: argparse.Namespace) -> None:
    import os

    from cleave import live

    overrides = {name: value for name, value in vars(options).items() if name not in _NOT_SETTINGS}
    if overrides["listen"] is not None and overrides["devices"] is None:
        overrides["devices"] = 0
    overrides["token"] = overrides["token"] or os.environ.get("CLEAVE_TOKEN")
    live.run_train(run_file=options.run_file, overrides=overrides, resume=options.resume, as_json=options.json)


def _add_join(add: _AddVerb) -> None:
    verb = add(
        "join",
        help="lend this machine to a server",
        description="Lend this machine to a server: it measures itself, joins, computes, and shows what it "
        "contributes. Ctrl-C leaves cleanly.",
    )
    verb.add_argument(
        "url", nargs="?", metavar="URL", help="the server, such as ws://192.168.1.20:7077 (or CLEAVE_SERVER)"
    )
    verb.add_argument("--memory", type=_bytes, metavar="SIZE", help="the most memory to use in all, such as 2GB")
    verb.add_argument("--threads", type=_count, metavar="N", help="processor threads to use (default: all)")
    verb.add_argument("--name", metavar="TEXT", help="what the server calls this device (default: the host's name)")
    verb.add_argument("--token", metavar="TEXT", help="the run's token (default: CLEAVE_TOKEN)")
    verb.add_argument("--kernel", choices=["auto", "numpy", "torch"], default="auto", help="what multiplies")
    verb.add_argument(
        "--wait", type=_rate, default=30.0, metavar="S", help="how long to try a server not yet reached (default: 30)"
    )
    verb.add_argument("--quiet", action="store_true", help="say nothing but errors")
    verb.add_argument("--with-parent", action="store_true", help="leave when the process that started this one ends")
    verb.set_defaults(run=_run_join)


def _run_join(options: argparse.Namespace) -> None:
    import os

    if options.threads is not None:  # read by numpy's libraries when they are loaded, which is below
        for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"):
            os.environ[variable] = str(options.threads)
    from cleave import live

    live.run_join(
        url=options.url or os.environ.get("CLEAVE_SERVER"),
        memory_bytes=options.memory,
        threads=options.threads,
        name=options.name,
        token=options.token or os.environ.get("CLEAVE_TOKEN", ""),
        kernel=options.kernel,
        wait_s=options.wait,
        quiet=options.quiet,
        with_parent=options.with_parent,
    )


def _add_token(add: _AddVerb) -> None:
    verb = add(
        "token",
        help="say who may join a run, or look into it",
        description="Say who may join a run, or look into it. A running server notices within seconds.",
    )
    actions = verb.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=_Parser)
    new = actions.add_parser("add", help="make a token; it is shown once, and only its hash is kept")
    new.add_argument(
        "--role", choices=["device", "admin"], default="device", help="device: may join; admin: may ask for the status"
    )
    new.set_defaults(run=_run_token_add)
    listing = actions.add_parser("list", help="list the run's tokens, by their ids")
    listing.set_defaults(run=_run_token_list)
    revoke = actions.add_parser("revoke", help="end a token, and let go of the devices that joined by it")
    revoke.add_argument("id", metavar="ID", help="as shown by list")
    revoke.set_defaults(run=_run_token_revoke)
    for action in (new, listing, revoke):
        action.add_argument("--out", required=True, metavar="RUN_DIR", help="the run's directory")
        action.add_argument("--json", action="store_true", help="print it as JSON")


def _run_token_add(options: argparse.Namespace) -> None:
    from cleave import live

    live.run_token_add(out=options.out, role=options.role, as_json=options.json)


def _run_token_list(options: argparse.Namespace) -> None:
    from cleave import live

    live.run_token_list(out=options.out, as_json=options.json)


def _run_token_revoke(options: argparse.Namespace) -> None:
    from cleave import live

    live.run_token_revoke(out=options.out, id=options.id, as_json=options.json)


def _add_plan(add: _AddVerb) -> None:
    verb = add(
        "plan",
        help="cut a gemm, or a model's whole training step, over a fleet",
        description="Cut a gemm, or a model's whole training step, over a fleet: who does which block, how long it "
        "takes, how close that is to the lower bound, and what limits it.",
    )
    what = verb.add_mutually_exclusive_group(required=True)
    what.add_argument(
        "--model", metavar="NAME|PATH", help="a model by name, or a Hugging Face config.json or its folder"
    )
    what.add_argument("--gemm", type=_gemm, metavar="M,N,K", help="one product C[M,N] = A[M,K] B[K,N]")
    verb.add_argument("--fleet", required=True, metavar="FLEET.csv", help="profiles, one device a line")
    verb.add_argument("--tokens", type=_count, metavar="N", help="tokens of a step (with --model)")
    verb.add_argument(
        "--sequence",
        type=_count,
        metavar="N",
        help="tokens of one sequence (default: 1024 at most, dividing --tokens)",
    )
    verb.add_argument("--wire", choices=["fp32", "bf16", "fp16", "int8"], default="bf16", help="format on the wire")
    verb.add_argument(
        "--server-down", type=_rate, metavar="GBIT", help="server to devices, Gbit/s (default: unlimited)"
    )
    verb.add_argument("--server-up", type=_rate, metavar="GBIT", help="devices to server, Gbit/s (default: unlimited)")
    verb.add_argument(
        "--server-tflops", type=_rate, metavar="TFLOPS", help="what the server computes itself (default: 0)"
    )
    verb.add_argument(
        "--grain",
        choices=["auto", "gemm", "resident"],
        default="auto",
        help="what a unit of a model's step is: a block of a gemm, or tokens through resident weights (default: "
        "the fastest of all ways)",
    )
    verb.add_argument(
        "--split", choices=["auto", "2d", "3d"], default="auto", help="whether blocks may split the inner side (gemm)"
    )
    verb.add_argument("--ungrouped", action="store_true", help="q, k, v and gate, up as gemms of their own (gemm)")
    verb.add_argument("--json", action="store_true", help="print the plan, every unit of it, as JSON")
    verb.add_argument("--plot", metavar="FILE.png", help="draw the tiling, and where the time goes")
    verb.set_defaults(run=_run_plan)


def _run_plan(options: argparse.Namespace) -> None:
    from cleave import app

    app.run_plan(
        fleet=options.fleet,
        model=options.model,
        gemm=options.gemm,
        tokens=options.tokens,
        sequence=options.sequence,
        wire=options.wire,
        server_down_gbit=options.server_down,
        server_up_gbit=options.server_up,
        server_tflops=options.server_tflops,
        grain=options.grain,
        split=options.split,
        grouped=not options.ungrouped,
        as_json=options.json,
        plot=options.plot,
    )


def _add_fleet(add: _AddVerb) -> None:
    verb = add("fleet", help="draw a fleet from the fact tables, or describe one")
    actions = verb.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=_Parser)

    sample = actions.add_parser("sample", help="draw a believable fleet")
    sample.add_argument(
        "--mix", required=True, metavar="CLASS=N,...", help="such as phone=600,laptop=300,desktop=60,sbc=40"
    )
    sample.add_argument(
        "--country", default="us", metavar="CODE", help="whose links: us, gb, fr ... or world (default: us)"
    )
    sample.add_argument("--seed", type=_seed, default=1, metavar="N", help="same seed, same fleet (default: 1)")
    sample.add_argument("--out", metavar="FLEET.csv", help="where to write it (default: standard output)")
    sample.add_argument("--json", action="store_true", help="print a description as JSON (with --out)")
    sample.set_defaults(run=_run_sample)

    show = actions.add_parser("show", help="describe a fleet")
    show.add_argument("fleet", metavar="FLEET.csv")
    show.add_argument("--json", action="store_true", help="print the description as JSON")
    show.set_defaults(run=_run_show)


def _run_sample(options: argparse.Namespace) -> None:
    from cleave import app

    app.run_fleet_sample(
        mix=options.mix, country=options.country, seed=options.seed, out=options.out, as_json=options.json
    )


def _run_show(options: argparse.Namespace) -> None:
    from cleave import app

    app.run_fleet_show(fleet=options.fleet, as_json=options.json)


def _gemm(text: str) -> tuple[int, int, int]:
    parts = text.split(",")
    if len(parts) != 3:
        raise argparse.ArgumentTypeError(f"expected three sizes M,N,K such as 4096,2048,2048, got {text!r}")
    m, n, k = (_count(part) for part in parts)
    return m, n, k


def _bytes(text: str) -> int:
    units = {"": 1, "b": 1, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12, "kib": 2**10, "mib": 2**20, "gib": 2**30}
    stripped = text.strip().lower()
    number = stripped.rstrip("bgikmt ")
    try:
        value = float(number) * units[stripped[len(number) :].strip()]
    except (KeyError, ValueError):
        value = 0.0
    if not (math.isfinite(value) and value >= 1):
        raise argparse.ArgumentTypeError(f"expected a size such as 500MB or 2GB, got {text!r}")
    return int(value)


def _count(text: str) -> int:
    try:
        value = int(text.strip())
    except ValueError:
        value = 0
    if not 1 <= value < 2**40:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 up, got {text!r}")
    return value


def _devices(text: str) -> int:
    return 0 if text.strip() == "0" else _count(text)


def _minutes(text: str) -> float:
    return 0.0 if text.strip() == "0" else _rate(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def _seed(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise argparse.ArgumentTypeError(f"expected a whole number from 0 up, got {text!r}")
    return value
