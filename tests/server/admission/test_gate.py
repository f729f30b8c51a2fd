"""Admission from outside: raw sockets at a real service. Refusals give a reason and reveal nothing about the run."""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.api.fleet import Fleet
from cleave.errors import ConnectionLost, InputError
from cleave.protocol import messages
from cleave.server import service as http
from cleave.server.admission import certificate, tokens
from cleave.server.admission.gate import Census, Limits, Place, fitting, group_of, objection_to
from cleave.server.admission.tokens import FILE, Keys
from cleave.server.cluster import Cluster
from cleave.server.service import Service
from cleave.transport.address import parse_address
from cleave.transport.base import Channel
from cleave.transport.websocket import dial

SOON_S = 120.0
TOKEN = "a-device-token-of-this-run"
SECRETS = (TOKEN, "granny", "model", "loss", "flops", "memory", "products", "uvicorn", "starlette", "python")
"""Words that no answer to an outsider may contain."""

Serve = Callable[..., Service]


@pytest.fixture(params=["uvloop", "asyncio"])
def serve(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Serve]:
    if request.param == "asyncio":
        monkeypatch.setattr(http, "_new_loop", asyncio.SelectorEventLoop)
    else:
        pytest.importorskip("uvloop")
    started: list[Service] = []

    def start(keys: Keys | None = None, **options: Any) -> Service:
        keys = keys or Keys()
        service = Service("127.0.0.1:0", lambda loop: Cluster(loop, wire="fp32", keys=keys), keys=keys, **options)
        started.append(service)
        service.start()
        return service

    yield start
    for service in started:
        service.stop("done", rejoin=False)


@pytest.fixture(scope="module")
def own() -> certificate.Certificate:
    return certificate.own(None, [])


def connected(service: Service) -> socket.socket:
    return socket.create_connection(("127.0.0.1", service.port), SOON_S)


def said(connection: socket.socket, data: bytes) -> bytes:
    """Send some bytes and return everything received until the other side closes."""
    answer = b""
    with closing(connection):
        connection.sendall(data)
        while part := connection.recv(65536):
            answer += part
    return answer


def request(path: str, *headers: str, host: str = "127.0.0.1") -> bytes:
    return "\r\n".join([f"GET {path} HTTP/1.1", f"Host: {host}", *headers, "", ""]).encode()


UPGRADE = (
    "Upgrade: websocket",
    "Connection: Upgrade",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: MDEyMzQ1Njc4OWFiY2RlZg==",
)


def assert_refused(answer: bytes, status: int, sentence: str) -> None:
    assert answer.startswith(f"HTTP/1.1 {status} ".encode()), answer
    assert sentence in answer.decode()
    assert_nothing_revealed(answer)


def assert_nothing_revealed(answer: bytes) -> None:
    told = answer.decode(errors="replace").lower()
    assert "\r\nserver:" not in told
    assert not [secret for secret in SECRETS if secret in told]


# ------------------------------------------------------------------------------------------------ TLS or not


def test_a_plain_request_to_a_tls_server_learns_only_that_tls_is_required(
    serve: Serve, own: certificate.Certificate
) -> None:
    service = serve(Keys(TOKEN), certificate=own)
    for words in (request("/ws", *UPGRADE), request("/api/status"), b"\x00" * 100, b"SSH-2.0-x\r\n", bytes(100_000)):
        assert_refused(said(connected(service), words), 426, "expected TLS, got a plain connection; use wss://")


async def test_the_wrong_scheme_is_answered_with_the_right_one(serve: Serve, own: certificate.Certificate) -> None:
    secure, plain = serve(certificate=own), serve()
    with pytest.raises(InputError, match=f"TLS.* use wss://127.0.0.1:{secure.port}/ws"):
        await dial(f"ws://{secure.address}/ws")
    for pin in ("", f"#sha256:{own.fingerprint}"):
        with pytest.raises(InputError, match=f"TLS.* use ws://127.0.0.1:{plain.port}/ws.*--tls"):
            await dial(f"wss://{plain.address}/ws{pin}")


async def test_a_device_accepts_a_certificate_with_the_known_fingerprint(
    serve: Serve, own: certificate.Certificate
) -> None:
    service = serve(Keys(TOKEN), certificate=own)
    for fingerprint in (own.fingerprint, own.fingerprint.upper()):
        assert await joined(f"wss://{service.address}/ws#sha256:{fingerprint}", TOKEN) == "welcome"


async def test_an_untrusted_certificate_is_refused_with_its_fingerprint(
    serve: Serve, own: certificate.Certificate
) -> None:
    service = serve(certificate=own)
    with pytest.raises(InputError, match=f"wss://{service.address}/ws.*self-signed certificate.*address.*#"):
        await dial(f"wss://{service.address}/ws")


async def test_a_certificate_signed_by_an_authority_needs_no_fingerprint(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate.own(tmp_path / "authority.pem", ["train.example.org"])
    theirs = certificate.given(tmp_path / "authority.pem", None)
    service = serve(Keys(TOKEN), certificate=theirs)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    assert await joined(f"wss://127.0.0.1:{service.port}/ws", TOKEN) == "welcome"
    elsewhere = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.2", 0, ssl=theirs.context)
    async with elsewhere:
        port = elsewhere.sockets[0].getsockname()[1]
        with pytest.raises(InputError, match=rf"wss://127\.0\.0\.2:{port}/ws.*mismatch"):
            await dial(f"wss://127.0.0.2:{port}/ws")


async def test_a_device_sends_nothing_to_a_server_with_a_foreign_certificate(own: certificate.Certificate) -> None:
    other = certificate.own(None, [])
    heard = list[bytes]()
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def listen() -> None:
            connection, _ = listening.accept()
            with connection, contextlib.suppress(OSError):  # it may leave before or after the TLS handshake
                connection.settimeout(SOON_S)
                with other.context.wrap_socket(connection, server_side=True) as secured:
                    heard.append(secured.recv(65536))

        listener = threading.Thread(target=listen)
        listener.start()
        expected = f"to be sha256:{own.fingerprint}, got sha256:{other.fingerprint}; "
        with pytest.raises(InputError, match=expected):
            await dial(f"wss://127.0.0.1:{listening.getsockname()[1]}/ws#sha256:{own.fingerprint}")
        await asyncio.to_thread(listener.join, SOON_S)
    assert not listener.is_alive()
    assert heard in ([], [b""])


@pytest.mark.parametrize(
    ("typed", "dialled"),
    [
        ("host:7077", "ws://host:7077/ws"),
        ("wss://host:7077#sha256:" + "ab" * 32, "wss://host:7077/ws#sha256:" + "ab" * 32),
        ("host:7077#sha256:" + "ab" * 32, "wss://host:7077/ws#sha256:" + "ab" * 32),
        ("https://host:7077/#sha256:" + "ab" * 32, "wss://host:7077/ws#sha256:" + "ab" * 32),
    ],
)
def test_the_fingerprint_in_an_address_is_kept_in_the_url(typed: str, dialled: str) -> None:
    assert parse_address(typed).url == dialled


@pytest.mark.parametrize(
    "url", ["wss://127.0.0.1:1/ws#sha256:12", "wss://127.0.0.1:1/ws#md5:12", "ws://127.0.0.1:1/ws#sha256:" + "ab" * 32]
)
async def test_an_address_with_an_impossible_fingerprint_is_an_input_error(url: str) -> None:
    with pytest.raises(InputError, match="expected"):
        await dial(url)


# ------------------------------------------------------------------------------------------------ certificates


def test_a_self_made_certificate_survives_a_restart_and_is_private_to_its_owner(tmp_path: Path) -> None:
    path = tmp_path / "run" / certificate.FILE
    first, second = (certificate.own(path, ["0.0.0.0", "train.example.org", "192.0.2.1"]) for _ in range(2))
    assert first.fingerprint == second.fingerprint != certificate.own(None, []).fingerprint
    assert first.is_own
    assert path.stat().st_mode & 0o777 == 0o600
    assert [entry.name for entry in path.parent.iterdir()] == [certificate.FILE]


def test_invalid_certificate_and_key_files_are_reported(tmp_path: Path) -> None:
    certificate.own(tmp_path / "whole.pem", [])
    key, _, chain = (tmp_path / "whole.pem").read_text().partition("-----BEGIN CERTIFICATE-----")
    (tmp_path / "chain.pem").write_text("-----BEGIN CERTIFICATE-----" + chain)
    (tmp_path / "key.pem").write_text(key)
    (tmp_path / "text.pem").write_text("a text")
    certificate.own(tmp_path / "other.pem", [])
    assert not certificate.given(tmp_path / "chain.pem", tmp_path / "key.pem").is_own
    for chain_name, key_name in (
        ("missing.pem", None),
        ("chain.pem", "missing.pem"),
        ("text.pem", None),
        ("chain.pem", None),
        ("chain.pem", "other.pem"),
        ("key.pem", None),
    ):
        with pytest.raises(InputError, match=r"expected a certificate .*; correct"):
            certificate.given(tmp_path / chain_name, tmp_path / key_name if key_name else None)


def test_the_join_command_has_an_own_certificates_fingerprint_or_a_given_ones_name(
    tmp_path: Path,
) -> None:
    with Fleet.serve("127.0.0.1:0", token=TOKEN, tls=True) as fleet:
        assert fleet.url == fleet.public_url
        address = parse_address(fleet.join_command.removeprefix("cleave join "))
        fingerprint = fleet.url.partition("#sha256:")[2]
        assert address.token == TOKEN
        assert address.url.startswith("wss://127.0.0.1:")
        assert fingerprint.startswith(address.url.partition("#sha256:")[2])
    certificate.own(tmp_path / "given.pem", [])
    with Fleet.serve("127.0.0.1:0", tls=(tmp_path / "given.pem", None)) as fleet:
        assert "#sha256:" in fleet.url
        assert fleet.join_command == f"cleave join wss://localhost:{fleet.url.split(':')[2].split('#')[0]}"


# ------------------------------------------------------------------------------------------------ tokens, roles


def hello(token: str = TOKEN, version: int = messages.VERSION) -> messages.Hello:
    return messages.Hello(
        version=version, name="granny", token=token, flops_per_s=1e9, memory_bytes=1 << 30, kernel="numpy"
    )


async def joined(url: str, token: str, version: int = messages.VERSION) -> str:
    """The server's answer to a hello: the reason for a refusal, or the message type."""
    async with asyncio.timeout(SOON_S):
        channel = await dial(url)
        try:
            await channel.send(hello(token, version))
            answer = (await channel.receive()).message
        finally:
            await channel.close()
    return answer.reason if isinstance(answer, messages.Refused) else answer.type_name()


async def test_a_wrong_or_missing_token_or_version_is_refused_with_only_a_reason(serve: Serve) -> None:
    service = serve(Keys(TOKEN))
    url = f"ws://{service.address}/ws"
    for token in ("", "guess", TOKEN[:-1], TOKEN + " "):
        reason = await joined(url, token)
        assert "wrong or missing token" in reason
        assert_nothing_revealed(reason.encode())
    reason = await joined(url, "", version=99)
    assert "version" in reason
    assert_nothing_revealed(reason.encode())
    assert service.cluster.devices == 0
    assert await joined(url, TOKEN) == "welcome"


async def test_a_revoked_token_no_longer_joins_a_running_server(serve: Serve, tmp_path: Path) -> None:
    person = Keys(path=tmp_path / FILE)
    key, token = person.add("device")
    _, admin = person.add("admin")
    service = serve(Keys(path=tmp_path / FILE))
    url = f"ws://{service.address}/ws"
    assert await joined(url, token) == "welcome"
    assert "token" in await joined(url, admin)
    person.revoke(key.id)
    assert "token" in await joined(url, token)


async def test_guesses_at_the_door_are_hashed_one_at_a_time(
    serve: Serve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Keys(path=tmp_path / FILE).add("device", TOKEN)
    service = serve(Keys(path=tmp_path / FILE))
    two, met = threading.Barrier(2, timeout=1.0), list[str]()

    def hash_in_company(token: str, salt: str) -> str:
        with contextlib.suppress(threading.BrokenBarrierError):
            two.wait()
            met.append(token)
        return ""

    monkeypatch.setattr(tokens, "_hash", hash_in_company)
    with connected(service) as status:
        status.sendall(status_with("guess"))
        asked = [asyncio.create_task(joined(f"ws://{service.address}/ws", f"guess {n}")) for n in range(3)]
        await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
        for task in asked:
            task.cancel()
        await asyncio.gather(*asked, return_exceptions=True)
    assert met == []


def status_with(token: str) -> bytes:
    return request("/api/status", f"Authorization: Bearer {token}")


def test_the_status_is_for_administrators_only(serve: Serve, tmp_path: Path) -> None:
    person = Keys(path=tmp_path / FILE)
    _, device = person.add("device", TOKEN)
    key, admin = person.add("admin")
    service = serve(Keys(path=tmp_path / FILE))
    for header in (
        "X-Nothing: x",
        "Authorization: Bearer",
        "Authorization: Bearer guess",
        f"Authorization: Bearer {device}",
        f"Authorization: Basic {admin}",
        f"Authorization: {admin}",
    ):
        answer = said(connected(service), request("/api/status", header))
        assert_refused(answer, 401, "expected an admin token")
    right = status_with(admin)
    assert b'"devices":[]' in said(connected(service), right)
    person.revoke(key.id)
    assert_refused(said(connected(service), right), 401, "expected an admin token")


def test_the_status_is_open_on_a_loopback_server_without_tokens(serve: Serve) -> None:
    service = serve()
    for host in ("127.0.0.1", "localhost:7077", "[::1]:7077"):
        answer = said(connected(service), request("/api/status", host=host))
        assert answer.startswith(b"HTTP/1.1 200 ")
        assert b"\r\nserver:" not in answer.lower()


@pytest.mark.parametrize("path", ["/api", "/api/status/", "/metrics/", "/docs", "/%2e%2e/etc", "/keys.json"])
def test_an_unknown_path_is_not_found_and_reveals_nothing(serve: Serve, path: str) -> None:
    answer = said(connected(serve(Keys(TOKEN))), request(path))
    assert answer.split(b" ")[1] in (b"404", b"307")
    assert_nothing_revealed(answer)


def test_websockets_on_other_paths_and_non_http_are_refused_and_learn_nothing(serve: Serve) -> None:
    service = serve(Keys(TOKEN))
    assert_refused(said(connected(service), request("/", *UPGRADE)), 404, "devices join at /ws")
    for words in (b"\r\n\r\n", b"nonsense\r\n\r\n", request("/ws", "Content-Length: x")):
        assert_nothing_revealed(said(connected(service), words))


# ------------------------------------------------------------------------------------------------ foreign pages


def test_a_page_from_another_site_cannot_join_on_its_visitors_behalf(serve: Serve) -> None:
    service = serve(Keys(TOKEN))
    foreign = request("/ws", *UPGRADE, "Origin: https://evil.example", host=f"127.0.0.1:{service.port}")
    assert_refused(said(connected(service), foreign), 403, "got one of another site")
    with connected(service) as connection:
        origin = f"Origin: http://127.0.0.1:{service.port}"
        connection.sendall(request("/ws", *UPGRADE, origin, host=f"127.0.0.1:{service.port}"))
        assert connection.recv(12) == b"HTTP/1.1 101"


def test_dns_rebinding_gets_nothing_from_an_open_server(serve: Serve) -> None:
    service = serve()
    for words in (request("/api/status", host="evil.example"), request("/ws", *UPGRADE, host="evil.example")):
        assert_refused(said(connected(service), words), 403, "use 127.0.0.1, or give the run a token")


@pytest.mark.parametrize(
    ("origins", "host", "fits"),
    [
        ([], "server:7077", True),
        (["http://server:7077"], "server:7077", True),
        (["HTTP://Server:7077"], "sERVER:7077", True),
        (["http://server"], "server:80", True),
        (["https://server:443"], "server", True),
        (["https://[2001:db8::1]"], "[2001:db8::1]:443", True),
        (["http://server"], "server:443", False),
        (["http://server:7078"], "server:7077", False),
        (["http://server:7077.evil.example"], "server:7077", False),
        (["http://other:7077"], "server:7077", False),
        (["null"], "server:7077", False),
        ([""], "server:7077", False),
        (["http://"], "", False),
        (["http://server:7077", "http://evil.example"], "server:7077", False),
        (["http://[bad"], "server:7077", False),
    ],
)
def test_a_page_belongs_to_this_server_if_host_and_port_match(origins: list[str], host: str, fits: bool) -> None:
    assert (objection_to(origins, [host], open_here=False) == "") == fits


@given(st.lists(st.text(), max_size=2), st.lists(st.text(), max_size=2), st.booleans())
def test_any_origin_and_host_headers_can_be_judged(origins: list[str], hosts: list[str], open_here: bool) -> None:
    assert isinstance(objection_to(origins, hosts, open_here=open_here), str)


# ------------------------------------------------------------------------------------------------ limits


def test_silent_connections_and_unfinished_requests_are_disconnected(
    serve: Serve, own: certificate.Certificate
) -> None:
    quick = Limits(first_byte_s=0.2, request_s=0.2)
    for service in (serve(limits=quick), serve(limits=quick, certificate=own)):
        assert said(connected(service), b"") == b""
    plain, secure = serve(limits=quick), serve(limits=quick, certificate=own)
    assert said(connected(plain), b"GET /api/status HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Slow: ") == b""
    assert said(connected(secure), b"\x16\x03\x01\x02\x00\x01\x00") == b""  # an unfinished TLS hello


def test_a_request_whose_body_never_comes_is_disconnected_after_its_answer(serve: Serve) -> None:
    service = serve(Keys(TOKEN), limits=Limits(request_s=0.2))
    answer = said(connected(service), request("/api/status", "Content-Length: 1000000"))
    assert_refused(answer, 401, "admin token")


async def test_connections_per_address_are_limited_and_leaving_frees_a_place(serve: Serve) -> None:
    notes: list[str] = []
    service = serve(Keys(TOKEN), limits=Limits(per_loopback=3, per_s=1e6, burst=1_000_000), say=notes.append)
    async with asyncio.timeout(SOON_S):
        devices = [await admitted(service) for _ in range(3)]
        with connected(service) as fourth:
            assert fourth.recv(1) == b""
        assert notes == ["a connection from 127.0.0.1 was refused: 3 connections from 127.0.0.1 are open"]
        for leaving in devices:
            await leaving.close()
            while True:  # until the server notices
                try:
                    answer = said(connected(service), request("/api/status"))
                except ConnectionError:
                    continue
                if answer:
                    break
            assert_refused(answer, 401, "admin token")


async def admitted(service: Service) -> Channel:
    """Join as a device; the connection stays open, without answering the server's probes."""
    channel = await dial(f"ws://{service.address}/ws")
    await channel.send(hello())
    assert isinstance((await channel.receive()).message, messages.Welcome)
    return channel


def upgraded(service: Service) -> socket.socket:
    connection = connected(service)
    connection.sendall(request("/ws", *UPGRADE))
    assert connection.recv(12) == b"HTTP/1.1 101"
    return connection


STAGES = {
    "silent": connected,
    "half a request": lambda service: started(service, b"GET /ws HTTP/1.1\r\nHost: "),
    "half a TLS hello": lambda service: started(service, b"\x16\x03\x01\x02\x00\x01\x00"),
    "no hello": upgraded,
}


def started(service: Service, words: bytes) -> socket.socket:
    connection = connected(service)
    connection.sendall(words)
    return connection


@pytest.mark.parametrize("stage", STAGES)
async def test_a_newcomer_takes_the_place_of_the_oldest_stranger(
    serve: Serve, own: certificate.Certificate, stage: str
) -> None:
    few = Limits(per_s=1e6, burst=1_000_000, strangers=4)
    service = serve(Keys(TOKEN), limits=few, certificate=own if stage == "half a TLS hello" else None)
    strangers = [STAGES[stage](service) for _ in range(50)]
    for stranger in strangers[:46]:  # the rest stay until they are displaced themselves, or time is up
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass
        stranger.close()
    if stage != "half a TLS hello":
        assert await joined(f"ws://{service.address}/ws", TOKEN) == "welcome"
    for stranger in strangers[46:]:
        stranger.close()


async def test_strangers_never_displace_devices(serve: Serve) -> None:
    service = serve(Keys(TOKEN), limits=Limits(connections=5, strangers=4, per_s=1e6, burst=1_000_000))
    async with asyncio.timeout(SOON_S):
        devices = [await admitted(service) for _ in range(3)]
        strangers = [connected(service) for _ in range(20)]
        devices.append(await admitted(service))
        for device in devices:
            await device.close()
        for stranger in strangers:
            stranger.close()


async def test_a_stranger_may_send_no_second_message_before_an_answer(serve: Serve) -> None:
    service = serve(Keys(TOKEN))
    async with asyncio.timeout(SOON_S):
        channel = await dial(f"ws://{service.address}/ws")
        for _ in range(3):  # arrive at once
            await channel.send(hello("a guess"))
        with pytest.raises(ConnectionLost, match="another message"):
            await channel.receive()


async def test_a_stranger_may_send_nothing_larger_than_a_hello(serve: Serve) -> None:
    service = serve(Keys(TOKEN))
    async with asyncio.timeout(SOON_S):
        channel = await dial(f"ws://{service.address}/ws")
        await channel._send(bytes(1 << 20))
        with pytest.raises(ConnectionLost, match="at most 65536 bytes, got 1048576"):
            await channel.receive()
        channel = await dial(f"ws://{service.address}/ws")
        await channel._send(messages.encode(messages.Probed(down_s=0.0, payload=1000)))
        with pytest.raises(ConnectionLost):
            await channel.receive()


class Crowd:
    """A census with few places and a low rate limit."""

    limits = Limits(connections=5, per_address=3, per_loopback=4, burst=4, per_s=2.0)

    def __init__(self) -> None:
        self.census = Census(self.limits)
        self.inside: list[tuple[str, Place]] = []

    def come(self, address: str, now_s: float = 0.0) -> bool:
        """Connect and be admitted, if there is a place."""
        place = self.census.enter(address, now_s)
        if isinstance(place, str):
            return False
        place.admit()
        self.inside.append((address, place))
        return True

    def leave(self, address: str) -> None:
        entry = next(entry for entry in self.inside if entry[0] == address)
        self.inside.remove(entry)
        for _ in range(2):  # the second time does nothing
            entry[1].leave()


def test_connections_are_limited_per_address_and_in_total() -> None:
    crowd = Crowd()
    assert [crowd.come("192.0.2.1") for _ in range(4)] == [True, True, True, False]
    assert [crowd.come(f"192.0.2.{n}") for n in (2, 3, 4)] == [True, True, False]
    crowd.leave("192.0.2.1")
    assert crowd.come("192.0.2.4")
    assert crowd.census.total == 5


def test_an_address_connects_no_faster_than_its_rate_limit() -> None:
    crowd, now_s = Crowd(), 0.0
    came = 0
    for _ in range(1000):
        if crowd.come("192.0.2.1", now_s):
            crowd.leave("192.0.2.1")
            came += 1
        now_s += 0.01
    assert 4 + 2 * 9.5 <= came <= 4 + 2 * 10 + 1
    assert crowd.come("192.0.2.2", now_s)


def test_a_crowd_of_strangers_from_one_address_displaces_itself_first() -> None:
    census = Census(Limits(strangers=20, strangers_per_address=12, burst=10_000))
    lone = census.enter("198.51.100.1", 0.0)
    assert isinstance(lone, Place)
    evicted: list[int] = []
    lone.close = lambda: evicted.append(-1)
    for number in range(100):
        place = census.enter(f"192.0.2.{number % 2}", 0.0)
        assert isinstance(place, Place)
        place.close = lambda number=number: evicted.append(number)
        assert len(census.strangers) <= 20
    assert -1 not in evicted
    assert evicted == sorted(evicted), "oldest first"
    assert len(evicted) == 100 + 1 - 20


@given(st.integers(8, 100_000), st.integers(0, 200))
def test_connections_leave_descriptors_for_files(descriptors: int, in_use: int) -> None:
    limits = fitting(Limits(), descriptors, in_use)
    assert 1 <= limits.strangers <= max(1, limits.connections // 4)
    assert limits.connections == 1 or limits.connections + in_use + min(64, descriptors // 4) <= descriptors
    assert fitting(Limits(), math.inf, in_use) == Limits()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("127.0.0.1", "127.9.9.9", True),
        ("127.0.0.1", "::1", True),
        ("::ffff:127.0.0.1", "::1", True),
        ("::ffff:192.0.2.1", "192.0.2.1", True),
        ("2001:db8::1", "2001:db8::ffff", True),
        ("fe80::1%eth0", "fe80::1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False),
        ("192.0.2.1", "192.0.2.2", False),
    ],
)
def test_addresses_of_one_subscriber_count_as_one(one: str, other: str, same: bool) -> None:
    assert (group_of(one) == group_of(other)) == same


@given(st.lists(st.tuples(st.sampled_from(["192.0.2.1", "192.0.2.2", "::1", "2001:db8::1"]), st.booleans())))
def test_a_census_counts_exactly_the_connections_that_are_open(moves: list[tuple[str, bool]]) -> None:
    crowd, now_s = Crowd(), 0.0
    for address, comes in moves:
        now_s += 10.0
        if comes:
            allowed = 4 if address == "::1" else 3
            inside = [other for other, _ in crowd.inside]
            room = len(inside) < 5 and inside.count(address) < allowed
            assert crowd.come(address, now_s) == room
        elif address in [other for other, _ in crowd.inside]:
            crowd.leave(address)
    assert crowd.census.total == len(crowd.inside)
