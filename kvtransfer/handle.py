"""What a reader needs in order to fetch a lease; minted by the worker that holds the blocks, opaque to everybody between.

The MAC binds every field, the request among them: a handle that was altered, made up, or moved to another request is refused by whoever
holds the cluster key. Durations cross hosts, absolute times never do.
"""

import hmac
from dataclasses import dataclass, fields, replace
from hashlib import blake2b

from baton.cluster.errors import BatonError, Reason

MAC_BYTES = 16


@dataclass(frozen=True, slots=True)
class KvHandle:
    worker: str
    address: str  # of the worker's KvExchange
    incarnation: int
    lease_id: int
    request_id: str
    block_ids: tuple[int, ...]
    digests: bytes  # 16 bytes a block
    tokens: int  # positions that the blocks hold; the last block may be partial
    layout_fingerprint: bytes
    ttl_ms: int
    mac: bytes = b""

    def sealed(self, key: bytes) -> "KvHandle":
        return replace(self, mac=self._compute_mac(key))

    def verify(self, key: bytes, request_id: str) -> None:
        """Raises BatonError(LEASE_REFUSED) unless `key` made this handle, as it is, for this request."""
        if not hmac.compare_digest(self.mac, self._compute_mac(key)):
            raise BatonError(Reason.LEASE_REFUSED, "the handle was not made with the key of this cluster, or was altered")
        if self.request_id != request_id:
            raise BatonError(Reason.LEASE_REFUSED, "the handle belongs to another request")

    def _compute_mac(self, key: bytes) -> bytes:
        mac = blake2b(digest_size=MAC_BYTES, key=key, person=b"baton.kv.handle")
        for f in fields(self):
            if f.name == "mac":
                continue
            value = getattr(self, f.name)
            data = value if isinstance(value, bytes) else repr(value).encode()
            mac.update(len(data).to_bytes(4, "little") + data)  # length-prefixed: no two handles share an encoding
        return mac.digest()


def mac_key(cluster_key: str) -> bytes:
    """The MAC key that a cluster key of any length gives."""
    return blake2b(cluster_key.encode(), digest_size=32, person=b"baton.mac.key").digest()
