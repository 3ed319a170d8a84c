"""What a reader needs in order to fetch KV: a handle, which is a ticket for a range of positions, and the pieces that follow it.

A handle is minted before the KV is complete and never changes. As the holder seals blocks, it sends `Piece`s that name the blocks of the
range and their digests. A MAC covers every field of both, including the request: every process with the cluster key refuses a handle or
piece that was altered, forged, or moved to another request or lease. Durations cross hosts, absolute times never do.
"""

import hmac
from dataclasses import dataclass, fields, replace
from hashlib import blake2b
from typing import Self

from baton.cluster.errors import BatonError, Reason

MAC_BYTES = 16


@dataclass(frozen=True, slots=True)
class _Sealed:
    """Plain facts and the MAC over all of them. A subclass has the MAC as its last field, `mac`."""

    def sealed(self, key: bytes) -> Self:
        return replace(self, **{"mac": self._compute_mac(key)})

    def is_sealed_with(self, key: bytes) -> bool:
        return hmac.compare_digest(getattr(self, "mac", b""), self._compute_mac(key))

    def _compute_mac(self, key: bytes) -> bytes:
        mac = blake2b(digest_size=MAC_BYTES, key=key, person=f"baton.kv.{type(self).__name__}".encode()[:16])
        for f in fields(self):
            if f.name == "mac":
                continue
            value = getattr(self, f.name)
            data = value if isinstance(value, bytes) else repr(value).encode()
            mac.update(len(data).to_bytes(4, "little") + data)  # length-prefixed: no two objects share an encoding
        return mac.digest()


@dataclass(frozen=True, slots=True)
class KvHandle(_Sealed):
    worker: str
    address: str  # of the worker's KvExchange
    incarnation: int
    lease_id: int
    request_id: str
    start: int  # first position, at the beginning of a block
    end: int  # one past the last position; the last block may be partial
    layout_fingerprint: bytes
    ttl_ms: int
    mac: bytes = b""

    def verify(self, key: bytes, request_id: str) -> None:
        """Raises BatonError(LEASE_REFUSED) unless this handle was made with `key` for this request and has not been altered."""
        if not self.is_sealed_with(key):
            raise BatonError(Reason.LEASE_REFUSED, "the handle was not made with the key of this cluster, or was altered")
        if self.request_id != request_id:
            raise BatonError(Reason.LEASE_REFUSED, "the handle belongs to another request")


@dataclass(frozen=True, slots=True)
class Piece(_Sealed):
    """Blocks of a handle's range that may be read now, in the order of their positions."""

    lease_id: int
    request_id: str
    first: int  # which block of the range `block_ids[0]` is
    block_ids: tuple[int, ...]
    digests: bytes  # 16 bytes a block
    complete: bool  # no piece follows this one
    ttl_ms: int  # how long the lease lives from now
    mac: bytes = b""

    def verify(self, key: bytes, handle: KvHandle) -> None:
        """Raises BatonError(LEASE_REFUSED) unless this piece was made with `key` for the lease of `handle`."""
        if not self.is_sealed_with(key):
            raise BatonError(Reason.LEASE_REFUSED, "the piece was not made with the key of this cluster, or was altered")
        if (self.lease_id, self.request_id) != (handle.lease_id, handle.request_id):
            raise BatonError(Reason.LEASE_REFUSED, "the piece belongs to another lease")


@dataclass(frozen=True, slots=True)
class Wish(_Sealed):
    """A worker's request that another worker lend it cached blocks. It is sealed, so that only workers of the cluster pin each other's
    blocks."""

    worker: str  # the worker that is asked
    incarnation: int
    request_id: str
    start: int  # position of the first key's block
    keys: bytes  # block keys, 16 bytes each
    mac: bytes = b""


def mac_key(cluster_key: str) -> bytes:
    """Derives the MAC key from a cluster key of any length."""
    return blake2b(cluster_key.encode(), digest_size=32, person=b"baton.mac.key").digest()
