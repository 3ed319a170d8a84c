"""The receipt with which a client continues its stream at any router of the cluster. Pure.

A router stores nothing about a stream: what follows is a function of the prompt, the output so far and the resolved parameters, and the
client has all three. The receipt proves that the request was admitted and charged before, and that it is still the same request: it names
the token ids of the prompt (the result of a chat template may depend on the date), the model, the tenant and the request, until it expires.
It does not name the output: a client that alters it gets a continuation of what it sent.

    version 1 | expiry 8 | prompt 16 | model 16 | tenant 16 | request id | MAC 16          bytes; integers little-endian

An expiry is an absolute time that crosses hosts, because nothing is stored that a duration could be counted from. Routers whose clocks
differ by some seconds disagree about a receipt for as long, at the end of a life of minutes.
"""

import hmac
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Self

from baton.cluster.errors import BatonError, Reason, invalid

FIELD = "resume"
DIGEST_BYTES = MAC_BYTES = 16
_VERSION = b"\x01"
_EXPIRY_BYTES = 8
_HEAD = len(_VERSION) + _EXPIRY_BYTES + 3 * DIGEST_BYTES


def receipt_key(cluster_key: str | None, draw: Callable[[int], bytes]) -> bytes:
    """The key of the receipts of a cluster. Without a cluster key it is `draw(32)`, random bytes: then a receipt is good only at the router
    process that made it, and no other one, nor that router after a restart, continues its streams."""
    if not cluster_key:
        return draw(32)
    return blake2b(cluster_key.encode(), digest_size=32, person=b"baton.resume.key").digest()


def prompt_digest(token_ids: Sequence[int]) -> bytes:
    """Ids are hashed as little-endian uint32."""
    return blake2b(array("I", token_ids).tobytes(), digest_size=DIGEST_BYTES, person=b"baton.prompt").digest()


@dataclass(frozen=True, slots=True)
class Receipt:
    request_id: str
    prompt: bytes  # digest
    model: bytes  # digest of the fingerprint
    tenant: bytes  # digest
    expires_at: int  # seconds since the epoch

    @classmethod
    def of(cls, request_id: str, prompt: bytes, model_fingerprint: str, tenant: str, expires_at: float) -> Self:
        return cls(request_id, prompt, _digest(model_fingerprint), _digest(tenant), int(expires_at))

    @classmethod
    def unseal(cls, sealed: bytes, key: bytes) -> Self:
        """Raises INVALID_FIELD unless `sealed` was made with `key` and has not been altered."""
        body, mac = sealed[:-MAC_BYTES], sealed[-MAC_BYTES:]
        if len(body) < _HEAD or not hmac.compare_digest(mac, _mac(body, key)) or not body.startswith(_VERSION):
            raise invalid(FIELD, "is not a receipt of this cluster, or was altered")
        at = len(_VERSION) + _EXPIRY_BYTES
        prompt, model, tenant = (body[i : i + DIGEST_BYTES] for i in range(at, _HEAD, DIGEST_BYTES))
        return cls(body[_HEAD:].decode(), prompt, model, tenant, int.from_bytes(body[len(_VERSION) : at], "little"))

    def sealed(self, key: bytes) -> bytes:
        expiry = self.expires_at.to_bytes(_EXPIRY_BYTES, "little")
        body = b"".join((_VERSION, expiry, self.prompt, self.model, self.tenant, self.request_id.encode()))
        return body + _mac(body, key)

    def check(self, request_id: str, tenant: str, model_fingerprint: str, now: float) -> None:
        """Everything but the prompt, which is not known before it is tokenized. `request_id`: the client's own, empty if it chose none.
        `now`: seconds since the epoch. Raises INVALID_FIELD, and RETRIES_SPENT if the cluster serves another model now."""
        if now >= self.expires_at:
            raise invalid(FIELD, f"has expired {now - self.expires_at:.0f} s ago")
        if self.tenant != _digest(tenant):
            raise invalid(FIELD, "belongs to another tenant")
        if request_id not in ("", self.request_id):
            raise invalid(FIELD, "belongs to another request")
        self.check_model(model_fingerprint)

    def check_model(self, fingerprint: str) -> None:
        """Raises RETRIES_SPENT."""
        if self.model != _digest(fingerprint):
            raise BatonError(Reason.RETRIES_SPENT, "the cluster serves another model now")

    def check_prompt(self, prompt: bytes) -> None:
        """`prompt`: its digest. Raises INVALID_FIELD."""
        if self.prompt != prompt:
            raise invalid(FIELD, "belongs to another prompt: this one has other token ids than the one that the stream began with")


@lru_cache(maxsize=1024)  # of fingerprints and tenants: each request asks for the same few
def _digest(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=DIGEST_BYTES).digest()


def _mac(body: bytes, key: bytes) -> bytes:
    return blake2b(body, digest_size=MAC_BYTES, key=key, person=b"baton.resume.mac").digest()
