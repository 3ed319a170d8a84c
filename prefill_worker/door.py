"""The gRPC service of the prefill role. Protobuf stops here."""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from baton.cluster.errors import BatonError
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker.identity import WorkerIdentity
from baton.worker.kv_port import KvPlace
from baton.worker.prompts import PacedNews, Prompts
from baton.worker.session import Emit, Form, Session, SessionDoor
from baton.worker.wire import pack_handle, to_call_error, to_finish, to_sequence, to_token
from kvtransfer.handle import KvHandle
from prefill_worker.worker import Prefilled, PrefillWorker, Source


class PrefillDoor(SessionDoor, worker_pb2_grpc.PrefillServicer):
    def __init__(self, worker: PrefillWorker, identity: WorkerIdentity, prompts: Prompts) -> None:
        self._worker = worker
        self._identity = identity
        self._prompts = prompts
        self.form = Form(lambda call_id, start: [(call_id, partial(self._serve, start))], to_message, pb.PrefillEvents)

    def opened(self) -> Session:
        return _Session(self.form, self._prompts)

    async def _serve(self, start: pb.PrefillStart, emit: Emit, _: "asyncio.Future[int]") -> None:
        self._identity.check(start.to)
        timeout_s, job = start.timeout_ms / 1000, start.job
        seq = to_sequence(job, self._identity.model_fingerprint, hold=True, timeout_s=timeout_s)
        with self._prompts.present(start.asker, start.uncached_tokens):
            async with asyncio.timeout(timeout_s):
                emit(await self._worker.prefill(seq, job.request_id, emit, to_source(start), job.traceparent, job.tracestate))


class _Session(Session):
    """Tells its router about the prompts of others, too."""

    def __init__(self, form: Form, prompts: Prompts) -> None:
        super().__init__(form)
        self._prompts = prompts
        self._paced = PacedNews(self._note)
        self._leave: Callable[[], None] | None = None
        self._others: int | None = None  # news

    def begun(self, start: pb.PrefillStart) -> None:
        if self._leave is None:  # a stream is one router's
            self._leave = self._prompts.follow(start.asker, self._paced)

    def _note(self, tokens: int) -> None:
        self._others = tokens
        self.speak()

    def aside(self) -> dict[str, Any]:
        others, self._others = self._others, None
        return {} if others is None else {"others_tokens": others}

    async def close(self) -> None:
        if self._leave is not None:
            self._leave()
        self._paced.close()
        await super().close()


def to_source(start: pb.PrefillStart) -> Source | None:
    if not start.HasField("source"):
        return None
    source = start.source
    return Source(KvPlace(source.worker, source.incarnation, source.address), source.blocks)


def to_message(call_id: int, event: KvHandle | Prefilled | BatonError) -> pb.PrefillEvent:
    match event:
        case KvHandle():
            return pb.PrefillEvent(call_id=call_id, opened=pb.PrefillOpened(handle=pack_handle(event)))
        case Prefilled():
            return pb.PrefillEvent(call_id=call_id, done=to_done(event))
        case BatonError():
            return pb.PrefillEvent(call_id=call_id, error=to_call_error(event))


def to_done(done: Prefilled) -> pb.PrefillDone:
    return pb.PrefillDone(
        token=to_token(done.sampled),
        handle=pack_handle(done.handle) if done.handle else b"",
        finish=to_finish(done.finish),
        cached_tokens=done.cached_tokens,
        fetched_tokens=done.fetched_tokens,
        wait_ms=done.wait_ms,
        compute_ms=done.compute_ms,
    )
