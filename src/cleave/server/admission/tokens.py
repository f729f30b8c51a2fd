"""Tokens of a run, known by their hashes alone.

A key lets devices join or a person administer, never both. Keys live in a file in the run directory, so that tokens
survive a server restart, and so that `cleave token revoke` in another process reaches a running server: the file is
reread whenever it changes. Plain tokens are never written to disk. Knows nothing of connections; `doorkeeper.py`,
`connection.py` and `service.py` ask.

Tokens that people choose can be guessed, so they are hashed slowly, at rest and at the door. A token drawn here has 128
random bits, which nobody guesses however fast the hash: the file has its SHA-256 too, by which a server recognizes it
at once. So strangers can make a server hash slowly only if some valid token was chosen by a person, or was made by a
release that stored no SHA-256.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from cleave.core.verify.trust import Level
from cleave.disk import read_whole
from cleave.errors import InputError
from cleave.settings import TRUST

FILE = "keys.json"

_MOST_BYTES = 1 << 22
_MOST_SALTS = 8

Role = Literal["device", "admin"]
Hexadecimal = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]+$", max_length=128)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=2.5e11)]
"""Since 1970, up to the year 9892: those that can be shown as a date."""

log = logging.getLogger(__name__)


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """One token as stored in the file."""

    id: Hexadecimal
    role: Role
    salt: Hexadecimal
    """The same for all keys of a file, so that a guess is hashed once and compared with each."""
    hash: Hexadecimal
    digest: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]*$", max_length=128)] = ""
    """SHA-256 of a token that was drawn at random; empty if a person chose it, or an earlier release drew it."""
    created_s: Seconds
    revoked_s: float | None = None
    trust: Level = TRUST
    """How far devices are trusted that join with it."""

    @property
    def is_valid(self) -> bool:
        return self.revoked_s is None


class Keys:
    """The keys of a run. Without any device key everyone may join; a revoked key still counts."""

    def __init__(self, *tokens: str, path: Path | None = None, trust: Level = TRUST) -> None:
        """`tokens` are valid while this process lives, those in the file until revoked.

        `trust` is the level of devices that joined with one of `tokens`, or without any where the run is open.
        """
        self._path = path
        self._trust: Level = trust
        self._kept: dict[str, Key] = {}
        self._drawn: dict[str, Key] = {}
        """Keys of tokens drawn at random, by the tokens' SHA-256."""
        self._given = {_digest(token): secrets.token_hex(4) for token in tokens if token}
        self._lent: dict[bytes, str] = {}
        self._lent_trust: dict[str, Level] = {}
        self._verified: dict[bytes, str] = {}
        """Chosen tokens verified before, at most one per key, by a fast hash that never leaves this process."""
        self._seen: tuple[int, ...] | None = None
        self._read()

    # -------------------------------------------------------------------------------------------- asked by the server

    def identify(self, token: str) -> str | None:
        """Return the id of the token's key, empty if the run is open, None if the token may not join."""
        self._refresh()
        key = self._memory.get(_digest(token))
        if key is not None:
            return key
        if self.is_open:
            return ""
        return self._match(token, "device")

    def is_valid(self, key: str) -> bool:
        """Whether the key a device joined with is still valid."""
        self._refresh()
        if key == "":
            return self.is_open
        kept = self._kept.get(key)
        return kept.is_valid if kept is not None else key in self._memory.values()

    def level(self, key: str) -> Level:
        """Return how far a device is trusted that joined with this key."""
        kept = self._kept.get(key)
        if kept is not None:
            return kept.trust
        return self._lent_trust.get(key, self._trust)

    def administers(self, token: str) -> bool:
        """Whether this token lets a person view and control the run."""
        self._refresh()
        return bool(token) and self._match(token, "admin") is not None

    def recognizes(self, token: str) -> bool:
        """Whether `identify` and `administers` answer for this token at once, right or wrong, without a slow hash."""
        self._refresh()
        return not token or _digest(token) in self._memory or self._recognized(token) is not None or not self._slow

    def verify(self, token: str) -> bool:
        """Compare a token with all guessable keys, by a slow hash; a right one is recognized from then on."""
        slow = self._slow
        hashes = {salt: _hash(token, salt) for salt in {key.salt for key in slow}}
        matching = [key for key in slow if hmac.compare_digest(hashes[key.salt], key.hash)]
        if matching:
            self._verified[_digest(token)] = matching[0].id
        return bool(matching)

    @property
    def is_open(self) -> bool:
        """Whether no device key exists, so that everyone may join."""
        return not self._given and not any(key.role == "device" for key in self._kept.values())

    @property
    def is_bare(self) -> bool:
        """Whether there is no key of any kind."""
        return not self._kept and not self._given

    def lend(self, trust: Level = "own") -> str:
        """Return a token for devices this process starts: it expires with the process and leaves an open run open."""
        token = _new_token()
        key = self._lent[_digest(token)] = secrets.token_hex(4)
        self._lent_trust[key] = trust
        return token

    def is_lent(self, id: str | None) -> bool:
        """Whether a device with this key was started by this process."""
        return id in self._lent.values()

    # -------------------------------------------------------------------------------------------- asked by people

    def list(self) -> tuple[Key, ...]:
        """Return the keys in the file, oldest first."""
        self._refresh()
        return tuple(self._kept.values())

    def lists(self, id: str | None) -> bool:
        """Whether people can see and revoke this key."""
        return id in self._kept

    def add(self, role: Role = "device", token: str | None = None, trust: Level = TRUST) -> tuple[Key, str]:
        """Store a new key; return it with its token, which cannot be recovered later."""
        self._refresh()
        digest = ""
        if not token:
            token = _new_token()
            digest = _digest(token).hex()
        salt = next((key.salt for key in self._kept.values()), secrets.token_hex(16))
        key = Key(
            id=self._new_id(),
            role=role,
            salt=salt,
            hash=_hash(token, salt),
            digest=digest,
            created_s=time.time(),
            trust=trust,
        )
        if any(other.hash == key.hash for other in self._kept.values()):
            raise InputError("this run already has that token, maybe revoked; choose another")
        self._write({**self._kept, key.id: key})
        return key, token

    def set_trust(self, id: str, trust: Level) -> None:
        """Change how far devices are trusted that join with a key from now on."""
        key = self._kept.get(id)
        if key is not None and key.trust != trust:
            self._write({**self._kept, id: msgspec.structs.replace(key, trust=trust)})

    def revoke(self, id: str) -> Key:
        """Revoke a key for good: devices that joined with it are disconnected within seconds."""
        self._refresh()
        key = self._kept.get(id)
        if key is None:
            known = ", ".join(self._kept) or "none"
            raise InputError(f"expected the id of a token, got {id!r}; the tokens of this run are: {known}")
        if key.is_valid:
            key = msgspec.structs.replace(key, revoked_s=time.time())
            self._write({**self._kept, id: key})
        return key

    # -------------------------------------------------------------------------------------------- hashes

    @property
    def _memory(self) -> dict[bytes, str]:
        return {**self._given, **self._lent}

    @property
    def _slow(self) -> tuple[Key, ...]:
        """Valid keys whose tokens can only be verified by a slow hash, or were by now."""
        return tuple(key for key in self._kept.values() if not key.digest and key.is_valid)

    def _match(self, token: str, role: Role) -> str | None:
        """Return the valid key of that role with this token."""
        if not self.recognizes(token):
            self.verify(token)
        found = self._recognized(token)
        return found.id if found is not None and found.is_valid and found.role == role else None

    def _recognized(self, token: str) -> Key | None:
        digest = _digest(token)
        return self._kept.get(self._verified.get(digest, "")) or self._drawn.get(digest.hex())

    def _new_id(self) -> str:
        return next(id for id in iter(lambda: secrets.token_hex(4), "") if id not in self._kept)

    # -------------------------------------------------------------------------------------------- the file

    def _refresh(self) -> None:
        """Reread the file if it changed; if that fails, a running server keeps the keys it knows."""
        if self._path is None or _signs(self._path) == self._seen:
            return
        try:
            self._read()
        except InputError as fault:
            self._seen = _signs(self._path)
            log.error("%s; the keys read before stay valid", fault)

    def _read(self) -> None:
        if self._path is None:
            return
        seen = _signs(self._path)
        if seen is None:
            if self._kept:
                raise InputError(f"expected the keys of this run in {self._path}, but the file is gone; put it back")
            return
        try:
            keys = msgspec.json.decode(read_whole(self._path, _MOST_BYTES), type=list[Key])
        except OSError as fault:
            raise InputError(f"cannot read {self._path}: {fault.strerror}; make it readable") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as fault:
            raise InputError(
                f"expected the keys of a run in {self._path}, but {fault}; restore the file, or delete it to start "
                "over with cleave token add"
            ) from None
        if len({key.salt for key in keys}) > _MOST_SALTS:  # each costs every guess a slow hash
            raise InputError(f"expected one salt for all keys in {self._path}, got many; restore the file")
        self._keep({key.id: key for key in keys})
        self._seen = seen

    def _write(self, keys: dict[str, Key]) -> None:
        """Write the file atomically, readable by its owner alone from the first byte."""
        assert self._path is not None, "keys without a file are only given or lent"
        part = self._path.with_name(f".{self._path.name}.{secrets.token_hex(4)}")
        data = msgspec.json.format(msgspec.json.encode(list(keys.values())), indent=1) + b"\n"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._path)
        except OSError as fault:
            raise InputError(f"cannot write {self._path}: {fault.strerror}; make its directory writable") from None
        finally:
            with suppress(OSError):
                part.unlink()
        self._keep(keys)
        self._seen = _signs(self._path)

    def _keep(self, keys: dict[str, Key]) -> None:
        self._kept = keys
        self._drawn = {key.digest: key for key in keys.values() if key.digest}


def _signs(path: Path) -> tuple[int, ...] | None:
    """Metadata that changes when the file is replaced; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _new_token() -> str:
    """Draw a token that no command line takes for an option."""
    return next(token for token in iter(lambda: secrets.token_urlsafe(16), "") if not token.startswith("-"))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()


def _hash(token: str, salt: str) -> str:
    """Hash slowly on purpose (about 10 ms and 4 MB), since people choose guessable tokens."""
    return hashlib.scrypt(token.encode(errors="replace"), salt=salt.encode(), n=2**12, r=8, p=1).hex()
