"""A stand-in for `router.clients.Workers`: workers that compute the toy model, fail on demand, and record what they hold."""

import asyncio
from collections import Counter, defaultdict, deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from baton.cluster.errors import BatonError, Reason
from baton.cluster.handoff import Handoff
from baton.cluster.records import Load, RoleName, WorkerRecord
from baton.engine.core.toy import naive
from router.request import FinishReason, PromptToken, Request, Scores, Token, tie_of
from router.view import ClusterView
from router.workers import Adopted, Answer, DecodeEvent, Ended, FirstToken, Opened, PrefillEvent, Source

MODEL = "toy"  # its name
TOKENIZER = "tokenizer"
EOS = 256


def record(name: str, **fields: Any) -> WorkerRecord:
    """A usable worker; the first letter of its name decides its pool."""
    pool: RoleName = "prefill" if name.startswith("p") else "decode"
    load = Load(credit_tokens=10_000)
    whole = WorkerRecord(name, pool, f"{name}:1", 1, "ready", 1, "host", MODEL, "model", TOKENIZER, 16, 4096, 1000, "tcp", load)
    return replace(whole, **{"eos_token_ids": (EOS,), "forks": True, **fields})


@dataclass(frozen=True)
class Fault:
    """What goes wrong in one call. `tokens`: how many a decode call sends before it breaks; None: it breaks before the KV arrives."""

    error: BatonError | None  # None: the worker sends nothing more
    tokens: int | None = None

    async def strike(self) -> None:
        if self.error is None:
            await asyncio.Event().wait()
        else:
            raise self.error


@dataclass(frozen=True)
class Call:
    kind: str
    worker: str
    known: int  # tokens it was sent
    handle: bytes = b""


class FakeWorkers:
    """Each call uses up one of `faults[name]`. `tick` gets the stage in which time passes; `replies` is called before prefill answers."""

    def __init__(self) -> None:
        self.faults: defaultdict[str, deque[Fault]] = defaultdict(deque)
        self.calls: list[Call] = []
        self.ends: Counter[str] = Counter()  # how calls ended: well, in an error, cancelled
        self.leases: dict[bytes, tuple[str, str, int]] = {}  # handle → worker, request, tokens
        self.endings: Counter[bytes] = Counter()  # how many times each lease was ended
        self.released: list[bytes] = []
        self.hints: list[tuple[str, list[bytes]]] = []  # worker, keys
        self.unhinted: list[str] = []  # workers whose hint was cancelled
        self.hint_ends = asyncio.Event()
        self.alive: dict[str, float] = {}  # processes that live on though a call to them was lost → for how long their engine has stalled
        self.sources: list[tuple[str, int] | None] = []  # one for each prefill
        self.opens = False  # prompts are long: their KV can be read before they are fully computed
        self.joins = 1  # tokens of a decode call that are ready together
        self.lent_live = True  # a live reader leaves the lease open until prefill ends; False: it has read everything and ends the lease
        self.model: Callable[[list[int], Request], int] = toy_model
        self.tick: Callable[[str], None] = lambda stage: None
        self.replies: Callable[[], object] = lambda: None
        self._numbers = count(1)

    async def prefill(
        self, worker: WorkerRecord, request: Request, timeout_s: float, source: Source | None = None, uncached_tokens: int = 0
    ) -> AsyncGenerator[PrefillEvent, None]:
        self.calls.append(Call("prefill", worker.name, len(request.tokens)))
        self.sources.append((source.worker.name, source.blocks) if source else None)
        async with self._counted(timeout_s):
            await asyncio.sleep(0)
            handle = self._grant(worker, request) if self.opens else b""
            try:
                if handle:
                    yield Opened(handle)
                    await asyncio.sleep(0)
                if fault := self._fault(worker):
                    await fault.strike()
                token, finish = self._next(request.tokens, request)
                await asyncio.sleep(0)
                self.tick("prefill")
            except BaseException:
                self._revoke(handle)
                raise
        if finish:
            self._revoke(handle)
            handle = b""
        elif not handle:
            handle = self._grant(worker, request)
        self.replies()
        yield FirstToken(_told(token, request), handle if handle in self.leases else b"", finish, 16, 1.0, 2.0)

    async def decode(
        self,
        worker: WorkerRecord,
        request: Request,
        handle: bytes,
        timeout_s: float,
        first: "asyncio.Future[int] | None" = None,
        forks: "Sequence[FakeFork]" = (),
    ) -> AsyncGenerator[DecodeEvent, None]:
        try:
            async with aclosing(self._decode(worker, request, handle, timeout_s, first, forks)) as events:
                async for event in events:
                    yield event
        except BatonError as error:
            for fork in forks:
                fork.fail(error)
            raise
        finally:
            for fork in forks:
                fork.begun.set()

    def fork(self, worker: WorkerRecord, request: Request, timeout_s: float) -> "FakeFork":
        self.calls.append(Call("fork", worker.name, len(request.tokens)))
        return FakeFork(self, worker, request, timeout_s)

    async def _decode(
        self,
        worker: WorkerRecord,
        request: Request,
        handle: bytes,
        timeout_s: float,
        first: "asyncio.Future[int] | None",
        forks: "Sequence[FakeFork]",
    ) -> AsyncGenerator[DecodeEvent, None]:
        known = list(request.tokens)
        self.calls.append(Call("live decode" if first else "decode", worker.name, len(known), handle))
        async with self._counted(timeout_s):
            await asyncio.sleep(0)
            fault = self._fault(worker)
            if fault and fault.tokens is None:
                await fault.strike()
            if handle:
                if first and not self.lent_live:
                    self._end(handle)
                holder = self.leases.get(handle)
                if first:
                    known.append(await first)
                computed = len(known) - (first is not None or request.params.beams is None)  # a search is not sent the first token
                assert holder is None or holder[1:] == (request.id, computed)
                if handle in self.leases:
                    self._end(handle)
                self.tick("transfer")
                yield Adopted(Handoff(transport="tcp", blocks=3, bytes=3000, digests_checked=3, read_ms=1.0, verify_ms=2.0))
            if request.unscored:
                told = [PromptToken(index, request.tokens[index], -float(index), 1) for index in range(1, request.prompt_len)]
                yield Scores(tuple(told[:5]))
                if fault and fault.tokens == -1:
                    await fault.strike()
                yield Scores(tuple(told[5:]))
            for fork in forks:
                fork.begun.set()
            async with aclosing(self.tokens(known, request, fault, bool(handle))) as events:
                async for event in events:
                    yield event

    async def tokens(self, known: list[int], request: Request, fault: Fault | None, read: bool) -> AsyncGenerator[DecodeEvent, None]:
        finish, ready = None, list[Token]()
        for made in count():
            await asyncio.sleep(0)
            if fault and fault.tokens == made:
                if ready:
                    yield tuple(ready)
                await fault.strike()
            token, finish = self._next(known, request)
            known.append(token)
            self.tick("decode" if read or made else "prefill")
            ready.append(_told(token, request))
            if finish is not None or len(ready) == self.joins:
                yield tuple(ready)
                ready = []
            if finish is not None:
                break
        assert finish is not None
        yield Ended(finish, recomputed_tokens=0, cached_tokens=min(32, len(request.tokens)))

    async def hint(self, worker: WorkerRecord, keys: Sequence[bytes], within_s: float) -> int:
        self.hints.append((worker.name, list(keys)))
        try:
            await self.hint_ends.wait()
        except asyncio.CancelledError:
            self.unhinted.append(worker.name)
            raise
        return len(keys)

    async def probe(self, worker: WorkerRecord, timeout_s: float) -> Answer:
        if (stalled_s := self.alive.get(worker.name)) is None:
            raise BatonError(Reason.WORKER_LOST, "connection refused")
        return Answer("ready", worker.load, (worker.pool,), stalled_s)

    def release(self, worker: WorkerRecord, handle: bytes, request_id: str) -> None:
        holder = self.leases.get(handle, (worker.name, request_id, 0))
        assert holder[:2] == (worker.name, request_id)
        self.released.append(handle)
        if self.opens and handle not in self.leases:
            return  # a live reader ended it and the dispatcher does not know yet: a real holder would only answer "late"
        self._end(handle)

    def _grant(self, worker: WorkerRecord, request: Request) -> bytes:
        handle = f"lease {next(self._numbers)}".encode()
        self.leases[handle] = (worker.name, request.id, len(request.tokens))
        self.endings[handle] = 0
        return handle

    def _revoke(self, handle: bytes) -> None:
        if handle in self.leases:
            self._end(handle)

    def _end(self, handle: bytes) -> None:
        self.endings[handle] += 1
        self.leases.pop(handle, None)

    def _next(self, known: list[int], request: Request) -> tuple[int, FinishReason | None]:
        """The next token, and the finish reason if it is the last."""
        params = request.params
        token = self.model(known, request)
        made = len(known) + 1 - request.prompt_len
        ends = token in params.stop_token_ids or (token == EOS and not params.ignore_eos)
        if ends and made >= params.min_tokens:
            return token, "stop"
        return token, "length" if made >= params.max_tokens else None

    def _fault(self, worker: WorkerRecord) -> Fault | None:
        faults = self.faults[worker.name]
        return faults.popleft() if faults else None

    @asynccontextmanager
    async def _counted(self, timeout_s: float) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(timeout_s):
                yield
        except TimeoutError:
            self.ends["error"] += 1
            raise BatonError(Reason.DEADLINE, "the deadline of the request is over") from None
        except BatonError:
            self.ends["error"] += 1
            raise
        except (asyncio.CancelledError, GeneratorExit):
            self.ends["cancelled"] += 1
            raise
        self.ends["well"] += 1


def toy_model(known: list[int], request: Request) -> int:
    return naive(known, replace(request.params, max_tokens=1))[0]


def _told(token: int, request: Request) -> Token:
    """With log-probabilities, if the request asks for them, that no other token of the toy has."""
    if request.params.logprobs is None:
        return Token(token)
    return Token(token, -token / 8, tuple(((token + i) % (EOS + 1), -(token + i) / 8) for i in range(request.params.logprobs)))


def tied(place: int, number: int = 0) -> str:
    """An id whose request gets the worker at `place` (modulo their number) of up to four equal ones. Each number has its own."""
    return next(id_ for n in count() if tie_of(id_ := f"r{number}-{n}") % 12 == place % 12)


def unusable(view: ClusterView) -> list[WorkerRecord]:
    """The members that get no requests."""
    used = {worker.name for worker in (*view.prefill_workers(), *view.decode_workers())}
    return [worker for worker in view.members.records() if worker.name not in used]


def answers(view: ClusterView, name: str, incarnation: int = 1) -> None:
    """The process answers a probe, with the load that is known already."""
    if member := view.members.find(name):
        view.members.note_answer(name, incarnation, "ready", member.load, 0)


class FakeFork:
    """A decode call that begins with another one. Each uses up one of the faults of its worker."""

    def __init__(self, workers: FakeWorkers, worker: WorkerRecord, request: Request, timeout_s: float) -> None:
        self.begun = asyncio.Event()
        self.closed = False
        self._workers, self._worker, self._request, self._timeout_s = workers, worker, request, timeout_s
        self._error: BatonError | None = None

    def fail(self, error: BatonError) -> None:
        """The call that it was to begin with failed."""
        if not self.begun.is_set():
            self._error = error

    async def events(self) -> AsyncGenerator[DecodeEvent, None]:
        async with self._workers._counted(self._timeout_s):
            await self.begun.wait()
            if self._error is not None:
                raise self._error
            yield Adopted(Handoff())
            fault = self._workers._fault(self._worker)
            async with aclosing(self._workers.tokens(list(self._request.tokens), self._request, fault, True)) as events:
                async for event in events:
                    yield event

    def close(self) -> None:
        self.closed = True
