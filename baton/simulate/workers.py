"""Workers that compute nothing: a model says how long each thing takes. Behind the same protocols as `router.clients`."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from baton.clock import loop_time
from baton.cluster.errors import BatonError, Reason
from baton.cluster.handoff import Handoff
from baton.cluster.records import Load, WorkerRecord
from router.request import Request, Token
from router.workers import Adopted, Answer, CachePage, DecodeEvent, Ended, FirstToken, PrefillEvent, Source


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take, in seconds. A decode step serves all sequences that run, and takes longer the more there are."""

    prompt_token_s: float = 0.0005
    handoff_s: float = 0.005
    step_s: float = 0.02
    step_sequence_s: float = 0.001
    joined: int = 8  # tokens that travel together


@dataclass(slots=True)
class _Busy:
    free_at: float = 0.0  # when the prompts that wait will have been computed
    prompts: int = 0  # tokens of these
    decodes: dict[int, int] = field(default_factory=dict)  # call → the most tokens that it may reach
    room: asyncio.Event = field(default_factory=asyncio.Event)


class ModelledWorkers:
    """Implements `router.workers.Workers` and `WatchedWorkers`. A worker computes one prompt after the other, and runs at most
    `max_num_seqs` sequences. Tokens say nothing: each is the number of tokens before it."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._busy: dict[str, _Busy] = {}
        self._numbers = 0
        self.leases: dict[bytes, str] = {}  # handle → holder

    async def prefill(
        self, worker: WorkerRecord, request: Request, timeout_s: float, source: Source | None = None
    ) -> AsyncGenerator[PrefillEvent, None]:
        tokens = len(request.tokens)
        waited, took = await self._compute(worker, tokens)
        self._numbers += 1
        handle = f"{worker.name} {self._numbers}".encode()
        self.leases[handle] = worker.name
        yield FirstToken(Token(tokens % 251), handle, "length" if request.params.max_tokens == 1 else None, 0, 1000 * waited, 1000 * took)

    async def decode(
        self, worker: WorkerRecord, request: Request, handle: bytes, timeout_s: float, first: "asyncio.Future[int] | None" = None
    ) -> AsyncGenerator[DecodeEvent, None]:
        async with aclosing(self._run(worker, request, handle)) as events:
            try:
                async with asyncio.timeout(timeout_s):
                    async for event in events:
                        yield event
            except TimeoutError:
                raise BatonError(Reason.DEADLINE, "the deadline of the request is over") from None

    async def _run(self, worker: WorkerRecord, request: Request, handle: bytes) -> AsyncGenerator[DecodeEvent, None]:
        busy = self._of(worker)
        while len(busy.decodes) >= worker.max_num_seqs > 0:
            busy.room.clear()
            await busy.room.wait()
        self._numbers += 1
        call = self._numbers
        busy.decodes[call] = request.longest
        try:
            if handle:
                await asyncio.sleep(self._pace.handoff_s)
                del self.leases[handle]
                yield Adopted(Handoff(transport="model"))
            else:
                await self._compute(worker, len(request.tokens))
            known, end = len(request.tokens), request.longest
            while known < end:
                count = min(self._pace.joined, end - known)
                await asyncio.sleep(count * (self._pace.step_s + self._pace.step_sequence_s * len(busy.decodes)))
                yield tuple(Token((known + i) % 251) for i in range(count))
                known += count
            yield Ended("length", 0, 0)
        finally:
            del busy.decodes[call]
            busy.room.set()

    async def _compute(self, worker: WorkerRecord, tokens: int) -> tuple[float, float]:
        """Computes a prompt after those that wait already. (Waited, took) in seconds."""
        busy, now, took = self._of(worker), loop_time(), tokens * self._pace.prompt_token_s
        waited = max(0.0, busy.free_at - now)
        busy.free_at, busy.prompts = now + waited + took, busy.prompts + tokens
        try:
            await asyncio.sleep(waited + took)
        finally:
            busy.prompts -= tokens
        return waited, took

    def release(self, worker: WorkerRecord, handle: bytes, request_id: str) -> None:
        self.leases.pop(handle, None)

    async def probe(self, worker: WorkerRecord, timeout_s: float) -> Answer:
        return Answer("ready", self.load(worker), (worker.role,), 0.0)

    def load(self, worker: WorkerRecord) -> Load:
        busy = self._of(worker)
        credit = worker.kv_blocks * worker.block_size - sum(busy.decodes.values())
        return replace(worker.load, running=len(busy.decodes), waiting_tokens=busy.prompts, credit_tokens=credit)

    async def snapshot(self, worker: WorkerRecord) -> AsyncGenerator[CachePage, None]:
        """Nothing is cached here."""
        yield CachePage(worker.incarnation, 0, [])

    def welcome(self, worker: WorkerRecord) -> None: ...

    async def forget(self, worker: WorkerRecord) -> None: ...

    async def lose(self, worker: WorkerRecord) -> None: ...

    def _of(self, worker: WorkerRecord) -> _Busy:
        return self._busy.setdefault(worker.name, _Busy())
