"""`cleave token`: manage the tokens for joining a run or reading its status."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from cleave.cli.arguments import AddVerb, Parser, trust
from cleave.core.verify.trust import LEVELS, Level
from cleave.errors import InputError
from cleave.settings import TRUST

if TYPE_CHECKING:
    from cleave.server.admission.tokens import Key, Keys, Role


def add_to(add: AddVerb) -> None:
    verb = add(
        "token",
        help="decide who may join a run or read its status",
        description="Make, list and revoke the tokens of a run. A running server notices within seconds.",
        examples=("cleave token add", "cleave token list --out my-run", "cleave token revoke 1f3a9c02"),
    )
    actions = verb.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    add_action = actions.add_parser(
        "add",
        help="make a token and print the command that joins with it",
        description="Make a token and print the command that joins with it. The token is shown once: only its hash is "
        "kept.",
        examples=("cleave token add", "cleave token add --trust own", "cleave token add --role admin --out my-run"),
    )
    add_action.add_argument(
        "--role",
        choices=["device", "admin"],
        default="device",
        help="device: may join; admin: may read the run's status and pause, drain or ban devices (default: device)",
    )
    add_action.add_argument(
        "--trust",
        type=trust,
        choices=LEVELS,
        default=TRUST,
        help="who gets it: yourself, for your own machines (nothing is audited), somebody you know (a sample is), or a "
        f"stranger (all work on resident layers is) (default: {TRUST})",
    )
    add_action.set_defaults(run=_run_token_add)
    list_action = actions.add_parser(
        "list",
        help="list the run's tokens by their ids",
        description="List the run's tokens by their ids, with their roles, how far their devices are trusted, and "
        "whether they are still valid.",
    )
    list_action.set_defaults(run=_run_token_list)
    revoke_action = actions.add_parser(
        "revoke",
        help="revoke a token and disconnect the devices that joined with it",
        description="Revoke a token for good. Devices that joined with it are disconnected within seconds.",
    )
    revoke_action.add_argument("id", metavar="ID", help="as shown by list")
    revoke_action.set_defaults(run=_run_token_revoke)
    for action in (add_action, list_action, revoke_action):
        action.add_argument("--out", metavar="RUN_DIR", help="the run's directory (default: the newest run)")
        action.add_argument("--json", action="store_true", help="print JSON")


def _run_token_add(options: argparse.Namespace) -> None:
    run_token_add(out=options.out, role=options.role, trust=options.trust, as_json=options.json)


def _run_token_list(options: argparse.Namespace) -> None:
    run_token_list(out=options.out, as_json=options.json)


def _run_token_revoke(options: argparse.Namespace) -> None:
    run_token_revoke(out=options.out, id=options.id, as_json=options.json)


def run_token_add(*, out: str | None, role: Role, trust: Level = TRUST, as_json: bool) -> None:
    """Create a token and show it, for the only time."""
    directory = _directory(out)
    key, token = _keys_of(directory, must_exist=False).add(role, trust=trust)
    command = _join_command(directory, token) if role == "device" else None
    lines = [f"{role} token {key.id}{_trusted(key)} of {directory}: {token}"]
    if command is not None:
        lines += [_heading(command), command]
    elif role == "device":
        lines.append("the run is not running; its next start prints a join command, and this token works too")
    else:
        lines.append("use it with cleave status ADDRESS --token TOKEN, or as a header: Authorization: Bearer TOKEN")
    lines.append("the token is not shown again: only its hash is kept")
    _print({**_describe(key), "token": token, "join_command": command}, "\n".join(lines), as_json=as_json)


def run_token_list(*, out: str | None, as_json: bool) -> None:
    keys = [_describe(key) for key in _keys_of(_directory(out)).list()]
    lines = [f"{key['id']}  {key['role']:6}  {key['trust']:8}  made {key['created']}  {key['state']}" for key in keys]
    _print({"tokens": keys}, "\n".join(lines), as_json=as_json)


def run_token_revoke(*, out: str | None, id: str, as_json: bool) -> None:
    key = _keys_of(_directory(out)).revoke(id)
    _print(_describe(key), f"{key.role} token {key.id} is revoked", as_json=as_json)


def _directory(out: str | None) -> Path:
    from cleave.run_files import newest_run, running, runs_home

    if out is not None:
        return Path(out)
    newest = newest_run(prefer=lambda run: running(run) is not None)
    if newest is None:
        raise InputError(f"there is no run in {runs_home()}; give its directory with --out")
    return newest


def _join_command(directory: Path, token: str) -> str | None:
    """Return the command that joins the run; None if it is not running."""
    from cleave.run_files import running
    from cleave.transport.address import join_command

    claim = running(directory)
    if claim is None or claim.url is None:
        return None
    return join_command(claim.url, token)


def _heading(command: str) -> str:
    from cleave.server.admission.gate import is_loopback
    from cleave.transport.address import parse_address

    host = urlsplit(parse_address(command.removeprefix("cleave join ")).url).hostname or ""
    if is_loopback(host):
        return "this run accepts only devices on this machine (start it with --listen for others); join with:"
    return "to lend a machine, run on it:"


def _keys_of(directory: Path, *, must_exist: bool = True) -> Keys:
    from cleave.server.admission.tokens import FILE, Keys

    path = directory / FILE
    if must_exist and not path.is_file():
        raise InputError(f"the run in {directory} has no tokens (no {path.name}); check --out, or add one first")
    return Keys(path=path)


def _describe(key: Key) -> dict[str, str]:
    """Describe a key for display, without its hash."""
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created_s))
    return {
        "id": key.id,
        "role": key.role,
        "trust": key.trust if key.role == "device" else "",
        "created": made,
        "state": "valid" if key.is_valid else "revoked",
    }


def _trusted(key: Key) -> str:
    return f" (trust: {key.trust})" if key.role == "device" else ""


def _print(fields: Mapping[str, object], text: str, *, as_json: bool) -> None:
    sys.stdout.write(f"{json.dumps(fields) if as_json else text}\n")
