"""`cleave fleet`: sample a fleet from the fact tables, or describe one."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from cleave.cli.arguments import AddVerb, Parser, seed
from cleave.errors import InputError


def add_to(add: AddVerb) -> None:
    verb = add(
        "fleet",
        help="sample a fleet from published measurements, or describe one",
        description="Sample a fleet from published measurements of devices and links, or describe one.",
        examples=(
            "cleave fleet sample --mix phone=600,laptop=300,desktop=60 --country us --out fleet.csv",
            "cleave fleet show fleet.csv",
        ),
    )
    actions = verb.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)

    sample = actions.add_parser(
        "sample",
        help="draw a realistic fleet",
        description="Draw a realistic fleet: device models by how common they are, links by country, usable memory.",
        examples=("cleave fleet sample --mix phone=600,laptop=300 --country world --seed 7 --out fleet.csv",),
    )
    sample.add_argument(
        "--mix",
        required=True,
        metavar="CLASS=N,...",
        help="devices per class (phone, laptop, desktop, sbc), such as phone=600,laptop=300",
    )
    sample.add_argument(
        "--country", default="us", metavar="CODE", help="country of the links: us, gb, fr ... or world (default: us)"
    )
    sample.add_argument(
        "--seed", type=seed, default=1, metavar="N", help="seed; the same one draws the same fleet (default: 1)"
    )
    sample.add_argument("--out", metavar="FLEET.csv", help="file to write (default: standard output)")
    sample.add_argument("--json", action="store_true", help="print a description as JSON; requires --out")
    sample.set_defaults(run=_run_sample)

    show = actions.add_parser(
        "show",
        help="describe a fleet",
        description="Describe a fleet: compute, links, memory, power.",
        examples=("cleave fleet show fleet.csv",),
    )
    show.add_argument("fleet", metavar="FLEET.csv", help="device profiles, one per line")
    show.add_argument("--json", action="store_true", help="print the description as JSON")
    show.set_defaults(run=_run_show)


def _run_sample(options: argparse.Namespace) -> None:
    run_fleet_sample(mix=options.mix, country=options.country, seed=options.seed, out=options.out, as_json=options.json)


def _run_show(options: argparse.Namespace) -> None:
    run_fleet_show(fleet=options.fleet, as_json=options.json)


def run_fleet_sample(*, mix: str, country: str, seed: int, out: str | None, as_json: bool) -> None:
    from cleave.api.planning import sample_fleet
    from cleave.core.fleet.profiles import describe, write_csv
    from cleave.report import fleet as fleet_report

    if as_json and out is None:
        raise InputError("--json needs a file for the fleet itself; add --out FLEET.csv")
    profiles = sample_fleet(mix, country, seed)
    if out is None:
        sys.stdout.write(write_csv(profiles))
        return
    try:
        Path(out).write_text(write_csv(profiles))
    except OSError as fault:
        raise InputError(f"cannot write the fleet to {out}: {fault.strerror}; choose another --out") from None
    fleet_report.show(describe(profiles), out, as_json=as_json)


def run_fleet_show(*, fleet: str, as_json: bool) -> None:
    from cleave.api.planning import load_fleet
    from cleave.core.fleet.profiles import describe
    from cleave.report import fleet as fleet_report

    fleet_report.show(describe(load_fleet(fleet)), fleet, as_json=as_json)
