"""The `cleave` command: dispatch to a verb, and turn errors into one sentence and exit code 2.

Verbs import what they need when they run, so `cleave --help` loads nothing heavier than argparse.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cleave import __version__
from cleave.cli import bench, completion, emulate, fleet, join, plan, probe, runs, simulate, status, token, train, view
from cleave.cli.arguments import BAD_INPUT, Parser
from cleave.errors import CleaveError
from cleave.printable import printable

_FAILED = 1
_INTERRUPTED = 130
_LONG_RUNNING = {"train", "join", "emulate", "bench", "view"}
"""Verbs that must not block when nobody reads their output."""
_LONGEST_MESSAGE = 4000


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns exit code 0, or 2 after printing one sentence to stderr if the input is at fault."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.verb not in _LONG_RUNNING:
        return _run(parser, options)
    from cleave.terminal import never_blocking

    with never_blocking("stderr", *(() if getattr(options, "json", False) else ("stdout",))):
        try:
            return _run(parser, options)
        except Exception as fault:
            sys.excepthook(type(fault), fault, fault.__traceback__)  # here, where printing it cannot block
            return _FAILED


def _run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    _set_log_level()
    if options.verb is None:
        parser.print_help()
        return 0
    try:
        options.run(options)
    except CleaveError as fault:
        # it may name a stranger's file, or quote from it or from a peer
        told = [printable(line, _LONGEST_MESSAGE) for line in str(fault).split("\n")]
        print(f"cleave {options.verb}:", "\n".join(told), file=sys.stderr)  # noqa: T201
        return BAD_INPUT
    except KeyboardInterrupt:
        print(f"cleave {options.verb}: interrupted", file=sys.stderr)  # noqa: T201
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of our output is gone, as with `| head`
        sys.stderr.close()
        return 0
    return 0


def _set_log_level() -> None:
    import logging
    import os

    level = os.environ.get("CLEAVE_LOG_LEVEL", "ERROR").upper()
    levels = logging.getLevelNamesMapping()
    logging.basicConfig(level=levels.get(level, logging.ERROR), format="%(asctime)s %(name)s %(levelname)s %(message)s")


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="cleave",
        description="Train PyTorch models on the idle machines you have. One machine runs `cleave train`; others lend "
        "their processors with `cleave join`.",
        examples=(
            "cleave train                                               a demo on this machine, two minutes",
            "cleave train --listen 0.0.0.0:7077 --tls --trust own       the same, and your other machines may join",
            "cleave COMMAND --help                                      all options of a command",
        ),
    )
    parser.add_argument("--version", action="version", version=f"cleave {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", parser_class=Parser)
    parser.set_defaults(verb=None)
    train.add_to(verbs.add_parser)
    join.add_to(verbs.add_parser)
    status.add_to(verbs.add_parser)
    token.add_to(verbs.add_parser)
    runs.add_to(verbs.add_parser)
    view.add_to(verbs.add_parser)
    plan.add_to(verbs.add_parser)
    simulate.add_to(verbs.add_parser)
    fleet.add_to(verbs.add_parser)
    emulate.add_to(verbs.add_parser)
    probe.add_to(verbs.add_parser)
    bench.add_to(verbs.add_parser)
    completion.add_to(verbs.add_parser, parser)
    return parser
