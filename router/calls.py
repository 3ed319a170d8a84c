"""What the calls to a worker carry, in its form on the wire."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict

from baton.cluster.errors import BatonError, Reason
from baton.cluster.handoff import Handoff
from baton.cluster.messages import plain
from baton.cluster.records import WorkerRecord
from baton.cluster.rpc import from_status
from baton.cluster.telemetry import NO_SPAN, TraceSpan
from baton.engine.core.beams import Beams, Hypothesis
from baton.engine.core.sampling import FIELDS
from baton.engine.core.speculation import UNASKED
from baton.engine.core.thinking import ThinkingBudget
from baton.v1 import generation_pb2, worker_pb2
from router.request import FinishReason, PromptToken, Request, Scores, Token
from router.workers import Adopted, DecodeEvent, Ended, FirstToken, Opened, PrefillEvent, Searched, Source

_FINISH: dict[int, FinishReason | None] = {
    generation_pb2.FINISH_REASON_UNSPECIFIED: None,
    generation_pb2.FINISH_REASON_STOP: "stop",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}


Message = worker_pb2.DecodeEvent | BatonError  # of a decode call; its tokens wait as bytes (`router.inbox`)


def to_job(request: Request, span: TraceSpan = NO_SPAN, job: worker_pb2.Job | None = None, decodes: bool = True) -> worker_pb2.Job:
    """`job`: an empty one that is a part of a message: to copy one with a long prompt into its place takes long."""
    told = {name: getattr(request.params, name) for name in FIELDS}
    told["prompt_logprobs"] = request.params.prompt_logprobs if request.unscored else None
    told["structured"] = request.params.structured and request.params.structured.told()
    told["stop_token_ids"] = sorted(request.params.stop_token_ids)  # the same bytes for the same request
    job = worker_pb2.Job() if job is None else job
    job.request_id, job.prompt_tokens, job.cache_salt = request.id, request.prompt_len, request.salt
    job.token_ids.extend(request.tokens)
    job.sampling.CopyFrom(generation_pb2.SamplingParams(**told))
    job.traceparent, job.tracestate = span.traceparent, span.tracestate
    if request.params.thinking is not None:
        job.thinking.CopyFrom(_to_budget(request.params.thinking))
    if request.params.beams is not None:
        job.beam.CopyFrom(_to_beam(request.params.beams))
    if decodes and (asked := request.params.speculation) != UNASKED:
        job.speculation.CopyFrom(generation_pb2.Speculation(method=asked.method, max_tokens=asked.max_tokens))
        job.prediction.extend(asked.prediction)
    return job


def _to_budget(budget: ThinkingBudget) -> worker_pb2.ThinkingBudget:
    return worker_pb2.ThinkingBudget(**asdict(budget))


def _to_beam(beams: Beams) -> generation_pb2.Beam:
    return generation_pb2.Beam(**asdict(beams))


def to_addressee(worker: WorkerRecord) -> worker_pb2.Addressee:
    """The process that a call is meant for: by now another one may listen at the address."""
    return worker_pb2.Addressee(worker=worker.name, incarnation=worker.incarnation, model_fingerprint=worker.model_fingerprint)


def to_source(source: Source) -> worker_pb2.KvSource:
    worker = source.worker
    return worker_pb2.KvSource(worker=worker.name, incarnation=worker.incarnation, address=worker.address, blocks=source.blocks)


def to_ms(timeout_s: float) -> int:
    return max(1, int(timeout_s * 1000))


def to_prefill_event(message: worker_pb2.PrefillEvent | BatonError) -> PrefillEvent:
    """Raises the BatonError that ended the call."""
    if isinstance(message, BatonError):
        raise message
    match message.WhichOneof("event"):
        case "opened":
            return Opened(message.opened.handle)
        case "done":
            done = message.done
            return FirstToken(
                to_token(done.token),
                done.handle,
                _FINISH[done.finish],
                done.cached_tokens,
                done.wait_ms,
                done.compute_ms,
                done.fetched_tokens,
            )
        case other:
            raise _failure(other, message.error)


def to_token(token: worker_pb2.GeneratedToken) -> Token:
    top = tuple((top.id, top.logprob) for top in token.top) if token.top else ()
    return Token(token.id, token.logprob if token.HasField("logprob") else None, top, token.guessed, token.rejected)


def _to_prompt_token(told: generation_pb2.PromptToken) -> PromptToken:
    return PromptToken(told.index, told.id, told.logprob, told.rank, tuple((top.id, top.logprob) for top in told.top))


def to_events(messages: Sequence[Message | bytes]) -> Iterator[DecodeEvent]:
    """`bytes`: a GeneratedToken. Joins successive tokens. Raises the BatonError that ended the call."""
    tokens: list[Token] = []
    for message in messages:
        if isinstance(message, bytes):
            tokens.append(to_token(worker_pb2.GeneratedToken.FromString(message)))
            continue
        if tokens:
            yield tuple(tokens)
            tokens = []
        yield _to_event(message)
    if tokens:
        yield tuple(tokens)


def _to_event(message: worker_pb2.DecodeEvent | BatonError) -> Scores | Searched | Hypothesis | Adopted | Ended:
    if isinstance(message, BatonError):
        raise message
    match message.WhichOneof("event"):
        case "adopted":
            return Adopted(Handoff(**plain(message.adopted.handoff)), message.adopted.cached_tokens)
        case "prompt_logprobs":
            return Scores(tuple(map(_to_prompt_token, message.prompt_logprobs.tokens)))
        case "searched":
            return Searched(message.searched)
        case "hypothesis":
            found = message.hypothesis
            return Hypothesis(tuple(found.token_ids), found.score, found.stopped)
        case "finished":
            finish = _FINISH[message.finished.reason]
            if finish is None:
                raise BatonError(Reason.INTERNAL, "the worker finished without a reason")
            return Ended(finish, message.finished.handoff.recomputed_tokens, message.finished.cached_tokens)
        case other:
            raise _failure(other, message.error)


def _failure(event: str | None, error: worker_pb2.CallError) -> BatonError:
    """`event`: the name of the last event of a call, which is neither a result nor known."""
    if event != "error":
        return BatonError(Reason.INTERNAL, f"the worker sent {event!r}")
    return from_status(error.status)
