"""The server's certificate: one that was given, or one it makes itself and keeps, and what devices know it by.

A certificate that an authority signed proves the server's name. One the server made proves nothing by itself, so its
fingerprint is part of the address that devices are given; it stays the same for as long as the run directory does.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import ipaddress
import os
import socket
import ssl
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from cleave.errors import InputError

FILE = "tls.pem"

_DAYS = 365
_END = "-----END CERTIFICATE-----"


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    context: ssl.SSLContext
    fingerprint: str
    """SHA-256 of the certificate in DER, hexadecimal: what `wss://...#sha256:` carries."""
    is_own: bool
    """Made by this server, so that devices can know it by its fingerprint alone."""
    name: str | None = None
    """The first host that a given certificate is for: what devices must dial."""


def given(certificate: Path, key: Path | None) -> Certificate:
    """A certificate with its chain, and its key in the same file or another."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for path in (certificate, key):
        if path is not None and not path.is_file():
            raise InputError(f"expected a certificate or a key in {path}, but there is no such file; correct the path")
    try:
        context.load_cert_chain(certificate, key, password=_no_password)
        fingerprint = _fingerprint(certificate.read_text(encoding="ascii", errors="replace"))
    except (ssl.SSLError, ValueError) as fault:
        why = getattr(fault, "reason", None) or "no certificate and key of it were found"
        raise InputError(
            f"expected a certificate in PEM in {certificate}, and its key without a password in {key or 'it too'}, "
            f"got something else ({why}); correct --tls-certificate and --tls-key"
        ) from None
    except OSError as fault:
        raise InputError(f"cannot read {certificate} or {key}: {fault.strerror}; make them readable") from None
    return Certificate(context=context, fingerprint=fingerprint, is_own=False, name=_first_name(certificate))


def own(path: Path | None, hosts: list[str]) -> Certificate:
    """The certificate kept at `path`, made there first if need be; without a path, one for this process only.

    One that is kept is not made anew when it expires: devices go by its fingerprint, not by its dates.
    """
    with contextlib.ExitStack() as stack:
        if path is None:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / FILE
        if not path.exists():
            _make(path, hosts)
        kept = given(path, None)
    return Certificate(context=kept.context, fingerprint=kept.fingerprint, is_own=True)


def _make(path: Path, hosts: list[str]) -> None:
    """A key on P-256 and a certificate for this machine's names and addresses, in one file only its owner can read."""
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.x509.oid import NameOID
    except ImportError:
        raise InputError("--tls needs cryptography, which is not installed; pip install 'cleave[train]'") from None
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "cleave")])
    now = datetime.datetime.now(datetime.UTC)
    alternatives: list[x509.GeneralName] = [
        x509.DNSName(host) if address is None else x509.IPAddress(address)
        for host, address in ((host, _address(host)) for host in _names(hosts))
    ]
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))  # devices whose clock is behind
        .not_valid_after(now + datetime.timedelta(days=_DAYS))
        .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    data = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part.unlink(missing_ok=True)
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)
        part.replace(path)
    except OSError as fault:
        raise InputError(f"cannot write {path}: {fault.strerror}; make its directory writable") from None


def _names(hosts: list[str]) -> list[str]:
    """What this machine may be called by those who dial it; wildcards and names no certificate can hold left out."""
    addresses = [
        entry.address.partition("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    candidates = dict.fromkeys(["localhost", "127.0.0.1", "::1", socket.gethostname(), *hosts, *addresses])
    return [name for name in candidates if name and name.isascii() and name not in ("0.0.0.0", "::")]


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _fingerprint(pem: str) -> str:
    """Of the first certificate in a file, which is the server's own; further ones are its chain."""
    start, end = pem.find("-----BEGIN CERTIFICATE-----"), pem.find(_END)
    if start < 0 or end < start:
        raise ValueError("no certificate")
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem[start : end + len(_END)] + "\n")).hexdigest()


def _first_name(certificate: Path) -> str | None:
    try:
        from cryptography import x509
    except ImportError:
        return None
    try:
        parsed = x509.load_pem_x509_certificate(certificate.read_bytes())
        names = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return None
    return next((name for name in names.get_values_for_type(x509.DNSName) if "*" not in name), None)


def _no_password() -> bytes:
    """Instead of OpenSSL's question on the terminal, which nobody may be there to answer."""
    raise ValueError("the key has a password")
