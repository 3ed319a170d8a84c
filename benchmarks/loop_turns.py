"""The longest turn of the router's event loop, and of the workers' with a long prompt, where much work comes at once.

    python benchmarks/loop_turns.py [--place NAME ...] [--before FOLDER] [--json FILE]

In one turn the loop runs everything that was ready when the turn began; what arrives meanwhile waits. A turn is measured in processor time
of the loop's thread, without the garbage collector, so neither other processes nor this one's heap count. Each place runs in its own
process, against the router's own classes; workers are one gRPC server in a second process that answers for all names. `--before`: a
checkout to compare with. What the prefix index costs is measured beside the design before it (`SetsOfKeys`), in turns.
"""

import argparse
import asyncio
import contextlib
import inspect
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, cast

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

import grpc
from big_prompts import Writer
from fake_workers import MODEL, TOKENIZER, record
from handoff_pair import pair
from machine import describe
from readers import hall
from turns import Turn, Turns, watched

from baton.cli.up import SHIPPED
from baton.cluster import metric_table, metrics
from baton.cluster.config import Config, RedisConfig
from baton.cluster.config_router import RouterConfig, SloConfig
from baton.cluster.keys import ApiKeys
from baton.cluster.metrics_http import Exposition
from baton.cluster.records import BlockEvent, Load, RouterRecord, WorkerRecord
from baton.cluster.redis_registry import RedisRegistry
from baton.cluster.telemetry import Tracer
from baton.engine.core.block_key import DEVICE, extend_keys, root_key
from baton.engine.core.blocks import CacheChange
from baton.engine.core.contract import cache_events
from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.toy import ToyRunner
from baton.launch.redis_server import EmbeddedRedis
from baton.simulate.memory_registry import MemoryRegistry
from baton.v1 import generation_pb2, generation_pb2_grpc, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from router import gate
from router.admin import AdminDoor, Own
from router.admission import Admission
from router.clients import GrpcWorkers
from router.dispatch import Dispatcher
from router.http.page import Page
from router.journal import Journal, JournalEntry
from router.live import Live
from router.policy import Choice, choose_decode
from router.prefix_index import MAX_AHEAD, MAX_ENTRIES
from router.request import Request, Stopwatch, Trace
from router.tokenizer import Tokenizer
from router.validate import Ask
from router.view import ClusterView
from router.watch import Watch

BOUND_MS = 20.0
KEYS, EVENTS, WORKERS, REQUESTS = 1_000_000, 100_000, 1000, 512
LONG = 79_000  # tokens of 220 KB
PRESENT, FORMER = INDEXES = ("present", "former")
ROUNDS = 3  # of both indexes
PLACES: dict[str, tuple[str, Callable[[], Awaitable[Turns]]]] = {}
Place = Callable[[], Awaitable[Turns]]


def place(name: str, size: str) -> Callable[[Place], Place]:
    def add(run: Place) -> Place:
        PLACES[name] = size, run
        return run

    return add


class Everyone(worker_pb2_grpc.WorkerServicer, worker_pb2_grpc.DecodeServicer):
    """All workers of a cluster. A call to decode on d0 gets one token and nothing more; on any other worker it is finished."""

    async def Probe(self, request: pb.ProbeRequest, context: Any) -> pb.ProbeResponse:
        load = pb.WorkerLoad(running=time.time_ns() % 7, credit_tokens=10**8)
        return pb.ProbeResponse(state="ready", load=load, roles=["decode"])

    async def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.DescribeResponse:
        return pb.DescribeResponse(record=pb.WorkerRecord(**asdict(record(request.to.worker))), residue=pb.Residue())

    async def Snapshot(self, request: pb.SnapshotRequest, context: Any) -> AsyncIterator[pb.SnapshotResponse]:
        for start in range(0, KEYS, 4096):
            keys = os.urandom(16 * min(4096, KEYS - start))
            yield pb.SnapshotResponse(incarnation=1, sequence=1, keys=keys, medium="device")

    async def Session(self, request_iterator: AsyncIterator[pb.DecodeCommands], context: Any) -> AsyncIterator[pb.DecodeEvents]:
        commands = (command async for message in request_iterator for command in message.commands)
        async for command in commands:
            if command.WhichOneof("command") != "start":
                continue
            token = pb.DecodeEvent(call_id=command.call_id, token=pb.GeneratedToken(id=7))
            finished = pb.DecodeFinished(reason=generation_pb2.FINISH_REASON_LENGTH)
            ended = pb.DecodeEvent(call_id=command.call_id, finished=finished)
            yield pb.DecodeEvents(events=[token] if command.start.to.worker == "d0" else [token, ended])


async def serve() -> None:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    worker_pb2_grpc.add_WorkerServicer_to_server(Everyone(), server)
    worker_pb2_grpc.add_DecodeServicer_to_server(Everyone(), server)
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await server.wait_for_termination()


@contextlib.contextmanager
def everyone() -> Iterator[str]:
    """The address of all workers."""
    process = subprocess.Popen([sys.executable, __file__, "--serve"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"127.0.0.1:{int(process.stdout.readline())}"
    finally:
        process.kill()
        process.wait()


async def until(condition: Callable[[], Any], within_s: float = 120.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


def members(count: int, address: str = "127.0.0.1:1") -> list[WorkerRecord]:
    load = Load(credit_tokens=10**8)
    return [record(f"d{i}", address=address, load=load, kv_blocks=10**6, max_num_seqs=64) for i in range(count)]


@contextlib.asynccontextmanager
async def watching(view: ClusterView, registry: Any, workers: GrpcWorkers) -> AsyncIterator[Watch]:
    watch = Watch(view, registry, workers, 60.0)
    running = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await workers.close()


def random_keys(count: int) -> list[bytes]:
    data = os.urandom(16 * count)
    return [data[at : at + 16] for at in range(0, len(data), 16)]


@place("snapshot of a worker's cache", f"{KEYS:,} keys")
async def snapshot() -> Turns:
    with everyone() as address:
        registry, view = MemoryRegistry(), ClusterView({MODEL: TOKENIZER})
        await registry.join(members(1, address)[0])
        with watched() as turns:
            async with watching(view, registry, GrpcWorkers(Config().security)):
                await until(lambda: view.models[MODEL].index.entries >= KEYS)
        return turns


@contextlib.contextmanager
def redis() -> Iterator[tuple[str, RedisConfig]]:
    with EmbeddedRedis() as server:
        yield server.url, RedisConfig(stream_maxlen=2 * EVENTS, record_ttl_s=600, command_timeout_s=5)


def publish(url: str, events: list[BlockEvent]) -> None:
    async def run() -> None:
        registry = RedisRegistry(url, "c", RedisConfig(stream_maxlen=2 * EVENTS))
        await registry.publish(events)
        await registry.close()

    asyncio.run(run())


@place("block events in Redis", f"{EVENTS:,} events of 8 keys")
async def events() -> Turns:
    with redis() as (url, config):
        registry, view = RedisRegistry(url, "c", config), ClusterView({MODEL: TOKENIZER})
        await registry.join(members(1)[0])
        keys = random_keys(8 * EVENTS)
        told = [BlockEvent("d0", 1, i + 1, "stored", tuple(keys[8 * i : 8 * i + 8])) for i in range(EVENTS)]
        async with watching(view, registry, GrpcWorkers(Config().security)):
            await until(lambda: view.members.records())
            await asyncio.sleep(0.5)
            with watched() as turns:
                await asyncio.sleep(0)
                publishing = asyncio.to_thread(publish, url, told)
                await publishing
                await until(lambda: view.models[MODEL].index.entries >= 8 * EVENTS)
        await registry.close()
        return turns


def full_index(view: ClusterView, keys: list[bytes]) -> None:
    view.update(members(1), 0.0)
    view.models[MODEL].index.snapshot("d0", 1, 1, set(keys))


@place("a worker's next process: its entries are wiped", f"{KEYS:,} keys")
async def wipe() -> Turns:
    view = ClusterView({MODEL: TOKENIZER})
    full_index(view, random_keys(KEYS))
    with watched() as turns:
        await asyncio.sleep(0.01)
        view.update([replace(members(1)[0], incarnation=2)], 1.0)
        for _ in range(200):
            await asyncio.sleep(0)
            getattr(view.models[MODEL].index, "sweep", lambda most: None)(4096)
    return turns


@place("a worker clears its cache", f"{KEYS // 4:,} keys")
async def clear() -> Turns:
    keys = random_keys(KEYS // 4)
    with redis() as (url, config):
        registry, view = RedisRegistry(url, "c", config), ClusterView({MODEL: TOKENIZER})
        await registry.join(members(1)[0])
        told = [BlockEvent("d0", 1, e.sequence, "removed", e.keys) for e in cache_events([CacheChange(False, key) for key in keys], 1)]
        async with watching(view, registry, GrpcWorkers(Config().security)):
            await until(lambda: view.members.records())
            await asyncio.sleep(0.5)
            view.models[MODEL].index.snapshot("d0", 1, 1, set(keys))
            with watched() as turns:
                await asyncio.sleep(0)
                await asyncio.to_thread(publish, url, told)
                await until(lambda: not view.models[MODEL].index.entries)
        await registry.close()
        return turns


@place("the registry's records join, and change", f"{WORKERS:,} workers")
async def records() -> Turns:
    with redis() as (url, config):
        registry, view = RedisRegistry(url, "c", config), ClusterView({MODEL: TOKENIZER})

        async def change() -> None:
            other = RedisRegistry(url, "c", config)
            for running in (1, 2, 3):
                for member in members(WORKERS):
                    await other.join(replace(member, load=Load(running=running, credit_tokens=10**8)))
            await other.close()

        await asyncio.to_thread(asyncio.run, change())
        watch = Watch(view, registry, GrpcWorkers(Config().security), 60.0)
        with watched() as turns:
            await asyncio.sleep(0)
            following = asyncio.create_task(watch._run_members())
            await asyncio.to_thread(asyncio.run, change())
            await until(lambda: len(view.members.records()) == WORKERS)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
        await registry.close()
        return turns


@place("probes", f"{WORKERS:,} workers")
async def probes() -> Turns:
    with everyone() as address:
        view, workers = ClusterView({MODEL: TOKENIZER}), GrpcWorkers(Config().security)
        view.update(members(WORKERS, address), 0.0)
        watch = Watch(view, MemoryRegistry(), workers, 2.0)
        with watched() as turns:
            await asyncio.sleep(0)
            probing = asyncio.create_task(watch._probes.run())
            await asyncio.sleep(6)
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)
        assert sum(member.load.credit_tokens == 10**8 for member in view.members.records()) == WORKERS
        await workers.close()
        return turns


def journal(keep: int = REQUESTS) -> Journal:
    return Journal(metrics.Book("router", model="m"), Tracer(), "m", SloConfig(e2e_s=100.0), keep=keep)


def open_entry(book: Journal, name: str) -> JournalEntry:
    entry = book.open("chat", name)
    entry.request = Request(name, list(range(600)), 512, SamplingParams(max_tokens=99), "", time.monotonic() + 60, entry.trace)
    entry.trace.watch.enter("prefill", "p0")
    entry.trace.watch.enter("decode", "d1")
    for _ in range(64):
        entry.trace.note_token()
    return entry


class OtherRouters:
    """Seven other routers, each of which knows the same workers."""

    def __init__(self, answer: Any, routers: int) -> None:
        self.others = [RouterRecord(f"router-{i}", 1, 1, "h", {"admin": "127.0.0.1:9"}, "m") for i in range(1, 1 + routers)]
        self._answer = answer

    def together(self, own: RouterRecord) -> list[RouterRecord]:
        return [own, *self.others]

    async def ask(self, method: str, request: Any) -> list[Any]:
        await asyncio.sleep(0)
        return [type(self._answer).FromString(self._answer.SerializeToString()) for _ in self.others]


OWN = RouterRecord("router-0", 1, 1, "h", {"admin": "127.0.0.1:9"}, "m")


async def house(address: str, routers: int = 0) -> tuple[Live, AdminDoor, GrpcWorkers, Journal]:
    view, workers, book = ClusterView({MODEL: TOKENIZER}), GrpcWorkers(Config().security), journal()
    view.update(members(WORKERS, address), 0.0)
    watch: Any = Watch(view, MemoryRegistry(), workers, 2.0)
    for i in range(REQUESTS):
        entry = open_entry(book, f"old{i}")
        entry.trace.watch.stop()
        book.close(entry, "ok", "stop")
        open_entry(book, f"new{i}").__enter__()
    admission, nobody = Admission(REQUESTS, REQUESTS), cast(Any, OtherRouters(pb.LiveResponse(), 0))
    for some in range(0, WORKERS, 50):  # so that the connections are there
        await asyncio.gather(*(workers.describe(record) for record in view.members.records()[some : some + 50]))
    asks = (workers,) if "workers" in inspect.signature(Live).parameters else ()  # an older one asks each worker
    live = cast(Any, Live)(view, *asks, watch, admission, book, nobody, lambda: OWN)
    if routers:
        alone = pb.LiveResponse(**await live.look(alone=True))
        live._peers = cast(Any, OtherRouters(alone, routers))
    door = AdminDoor(view, workers, watch, book, live, nobody, Own(lambda: OWN, cast(Any, None), cast(Any, None)))
    return live, door, workers, book


@place("the page's data, eight viewers", f"{WORKERS:,} workers, {REQUESTS} requests")
async def page() -> Turns:
    with everyone() as address:
        live, _, workers, _ = await house(address)
        visit = Page(live, cast(Any, None), ApiKeys(), "127.0.0.1")._state.text

        async def viewer() -> None:
            for _ in range(3):
                await visit()
                await asyncio.sleep(0.5)

        with watched() as turns:
            await asyncio.sleep(0)
            await asyncio.gather(*(viewer() for _ in range(8)))
        await workers.close()
        return turns


@place("the page's data of eight routers", f"{WORKERS:,} workers, {REQUESTS} requests each")
async def merged() -> Turns:
    with everyone() as address:
        live, _, workers, _ = await house(address, routers=7)
        with watched() as turns:
            await asyncio.sleep(0)
            await live.look()
            await asyncio.sleep(0.5)
            await live.look()
        await workers.close()
        return turns


@place("`baton status`", f"{WORKERS:,} workers")
async def status() -> Turns:
    with everyone() as address:
        _, door, workers, _ = await house(address)
        with watched() as turns:
            await asyncio.sleep(0)
            told = await door.Status(pb.StatusRequest(), cast(Any, None))
            assert len(told.workers) == WORKERS and not any(worker.error for worker in told.workers)
            told.SerializeToString()
        await workers.close()
        return turns


@place("`baton trace`", f"{REQUESTS} records, seven other routers")
async def traces() -> Turns:
    with everyone() as address:
        _, door, workers, _ = await house(address)
        answer = await door.Trace(pb.TraceRequest(last=REQUESTS, alone=True), cast(Any, None))
        door._peers = cast(Any, OtherRouters(answer, 7))
        with watched() as turns:
            await asyncio.sleep(0)
            (await door.Trace(pb.TraceRequest(last=REQUESTS), cast(Any, None))).SerializeToString()
        await workers.close()
        return turns


@place("requests that end at once", f"{REQUESTS} requests")
async def ends() -> Turns:
    book, began = journal(), asyncio.Event()

    async def one(name: str) -> None:
        with open_entry(book, name):
            await began.wait()
            await asyncio.sleep(60)

    tasks = [asyncio.create_task(one(str(i))) for i in range(REQUESTS)]
    await asyncio.sleep(0.1)
    with watched() as turns:
        await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return turns


@place("a scrape of the metrics", "10,000 series")
async def scrape() -> Turns:
    metric_table.MAX_OPEN = 10_000
    book = metrics.Book("router", model="m")
    for name in ("baton_router_worker_usable", "baton_router_worker_credit_tokens", "baton_router_worker_waiting_tokens"):
        book.read(name, lambda: {(f"decode-{i}", "decode"): i for i in range(3334)})
    exposition = Exposition(book)
    await exposition.page()
    with watched() as turns:
        await asyncio.sleep(0)
        text = (await exposition.page())[1]
    assert text.count(b"\nbaton_router_worker") >= 10_000
    return turns


@place("streams of a worker that dies", "256 streams, 64 workers with 512 keys")
async def retries() -> Turns:
    with everyone() as address:
        view, workers = ClusterView({MODEL: TOKENIZER}), GrpcWorkers(Config().security)
        view.update(members(64, address), 0.0)
        prompt = list(range(512 * 16))
        keys: list[bytes] = []
        extend_keys(keys, root_key("model", ""), prompt, 16)
        for member in view.members.records():
            view.models[MODEL].index.apply(BlockEvent(member.name, 1, 1, "stored", tuple(keys)))
        dispatcher = Dispatcher(view.models[MODEL], workers, RouterConfig())
        others = [member for member in view.members.records() if member.name != "d0"]
        for member in others:
            view.members.mark_down(member.name, 1)
        begun = 0

        async def one(number: int) -> None:
            nonlocal begun
            request = Request(f"r{number}", list(prompt), len(prompt), SamplingParams(max_tokens=9), "", time.monotonic() + 600, trace())
            request.keys.extend(keys)
            async for _ in dispatcher.generate(request):
                begun += request.output_len == 1
            assert request.trace.retries == 1

        tasks = []
        for i in range(256):
            tasks.append(asyncio.create_task(one(i)))
            await asyncio.sleep(0.005)
        await until(lambda: begun == 256)
        for member in others:
            view.members.note_answer(member.name, 1, "ready", member.load, 1)
        with watched() as turns:
            await asyncio.sleep(0)
            await workers.lose(view.members.record("d0"))
            await asyncio.gather(*tasks)
        await workers.close()
        return turns


def trace() -> Trace:
    return Trace(Stopwatch(time.monotonic))


@place("requests end, and others are let in", f"{REQUESTS} and {REQUESTS} requests, {WORKERS:,} workers")
async def queue() -> Turns:
    view, admission, book = ClusterView({MODEL: TOKENIZER}), Admission(REQUESTS, REQUESTS), journal()
    view.update(members(WORKERS), 0.0)
    door, end, ended = gate.Gate(admission, view.models[MODEL], RouterConfig(), {}), asyncio.Event(), 0

    async def one(number: int) -> None:
        nonlocal ended
        with book.open("chat", str(number)) as entry:
            async with door.place(entry, Ask(model="m"), time.monotonic() + 600):
                await end.wait()
            entry.finish = "stop"
            entry.trace.watch.stop()
            ended += 1

    admission.pace.note(1.0, 0.5, 10)
    with watched() as turns:
        await asyncio.sleep(0)
        tasks = [asyncio.create_task(one(i)) for i in range(2 * REQUESTS)]
        await asyncio.sleep(0.2)
        end.set()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert ended > REQUESTS
    return turns


@place("prompts of 220 KB at the router", "8 at once, over gRPC")
async def long_prompts() -> Turns:
    writer = Writer()
    sampling = generation_pb2.SamplingParams(max_tokens=3, ignore_eos=True)
    asks = [generation_pb2.GenerateRequest(text=writer.text(), sampling=sampling) for _ in range(8)]
    async with hall(Tokenizer.load(SHIPPED), 3, 0) as made:
        stub = generation_pb2_grpc.GenerationStub(made.channel)

        async def one(ask: Any) -> None:
            async for _ in stub.Generate(ask):
                pass

        with watched() as turns:
            await asyncio.gather(*map(one, asks))
    return turns


def roomy() -> Engine:
    runner = ToyRunner({"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 1 << 17, "kv_width": 8}, "toy", 16)
    runner.attach(KvPool(runner.layout, LONG // 16 + 16))
    return Engine(runner, Limits(8, 16_384), LONG + 100)


@place("a prompt of 220 KB, handed over", f"a prefill and a decode worker, {LONG:,} tokens")
async def handed_over() -> Turns:
    prompt = [17 * i % 255 for i in range(LONG)]
    async with pair(engines=(roomy(), roomy())) as workers:
        with watched() as turns:
            call = workers.start(await workers.hand_over(tokens=prompt), tokens=prompt)
            await call.task
        assert call.finished.handoff.recomputed_tokens == 0
    return turns


@place("the file of API keys", "10,000 keys, 100 requests")
async def key_file() -> Turns:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        lines = [f"key{i} {os.urandom(32).hex()} tenant{i % 100}" for i in range(10_000)]
        file.write_text("\n".join(lines[:-1]))
        keys = ApiKeys.load(str(file))
        file.write_text("\n".join(lines))

        async def one() -> None:
            with contextlib.suppress(Exception):
                keys.tenant("Bearer unknown")

        with watched() as turns:
            await asyncio.sleep(0)
            if "thread" in (ApiKeys.refresh.__doc__ or ""):  # as the router calls it
                assert await asyncio.to_thread(keys.refresh)
            else:
                assert keys.refresh()
            await asyncio.gather(*(one() for _ in range(100)))
        return turns


@place("a log that nobody reads", "10,000 lines into a full pipe")
async def log_pipe() -> Turns:
    """Wall time: a process that waits uses no processor."""
    code = (
        "import logging, time; from baton.cluster.logs import setup_logging; from baton.cluster.config import TelemetryConfig\n"
        "setup_logging(TelemetryConfig(), 'router'); worst = 0.0\n"
        "for i in range(10_000):\n"
        "    began = time.perf_counter(); logging.getLogger('x').warning('line %d %s', i, 'x' * 60)\n"
        "    worst = max(worst, time.perf_counter() - began)\n"
        "print(worst, flush=True); import os; os._exit(0)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        told = await asyncio.wait_for(asyncio.to_thread(process.stdout.readline), 10)
        longest = float(told)
    except TimeoutError:
        longest = float("inf")
    finally:
        process.kill()
    return Turns(1, Turn(longest))


@dataclass(slots=True)
class _Keys:
    incarnation: int
    last: int = 0
    keys: set[bytes] = field(default_factory=set)
    ahead: dict[int, BlockEvent] = field(default_factory=dict)
    newest: int | None = None
    predicted: OrderedDict[bytes, float] = field(default_factory=OrderedDict)


class SetsOfKeys:
    """The former design of `router.prefix_index`, as it was but for what is not measured here: a set of keys for each worker, and a choice
    walks the keys of its prompt once for each of them."""

    tiered = False

    def __init__(self) -> None:
        self.refused = 0
        self._workers: dict[str, _Keys] = {}

    @property
    def entries(self) -> int:
        return sum(len(held.keys) + len(held.predicted) for held in self._workers.values())

    def join(self, worker: str, incarnation: int) -> None:
        known = self._workers.get(worker)
        if known is None or known.incarnation != incarnation:
            self._workers[worker] = _Keys(incarnation)

    def apply(self, event: BlockEvent) -> str:
        held = self._reported(event.worker, event.incarnation)
        if held is None:
            return "stale"
        if event.sequence <= held.last or event.sequence in held.ahead:
            return "duplicate"
        held.newest = max(held.newest or 0, event.sequence)
        held.ahead[event.sequence] = event
        while (following := held.ahead.pop(held.last + 1, None)) is not None:
            held.last = following.sequence
            if following.kind == "stored":
                self._store(held, following.keys)
            else:
                held.keys.difference_update(following.keys)
        if len(held.ahead) > MAX_AHEAD:
            del held.ahead[min(held.ahead)]
        return "ok" if held.last >= event.sequence else "gap"

    def snapshot(self, worker: str, incarnation: int, sequence: int, keys: Iterable[bytes]) -> None:
        """A set becomes the index's own: a million keys one by one took a second."""
        held = self._workers[worker] = _Keys(incarnation, sequence)
        if isinstance(keys, set):
            held.keys = keys
        else:
            self._store(held, keys)

    def overlap(self, keys: Sequence[bytes], now: float, medium: str = DEVICE) -> dict[str, int]:
        found = {}
        for name, held in self._workers.items():
            while held.predicted and next(iter(held.predicted.values())) <= now:
                held.predicted.popitem(last=False)
            count = 0
            for key in keys:
                if key not in held.keys and held.predicted.get(key, now) <= now:
                    break
                count += 1
            if count:
                found[name] = count
        return found

    def reach(self, keys: Sequence[bytes]) -> dict[str, int]:
        return {}

    def _reported(self, worker: str, incarnation: int) -> _Keys | None:
        held = self._workers.get(worker)
        if held is None or incarnation < held.incarnation:
            return None
        self.join(worker, incarnation)
        return self._workers[worker]

    def _store(self, held: _Keys, keys: Iterable[bytes]) -> None:
        room = MAX_ENTRIES - self.entries
        for key in keys:
            if held.predicted.pop(key, None) is not None:
                room += 1
            if key in held.keys:
                continue
            if room <= 0:
                self.refused += 1
                continue
            held.keys.add(key)
            room -= 1


def indexed(design: str, records: list[WorkerRecord]) -> ClusterView:
    view = ClusterView({MODEL: TOKENIZER})
    if design == FORMER:
        view.models[MODEL].index = cast(Any, SetsOfKeys())
    view.update(records, 0.0)
    return view


def index_facts(design: str) -> dict[str, float]:
    """What a prefix index costs: memory, events, and a choice among many workers that all hold the prompt."""
    before, view = _resident_mib(), indexed(design, members(1))
    view.models[MODEL].index.snapshot("d0", 1, 0, set(random_keys(KEYS)))
    facts = {"mib_of_a_million_keys": _resident_mib() - before}
    told = [BlockEvent("d0", 1, i + 1, "stored", (os.urandom(16),)) for i in range(EVENTS)]
    began = time.thread_time()
    for event in told:
        view.models[MODEL].index.apply(event)
    facts["events_a_second"] = EVENTS / (time.thread_time() - began)
    view, prompt = indexed(design, members(256)), random_keys(4096)
    for member in view.members.records():
        view.models[MODEL].index.snapshot(member.name, 1, 0, list(prompt))
    began = time.thread_time()
    for _ in range(100):
        assert isinstance(choose_decode(view.models[MODEL], prompt, 4097 * 16, 0.0), Choice)
    facts["ms_of_a_choice_256_workers_4096_keys"] = (time.thread_time() - began) * 10
    return facts


def indexes_in_turns() -> dict[str, Any]:
    """Medians of either design, and the ratio of each round. Each measurement has a process of its own."""
    runs: dict[str, list[dict[str, float]]] = {design: [] for design in INDEXES}
    for number in range(ROUNDS):
        for design in reversed(INDEXES) if number % 2 else INDEXES:
            done = subprocess.run([sys.executable, __file__, "--index", design], capture_output=True, check=True)
            runs[design].append(json.loads(done.stdout))
    present, former = ({key: median(run[key] for run in told) for key in told[0]} for told in runs.values())
    ratios = {key: [one[key] / other[key] for one, other in zip(*runs.values(), strict=True)] for key in present}
    return {"index": present, "index_former": former, "index_present_over_former": ratios}


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measured(name: str, folder: Path) -> float | None:
    """Milliseconds; None: the place failed there."""
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    command = [sys.executable, __file__, "--one", name]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)
    found = [line for line in done.stdout.splitlines() if line.startswith("longest ")]
    if not found:
        print(done.stderr[-2000:], file=sys.stderr)
        return None
    return float(found[-1].split()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", action="append", choices=PLACES, help="only these")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--index", nargs="?", choices=INDEXES, const=PRESENT, help="only what this prefix index costs")
    parser.add_argument("--one", choices=PLACES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncio.run(serve())
    elif options.index:
        print(json.dumps(index_facts(options.index), indent=1))
    elif options.one:
        longest = asyncio.run(cast(Any, PLACES[options.one][1]())).longest
        print(longest, f"\nlongest {1000 * longest.cpu_s}", flush=True)
        os._exit(0)
    else:
        compare(options.place or list(PLACES), options.before, options.json)


def compare(names: list[str], before: Path | None, file: Path | None) -> None:
    here = Path(__file__).resolve().parents[1]
    rows: list[dict[str, Any]] = []
    print(machine := describe(), f"\n{'place':<50}{'size':<42}{'before, ms':>12}{'after, ms':>12}")
    for name in names:
        row = {"place": name, "size": PLACES[name][0], "before_ms": before and measured(name, before), "after_ms": measured(name, here)}
        shown = [f"{value:12.1f}" if value is not None else f"{'-':>12}" for value in (row["before_ms"], row["after_ms"])]
        print(f"{name:<50}{row['size']:<42}{''.join(shown)}", flush=True)
        rows.append({key: "never ends" if value == math.inf else value for key, value in row.items()})
    found = indexes_in_turns()
    print(f"\n{'prefix index':<50}{'former':>16}{'present':>16}{'present / former':>20}")
    for key, value in found["index"].items():
        ratio = median(found["index_present_over_former"][key])
        print(f"{key:<50}{found['index_former'][key]:16,.2f}{value:16,.2f}{ratio:20.4f}")
    if file:
        file.write_text(json.dumps({"machine": machine, "bound_ms": BOUND_MS, "places": rows, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
