"""The gRPC service of the decode role. Protobuf stops here."""

import asyncio
from dataclasses import asdict

from baton.cluster.errors import BatonError
from baton.v1 import worker_pb2 as pb
from baton.v1 import worker_pb2_grpc
from baton.worker.identity import Identity
from baton.worker.session import Emit, Form, SessionDoor
from baton.worker.wire import to_call_error, to_finish, to_prompt_logprobs, to_sequence, to_token, unpack_handle
from decode_worker.call import Adopted, Event, Finished, Made, PromptScores
from decode_worker.worker import DecodeWorker


class DecodeDoor(SessionDoor, worker_pb2_grpc.DecodeServicer):
    def __init__(self, worker: DecodeWorker, identity: Identity) -> None:
        self._worker = worker
        self._identity = identity
        self.form = Form(self._serve, to_message, pb.DecodeEvents)

    async def _serve(self, start: pb.DecodeStart, emit: Emit, first: "asyncio.Future[int]") -> None:
        self._identity.check(start.to)
        timeout_s, job = start.timeout_ms / 1000, start.job
        handle = unpack_handle(start.handle) if start.handle else None
        seq = to_sequence(job, self._identity.model_fingerprint, timeout_s=timeout_s)
        live = first if start.live else None
        await self._worker.run(seq, job.request_id, handle, timeout_s, emit, live, job.traceparent, job.tracestate)


def to_message(call_id: int, event: Event) -> pb.DecodeEvent:
    match event:
        case Made():
            return pb.DecodeEvent(call_id=call_id, token=to_token(event.sampled, event.guessed, event.rejected))
        case PromptScores(first, scores):
            return pb.DecodeEvent(call_id=call_id, prompt_logprobs=to_prompt_logprobs(first, scores))
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
            return pb.DecodeEvent(call_id=call_id, error=to_call_error(event))
