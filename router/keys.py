"""Who is asking: API keys by their SHA-256, and the tenant that a key speaks for.

One entry a line in the file that `security.api_keys` names: `NAME SHA256HEX [TENANT]`; without a tenant, NAME is one. Empty lines and lines
that begin with # are skipped. A plain hash is enough because keys are drawn, not chosen: nobody can try all of them.
"""

import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Self

from cluster.config import ConfigError
from cluster.errors import BatonError, Reason

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
MAX_KEY = 512  # characters


@dataclass(frozen=True, slots=True)
class Entry:
    name: str
    digest: bytes
    tenant: str


class ApiKeys:
    """No entries: everybody may ask, and nobody is a tenant."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self._entries = tuple(entries)

    @classmethod
    def load(cls, path: str | None) -> Self:
        """Raises ConfigError for a file that cannot be read, that holds no key, or that has a line which is none."""
        if path is None:
            return cls()
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            raise ConfigError(f"security.api_keys: {path} cannot be read: {error}") from None
        entries = [_entry(line, f"{path}:{i}") for i, line in enumerate(lines, 1) if line.strip() and not line.strip().startswith("#")]
        if not entries:
            raise ConfigError(f"security.api_keys: {path} holds no key")
        return cls(entries)

    def __bool__(self) -> bool:
        return bool(self._entries)

    def tenant(self, authorization: str | None) -> str:
        """Whom `Bearer KEY` speaks for; empty when no key is asked for. Raises UNAUTHENTICATED.

        Every entry is compared, whichever fits, and hashes instead of keys: the time taken tells nothing of either.
        """
        if not self._entries:
            return ""
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key or len(key) > MAX_KEY:
            raise BatonError(Reason.UNAUTHENTICATED, "an API key is needed: Authorization: Bearer KEY")
        digest = sha256(key.strip().encode(errors="replace")).digest()
        found = [entry for entry in self._entries if hmac.compare_digest(entry.digest, digest)]
        if not found:
            raise BatonError(Reason.UNAUTHENTICATED, "this API key is not known")
        return found[0].tenant


def _entry(line: str, where: str) -> Entry:
    parts = line.split()
    if len(parts) not in (2, 3) or not _DIGEST.fullmatch(parts[1]):
        raise ConfigError(f"security.api_keys: {where}: must be NAME SHA256HEX [TENANT]")
    name, digest, tenant = parts[0], parts[1], parts[-1] if len(parts) == 3 else parts[0]
    if not (_NAME.fullmatch(name) and _NAME.fullmatch(tenant)):
        raise ConfigError(f"security.api_keys: {where}: names have 1 to 64 letters, digits, '_', '.' and '-'")
    return Entry(name, bytes.fromhex(digest), tenant)
