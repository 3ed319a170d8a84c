"""The router's client for its workers. Protobuf and gRPC stop here; failures are raised as BatonError."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, TypeVar
from uuid import uuid4

import grpc

from baton.cluster import semconv
from baton.cluster.config import SecurityConfig
from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.messages import plain
from baton.cluster.records import ROLES, Load, RoleName, WorkerRecord, WorkerState
from baton.cluster.rpc import ProcessChannels
from baton.engine.core.block_key import KEY_BYTES, MEDIA
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from router.backlog import Backlog
from router.calls import Message, to_addressee, to_events, to_job, to_ms, to_prefill_event, to_source
from router.inbox import Inbox
from router.request import Request
from router.session import Put, Session, SessionCall, meaning
from router.turn_budget import BYTES_AT_ONCE, TurnBudget
from router.turnstile import Turnstile
from router.workers import Answer, CachePage, DecodeEvent, Died, Ended, FirstToken, OnOthers, PrefillEvent, Source

log = logging.getLogger(__name__)
RELEASE_TIMEOUT_S = 2.0
ASK_TIMEOUT_S = 1.0  # for an answer, or for one page of a snapshot
SNAPSHOT_TIMEOUT_S = 60.0  # for all pages
LOGS_TIMEOUT_S = 30.0
ASKED_A_TURN = 32  # probes and questions that are sent, or whose answers are read; the first one to a worker opens its channel
MAX_GONE = 1024
CONVERTING = 1 / 4  # of what a token costs at a door
SESSIONS: dict[RoleName, tuple[Any, Any, Any]] = {  # stub, command, commands
    "prefill": (worker_pb2_grpc.PrefillStub, pb.PrefillCommand, pb.PrefillCommands),
    "decode": (worker_pb2_grpc.DecodeStub, pb.DecodeCommand, pb.DecodeCommands),
}
_Identity = tuple[str, int]  # name and incarnation of a worker
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Streams:
    """How tokens travel from a decode worker to their readers."""

    interval_s: Callable[[], float] = lambda: 0.0  # shortest time between two batches of one call
    most_bytes: int = RouterConfig().backlog_bytes  # that may wait for one reader
    budget: TurnBudget = field(default_factory=TurnBudget)


class GrpcWorkers:
    """Channels and sessions, by worker and incarnation."""

    def __init__(self, security: SecurityConfig, streams: Streams | None = None) -> None:
        self._asker = uuid4().hex  # workers tell our prompts from those of other routers by it
        self.on_others: OnOthers = lambda worker, tokens: None
        self._security = security
        self._streams = streams or Streams()
        self._channels: dict[_Identity, ProcessChannels] = {}  # each process has its own, even at an old address
        self._gone: dict[_Identity, None] = {}  # nothing is opened to these again; oldest first
        self._sessions: dict[tuple[_Identity, RoleName], Session[Any]] = {}
        self._inboxes: set[Inbox[Message]] = set()  # of the decode calls
        self._releases: set[asyncio.Task[None]] = set()
        self._turns = Turnstile(ASKED_A_TURN)

    @property
    def unread_bytes(self) -> int:
        """How much of answers waits for their clients to read."""
        return sum(inbox.size for inbox in self._inboxes)

    async def prefill(
        self, worker: WorkerRecord, request: Request, timeout_s: float, source: Source | None = None, uncached_tokens: int = 0
    ) -> AsyncGenerator[PrefillEvent, None]:
        """Yields Opened at most once, when a long prompt has begun, then FirstToken. Closing the generator early cancels the call.

        `source`: a worker that caches more of the prompt. `uncached_tokens`: see `Workers.prefill`. Raises BatonError.
        """
        session = self._session(worker, "prefill")
        come: asyncio.Queue[pb.PrefillEvent | BatonError] = asyncio.Queue()  # a call has few events
        with request.trace.span.child(semconv.PREFILL, "client", {semconv.WORKER: worker.name}) as span:
            command = pb.PrefillCommand(start=pb.PrefillStart(to=to_addressee(worker), timeout_ms=to_ms(timeout_s)))
            start = command.start
            to_job(request, span, start.job, decodes=False)
            start.asker, start.uncached_tokens = self._asker, uncached_tokens
            if source is not None:
                start.source.CopyFrom(to_source(source))
            with session.start(command, len(request.tokens), timeout_s, lambda _, event: come.put_nowait(event)):
                while not isinstance(event := to_prefill_event(await come.get()), FirstToken):
                    yield event
        yield event  # after its span: a caller that has the token need not read to the end of the stream

    async def decode(
        self,
        worker: WorkerRecord,
        request: Request,
        handle: bytes,
        timeout_s: float,
        first: "asyncio.Future[int] | None" = None,
        forks: Sequence["GrpcFork"] = (),
    ) -> AsyncGenerator[DecodeEvent, None]:
        """Yields events up to and including Ended. Closing the generator early cancels the call on the worker.

        `first`: given if the prompt is still being computed and its KV is read piece by piece. It resolves to the first token, which is
        then sent to the worker. `forks` begin with this call.
        """
        session, last = self._session(worker, "decode"), None
        span = request.trace.span.child(semconv.DECODE, "client", {semconv.WORKER: worker.name})
        start = pb.DecodeStart(handle=handle, to=to_addressee(worker), timeout_ms=to_ms(timeout_s), live=first is not None)
        start.forks.extend(fork.told for fork in forks)
        start.tells_search = request.params.beams is not None
        command = pb.DecodeCommand(start=start)
        to_job(request, span, command.start.job)
        inbox: Inbox[Message] = Inbox(self._streams.interval_s, request.backlog)
        put, begun = self._putting(inbox, request.backlog), [fork.call for fork in forks]
        with span, self._open(inbox), session.start(command, len(request.tokens), timeout_s, put, begun) as call:
            if first is not None:
                first.add_done_callback(partial(_tell_first, call))
            async with aclosing(self._read(inbox)) as events:
                async for event in events:
                    if isinstance(event, Ended):
                        last = event
                        break
                    yield event
        if last is not None:
            yield last  # after its span: a caller that has it need not read to the end of the stream

    def fork(self, worker: WorkerRecord, request: Request, timeout_s: float) -> "GrpcFork":
        """See `Workers.fork`. Raises BatonError(WORKER_LOST)."""
        session = self._session(worker, "decode")
        inbox: Inbox[Message] = Inbox(self._streams.interval_s, request.backlog)
        call = session.join(timeout_s, self._putting(inbox, request.backlog))
        span = request.trace.span.child(semconv.DECODE, "client", {semconv.WORKER: worker.name})
        held = ExitStack()
        for part in (span, self._open(inbox), call):
            held.enter_context(part)
        seed, trace = request.params.seed, {"traceparent": span.traceparent, "tracestate": span.tracestate}
        told = pb.DecodeFork(call_id=call.number, seed=seed, request_id=request.id, **trace)
        return GrpcFork(told, call, held, self._read(inbox))

    async def _read(self, inbox: Inbox[Message]) -> AsyncGenerator[DecodeEvent, None]:
        """Yields events up to and including Ended: an error may come after it."""
        while True:
            messages, size = await inbox.take(BYTES_AT_ONCE)
            await self._streams.budget.spend(int(size * CONVERTING))
            for event in to_events(messages):
                yield event
                if isinstance(event, Ended):
                    return

    def release(self, worker: WorkerRecord, handle: bytes, request_id: str) -> None:
        """Ends a lease that nobody will read, without waiting. Best effort: it expires anyway."""
        task = asyncio.create_task(self._release(worker, handle, request_id))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def hint(self, worker: WorkerRecord, keys: Sequence[bytes], within_s: float) -> int:
        """See `Workers.hint`. Raises BatonError."""
        stub = worker_pb2_grpc.WorkerStub(self._channel(worker))
        asked = pb.HintRequest(to=to_addressee(worker), keys=b"".join(keys), within_ms=to_ms(within_s))
        answer = await _answer(stub.Hint(asked, timeout=within_s + ASK_TIMEOUT_S))
        return int(answer.blocks)

    async def snapshot(self, worker: WorkerRecord) -> AsyncGenerator[CachePage, None]:
        """Yields the keys of all blocks in the worker's cache; one page if there is none. The whole may take long, but the next page must
        come soon."""
        stub = worker_pb2_grpc.WorkerStub(self._channel(worker))
        pages = stub.Snapshot(pb.SnapshotRequest(to=to_addressee(worker)), timeout=SNAPSHOT_TIMEOUT_S)
        try:
            while True:
                async with asyncio.timeout(ASK_TIMEOUT_S):
                    page = await _answer(pages.read())
                if page is grpc.aio.EOF:
                    return
                keys = page.keys  # protobuf makes a new copy at each access
                if page.medium not in MEDIA:
                    raise BatonError(Reason.INTERNAL, f"{worker.name} holds blocks on {page.medium!r}, which is none of {', '.join(MEDIA)}")
                split = [keys[at : at + KEY_BYTES] for at in range(0, len(keys), KEY_BYTES)]
                yield CachePage(page.incarnation, page.sequence, split, page.medium)
        except TimeoutError:
            raise BatonError(Reason.DEADLINE, f"{worker.name} did not continue its snapshot") from None
        finally:
            pages.cancel()

    async def describe(self, worker: WorkerRecord) -> tuple[WorkerRecord, dict[str, Any]]:
        """Returns the worker's current record, and what it holds (`baton.v1.Residue`). Raises ValueError for an answer without a record."""
        await self._turns.enter()
        stub = worker_pb2_grpc.WorkerStub(self._channel(worker))
        answer = await _answer(stub.Describe(pb.DescribeRequest(to=to_addressee(worker)), timeout=ASK_TIMEOUT_S))
        await self._turns.enter()
        return WorkerRecord.from_mapping(plain(answer.record)), plain(answer.residue)

    async def probe(self, worker: WorkerRecord, timeout_s: float) -> Answer:
        """Returns the worker's current state and load."""
        await self._turns.enter()
        stub = worker_pb2_grpc.WorkerStub(self._channel(worker))
        answer = await _answer(stub.Probe(pb.ProbeRequest(to=to_addressee(worker), asker=self._asker), timeout=timeout_s))
        await self._turns.enter()
        state: WorkerState = "draining" if answer.state == "draining" else "ready"
        return Answer(state, _to_load(answer.load), _to_roles(answer.roles), answer.stalled_ms / 1000, answer.others_tokens)

    async def set_roles(
        self, worker: WorkerRecord, roles: Sequence[str], prove: bool = False, why: str = ""
    ) -> tuple[tuple[RoleName, ...], tuple[RoleName, ...]]:
        """Changes what the worker serves. Returns the roles that it serves from now on, and those that it drains. `prove`: it accepts work
        of these roles and does not serve them; `why`: the last proof failed."""
        stub = worker_pb2_grpc.WorkerStub(self._channel(worker))
        asked = pb.SetRolesRequest(to=to_addressee(worker), roles=roles, prove=prove, why=why)
        answer = await _answer(stub.SetRoles(asked, timeout=ASK_TIMEOUT_S))
        return _to_roles(answer.serving), _to_roles(answer.draining)

    async def logs(self, worker: WorkerRecord, lines: int, follow: bool) -> AsyncGenerator[bytes, None]:
        """Yields the end of the worker's log, and with `follow` whatever is written later, until it is closed or the worker is gone."""
        stub = worker_pb2_grpc.WorkerStub(self._channel(worker))
        asked = pb.LogsRequest(to=to_addressee(worker), lines=lines, follow=follow)
        call = stub.Logs(asked, timeout=None if follow else LOGS_TIMEOUT_S)
        try:
            while (page := await _answer(call.read())) is not grpc.aio.EOF:
                yield page.text
        finally:
            call.cancel()

    async def recording(self, worker: WorkerRecord, secret: bytes) -> AsyncGenerator[bytes, None]:
        """Yields the section of the worker's recording, in pieces."""
        stub = worker_pb2_grpc.WorkerStub(self._channel(worker))
        call = stub.Record(pb.RecordRequest(to=to_addressee(worker), secret=secret), timeout=LOGS_TIMEOUT_S)
        try:
            while (page := await _answer(call.read())) is not grpc.aio.EOF:
                yield page.lines
        finally:
            call.cancel()

    def welcome(self, worker: WorkerRecord) -> None:
        """Notes that the worker joined. It may have been forgotten before."""
        self._gone.pop(_identity(worker), None)

    async def forget(self, worker: WorkerRecord) -> None:
        """Notes that the worker is gone or its process was replaced. Running calls to it fail with WORKER_LOST, and so do later ones."""
        self._gone[_identity(worker)] = None
        if len(self._gone) > MAX_GONE:
            del self._gone[next(iter(self._gone))]
        await self.lose(worker)

    async def lose(self, worker: WorkerRecord) -> None:
        """Running calls to the worker fail with WORKER_LOST. The next call opens a new connection."""
        identity = _identity(worker)
        sessions = [session for role in ROLES if (session := self._sessions.pop((identity, role), None))]
        old = self._channels.pop(identity, None)
        try:
            for session in sessions:
                await session.close()
        finally:  # nothing else refers to the channel now, so it is closed even if this is cancelled
            if old is not None:
                await old.close()

    async def close(self) -> None:
        for session in list(self._sessions.values()):
            await session.close()
        if self._releases:
            await asyncio.wait(self._releases, timeout=RELEASE_TIMEOUT_S)
        for open_channel in self._channels.values():
            await open_channel.close()

    def _channel(self, worker: WorkerRecord) -> grpc.aio.Channel:
        identity = _identity(worker)
        if identity in self._gone:
            raise BatonError(Reason.WORKER_LOST, f"{worker.name} is gone")
        if identity not in self._channels:
            self._channels[identity] = ProcessChannels(worker.address, self._security)
        return self._channels[identity].channel()

    def _session(self, worker: WorkerRecord, role: RoleName) -> Session[Any]:
        key = _identity(worker), role
        session = self._sessions.get(key)
        if session is None or session.lost:
            stub, command, commands = SESSIONS[role]
            stream = stub(self._channel(worker)).Session(wait_for_ready=False)
            aside = partial(self._note_others, worker) if role == "prefill" else None
            session = self._sessions[key] = Session(worker.name, stream, command, commands, aside)
        return session

    def _note_others(self, worker: WorkerRecord, message: pb.PrefillEvents) -> None:
        if message.HasField("others_tokens"):
            self.on_others(worker, message.others_tokens)

    @contextmanager
    def _open(self, inbox: Inbox[Message]) -> Iterator[None]:
        self._inboxes.add(inbox)
        try:
            yield
        finally:
            inbox.close()
            self._inboxes.discard(inbox)

    def _putting(self, inbox: Inbox[Message], backlog: Backlog) -> Put[pb.DecodeEvent]:
        """Puts what comes for a call into its inbox. A token waits as bytes of its own: the event would keep the whole message that it came
        in. Too many of them end the call, here and at the worker."""

        def put(call: SessionCall[pb.DecodeEvent], event: Message) -> None:
            if isinstance(event, BatonError) or event.WhichOneof("event") != "token":
                inbox.put(event)
                return
            inbox.put_token(event.token.SerializeToString())
            if backlog.size > self._streams.most_bytes:
                message = f"more than {self._streams.most_bytes} bytes of the answer wait for the client to read"
                inbox.end(BatonError(Reason.STALLED, message))
                call.cancel()

        return put

    async def _release(self, worker: WorkerRecord, handle: bytes, request_id: str) -> None:
        try:
            stub = worker_pb2_grpc.KvExchangeStub(self._channel(worker))
            await _answer(stub.Release(pb.ReleaseRequest(handle=handle, request_id=request_id), timeout=RELEASE_TIMEOUT_S))
        except BatonError as error:
            log.debug("release at %s: %s", worker.name, error)


class GrpcFork:
    """See `router.workers.Fork`. `held`: what lasts as long as the call."""

    def __init__(self, told: pb.DecodeFork, call: SessionCall[Any], held: ExitStack, events: AsyncGenerator[DecodeEvent, None]) -> None:
        self.told = told
        self.call = call
        self._held = held
        self._events = events

    async def events(self) -> AsyncGenerator[DecodeEvent, None]:
        with self._held:
            async with aclosing(self._events) as events:
                async for event in events:
                    yield event

    def close(self) -> None:
        self.call.cancel()
        self._held.close()


def _identity(worker: WorkerRecord) -> _Identity:
    return worker.name, worker.incarnation


def _tell_first(call: SessionCall[pb.DecodeEvent], first: "asyncio.Future[int]") -> None:
    if not first.cancelled():
        call.tell(first=pb.DecodeFirst(token_id=first.result()))


async def _answer(call: Awaitable[T]) -> T:
    """Raises BatonError. If its channel is closed, a call looks cancelled although nobody cancelled this task: the worker is gone."""
    try:
        return await call
    except grpc.RpcError as error:
        raise meaning(error) from None
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise Died("the channel to the worker was closed") from None


def _to_roles(names: Sequence[str]) -> tuple[RoleName, ...]:
    """Leaves out names that a newer worker knows and we do not."""
    return tuple(role for role in ROLES if role in names)


def _to_load(load: pb.WorkerLoad) -> Load:
    return Load(**{field.name: getattr(load, field.name) for field in fields(Load)})
