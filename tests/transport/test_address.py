"""A join command is one short line, and a device reads from it what the server wrote into it."""

from __future__ import annotations

import hashlib
import shlex
import shutil
import subprocess
from urllib.parse import unquote, urlsplit

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.cli.main import main
from cleave.errors import InputError
from cleave.server.admission.tokens import Keys
from cleave.transport.address import join_command, join_page, parse_address

FINGERPRINT = hashlib.sha256(b"a certificate").hexdigest()
HOSTS = st.sampled_from(["192.168.1.20", "train.example.org", "[2001:db8::1]", "localhost"])
TOKENS = st.one_of(
    st.just(""), st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S", "Zs"]), min_size=1)
)


@given(host=HOSTS, port=st.integers(1, 65535), token=TOKENS, fingerprint=st.sampled_from([FINGERPRINT, None]))
def test_a_device_reads_address_token_and_pin_from_the_join_command(
    host: str, port: int, token: str, fingerprint: str | None
) -> None:
    url = f"{'ws' if fingerprint is None else 'wss'}://{host}:{port}"
    words = shlex.split(join_command(url if fingerprint is None else f"{url}#sha256:{fingerprint}", token))
    assert words[:2] == ["cleave", "join"]
    address = parse_address(words[2])
    given_token = words[3].removeprefix("--token=") if len(words) > 3 else ""
    assert (given_token or address.token) == token
    dialed, _, pin = address.url.partition("#sha256:")
    assert dialed == f"{url}/ws"
    assert FINGERPRINT.startswith(pin)
    assert len(pin) >= (32 if fingerprint else 0)
    assert address.shown == url


def test_with_a_certificate_that_an_authority_signed_the_scheme_says_so() -> None:
    command = join_command("wss://train.example.org:443", "secret")
    assert command == "cleave join 'wss://train.example.org:443#secret'"
    assert parse_address(command.split()[2]).url == "wss://train.example.org:443/ws"


@pytest.mark.parametrize(
    ("typed", "dialed"), [("wss://a.org#t", "wss://a.org/ws"), ("https://a.org", "wss://a.org/ws")]
)
def test_an_address_with_a_scheme_needs_no_port(typed: str, dialed: str) -> None:
    assert parse_address(typed).url == dialed


def test_the_join_command_of_any_ipv4_server_on_the_usual_port_fits_80_columns() -> None:
    command = join_command(f"wss://255.255.255.255:7077#sha256:{FINGERPRINT}", Keys().lend())
    assert len(command) <= 80
    assert "\n" not in command


@pytest.mark.parametrize("url", ["wss://[2001:db8::1]:7077", "wss://192.168.1.20:7077", "ws://192.168.1.20:7077"])
def test_a_shell_passes_the_join_command_on_as_it_is(url: str) -> None:
    command = join_command(f"{url}#sha256:{FINGERPRINT}" if url.startswith("wss") else url, "token")
    script = f"cleave() {{ printf '%s' \"$2\"; }}\n{command}\n"
    for shell in (["sh", "-c", script], ["zsh", "-f", "-o", "extendedglob", "-c", script]):
        if shutil.which(shell[0]):
            seen = subprocess.run(shell, capture_output=True, text=True, check=True).stdout
            assert parse_address(seen) == parse_address(shlex.split(command)[2])


def test_a_quoted_address_is_read_where_the_shell_keeps_quotes() -> None:
    assert parse_address("'host:1#token'") == parse_address("host:1#token")


def test_an_error_about_an_address_does_not_repeat_its_secret() -> None:
    with pytest.raises(InputError) as told:
        parse_address("host:1#very-secret.typo")
    assert "very-secret" not in str(told.value)


def test_a_new_token_is_never_taken_for_an_option() -> None:
    keys = Keys()
    assert not any(keys.lend().startswith("-") for _ in range(500))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "somewhere",
        "ftp://host:1",
        "host:port",
        "[::1:7077",
        "host:1#a b",
        "host:1#token.short",
        "host:1#sha256:12",
        "host:1#." + "x" * 22,
    ],
)
def test_a_wrong_address_is_an_input_error_that_says_what_to_copy(text: str) -> None:
    with pytest.raises(InputError, match="copy"):
        parse_address(text)


def test_join_without_an_address_or_with_a_wrong_one_ends_with_one_sentence(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CLEAVE_SERVER", raising=False)
    for arguments in (["join"], ["join", "http//nowhere"]):
        assert main(arguments) == 2
        assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("token", ["token", "with # and / and ü", ""])
@pytest.mark.parametrize(("url", "scheme"), [("ws://192.168.1.20:7077", "http"), ("wss://[::1]:7077", "https")])
def test_the_link_for_browsers_has_the_token_where_no_server_sees_it(url: str, scheme: str, token: str) -> None:
    link = urlsplit(join_page(f"{url}#sha256:{FINGERPRINT}" if scheme == "https" else url, token))
    assert (link.scheme, link.netloc, link.path) == (scheme, url.partition("//")[2], "/join")
    assert unquote(link.fragment) == token
    assert not link.query


@pytest.mark.parametrize("url", ["ws://192.168.1.20:7077", "wss://train.example.org:443"])
def test_a_native_device_joins_by_the_link_for_browsers_too(url: str) -> None:
    address = parse_address(join_page(url, "token"))
    assert (address.url, address.token) == (f"{url}/ws", "token")
