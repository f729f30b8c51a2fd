"""A run reachable from other machines, as people start it: real processes, TLS, tokens shown once, files on disk."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from tests.live.conftest import Start
from tests.support.commands import PATIENCE_S, Process, joined, last_step, run, wait_until

from cleave.cli.training_run import run_keys
from cleave.config import TrainConfig
from cleave.errors import InputError
from cleave.run_files import running
from cleave.server.admission.tokens import FILE, Keys

JOIN = re.compile(r"^cleave join '\S+:(\d+)#([\w-]+)\.([\w-]{22})'$", re.MULTILINE)


def join(home: Path, url: str, token: str) -> subprocess.CompletedProcess[str]:
    return run(home, "join", url, "--name", "guest", "--threads", "1", "--memory", "1GB", token=token)


def test_a_tls_run_admits_only_devices_that_know_its_token_and_certificate(
    tmp_path: Path, settings: str, start: Start
) -> None:
    out = tmp_path / "run"
    flags = ["--steps", "2", "--listen", "0.0.0.0:0", "--tls", "--out", str(out)]
    server = start("server", "train", settings, *flags, piped=True)
    port, token, pin = _printed(tmp_path / "server.out", server)
    url, claim = f"wss://127.0.0.1:{port}", running(out)
    assert claim is not None
    assert claim.url is not None
    fingerprint = claim.url.partition("#sha256:")[2]
    pinned = f"{url}#sha256:{fingerprint}"

    for address in (pinned, f"127.0.0.1:{port}#guess.{pin}"):
        refused = join(tmp_path, address, "")
        assert refused.returncode == 2
        assert "wrong or missing token" in refused.stderr
    for address, fact in (
        (f"{url}#sha256:{'0' * 64}", f"sha256:{fingerprint}"),
        (url, "self-signed certificate"),
        (f"ws://127.0.0.1:{port}", f"use wss://127.0.0.1:{port}"),
    ):
        refused = join(tmp_path, address, token)
        assert refused.returncode == 2
        assert fact in refused.stderr
        assert token not in refused.stderr

    added = run(tmp_path, "token", "add", "--out", str(out))
    assert added.returncode == 0
    short = JOIN.search(added.stdout)
    assert short
    assert short[1] == port
    assert short[2] != token
    lent = join(tmp_path, f"127.0.0.1:{port}#{short[2]}.{short[3]}", "")
    assert lent.returncode == 0
    assert short[2] not in lent.stderr
    assert server.wait(PATIENCE_S) == 0
    assert joined(out) == ["guest"]
    assert last_step(out) == 2
    files = [path for path in out.rglob("*") if path.is_file()]
    assert not [path for path in files if token.encode() in path.read_bytes()]
    assert {path.name: path.stat().st_mode & 0o777 for path in files if path.name in ("keys.json", "tls.pem")} == {
        "keys.json": 0o600,
        "tls.pem": 0o600,
    }


def test_a_token_never_lands_in_the_file_that_output_is_redirected_to(
    tmp_path: Path, settings: str, start: Start
) -> None:
    flags = ["--listen", "127.0.0.1:0", "--token", "a-chosen-secret", "--wait", "1", "--out", str(tmp_path / "run")]
    assert start("server", "train", settings, *flags).wait(PATIENCE_S) == 2
    printed = (tmp_path / "server.out").read_text()
    assert "a-chosen-secret" not in printed
    assert f"cleave token add --out {tmp_path / 'run'}" in printed


# ------------------------------------------------------------------------------------------------ which token is shown


def keys_of(directory: Path, *, token: str | None = None, listen: str = "0.0.0.0:0") -> tuple[Keys, str]:
    return run_keys(TrainConfig(token=token, listen=listen), directory)


def test_only_a_run_reachable_from_other_machines_makes_a_token(tmp_path: Path) -> None:
    for listen in ("127.0.0.1:0", "localhost:7077", "[::1]:7077"):
        keys, token = keys_of(tmp_path / "here", listen=listen)
        assert keys.is_open
        assert token == ""
    assert not (tmp_path / "here").exists()
    for number, listen in enumerate(("0.0.0.0:0", "[::]:7077", "192.0.2.1:7077", "train.example.org:7077")):
        keys, token = keys_of(tmp_path / str(number), listen=listen)
        assert keys.identify(token)
        assert keys.identify("") is None


def test_a_device_that_waited_for_a_restart_rejoins_with_its_old_token(tmp_path: Path) -> None:
    _, before = keys_of(tmp_path)
    keys, after = keys_of(tmp_path)
    assert before != after
    assert keys.identify(before) != keys.identify(after)
    assert keys.identify(before)


def test_a_chosen_token_stays_one_key_across_resumes_until_it_is_revoked(tmp_path: Path) -> None:
    for _ in range(3):
        keys, token = keys_of(tmp_path, token="chosen by a person", listen="127.0.0.1:0")
        assert token == "chosen by a person"
        assert [key.id for key in keys.list()] == [keys.identify(token)]
    keys.revoke(keys.list()[0].id)
    with pytest.raises(InputError, match="choose another"):
        keys_of(tmp_path, token="chosen by a person")


def test_a_run_can_start_with_tokens_made_beforehand(tmp_path: Path) -> None:
    person = Keys(path=tmp_path / FILE)
    _, admin_only = person.add("admin")
    keys, made = keys_of(tmp_path)  # an administrator is not a device
    assert made
    assert keys.identify(admin_only) is None
    assert len(person.list()) == 2


def test_every_start_in_a_directory_shows_a_token_that_works(tmp_path: Path) -> None:
    shown = [keys_of(tmp_path)[1] for _ in range(3)]
    keys = Keys(path=tmp_path / FILE)
    assert len({keys.identify(token) for token in shown}) == 3
    assert all(shown)
    keys, local = keys_of(tmp_path, listen="127.0.0.1:0")  # started with a token before, and now only for this machine
    assert keys.identify(local)


def _printed(output: Path, server: Process) -> tuple[str, str, str]:
    """Port, token and pin as printed on the screen."""
    wait_until(lambda: JOIN.search(output.read_text()), server)
    shown = JOIN.search(output.read_text())
    assert shown
    return shown[1], shown[2], shown[3]
