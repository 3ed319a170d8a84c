"""The gRPC service of the decode role. Protobuf stops here."""

import asyncio
from dataclasses import asdict
from functools import partial

from baton.cluster.errors import BatonError
from baton.engine.core.beams import Hypothesis
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker.identity import WorkerIdentity
from baton.worker.session import Emit, Form, Serve, SessionDoor
from baton.worker.wire import (
    to_call_error,
    to_finish,
    to_fork,
    to_hypothesis,
    to_prompt_logprobs,
    to_sequence,
    to_token,
    unpack_handle,
)
from decode_worker.call import Adopted, CallAhead, Event, Finished, Made, PromptScores, Searched
from decode_worker.worker import DecodeWorker


class DecodeDoor(SessionDoor, worker_pb2_grpc.DecodeServicer):
    def __init__(self, worker: DecodeWorker, identity: WorkerIdentity) -> None:
        self._worker = worker
        self._identity = identity
        self.form = Form(self._begin, to_message, pb.DecodeEvents)

    def _begin(self, call_id: int, start: pb.DecodeStart) -> list[tuple[int, Serve]]:
        ahead = CallAhead(len(start.forks))
        forks = [(fork.call_id, partial(self._follow, start, fork, ahead)) for fork in start.forks]
        return [(call_id, partial(self._serve, start, ahead)), *forks]

    async def _serve(self, start: pb.DecodeStart, ahead: CallAhead, emit: Emit, first: "asyncio.Future[int]") -> None:
        timeout_s, job = start.timeout_ms / 1000, start.job
        ahead.begun = True
        try:
            self._identity.check(start.to)
            handle = unpack_handle(start.handle) if start.handle else None
            seq = to_sequence(job, self._identity.model_fingerprint, timeout_s=timeout_s)
            live = first if start.live else None
            emit = emit if start.tells_search else _without_search(emit)
            call = self._worker.open(seq, job.request_id, handle, emit, live, job.traceparent, job.tracestate)
            call.ahead = ahead
            await self._worker.serve(call, timeout_s)
        except BatonError as error:
            ahead.settle(error)
            raise
        finally:
            ahead.settle()

    async def _follow(self, start: pb.DecodeStart, fork: pb.DecodeFork, ahead: CallAhead, emit: Emit, _: "asyncio.Future[int]") -> None:
        timeout_s, job = start.timeout_ms / 1000, start.job
        if not ahead.begun:
            ahead.settle()
        seq = to_fork(job, fork, self._identity.model_fingerprint, timeout_s=timeout_s)
        call = self._worker.open(seq, fork.request_id, None, emit, None, fork.traceparent, fork.tracestate)
        await self._worker.follow(call, ahead, timeout_s)


def _without_search(emit: Emit) -> Emit:
    """Serves a router that does not ask how far a search has come."""
    return lambda event: None if isinstance(event, Searched) else emit(event)


def to_message(call_id: int, event: Event) -> pb.DecodeEvent:
    match event:
        case Made():
            return pb.DecodeEvent(call_id=call_id, token=to_token(event.sampled, event.guessed, event.rejected))
        case PromptScores(first, scores):
            return pb.DecodeEvent(call_id=call_id, prompt_logprobs=to_prompt_logprobs(first, scores))
        case Hypothesis():
            return pb.DecodeEvent(call_id=call_id, hypothesis=to_hypothesis(event))
        case Searched(tokens):
            return pb.DecodeEvent(call_id=call_id, searched=tokens)
        case Adopted(handoff, cached):
            adopted = pb.Adopted(handoff=pb.HandoffFacts(**asdict(handoff)), cached_tokens=cached)
            return pb.DecodeEvent(call_id=call_id, adopted=adopted)
        case Finished():
            finished = pb.DecodeFinished(
                reason=to_finish(event.finish),
                handoff=pb.HandoffFacts(**asdict(event.handoff)),
                cached_tokens=event.cached_tokens,
                preemptions=event.preemptions,
            )
            return pb.DecodeEvent(call_id=call_id, finished=finished)
        case BatonError():
            return pb.DecodeEvent(call_id=call_id, error=to_call_error(event))
