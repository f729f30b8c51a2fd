"""Ask a server for something over HTTP, with the same addresses and the same trust in certificates as a device."""

from __future__ import annotations

import hashlib
import http.client
import os
import ssl
from urllib.parse import urlsplit

from cleave.errors import ConnectionLost, InputError
from cleave.printable import printable
from cleave.transport.address import Address
from cleave.transport.websocket import client_context

_PATIENCE_S = 10.0
_MOST_BYTES = 64 << 20
_REFUSED = {401, 403}


def get(address: Address, path: str) -> bytes:
    """Return the body of an answer. Raises InputError if the server refuses, ConnectionLost if it cannot be reached."""
    parts, pin = urlsplit(address.url), address.url.partition("#sha256:")[2].lower()
    shown = address.shown
    host, port = parts.hostname or "", parts.port
    if parts.scheme == "wss":
        context = client_context(pinned=bool(pin))
        connection = http.client.HTTPSConnection(host, port, timeout=_PATIENCE_S, context=context)
    else:
        connection = http.client.HTTPConnection(host, port, timeout=_PATIENCE_S)
    try:
        connection.connect()
        if pin and isinstance(connection.sock, ssl.SSLSocket):
            certificate = connection.sock.getpeercert(binary_form=True) or b""
            if not hashlib.sha256(certificate).hexdigest().startswith(pin):
                raise InputError(f"{shown} shows another certificate than the address names; ask for a new address")
        headers = {"Authorization": f"Bearer {address.token}"} if address.token else {}
        connection.request("GET", path, headers=headers)
        answer = connection.getresponse()
        body = answer.read(_MOST_BYTES)
    except ssl.SSLError as fault:
        raise ConnectionLost(f"TLS with {shown} failed: {fault.reason or fault}") from None
    except (OSError, http.client.HTTPException) as fault:
        number = getattr(fault, "errno", None) or 0
        why = os.strerror(number) if number > 0 else printable(str(fault))
        raise ConnectionLost(f"cannot reach {shown}: {why}; start the server, or check the address") from None
    finally:
        connection.close()
    if answer.status in _REFUSED:
        raise InputError(f"{shown} refuses: {printable(body.decode(errors='replace').strip(), 300)}")
    if answer.status == http.client.UPGRADE_REQUIRED:
        raise InputError(f"{shown} speaks TLS only; use wss:// and what the server prints after #")
    if answer.status != http.client.OK:
        raise InputError(f"expected a Cleave server at {shown}, got HTTP status {answer.status} for {path}")
    return body
