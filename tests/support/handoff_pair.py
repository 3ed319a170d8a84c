"""A prefill and a decode worker in one process: real engines and threads, a real TCP transport, and a connection that tests can break. A
second prefill worker can join them."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from host_pool import on_host

from baton.cluster.config_engine import KvConfig
from baton.cluster.errors import BatonError
from baton.cluster.metrics import Book
from baton.cluster.telemetry import Tracer
from baton.engine.core.block_key import root_key
from baton.engine.core.contract import Listener
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvLayout, KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.loop import EngineLoop
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.sequence import Sequence
from baton.engine.core.toy import ToyRunner, naive
from baton.worker.kv_port import KvPlace, KvPort
from decode_worker.call import Adopted, Event, Finished, Made
from decode_worker.worker import DecodeWorker
from kvtransfer.handle import KvHandle, Piece, Wish, mac_key
from kvtransfer.importer import Checks, PeerFacts
from kvtransfer.tcp_transport import TcpTransport
from prefill_worker.worker import Prefilled, PrefillWorker

BLOCK = 4
CONFIG = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 4096, "kv_width": 8}
KEY = mac_key("k" * 32)
PROMPT = list(range(1, 19))  # four full blocks and a partial one


@dataclass
class Wire:
    """Implements Peer by calling the port at the other end. `on` maps the name of a call to a hook that runs before the call."""

    port: KvPort
    check_layout: bool = True
    forge: Callable[[Piece], Piece] = lambda piece: piece  # what a faulty peer sends instead
    on: dict[str, Callable[[], Any]] = field(default_factory=dict)

    def hang(self, name: str, passing: int = 0) -> tuple[asyncio.Event, asyncio.Event]:
        """Calls of that name wait, after the first `passing` of them. Returns two events: one has been reached; they may go on."""
        reached, gate, passed = asyncio.Event(), asyncio.Event(), 0

        async def hang() -> None:
            nonlocal passed
            passed += 1
            if passed > passing:
                reached.set()
                await gate.wait()

        self.on[name] = hang
        return reached, gate

    async def _pass(self, name: str) -> None:
        hook = self.on.get(name)
        if hook is not None and (waiting := hook()) is not None:
            await waiting

    async def handshake(self, layout: KvLayout, transport: str) -> PeerFacts:
        await self._pass("handshake")
        if self.check_layout:
            self.port.exporter.handshake(layout)
        exporter = self.port.exporter
        return PeerFacts(exporter.worker, exporter.incarnation, self.port.pool.layout, self.port.transport.address())

    async def piece(self, handle: KvHandle, first: int, wait_s: float, direct: bool) -> Piece:
        await self._pass("piece")
        return self.forge(await self.port.exporter.piece(handle, handle.request_id, first, wait_s, direct))

    async def renew(self, handle: KvHandle) -> float:
        await self._pass("renew")
        return self.port.exporter.renew(handle, handle.request_id) / 1000

    async def release(self, handle: KvHandle) -> bool:
        await self._pass("release")
        return self.port.exporter.release(handle, handle.request_id)

    async def lend(self, wish: Wish) -> KvHandle:
        await self._pass("lend")
        return await self.port.lend(wish)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Pair:
    prefill: PrefillWorker
    decode: DecodeWorker
    wire: Wire  # from the decode to the prefill worker
    back: Wire  # from the prefill to the decode worker
    clock: Clock
    engines: tuple[Engine, Engine]
    loops: tuple[EngineLoop, EngineLoop]
    failures: list[BaseException]
    book: Book  # of the decode worker
    wires: dict[str, Wire]  # by address

    @property
    def runners(self) -> tuple[ToyRunner, ToyRunner]:
        prefill, decode = (engine.runner for engine in self.engines)
        assert isinstance(prefill, ToyRunner) and isinstance(decode, ToyRunner)
        return prefill, decode

    async def hand_over(
        self, request_id: str = "r", tokens: list[int] | None = None, params: SamplingParams | None = None, **more: Any
    ) -> Prefilled:
        seq = Sequence(f"{request_id}#p", list(tokens or PROMPT), len(tokens or PROMPT), params or greedy(), root_key("toy"), hold=True)
        return await self.prefill.prefill(seq, request_id, **more)

    async def blocks_of(self, handle: KvHandle | None) -> tuple[int, ...]:
        """The holder's blocks behind a complete handle, after they have been digested."""
        assert handle is not None
        export = self.prefill.port.exporter._exports[handle.lease_id]
        async with asyncio.timeout(30):
            while not export.complete:
                await asyncio.sleep(0)
        return tuple(export.block_ids)

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
        call.task = asyncio.create_task(self.decode.serve(self.decode.open(seq, request_id, handle or first.handle, call.emit), timeout_s))
        return call

    def start_live(self, handle: KvHandle, request_id: str = "r", timeout_s: float = 20.0, tokens: list[int] | None = None) -> "Call":
        """The caller must set `call.first` to the first token."""
        prompt = tokens or PROMPT
        call = Call(Sequence(f"{request_id}#d", list(prompt), len(prompt), greedy(), root_key("toy")))
        call.first = asyncio.get_running_loop().create_future()
        running = self.decode.serve(self.decode.open(call.seq, request_id, handle, call.emit, call.first), timeout_s)
        call.task = asyncio.create_task(running)
        return call

    async def settled(self) -> None:
        """Waits until nothing is left anywhere: no owned block, lease, call or quarantined block. Raises if that takes too long."""
        async with asyncio.timeout(30):
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
            "leases": self.prefill.port.exporter.num_leases + self.decode.port.exporter.num_leases,
            "quarantine": self.prefill.port.importer.quarantined_blocks + self.decode.port.importer.quarantined_blocks,
            "busy": int(not self.prefill.idle) + int(not self.decode.idle),
        }
        return {name: count for name, count in left.items() if count}


@dataclass
class Call:
    seq: Sequence
    events: list[Event] = field(default_factory=list)
    task: asyncio.Task[None] = field(init=False)
    first: "asyncio.Future[int] | None" = None

    def emit(self, event: Event) -> None:
        """Keeps the event as it is now, because the door packs it into a message at once."""
        self.events.append(replace(event, handoff=replace(event.handoff)) if isinstance(event, Adopted) else event)

    @property
    def tokens(self) -> list[int]:
        return [event.sampled.token for event in self.events if isinstance(event, Made)]

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


def leased(first: Prefilled) -> KvHandle:
    assert first.handle is not None
    return first.handle


def greedy(**change: Any) -> SamplingParams:
    return replace(SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True), **change)


def expected(first: int = 0) -> list[int]:
    return naive(PROMPT, greedy())[first:]


def toy_engine(blocks: int, chunk: int = 64, layout: dict[str, Any] | None = None) -> Engine:
    runner = ToyRunner(CONFIG, "toy", BLOCK)
    runner.layout = replace(runner.layout, **(layout or {}))
    runner.attach(KvPool(runner.layout, blocks))
    return Engine(runner, Limits(8, chunk), min(128, blocks * BLOCK))


def open_port(
    name: str, loop: EngineLoop, wires: dict[str, Wire], clock: Clock, checks: Checks | None = None, ttl_s: float = 10.0
) -> KvPort:
    """The port of the worker of that name, which the others reach through `wires`."""
    transport = TcpTransport(on_host(loop.pool), "127.0.0.1", KEY)
    config = KvConfig(lease_ttl_s=ttl_s, read_timeout_s=min(2.0, ttl_s / 2), reap_interval_s=0.01)
    port = KvPort(KvPlace(name, 7, f"at {name}"), loop, transport, KEY, config, wires.__getitem__, checks)
    port.exporter._clock = clock
    wires[f"at {name}"] = Wire(port, check_layout=checks is None or checks.layout)
    return port


@asynccontextmanager
async def pair(
    *,
    checks: Checks | None = None,
    on_failure: Any = "recompute",
    decode_blocks: int = 64,
    decode_layout: dict[str, Any] | None = None,
    ttl_s: float = 10.0,
    tracer: Tracer | None = None,
    chunk: int = 64,
    live: bool = True,
    engines: tuple[Engine, Engine] | None = None,
) -> AsyncIterator[Pair]:
    """`engines`: of the prefill and the decode worker, instead of toys on a CPU."""
    failures: list[BaseException] = []
    clock = Clock()
    engines = engines or (toy_engine(64, chunk), toy_engine(decode_blocks, chunk, decode_layout))
    book, tracer = Book("decode", "decode-0"), tracer or Tracer()
    prefill = PrefillWorker(tracer, live)
    decode = DecodeWorker("decode-0", on_failure, book, tracer)
    loops = (
        EngineLoop(engines[0], Listener(prefill.on_step, lambda events: None, failures.append)),
        EngineLoop(engines[1], Listener(decode.on_step, lambda events: None, failures.append)),
    )
    prefill.engine, decode.engine = loops
    wires: dict[str, Wire] = {}
    prefill.port = open_port("prefill-0", loops[0], wires, clock, checks, ttl_s)
    decode.port = open_port("decode-0", loops[1], wires, clock, checks, ttl_s)
    ports = (prefill.port, decode.port)
    wire, back = wires["at prefill-0"], wires["at decode-0"]
    for loop in loops:
        loop.start()
    reapers = [asyncio.create_task(port.exporter.run_reaper(0.01)) for port in ports]
    try:
        yield Pair(prefill, decode, wire, back, clock, engines, loops, failures, book, wires)
    finally:
        for reaper, port in zip(reapers, ports, strict=True):
            reaper.cancel()
            await port.close()
            port.transport.close()
        for loop in loops:
            await loop.close()


@asynccontextmanager
async def another_prefill(p: Pair) -> AsyncIterator[tuple[PrefillWorker, Engine]]:
    """A second prefill worker beside the pair, `prefill-1`. When it ends, it must hold nothing."""
    engine, worker = toy_engine(64), PrefillWorker(Tracer())
    worker.engine = loop = EngineLoop(engine, Listener(worker.on_step, lambda events: None, p.failures.append))
    worker.port = open_port("prefill-1", loop, p.wires, p.clock)
    loop.start()
    try:
        yield worker, engine
        async with asyncio.timeout(30):
            while engine.pool.num_owned or engine.sequences or not worker.idle or worker.port.importer.quarantined_blocks:
                await asyncio.sleep(0.005)
        engine.pool.check()
    finally:
        await worker.port.close()
        worker.port.transport.close()
        await loop.close()
