"""The prefill role: computes a prompt, samples the first token, leases the KV.

    prefill: fetch what another worker caches, if the router names that worker
             → compute the rest in chunks; `opened` after the first of several: live transfer of full blocks may begin
             → first token → hold → lease complete → {token, handle}

Cancelling a call at any point frees everything it held: the engine command that frees a sequence always comes after the one that added it.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from baton.clock import loop_time
from baton.cluster import semconv
from baton.cluster.errors import BatonError
from baton.cluster.failpoint import failpoint
from baton.cluster.telemetry import Tracer, TraceSpan
from baton.engine.core.block_key import extend_keys
from baton.engine.core.contract import ServingEngine
from baton.engine.core.engine import Output, SequenceRefused
from baton.engine.core.sampling import Sampled
from baton.engine.core.sequence import Finish, Sequence
from baton.worker.kv_port import KvPlace, KvPort
from baton.worker.refusal import failure, refusal
from kvtransfer.exporter import Export
from kvtransfer.handle import KvHandle
from kvtransfer.importer import Fetch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """A worker that probably caches the leading `blocks` blocks of a prompt."""

    place: KvPlace
    blocks: int


@dataclass(frozen=True, slots=True)
class Prefilled:
    sampled: Sampled
    finish: Finish | None
    handle: KvHandle | None  # None if the first token ends the output, or if nobody waits for the KV any more
    cached_tokens: int
    fetched_tokens: int
    wait_ms: float
    compute_ms: float


@dataclass(eq=False, slots=True)
class PrefillCall:
    seq: Sequence
    request_id: str
    first: "asyncio.Future[Output]"
    opened: Callable[[KvHandle], None]
    span: TraceSpan
    export: Export | None = None
    lease: TraceSpan | None = None
    running: bool = True  # the call is in progress; afterwards the end of the lease frees the sequence


class PrefillWorker:
    """A `baton.worker.role.Role`. The wiring sets `engine` and `port`, because both call back."""

    engine: ServingEngine
    port: KvPort

    def __init__(self, tracer: Tracer, live: bool = True) -> None:
        """`live`: live transfer, `kv.live`."""
        self._live = live
        self._tracer = tracer
        self._running: dict[str, PrefillCall] = {}
        self.admit: Callable[[], None] = lambda: None

    @property
    def idle(self) -> bool:
        """Whether nothing runs and no lease is left for a reader."""
        return not self._running and not self.port.exporter.num_leases

    async def prefill(
        self,
        seq: Sequence,
        request_id: str,
        opened: Callable[[KvHandle], None] = lambda handle: None,
        source: Source | None = None,
        traceparent: str = "",
        tracestate: str = "",
    ) -> Prefilled:
        """Calls `opened` after the first chunk of a long prompt. Raises BatonError(DRAINING, SATURATED, CONTEXT_LENGTH)."""
        self.admit()
        with self._tracer.follow(semconv.PREFILL_WORK, traceparent, tracestate) as span:
            call = PrefillCall(seq, request_id, asyncio.get_running_loop().create_future(), opened, span)
            self._running[seq.id] = call
            try:
                return await self._prefill(call, source)
            except SequenceRefused as error:
                raise refusal(error) from None
            except BaseException:
                self._give_up(call)
                raise
            finally:
                call.running = False
                del self._running[seq.id]

    async def _prefill(self, call: PrefillCall, source: Source | None) -> Prefilled:
        began, seq = loop_time(), call.seq
        fetched = await self._fetch(call, source) if source else None
        if fetched is None:
            await self.engine.add(seq)
        output = await call.first
        failpoint("prefill.computed")
        result = self._hand_over(call, output, began, fetched or 0)
        failpoint("prefill.reply")
        return result

    def on_step(self, outputs: list[Output]) -> None:
        for output in outputs:
            call = self._running.get(output.seq.id)
            if call is None or call.first.done():
                continue
            if output.sampled is not None:
                call.first.set_result(output)
            elif output.failure is not None or output.expired:
                call.first.set_exception(failure(output))
            elif self._live:
                self._publish(call, output)

    def _publish(self, call: PrefillCall, output: Output) -> None:
        """A chunk has been computed and more will follow: full blocks can be read now."""
        if call.export is None:
            call.export = self._open(call)
            call.opened(call.export.handle)
        call.export.publish(output.full)
        failpoint("prefill.chunk")

    def _open(self, call: PrefillCall) -> Export:
        call.lease = call.span.child(semconv.LEASE)
        return self.port.exporter.open(call.request_id, 0, call.seq.arrived_with, lambda: self._lease_ended(call))

    def _lease_ended(self, call: PrefillCall) -> None:
        if call.lease is not None:
            call.lease.end()
        if not call.running:
            self._free(call.seq)

    def _free(self, seq: Sequence) -> None:
        self.engine.forget(seq.id)

    def _give_up(self, call: PrefillCall) -> None:
        """The call failed or was cancelled. A reader of its blocks learns this when it releases the lease."""
        if call.export is not None:
            self.port.exporter.revoke(call.export)
        self._free(call.seq)

    def _hand_over(self, call: PrefillCall, output: Output, began: float, fetched: int) -> Prefilled:
        seq, handle = call.seq, None
        started = seq.started_at or began
        now = loop_time()
        assert output.sampled is not None
        if output.finish is None:
            tokens = len(seq.tokens) - 1
            export = call.export = call.export or self._open(call)
            if export.finish(seq.blocks[: -(-tokens // self.engine.pool.layout.block_size)]):
                handle = export.handle
            else:
                self._free(seq)  # its reader gave up while the prompt was computed
        elif call.export is not None:
            self.port.exporter.revoke(call.export)
        call.span.set({semconv.CACHED_TOKENS: seq.cached, semconv.WAIT_SECONDS: started - began, semconv.COMPUTE_SECONDS: now - started})
        waited, took = (started - began) * 1000, (now - started) * 1000
        return Prefilled(output.sampled, output.finish, handle, seq.cached, fetched, waited, took)

    async def _fetch(self, call: PrefillCall, source: Source) -> int | None:
        """Adds the sequence to the engine with the KV that `source` caches. Returns the number of positions fetched. Returns None and does
        nothing if there is no room yet: a request that has to wait anyway can compute."""
        seq, filling = call.seq, list[int]()
        fetch: Fetch | None = None
        if not await self.engine.reserve(seq):
            return None

        first = seq.computed
        try:
            try:
                keys = self._keys_beyond(seq, first, source.blocks)
                if keys:
                    place = source.place
                    fetch = await self.port.importer.borrow(place.worker, place.incarnation, place.address, call.request_id, first, keys)
                    async with fetch.holding():
                        await self.port.fill(seq, fetch)
                failpoint("prefill.fetched")
                await self.engine.adopt(seq, fetch.handle.end if fetch else None)
                return fetch.handle.end - first if fetch else 0
            except BatonError as error:
                log.info("cannot fetch the KV of %s from %s: %s", call.request_id, source.place.worker, error)
                await self.engine.give_up(seq, filling)
                self._drop(fetch)
                await self.port.withdraw(None, fetch, filling)
                return 0
        except BaseException:
            self._drop(fetch)
            await asyncio.shield(self.port.withdraw(seq.id, fetch, filling))
            raise

    def _keys_beyond(self, seq: Sequence, position: int, blocks: int) -> list[bytes]:
        """Returns the keys of the full blocks from `position` on, among the first `blocks` of the prompt and without the last token."""
        size = self.engine.pool.layout.block_size
        keys = list(seq.keys)
        extend_keys(keys, seq.root, seq.tokens, size)
        return keys[position // size : min(blocks, (len(seq.tokens) - 1) // size)]

    def _drop(self, fetch: Fetch | None) -> None:
        if fetch is not None:
            self.port.importer.release_later(fetch)
