"""The gRPC service of the decode role. One stream per router carries all its calls, and one message all tokens of a step.

Protobuf stops here.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict

from baton.cluster.errors import BatonError, invalid
from baton.cluster.rpc import Answering, Context
from baton.engine.core.sampling import Sampled
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker.identity import Identity
from baton.worker.wire import to_finish, to_sequence, to_token, unpack_handle
from decode_worker.call import Adopted, Event, Finished
from decode_worker.worker import DecodeWorker

MAX_EVENTS = 256  # in one message: the router reads a message in one turn of its loop
MAX_OUTBOX = 65536  # events a router may leave unread before it counts as gone


class DecodeDoor(worker_pb2_grpc.DecodeServicer):
    def __init__(self, worker: DecodeWorker, identity: Identity) -> None:
        self._worker = worker
        self._identity = identity

    async def Session(self, request_iterator: AsyncIterator[pb.DecodeCommand], context: Context) -> AsyncIterator[pb.DecodeEvents]:
        session = Session(self._worker, self._identity)
        reader = asyncio.create_task(session.obey(request_iterator))
        async with Answering(context):
            try:
                while not session.overflowed:
                    yield await session.next_events()
            finally:
                # The router is gone or has cancelled the stream: the calls that it started end, too.
                reader.cancel()
                await asyncio.shield(session.close())


class Session:
    def __init__(self, worker: DecodeWorker, identity: Identity) -> None:
        self._worker = worker
        self._identity = identity
        self._calls: dict[int, asyncio.Task[None]] = {}
        self._firsts: dict[int, asyncio.Future[int]] = {}  # of live calls: resolves to the first token
        self._outbox: list[pb.DecodeEvent] = []
        self._filled = asyncio.Event()
        self.overflowed = False  # the router does not read: the stream ends, and with it all calls that were started on it
        self._refused: BatonError | None = None  # the router broke the protocol: the stream ends likewise

    async def obey(self, commands: AsyncIterator[pb.DecodeCommand]) -> None:
        async for command in commands:
            match command.WhichOneof("command"):
                case "start":
                    self._start(command.call_id, command.start)
                case "first":
                    first = self._firsts.get(command.call_id)
                    if first is not None and not first.done():
                        first.set_result(command.first.token_id)
                case "cancel":
                    if task := self._calls.get(command.call_id):
                        task.cancel()

    async def next_events(self) -> pb.DecodeEvents:
        """Waits for events and returns the oldest. Raises BatonError if the router broke the protocol."""
        await self._filled.wait()
        if self._refused is not None:
            raise self._refused
        events, self._outbox = self._outbox[:MAX_EVENTS], self._outbox[MAX_EVENTS:]
        if not self._outbox:
            self._filled.clear()
        return pb.DecodeEvents(events=events)

    async def close(self) -> None:
        tasks = list(self._calls.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, call_id: int, start: pb.DecodeStart) -> None:
        if call_id in self._calls:
            # Answers under this number could not tell the two calls apart.
            self._refused = invalid("call_id", f"{call_id} is the number of a call that has not ended")
            self._filled.set()
            return
        if start.live:
            self._firsts[call_id] = asyncio.get_running_loop().create_future()
        task = asyncio.create_task(self._run(call_id, start))
        self._calls[call_id] = task
        task.add_done_callback(lambda _: self._forget(call_id))

    def _forget(self, call_id: int) -> None:
        del self._calls[call_id]
        self._firsts.pop(call_id, None)

    async def _run(self, call_id: int, start: pb.DecodeStart) -> None:
        timeout_s = start.timeout_ms / 1000
        try:
            self._identity.check(start.to)
            handle = unpack_handle(start.handle) if start.handle else None
            seq = to_sequence(start.job, self._identity.model_fingerprint, timeout_s=timeout_s)
        except BatonError as error:
            self._emit(call_id, error)
            return

        def emit(event: Event) -> None:
            self._emit(call_id, event)

        first, job = self._firsts.get(call_id), start.job
        await self._worker.run(seq, job.request_id, handle, timeout_s, emit, first, job.traceparent, job.tracestate)

    def _emit(self, call_id: int, event: Event) -> None:
        if len(self._outbox) >= MAX_OUTBOX:
            self.overflowed = True
            self._filled.set()
            return
        self._outbox.append(to_message(call_id, event))
        self._filled.set()


def to_message(call_id: int, event: Event) -> pb.DecodeEvent:
    match event:
        case Sampled():
            return pb.DecodeEvent(call_id=call_id, token=to_token(event))
        case Adopted(handoff):
            return pb.DecodeEvent(call_id=call_id, adopted=pb.Adopted(handoff=pb.HandoffFacts(**asdict(handoff))))
        case Finished():
            finished = pb.DecodeFinished(
                reason=to_finish(event.finish),
                handoff=pb.HandoffFacts(**asdict(event.handoff)),
                cached_tokens=event.cached_tokens,
                preemptions=event.preemptions,
            )
            return pb.DecodeEvent(call_id=call_id, finished=finished)
        case BatonError():
            return pb.DecodeEvent(call_id=call_id, error=pb.CallError(reason=event.reason.name, message=event.message))
