"""Laws of tokens: only hashes at rest, separate roles, revocation across processes, and runs without any key."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from cleave.cli.main import main
from cleave.errors import InputError
from cleave.server.admission import tokens
from cleave.server.admission.tokens import FILE, Keys


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / FILE


# ------------------------------------------------------------------------------------------------ open or closed


def test_without_any_key_everyone_may_join(path: Path) -> None:
    for keys in (Keys(), Keys(""), Keys(path=path)):
        key = keys.identify("anything")
        assert key == keys.identify("") == ""
        assert keys.is_valid(key)
        assert keys.is_open
        assert not keys.administers("anything")
        assert not keys.administers("")


def test_a_given_token_joins_and_no_other_does() -> None:
    keys = Keys("secret")
    key = keys.identify("secret")
    assert key
    assert keys.is_valid(key)
    assert not keys.is_open
    for wrong in ("", "Secret", "secret ", "secre", "secret\0", "\ud800"):
        assert keys.identify(wrong) is None
    assert not keys.is_valid("")
    assert not keys.is_valid("0badc0de")


def test_a_lent_token_leaves_a_run_open_and_stays_valid_once_it_closes(path: Path) -> None:
    keys = Keys(path=path)
    lent = keys.lend()
    ours, theirs = keys.identify(lent), keys.identify("")
    assert ours
    assert theirs == ""
    Keys(path=path).add("device")  # another process closes the run
    assert keys.is_valid(ours)
    assert not keys.is_valid(theirs)
    assert keys.identify("") is None
    assert keys.identify(lent) == ours
    assert not keys.administers(lent)


def test_lent_and_given_tokens_are_never_written_to_disk(path: Path) -> None:
    keys = Keys("chosen", path=path)
    lent = keys.lend()
    keys.add("device")
    assert len(json.loads(path.read_text())) == 1
    assert Keys(path=path).identify(lent) is None
    assert Keys(path=path).identify("chosen") is None


# ------------------------------------------------------------------------------------------------ at rest


def test_a_token_is_valid_after_a_restart_though_only_its_hash_was_kept(path: Path) -> None:
    key, token = Keys(path=path).add("device")
    text = path.read_text()
    assert token not in text
    assert json.loads(text)[0].keys() == {"id", "role", "salt", "hash", "digest", "created_s", "revoked_s", "trust"}
    again = Keys(path=path)
    assert again.identify(token) == key.id
    assert again.identify(token) == key.id
    assert again.identify(token[:-1]) is None


def test_a_chosen_token_is_kept_by_its_slow_hash_alone(path: Path) -> None:
    Keys(path=path).add("device", "correct horse")
    assert json.loads(path.read_text())[0]["digest"] == ""
    assert Keys(path=path).identify("correct horse")


def test_a_drawn_token_is_recognized_without_a_slow_hash_and_so_is_any_wrong_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, token = Keys(path=path).add("device")
    _, admin = Keys(path=path).add("admin")
    server = Keys(path=path)
    monkeypatch.setattr(tokens, "_hash", lambda token, salt: pytest.fail("hashed slowly"))
    assert server.identify(token) == key.id
    assert server.administers(admin)
    assert server.identify("a guess") is None


def test_a_key_file_without_fast_hashes_still_works(path: Path) -> None:
    key, token = Keys(path=path).add("device")
    (kept,) = json.loads(path.read_text())
    del kept["digest"]
    path.write_text(json.dumps([kept]))
    server = Keys(path=path)
    assert not server.recognizes(token)
    assert server.identify("a guess") is None
    assert server.identify(token) == key.id
    assert server.recognizes(token)


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
def test_the_key_file_is_private_to_its_owner_and_no_other_file_is_left(path: Path) -> None:
    keys = Keys(path=path)
    for _ in range(3):
        keys.add("device")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [FILE]


def test_the_same_token_has_a_different_hash_in_each_run(tmp_path: Path) -> None:
    hashes = {Keys(path=tmp_path / run / FILE).add("device", "the same words")[0].hash for run in "ab"}
    assert len(hashes) == 2


@pytest.mark.parametrize("text", ["", "{", "[{}]", '[{"id": 1}]', '{"id": "x"}', "null", "\x00"])
def test_a_torn_key_file_is_a_one_sentence_error(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(InputError, match=r"expected the keys of a run in .*keys\.json, but .+; restore the file"):
        Keys(path=path)


def test_a_running_server_survives_a_torn_or_missing_file_and_admits_nobody_new(path: Path) -> None:
    keys = Keys(path=path)
    key, token = keys.add("device")
    whole = path.read_bytes()
    for damage in (lambda: path.write_text("[{"), path.unlink):
        damage()
        assert keys.identify(token) == key.id
        assert keys.is_valid(key.id)
        assert keys.identify("") is None
    path.write_bytes(whole)
    keys.revoke(key.id)
    assert not keys.is_valid(key.id)


# ------------------------------------------------------------------------------------------------ roles, revocation


def test_an_admin_token_does_not_join_and_a_device_token_does_not_administer(path: Path) -> None:
    keys = Keys(path=path)
    (_, device), (_, admin) = keys.add("device"), keys.add("admin")
    for _ in range(2):  # the second time from the cache
        assert keys.identify(admin) is None
        assert not keys.administers(device)
        assert keys.administers(admin)
        assert keys.identify(device)


def test_a_revoked_token_no_longer_joins_even_if_it_was_cached(path: Path) -> None:
    server, person = Keys(path=path), Keys(path=path)
    key, token = person.add("device")
    other, still_good = person.add("device")
    assert server.identify(token) == key.id
    person.revoke(key.id)
    assert server.identify(token) is None
    assert not server.is_valid(key.id)
    assert server.identify(still_good) == other.id


def test_revoking_the_last_key_does_not_open_the_run(path: Path) -> None:
    keys = Keys(path=path)
    keys.revoke(keys.add("device")[0].id)
    assert not keys.is_open
    assert keys.identify("") is None
    assert not keys.is_valid("")
    assert not Keys(path=path).is_open


def test_a_token_that_was_ever_used_cannot_be_added_again(path: Path) -> None:
    keys = Keys(path=path)
    key, token = keys.add("device", "a chosen token")
    keys.revoke(key.id)
    for role in ("device", "admin"):
        with pytest.raises(InputError, match="choose another"):
            keys.add(role, token)


def test_a_key_that_does_not_exist_cannot_be_revoked(path: Path) -> None:
    keys = Keys(path=path)
    key, _ = keys.add("device")
    with pytest.raises(InputError, match=f"'nobody'.*{key.id}"):
        keys.revoke("nobody")


# ------------------------------------------------------------------------------------------------ cleave token


def test_the_token_command_adds_lists_and_revokes_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path)

    def said(*arguments: str) -> dict[str, object]:
        assert main(["token", *arguments, "--out", out, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    made = said("add")
    admin = said("add", "--role", "admin")
    assert Keys(path=tmp_path / FILE).identify(str(made["token"])) == made["id"]
    assert Keys(path=tmp_path / FILE).administers(str(admin["token"]))
    listed = said("list")
    assert [(key["id"], key["role"], key["state"]) for key in listed["tokens"]] == [  # pyright: ignore
        (made["id"], "device", "valid"),
        (admin["id"], "admin", "valid"),
    ]
    assert str(made["token"]) not in json.dumps(listed)
    assert said("revoke", str(made["id"]))["state"] == "revoked"
    assert Keys(path=tmp_path / FILE).identify(str(made["token"])) is None
    assert main(["token", "list", "--out", out]) == 0
    text = capsys.readouterr().out
    assert f"{made['id']}  device" in text
    assert "revoked" in text


@pytest.mark.parametrize("arguments", [["list"], ["revoke", "x"]])
def test_a_directory_without_tokens_is_reported(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["token", *arguments, "--out", str(tmp_path)]) == 2
    assert "keys.json" in capsys.readouterr().err
