"""What a request gets back: tokens, a result, or an error. Protobuf becomes plain objects here."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from baton.v1 import generation_pb2 as pb

_FINISH = {pb.FINISH_REASON_STOP: "stop", pb.FINISH_REASON_LENGTH: "length", pb.FINISH_REASON_TOOL_CALLS: "tool_calls"}


@dataclass(frozen=True, slots=True)
class Token:
    index: int
    id: int
    text: str
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    guessed: bool = False  # the step that made the token before it made it, too
    rejected: int = 0  # guesses of its step that did not become output: it stands in the place of the first

    choice: int = 0


@dataclass(frozen=True, slots=True)
class PromptToken:
    """What the model says of a token of the prompt. Of the first: nothing."""

    id: int
    logprob: float | None
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Why prompt tokens were computed although prompts are cached."""

    promised_tokens: int  # the worker that computed the prompt was thought to hold or to fetch them
    reachable_tokens: int  # some worker was thought to hold them
    uncached: tuple[tuple[str, int], ...]  # cause and tokens, in the order of the prompt
    holder: str = ""  # the worker that held the reachable ones, if more were reachable than promised
    changed_at: int | None = None  # the first token that can differ from an earlier prompt
    changed_message: int | None = None  # the message of a chat, from 0, that can differ there


@dataclass(frozen=True, slots=True)
class Usage:
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0
    drafted_tokens: int = 0  # guesses that were computed
    accepted_tokens: int = 0  # part of them: they became output
    accepted_prediction_tokens: int = 0  # of the request's prediction: the answer has them
    rejected_prediction_tokens: int = 0
    discarded_tokens: int = 0  # generated for choices that were not among the best; told with the last choice
    cache: CacheReport | None = None  # None: no prompt was computed for this choice


@dataclass(frozen=True, slots=True)
class ToolCall:
    id: str
    name: str
    arguments: str  # a JSON object


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One answer of a beam search."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    score: float
    reasoning: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """The whole answer; of a beam search, the best, and all of them in `hypotheses`.

    `stages_ms`: queue, prefill, transfer, decode add up to the request's time at the router; the rest are parts.

    `resumes`: how many times the stream broke and was resumed. If it did, `stages_ms`, `workers` and `handoff` are those of the router that
    finished it.
    """

    request_id: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop: str | int | None
    usage: Usage
    stages_ms: dict[str, float]
    workers: dict[str, Any]
    handoff: dict[str, Any]
    resumes: int = 0
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    incomplete: bool = False  # the answer ended before the form that was asked for was complete
    prompt_logprobs: tuple[PromptToken, ...] = ()
    relaxed: tuple[str, ...] = ()  # what of that form is not enforced, because it is not strict
    hypotheses: tuple[Hypothesis, ...] = ()  # the best first
    degraded: tuple[str, ...] = ()  # what overload took from the request


class GenerateError(Exception):
    """The request was refused or failed. `reason` is a name from Baton's error table; if `retry_after_s` is set, trying again can help."""

    def __init__(
        self,
        code: str,
        reason: str,
        message: str,
        violations: tuple[tuple[str, str], ...],
        retry_after_s: float | None,
        metadata: Mapping[str, str],
    ) -> None:
        super().__init__(f"{reason or code}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.violations = violations  # (field, what is wrong with it)
        self.retry_after_s = retry_after_s
        self.metadata = metadata


@dataclass(slots=True)
class Assembly:
    """An answer while it arrives."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    accepted: pb.Accepted = field(default_factory=pb.Accepted)
    held_back: str = ""
    thoughts: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    prompt: list[PromptToken] = field(default_factory=list)
    hypotheses: list[Hypothesis] = field(default_factory=list)
    result: Result | None = None
    others: dict[int, "Assembly"] = field(default_factory=dict)  # the choices after the first

    @property
    def results(self) -> list[Result]:
        """The results of the choices that have ended, in their order."""
        return [part.result for _, part in sorted({0: self, **self.others}.items()) if part.result is not None]

    def _of(self, choice: int) -> "Assembly":
        return self if choice == 0 else self.others.setdefault(choice, Assembly(accepted=self.accepted))

    def take(self, response: pb.GenerateResponse, resumes: int) -> list[Token]:
        """`resumes`: how many times the stream was resumed. Raises GenerateError if it was not resumed where it broke."""
        match response.WhichOneof("event"):
            case "accepted":
                self.accepted = response.accepted
            case "prompt_logprobs":
                self._note_prompt(response.prompt_logprobs)
            case "tokens" if response.tokens.choice:
                tokens = self._of(response.tokens.choice).take(_alone(response), resumes)
                return [replace(token, choice=response.tokens.choice) for token in tokens]
            case "finished" if response.finished.choice:
                self._of(response.finished.choice).take(_alone(response), resumes)
            case "tokens":
                tokens = [_to_token(token) for token in response.tokens.tokens]
                if resumes and tokens and tokens[0].index != len(self.token_ids):
                    message = f"the resumed stream goes on with token {tokens[0].index}, not {len(self.token_ids)}"
                    raise GenerateError("DATA_LOSS", "", message, (), None, {})
                self.texts += [token.text for token in tokens]
                self.token_ids += [token.id for token in tokens]
                for token in response.tokens.tokens:
                    self._note(token)
                return tokens
            case "hypothesis":
                del self.hypotheses[response.hypothesis.index :]  # a search that was begun again tells all its answers
                self.hypotheses.append(_to_hypothesis(response.hypothesis))
            case "finished":
                self.held_back = response.finished.text
                self._note(response.finished)
                self.result = self._finish(response.finished, resumes)
        return []

    def _note(self, told: pb.Token | pb.Finished) -> None:
        """What is no part of the text."""
        self.thoughts.append(told.reasoning)
        for part in told.tool_calls:
            if part.name:
                self.calls.append(ToolCall(part.id, part.name, ""))
            if part.arguments:
                call = self.calls[part.index]
                self.calls[part.index] = replace(call, arguments=call.arguments + part.arguments)

    def _note_prompt(self, told: pb.PromptLogprobs) -> None:
        """A stream that broke before the first token tells them again."""
        for token in told.tokens:
            del self.prompt[token.index :]
            top = tuple((best.id, best.logprob) for best in token.top)
            self.prompt.append(PromptToken(token.id, token.logprob if token.HasField("logprob") else None, token.rank, top))

    def to_continue(self, request: pb.GenerateRequest) -> pb.GenerateRequest:
        """What asks a router for the rest of the answer to `request`."""
        if not self.accepted.resume:
            return request
        rest = pb.GenerateRequest()
        rest.CopyFrom(request)
        rest.sampling.CopyFrom(self.accepted.sampling)
        rest.resume = self.accepted.resume
        rest.output_so_far.ids[:] = self.token_ids
        return rest

    def _finish(self, finished: pb.Finished, resumes: int) -> Result:
        stopped_by = finished.WhichOneof("stopped_by")
        best = self.hypotheses[0] if self.hypotheses else None
        return Result(
            request_id=finished.request_id,
            text=best.text if best else "".join(self.texts) + finished.text,
            token_ids=best.token_ids if best else tuple(self.token_ids),
            prompt_logprobs=tuple(self.prompt),
            finish_reason=_FINISH.get(finished.reason, "unknown"),
            stop=getattr(finished, stopped_by) if stopped_by else None,
            usage=_usage(finished.usage),
            stages_ms={f.name.removesuffix("_ms"): getattr(finished.stages, f.name) for f in finished.stages.DESCRIPTOR.fields},
            workers={f.name: getattr(finished.workers, f.name) for f in finished.workers.DESCRIPTOR.fields},
            handoff={f.name: getattr(finished.handoff, f.name) for f in finished.handoff.DESCRIPTOR.fields},
            resumes=resumes,
            reasoning=best.reasoning if best else "".join(self.thoughts),
            tool_calls=tuple(self.calls),
            incomplete=finished.incomplete,
            relaxed=tuple(self.accepted.relaxed),
            hypotheses=tuple(self.hypotheses),
            degraded=tuple(self.accepted.degraded),
        )


def _usage(told: pb.Usage) -> Usage:
    cache = None
    if told.HasField("cache"):
        report = told.cache
        causes = tuple((one.cause, one.tokens) for one in report.uncached)
        changed = (getattr(report, name) if report.HasField(name) else None for name in ("changed_at", "changed_message"))
        cache = CacheReport(report.promised_tokens, report.reachable_tokens, causes, report.holder, *changed)
    return Usage(**{one.name: getattr(told, one.name) for one in fields(Usage)} | {"cache": cache})


def _alone(response: pb.GenerateResponse) -> pb.GenerateResponse:
    """What is told of a choice, as if it were the only one."""
    told = pb.GenerateResponse()
    told.CopyFrom(response)
    getattr(told, told.WhichOneof("event") or "").choice = 0
    return told


def _to_token(token: pb.Token) -> Token:
    logprob = token.logprob if token.HasField("logprob") else None
    top = tuple((top.id, top.logprob) for top in token.top)
    return Token(token.index, token.id, token.text, logprob, top, token.guessed, token.rejected)


def _to_hypothesis(told: pb.Hypothesis) -> Hypothesis:
    return Hypothesis(told.text, tuple(told.token_ids), _FINISH.get(told.reason, "unknown"), told.score, told.reasoning)


def to_error(error: grpc.RpcError) -> GenerateError:
    """What google.rpc.Status says, or the bare status if there is none."""
    reason, violations, retry_after, metadata = "", [], None, {}
    try:
        status = rpc_status.from_call(error)
    except (ValueError, NotImplementedError, DecodeError):  # details that contradict the status, or cannot be parsed
        status = None
    for detail in status.details if status else ():
        info, bad, retry = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            reason, metadata = info.reason, dict(info.metadata)
        elif detail.Unpack(bad):
            violations = [(violation.field, violation.description) for violation in bad.field_violations]
        elif detail.Unpack(retry):
            retry_after = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return GenerateError(error.code().name, reason, error.details() or "", tuple(violations), retry_after, metadata)
