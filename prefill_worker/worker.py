"""What a prefill worker does: computes a prompt, samples the first token, leases the KV.

    prefill: add to the engine → first token → hold → lease → {token, handle}

Whoever is cancelled on the way takes everything along: the engine command that frees a sequence always comes after the one that
added it.
"""

import asyncio
from dataclasses import dataclass
from time import monotonic

from baton.cluster import semconv
from baton.cluster.errors import BatonError, Reason
from baton.cluster.failpoint import failpoint
from baton.cluster.telemetry import Span, Tracer
from baton.engine.engine import Output, Refused
from baton.engine.loop import EngineLoop
from baton.engine.sampling import Sampled
from baton.engine.sequence import Finish, Sequence
from baton.worker.refusal import failure, refusal
from kvtransfer.exporter import Exporter
from kvtransfer.handle import KvHandle


@dataclass(frozen=True, slots=True)
class Prefilled:
    sampled: Sampled
    finish: Finish | None
    handle: KvHandle | None  # None when the first token ends the output
    cached_tokens: int
    wait_ms: float
    compute_ms: float


class PrefillWorker:
    """`loop` and `exporter` are set by the wiring, because both want to call back."""

    loop: EngineLoop
    exporter: Exporter

    def __init__(self, block_size: int, tracer: Tracer) -> None:
        self._block_size = block_size
        self._tracer = tracer
        self._leases: dict[str, Span] = {}  # sequence → span of its lease
        self._running: dict[str, asyncio.Future[Output]] = {}
        self.draining = False

    @property
    def idle(self) -> bool:
        """Nothing runs and nobody may still come to read."""
        return not self._running and not self.exporter.num_leases

    async def prefill(self, seq: Sequence, request_id: str, traceparent: str = "") -> Prefilled:
        """Raises BatonError(DRAINING, SATURATED, CONTEXT_LENGTH)."""
        with self._tracer.follow(semconv.PREFILL_WORK, traceparent) as span:
            return await self._prefill(seq, request_id, span)

    async def _prefill(self, seq: Sequence, request_id: str, span: Span) -> Prefilled:
        if self.draining:
            raise BatonError(Reason.DRAINING, f"{self.exporter.worker} is draining")
        first: asyncio.Future[Output] = asyncio.get_running_loop().create_future()
        self._running[seq.id] = first
        began = monotonic()
        try:
            await self.loop.call(lambda engine: engine.add(seq))
            output = await first
            failpoint("prefill.computed")
            result = await self._hand_over(seq, request_id, output, began, span)
            failpoint("prefill.reply")
            return result
        except Refused as error:
            raise refusal(error) from None
        except BaseException:
            self.free(seq.id)
            raise
        finally:
            del self._running[seq.id]

    def free(self, seq_id: str) -> None:
        """The blocks of a sequence may go: its lease ended, or it was given up."""
        if lease := self._leases.pop(seq_id, None):
            lease.end()
        self.loop.tell(lambda engine: engine.abort(seq_id))

    def on_step(self, outputs: list[Output]) -> None:
        for output in outputs:
            first = self._running.get(output.seq.id)
            if first is None or first.done():
                continue
            if output.sampled is not None:
                first.set_result(output)
            else:
                first.set_exception(failure(output))

    async def _hand_over(self, seq: Sequence, request_id: str, output: Output, began: float, span: Span) -> Prefilled:
        started = seq.started_at or began
        now = monotonic()
        handle = None
        assert output.sampled is not None
        if output.finish is None:
            tokens = len(seq.tokens) - 1
            blocks = seq.blocks[: -(-tokens // self._block_size)]
            handle = await self.exporter.grant(seq.id, request_id, blocks, tokens)
            self._leases[seq.id] = span.child(semconv.LEASE)
        span.set({semconv.CACHED_TOKENS: seq.cached, semconv.WAIT_SECONDS: started - began, semconv.COMPUTE_SECONDS: now - started})
        return Prefilled(output.sampled, output.finish, handle, seq.cached, (started - began) * 1000, (now - started) * 1000)
