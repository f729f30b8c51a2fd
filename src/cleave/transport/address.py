"""Addresses of servers as people pass them on: one string with the host, the port and what it takes to join.

A server formats one with `join_command`, or as a link for browsers with `join_page`; a device reads it with
`parse_address`. What follows # never travels:

    192.168.1.20:7077                    no encryption, no token
    192.168.1.20:7077#TOKEN              a token
    192.168.1.20:7077#TOKEN.PIN          a token, and TLS with a certificate that starts with this fingerprint
    wss://train.example.org#TOKEN        a token, and TLS with a certificate that an authority signed
    wss://192.168.1.20:7077#sha256:HEX   TLS with the certificate of this fingerprint; the token is given separately
"""

from __future__ import annotations

import base64
import re
import shlex
from dataclasses import dataclass
from urllib.parse import quote, urlsplit, urlunsplit

from cleave.errors import InputError

PIN_BYTES = 16
"""Bytes of a SHA-256 fingerprint in a short address: finding another certificate that matches takes 2^128 tries."""
_PLAIN_TOKEN = re.compile(r"[A-Za-z0-9_-]+")
_PIN = re.compile(r"[A-Za-z0-9_-]{22}")
_FINGERPRINT = re.compile(r"sha256:[0-9a-fA-F]{64}")
_PAGE = "/join"
"""Ends the link for browsers, which people pass on to programs, too."""
_SCHEMES = {"ws": "ws", "wss": "wss", "http": "ws", "https": "wss", "cleave": "ws"}
_EXPECTED = "expected the address of a server such as 192.168.1.20:7077 or wss://192.168.1.20:7077, got {!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    url: str
    """To dial: ws://host:port/ws, or wss:// with the expected certificate's fingerprint after #."""
    token: str = ""

    @property
    def shown(self) -> str:
        """The address without secrets, for messages."""
        return self.url.partition("#")[0].removesuffix("/ws")


def parse_address(text: str) -> Address:
    """Read an address in any of the forms above. Without a scheme, a fingerprint implies TLS.

    Only wss:// and https:// may lack the port: 443, as on the web, where a reverse proxy listens.
    """
    bare, _, secret = text.strip().strip("'\"").partition("#")  # some shells leave quotes in place
    token, pin = _parse_secret(secret, bare)
    try:
        parts = urlsplit(bare if "://" in bare else f"{'wss' if pin else 'ws'}://{bare}")
        port = 443 if parts.port is None and bare.startswith(("wss://", "https://")) else parts.port
    except ValueError:
        raise InputError(f"{_EXPECTED.format(bare)}; copy the join command that the server prints") from None
    if parts.scheme not in _SCHEMES or not parts.hostname or not port:
        raise InputError(f"{_EXPECTED.format(bare)}; copy the join command that the server prints")
    path = parts.path.rstrip("/")
    path = "/ws" if path in ("", _PAGE) else path
    return Address(url=urlunsplit((_SCHEMES[parts.scheme], parts.netloc, path, "", pin)), token=token)


def join_command(url: str, token: str) -> str:
    """Format the command that joins a server at ws://host:port or wss://host:port, maybe with #sha256:HEX, on one line.

    The address is quoted where needed: some shells read # or the brackets of IPv6 addresses as patterns. A token that a
    person chose freely does not fit into an address and is passed as an option.
    """
    bare, _, fingerprint = url.removeprefix("ws://").partition("#sha256:")
    if _PLAIN_TOKEN.fullmatch(token):
        secret = f"{bare.removeprefix('wss://')}#{token}.{_short(fingerprint)}" if fingerprint else f"{bare}#{token}"
        return f"cleave join {shlex.quote(secret)}"
    address = shlex.quote(url.removeprefix("ws://"))
    return f"cleave join {address}" + (f" --token={shlex.quote(token)}" if token else "")


def join_page(url: str, token: str) -> str:
    """Format the link of the page that makes a browser a device. A browser checks certificates itself, so no pin."""
    scheme, _, rest = url.partition("#")[0].partition("://")
    return f"{'https' if scheme == 'wss' else 'http'}://{rest}{_PAGE}" + (f"#{quote(token, safe='')}" if token else "")


def _parse_secret(secret: str, bare: str) -> tuple[str, str]:
    """Split what follows # into the token and the expected fingerprint, as `sha256:HEX`; either may be empty.

    Errors do not repeat it: logs keep them.
    """
    if not secret:
        return "", ""
    if secret.startswith("sha256:"):
        if _FINGERPRINT.fullmatch(secret) is None:
            digits = len(secret.removeprefix("sha256:"))
            raise InputError(
                f"expected sha256: and 64 hexadecimal digits after {bare}#, got {digits}; copy the whole address"
            )
        return "", secret.lower()
    if secret in ("TOKEN", "TOKEN.PIN"):
        raise InputError(f"{secret} after {bare}# stands for what the server prints there; copy the whole address")
    token, dot, pin = secret.partition(".")
    if not _PLAIN_TOKEN.fullmatch(token) or (dot and not _PIN.fullmatch(pin)):
        raise InputError(
            f"expected TOKEN or TOKEN.PIN after {bare}#, got {len(secret)} characters that are neither; copy the whole "
            "address"
        )
    return token, f"sha256:{base64.urlsafe_b64decode(pin + '==').hex()}" if dot else ""


def _short(fingerprint: str) -> str:
    return base64.urlsafe_b64encode(bytes.fromhex(fingerprint)[:PIN_BYTES]).decode().rstrip("=")
