"""Calls from the router to its workers, cancelled at every await: nothing is left in the router, and the worker finishes what it began."""

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from fake_workers import MODEL, TOKENIZER, record
from sweep import cancelled, until

from baton.cluster.config import Config, SecurityConfig
from baton.cluster.records import WorkerRecord
from baton.cluster.rpc import Context, Server
from baton.engine.core.sampling import SamplingParams
from baton.simulate.memory_registry import MemoryRegistry
from baton.v1 import generation_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from router import probes, watch
from router.clients import GrpcWorkers
from router.live_decode import LiveDecode
from router.request import Request, Stopwatch, Trace
from router.view import ClusterView
from router.watch import Watch
from router.workers import DecodeEvent, Ended


class Worker(worker_pb2_grpc.DecodeServicer, worker_pb2_grpc.WorkerServicer):
    """Answers everything. `open` counts the calls that have begun and not finished."""

    def __init__(self) -> None:
        self.open = 0
        self.calls: set[int] = set()
        self.prefills: set[int] = set()

    async def Session(self, request_iterator: AsyncIterator[pb.DecodeCommands], context: Context) -> AsyncIterator[pb.DecodeEvents]:
        """A live call gets its tokens once the worker has received the first one."""
        async for command in each(request_iterator):
            kind = command.WhichOneof("command")
            if kind == "start":
                self.calls.add(command.call_id)
            if kind == "cancel":
                self.calls.discard(command.call_id)
            elif command.call_id in self.calls and (kind == "first" or not command.start.live):
                yield pb.DecodeEvents(events=[pb.DecodeEvent(call_id=command.call_id, token=pb.GeneratedToken(id=7))])
                done = pb.DecodeFinished(reason=generation_pb2.FINISH_REASON_LENGTH)
                yield pb.DecodeEvents(events=[pb.DecodeEvent(call_id=command.call_id, finished=done)])
                self.calls.discard(command.call_id)

    async def Snapshot(self, request: pb.SnapshotRequest, context: Context) -> AsyncIterator[pb.SnapshotResponse]:
        self.open += 1
        try:
            for part in (b"a" * 16, b"b" * 16):
                yield pb.SnapshotResponse(incarnation=1, sequence=1, keys=part, medium="device")
                await asyncio.sleep(0)
        finally:
            self.open -= 1

    async def Probe(self, request: pb.ProbeRequest, context: Context) -> pb.ProbeResponse:
        self.open += 1
        try:
            await asyncio.sleep(0)
            return pb.ProbeResponse(state="ready")
        finally:
            self.open -= 1


class Prefills(worker_pb2_grpc.PrefillServicer):
    def __init__(self, worker: Worker) -> None:
        self._open = worker.prefills

    async def Session(self, request_iterator: AsyncIterator[pb.PrefillCommands], context: Context) -> AsyncIterator[pb.PrefillEvents]:
        async for command in each(request_iterator):
            call = command.call_id
            if command.HasField("cancel"):
                self._open.discard(call)
                continue
            self._open.add(call)
            yield pb.PrefillEvents(events=[pb.PrefillEvent(call_id=call, opened=pb.PrefillOpened(handle=b"h"))])
            await asyncio.sleep(0)
            yield pb.PrefillEvents(events=[pb.PrefillEvent(call_id=call, done=pb.PrefillDone(token=pb.GeneratedToken(id=5)))])
            self._open.discard(call)


async def each(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for message in messages:
        for command in message.commands:
            yield command


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Worker, GrpcWorkers, WorkerRecord]]:
    server, worker, workers = Server(Config(), 1 << 20), Worker(), GrpcWorkers(SecurityConfig())
    worker_pb2_grpc.add_DecodeServicer_to_server(worker, server.grpc)
    worker_pb2_grpc.add_PrefillServicer_to_server(Prefills(worker), server.grpc)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server.grpc)
    address = server.bind(0)
    await server.start()
    try:
        yield worker, workers, record("d0", address=address)
    finally:
        await workers.close()
        await server.stop(None)


def request() -> Request:
    return Request("r", [1, 2, 3], 3, SamplingParams(max_tokens=9), "", time.monotonic() + 60, Trace(Stopwatch(time.monotonic)))


async def drain(events: AsyncGenerator[Any, None]) -> list[Any]:
    async with aclosing(events):
        return [event async for event in events]


async def plain(workers: GrpcWorkers, d0: WorkerRecord) -> None:
    assert isinstance((await drain(workers.decode(d0, request(), b"", 30)))[-1], Ended)


async def live(workers: GrpcWorkers, d0: WorkerRecord) -> None:
    """The first token comes some turns of the event loop after the start of the call."""
    first: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()

    def resolve() -> None:
        if not first.done():
            first.set_result(5)

    timer = loop.call_later(0.001, resolve)
    try:
        assert isinstance((await drain(workers.decode(d0, request(), b"ticket", 30, first)))[-1], Ended)
    finally:
        timer.cancel()


async def live_decode(workers: GrpcWorkers, d0: WorkerRecord) -> None:
    call = LiveDecode(lambda first: workers.decode(d0, request(), b"ticket", 30, first))
    try:
        await asyncio.sleep(0)
        call.first.set_result(5)
        assert isinstance((await drain(call.events()))[-1], Ended)
    finally:
        await call.close()


async def prefill(workers: GrpcWorkers, d0: WorkerRecord) -> None:
    assert len(await drain(workers.prefill(d0, request(), 30))) == 2


async def snapshot(workers: GrpcWorkers, d0: WorkerRecord) -> None:
    assert sum(len(page.keys) for page in await drain(workers.snapshot(d0))) == 2


async def probe(workers: GrpcWorkers, d0: WorkerRecord) -> None:
    assert (await workers.probe(d0, 30)).state == "ready"


@pytest.mark.parametrize("call", [plain, live, live_decode, prefill, snapshot, probe])
async def test_a_call_is_cancelled_at_every_await(call: Callable[[GrpcWorkers, WorkerRecord], Awaitable[None]]) -> None:
    async with pair() as (worker, workers, d0):
        await plain(workers, d0)  # so that the connection and the sessions exist
        await prefill(workers, d0)
        await until(lambda: not worker.calls and not worker.prefills)
        before = asyncio.all_tasks()
        async for _ in cancelled(lambda: call(workers, d0)):
            assert len(workers._sessions) == 2 and len(workers._channels) == 1
            assert not any(session._calls or session.lost for session in workers._sessions.values()) and not workers._inboxes
            await until(lambda: not worker.calls and not worker.prefills and not worker.open)
            await until(lambda: not [task for task in asyncio.all_tasks() - before if "router" in repr(task)])


async def test_any_error_of_a_live_decode_reaches_its_reader() -> None:
    """Every error is passed on: if some were not, the reader would wait forever."""

    async def broken(first: "asyncio.Future[int]") -> AsyncGenerator[DecodeEvent, None]:
        raise KeyError("unexpected")
        yield

    call = LiveDecode(broken)
    with pytest.raises(KeyError):
        async with asyncio.timeout(30):
            await drain(call.events())


async def test_losing_a_worker_closes_its_channel_even_if_cancelled_at_any_await() -> None:
    async with pair() as (_, workers, d0):
        closed: list[Any] = []
        opened: list[Any] = []

        async def use() -> None:
            await plain(workers, d0)
            (old,) = workers._channels.values()
            opened.append(old)
            honest = old.close

            async def close(*arguments: Any) -> None:
                await honest(*arguments)
                closed.append(old)

            old.close = close  # type: ignore[assignment, method-assign]

        await use()
        async for task in cancelled(lambda: workers.lose(d0)):
            if not workers._channels:
                assert closed == opened
                if not (task.done() and not task.cancelled()):
                    await use()
        assert closed == opened and not workers._sessions


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMBERS_EVERY_S", "SNAPSHOT_EVERY_S", "AWAY_S"):
        monkeypatch.setattr(watch, name, 0)
    monkeypatch.setattr(probes, "LOOK_EVERY_S", 0)
    monkeypatch.setattr(probes, "ASK_SHARE", 0.0)


async def test_the_watch_is_cancelled_at_every_await(quick: None) -> None:
    """The watch never ends by itself. The sweep is over when the watch has learned the worker's state and cache before it is cancelled."""
    async with pair() as (worker, workers, d0):
        registry = MemoryRegistry()
        await registry.join(d0)
        before = asyncio.all_tasks()
        for turns in itertools.count():
            view = ClusterView({MODEL: TOKENIZER})
            running = asyncio.create_task(Watch(view, registry, workers, 2.0).run())
            for _ in range(turns if turns < 60 else 60 + (turns - 60) * 20):
                await asyncio.sleep(0)
            known = bool(view.decode_workers()) and not view.models[MODEL].index.needing_snapshot()
            running.cancel()
            await asyncio.wait({running})
            assert running.cancelled()
            left = [task for task in asyncio.all_tasks() - before if "router" in repr(task)]
            assert not left, "the tasks that the watch started end with it, not after it"
            await until(lambda: not worker.open)
            if known and turns >= 60:
                break
        assert len(workers._channels) == 1
