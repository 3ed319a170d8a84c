"""The side that needs the KV: it shakes hands, reads and verifies. It returns only KV that it has verified.

    fetch = importer.open(handle, request_id)     checks the MAC, the request and the layout
    async with fetch.holding():                   the lease is renewed while we wait for room
        await fetch.read(blocks, skip)            reads each piece within the lease as the holder makes it ready; compares digests while
                                                  the next piece is read; finally asks whether the lease was alive until the end
    importer.dispose(fetch, blocks)               after any failure: blocks go back once no byte can land in them

A transport cannot be cancelled. An abandoned read goes on until it settles; until then its destination stays in quarantine.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from baton.cluster.errors import BatonError, Reason
from baton.cluster.failpoint import failpoint
from baton.cluster.handoff import Handoff
from baton.engine.core.kvcache import DIGEST_BYTES, KvLayout, Pool
from kvtransfer.digest import at_once, mismatches
from kvtransfer.exporter import check_layout
from kvtransfer.handle import KvHandle, Piece, Wish
from kvtransfer.transport import ReadPending, Route, Transport, transfer_failed

log = logging.getLogger(__name__)
READERS = 4  # concurrent reads; each blocks a thread
PIECE_WAIT_S = 1.0  # how long the holder may wait for a block to become ready before it answers that there is none yet
SETTLE_POLL_S = 0.05
_Identity = tuple[str, int]  # name and incarnation of a worker


@dataclass(frozen=True, slots=True)
class PeerFacts:
    """What a worker says about itself in the handshake."""

    worker: str
    incarnation: int
    layout: KvLayout
    transport_address: bytes


class Peer(Protocol):
    """The exporter at the other end of the wire. Every call has a deadline and raises BatonError."""

    async def handshake(self, layout: KvLayout, transport: str) -> PeerFacts: ...

    async def piece(self, handle: KvHandle, first: int, wait_s: float, direct: bool) -> Piece:
        """Returns the ready blocks of the range, from the `first` on. If there are none, waits up to `wait_s` for one. Renews the lease.
        `direct`: they need not be in the host's memory."""
        ...

    async def renew(self, handle: KvHandle) -> float:
        """Returns for how many seconds the lease lives from now."""
        ...

    async def release(self, handle: KvHandle) -> bool:
        """Returns whether the lease was alive until now."""
        ...

    async def lend(self, wish: Wish) -> KvHandle:
        """Returns a handle for the longest cached run of the requested blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Checks:
    """All are on by default. A test turns one off to show what it protects against."""

    digests: bool = True
    lease: bool = True
    layout: bool = True


class Importer:
    def __init__(
        self,
        *,
        transport: Transport,
        pool: Pool,
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
        self.key = key
        self._connect = connect
        self._free = free
        self._handshakes: dict[_Identity, asyncio.Task[None]] = {}
        self._reads: Counter[_Identity] = Counter()  # how many fetches are reading from each peer
        self._broken: dict[_Identity, asyncio.Event] = {}  # peers to reconnect once nothing reads from them any more
        self._quarantine: dict[asyncio.Task[None], int] = {}
        self._releases: set[asyncio.Task[None]] = set()
        self.readers = ThreadPoolExecutor(READERS, thread_name_prefix="kv-read")
        self._links = ThreadPoolExecutor(READERS, thread_name_prefix="kv-link")  # connecting never waits behind reads

    @property
    def quarantined_blocks(self) -> int:
        return sum(self._quarantine.values())

    def routes(self) -> list[Route]:
        """How KV of the peers comes here now."""
        names = [peer_name(*identity) for identity, task in self._handshakes.items() if task.done()]
        return list(filter(None, map(self.transport.route, names)))

    def probed(self) -> dict[str, float]:
        """The lowest rate, in bytes/s, that probes measured at connect, by what carries KV now."""
        rates: dict[str, float] = {}
        for route in self.routes():
            if route.rate:
                rates[route.carrier] = min(route.rate, rates.get(route.carrier, route.rate))
        return rates

    def open(self, handle: KvHandle, request_id: str, live: Callable[[], bool] = lambda: False) -> "Fetch":
        """`live`: whether the prompt is still being computed, asked whenever blocks have moved.

        Raises BatonError(LEASE_REFUSED, HANDSHAKE_MISMATCH) for a handle that must not be used here."""
        handle.verify(self.key, request_id)
        if self.checks.layout and handle.layout_fingerprint != self.pool.layout.fingerprint:
            raise BatonError(Reason.HANDSHAKE_MISMATCH, "layout_fingerprint: the KV behind the handle is laid out differently")
        if not 0 <= handle.start < handle.end or handle.start % self.pool.layout.block_size:
            raise BatonError(Reason.LEASE_REFUSED, f"the handle is for positions {handle.start} to {handle.end}")
        return Fetch(self, handle, self._connect(handle.address), live)

    async def borrow(self, worker: str, incarnation: int, address: str, request_id: str, start: int, keys: Sequence[bytes]) -> "Fetch":
        """Asks a worker for blocks in its prefix cache: those of `keys`, the first of which begins at position `start`.

        Raises BatonError; LEASE_REFUSED if the worker caches none of them.
        """
        wish = Wish(worker, incarnation, request_id, start, b"".join(keys)).sealed(self.key)
        handle = await self._connect(address).lend(wish)
        if (handle.worker, handle.incarnation, handle.start) != (worker, incarnation, start):
            raise BatonError(Reason.LEASE_REFUSED, f"{address} is {handle.worker} incarnation {handle.incarnation} now")
        return self.open(handle, request_id)

    async def shake_hands(self, handle: KvHandle, peer: Peer) -> str:
        """Runs once per worker and incarnation, however many requests wait for it. Returns the transport's name for the peer.

        A peer that failed a read is reconnected after its other reads have ended, because disconnecting would fail them, too.
        """
        identity = (handle.worker, handle.incarnation)
        while (drained := self._broken.get(identity)) is not None:
            try:
                async with asyncio.timeout(2 * self.read_timeout_s):
                    await drained.wait()
            except TimeoutError:
                raise transfer_failed(f"earlier reads from {handle.worker} have not ended") from None
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
        for worker, incarnation in list(self._handshakes):
            if worker == handle.worker and incarnation != handle.incarnation:
                del self._handshakes[worker, incarnation]
                await self._in_link_thread(self.transport.disconnect, peer_name(worker, incarnation))
        await self._in_link_thread(self.transport.connect, peer_name(handle.worker, handle.incarnation), facts.transport_address)

    @asynccontextmanager
    async def reading(self, handle: KvHandle) -> AsyncIterator[None]:
        """Wraps everything that reads from a peer. A failed transfer inside marks the peer for reconnection."""
        identity = (handle.worker, handle.incarnation)
        self._reads[identity] += 1
        try:
            yield
        except BatonError as error:
            if error.reason is Reason.TRANSFER_FAILED:
                self._broken.setdefault(identity, asyncio.Event())
            raise
        finally:
            self._reads[identity] -= 1
            if not self._reads[identity]:
                del self._reads[identity]
                self._disconnect_broken(identity)

    def _disconnect_broken(self, identity: _Identity) -> None:
        """Disconnects a peer that failed a read, so that pending reads from a dead peer settle."""
        drained = self._broken.pop(identity, None)
        if drained is not None:
            self._handshakes.pop(identity, None)
            self._links.submit(self.transport.disconnect, peer_name(*identity))
            drained.set()

    async def _in_link_thread(self, function: Callable[..., None], *args: object) -> None:
        await asyncio.wrap_future(self._links.submit(function, *args))

    async def dispose(self, fetch: "Fetch | None", blocks: Sequence[int]) -> None:
        """Frees blocks that a fetch was to fill: immediately if no byte can land in them any more, otherwise once that is the case."""
        if not blocks:
            return
        if fetch is None or fetch.settled():
            await self._free(blocks)
            return
        task = asyncio.create_task(self._free_later(fetch, blocks))
        self._quarantine[task] = len(blocks)
        task.add_done_callback(lambda done: self._quarantine.pop(done, None))

    def release_later(self, fetch: "Fetch") -> None:
        """Tells the holder that nobody will read, without waiting for its answer: the holder itself may hang."""
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
        for threads in (self.readers, self._links):
            await asyncio.to_thread(threads.shutdown)


class Fetch:
    """The transfer of one handle's KV into our pool."""

    def __init__(self, importer: Importer, handle: KvHandle, peer: Peer, live: Callable[[], bool]) -> None:
        self.handle = handle
        self.report = Handoff()
        self.num_blocks = -(-(handle.end - handle.start) // importer.pool.layout.block_size)
        self._importer = importer
        self._peer = peer
        self._live = live
        self._now = asyncio.get_running_loop().time  # a reader thread has no loop
        self._alive_until = 0.0  # on our clock: the lease is alive at least until then. Every renewal moves it.
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
        """Renews the lease while the body runs. A failed renewal raises nothing here: `read` itself checks that the lease is alive."""
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
            asked = self._now()
            try:
                ttl = await self._peer.renew(self.handle)
            except BatonError as error:
                log.info("lease %d of %s was not renewed: %s", self.handle.lease_id, self.handle.worker, error)
                return
            self._alive_until = asked + ttl

    async def read(self, blocks: Sequence[int], skip: int = 0) -> None:
        """Fetches the range's blocks from the `skip`-th on into `blocks`, as they become ready, and ends the lease.

        Returns only if every byte is what was leased. Otherwise raises BatonError, and the destination must not be used.
        """
        if len(blocks) != self.num_blocks - skip:
            raise BatonError(Reason.LEASE_REFUSED, f"{len(blocks)} blocks for {self.num_blocks - skip} of the handle")
        if blocks:
            started = self._now()
            name = await self._importer.shake_hands(self.handle, self._peer)
            self.report.connect_ms += (self._now() - started) * 1000
            route = self._importer.transport.route(name)
            if route is None:
                raise transfer_failed(f"not connected to {name}")
            self.report.transport, self.report.lane = route.carrier, route.lane
            async with self._importer.reading(self.handle):
                await self._read_pieces(name, route, blocks, skip)
        failpoint("kv.before_check")
        started = self._now()
        was_held = await self._peer.release(self.handle)
        self.report.verify_ms += (self._now() - started) * 1000
        if blocks and self._importer.checks.lease and not was_held:
            raise BatonError(Reason.LEASE_EXPIRED, f"lease {self.handle.lease_id} of {self.handle.worker} ended before the read did")

    async def release(self) -> None:
        """Tells the holder that nobody will read. Best effort: otherwise the lease expires."""
        try:
            await self._peer.release(self.handle)
        except BatonError as error:
            log.debug("cannot release lease %d: %s", self.handle.lease_id, error)

    async def _read_pieces(self, name: str, route: Route, blocks: Sequence[int], skip: int) -> None:
        """Copies the blocks in order. The digests of one copy are compared while the next is under way."""
        pool = self._importer.pool
        step = max(1, (route.read_bytes or pool.read_bytes) // pool.layout.block_bytes)
        done, comparing = 0, None
        try:
            while done < len(blocks):
                piece = await self._next_piece(skip + done, not route.through_host)
                failpoint("kv.before_read")
                for at in range(0, len(piece.block_ids), step):
                    remote = piece.block_ids[at : at + step]
                    local = blocks[done : done + len(remote)]
                    await self._copy(name, route, remote, local)
                    done += len(remote)
                    await self._compared(comparing)
                    digests = piece.digests[at * DIGEST_BYTES : (at + len(remote)) * DIGEST_BYTES]
                    comparing = asyncio.create_task(self._compare(local, digests))
            await self._compared(comparing)
        finally:
            if comparing is not None:
                comparing.cancel()
                await asyncio.gather(comparing, return_exceptions=True)

    async def _next_piece(self, first: int, direct: bool) -> Piece:
        """Returns a piece with at least one block. Waits for the holder until the caller gives up."""
        wait_s = min(PIECE_WAIT_S, self.handle.ttl_ms / 3000)
        while True:
            asked = self._now()
            piece = await self._peer.piece(self.handle, first, wait_s, direct)
            piece.verify(self._importer.key, self.handle)
            self._alive_until = asked + piece.ttl_ms / 1000
            end = first + len(piece.block_ids)
            if piece.first != first or end > self.num_blocks or len(piece.digests) != len(piece.block_ids) * DIGEST_BYTES:
                raise BatonError(Reason.LEASE_REFUSED, f"the holder sent blocks {piece.first} to {end} of {self.num_blocks}")
            if piece.complete and end < self.num_blocks:
                raise BatonError(Reason.LEASE_REFUSED, f"the holder has only {end} of the {self.num_blocks} blocks that the handle covers")
            if piece.block_ids:
                return piece

    async def _copy(self, name: str, route: Route, remote: Sequence[int], local: Sequence[int]) -> None:
        started = self._now()
        self._reading = self._importer.readers.submit(self._read_now, name, route, remote, local)
        await asyncio.wrap_future(self._reading)
        self.report.read_ms += (self._now() - started) * 1000
        self.report.note_moved(len(remote), len(remote) * self._importer.pool.layout.block_bytes, self._live())
        if failpoint("kv.copied"):
            self._importer.pool.flip(local[0])

    def _read_now(self, name: str, route: Route, remote: Sequence[int], local: Sequence[int]) -> None:
        """Runs in a reader thread. Checks the lease only now, because it was renewed while the read waited for the thread."""
        importer, handle = self._importer, self.handle
        left = self._alive_until - self._now()
        if importer.checks.lease and left <= 0:
            raise BatonError(Reason.LEASE_EXPIRED, f"lease {handle.lease_id} of {handle.worker} ended before the read began")
        importer.transport.read(name, remote, local, min(importer.read_timeout_s, max(0.001, left * 0.9)))
        if route.through_host:
            importer.pool.take_in(local)  # in this thread: until it ends, the blocks are not settled
        if importer.checks.lease and self._now() > self._alive_until:
            raise BatonError(Reason.LEASE_EXPIRED, f"the read outlasted lease {handle.lease_id} of {handle.worker}")

    async def _compared(self, comparing: "asyncio.Task[None] | None") -> None:
        if comparing is not None:
            started = self._now()
            await comparing
            self.report.verify_ms += (self._now() - started) * 1000

    async def _compare(self, blocks: Sequence[int], expected: bytes) -> None:
        """Raises BatonError(DIGEST_MISMATCH) unless the blocks have these digests."""
        if not self._importer.checks.digests:
            return
        pool = self._importer.pool
        if at_once(pool, len(blocks)):
            wrong = mismatches(pool, blocks, expected)
        else:
            wrong = await asyncio.to_thread(mismatches, pool, blocks, expected)
        self.report.digests_checked += len(blocks)
        self.report.digests_failed += len(wrong)
        if wrong:
            message = f"{len(wrong)} of {len(blocks)} blocks from {self.handle.worker} are not what was leased"
            raise BatonError(Reason.DIGEST_MISMATCH, message)


def peer_name(worker: str, incarnation: int) -> str:
    """The name by which a transport knows a worker. A restarted worker is another peer."""
    return f"{worker}:{incarnation}"
