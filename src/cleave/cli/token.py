"""`cleave token`: manage the tokens for joining a run or reading its status."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cleave.cli.arguments import AddVerb, Parser
from cleave.errors import InputError

if TYPE_CHECKING:
    from cleave.server.admission.tokens import Key, Keys, Role


def add_to(add: AddVerb) -> None:
    verb = add(
        "token",
        help="say who may join a run, or look into it",
        description="Say who may join a run, or look into it. A running server notices within seconds.",
    )
    actions = verb.add_subparsers(dest="action", metavar="ACTION", required=True, parser_class=Parser)
    add_action = actions.add_parser("add", help="make a token; it is shown once, and only its hash is kept")
    add_action.add_argument(
        "--role", choices=["device", "admin"], default="device", help="device: may join; admin: may ask for the status"
    )
    add_action.set_defaults(run=_run_token_add)
    list_action = actions.add_parser("list", help="list the run's tokens, by their ids")
    list_action.set_defaults(run=_run_token_list)
    revoke_action = actions.add_parser("revoke", help="end a token, and let go of the devices that joined by it")
    revoke_action.add_argument("id", metavar="ID", help="as shown by list")
    revoke_action.set_defaults(run=_run_token_revoke)
    for action in (add_action, list_action, revoke_action):
        action.add_argument("--out", required=True, metavar="RUN_DIR", help="the run's directory")
        action.add_argument("--json", action="store_true", help="print it as JSON")


def _run_token_add(options: argparse.Namespace) -> None:
    run_token_add(out=options.out, role=options.role, as_json=options.json)


def _run_token_list(options: argparse.Namespace) -> None:
    run_token_list(out=options.out, as_json=options.json)


def _run_token_revoke(options: argparse.Namespace) -> None:
    run_token_revoke(out=options.out, id=options.id, as_json=options.json)


def run_token_add(*, out: str, role: Role, as_json: bool) -> None:
    """Create a token and show it, for the only time."""
    key, token = _keys_of(out, must_exist=False).add(role)
    text = f"{role} token {key.id}: {token}\nit is not shown again; only its hash is kept"
    _print({**_describe(key), "token": token}, text, as_json=as_json)


def run_token_list(*, out: str, as_json: bool) -> None:
    keys = [_describe(key) for key in _keys_of(out).list()]
    lines = [f"{key['id']}  {key['role']:6}  made {key['created']}  {key['state']}" for key in keys]
    _print({"tokens": keys}, "\n".join(lines), as_json=as_json)


def run_token_revoke(*, out: str, id: str, as_json: bool) -> None:
    key = _keys_of(out).revoke(id)
    _print(_describe(key), f"{key.role} token {key.id} is revoked", as_json=as_json)


def _keys_of(out: str, *, must_exist: bool = True) -> Keys:
    from cleave.server.admission.tokens import FILE, Keys

    path = Path(out) / FILE
    if must_exist and not path.is_file():
        raise InputError(f"expected a run with tokens in {out}, but there is no {path}; check --out, or add one first")
    return Keys(path=path)


def _describe(key: Key) -> dict[str, str]:
    """Describe a key for display, without its hash."""
    made = time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created_s))
    return {"id": key.id, "role": key.role, "created": made, "state": "valid" if key.is_valid else "revoked"}


def _print(fields: Mapping[str, object], text: str, *, as_json: bool) -> None:
    sys.stdout.write(f"{json.dumps(fields) if as_json else text}\n")
