"""`cleave status`: what a server's fleet is doing now."""

from __future__ import annotations

import argparse
import os
import sys

from cleave.cli.arguments import AddVerb
from cleave.errors import InputError


def add_to(add: AddVerb) -> None:
    verb = add(
        "status",
        help="show what a server's fleet is doing",
        description="Show a running server's devices, its grain, and predicted and measured times of steps. A server "
        "with tokens asks for an admin token; cleave token add --role admin prints one.",
        usage="cleave status ADDRESS [OPTION ...]",
        examples=("cleave status 127.0.0.1:7077", "cleave status '192.168.1.20:7077#ADMIN_TOKEN.PIN' --json"),
    )
    verb.add_argument(
        "url", nargs="?", metavar="ADDRESS", help="address of the server, as for cleave join (default: CLEAVE_SERVER)"
    )
    verb.add_argument("--token", metavar="TEXT", help="admin token, if not in the address (default: CLEAVE_TOKEN)")
    verb.add_argument("--json", action="store_true", help="print the status as JSON, as the server sends it")
    verb.set_defaults(run=_run_status)


def _run_status(options: argparse.Namespace) -> None:
    import dataclasses
    import json

    from cleave.report import fleet_status
    from cleave.transport.address import parse_address
    from cleave.transport.http import get

    url = options.url or os.environ.get("CLEAVE_SERVER")
    if not url:
        raise InputError("expected the address of a server, such as 127.0.0.1:7077; give it, or set CLEAVE_SERVER")
    address = parse_address(url)
    token = options.token or address.token or os.environ.get("CLEAVE_TOKEN", "")
    body = get(dataclasses.replace(address, token=token), "/api/status")
    if options.json:
        try:
            status = json.loads(body)
        except ValueError:
            raise InputError(f"expected the status of a Cleave server from {address.shown}, got no JSON") from None
        sys.stdout.write(json.dumps(status) + "\n")  # escapes what would steer a terminal
    else:
        fleet_status.show(address.shown, body)
