"""A run that others can reach, as people start it: real processes, TLS, tokens shown once, and what is left on disk."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cleave.cli.train import _Run
from cleave.config import TrainConfig
from cleave.errors import InputError
from cleave.events import DeviceJoined, StepDone, read_events
from cleave.server.admission.tokens import FILE, Keys

pytestmark = pytest.mark.timeout(400)
PATIENCE_S = 180.0
JOIN = re.compile(r"devices join with:\s+cleave\s+join\s+wss://\S+:(\d+)#sha256:([0-9a-f]{64})\s+--token\s+(\S+)")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "cleave", *arguments]


def environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("CLEAVE_")}
    return {**kept, "CLEAVE_HOME": str(home), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "500"}


def join(home: Path, url: str, token: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command("join", url, "--name", "guest", "--threads", "1", "--memory", "1GB", *flags),
        env={**environment(home), "CLEAVE_TOKEN": token},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_a_run_with_tls_lets_in_who_has_its_token_and_checks_its_certificate_and_nobody_else(tmp_path: Path) -> None:
    out, log = tmp_path / "run", tmp_path / "screen.txt"
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    flags = ["--model", "tiny-llama", "--sequence", "32", "--batch", "2", "--steps", "2", "--eval-every", "0"]
    with log.open("w") as screen:
        server = subprocess.Popen(
            command("train", *flags, "--data", str(text), "--listen", "0.0.0.0:0", "--tls", "--out", str(out)),
            env=environment(tmp_path),
            stdout=subprocess.DEVNULL,
            stderr=screen,
        )
    try:
        port, fingerprint, token = _printed(log, server)
        url = f"wss://127.0.0.1:{port}"
        pinned = f"{url}#sha256:{fingerprint}"

        for wrong in ("", "guess"):
            refused = join(tmp_path, pinned, wrong)
            assert refused.returncode == 2
            assert "wrong or missing token" in refused.stderr
        for address, sentence in (
            (f"{url}#sha256:{'0' * 64}", f"got sha256:{fingerprint}"),
            (url, "use the address it prints"),
            (f"ws://127.0.0.1:{port}", "speaks TLS only; use wss://"),
        ):
            refused = join(tmp_path, address, token)
            assert refused.returncode == 2
            assert sentence in refused.stderr
            assert token not in refused.stderr

        assert join(tmp_path, pinned, token).returncode == 0
        assert server.wait(PATIENCE_S) == 0
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()

    seen = list(read_events(out / "events.jsonl"))
    assert [event.device for event in seen if isinstance(event, DeviceJoined)] == ["guest"]
    assert len([event for event in seen if isinstance(event, StepDone)]) == 2
    files = [path for path in out.rglob("*") if path.is_file()]
    assert not [path for path in files if token.encode() in path.read_bytes()]
    assert {path.name: path.stat().st_mode & 0o777 for path in files if path.name in ("keys.json", "tls.pem")} == {
        "keys.json": 0o600,
        "tls.pem": 0o600,
    }


# ------------------------------------------------------------------------------------------------ which token is shown


def keys_of(
    directory: Path, *, resume: bool = False, token: str | None = None, listen: str = "0.0.0.0:0"
) -> tuple[Keys, str]:
    return _Run(TrainConfig(token=token, listen=listen), directory, resume=resume)._keys()


def test_a_run_beyond_this_machine_makes_a_token_and_one_within_makes_none(tmp_path: Path) -> None:
    for listen in ("127.0.0.1:0", "localhost:7077", "[::1]:7077"):
        keys, token = keys_of(tmp_path / "here", listen=listen)
        assert keys.is_open
        assert token == ""
    assert not (tmp_path / "here").exists()
    for number, listen in enumerate(("0.0.0.0:0", "[::]:7077", "192.0.2.1:7077", "train.example.org:7077")):
        keys, token = keys_of(tmp_path / str(number), listen=listen)
        assert keys.identify(token)
        assert keys.identify("") is None


def test_a_device_that_waited_for_a_restart_rejoins_with_the_token_it_has(tmp_path: Path) -> None:
    _, before = keys_of(tmp_path)
    keys, after = keys_of(tmp_path, resume=True)
    assert before != after
    assert keys.identify(before) != keys.identify(after)
    assert keys.identify(before)


def test_a_chosen_token_is_one_key_however_often_the_run_resumes_until_it_is_revoked(tmp_path: Path) -> None:
    for resume in (False, True, True):
        keys, token = keys_of(tmp_path, resume=resume, token="chosen by a person", listen="127.0.0.1:0")
        assert token == "chosen by a person"
        assert [key.id for key in keys.list()] == [keys.identify(token)]
    keys.revoke(keys.list()[0].id)
    with pytest.raises(InputError, match="choose another"):
        keys_of(tmp_path, resume=True, token="chosen by a person")


def test_tokens_made_beforehand_are_enough_for_a_run_to_begin(tmp_path: Path) -> None:
    person = Keys(path=tmp_path / FILE)
    _, admin_only = person.add("admin")
    keys, made = keys_of(tmp_path)  # an administrator is no device
    assert made
    assert keys.identify(admin_only) is None
    assert keys_of(tmp_path)[1] == ""
    assert len(person.list()) == 2


def _printed(log: Path, server: subprocess.Popen[bytes]) -> tuple[str, str, str]:
    """Port, fingerprint and token, as the screen shows them."""
    give_up = time.monotonic() + PATIENCE_S
    while True:
        shown = JOIN.search(log.read_text())
        if shown:
            return shown[1], shown[2], shown[3]
        assert server.poll() is None, log.read_text()
        assert time.monotonic() < give_up, "it takes too long"
        time.sleep(0.02)  # polling a file another process writes
