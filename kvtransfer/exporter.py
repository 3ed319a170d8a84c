"""The side that holds the blocks: leases them, answers for the leases, frees what expired."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from time import monotonic

from baton.cluster.errors import BatonError, Reason
from baton.cluster.failpoint import failpoint
from baton.engine.kvcache import KvLayout, KvPool
from kvtransfer.digest import INLINE_BYTES, block_digests
from kvtransfer.handle import KvHandle
from kvtransfer.lease import LeaseTable

log = logging.getLogger(__name__)


class Exporter:
    """`free(holder)` is told once for each lease that ends, however it ends: the blocks it pinned may go. It must not wait: whoever
    releases learns at once whether the lease was alive."""

    def __init__(
        self,
        *,
        worker: str,
        incarnation: int,
        address: str,
        pool: KvPool,
        key: bytes,
        ttl_s: float,
        free: Callable[[str], None],
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self._address = address
        self._pool = pool
        self._key = key
        self._free = free
        self._clock = clock
        self._leases = LeaseTable(ttl_s)
        self._holders: dict[int, str] = {}  # lease id → who holds the blocks
        # So far. late: asked for after its end; fenced: a handle that is forged, another request's, or of an earlier process.
        self.events = dict.fromkeys(("granted", "renewed", "released", "expired", "late", "fenced"), 0)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    async def grant(self, holder: str, request_id: str, block_ids: Sequence[int], tokens: int) -> KvHandle:
        """Lease blocks that `holder` keeps and that nobody writes any more, for `request_id` alone."""
        if len(block_ids) * self._pool.layout.block_bytes <= INLINE_BYTES:
            digests = block_digests(self._pool, block_ids)
        else:
            digests = await asyncio.to_thread(block_digests, self._pool, block_ids)
        if failpoint("kv.exported"):
            self._pool.block(block_ids[0])[0] ^= 1
        lease = self._leases.grant(request_id, self._clock())
        self._holders[lease.id] = holder
        self.events["granted"] += 1
        handle = KvHandle(
            worker=self.worker,
            address=self._address,
            incarnation=self.incarnation,
            lease_id=lease.id,
            request_id=request_id,
            block_ids=tuple(block_ids),
            digests=digests,
            tokens=tokens,
            layout_fingerprint=self._pool.layout.fingerprint,
            ttl_ms=int(self._leases.ttl * 1000),
        )
        return handle.sealed(self._key)

    def handshake(self, theirs: KvLayout) -> None:
        """Raises BatonError(HANDSHAKE_MISMATCH) naming the field in which a reader's KV differs from ours."""
        check_layout(self._pool.layout, theirs)

    def renew(self, handle: KvHandle, request_id: str) -> int:
        """Milliseconds that the lease lives from now. Raises BatonError(LEASE_REFUSED or LEASE_EXPIRED)."""
        self._check(handle, request_id)
        if not self._leases.renew(handle.lease_id, self._clock()):
            self.events["late"] += 1
            raise BatonError(Reason.LEASE_EXPIRED, f"lease {handle.lease_id} of {self.worker} was released or expired")
        self.events["renewed"] += 1
        return int(self._leases.ttl * 1000)

    def release(self, handle: KvHandle, request_id: str) -> bool:
        """End the lease. True: it was alive until now, so whatever was read under it was the leased KV."""
        self._check(handle, request_id)
        lease = self._leases.release(handle.lease_id, self._clock())
        if lease is None:
            self.events["late"] += 1
            return False
        self.events["released"] += 1
        self._free(self._holders.pop(lease.id))
        return True

    def reap(self) -> int:
        """Free what expired leases pinned. Returns how many there were."""
        expired = self._leases.expire(self._clock())
        self.events["expired"] += len(expired)
        for lease in expired:
            log.info("lease %d expired", lease.id)
            self._free(self._holders.pop(lease.id))
        return len(expired)

    async def run_reaper(self, interval_s: float) -> None:
        """On its own timer: leases end when their time is over, not when new work happens to come."""
        while True:
            await asyncio.sleep(interval_s)
            self.reap()

    def _check(self, handle: KvHandle, request_id: str) -> None:
        try:
            handle.verify(self._key, request_id)
            if (handle.worker, handle.incarnation) != (self.worker, self.incarnation):
                raise BatonError(
                    Reason.LEASE_REFUSED,
                    f"the handle is from {handle.worker}:{handle.incarnation}; this is {self.worker}:{self.incarnation}",
                )
        except BatonError:
            self.events["fenced"] += 1
            raise


def check_layout(mine: KvLayout, theirs: KvLayout) -> None:
    difference = mine.difference(theirs)
    if difference is not None:
        raise BatonError(Reason.HANDSHAKE_MISMATCH, difference, metadata={"field": difference.partition(":")[0]})
