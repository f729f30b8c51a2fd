"""deploy/nginx.conf in a real nginx: a device joins a run through it, by name and over the proxy's TLS."""

from __future__ import annotations

import datetime
import shutil
import ssl
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from tests.deploy.conftest import DEPLOY, Start
from tests.support.commands import PATIENCE_S, command, free_port, joined, last_step, wait_until

TOKEN = "for-friends-only"
_MAIN = """
{user}
daemon off;
master_process off;
pid {directory}/nginx.pid;
error_log stderr;
events {{ }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    include {directory}/cleave.conf;
}}
"""


@pytest.mark.slow
def test_a_device_joins_through_the_proxy_and_strangers_see_nothing(tmp_path: Path, start: Start, texts: Path) -> None:
    port, secure_port, out = free_port(), free_port(), tmp_path / "run"
    flags = ["--model", "tiny-llama", "--data", str(texts), "--sequence", "32", "--batch", "2", "--steps", "5"]
    flags += ["--listen", f"127.0.0.1:{port}", "--token", TOKEN, "--devices", "0", "--out", str(out)]
    server = start("server", command("train", *flags))
    wait_until(lambda: "cleave join" in (tmp_path / "server.out").read_text(), server)
    certificate = start_proxy(tmp_path, start, port=port, secure_port=secure_port)

    address = f"wss://localhost:{secure_port}"
    assert answer(f"https://localhost:{secure_port}/", certificate) == 404
    assert answer(f"https://localhost:{secure_port}/api/status", certificate) == 401
    stranger = start("stranger", command("join", address, "--token", "guess"), {"SSL_CERT_FILE": str(certificate)})
    assert stranger.wait(PATIENCE_S) == 2
    distrustful = start("distrustful", command("join", f"{address}#{TOKEN}"))
    assert distrustful.wait(PATIENCE_S) == 2

    words = command("join", f"{address}#{TOKEN}", "--name", "guest", "--threads", "1", "--memory", "1GB")
    device = start("device", words, {"SSL_CERT_FILE": str(certificate)})
    assert server.wait(PATIENCE_S) == 0, (tmp_path / "server.out").read_text()
    assert device.wait(PATIENCE_S) == 0, (tmp_path / "device.out").read_text()
    assert joined(out) == ["guest"]
    assert last_step(out) == 5


def start_proxy(directory: Path, start: Start, *, port: int, secure_port: int) -> Path:
    """Start nginx with the site of deploy/, for this machine's name and ports; return its certificate."""
    nginx = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if nginx is None:
        pytest.skip("there is no nginx here: apt-get install nginx-light")
    certificate, key = make_certificate(directory)
    site = (DEPLOY / "nginx.conf").read_text()
    for old, new in (
        ("listen 443 ssl;", f"listen 127.0.0.1:{secure_port} ssl;"),
        ("server_name train.example.org;", "server_name localhost;"),
        ("/etc/ssl/cleave/fullchain.pem", str(certificate)),
        ("/etc/ssl/cleave/privkey.pem", str(key)),
        ("http://127.0.0.1:7077", f"http://127.0.0.1:{port}"),
    ):
        assert old in site
        site = site.replace(old, new)
    (directory / "cleave.conf").write_text(site)
    user = "user root;" if directory.owner() == "root" else ""
    (directory / "nginx.conf").write_text(_MAIN.format(directory=directory, user=user))
    process = start("nginx", [nginx, "-p", str(directory), "-c", str(directory / "nginx.conf")])
    wait_until(lambda: (directory / "nginx.pid").exists(), process)
    wait_until(lambda: answer(f"https://localhost:{secure_port}/", certificate), process)
    return certificate


def answer(url: str, certificate: Path) -> int:
    """Return the status of a request; 0 if there was no answer."""
    try:
        with urllib.request.urlopen(
            url, context=ssl.create_default_context(cafile=str(certificate)), timeout=10
        ) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as fault:
        with fault:
            return fault.code
    except OSError:
        return 0


def make_certificate(directory: Path) -> tuple[Path, Path]:
    """Write a certificate for localhost that is its own authority, and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    usage = x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        crl_sign=False,
        encipher_only=False,
        decipher_only=False,
    )
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .sign(key, hashes.SHA256())
    )
    chain, private = directory / "fullchain.pem", directory / "privkey.pem"
    chain.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return chain, private
