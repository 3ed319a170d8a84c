"""A prefill and a decode worker in one process: real engines and threads, a real TCP transport, and a wire that tests can break."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from baton.cluster.errors import BatonError
from baton.cluster.metrics import Book
from baton.cluster.telemetry import Tracer
from baton.engine.block_key import root_key
from baton.engine.engine import Engine
from baton.engine.kvcache import KvLayout, KvPool
from baton.engine.loop import EngineLoop
from baton.engine.sampling import Sampled, SamplingParams
from baton.engine.scheduler import Limits
from baton.engine.sequence import Sequence
from baton.engine.toy import ToyRunner, naive
from decode_worker.worker import Adopted, DecodeWorker, Event, Finished
from kvtransfer.exporter import Exporter
from kvtransfer.handle import KvHandle, mac_key
from kvtransfer.importer import Checks, Importer, PeerFacts
from kvtransfer.tcp_transport import TcpTransport
from prefill_worker.worker import Prefilled, PrefillWorker

BLOCK = 4
CONFIG = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 4096, "kv_width": 8}
KEY = mac_key("k" * 32)
PROMPT = list(range(1, 19))  # four full blocks and a partial one


@dataclass
class Wire:
    """Implements Peer by calling the exporter. `on` has a hook per call name that runs before it."""

    exporter: Exporter
    layout: KvLayout
    address: Callable[[], bytes]
    check_layout: bool = True
    on: dict[str, Callable[[], Any]] = field(default_factory=dict)

    async def _pass(self, name: str) -> None:
        hook = self.on.get(name)
        if hook is not None and (waiting := hook()) is not None:
            await waiting

    async def handshake(self, layout: KvLayout, transport: str) -> PeerFacts:
        await self._pass("handshake")
        if self.check_layout:
            self.exporter.handshake(layout)
        return PeerFacts(self.exporter.worker, self.exporter.incarnation, self.layout, self.address())

    async def renew(self, handle: KvHandle) -> float:
        await self._pass("renew")
        return self.exporter.renew(handle, handle.request_id) / 1000

    async def release(self, handle: KvHandle) -> bool:
        await self._pass("release")
        return self.exporter.release(handle, handle.request_id)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Pair:
    prefill: PrefillWorker
    decode: DecodeWorker
    wire: Wire
    clock: Clock
    engines: tuple[Engine, Engine]
    failures: list[BaseException]
    book: Book  # of the decode worker

    async def hand_over(self, request_id: str = "r", tokens: list[int] | None = None, params: SamplingParams | None = None) -> Prefilled:
        seq = Sequence(f"{request_id}#p", list(tokens or PROMPT), len(tokens or PROMPT), params or greedy(), root_key("toy"), hold=True)
        return await self.prefill.prefill(seq, request_id)

    def start(
        self,
        first: Prefilled,
        request_id: str = "r",
        handle: KvHandle | None = None,
        timeout_s: float = 20.0,
        tokens: list[int] | None = None,
    ) -> "Call":
        prompt = tokens or PROMPT
        seq = Sequence(f"{request_id}#d", [*prompt, first.sampled.token], len(prompt), greedy(), root_key("toy"))
        call = Call(seq)
        call.task = asyncio.create_task(self.decode.run(seq, request_id, handle or first.handle, timeout_s, call.events.append))
        return call

    async def settled(self) -> None:
        """Nothing is left anywhere: no block owned, no lease, no call, no quarantine. Raises when that does not come about."""
        async with asyncio.timeout(5):
            while self.residue():
                await asyncio.sleep(0.005)
        for engine in self.engines:
            engine.pool.check()
        assert not self.failures

    def residue(self) -> dict[str, int]:
        prefill, decode = self.engines
        left = {
            "prefill blocks": prefill.pool.num_owned,
            "decode blocks": decode.pool.num_owned,
            "sequences": len(prefill.sequences) + len(decode.sequences),
            "leases": self.prefill.exporter.num_leases,
            "quarantine": self.decode.importer.quarantined_blocks,
            "busy": int(not self.prefill.idle) + int(not self.decode.idle),
        }
        return {name: count for name, count in left.items() if count}


@dataclass
class Call:
    seq: Sequence
    events: list[Event] = field(default_factory=list)
    task: asyncio.Task[None] = field(init=False)

    @property
    def tokens(self) -> list[int]:
        return [event.token for event in self.events if isinstance(event, Sampled)]

    @property
    def adopted(self) -> Adopted:
        return next(event for event in self.events if isinstance(event, Adopted))

    @property
    def finished(self) -> Finished:
        assert isinstance(self.events[-1], Finished), self.events[-1]
        return self.events[-1]

    @property
    def error(self) -> BatonError:
        assert isinstance(self.events[-1], BatonError), self.events[-1]
        return self.events[-1]


def greedy(**change: Any) -> SamplingParams:
    return replace(SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True), **change)


def expected(first: int = 0) -> list[int]:
    return naive(PROMPT, greedy())[first:]


@asynccontextmanager
async def pair(
    *,
    checks: Checks | None = None,
    on_failure: Any = "recompute",
    decode_blocks: int = 64,
    decode_layout: dict[str, Any] | None = None,
    ttl_s: float = 10.0,
    tracer: Tracer | None = None,
) -> AsyncIterator[Pair]:
    failures: list[BaseException] = []
    clock = Clock()

    def engine(blocks: int, change: dict[str, Any]) -> Engine:
        runner = ToyRunner(CONFIG, "toy", BLOCK)
        runner.layout = replace(runner.layout, **change)
        runner.attach(KvPool(runner.layout, blocks))
        return Engine(runner, Limits(8, 64), min(128, blocks * BLOCK))

    engines = engine(64, {}), engine(decode_blocks, decode_layout or {})
    book, tracer = Book("decode", "decode-0"), tracer or Tracer()
    prefill = PrefillWorker(BLOCK, tracer)
    decode = DecodeWorker("decode-0", BLOCK, on_failure, book, tracer)
    prefill.loop = EngineLoop(engines[0], prefill.on_step, lambda events: None, failures.append)
    decode.loop = EngineLoop(engines[1], decode.on_step, lambda events: None, failures.append)
    pools = [e.runner.pool for e in engines]
    serving, reading = (TcpTransport(pool, "127.0.0.1", KEY) for pool in pools)
    prefill.exporter = exporter = Exporter(
        worker="prefill-0", incarnation=7, address="there", pool=pools[0], key=KEY, ttl_s=ttl_s, free=prefill.free, clock=clock
    )
    wire = Wire(exporter, pools[0].layout, serving.address, check_layout=checks is None or checks.layout)

    async def free(blocks: Any) -> None:
        await decode.loop.call(lambda engine: engine.release(blocks))

    decode.importer = Importer(
        transport=reading, pool=pools[1], key=KEY, connect=lambda address: wire, free=free, read_timeout_s=2.0, checks=checks
    )
    prefill.loop.start()
    decode.loop.start()
    reaper = asyncio.create_task(exporter.run_reaper(0.01))
    try:
        yield Pair(prefill, decode, wire, clock, engines, failures, book)
    finally:
        reaper.cancel()
        await decode.importer.close()
        serving.close()
        reading.close()
        await prefill.loop.close()
        await decode.loop.close()
