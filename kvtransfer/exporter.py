"""The side that holds the blocks. It leases them, tells readers which are ready, renews and ends leases, and frees blocks afterwards.

export = exporter.open(request_id, 0, n, ended)     before or while the KV is computed: a handle for positions 0 to n
export.publish(blocks)                              these leading blocks are full now; they are digested in the background
export.finish(blocks)                               the range is complete
exporter.piece(handle, ...)                         a reader asks for further blocks that are ready; waits if there are none
exporter.release(handle, ...)                       the reader is done; the answer says whether the lease was alive until now
"""

import asyncio
import logging
from collections.abc import Callable, Sequence

from baton.clock import loop_time
from baton.cluster.errors import BatonError, Reason
from baton.cluster.failpoint import failpoint
from baton.engine.core.kvcache import DIGEST_BYTES, KvLayout, Pool
from kvtransfer.digest import at_once
from kvtransfer.handle import KvHandle, Piece
from kvtransfer.lease import LeaseTable

log = logging.getLogger(__name__)
MAX_WAIT_S = 5.0  # longest wait of one `piece` call; the reader then asks again, which also shows that it is alive


class Export:
    """What one lease covers, and how much of it is ready. Only one task calls `publish` and `finish`."""

    def __init__(self, exporter: "Exporter", handle: KvHandle, ended: Callable[[], None]) -> None:
        self.handle = handle
        self.ended = ended
        self.alive = True
        self.complete = False
        self.block_ids: list[int] = []
        self.on_host = 0  # how many of them, from the first on, those can read that go through the host
        self.digests = bytearray()
        self._exporter = exporter
        self._num_blocks = -(-(handle.end - handle.start) // exporter.pool.layout.block_size)
        self._wanted: list[int] = []  # blocks that are full; those beyond `block_ids` are being digested
        self._digesting: asyncio.Task[None] | None = None
        self._grown = asyncio.Event()

    def publish(self, block_ids: Sequence[int]) -> None:
        """`block_ids` are the leading blocks of the range, full and no longer written. Blocks may be published more than once."""
        self._wanted = list(block_ids)
        if self._digesting is None or self._digesting.done():
            self._digesting = asyncio.create_task(self._digest())

    def finish(self, block_ids: Sequence[int]) -> bool:
        """Publishes blocks as `publish` does and marks the range complete. Does not wait for the digests: the reader needs them, the first
        token does not.

        Returns False and does nothing if the lease has ended.
        """
        if not self._exporter.completed(self):
            return False
        self.publish(block_ids)
        assert self._digesting is not None
        self._digesting.add_done_callback(self._completed)
        return True

    async def expose(self) -> None:
        """Brings all blocks that are ready to where readers find them that go through the host."""
        ready = len(self.block_ids)
        if self.on_host < ready:
            await self._exporter.expose(self.block_ids[self.on_host : ready])
            self.on_host = max(self.on_host, ready)

    async def wait_beyond(self, first: int, timeout_s: float) -> None:
        """Waits until more than `first` blocks are ready, the range is complete, the lease has ended, or the time is up."""
        try:
            async with asyncio.timeout(timeout_s):
                while self.alive and not self.complete and len(self.block_ids) <= first:
                    self._grown.clear()
                    await self._grown.wait()
        except TimeoutError:
            pass

    def end(self) -> None:
        """The lease has ended, for whatever reason: no more blocks are announced, and the holder may free them."""
        self.alive = False
        if self._digesting is not None:
            self._digesting.cancel()
        self._grown.set()
        self.ended()

    async def _digest(self) -> None:
        while len(self.block_ids) < len(self._wanted):
            fresh = self._wanted[len(self.block_ids) :]
            exposed = self._exporter.through_host
            if exposed:
                await self._exporter.expose(fresh)
            digests = await self._exporter.digest(fresh)
            if not self.alive:
                return
            if exposed and self.on_host == len(self.block_ids):
                self.on_host += len(fresh)
            # Only in the last piece: the holder still computes with the KV of earlier pieces, so its own tokens would be wrong, too.
            if len(self.block_ids) + len(fresh) == self._num_blocks and failpoint("kv.exported"):
                self._exporter.pool.flip(fresh[0])
            self.block_ids += fresh
            self.digests += digests
            self._grown.set()

    def _completed(self, done: asyncio.Task[None]) -> None:
        if done.cancelled():
            return
        if done.exception() is not None:
            log.error("cannot digest the blocks of lease %d", self.handle.lease_id, exc_info=done.exception())
            self._exporter.revoke(self)
            return
        self.complete = True
        self._grown.set()


class Exporter:
    def __init__(
        self,
        *,
        worker: str,
        incarnation: int,
        address: str,
        pool: Pool,
        key: bytes,
        ttl_s: float,
        clock: Callable[[], float] = loop_time,
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self.pool = pool
        # Whether all blocks are exposed as soon as they are ready. If peers may reach them otherwise, only from the first on that cannot.
        self.through_host = not pool.direct
        self._address = address
        self._key = key
        self._clock = clock
        self._leases = LeaseTable(ttl_s)
        self._exports: dict[int, Export] = {}  # by lease
        # Counts so far. late: the lease had already ended; fenced: the handle was forged, or is another request's or an earlier process's.
        self.events = dict.fromkeys(("granted", "renewed", "released", "revoked", "expired", "late", "fenced"), 0)

    @property
    def num_leases(self) -> int:
        return len(self._leases)

    def open(self, request_id: str, start: int, end: int, ended: Callable[[], None]) -> Export:
        """Leases positions `start` (at the beginning of a block) to `end` to `request_id` alone.

        `ended` is called once, when the lease ends for any reason: the blocks that it pinned may then be freed. It must not block,
        because a reader that releases the lease learns immediately whether the lease was alive.
        """
        lease = self._leases.grant()
        self.events["granted"] += 1
        handle = KvHandle(
            worker=self.worker,
            address=self._address,
            incarnation=self.incarnation,
            lease_id=lease.id,
            request_id=request_id,
            start=start,
            end=end,
            layout_fingerprint=self.pool.layout.fingerprint,
            ttl_ms=int(self._leases.ttl * 1000),
        )
        export = self._exports[lease.id] = Export(self, handle.sealed(self._key), ended)
        return export

    def completed(self, export: Export) -> bool:
        """The holder has computed the whole range. Returns False if the lease has ended."""
        return self._leases.complete(export.handle.lease_id, self._clock())

    def revoke(self, export: Export) -> None:
        """The holder takes its blocks back. Readers learn this from the answer to their release."""
        if self._leases.revoke(export.handle.lease_id, self._clock()) is not None:
            self.events["revoked"] += 1
            self._end(export.handle.lease_id)

    async def digest(self, block_ids: Sequence[int]) -> bytes:
        """Returns DIGEST_BYTES for each block. Computes in a thread where the event loop would be blocked for too long."""
        if at_once(self.pool, len(block_ids)):
            return self.pool.digests(block_ids)
        return await asyncio.to_thread(self.pool.digests, block_ids)

    async def expose(self, block_ids: Sequence[int]) -> None:
        """See `Pool.expose`."""
        if self.pool.waits:
            await asyncio.to_thread(self.pool.expose, block_ids)

    def handshake(self, theirs: KvLayout) -> None:
        """Raises BatonError(HANDSHAKE_MISMATCH) naming the field in which a reader's KV differs from ours."""
        check_layout(self.pool.layout, theirs)

    async def piece(self, handle: KvHandle, request_id: str, first: int, wait_s: float, direct: bool = False) -> Piece:
        """Returns the blocks of the range that are ready, from the `first` on. If there are none, waits up to `wait_s` for one. Renews the
        lease before and after the wait. `direct`: the reader does not go through the host. Raises BatonError(LEASE_REFUSED or
        LEASE_EXPIRED)."""
        self.renew(handle, request_id)
        export = self._exports[handle.lease_id]
        if first < 0:
            raise BatonError(Reason.LEASE_REFUSED, f"there is no block {first}")
        if not export.complete and len(export.block_ids) <= first:
            if first:
                failpoint("kv.caught_up")  # the reader has everything that is ready
            await export.wait_beyond(first, min(wait_s, MAX_WAIT_S))
            self.renew(handle, request_id)
        if not direct and export.on_host < len(export.block_ids):
            self.through_host = True
            await export.expose()
            self.renew(handle, request_id)
        end = len(export.block_ids) if direct else export.on_host
        piece = Piece(
            lease_id=handle.lease_id,
            request_id=request_id,
            first=first,
            block_ids=tuple(export.block_ids[first:end]),
            digests=bytes(export.digests[first * DIGEST_BYTES : end * DIGEST_BYTES]),
            complete=export.complete and end == len(export.block_ids),
            ttl_ms=int(self._leases.ttl * 1000),
        )
        return piece.sealed(self._key)

    def renew(self, handle: KvHandle, request_id: str) -> int:
        """Renews the lease. Returns for how many milliseconds it lives from now. Raises BatonError(LEASE_REFUSED or LEASE_EXPIRED)."""
        self._check(handle, request_id)
        if not self._leases.renew(handle.lease_id, self._clock()):
            self.events["late"] += 1
            raise BatonError(Reason.LEASE_EXPIRED, f"lease {handle.lease_id} of {self.worker} has ended")
        self.events["renewed"] += 1
        return int(self._leases.ttl * 1000)

    def release(self, handle: KvHandle, request_id: str) -> bool:
        """Ends the lease. Returns True if it was alive until now: then everything read under it was the leased KV."""
        self._check(handle, request_id)
        lease = self._leases.release(handle.lease_id, self._clock())
        if lease is None:
            self.events["late"] += 1
            return False
        self.events["released"] += 1
        self._end(lease.id)
        return True

    def reap(self) -> int:
        """Frees the blocks of expired leases. Returns the number of these leases."""
        expired = self._leases.expire(self._clock())
        self.events["expired"] += len(expired)
        for lease in expired:
            log.info("lease %d expired", lease.id)
            self._end(lease.id)
        return len(expired)

    async def run_reaper(self, interval_s: float) -> None:
        """Reaps on its own timer, so that leases end when their time is up, not when new work happens to arrive."""
        while True:
            await asyncio.sleep(interval_s)
            self.reap()

    def _end(self, lease_id: int) -> None:
        self._exports.pop(lease_id).end()

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
