"""Answers that a later request may refer to, and the conversations that led to them: written by one router, read by any.

A router stores nothing itself. An answer lies in Redis as a sealed record until it expires:

    version 1 | expiry 8 | MAC 16 | answer                  bytes; integers little-endian

The MAC is made with the cluster's key over the version, the expiry, the tenant, the id and the answer, so a record that was altered, or
moved to another id or another tenant, is none. Its name in Redis is a digest of tenant and id: what belongs to another tenant cannot be
told from what does not exist.
"""

import asyncio
import hmac
import logging
import math
import time
from collections.abc import Awaitable, Callable
from hashlib import blake2b
from typing import Any, Protocol, TypeVar

from baton.clock import loop_time
from baton.cluster.registry import RegistryUnavailable

log = logging.getLogger(__name__)
AGAIN_S = 1.0  # pause before the store is asked again after a failure
AT_ONCE_BYTES = 64 << 10  # of a record; a longer one is sealed and opened in a thread
_VERSION = b"\x01"
_MAC_BYTES = 16
_HEAD = len(_VERSION) + 8 + _MAC_BYTES
T = TypeVar("T")


def seal(answer: bytes, key: bytes, tenant: str, id_: str, expires_at: float) -> bytes:
    """`expires_at`: seconds since the epoch."""
    expiry = int(expires_at).to_bytes(8, "little")
    return b"".join((_VERSION, expiry, _mac(key, tenant, id_, expiry, answer), answer))


def unseal(sealed: bytes, key: bytes, tenant: str, id_: str, now: float) -> bytes | None:
    """None: it was not sealed with this key for this tenant and this id, was altered, or has expired."""
    expiry, mac, answer = sealed[1:9], sealed[9:_HEAD], sealed[_HEAD:]
    if not sealed.startswith(_VERSION) or not hmac.compare_digest(mac, _mac(key, tenant, id_, expiry, answer)):
        return None
    return answer if now < int.from_bytes(expiry, "little") else None


def _mac(key: bytes, tenant: str, id_: str, expiry: bytes, answer: bytes) -> bytes:
    made = blake2b(digest_size=_MAC_BYTES, key=key, person=b"baton.answer.mac")
    made.update(_VERSION + expiry)
    for text in (tenant, id_):
        data = text.encode()
        made.update(len(data).to_bytes(8, "little") + data)
    made.update(answer)
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
        self._away = False

    async def put(self, tenant: str, id_: str, answer: bytes) -> bool:
        """Whether the answer is kept. It is not if it is too large, or the store does not answer. Never raises."""
        if self._clock() < self._again_at or len(answer) + _HEAD > self._most_bytes:
            return False
        sealed = await _run(len(answer), seal, answer, self._key, tenant, id_, self._wall_clock() + self._life_s)
        try:
            return await self._ask(self._answers.put(_digest(tenant), _name(tenant, id_), sealed, self._life_s))
        except Unreachable:
            return False

    async def get(self, tenant: str, id_: str) -> bytes | None:
        """None: the tenant has no answer of this id. Raises Unreachable."""
        self._check()
        sealed = await self._ask(self._answers.get(_name(tenant, id_)))
        if sealed is None or len(sealed) > self._most_bytes:
            return None
        return await _run(len(sealed), unseal, sealed, self._key, tenant, id_, self._wall_clock())

    async def delete(self, tenant: str, id_: str) -> bool:
        """Whether there was one. Raises Unreachable."""
        self._check()
        return await self._ask(self._answers.delete(_digest(tenant), _name(tenant, id_)))

    async def close(self) -> None:
        await self._answers.close()

    def _check(self) -> None:
        """Refuses at once for a moment after a failure: else each request would wait for the same deadline."""
        if self._clock() < self._again_at:
            raise Unreachable

    async def _ask(self, question: Awaitable[T]) -> T:
        try:
            answer = await question
        except RegistryUnavailable as error:
            self._again_at = self._clock() + AGAIN_S
            if not self._away:
                log.warning("answers are neither kept nor found: %s", error)
            self._away = True
            raise Unreachable from None
        self._away = False
        return answer


async def _run(size: int, function: Callable[..., T], *arguments: Any) -> T:
    return function(*arguments) if size <= AT_ONCE_BYTES else await asyncio.to_thread(function, *arguments)


def _digest(tenant: str) -> str:
    return blake2b(tenant.encode(), digest_size=16, person=b"baton.tenant").hexdigest()


def _name(tenant: str, id_: str) -> str:
    return blake2b(id_.encode(), digest_size=16, key=_digest(tenant).encode(), person=b"baton.answer").hexdigest()
