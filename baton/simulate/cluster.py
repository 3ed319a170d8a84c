"""Routers and their workers in one event loop. The router's gate, dispatcher, view, watch and journal are the real ones, and so are the
workers' engines but for their steps."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count

from baton.clock import clock_of_loop, loop_time
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.metrics import Book
from baton.cluster.records import Load, RoleName, WorkerRecord
from baton.cluster.registry import Registry
from baton.cluster.rpc import Tasks
from baton.cluster.telemetry import Tracer
from baton.engine.core.limits import Batching, Limits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.speculation import NONE, NOTHING_OFFERED
from baton.simulate.cores import Computes
from baton.simulate.feed import FedIndex
from baton.simulate.memory_registry import MemoryRegistry
from baton.simulate.onlooker import Onlooker
from baton.simulate.tiers import TierSizes
from baton.simulate.workers import Fleet, ModelledWorkers, Times
from router.admission import Admission
from router.degradation import Degradation, Rules
from router.dispatch import Dispatcher
from router.gate import Gate
from router.journal import Journal
from router.live import SAMPLE_EVERY_S
from router.request import Request, Timed
from router.validate import Ask, AskSampling
from router.view import ClusterView
from router.watch import Watch

TOKENIZER = "modelled"
BLOCK = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    prefill: int = 1
    decode: int = 1
    max_num_seqs: int = 16
    kv_blocks: int = 4096  # of one worker
    max_num_batched_tokens: int = 512
    block_size: int = BLOCK
    max_model_len: int = 1 << 16
    max_queue: int = 256
    decode_kv_blocks: int | None = None  # of one decode worker, if these are unlike
    batching: Batching = "continuous"
    batch_wait_s: float = 0.5
    speculation: str = NONE  # the method
    speculation_tokens: int = 8
    speculation_batch_tokens: int = 1 << 20
    tiers: TierSizes | None = None  # of each worker

    @property
    def limits(self) -> Limits:
        tokens = max(self.max_num_batched_tokens, self.max_num_seqs)
        return Limits(
            self.max_num_seqs, tokens, max_queue=self.max_queue, batching=self.batching, batch_wait_s=self.batch_wait_s,
            speculation_batch_tokens=self.speculation_batch_tokens,
        )  # fmt: skip


def worker(name: str, pool: RoleName, sizes: Sizes) -> WorkerRecord:
    size = sizes.block_size
    blocks = sizes.decode_kv_blocks if pool == "decode" and sizes.decode_kv_blocks else sizes.kv_blocks
    load = Load(credit_tokens=blocks * size, free_blocks=blocks)
    return WorkerRecord(
        name, pool, f"{name}:1", 1, "ready", 1, "host", "model", "model", TOKENIZER, size, sizes.max_model_len, blocks, "model",
        load, roles=(pool,), max_num_seqs=sizes.max_num_seqs,
        speculation=() if sizes.speculation == NONE else (sizes.speculation,), speculation_tokens=sizes.speculation_tokens,
        brings=sizes.tiers is not None and bool(sizes.tiers.media),
    )  # fmt: skip


class SimulatedRouter:
    def __init__(
        self, records: list[WorkerRecord], workers: ModelledWorkers, registry: Registry, config: RouterConfig, slo: SloConfig
    ) -> None:
        self.workers = workers
        self.view = ClusterView({"model": TOKENIZER})
        if workers.feed is not None:
            self.view.models["model"].index = FedIndex(workers.feed)
            workers.feed.views.append(self.view)
        self.view.update(records, loop_time())
        model = self.view.models["model"]
        self.watch = Watch(self.view, registry, workers, config.hang_s)
        self.admission = Admission(config.max_inflight, config.max_queue, config.overload)
        degradation = Degradation(Rules.of(config))
        tools = Book("router", model="model"), Tracer(), "model", slo
        self.journal = Journal(*tools, keep=10_000, wall_clock=clock_of_loop(), degradation=degradation)
        self.degrades = bool(config.degrade)
        self._clock = clock_of_loop()
        self._gate = Gate(self.admission, model, config, self.journal.objectives, self._clock)
        self._dispatcher = Dispatcher(model, workers, config, self._clock)

    async def judge(self) -> None:
        """Enters and leaves the levels of `router.degrade`."""
        while True:
            self.journal.sample(self.admission.requests, self.admission.queued, None)
            await asyncio.sleep(SAMPLE_EVERY_S)

    async def ask(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        timeout_s: float = 60.0,
        priority: int = 0,
        told: Callable[[int, Sequence[float]], None] = lambda tokens, times: None,
    ) -> Request:
        """One request, from its arrival to its last token. Calls `told` with how many tokens have come,
        and with the moment of each if that is not now. Raises BatonError."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        with self.journal.open("text_completion", request_id, clock=self._clock) as entry:
            deadline = self._clock() + timeout_s
            sampling = AskSampling(max_tokens=max_tokens)
            asked = Ask(token_ids=tuple(prompt), request_id=request_id, priority=priority, sampling=sampling)
            served = self.view.models["model"].served
            asked, _ = self.journal.degradation.serve(asked, NOTHING_OFFERED if served is None else served.offer)
            params = replace(params, max_tokens=asked.sampling.max_tokens or max_tokens, speculation=asked.speculation)
            async with self._gate.place(entry, asked, deadline):
                request = Request(request_id, list(prompt), len(prompt), params, "", deadline, entry.trace, priority=priority)
                entry.request = request
                async for tokens in self._dispatcher.generate(request):
                    told(len(tokens), tokens.times if isinstance(tokens, Timed) else ())
                request.trace.watch.stop()
                entry.finish = request.finish
        return request


class SimulatedCluster:
    """Make it within a running loop, and use it within `watched`."""

    def __init__(
        self,
        sizes: Sizes,
        times: Times,
        config: RouterConfig,
        slo: SloConfig | None = None,
        routers: int = 1,
        cores: Computes | None = None,
        large: bool = False,
        jumps: bool = True,
    ) -> None:
        """`cores`: which all processes share; None: each has its own. `large`: routers hear of workers as `baton.simulate.onlooker` has
        it, a token takes no processor time of a router or of a worker beside its steps, and steps are jumped over
        (`baton.simulate.jumps`), unless `jumps` is False or cores are shared: then the simulation takes longer, and is the same.

        Raises ValueError for a method that guesses without `Times.guesses`."""
        if sizes.speculation != NONE and times.guesses is None:
            raise ValueError(f"speculation: {sizes.speculation}: nothing says how often its guesses are right")
        pools: tuple[tuple[RoleName, int], ...] = (("prefill", sizes.prefill), ("decode", sizes.decode))
        self.records = [worker(f"{pool}-{number}", pool, sizes) for pool, size in pools for number in range(size)]
        self.registry = MemoryRegistry(now=loop_time)
        if large:
            times = replace(times, router=(times.router[0], 0.0), worker=(times.worker[0], 0.0))
        self.fleet = Fleet(self.records, times, self.registry, sizes.limits, cores, large, jumps, sizes.tiers)
        self.large = large
        seen = [ModelledWorkers(self.fleet, f"router-{number}") for number in range(routers)]
        self.routers = [SimulatedRouter(self.records, workers, self.registry, config, slo or SloConfig()) for workers in seen]
        self._numbers = count()

    @asynccontextmanager
    async def watched(self, beat_s: float = 1.0) -> AsyncIterator[None]:
        """While the block lasts, workers write their records into the registry, and the routers read it and probe them."""
        failures: list[BaseException] = []
        tasks = Tasks(failures.append)
        await self.beat()
        if not self.large:
            tasks.start(self._beat(beat_s), "heartbeats")
        for router in self.routers:
            onlooker = Onlooker(router.view, self.fleet) if self.large else router.watch
            tasks.start(onlooker.run(), "watch")
            if router.degrades:
                tasks.start(router.judge(), "levels")
        try:
            yield
        finally:
            await tasks.close()
            await self.fleet.close()
        if failures:
            raise failures[0]

    async def beat(self) -> None:
        """Every worker writes its record into the registry, as it does every `redis.heartbeat_s`."""
        for record in list(self.records):
            worker = self.fleet.workers[record.name]
            worker.tell_tiers()
            load = worker.load_now() if self.large else await worker.load()
            await self.registry.join(replace(worker.record, load=load))

    async def _beat(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            await self.beat()

    async def ask(
        self,
        prompt: list[int],
        max_tokens: int,
        timeout_s: float = 60.0,
        priority: int = 0,
        router: int = 0,
        told: Callable[[int, Sequence[float]], None] = lambda tokens, times: None,
    ) -> Request:
        """See `SimulatedRouter.ask`. Ids are r0, r1, …"""
        return await self.routers[router].ask(f"r{next(self._numbers)}", prompt, max_tokens, timeout_s, priority, told)
