"""The decode role: accepts a request with or without its KV, and generates with continuous batching.

    start → handle?  verify → own tiers → wait for room → fetch → adopt   no prompt token is computed here
          → live     the same while another worker still computes the prompt; the first token comes last
          → else     add                                           bypass: the prompt is prefilled in chunks between decodes
          → tokens … → finished

If a fetch fails for any reason, the worker prefills locally (or, by config, fails the call): KV that was not verified is never used.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Literal

from baton.cluster import semconv
from baton.cluster.errors import BatonError, Reason
from baton.cluster.failpoint import failpoint
from baton.cluster.handoff import Handoff
from baton.cluster.metrics import Book
from baton.cluster.rpc import told
from baton.cluster.telemetry import Tracer, TraceSpan
from baton.engine.core.contract import ServingEngine
from baton.engine.core.engine import Output, SequenceRefused, Unfetchable
from baton.engine.core.sequence import Sequence
from baton.worker.kv_port import KvPort
from baton.worker.refusal import failure, refusal
from decode_worker.call import Adopted, CallAhead, CallState, DecodeCall, Emit, Finished, Made, PromptScores, Searched
from decode_worker.meter import HandoffMeter
from kvtransfer.handle import KvHandle
from kvtransfer.importer import Fetch

log = logging.getLogger(__name__)
ROOM_POLL_S = 0.02  # a release elsewhere may make room without an engine step


class DecodeWorker:
    """A `baton.worker.role.Role`. The wiring sets `engine` and `port`, because both call back."""

    engine: ServingEngine
    port: KvPort

    def __init__(self, name: str, on_failure: Literal["recompute", "fail"], book: Book, tracer: Tracer) -> None:
        self.name = name
        self._meter = HandoffMeter(book)
        self._tracer = tracer
        self._on_failure = on_failure
        self._calls: dict[str, DecodeCall] = {}
        self._room = asyncio.Lock()  # one call waits for room and the others queue behind it: no newcomer overtakes
        self.admit: Callable[[], None] = lambda: None

    @property
    def idle(self) -> bool:
        return not self._calls and not self.port.importer.quarantined_blocks

    def open(
        self,
        seq: Sequence,
        request_id: str,
        handle: KvHandle | None,
        emit: Emit,
        first: "asyncio.Future[int] | None" = None,
        traceparent: str = "",
        tracestate: str = "",
    ) -> DecodeCall:
        """A call, to be served. Events go to `emit`; the last is Finished or a BatonError. A call that is cancelled ends without either.

        `first` belongs to a live call, whose `seq` has only the prompt. It resolves to the token that the prefill worker samples.
        """
        return DecodeCall(seq, request_id, handle, emit, first, span=self._tracer.follow(semconv.DECODE_WORK, traceparent, tracestate))

    async def serve(self, call: DecodeCall, timeout_s: float) -> None:
        """Serves one call, and gives the engine those that begin with it."""

        async def place() -> None:
            self.admit()
            if call.ahead.expected:
                await asyncio.sleep(0)  # then they have come, unless they were cancelled
            await self._place(call)
            call.ahead.settle()

        await self._last(call, timeout_s, place)

    async def follow(self, call: DecodeCall, ahead: CallAhead, timeout_s: float) -> None:
        """Serves a call that begins with another one. If that one leaves before, the engine computes the prompt for this one."""

        async def place() -> None:
            try:
                await ahead.settled.wait()
            finally:  # at once: a call that is leaving is not placed with the others
                if left := call.seq in ahead.forks:
                    ahead.forks.remove(call.seq)
            if ahead.refusal is not None:
                raise ahead.refusal
            if left:
                await self.engine.add(call.seq)

        call.forked = True
        ahead.forks.append(call.seq)
        await self._last(call, timeout_s, place)

    async def _last(self, call: DecodeCall, timeout_s: float, place: Callable[[], Awaitable[None]]) -> None:
        """Places the call, and returns when it is over."""
        self._calls[call.seq.id] = call
        try:
            async with asyncio.timeout(timeout_s):
                await place()
                await call.over.wait()
        except SequenceRefused as error:
            self._fail(call, refusal(error))
        except Exception as error:
            self._fail(call, told(error))
        except asyncio.CancelledError:
            # Nobody wants the request any more. After an error the lease is kept, because another worker may read it.
            if call.state is CallState.FETCHING and call.fetch is not None:
                self.port.importer.release_later(call.fetch)
            call.span.end(Reason.CANCELLED.name)
            raise
        finally:
            call.ahead.settle()
            del self._calls[call.seq.id]
            if call.state is not CallState.ENDED:
                await asyncio.shield(self._withdraw(call))

    def on_step(self, outputs: list[Output]) -> None:
        """Called with what one engine step produced."""
        if self._calls:
            failpoint("decode.step")
        for output in outputs:
            call = self._calls.get(output.seq.id)
            if call is None or call.is_over:
                continue
            if output.scores:
                call.emit(PromptScores(output.scored_at, output.scores))
                continue
            if output.searched:
                call.emit(Searched(output.searched))
                if not output.found:
                    continue
            events = output.found if output.sampled is None else (Made(output.sampled, output.guessed, output.rejected),)
            if not events:
                call.fail(failure(output))
                call.end()
                continue
            if output.sampled is not None and not (call.told or call.handle is not None or call.forked):
                call.told = True
                call.emit(Adopted(Handoff(), output.seq.cached))  # now: its reader may have enough before the end
            for event in events:
                call.emit(event)
            if output.finish is not None:
                seq = output.seq
                recomputed = seq.prefilled if call.handle is not None or call.forked else 0
                handoff = replace(call.handoff, recomputed_tokens=recomputed)
                call.emit(Finished(output.finish, handoff, seq.cached, seq.preemptions))
                call.end()
                self._meter.recomputed(recomputed)
                call.span.set({semconv.CACHED_TOKENS: seq.cached, semconv.RECOMPUTED_TOKENS: recomputed})
                call.span.set({semconv.PREEMPTIONS: seq.preemptions})
                call.span.end()

    async def _place(self, call: DecodeCall) -> None:
        """Adds the sequence to the engine, with its KV if that can be fetched."""
        if call.handle is None:
            call.move("add")
            await self.engine.add(call.seq, call.ahead.forks)
            return
        try:
            with call.span.child(semconv.TRANSFER, "client", {semconv.WORKER: call.handle.worker}) as span:
                fetch = self.port.importer.open(call.handle, call.request_id, call.before_first_token)
                call.begin(fetch)
                async with fetch.holding():
                    await self._adopt(call, fetch, call.handle, span)
        except BatonError as error:
            self._meter.ended(error.reason.name, call.fetch.report if call.fetch else Handoff())
            log.warning("handoff of %s from %s failed: %s", call.request_id, call.handle.worker, error)
            if self._on_failure == "fail":
                raise
            await self._recompute(call, error)

    async def _adopt(self, call: DecodeCall, fetch: Fetch, handle: KvHandle, span: TraceSpan) -> None:
        seq = call.seq
        searches = seq.params.beams is not None  # with logits of its own for the last token of the prompt
        whole = len(seq.tokens) - (call.first is None and not searches)  # all but the first token
        if (handle.start, handle.end) != (0, whole):
            raise BatonError(Reason.LEASE_REFUSED, f"the handle is for positions {handle.start} to {handle.end}, the request has {whole}")
        await self.port.bring(seq, handle)
        async with self._room:
            try:
                while not await self.engine.reserve(seq):
                    await asyncio.sleep(ROOM_POLL_S)
            except Unfetchable as error:
                raise BatonError(Reason.LEASE_REFUSED, str(error)) from None
        failpoint("kv.reserved")
        call.handoff = fetch.report
        call.handoff.blocks_reused = await self.port.fill(seq, fetch)
        call.verified()
        self._meter.ended("ok", call.handoff)
        self.port.noted(call.handoff)
        span.set(call.handoff.attributes())
        span.end()  # the request may be over before `adopt` returns
        first = await call.first if call.first is not None else None
        self._adopted(call)  # before the engine has the sequence: its first token may come immediately
        await self.engine.adopt(seq, handle.end - searches, None if searches else first, call.ahead.forks)
        failpoint("kv.adopted")

    async def _recompute(self, call: DecodeCall, error: BatonError) -> None:
        """The KV cannot be fetched: prefill here. A live call waits for its first token, which only the prefill worker may sample."""
        call.move("recompute")
        call.handoff = Handoff(failure=error.reason.name)
        seq = call.seq
        self._adopted(call)  # from here on we are responsible for the lease
        if call.fetch is not None:
            self.port.importer.release_later(call.fetch)
        first = await call.first if call.first is not None else None
        first = None if seq.params.beams is not None else first
        await self.engine.give_up(seq, call.filling, first, call.ahead.forks)  # into the call: we may be cancelled while the command runs
        await self._settle(call)

    def _adopted(self, call: DecodeCall) -> None:
        """Tells the call that its KV was read, and those that begin with it, for which nothing was."""
        call.emit(Adopted(call.handoff))
        for seq in call.ahead.forks:
            self._calls[seq.id].emit(Adopted(Handoff()))

    def _fail(self, call: DecodeCall, error: BatonError) -> None:
        call.ahead.settle(error)
        call.fail(error)

    async def _withdraw(self, call: DecodeCall) -> None:
        """The call ends early: removes everything that it holds."""
        fetch, call.fetch = call.fetch, None
        await self.port.withdraw(call.seq.id, fetch, call.filling)

    async def _settle(self, call: DecodeCall) -> None:
        """Frees the blocks that a fetch was to fill, once no byte can land in them."""
        fetch, call.fetch = call.fetch, None
        await self.port.withdraw(None, fetch, call.filling)
        call.move("settle")
