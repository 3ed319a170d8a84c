"""API keys, stored as SHA-256 hashes, and the tenant that each key belongs to.

The file that `security.api_keys` names has one entry per line: `NAME SHA256HEX [TENANT] [requests=N] [tokens=N] [admin=yes]`. Without
TENANT, the tenant is NAME. `requests` and `tokens` replace the tenant's limits per minute from the configuration (0: no limit). `admin`
opens the operator's doors, too (`baton.cluster.guard`). Empty lines and lines that begin with # are skipped. A plain hash is enough,
because keys are random and nobody can try them all.
"""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Self

from baton.cluster.config import ConfigError
from baton.cluster.errors import BatonError, Reason

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
_ADMIN = "admin=yes"
_QUOTA = re.compile(r"(requests|tokens)=([0-9]{1,9})")
MAX_KEY = 512  # characters
_Stamp = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Quota:
    """What a tenant may use in a minute; None: no limit."""

    requests: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, slots=True)
class KeyEntry:
    name: str
    digest: bytes
    tenant: str
    quota: tuple[tuple[str, int | None], ...] = ()  # fields of the tenant's Quota that replace the configuration's
    admin: bool = False


class ApiKeys:
    """If there are no entries, no key is needed and requests have no tenant."""

    def __init__(self, entries: Iterable[KeyEntry] = (), quota: Quota | None = None) -> None:
        """`quota` is for tenants whose entries set none. Raises ConfigError when two entries of one tenant disagree."""
        self._path: str | None = None  # the file that `refresh` reads
        self._stamp: _Stamp | None = None
        self._quota = quota
        self._take(entries)

    def _take(self, entries: Iterable[KeyEntry]) -> None:
        taken, quotas = tuple(entries), dict[str, Quota]()
        given: dict[tuple[str, str], int | None] = {}
        for entry in taken:
            for what, amount in entry.quota:
                if given.setdefault((entry.tenant, what), amount) != amount:
                    raise ConfigError(f"security.api_keys: {entry.name}: {what} differ from those of another key of {entry.tenant}")
            own = quotas.get(entry.tenant, self._quota or Quota())
            quotas[entry.tenant] = replace(own, **dict(entry.quota))
        found: dict[bytes, list[KeyEntry]] = {}
        for entry in taken:
            found.setdefault(entry.digest, []).append(entry)
        self._entries, self._quotas = found, quotas

    @classmethod
    def load(cls, path: str | None, quota: Quota | None = None) -> Self:
        """Raises ConfigError for a file that cannot be read, that holds no key, or that has a malformed line."""
        if path is None:
            return cls()
        stamp = _stamp(path)
        keys = cls(_read(path), quota)
        keys._path, keys._stamp = path, stamp
        return keys

    def refresh(self) -> bool:
        """Reads the file again if it has changed; returns whether it has. A bad file raises ConfigError once and the old keys stay. Call it
        in a thread: a file of ten thousand keys takes 50 ms, and a file system may hang."""
        if self._path is None or (stamp := _stamp(self._path)) == self._stamp:
            return False
        self._stamp = stamp
        self._take(_read(self._path))
        return True

    def __bool__(self) -> bool:
        return bool(self._entries)

    @property
    def limited(self) -> bool:
        """Whether any tenant has a limit."""
        return any(quota != Quota() for quota in self._quotas.values())

    def quota(self, tenant: str) -> Quota:
        """The quota of a tenant. One whose key was removed has no limit: only its running requests still ask."""
        return self._quotas.get(tenant, Quota())

    def tenant(self, authorization: str | None) -> str:
        """The tenant that `Bearer KEY` belongs to; empty when no key is needed. Raises UNAUTHENTICATED.

        The hash is looked up, not the key, so the time taken reveals nothing about a key.
        """
        if not self._entries:
            return ""
        found = self._find(authorization)
        if not found:
            raise BatonError(Reason.UNAUTHENTICATED, "this API key is unknown")
        return found[0].tenant

    def is_admin(self, authorization: str | None) -> bool:
        """Whether `Bearer KEY` is a key with `admin=yes`."""
        try:
            return any(entry.admin for entry in self._find(authorization))
        except BatonError:
            return False

    def _find(self, authorization: str | None) -> list[KeyEntry]:
        """The entries of this key. Raises UNAUTHENTICATED if there is none in `authorization`."""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key or len(key) > MAX_KEY:
            raise BatonError(Reason.UNAUTHENTICATED, "an API key is needed: Authorization: Bearer KEY")
        return self._entries.get(sha256(key.strip().encode(errors="replace")).digest(), [])


def _stamp(path: str) -> _Stamp | None:
    """Changes whenever the file does; None while there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: str) -> list[KeyEntry]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ConfigError(f"security.api_keys: {path} cannot be read: {error}") from None
    entries = [_entry(line, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")]
    if not entries:
        raise ConfigError(f"security.api_keys: {path} holds no key")
    return entries


def _entry(line: str, where: str) -> KeyEntry:
    words = line.split()
    parts = [word for word in words if "=" not in word]
    options = [_QUOTA.fullmatch(word) for word in words if "=" in word and word != _ADMIN]
    if len(parts) not in (2, 3) or not _DIGEST.fullmatch(parts[1]) or not all(options):
        raise ConfigError(f"security.api_keys: {where}: must be NAME SHA256HEX [TENANT] [requests=N] [tokens=N] [admin=yes]")
    name, digest, tenant = parts[0], parts[1], parts[-1] if len(parts) == 3 else parts[0]
    if not (_NAME.fullmatch(name) and _NAME.fullmatch(tenant)):
        raise ConfigError(f"security.api_keys: {where}: names have 1 to 64 letters, digits, '_', '.' and '-'")
    quota = tuple((option[1], int(option[2]) or None) for option in options if option)
    return KeyEntry(name, bytes.fromhex(digest), tenant, quota, _ADMIN in words)
