"""The side that needs the KV: shake hands, read, verify. Nothing it returns was not proven.

    fetch = importer.open(handle, request_id)     MAC, request, layout
    async with fetch.holding():                   the lease is renewed while we wait for room
        await fetch.read(pairs)                   handshake (once per peer) → read inside the lease → digests → lease still alive
    importer.dispose(fetch, blocks)               after any failure: blocks go back once no byte can land in them

A transport cannot be cancelled. A read that was given up goes on until it settles, so its destination stays in quarantine that long.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic, perf_counter
from typing import Protocol

from baton.cluster.errors import BatonError, Reason
from baton.cluster.failpoint import failpoint
from baton.cluster.handoff import Handoff
from baton.engine.kvcache import KvLayout, KvPool
from kvtransfer.digest import DIGEST_BYTES, INLINE_BYTES, mismatches
from kvtransfer.exporter import check_layout
from kvtransfer.handle import KvHandle
from kvtransfer.transport import ReadPending, Transport

log = logging.getLogger(__name__)
READERS = 4  # reads at once; each blocks a thread
SETTLE_POLL_S = 0.05


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """What a worker says of itself in the handshake."""

    worker: str
    incarnation: int
    layout: KvLayout
    transport_address: bytes


class Peer(Protocol):
    """The exporter at the other end of the wire. Every call has a deadline and raises BatonError."""

    async def handshake(self, layout: KvLayout, transport: str) -> PeerFacts: ...

    async def renew(self, handle: KvHandle) -> float:
        """Seconds the lease lives from now."""
        ...

    async def release(self, handle: KvHandle) -> bool:
        """Whether it was alive until now."""
        ...


@dataclass(frozen=True, slots=True)
class Checks:
    """All on. A test turns one off to show what it protects from."""

    digests: bool = True
    lease: bool = True
    layout: bool = True


class Importer:
    def __init__(
        self,
        *,
        transport: Transport,
        pool: KvPool,
        key: bytes,
        connect: Callable[[str], Peer],
        free: Callable[[Sequence[int]], Awaitable[None]],
        read_timeout_s: float,
        checks: Checks | None = None,
    ) -> None:
        self.transport = transport
        self.pool = pool
        self.checks = checks or Checks()
        self.read_timeout_s = read_timeout_s
        self._key = key
        self._connect = connect
        self._free = free
        self._handshakes: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._quarantine: dict[asyncio.Task[None], int] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self.threads = ThreadPoolExecutor(READERS, thread_name_prefix="kv-read")

    @property
    def quarantined_blocks(self) -> int:
        return sum(self._quarantine.values())

    def open(self, handle: KvHandle, request_id: str) -> "Fetch":
        """Raises BatonError(LEASE_REFUSED, HANDSHAKE_MISMATCH) for a handle that must not be used here."""
        handle.verify(self._key, request_id)
        if self.checks.layout and handle.layout_fingerprint != self.pool.layout.fingerprint:
            raise BatonError(Reason.HANDSHAKE_MISMATCH, "layout_fingerprint: the KV behind the handle is laid out differently")
        blocks = -(-handle.tokens // self.pool.layout.block_size)
        if not len(handle.block_ids) == blocks == len(handle.digests) / DIGEST_BYTES:
            raise BatonError(Reason.LEASE_REFUSED, f"the handle names {len(handle.block_ids)} blocks for {handle.tokens} tokens")
        return Fetch(self, handle, self._connect(handle.address))

    async def shake_hands(self, handle: KvHandle, peer: Peer) -> str:
        """Once per worker and incarnation, however many requests wait for it. Returns the transport's name of the peer."""
        identity = (handle.worker, handle.incarnation)
        task = self._handshakes.get(identity)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._shake_hands(handle, peer))
            self._handshakes[identity] = task
        await asyncio.shield(task)
        return peer_name(*identity)

    async def _shake_hands(self, handle: KvHandle, peer: Peer) -> None:
        facts = await peer.handshake(self.pool.layout, self.transport.name)
        if (facts.worker, facts.incarnation) != (handle.worker, handle.incarnation):
            raise BatonError(Reason.LEASE_REFUSED, f"{handle.address} is {facts.worker} incarnation {facts.incarnation} now")
        if self.checks.layout:
            check_layout(self.pool.layout, facts.layout)
        await self.in_thread(self._drop_older, handle)
        await self.in_thread(self.transport.connect, peer_name(handle.worker, handle.incarnation), facts.transport_address)

    def _drop_older(self, handle: KvHandle) -> None:
        for worker, incarnation in list(self._handshakes):
            if worker == handle.worker and incarnation != handle.incarnation:
                self._handshakes.pop((worker, incarnation), None)
                self.transport.disconnect(peer_name(worker, incarnation))

    def lost(self, handle: KvHandle) -> None:
        """Reads from this peer fail: the next one shakes hands anew. Disconnected, what is pending from a dead peer settles."""
        self._handshakes.pop((handle.worker, handle.incarnation), None)
        self.threads.submit(self.transport.disconnect, peer_name(handle.worker, handle.incarnation))

    async def in_thread(self, function: Callable[..., None], *args: object) -> None:
        await asyncio.wrap_future(self.threads.submit(function, *args))

    async def dispose(self, fetch: "Fetch | None", blocks: Sequence[int]) -> None:
        """Give blocks back that a fetch was to fill: at once if nothing can land in them, else when that is so."""
        if not blocks:
            return
        if fetch is None or fetch.settled():
            await self._free(blocks)
            return
        task = asyncio.create_task(self._free_later(fetch, blocks))
        self._quarantine[task] = len(blocks)
        task.add_done_callback(lambda done: self._quarantine.pop(done, None))

    def release_later(self, fetch: "Fetch") -> None:
        """Tell the holder that nobody will read, without waiting for its answer: it may be the one that hangs."""
        task = asyncio.create_task(fetch.release())
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _free_later(self, fetch: "Fetch", blocks: Sequence[int]) -> None:
        while not fetch.settled():
            await asyncio.sleep(SETTLE_POLL_S)
        await self._free(blocks)

    async def close(self) -> None:
        tasks = [*self._quarantine, *self._releases, *self._handshakes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(self.threads.shutdown)


class Fetch:
    """One handle on its way into our pool."""

    def __init__(self, importer: Importer, handle: KvHandle, peer: Peer) -> None:
        self.handle = handle
        self.report = Handoff()
        self._importer = importer
        self._peer = peer
        self._reading: Future[None] | None = None
        self._pending: ReadPending | None = None

    def settled(self) -> bool:
        """Whether no byte can land any more."""
        if self._reading is not None and not self._reading.done():
            return False
        if self._reading is not None and not self._reading.cancelled() and isinstance(error := self._reading.exception(), ReadPending):
            self._pending = error
        return self._pending is None or self._pending.settled()

    @asynccontextmanager
    async def holding(self) -> AsyncIterator[None]:
        """Renew the lease for as long as the body takes. A renewal that fails is left to the checks after the copy."""
        task = asyncio.create_task(self._renew())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def _renew(self) -> None:
        ttl = self.handle.ttl_ms / 1000
        while True:
            await asyncio.sleep(ttl / 3)
            try:
                ttl = await self._peer.renew(self.handle)
            except BatonError as error:
                log.info("lease %d of %s is not renewed: %s", self.handle.lease_id, self.handle.worker, error)
                return

    async def read(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Fetch the handle's blocks `i` into our blocks `b` for each (i, b) of `pairs`, and end the lease.

        Returns only if every byte is what was leased. Raises BatonError otherwise; the destination must then not be used.
        """
        importer, handle = self._importer, self.handle
        if pairs:
            await self._copy(pairs)
            started = perf_counter()
            if importer.checks.digests:
                await self._compare(pairs)
            self.report.verify_ms = (perf_counter() - started) * 1000
        failpoint("kv.before_check")
        started = perf_counter()
        was_held = await self._peer.release(handle)
        self.report.verify_ms += (perf_counter() - started) * 1000
        if pairs and importer.checks.lease and not was_held:
            raise BatonError(Reason.LEASE_EXPIRED, f"lease {handle.lease_id} of {handle.worker} ended before the read did")

    async def release(self) -> None:
        """Tell the holder that nobody will read. Best effort: the lease expires anyhow."""
        try:
            await self._peer.release(self.handle)
        except BatonError as error:
            log.debug("release of lease %d: %s", self.handle.lease_id, error)

    async def _copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        importer, handle = self._importer, self.handle
        name = await importer.shake_hands(handle, self._peer)
        self.report.transport = importer.transport.carrier(name)
        lives_s = await self._peer.renew(handle)  # alive now, and for so long from now
        timeout = min(importer.read_timeout_s, lives_s * 0.9)
        failpoint("kv.before_read")
        remote, local = [handle.block_ids[i] for i, _ in pairs], [block for _, block in pairs]
        started, deadline = perf_counter(), monotonic() + lives_s
        self._reading = importer.threads.submit(importer.transport.read, name, remote, local, timeout)
        try:
            await asyncio.wrap_future(self._reading)
        except BatonError:
            importer.lost(handle)
            raise
        self.report.read_ms = (perf_counter() - started) * 1000
        if importer.checks.lease and monotonic() > deadline:
            raise BatonError(Reason.LEASE_EXPIRED, f"the read outlasted lease {handle.lease_id} of {handle.worker}")
        self.report.blocks = len(pairs)
        self.report.bytes = len(pairs) * importer.pool.layout.block_bytes
        if failpoint("kv.copied"):
            importer.pool.block(local[0])[0] ^= 1

    async def _compare(self, pairs: Sequence[tuple[int, int]]) -> None:
        digests = self.handle.digests
        expected = b"".join(digests[i * DIGEST_BYTES : (i + 1) * DIGEST_BYTES] for i, _ in pairs)
        pool, blocks = self._importer.pool, [block for _, block in pairs]
        if len(blocks) * pool.layout.block_bytes <= INLINE_BYTES:
            wrong = mismatches(pool, blocks, expected)
        else:
            wrong = await asyncio.to_thread(mismatches, pool, blocks, expected)
        self.report.digests_checked, self.report.digests_failed = len(pairs), len(wrong)
        if wrong:
            raise BatonError(
                Reason.DIGEST_MISMATCH, f"{len(wrong)} of {len(pairs)} blocks from {self.handle.worker} are not what was leased"
            )


def peer_name(worker: str, incarnation: int) -> str:
    """How a transport knows a worker: a restarted one is another peer."""
    return f"{worker}:{incarnation}"
