"""A router and its workers in one event loop: the router's gate, dispatcher, view, watch and journal are the real ones."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import count

from baton.clock import loop_time
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.metrics import Book
from baton.cluster.records import Load, RoleName, WorkerRecord
from baton.cluster.rpc import Tasks
from baton.cluster.telemetry import Tracer
from baton.engine.core.sampling import SamplingParams
from baton.simulate.memory_registry import MemoryRegistry
from baton.simulate.workers import ModelledWorkers, Pace
from router.admission import Admission
from router.dispatch import Dispatcher
from router.gate import Gate
from router.journal import Journal
from router.request import Request
from router.validate import Ask
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


def worker(name: str, role: RoleName, sizes: Sizes) -> WorkerRecord:
    load = Load(credit_tokens=sizes.kv_blocks * BLOCK, free_blocks=sizes.kv_blocks)
    return WorkerRecord(
        name, role, f"{name}:1", 1, "ready", 1, "host", "model", "model", TOKENIZER, BLOCK, 1 << 16, sizes.kv_blocks, "model", load,
        max_num_seqs=sizes.max_num_seqs,
    )  # fmt: skip


class SimulatedCluster:
    def __init__(self, sizes: Sizes, pace: Pace, config: RouterConfig, slo: SloConfig | None = None) -> None:
        roles: tuple[tuple[RoleName, int], ...] = (("prefill", sizes.prefill), ("decode", sizes.decode))
        self.records = [worker(f"{role}-{number}", role, sizes) for role, size in roles for number in range(size)]
        self.workers = ModelledWorkers(pace)
        self.registry = MemoryRegistry(now=loop_time)
        self.view = ClusterView({"model": TOKENIZER})
        model = self.view.models["model"]
        self.watch = Watch(self.view, self.registry, self.workers, config.hang_s)
        self.admission = Admission(config.max_inflight, config.max_queue, config.overload)
        self.journal = Journal(Book("router", model="model"), Tracer(), "model", slo or SloConfig(), keep=10_000, wall_clock=loop_time)
        self._gate = Gate(self.admission, model, config, self.journal.objectives, loop_time)
        self._dispatcher = Dispatcher(model, self.workers, config)
        self._numbers = count()

    def report(self) -> None:
        """The workers' records, with their load as it is now, reach the router at once. `watched` has the registry bring them instead."""
        self.view.update([replace(record, load=self.workers.load(record)) for record in self.records], loop_time())

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """While the block lasts, the router reads the registry and probes the workers, as it does in a cluster."""
        failures: list[BaseException] = []
        tasks = Tasks(failures.append)
        tasks.start(self.watch.run(), "watch")
        try:
            yield
        finally:
            await tasks.close()
        if failures:
            raise failures[0]

    async def beat(self) -> None:
        """Every worker writes its record into the registry, as it does every `redis.heartbeat_s`."""
        for record in self.records:
            await self.registry.join(replace(record, load=self.workers.load(record)))

    async def ask(self, prompt: list[int], max_tokens: int, timeout_s: float = 60.0, priority: int = 0) -> Request:
        """One request, from its arrival to its last token. Raises BatonError."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        with self.journal.open("text_completion", f"r{next(self._numbers)}", clock=loop_time) as entry:
            deadline = loop_time() + timeout_s
            asked = Ask(token_ids=tuple(prompt), request_id=entry.request_id, priority=priority)
            async with self._gate.place(entry, asked, deadline):
                request = Request(entry.request_id, list(prompt), len(prompt), params, "", deadline, entry.trace, priority=priority)
                entry.request = request
                async for _ in self._dispatcher.generate(request):
                    pass
                entry.finish = request.finish
        return request
