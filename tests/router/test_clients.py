"""The router's calls to its workers, against a real gRPC server in this process that a test scripts."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, replace
from typing import Any, cast

import pytest
from fake_workers import MODEL, TOKENIZER, record, unusable
from google.rpc import error_details_pb2
from turn_work import TurnWork

from baton.clock import loop_time
from baton.cluster.config import Config, SecurityConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.handoff import Handoff
from baton.cluster.records import BlockEvent, Load, WorkerRecord
from baton.cluster.rpc import Answering, Context, Server, abort, to_status
from baton.engine.core.block_key import MAX_EVENT_KEYS
from baton.engine.core.grammar import Grammar
from baton.engine.core.sampling import SamplingParams
from baton.simulate.memory_registry import MemoryRegistry
from baton.v1 import generation_pb2, worker_pb2_grpc
from baton.v1 import worker_pb2 as pb
from router import clients, probes, watch
from router.calls import to_addressee
from router.clients import GrpcWorkers, Streams
from router.prefix_index import Filling, PrefixIndex
from router.request import Request, Stopwatch, Token, Tokens, Trace
from router.view import ClusterView
from router.watch import SLICE_KEYS, Watch
from router.workers import Adopted, CachePage, Died, Ended, FirstToken, Opened, Source

HANG_S = 2.0
PARAMS = SamplingParams(
    max_tokens=9, min_tokens=2, temperature=0.5, top_k=7, top_p=0.75, min_p=0.25, repetition_penalty=1.5, presence_penalty=-0.5,
    frequency_penalty=0.125, seed=2**64 - 1, logit_bias={3: -1.5}, logprobs=0, stop_token_ids=frozenset({5, 4}), ignore_eos=True,
)  # fmt: skip


def request(name: str = "r", tokens: tuple[int, ...] = (1, 2, 3), params: SamplingParams = PARAMS) -> Request:
    return Request(name, list(tokens), 2, params, "salt", time.monotonic() + 10, Trace(Stopwatch(time.monotonic)))


class Worker(worker_pb2_grpc.DecodeServicer, worker_pb2_grpc.KvExchangeServicer, worker_pb2_grpc.WorkerServicer):
    """Records what it receives. Sends the entries of `says` (events, an error, or None to end the stream) on the newest decode stream."""

    def __init__(self) -> None:
        self.streams = 0
        self.heard: asyncio.Queue[pb.DecodeCommand] = asyncio.Queue()
        self.says: asyncio.Queue[list[pb.DecodeEvent] | BatonError | None] = asyncio.Queue()
        self.prefills: list[pb.PrefillStart] = []
        self.on_prefill: Callable[[], Any] = pb.PrefillDone
        self.prefill_streams = 0
        self.prefill_says: asyncio.Queue[pb.PrefillEvent | pb.PrefillEvents | BatonError | None] = asyncio.Queue()
        self.opens = b""  # handle to send before the prompt is computed; empty: none
        self.cancelled = 0
        self.released: list[tuple[bytes, str]] = []
        self.on_describe: Callable[[], Any] = pb.DescribeResponse
        self.on_probe: Callable[[], Any] = lambda: pb.ProbeResponse(state="ready")
        self.snapshots = 0
        self.medium = "device"
        self.on_snapshot: BatonError | None = None
        self.pages = [b"a" * 16, b"b" * 16]
        self.page_s = 0.0  # pause after a page

    async def Session(self, request_iterator: AsyncIterator[pb.DecodeCommands], context: Context) -> AsyncIterator[pb.DecodeEvents]:
        self.streams += 1
        reader = asyncio.create_task(self._listen(request_iterator))
        try:
            while (said := await self.says.get()) is not None:
                if isinstance(said, BatonError):
                    await abort(context, said)
                yield pb.DecodeEvents(events=said)
        finally:
            reader.cancel()

    async def _listen(self, messages: AsyncIterator[pb.DecodeCommands]) -> None:
        async for message in messages:
            for command in message.commands:
                self.heard.put_nowait(command)

    async def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.ReleaseResponse:
        self.released.append((request.handle, request.request_id))
        return pb.ReleaseResponse(was_held=True)

    async def Snapshot(self, request: pb.SnapshotRequest, context: Context) -> AsyncIterator[pb.SnapshotResponse]:
        self.snapshots += 1
        if self.on_snapshot is not None:
            await abort(context, self.on_snapshot)
        for part in self.pages:
            yield pb.SnapshotResponse(incarnation=7, sequence=3, keys=part, medium=self.medium)
            await asyncio.sleep(self.page_s)

    async def Probe(self, request: pb.ProbeRequest, context: Context) -> pb.ProbeResponse:
        async with Answering(context):
            answer: pb.ProbeResponse = await settled(self.on_probe())
            return answer
        raise AssertionError

    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.DescribeResponse:
        answer: pb.DescribeResponse = await settled(self.on_describe())
        return answer


class Prefills(worker_pb2_grpc.PrefillServicer):
    """The prefill role of the worker: answers each call with `on_prefill`. `says`: of the newest stream; see `Worker`."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    async def Session(self, request_iterator: AsyncIterator[pb.PrefillCommands], context: Context) -> AsyncIterator[pb.PrefillEvents]:
        self._worker.prefill_streams += 1
        says = self._worker.prefill_says = asyncio.Queue()
        reader = asyncio.create_task(self._listen(request_iterator, says))
        try:
            while (said := await says.get()) is not None:
                if isinstance(said, BatonError):
                    await abort(context, said)
                yield said if isinstance(said, pb.PrefillEvents) else pb.PrefillEvents(events=[said])
        finally:
            reader.cancel()

    async def _listen(self, messages: AsyncIterator[pb.PrefillCommands], says: "asyncio.Queue[Any]") -> None:
        tasks: dict[int, asyncio.Task[None]] = {}
        async for message in messages:
            for command in message.commands:
                if command.HasField("start"):
                    self._worker.prefills.append(command.start)
                    tasks[command.call_id] = asyncio.create_task(self._prefill(command.call_id, says))
                else:
                    tasks[command.call_id].cancel()
                    self._worker.cancelled += 1

    async def _prefill(self, call: int, says: "asyncio.Queue[Any]") -> None:
        if self._worker.opens:
            says.put_nowait(pb.PrefillEvent(call_id=call, opened=pb.PrefillOpened(handle=self._worker.opens)))
        try:
            says.put_nowait(pb.PrefillEvent(call_id=call, done=await settled(self._worker.on_prefill())))
        except BatonError as error:
            says.put_nowait(pb.PrefillEvent(call_id=call, error=call_error(error)))


def call_error(error: BatonError) -> pb.CallError:
    return pb.CallError(status=to_status(error).SerializeToString())


async def settled(value: Any) -> Any:
    return await value if asyncio.iscoroutine(value) else value


async def prefill(workers: GrpcWorkers, worker: WorkerRecord, asked: Request, timeout_s: float) -> FirstToken:
    *_, first = [event async for event in workers.prefill(worker, asked, timeout_s)]
    assert isinstance(first, FirstToken)
    return first


def sleeping() -> Any:
    return asyncio.sleep(60)


@asynccontextmanager
async def pair(port: int = 0) -> AsyncIterator[tuple[Worker, GrpcWorkers, WorkerRecord, Server]]:
    server, worker, workers = Server(Config(), 1 << 20), Worker(), GrpcWorkers(SecurityConfig())
    worker_pb2_grpc.add_DecodeServicer_to_server(worker, server.grpc)
    worker_pb2_grpc.add_PrefillServicer_to_server(Prefills(worker), server.grpc)
    worker_pb2_grpc.add_KvExchangeServicer_to_server(worker, server.grpc)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server.grpc)
    address = server.bind(port)
    await server.start()
    try:
        yield worker, workers, record("d0", address=address), server
    finally:
        await workers.close()
        await server.stop(None)


def token(call: int, id_: int) -> pb.DecodeEvent:
    return pb.DecodeEvent(call_id=call, token=pb.GeneratedToken(id=id_))


def finished(call: int, reason: Any = generation_pb2.FINISH_REASON_LENGTH) -> pb.DecodeEvent:
    return pb.DecodeEvent(call_id=call, finished=pb.DecodeFinished(reason=reason, cached_tokens=32))


async def take(workers: GrpcWorkers, worker: WorkerRecord, name: str = "r", timeout_s: float = 10, handle: bytes = b"") -> list[Any]:
    async with aclosing(workers.decode(worker, request(name), handle, timeout_s)) as events:
        return [event async for event in events]


async def pages(workers: GrpcWorkers, worker: WorkerRecord) -> list[CachePage]:
    async with aclosing(workers.snapshot(worker)) as asked:
        return [page async for page in asked]


async def refused(call: "asyncio.Future[Any] | Any", within_s: float = 30.0) -> BatonError:
    with pytest.raises(BatonError) as caught:
        async with asyncio.timeout(within_s):
            await call
    return caught.value


async def test_a_decode_call_starts_and_returns_all_its_events() -> None:
    async with pair() as (worker, workers, d0, _):
        call = asyncio.create_task(take(workers, d0, handle=b"handle"))
        start = await worker.heard.get()
        assert start.call_id == 1 and start.start.handle == b"handle" and 9000 < start.start.timeout_ms <= 10_000
        job = start.start.job
        assert (job.request_id, list(job.token_ids), job.prompt_tokens, job.cache_salt) == ("r", [1, 2, 3], 2, "salt")
        told = Handoff(transport="nixl", blocks=3, bytes=300, blocks_reused=1, digests_checked=3, read_ms=1.5, verify_ms=2.5)
        adopted = pb.DecodeEvent(call_id=1, adopted=pb.Adopted(handoff=pb.HandoffFacts(**asdict(told))))
        top = [generation_pb2.TopLogprob(id=4, logprob=-0.5)]
        rich = pb.DecodeEvent(call_id=1, token=pb.GeneratedToken(id=9, logprob=-0.25, top=top))
        worker.says.put_nowait([adopted, rich, token(1, 8)])
        worker.says.put_nowait([finished(1, generation_pb2.FINISH_REASON_STOP)])
        assert await call == [
            Adopted(told), (Token(9, -0.25, ((4, -0.5),)), Token(8)), Ended("stop", 0, 32),
        ]  # fmt: skip
        assert worker.heard.empty(), "nothing to cancel"


async def test_tokens_that_come_while_the_client_reads_are_joined() -> None:
    """In their order, and before the error that came after them."""
    async with pair() as (worker, workers, d0, _), aclosing(workers.decode(d0, request(), b"", 10)) as events:
        first = asyncio.ensure_future(anext(events))
        number = (await worker.heard.get()).call_id
        worker.says.put_nowait([token(number, 7)])
        assert await first == (Token(7),)
        for id_ in (8, 9, 10):
            worker.says.put_nowait([token(number, id_)])
        lost = pb.DecodeEvent(call_id=number, error=call_error(BatonError(Reason.INTERNAL, "because")))
        worker.says.put_nowait([lost])
        async with asyncio.timeout(30):
            (inbox,) = workers._inboxes
            while len(inbox._waiting) < 2:
                await asyncio.sleep(0.005)
        assert await anext(events) == (Token(8), Token(9), Token(10))
        with pytest.raises(BatonError, match="because"):
            await anext(events)


async def test_what_comes_after_the_end_of_a_call_changes_nothing() -> None:
    """The worker is lost, and the deadline passes, before the call's task has seen the end."""
    async with pair() as (worker, workers, d0, _):
        call = asyncio.create_task(take(workers, d0))
        number = (await worker.heard.get()).call_id
        session = workers._sessions[(d0.name, d0.incarnation), "decode"]
        held = session._calls[number]
        for message in (token(number, 7), finished(number)):
            held.put(held, message)
        for error in (BatonError(Reason.WORKER_LOST, "x"), BatonError(Reason.DEADLINE, "x")):
            held.put(held, error)
        assert await call == [(Token(7),), Ended("length", 0, 32)]


async def test_within_the_stream_interval_tokens_wait_for_each_other_and_the_end_does_not() -> None:
    async with pair() as (worker, workers, d0, _):
        workers._streams = Streams(lambda: 1000.0)  # longer than the test: what comes does not wait for it
        async with aclosing(workers.decode(d0, request(), b"handle", 100)) as events, asyncio.timeout(30):
            first = asyncio.ensure_future(anext(events))
            number = (await worker.heard.get()).call_id
            worker.says.put_nowait([pb.DecodeEvent(call_id=number, adopted=pb.Adopted())])
            assert await first == Adopted(Handoff())
            first = asyncio.ensure_future(anext(events))
            worker.says.put_nowait([token(number, 7)])
            assert await first == (Token(7),), "the first tokens do not wait"
            more = asyncio.ensure_future(anext(events))
            worker.says.put_nowait([token(number, 8)])
            worker.says.put_nowait([token(number, 9)])
            await asyncio.sleep(0.1)
            assert not more.done()
            worker.says.put_nowait([token(number, 10), finished(number)])
            assert await more == (Token(8), Token(9), Token(10))
            assert await anext(events) == Ended("length", 0, 32)


async def test_after_the_stream_interval_tokens_are_sent() -> None:
    async with pair() as (worker, workers, d0, _):
        workers._streams = Streams(lambda: 0.2)
        async with aclosing(workers.decode(d0, request(), b"", 100)) as events, asyncio.timeout(30):
            first = asyncio.ensure_future(anext(events))
            number = (await worker.heard.get()).call_id
            for id_ in range(4):
                worker.says.put_nowait([token(number, id_)])
                await (first if id_ == 0 else asyncio.sleep(0))
            got: list[Any] = []
            while len(got) < 3:
                got.extend(cast(Tokens, await anext(events)))
            assert [one.id for one in got] == [1, 2, 3]


async def test_every_sampling_parameter_reaches_the_worker() -> None:
    async with pair() as (worker, workers, d0, _):
        worker.on_prefill = lambda: pb.PrefillDone(token=pb.GeneratedToken(id=5), handle=b"h", cached_tokens=16, wait_ms=1, compute_ms=2)
        assert await prefill(workers, d0, request(), 5) == FirstToken(Token(5), b"h", None, 16, 1.0, 2.0)
        sampling = worker.prefills[0].job.sampling
        plain = {f.name: getattr(sampling, f.name) for f in sampling.DESCRIPTOR.fields if not f.is_repeated and f.message_type is None}
        lists: dict[str, Any] = {"stop_token_ids": frozenset(sampling.stop_token_ids), "logit_bias": dict(sampling.logit_bias)}
        assert SamplingParams(**plain | {"prompt_logprobs": None}, **lists) == PARAMS and not sampling.HasField("prompt_logprobs")
        await prefill(workers, d0, request(params=replace(PARAMS, logprobs=None)), 5)
        assert not worker.prefills[1].job.sampling.HasField("logprobs") and not sampling.HasField("structured")
        await prefill(workers, d0, request(params=replace(PARAMS, structured=Grammar("regex", "a+", strict=False))), 5)
        assert worker.prefills[2].job.sampling.structured == generation_pb2.Structured(kind="regex", text="a+", strict=False)


async def test_a_long_prompt_is_opened_before_its_first_token() -> None:
    async with pair() as (worker, workers, d0, _):
        worker.opens, worker.on_prefill = b"ticket", lambda: pb.PrefillDone(token=pb.GeneratedToken(id=5), fetched_tokens=32)
        source = Source(replace(d0, name="d9", incarnation=4, address="there:1"), 6)
        events = [event async for event in workers.prefill(d0, request(), 5, source)]
        assert events == [Opened(b"ticket"), FirstToken(Token(5), b"", None, 0, 0.0, 0.0, 32)]
        told = worker.prefills[0].source
        assert (told.worker, told.incarnation, told.address, told.blocks) == ("d9", 4, "there:1", 6)


async def test_the_first_token_of_a_live_call_follows_its_start() -> None:
    async with pair() as (worker, workers, d0, _):
        first: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        events = workers.decode(d0, request(), b"ticket", 5, first)
        call = asyncio.create_task(anext(events))
        start = await worker.heard.get()
        assert start.start.live and start.start.handle == b"ticket"
        first.set_result(77)
        told = await worker.heard.get()
        assert (told.call_id, told.first.token_id) == (start.call_id, 77)
        worker.says.put_nowait([token(start.call_id, 8)])
        assert await call == (Token(8),)
        await events.aclose()
        assert (await worker.heard.get()).WhichOneof("command") == "cancel"


async def test_a_live_call_that_ended_sends_no_first_token() -> None:
    async with pair() as (worker, workers, d0, _):
        first: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        call = asyncio.create_task(anext(workers.decode(d0, request(), b"ticket", 5, first)))
        start = await worker.heard.get()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        first.set_result(77)
        assert (await worker.heard.get()).WhichOneof("command") == "cancel"
        await asyncio.sleep(0.05)
        assert worker.heard.empty() and start.call_id == 1


async def test_many_calls_share_one_stream() -> None:
    async with pair() as (worker, workers, d0, _):
        calls = [asyncio.create_task(take(workers, d0, f"r{i}")) for i in range(50)]
        numbers = {}
        for _ in calls:
            command = await worker.heard.get()
            numbers[command.start.job.request_id] = command.call_id
        assert len(set(numbers.values())) == 50
        for step in range(4):
            worker.says.put_nowait([token(number, 1000 * step + number) for number in numbers.values()])
        worker.says.put_nowait([token(999_999, 1)])  # of a call that no longer exists
        worker.says.put_nowait([finished(number) for number in numbers.values()])
        ends = await asyncio.gather(*calls)
        for i, events in enumerate(ends):
            assert [token.id for tokens in events[:-1] for token in tokens] == [1000 * step + numbers[f"r{i}"] for step in range(4)]
        assert worker.streams == 1 and worker.heard.empty()
        (session,) = workers._sessions.values()
        assert not session._calls


# Lost streams


async def end_stream(worker: Worker, server: Server) -> None:
    worker.says.put_nowait(None)


async def abort_stream(worker: Worker, server: Server) -> None:
    worker.says.put_nowait(BatonError(Reason.INTERNAL, "broken"))


async def stop_server(worker: Worker, server: Server) -> None:
    await server.stop(None)


@pytest.mark.parametrize("lose", [end_stream, abort_stream, stop_server])
async def test_a_lost_stream_immediately_ends_all_its_calls(lose: Callable[[Worker, Server], Any]) -> None:
    async with pair() as (worker, workers, d0, server):
        calls = [asyncio.create_task(take(workers, d0, f"r{i}")) for i in range(20)]
        for _ in calls:
            await worker.heard.get()
        worker.says.put_nowait([token(number, 7) for number in range(1, 11)])  # half of them have begun
        await asyncio.sleep(0.05)
        await lose(worker, server)
        for call in calls:
            assert (await refused(call)).reason is Reason.WORKER_LOST
        if lose is stop_server:
            assert (await refused(take(workers, d0))).reason is Reason.WORKER_LOST
            return
        again = asyncio.create_task(take(workers, d0))
        number = (await worker.heard.get()).call_id
        worker.says.put_nowait([finished(number)])
        assert len(await again) == 1 and worker.streams == 2


@pytest.mark.parametrize("lose", ["end", "abort", "stop"])
async def test_a_lost_stream_immediately_ends_all_its_prefills(lose: str) -> None:
    """And no other call of the worker, unless its process is lost."""
    async with pair() as (worker, workers, d0, server):
        worker.on_prefill = sleeping
        decode = asyncio.create_task(take(workers, d0))
        number = (await worker.heard.get()).call_id
        calls = [asyncio.create_task(prefill(workers, d0, request(f"r{i}"), 30)) for i in range(20)]
        await until(lambda: len(worker.prefills) == 20)
        if lose == "stop":
            await server.stop(None)
        else:
            worker.prefill_says.put_nowait(None if lose == "end" else BatonError(Reason.INTERNAL, "broken"))
        for call in calls:
            error = await refused(call)
            assert error.reason is Reason.WORKER_LOST and isinstance(error, Died) is (lose == "stop")
        if lose == "stop":
            assert (await refused(decode)).reason is Reason.WORKER_LOST
            return
        worker.on_prefill = pb.PrefillDone
        assert await prefill(workers, d0, request(), 5) and worker.prefill_streams == 2
        worker.says.put_nowait([finished(number)])
        assert len(await decode) == 1


async def test_a_lost_stream_leaves_no_task_behind() -> None:
    async with pair() as (worker, workers, d0, _):
        before = {task for task in asyncio.all_tasks() if "Session" in repr(task)}
        for _ in range(3):
            call = asyncio.create_task(take(workers, d0))
            await worker.heard.get()
            worker.says.put_nowait(None)
            await refused(call)
        await asyncio.sleep(0.05)
        assert {task for task in asyncio.all_tasks() if "Session" in repr(task)} == before == set()


async def test_calls_to_a_stopped_worker_fail_immediately() -> None:
    async with pair() as (_, workers, d0, server):
        await server.stop(None)
        assert (await refused(take(workers, d0))).reason is Reason.WORKER_LOST
        assert (await refused(prefill(workers, d0, request(), 5))).reason is Reason.WORKER_LOST
        assert (await refused(workers.describe(d0))).reason is Reason.WORKER_LOST
        assert (await refused(pages(workers, d0))).reason is Reason.WORKER_LOST
        workers.release(d0, b"h", "r")  # best effort


async def test_another_incarnation_gets_its_own_stream() -> None:
    async with pair() as (worker, workers, d0, _):
        old = asyncio.create_task(take(workers, d0))
        await worker.heard.get()
        new = asyncio.create_task(take(workers, replace(d0, incarnation=2)))
        await worker.heard.get()
        assert worker.streams == 2
        for call in (old, new):
            call.cancel()
        await asyncio.gather(old, new, return_exceptions=True)


# Cancellation


@pytest.mark.parametrize("begun", [False, True])
async def test_a_cancelled_decode_call_is_cancelled_on_the_worker(begun: bool) -> None:
    async with pair() as (worker, workers, d0, _):
        other = asyncio.create_task(take(workers, d0, "other"))
        number_of_other = (await worker.heard.get()).call_id
        call = asyncio.create_task(take(workers, d0))
        number = (await worker.heard.get()).call_id
        if begun:
            worker.says.put_nowait([token(number, 7)])
            await asyncio.sleep(0.05)
        call.cancel()
        async with asyncio.timeout(30):
            heard = await worker.heard.get()
        assert heard.call_id == number and heard.HasField("cancel") and call.done()
        worker.says.put_nowait([token(number, 8), finished(number_of_other)])  # late tokens are ignored
        assert len(await other) == 1 and worker.heard.empty()


async def test_closing_between_two_tokens_also_cancels() -> None:
    async with pair() as (worker, workers, d0, _):
        events = workers.decode(d0, request(), b"", 10)
        first = asyncio.ensure_future(anext(events))
        number = (await worker.heard.get()).call_id
        worker.says.put_nowait([token(number, 7)])
        assert await first == (Token(7),)
        await events.aclose()
        async with asyncio.timeout(30):
            assert (await worker.heard.get()).HasField("cancel")


async def test_a_cancelled_prefill_is_cancelled_on_the_worker() -> None:
    async with pair() as (worker, workers, d0, _):
        worker.on_prefill = sleeping
        call = asyncio.create_task(prefill(workers, d0, request(), 30))
        while not worker.prefills:
            await asyncio.sleep(0.01)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        assert call.cancelled()
        async with asyncio.timeout(30):
            while not worker.cancelled:
                await asyncio.sleep(0.01)


async def test_a_release_arrives_although_its_caller_does_not_wait() -> None:
    async with pair() as (worker, workers, d0, _):
        workers.release(d0, b"handle", "r")
        await workers.close()
        assert worker.released == [(b"handle", "r")]


# Deadline


async def test_a_call_to_a_silent_worker_fails_at_the_deadline() -> None:
    async with pair() as (worker, workers, d0, _):
        error = await refused(take(workers, d0, timeout_s=1.0))
        assert error.reason is Reason.DEADLINE
        assert (await worker.heard.get()).HasField("start") and (await worker.heard.get()).HasField("cancel")
        worker.on_prefill = sleeping
        assert (await refused(prefill(workers, d0, request(), 0.1))).reason is Reason.DEADLINE


async def test_the_deadline_applies_to_the_call_and_not_to_each_token() -> None:
    async with pair() as (worker, workers, d0, _):

        async def drip() -> None:
            while True:
                worker.says.put_nowait([token(1, 7)])
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        error = await refused(take(workers, d0, timeout_s=0.3))
        dripping.cancel()
        assert error.reason is Reason.DEADLINE


# Errors


@pytest.mark.parametrize("reason", Reason)
async def test_every_error_reason_of_a_worker_arrives(reason: Reason) -> None:
    async with pair() as (worker, workers, d0, _):

        async def fail() -> None:
            raise BatonError(reason, "because")

        worker.on_prefill = fail
        error = await refused(prefill(workers, d0, request(), 5))
        assert (error.reason, error.message) == (reason, "because")
        call = asyncio.create_task(take(workers, d0))
        number = (await worker.heard.get()).call_id
        worker.says.put_nowait([pb.DecodeEvent(call_id=number, error=call_error(BatonError(reason, "because")))])
        error = await refused(call)
        assert (error.reason, error.message) == (reason, "because")
        assert worker.heard.empty(), "the worker has already ended the call"


OF_THE_FUTURE = to_status(BatonError(Reason.INTERNAL, "x"))
_info = error_details_pb2.ErrorInfo(reason="OF_THE_FUTURE", domain="baton")
OF_THE_FUTURE.details[0].Pack(_info)


@pytest.mark.parametrize(
    "event",
    [
        pb.DecodeEvent(call_id=1, error=pb.CallError(status=OF_THE_FUTURE.SerializeToString())),
        pb.DecodeEvent(call_id=1, error=pb.CallError(status=b"\xff")),
        pb.DecodeEvent(call_id=1),
        pb.DecodeEvent(call_id=1, finished=pb.DecodeFinished()),
    ],
    ids=["unknown reason", "unreadable", "unknown event", "no finish"],
)
async def test_an_event_that_cannot_be_understood_is_an_internal_error(event: pb.DecodeEvent) -> None:
    async with pair() as (worker, workers, d0, _):
        call = asyncio.create_task(take(workers, d0))
        await worker.heard.get()
        worker.says.put_nowait([event])
        assert (await refused(call)).reason is Reason.INTERNAL


# Forgotten workers


async def test_calls_to_a_forgotten_worker_are_lost_not_cancelled() -> None:
    """Their channel closes, which gRPC reports as a cancellation. The caller was not cancelled and may try another worker."""
    async with pair() as (worker, workers, d0, _):
        worker.on_prefill = worker.on_describe = sleeping
        asks = [prefill(workers, d0, request(), 30), take(workers, d0), workers.describe(d0)]
        calls = [asyncio.create_task(ask) for ask in asks]
        await worker.heard.get()
        await asyncio.sleep(0.1)
        await workers.forget(d0)
        for call in calls:
            assert (await refused(call)).reason is Reason.WORKER_LOST


async def test_a_forgotten_worker_may_come_back() -> None:
    async with pair() as (worker, workers, d0, _):
        await workers.forget(d0)
        workers.release(d0, b"handle", "r")
        assert (await refused(pages(workers, d0))).reason is Reason.WORKER_LOST
        assert not workers._channels  # no channel is opened for it again
        workers.welcome(d0)
        assert await pages(workers, d0) == [CachePage(7, 3, [b"a" * 16]), CachePage(7, 3, [b"b" * 16])]
        await workers.forget(d0)
        workers.welcome(d0)
        call = asyncio.create_task(take(workers, d0))
        worker.says.put_nowait([finished((await worker.heard.get()).call_id)])
        assert len(await call) == 1


async def test_a_snapshot_may_take_as_long_as_its_pages_need(monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline applies to each page, so a cache of any size arrives."""
    monkeypatch.setattr(clients, "ASK_TIMEOUT_S", 0.5)
    async with pair() as (worker, workers, d0, _):
        worker.pages, worker.page_s = [bytes([i]) * 16 for i in range(10)], 0.1
        assert [page.keys for page in await pages(workers, d0)] == [[key] for key in worker.pages]
        worker.page_s = 30.0
        assert (await refused(pages(workers, d0))).reason is Reason.DEADLINE


async def test_an_empty_cache_has_a_snapshot() -> None:
    async with pair() as (worker, workers, d0, _):
        worker.pages = [b""]
        assert await pages(workers, d0) == [CachePage(7, 3, [])]


async def test_pages_tell_their_medium_and_an_unknown_one_is_refused() -> None:
    async with pair() as (worker, workers, d0, _):
        worker.pages, worker.medium = [bytes(16)], "disk"
        assert await pages(workers, d0) == [CachePage(7, 3, [bytes(16)], "disk")]
        worker.medium = "tape"
        with pytest.raises(BatonError, match="'tape', which is none of device, host, disk, remote"):
            await pages(workers, d0)


async def test_forgetting_an_old_process_does_not_affect_the_new_one_at_its_address() -> None:
    async with pair() as (_, workers, d0, _):
        new = replace(d0, incarnation=d0.incarnation + 1)
        await pages(workers, d0)
        await pages(workers, new)
        await workers.forget(d0)
        assert (await pages(workers, new))[0].sequence == 3


# The watch


async def test_reaching_the_registry_for_the_first_time_is_not_a_reconnect(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("MEMBERS_EVERY_S", 0.01), ("AWAY_S", 0.01)):
        monkeypatch.setattr(watch, name, value)
    registry, workers = MemoryRegistry(), GrpcWorkers(SecurityConfig())
    looking = Watch(ClusterView({MODEL: TOKENIZER}), registry, workers, HANG_S)
    registry.available = False
    running = asyncio.create_task(looking.run())
    await asyncio.sleep(0.05)
    assert (looking.registry_reachable, looking.reconnects) == (False, 0)
    for returns in (0, 1, 2):
        registry.available = True
        await until(lambda: looking.registry_reachable)
        assert looking.reconnects == returns
        registry.available = False
        await until(lambda: not looking.registry_reachable)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@asynccontextmanager
async def watched(
    *members: WorkerRecord, workers: GrpcWorkers, hang_s: float = HANG_S
) -> AsyncIterator[tuple[ClusterView, MemoryRegistry, "asyncio.Task[None]"]]:
    registry, view = MemoryRegistry(), ClusterView({MODEL: TOKENIZER}, absent_s=0.05)
    for member in members:
        await registry.join(member)
    running = asyncio.create_task(Watch(view, registry, workers, hang_s).run())
    await until(lambda: len(view.members.records()) == len(members))
    try:
        yield view, registry, running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until(condition: Callable[[], Any], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.01)


async def wrong_worker() -> None:
    raise BatonError(Reason.WRONG_WORKER, "incarnation: the call is meant for 1, this is 2")


def describing(answer: WorkerRecord) -> Callable[[], pb.DescribeResponse]:
    return lambda: pb.DescribeResponse(record=pb.WorkerRecord(**asdict(answer)))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MEMBERS_EVERY_S", "SNAPSHOT_EVERY_S", "AWAY_S"):
        monkeypatch.setattr(watch, name, 0.02)
    monkeypatch.setattr(probes, "LOOK_EVERY_S", 0.02)
    monkeypatch.setattr(probes, "ASK_SHARE", 0.0)


async def test_a_worker_that_was_down_is_used_again_when_it_is_ready(quick: None) -> None:
    async with pair() as (worker, workers, d0, _), watched(d0, workers=workers) as (view, _, _):
        worker.on_probe = wrong_worker
        view.members.mark_down("d0", 1)
        await asyncio.sleep(0.2)
        assert unusable(view), "another process answered"
        worker.on_probe = lambda: pb.ProbeResponse(state="draining")
        await asyncio.sleep(0.2)
        assert unusable(view), "it answers, but accepts no more work"
        worker.on_probe = lambda: pb.ProbeResponse(state="ready")
        await until(lambda: not unusable(view))


@pytest.mark.parametrize("fails", [True, False])
async def test_a_missing_snapshot_is_requested_with_growing_delays(quick: None, fails: bool) -> None:
    """A worker copies its keys for each attempt. Control: a snapshot that arrives is requested once."""
    async with pair() as (worker, workers, d0, _):
        worker.pages = [b"a" * 16, b"b" * 16]
        if fails:
            worker.on_snapshot = BatonError(Reason.INTERNAL, "not now")
        async with watched(replace(d0, incarnation=7), workers=workers) as (view, _, _):
            await asyncio.sleep(0.6)
            assert bool(view.models[MODEL].index.needing_snapshot()) == fails
            assert (2 <= worker.snapshots <= 6) if fails else worker.snapshots == 1  # 30 without growing delays


async def test_questions_to_many_workers_are_spread_over_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A router has a thousand workers, and opens a channel to each when it first asks."""
    work = TurnWork()
    monkeypatch.setattr(clients, "to_addressee", work.counted(to_addressee))
    monkeypatch.setattr(clients, "_to_load", work.counted(clients._to_load))
    async with pair() as (_, workers, d0, _):
        with work.watched():
            await asyncio.gather(*(workers.probe(d0, 30) for _ in range(4 * clients.ASKED_A_TURN)))
    assert 1 < work.most <= clients.ASKED_A_TURN


async def test_a_snapshot_is_put_into_the_index_page_by_page(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million keys at once would take half a second, in which the router does nothing else."""
    work = TurnWork()
    monkeypatch.setattr(Filling, "add", work.counted(Filling.add, lambda filling, keys, medium: len(keys)))
    async with pair() as (worker, workers, d0, _):
        worker.pages = [b"".join(bytes([i, j]) * 8 for j in range(50)) for i in range(40)]
        with work.watched():
            async with watched(replace(d0, incarnation=7), workers=workers) as (view, _, _):
                await until(lambda: not view.models[MODEL].index.needing_snapshot())
        assert view.models[MODEL].index.entries == 2000 and 50 <= work.most <= 100


async def test_events_are_put_into_the_index_in_slices(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    work = TurnWork()
    monkeypatch.setattr(PrefixIndex, "apply", work.counted(PrefixIndex.apply, lambda index, event: len(event.keys)))
    async with pair() as (_, workers, d0, _), watched(replace(d0, incarnation=7), workers=workers) as (view, registry, _):
        keys = [i.to_bytes(16, "little") for i in range(40 * MAX_EVENT_KEYS)]
        runs = [tuple(keys[at : at + MAX_EVENT_KEYS]) for at in range(0, len(keys), MAX_EVENT_KEYS)]
        await until(lambda: not view.models[MODEL].index.needing_snapshot())
        with work.watched():
            await registry.publish([BlockEvent("d0", 7, 4 + i, "stored", run) for i, run in enumerate(runs)])
            await until(lambda: view.models[MODEL].index.entries >= len(keys))
        assert work.most <= SLICE_KEYS + MAX_EVENT_KEYS


async def test_probes_continue_when_a_worker_is_forgotten_during_one(quick: None) -> None:
    async with pair() as (worker, workers, d0, _), pair() as (_, _, d1, _):
        d1 = replace(d1, name="d1")
        async with watched(d0, d1, workers=workers, hang_s=0.1) as (view, registry, running):
            worker.on_probe = sleeping
            await asyncio.sleep(0.1)
            await registry.leave("d0", 1)
            await until(lambda: len(view.members.records()) == 1)
            view.members.mark_down("d1", 1)
            await until(lambda: not unusable(view))
            assert not running.done()


async def test_a_worker_that_left_is_forgotten(quick: None) -> None:
    async with pair() as (worker, workers, d0, server), watched(d0, workers=workers) as (view, registry, _):
        call = asyncio.create_task(take(workers, d0))
        await worker.heard.get()
        await registry.leave("d0", 1)
        await server.stop(None)
        assert (await refused(call)).reason is Reason.WORKER_LOST
        await until(lambda: not view.members.records() and not workers._sessions and not workers._channels)


async def test_streams_of_a_worker_missing_from_the_registry_continue(quick: None) -> None:
    """The worker still answers, and that counts more than the registry."""
    async with pair() as (worker, workers, d0, _), watched(d0, workers=workers) as (view, registry, _):
        call = asyncio.create_task(take(workers, d0))
        number = (await worker.heard.get()).call_id
        await registry.leave("d0", 1)
        await asyncio.sleep(0.3)  # six times `absent_s`
        assert view.decode_workers() == [replace(d0, load=Load())] and not call.done()
        worker.says.put_nowait([finished(number)])
        assert len(await call) == 1


async def test_the_load_of_a_worker_is_known_without_the_registry(quick: None) -> None:
    async with pair() as (worker, workers, d0, _), watched(d0, workers=workers) as (view, registry, _):
        registry.available = False
        load = pb.WorkerLoad(credit_tokens=-7, waiting=3, waiting_tokens=70)
        worker.on_probe = lambda: pb.ProbeResponse(state="ready", load=load, others_tokens=50)
        await until(lambda: view.members.record("d0").load == Load(credit_tokens=-7, waiting=3, waiting_tokens=70))
        assert view.members.prefill_tokens("d0", loop_time()) == 50
        worker.on_probe = lambda: pb.ProbeResponse(state="draining")
        await until(lambda: not view.decode_workers())


async def test_prompts_of_other_routers_are_known_before_the_next_probe() -> None:
    async with pair() as (worker, workers, d0, _), watched(d0, workers=workers) as (view, _, _):
        await prefill(workers, d0, request(), 5)  # the stream on which it is told
        assert view.members.prefill_tokens("d0", loop_time()) == 0
        for tokens in (900, 0):
            worker.prefill_says.put_nowait(pb.PrefillEvents(others_tokens=tokens))
            await until(lambda: view.members.prefill_tokens("d0", loop_time()) == tokens)  # noqa: B023


async def test_a_silent_worker_is_avoided_and_then_lost(quick: None) -> None:
    async with pair() as (worker, workers, d0, _), pair() as (other, _, d1, _):
        d1 = replace(d1, name="d1")
        async with watched(d0, d1, workers=workers, hang_s=0.5) as (view, _, _):
            call = asyncio.create_task(take(workers, d0))
            number = (await worker.heard.get()).call_id
            worker.on_probe = sleeping  # its event loop is blocked, but the connection is still open
            await until(lambda: [found.name for found in view.decode_workers()] == ["d1"])
            worker.says.put_nowait([token(number, 7)])  # not lost yet
            assert (await refused(call)).reason is Reason.WORKER_LOST
            other.on_probe = sleeping
            call = asyncio.create_task(take(workers, d1))
            number = (await other.heard.get()).call_id
            await asyncio.sleep(1.5)
            assert not call.done(), "no other worker is left"


async def test_a_worker_whose_engine_hangs_is_avoided_until_it_makes_progress(quick: None) -> None:
    async with pair() as (worker, workers, d0, _), pair() as (_, _, d1, _):
        d1 = replace(d1, name="d1")
        async with watched(d0, d1, workers=workers) as (view, _, _):
            call = asyncio.create_task(take(workers, d0))
            number = (await worker.heard.get()).call_id
            worker.on_probe = lambda: pb.ProbeResponse(state="ready", stalled_ms=1300)
            await until(lambda: [found.name for found in view.decode_workers()] == ["d1"])
            worker.on_probe = lambda: pb.ProbeResponse(state="ready")
            await until(lambda: len(view.decode_workers()) == 2)
            worker.says.put_nowait([finished(number)])
            assert len(await call) == 1, "a stall does not end the call"
            call = asyncio.create_task(take(workers, d0))
            await worker.heard.get()
            worker.on_probe = lambda: pb.ProbeResponse(state="ready", stalled_ms=4100)
            assert (await refused(call)).reason is Reason.WORKER_LOST
            assert [found.name for found in view.decode_workers()] == ["d1"]
            worker.on_probe = lambda: pb.ProbeResponse(state="ready")
            await until(lambda: len(view.decode_workers()) == 2)


async def test_calls_on_a_replaced_process_are_lost(quick: None) -> None:
    async with pair() as (worker, workers, d0, _), watched(d0, workers=workers) as (view, registry, _):
        call = asyncio.create_task(take(workers, d0))
        await worker.heard.get()
        await registry.join(replace(d0, incarnation=2))
        assert (await refused(call)).reason is Reason.WORKER_LOST
        assert view.members.record("d0").incarnation == 2


async def test_members_stay_while_the_registry_is_away(quick: None) -> None:
    async with pair() as (_, workers, d0, _), watched(d0, workers=workers) as (view, registry, running):
        registry.available = False
        await asyncio.sleep(0.2)
        assert [member.name for member in view.members.records()] == ["d0"] and not running.done()
        view.members.mark_down("d0", 1)
        await until(lambda: not unusable(view))
        registry.available = True
        await registry.join(replace(d0, incarnation=2))
        await until(lambda: view.members.record("d0").incarnation == 2)


async def test_a_call_lost_with_its_process_differs_from_one_that_never_reached_it() -> None:
    async with pair() as (worker, workers, d0, server):
        worker.on_prefill = sleeping
        calls = [asyncio.create_task(take(workers, d0)), asyncio.create_task(prefill(workers, d0, request(), 30))]
        await worker.heard.get()
        while not worker.prefills:
            await asyncio.sleep(0.01)
        await server.stop(None)
        assert [type(await refused(call)) for call in calls] == [Died, Died]
        for late in (take(workers, d0), prefill(workers, d0, request(), 5)):
            error = await refused(late, 5)
            assert error.reason is Reason.WORKER_LOST and not isinstance(error, Died)
