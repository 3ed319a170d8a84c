"""Answers that a later request may refer to, and the conversations that led to them: written by one router, read by any.

A router stores nothing itself. An answer lies in Redis as a sealed record until it expires:

    version 1 | expiry 8 | MAC 16 | JSON                    bytes; integers little-endian

The MAC is made with the cluster's key over the version, the expiry, the tenant, the id and the JSON, so a record that was altered, or
moved to another id or another tenant, is none. Its name in Redis is a digest of tenant and id: what belongs to another tenant cannot be
told from what does not exist.
"""

import asyncio
import hmac
import json
import logging
import math
import time
from collections.abc import Callable
from hashlib import blake2b
from typing import Any, Protocol

from baton.clock import loop_time
from baton.cluster.registry import RegistryUnavailable

log = logging.getLogger(__name__)
AGAIN_S = 1.0  # pause before the store is asked again after a failure
AT_ONCE_BYTES = 16 << 10  # of a record; a longer one is opened in a thread
_VERSION = b"\x01"
_MAC_BYTES = 16
_HEAD = len(_VERSION) + 8 + _MAC_BYTES
_Json = dict[str, Any]


def seal(value: _Json, key: bytes, tenant: str, id_: str, expires_at: float) -> bytes:
    """`expires_at`: seconds since the epoch. Raises ValueError or RecursionError for a value that JSON cannot hold."""
    expiry = int(expires_at).to_bytes(8, "little")
    body = json.dumps(value, separators=(",", ":")).encode()
    return b"".join((_VERSION, expiry, _mac(key, tenant, id_, expiry, body), body))


def unseal(sealed: bytes, key: bytes, tenant: str, id_: str, now: float) -> _Json | None:
    """None: it was not sealed with this key for this tenant and this id, was altered, or has expired."""
    expiry, mac, body = sealed[1:9], sealed[9:_HEAD], sealed[_HEAD:]
    if not sealed.startswith(_VERSION) or not hmac.compare_digest(mac, _mac(key, tenant, id_, expiry, body)):
        return None
    if now >= int.from_bytes(expiry, "little"):
        return None
    value: _Json = json.loads(body)
    return value


def _mac(key: bytes, tenant: str, id_: str, expiry: bytes, body: bytes) -> bytes:
    made = blake2b(digest_size=_MAC_BYTES, key=key, person=b"baton.answer.mac")
    made.update(_VERSION + expiry)
    for text in (tenant, id_):
        data = text.encode()
        made.update(len(data).to_bytes(8, "little") + data)
    made.update(body)
    return made.digest()


class Answers(Protocol):
    """`tenant` and `name` are in hexadecimal. Every method soon raises RegistryUnavailable if the store cannot be reached."""

    async def put(self, tenant: str, name: str, answer: bytes, life_s: float) -> bool:
        """Whether the answer is kept: there is no room for one that is larger than all together may be."""

    async def get(self, name: str) -> bytes | None:
        """None: there is none of this name, or it has expired or made room."""

    async def delete(self, tenant: str, name: str) -> bool:
        """Whether there was one."""

    async def close(self) -> None:
        """Never raises."""


class Unreachable(Exception):
    """The store does not answer."""


class Kept:
    def __init__(
        self,
        answers: Answers,
        key: bytes,
        life_s: float,
        most_bytes: int,
        clock: Callable[[], float] = loop_time,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """`key`: of the cluster, for receipts (`router.resume.receipt_key`). `most_bytes`: of one record."""
        self._answers = answers
        self._key = key
        self._life_s = life_s
        self._most_bytes = most_bytes
        self._clock = clock
        self._wall_clock = wall_clock
        self._again_at = -math.inf

    async def put(self, tenant: str, id_: str, value: _Json) -> bool:
        """Whether the answer is kept. It is not if it is too large, or the store does not answer. Never raises."""
        if self._clock() < self._again_at:
            return False
        expires_at = self._wall_clock() + self._life_s
        try:
            sealed = await asyncio.to_thread(seal, value, self._key, tenant, id_, expires_at)
        except (ValueError, RecursionError):
            return False
        if len(sealed) > self._most_bytes:
            return False
        try:
            return await self._answers.put(_digest(tenant), _name(tenant, id_), sealed, self._life_s)
        except RegistryUnavailable as error:
            self._pause(error)
            return False

    async def get(self, tenant: str, id_: str) -> _Json | None:
        """None: the tenant has no answer of this id. Raises Unreachable."""
        self._check()
        try:
            sealed = await self._answers.get(_name(tenant, id_))
        except RegistryUnavailable as error:
            self._pause(error)
            raise Unreachable from None
        if sealed is None or len(sealed) > self._most_bytes:
            return None
        arguments = sealed, self._key, tenant, id_, self._wall_clock()
        return unseal(*arguments) if len(sealed) <= AT_ONCE_BYTES else await asyncio.to_thread(unseal, *arguments)

    async def delete(self, tenant: str, id_: str) -> bool:
        """Whether there was one. Raises Unreachable."""
        self._check()
        try:
            return await self._answers.delete(_digest(tenant), _name(tenant, id_))
        except RegistryUnavailable as error:
            self._pause(error)
            raise Unreachable from None

    async def close(self) -> None:
        await self._answers.close()

    def _check(self) -> None:
        """Refuses at once for a moment after a failure: else each request would wait for the same deadline."""
        if self._clock() < self._again_at:
            raise Unreachable

    def _pause(self, error: RegistryUnavailable) -> None:
        self._again_at = self._clock() + AGAIN_S
        log.warning("answers are neither kept nor found: %s", error)


def _digest(tenant: str) -> str:
    return blake2b(tenant.encode(), digest_size=16, person=b"baton.tenant").hexdigest()


def _name(tenant: str, id_: str) -> str:
    return blake2b(id_.encode(), digest_size=16, key=_digest(tenant).encode(), person=b"baton.answer").hexdigest()
