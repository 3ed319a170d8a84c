"""A worker's KV port: other workers read its pool through it, and it reads theirs. Every worker has one, whatever its roles.

out   a role opens an export while it computes a prompt; `lend` pins cached blocks for a peer that asks for them
in    `fill` brings the KV behind a handle into the blocks reserved for a sequence; `dispose` gives blocks back after a failure
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from baton.clock import loop_time
from baton.cluster.config_engine import KvConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.handoff import Handoff
from baton.engine.core.block_key import KEY_BYTES, extend_keys
from baton.engine.core.colder import BRING_WAIT_S
from baton.engine.core.contract import ServingEngine
from baton.engine.core.sequence import Sequence as EngineSequence
from baton.tiers.choice import Measured
from kvtransfer.exporter import Exporter
from kvtransfer.handle import KvHandle, Wish
from kvtransfer.importer import Checks, Fetch, Importer, Peer
from kvtransfer.transport import Transport

MAX_LENT = 256  # open loans; each one pins blocks that the pool could otherwise evict


@dataclass(frozen=True, slots=True)
class KvPlace:
    """Where a worker's KV is: the worker, its incarnation, and the address of its KvExchange."""

    worker: str
    incarnation: int
    address: str


class KvPort:
    def __init__(
        self,
        place: KvPlace,
        engine: ServingEngine,
        transport: Transport,
        key: bytes,
        config: KvConfig,
        connect: Callable[[str], Peer],
        checks: Checks | None = None,
    ) -> None:
        self.place = place
        self.pool = pool = engine.pool
        self.transport = transport
        self._engine = engine
        self._lent = 0
        self._read = Measured()  # of KV that other workers held
        self.exporter = Exporter(
            worker=place.worker, incarnation=place.incarnation, address=place.address, pool=pool, key=key, ttl_s=config.lease_ttl_s
        )
        self.importer = Importer(
            transport=transport,
            pool=pool,
            key=key,
            connect=connect,
            free=self._free,
            read_timeout_s=config.read_timeout_s,
            checks=checks,
        )

    async def lend(self, wish: Wish) -> KvHandle:
        """Pins the longest run of the requested blocks that is cached, or comes from a tier in time, and leases it. Raises
        BatonError(LEASE_REFUSED, SATURATED)."""
        if not wish.is_sealed_with(self.importer.key) or (wish.worker, wish.incarnation) != (self.place.worker, self.place.incarnation):
            raise BatonError(Reason.LEASE_REFUSED, f"the wish is for {wish.worker}:{wish.incarnation}, or was altered")
        size = self.pool.layout.block_size
        if not 0 < len(wish.keys) <= self.pool.num_blocks * KEY_BYTES or len(wish.keys) % KEY_BYTES or wish.start % size:
            raise BatonError(Reason.LEASE_REFUSED, f"{len(wish.keys)} bytes of keys from position {wish.start} on")
        if self._lent >= MAX_LENT:
            raise BatonError(Reason.SATURATED, f"{self._lent} loans are open")
        keys = [wish.keys[at : at + KEY_BYTES] for at in range(0, len(wish.keys), KEY_BYTES)]
        self._lent += 1  # before the wait, so that concurrent requests count, too
        try:
            blocks = await self._find(keys)
            if not blocks:
                raise BatonError(Reason.LEASE_REFUSED, "none of these blocks is cached")
        except BaseException:
            self._lent -= 1
            raise
        export = self.exporter.open(wish.request_id, wish.start, wish.start + len(blocks) * size, lambda: self._unpin(blocks))
        export.finish(blocks)
        return export.handle

    async def bring(self, seq: EngineSequence, handle: KvHandle) -> None:
        """Loads what this worker's own tiers hold of a handoff, as far as that is sooner than reading it from its holder, at the rate of
        the handoffs of the last minute."""
        rate, layout = self._read.at(loop_time()), self.pool.layout
        if rate is None or not self._engine.traits.brings:
            return
        keys = list(seq.keys)
        extend_keys(keys, seq.root, seq.tokens[: handle.end], layout.block_size)
        if keys:
            await self._engine.bring(keys, BRING_WAIT_S, rate.seconds(layout.block_bytes))

    def noted(self, handoff: Handoff) -> None:
        """KV has been read from its holder."""
        if handoff.blocks:
            self._read.note(handoff.bytes, 0.0, (handoff.read_ms + handoff.verify_ms) / 1000, loop_time())

    async def fill(self, seq: EngineSequence, fetch: Fetch) -> int:
        """Reads the handle's range into the reserved blocks of `seq`. Returns how many blocks of the range were here already.

        If it raises BatonError, the blocks must not be used, and go to `dispose` once the engine has taken them from the sequence.
        """
        size, handle = self.pool.layout.block_size, fetch.handle
        have = seq.computed // size - handle.start // size
        if have < 0:
            raise BatonError(Reason.LEASE_REFUSED, f"the handle begins at position {handle.start}, the sequence has {seq.computed}")
        if handle.end > len(seq.tokens):
            raise BatonError(Reason.LEASE_REFUSED, f"the handle is for {handle.end} positions, the sequence has {len(seq.tokens)} tokens")
        skip = min(have, fetch.num_blocks)
        first = handle.start // size + skip
        await fetch.read(seq.blocks[first : handle.start // size + fetch.num_blocks], skip)
        return skip

    async def withdraw(self, seq_id: str | None, fetch: Fetch | None, filling: list[int]) -> None:
        """Ends a sequence that a fetch may be filling. `seq_id` None: only its blocks are left. `filling` holds blocks that were already
        taken from the sequence, and is empty afterwards, so that a caller that is cancelled here may call again."""
        if seq_id is not None:
            await self._engine.abort(seq_id, filling)
        blocks = list(filling)
        filling.clear()
        await self.importer.dispose(fetch, blocks)

    async def close(self) -> None:
        await self.importer.close()

    async def _find(self, keys: Sequence[bytes]) -> list[int]:
        """Pins the longest run of these that is cached, or comes from a tier in time."""
        blocks = await self._pin(keys)
        try:
            if len(blocks) == len(keys) or not self._engine.traits.brings or not await self._engine.bring(keys, BRING_WAIT_S):
                return blocks
            longer = await self._pin(keys)
        except BaseException:
            self._engine.release_soon(blocks)
            raise
        self._engine.release_soon(blocks)
        return longer

    async def _pin(self, keys: Sequence[bytes]) -> list[int]:
        """A cancelled caller leaves nothing pinned: the engine runs the release after the pinning command."""
        pinned: list[int] = []
        try:
            await self._engine.pin(keys, pinned)
        except BaseException:
            self._engine.release_soon(pinned)
            raise
        return pinned

    def _unpin(self, blocks: list[int]) -> None:
        self._lent -= 1
        self._engine.release_soon(blocks)

    async def _free(self, blocks: Sequence[int]) -> None:
        await self._engine.release(blocks)
