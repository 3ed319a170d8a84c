"""Workers whose engines compute nothing (`baton.simulate.engine`), behind the same protocols as `router.clients`. A model says how long a
handoff and a message take. Live transfers and loans of cached blocks are not modelled: KV is handed over once the prompt is computed."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

from baton.clock import loop_time
from baton.cluster.errors import BatonError, Reason
from baton.cluster.handoff import Handoff
from baton.cluster.records import BlockEvent, Load, WorkerRecord
from baton.cluster.registry import Registry
from baton.engine.core.block_key import root_key
from baton.engine.core.colder import BRING_WAIT_S
from baton.engine.core.contract import CacheEvent, EngineLoad, Listener
from baton.engine.core.engine import Output, SequenceRefused
from baton.engine.core.limits import Limits
from baton.engine.core.sequence import Finish, Sequence, State
from baton.profile.file import Profile
from baton.profile.models import Work
from baton.simulate.cores import Computes, OwnCores, Thread
from baton.simulate.engine import ModelledEngine, ModelledRunner, ProfiledPace, StepPace, Told
from baton.simulate.feed import Feed
from baton.simulate.flight import Flight
from baton.simulate.guesses import GuessChances, drafter_of
from baton.simulate.tiers import ModelledTiers, TierPace, TierSizes
from baton.simulate.virtual_time import MESSAGES, until
from baton.tiers.choice import Measured
from baton.worker.prompts import PacedNews, Prompts
from baton.worker.refusal import failure, refusal
from router.request import Request, Token
from router.workers import Adopted, Answer, CachePage, DecodeEvent, Ended, FirstToken, OnOthers, PrefillEvent, Source

ROOM_POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Times:
    """How long things take, in seconds."""

    pace: Callable[[Work], float] = field(default_factory=StepPace)
    handoff_s: float = 0.005
    handoff_token_s: float = 0.0  # for each position of KV that is moved
    travel_s: float = 0.0003  # of a message between two processes
    # Processor time: of a router and of a worker beside its engine, for a request and for a token.
    router: tuple[float, float] = (0.0, 0.0)
    worker: tuple[float, float] = (0.0, 0.0)
    handoff_work: tuple[float, float] = (0.0, 0.0)  # processor time of a handoff, as a part of its time: of its two workers
    decode_pace: Callable[[Work], float] | None = None  # of decode workers, where these are unlike
    guesses: GuessChances | None = None
    known: Mapping[str, float] | None = None  # by an engine that guesses, of its steps; None: what they take
    tiers: Mapping[str, TierPace] = field(default_factory=dict)  # by medium

    @classmethod
    def of(cls, profile: Profile, travel_s: float = 0.0, decode: Profile | None = None) -> "Times":
        """`decode`: of decode workers, if theirs is another one."""
        handoff, router, worker = (profile.values(name) for name in ("handoff", "router", "worker"))
        return cls(
            ProfiledPace(profile), handoff["base"], handoff["byte"] * profile.kv_token_bytes, travel_s,
            (router["request"], router["token"]), (worker["request"], worker["token"]), (worker["lend"], worker["fetch"]),
            None if decode is None else ProfiledPace(decode),
            GuessChances(**profile.values("guesses")) if "guesses" in profile.models else None,
            profile.values("known") if "known" in profile.models else None,
            TierPace.of(profile),
        )  # fmt: skip


class ModelledWorker:
    def __init__(self, record: WorkerRecord, fleet: "Fleet", number: int) -> None:
        """`number`: its place among the workers."""
        self.record = record
        self.thread = Thread(fleet.cores)  # of its event loop
        self._fleet = fleet
        self._cached: asyncio.Queue[list[CacheEvent]] = asyncio.Queue()
        self.prompts = Prompts()
        self._told: dict[Sequence, asyncio.Queue[Told]] = {}  # what steps brought
        times = fleet.times
        pace = times.decode_pace if record.pool == "decode" and times.decode_pace else times.pace
        runner = ModelledRunner(pace, record.kv_blocks, record.block_size, record.max_model_len)
        listener, told = Listener(self._on_step, self._on_cache, self._on_failure), self._on_told if fleet.jumps else None
        drafter = None
        if record.speculation and times.guesses is not None:
            drafter = drafter_of(record.speculation[0], record.speculation_tokens, times.guesses, pace, times.known)
        self.engine = ModelledEngine(runner, fleet.limits, listener, told, fleet.cores, number, drafter)
        self.tiers = ModelledTiers(fleet.tiers, times.tiers, fleet.cores) if fleet.tiers is not None else None
        if self.tiers is not None:
            self.engine.attach(self.tiers)
        self._read = Measured()  # handoffs, as a decode worker's
        if fleet.feed is not None:
            self.engine.changes = partial(fleet.feed.expect, self.engine)
        self.engine.start()
        self._publishing = asyncio.create_task(self._publish()) if fleet.feed is None else None

    @asynccontextmanager
    async def outputs(self, seq: Sequence) -> AsyncIterator["asyncio.Queue[Told]"]:
        """What the steps bring for a sequence. A BatonError is raised for what the engine refuses."""
        queue = self._told[seq] = asyncio.Queue()
        try:
            yield queue
        except SequenceRefused as error:
            raise refusal(error) from None
        finally:
            del self._told[seq]

    async def load(self) -> Load:
        return _load(await self.engine.look())

    def load_now(self) -> Load:
        """The load now, without waiting for a step to end."""
        return _load(self.engine.facts())

    async def close(self) -> None:
        if self._publishing is not None:
            self._publishing.cancel()
        await self.engine.close()
        if self.tiers is not None:
            self.tiers.close()

    def tell_tiers(self) -> None:
        """Lets its record say what loading costs by now."""
        if self.tiers is not None and (told := self.tiers.records()) != self.record.tiers:
            self.record = replace(self.record, tiers=told)

    async def bring(self, seq: Sequence) -> None:
        """Loads what its own tiers hold of KV that is to be handed over, as far as that is sooner (`baton.worker.kv_port`)."""
        if (rate := self._read.at(loop_time())) is not None and self.tiers is not None:
            await self.engine.bring(seq.keys[: (len(seq.tokens) - 1) // self.record.block_size], BRING_WAIT_S, rate.seconds(1))

    def note_handoff(self, blocks: int, seconds: float) -> None:
        if blocks and seconds:
            self._read.note(blocks, 0.0, seconds, loop_time())

    def _on_step(self, outputs: list[Output]) -> None:
        ended = (loop_time(),)
        for output in outputs:
            self._on_told(Told(output.seq, () if output.sampled is None else ended, output))

    def _on_told(self, told: Told) -> None:
        if (queue := self._told.get(told.seq)) is not None:
            queue.put_nowait(told)

    def _on_cache(self, events: list[CacheEvent]) -> None:
        if (feed := self._fleet.feed) is None:
            self._cached.put_nowait(events)
        else:
            feed.send(self._events(events), self.engine)

    def _events(self, events: list[CacheEvent]) -> list[BlockEvent]:
        name, incarnation = self.record.name, self.record.incarnation
        return [BlockEvent(name, incarnation, each.sequence, each.kind, each.keys, each.medium) for each in events]

    def _on_failure(self, error: BaseException) -> None:
        raise error

    async def _publish(self) -> None:
        while True:
            found = await self._cached.get()
            await asyncio.sleep(self._fleet.times.travel_s)
            await self._fleet.registry.publish(self._events(found))


class Fleet:
    """All workers of a cluster, as they are."""

    def __init__(
        self,
        records: Iterable[WorkerRecord],
        times: Times,
        registry: Registry,
        limits: Limits,
        cores: Computes | None = None,
        large: bool = False,
        jumps: bool = True,
        tiers: TierSizes | None = None,
    ) -> None:
        """`cores`: shared by all; None: each process has its own. `large`, `jumps`: see `SimulatedCluster`. `tiers`: of each worker."""
        self.times, self.registry, self.limits = times, registry, limits
        self.cores = cores or OwnCores()
        self.feed = Feed(times.travel_s) if large else None
        self.jumps = jumps and large
        self.tiers = tiers if tiers is not None and tiers.media else None
        self.workers: dict[str, ModelledWorker] = {}
        self._places = count()
        for record in records:
            self.add(record)
        self.numbers = count(1)
        self.leases: dict[bytes, tuple[str, str]] = {}  # handle → holder and its sequence

    def add(self, record: WorkerRecord) -> None:
        """A worker that starts to serve now."""
        self.workers[record.name] = ModelledWorker(record, self, next(self._places))

    async def ask(self) -> None:
        """Whoever asks for outputs is told all that has come by now."""
        for worker in self.workers.values():
            worker.engine.ask()
        await asyncio.sleep(0)  # they wait for it, and take it in the next turn

    async def remove(self, name: str) -> None:
        """It must be `idle`, and no router may choose it any more."""
        await self.workers.pop(name).close()

    def idle(self, name: str) -> bool:
        """Whether a worker has no sequence, and no lease that somebody will read."""
        facts = self.workers[name].engine.facts()
        return not facts.running and not facts.waiting and all(holder != name for holder, _ in self.leases.values())

    async def close(self) -> None:
        await asyncio.gather(*(worker.close() for worker in self.workers.values()))


@dataclass(frozen=True, slots=True)
class ModelledFork:
    """A `router.workers.Fork`."""

    seq: Sequence
    events: Callable[[], AsyncGenerator[DecodeEvent, None]]
    close: Callable[[], None]


class ModelledWorkers:
    """The workers as one router sees them: implements `router.workers.Workers` and `WatchedWorkers`."""

    def __init__(self, fleet: Fleet, asker: str) -> None:
        self._fleet, self._asker = fleet, asker
        self._thread = Thread(fleet.cores)  # of the router
        self._times, self._workers, self._leases = fleet.times, fleet.workers, fleet.leases
        self.feed = fleet.feed
        self._costs = fleet.times.router[1] > 0 or fleet.times.worker[1] > 0  # of tokens
        self.on_others: OnOthers = lambda worker, tokens: None
        self._followed: set[str] = set()

    async def prefill(
        self, worker: WorkerRecord, request: Request, timeout_s: float, source: Source | None = None, uncached_tokens: int = 0
    ) -> AsyncGenerator[PrefillEvent, None]:
        here, seq = self._workers[worker.name], self._sequence(request, hold=True)
        handle = b""
        async with here.outputs(seq) as outputs, _deadline(timeout_s):
            await self._travel(here, request=True)
            self._follow(worker, here)
            try:
                with here.prompts.present(self._asker, uncached_tokens):
                    came = loop_time()
                    await here.engine.add(seq)
                    token, finish = await _first(outputs)
                ended, started = loop_time(), seq.started_at or came
                if finish is None:
                    handle = f"{worker.name} {seq.id}".encode()
                    self._leases[handle] = worker.name, seq.id
            finally:
                if not handle:
                    _forget(here, seq)
            await self._travel(here, tokens=1)
        yield FirstToken(token, handle, finish.value if finish else None, seq.cached, 1000 * (started - came), 1000 * (ended - started))

    async def decode(
        self,
        worker: WorkerRecord,
        request: Request,
        handle: bytes,
        timeout_s: float,
        first: "asyncio.Future[int] | None" = None,
        forks: "Seq[ModelledFork]" = (),
    ) -> AsyncGenerator[DecodeEvent, None]:
        here, seq = self._workers[worker.name], self._sequence(request)
        async with here.outputs(seq) as outputs, _deadline(timeout_s):
            await self._travel(here, request=True)
            try:
                if not handle:
                    here.engine.awaited.add(seq)
                await self._place(here, seq, handle, [fork.seq for fork in forks])
                if handle:
                    yield Adopted(Handoff(transport="model"))
                async with aclosing(self._told(here, seq, outputs, bool(handle))) as events:
                    async for event in events:
                        yield event
            finally:
                _forget(here, seq)

    def fork(self, worker: WorkerRecord, request: Request, timeout_s: float) -> "ModelledFork":
        here, seq = self._workers[worker.name], self._sequence(request)

        async def events() -> AsyncGenerator[DecodeEvent, None]:
            here.engine.awaited.add(seq)
            async with here.outputs(seq) as outputs, _deadline(timeout_s):
                try:
                    async with aclosing(self._told(here, seq, outputs, False)) as told:
                        async for event in told:
                            yield event
                finally:
                    _forget(here, seq)

        return ModelledFork(seq, events, lambda: here.engine.forget(seq.id))

    async def _told(
        self, here: ModelledWorker, seq: Sequence, outputs: "asyncio.Queue[Told]", read: bool
    ) -> AsyncGenerator[DecodeEvent, None]:
        flight = Flight(seq.arrived_with, self._times.travel_s)
        number = next(self._fleet.numbers)  # those of one moment arrive in the order of their calls
        try:
            while flight.finish is None:
                flight.add(await outputs.get(), loop_time())
                while flight:
                    if self._costs:
                        await self._travel(here, tokens=1)
                    else:
                        await until(flight.lands, MESSAGES + number)
                    self._take_all(flight, outputs)
                    for tokens in flight.land_all() if self._costs else flight.land(loop_time()):
                        yield tokens
                if flight.failure is not None:
                    raise failure(flight.failure)
        except asyncio.CancelledError:  # who was waiting gets what has come
            here.engine.ask(seq)
            self._take_all(flight, outputs)
            for tokens in () if self._costs else flight.land(loop_time()):
                yield tokens
            raise
        assert flight.finish is not None
        yield Ended(flight.finish.value, seq.prefilled if read else 0, seq.cached)

    @staticmethod
    def _take_all(flight: Flight, outputs: "asyncio.Queue[Told]") -> None:
        while not outputs.empty():
            flight.add(outputs.get_nowait(), loop_time())

    async def _place(self, here: ModelledWorker, seq: Sequence, handle: bytes, forks: list[Sequence]) -> None:
        if not handle:
            await here.engine.add(seq, forks)
            return
        await here.bring(seq)
        while not await here.engine.reserve(seq):
            await asyncio.sleep(ROOM_POLL_S)
        moved = len(seq.tokens) - 1 - seq.computed
        work = self._times.handoff_work
        for seconds in work:
            await self._fleet.cores.work(seconds)
        await asyncio.sleep(max(0.0, self._times.handoff_s + moved * self._times.handoff_token_s - sum(work)))
        here.note_handoff(-(-moved // here.record.block_size), moved * self._times.handoff_token_s)
        await here.engine.adopt(seq, len(seq.tokens) - 1, None, forks)
        self._end(handle)

    def _follow(self, worker: WorkerRecord, here: ModelledWorker) -> None:
        """Follows the worker from the first prompt on, as a session does."""
        if worker.name not in self._followed:
            self._followed.add(worker.name)
            loop = asyncio.get_running_loop()

            def tell(tokens: int) -> None:
                loop.call_later(self._times.travel_s, lambda: self.on_others(worker, tokens))

            here.prompts.follow(self._asker, PacedNews(tell))

    def release(self, worker: WorkerRecord, handle: bytes, request_id: str) -> None:
        self._end(handle)

    async def hint(self, worker: WorkerRecord, keys: Seq[bytes], within_s: float) -> int:
        return await self._workers[worker.name].engine.bring(keys, within_s, hint=True)

    async def probe(self, worker: WorkerRecord, timeout_s: float) -> Answer:
        await asyncio.sleep(2 * self._times.travel_s)
        here = self._workers[worker.name]
        told = here.record
        return Answer(told.state, await here.load(), told.roles, 0.0, here.prompts.besides(self._asker))

    async def snapshot(self, worker: WorkerRecord) -> AsyncGenerator[CachePage, None]:
        sequence, held = await self._workers[worker.name].engine.snapshot()
        for medium, keys in held.items():
            yield CachePage(worker.incarnation, sequence, keys, medium)

    def welcome(self, worker: WorkerRecord) -> None: ...

    async def forget(self, worker: WorkerRecord) -> None: ...

    async def lose(self, worker: WorkerRecord) -> None: ...

    async def _travel(self, here: ModelledWorker, request: bool = False, tokens: int = 0) -> None:
        """A message between the router and a worker: what both compute for it, one after the other, and its way."""
        for thread, (request_s, token_s) in ((here.thread, self._times.worker), (self._thread, self._times.router)):
            await thread.work(request * request_s + tokens * token_s)
        if self._times.travel_s:
            await asyncio.sleep(self._times.travel_s)

    def _sequence(self, request: Request, hold: bool = False) -> Sequence:
        number = f"{request.id} {next(self._fleet.numbers)}"
        root = root_key("model", request.salt)
        keys = list(request.keys)  # as the worker would compute them
        return Sequence(number, list(request.tokens), request.prompt_len, request.params, root, hold, keys=keys)

    def _end(self, handle: bytes) -> None:
        if lease := self._leases.pop(handle, None):
            holder, seq_id = lease
            if holder in self._workers:
                self._workers[holder].engine.forget(seq_id)


@asynccontextmanager
async def _deadline(timeout_s: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise BatonError(Reason.DEADLINE, "the deadline of the request is over") from None


async def _first(outputs: "asyncio.Queue[Told]") -> tuple[Token, Finish | None]:
    """Raises BatonError for an output that says why there is no token."""
    while True:
        output = (await outputs.get()).output
        if output is not None and output.sampled is not None:
            return Token(output.sampled.token), output.finish
        if output is not None and (output.failure is not None or output.expired):
            raise failure(output)


def _forget(here: ModelledWorker, seq: Sequence) -> None:
    """An engine that has left it is not asked: that would end a jump for nothing."""
    here.engine.awaited.discard(seq)
    if seq.state is not State.DONE:
        here.engine.forget(seq.id)


def _load(now: EngineLoad) -> Load:
    return Load(now.running, now.waiting, now.free_blocks, now.credit_tokens, now.cached_blocks, 0, now.waiting_tokens)
