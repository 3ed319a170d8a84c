"""Converts between `baton.v1` and the plain objects of engine and kvtransfer: protobuf stops here."""

import itertools
import math
from dataclasses import asdict, fields, replace

from google.protobuf.message import DecodeError

from baton.clock import loop_time
from baton.cluster.errors import BatonError, Reason
from baton.cluster.rpc import to_status
from baton.engine.core.beams import Beams, Hypothesis
from baton.engine.core.block_key import root_key
from baton.engine.core.grammar import Grammar
from baton.engine.core.kvcache import DraftKv, KvLayout
from baton.engine.core.sampling import FIELDS, RAW, Sampled, SamplingParams, Scored
from baton.engine.core.sequence import Finish, Sequence
from baton.engine.core.speculation import UNASKED, Speculation
from baton.engine.core.thinking import Marks, ThinkingBudget
from baton.v1 import generation_pb2, worker_pb2
from kvtransfer.handle import KvHandle, Piece, Wish

_numbers = itertools.count(1)
_FINISH = {Finish.STOP: generation_pb2.FINISH_REASON_STOP, Finish.LENGTH: generation_pb2.FINISH_REASON_LENGTH}


def to_sequence(job: worker_pb2.Job, model_fingerprint: str, hold: bool = False, timeout_s: float | None = None) -> Sequence:
    """Makes a sequence with a unique id: two attempts at one request are two sequences. `timeout_s`: how long the caller waits for it."""
    return Sequence(
        id=f"{job.request_id}#{next(_numbers)}",
        tokens=list(job.token_ids),
        prompt_len=job.prompt_tokens,
        params=to_params(job),
        root=root_key(model_fingerprint, job.cache_salt),
        hold=hold,
        expires_at=math.inf if timeout_s is None else loop_time() + timeout_s,  # the clock of the engine's loop
    )


def to_fork(job: worker_pb2.Job, fork: worker_pb2.DecodeFork, model_fingerprint: str, timeout_s: float) -> Sequence:
    """One more answer to the prompt of `job`, which differs in its seed."""
    seq = to_sequence(job, model_fingerprint, timeout_s=timeout_s)
    tokens, params = seq.tokens[: seq.prompt_len], replace(seq.params, seed=fork.seed, prompt_logprobs=None)
    return replace(seq, id=f"{fork.request_id}#{next(_numbers)}", tokens=tokens, params=params)


def to_params(job: worker_pb2.Job) -> SamplingParams:
    """Reads every field by its name; a job sets all of them."""
    sampling = job.sampling
    given = {name: getattr(sampling, name) for name in FIELDS}
    given["logit_bias"] = dict(sampling.logit_bias)
    given["logprobs"] = sampling.logprobs if sampling.HasField("logprobs") else None
    given["logprobs_mode"] = sampling.logprobs_mode or RAW  # an older router's is empty
    given["prompt_logprobs"] = sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None
    given["stop_token_ids"] = frozenset(sampling.stop_token_ids)
    form = sampling.structured
    given["structured"] = Grammar(form.kind, form.text, form.strict) if sampling.HasField("structured") else None
    given["thinking"] = _to_budget(job.thinking) if job.HasField("thinking") else None
    given["beams"] = _to_beams(job.beam) if job.HasField("beam") else None
    return SamplingParams(**given, speculation=_to_speculation(job))


def _to_beams(told: generation_pb2.Beam) -> Beams:
    return Beams(told.width, told.count, told.length_penalty, told.early_stopping)  # type: ignore[arg-type]  # the router has checked it


def _to_speculation(job: worker_pb2.Job) -> Speculation:
    if not (job.HasField("speculation") or job.prediction):
        return UNASKED
    told = job.speculation
    return Speculation(told.method, told.max_tokens if told.HasField("max_tokens") else None, tuple(job.prediction))


def _to_budget(told: worker_pb2.ThinkingBudget) -> ThinkingBudget:
    marks = tuple(Marks(each.begin, tuple(each.ends), tuple(each.closing)) for each in told.marks)
    return ThinkingBudget(told.max_tokens, marks, told.opened)


def to_token(sampled: Sampled, guessed: bool = False, rejected: int = 0) -> worker_pb2.GeneratedToken:
    return worker_pb2.GeneratedToken(id=sampled.token, logprob=sampled.logprob, top=to_top(sampled), guessed=guessed, rejected=rejected)


def to_prompt_logprobs(first: int, scores: tuple[Scored, ...]) -> generation_pb2.PromptLogprobs:
    """`first`: position of the first of them in the prompt."""
    tokens = [
        generation_pb2.PromptToken(index=index, id=each.token, logprob=each.logprob, rank=each.rank, top=to_top(each))
        for index, each in enumerate(scores, first)
    ]
    return generation_pb2.PromptLogprobs(tokens=tokens)


def to_top(sampled: Sampled) -> list[generation_pb2.TopLogprob]:
    return [generation_pb2.TopLogprob(id=token, logprob=logprob) for token, logprob in sampled.top]


def to_hypothesis(found: Hypothesis) -> worker_pb2.GeneratedHypothesis:
    return worker_pb2.GeneratedHypothesis(token_ids=found.tokens, score=found.score, stopped=found.stopped)


def to_finish(finish: Finish | None) -> "generation_pb2.FinishReason":
    return _FINISH[finish] if finish else generation_pb2.FINISH_REASON_UNSPECIFIED


def to_call_error(error: BatonError) -> worker_pb2.CallError:
    return worker_pb2.CallError(status=to_status(error).SerializeToString())


def pack_handle(handle: KvHandle) -> bytes:
    return worker_pb2.KvHandle(**asdict(handle)).SerializeToString()


def unpack_handle(data: bytes) -> KvHandle:
    """Raises BatonError(LEASE_REFUSED) if `data` is not a handle."""
    message = worker_pb2.KvHandle()
    try:
        message.ParseFromString(data)
    except DecodeError:
        raise BatonError(Reason.LEASE_REFUSED, "the handle cannot be read") from None
    return KvHandle(**{f.name: getattr(message, f.name) for f in fields(KvHandle)})


def pack_piece(piece: Piece) -> worker_pb2.KvPiece:
    return worker_pb2.KvPiece(**asdict(piece))


def unpack_piece(message: worker_pb2.KvPiece) -> Piece:
    facts = {f.name: getattr(message, f.name) for f in fields(Piece)}
    return Piece(**(facts | {"block_ids": tuple(message.block_ids)}))


def pack_wish(wish: Wish) -> worker_pb2.LendRequest:
    return worker_pb2.LendRequest(**asdict(wish))


def unpack_wish(message: worker_pb2.LendRequest) -> Wish:
    return Wish(**{f.name: getattr(message, f.name) for f in fields(Wish)})


def pack_layout(layout: KvLayout) -> worker_pb2.KvContract:
    return worker_pb2.KvContract(**asdict(layout))


def unpack_layout(contract: worker_pb2.KvContract) -> KvLayout:
    draft = DraftKv(**{f.name: getattr(contract.draft, f.name) for f in fields(DraftKv)}) if contract.HasField("draft") else None
    return KvLayout(**{f.name: getattr(contract, f.name) for f in fields(KvLayout)} | {"draft": draft})
