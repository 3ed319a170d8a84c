"""The gRPC service `baton.v1.Generation`. It only translates; Protobuf stops here."""

from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from itertools import islice

from baton.cluster import semconv
from baton.cluster.errors import invalid
from baton.cluster.keys import ApiKeys
from baton.cluster.rpc import Answering, Context, first_of, metadata_of
from baton.engine.core.beams import Beams
from baton.engine.core.grammar import Grammar
from baton.engine.core.sampling import FIELDS
from baton.engine.core.speculation import UNASKED, Speculation
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from router.conversation import MAX_TOOLS, MAX_TOOLS_BYTES, PLAIN, Aside, PastCall, Setting, Tool, parsed
from router.doorman import Arrival
from router.events import Accepted, Event, Finished, Pieces
from router.found import Found
from router.request import PromptToken, Scores, Trace
from router.service import GenerateService
from router.tools.delta import Arguments, CallBegin, Delta, Reasoning
from router.turn_budget import TurnBudget
from router.validate import Ask, AskSampling, RequestLimits

_LIMITS = RequestLimits()
_REASON = {"stop": pb.FINISH_REASON_STOP, "length": pb.FINISH_REASON_LENGTH}


class GenerationDoor(generation_pb2_grpc.GenerationServicer):
    def __init__(self, service: GenerateService, keys: ApiKeys, budget: TurnBudget | None = None) -> None:
        self._budget = budget or TurnBudget()
        self._service = service
        self._keys = keys

    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        async with Answering(context):
            metadata = metadata_of(context)
            tenant = self._keys.tenant(first_of(metadata, "authorization"))
            parent = first_of(metadata, "traceparent") or ""
            state = ",".join(value for key, value in metadata if key == "tracestate")
            if not request.resume:  # a stream that goes on is never refused for a measure of `router.degrade`
                operation = semconv.CHAT if request.HasField("chat") else semconv.TEXT_COMPLETION
                arrival = Arrival(operation, request.request_id, tenant, parent, state, request.priority)
                if (refusal := self._service.doorman.look(arrival, context.time_remaining())) is not None:
                    async with self._budget.ending():
                        raise refusal
            ask = to_ask(request, parent, tenant, self._service.max_model_len, state)
            async with aclosing(self._service.generate(ask, context.time_remaining())) as events, self._budget.ending():
                async for event in events:
                    if isinstance(event, Accepted):
                        context.set_trailing_metadata((("x-request-id", event.request_id),))
                    elif isinstance(event, Pieces | Scores | Found):
                        await self._budget.spend(event.size)
                    yield to_response(event)

    async def Tokenize(self, request: pb.GenerateRequest, context: Context) -> pb.TokenizeResponse:
        async with Answering(context):
            tenant = self._keys.tenant(first_of(metadata_of(context), "authorization"))
            ids = await self._service.tokenize(to_ask(request, tenant=tenant, context=self._service.max_model_len))
            return pb.TokenizeResponse(token_ids=pb.TokenIds(ids=ids))
        raise AssertionError("answered with an error")

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:
        async with Answering(context):
            tenant = self._keys.tenant(first_of(metadata_of(context), "authorization"))
            ids = _ids(request.token_ids, self._service.max_model_len)
            return pb.DetokenizeResponse(text=await self._service.detokenize(Ask(model=request.model, token_ids=ids, tenant=tenant)))
        raise AssertionError("answered with an error")

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:
        async with Answering(context):
            self._keys.tenant(first_of(metadata_of(context), "authorization"))
            return pb.ListModelsResponse(models=[pb.Model(name=self._service.model_name, max_model_len=self._service.max_model_len)])
        raise AssertionError("answered with an error")


def to_ask(request: pb.GenerateRequest, traceparent: str = "", tenant: str = "", context: int | None = None, tracestate: str = "") -> Ask:
    """Cuts a list that is too long one item beyond its limit: it is still refused, and costs no more than a list that is not too long.
    `context`: the longest prompt plus output, in tokens, if it is known."""
    kind = request.WhichOneof("prompt")
    return Ask(
        request_id=request.request_id,
        model=request.model,
        text=request.text if kind == "text" else None,
        messages=_messages(request.chat) if kind == "chat" else None,
        names=_names(request.chat) if kind == "chat" else (),
        setting=_setting(request.chat) if kind == "chat" else PLAIN,
        token_ids=_ids(request.token_ids, context) if kind == "token_ids" else None,
        parse_special=request.parse_special if request.HasField("parse_special") else None,
        add_special_tokens=request.add_special_tokens if request.HasField("add_special_tokens") else None,
        cache_salt=request.cache_salt,
        priority=request.priority,
        sampling=_to_sampling(request.sampling),
        beams=_to_beams(request.beam) if request.HasField("beam") else None,
        tenant=tenant,
        traceparent=traceparent,
        tracestate=tracestate,
        speculation=_speculation(request, context),
        predicted_text=request.prediction.text if request.prediction.WhichOneof("content") == "text" else None,
        output_so_far=_ids(request.output_so_far, context),
        resume=request.resume[: _LIMITS.max_resume + 1],
        n=request.n if request.HasField("n") else 1,
        best_of=request.best_of if request.HasField("best_of") else None,
    )


def _ids(given: pb.TokenIds, context: int | None) -> Sequence[int]:
    """Ids that fill the context are refused for their number alone, so a range of the same length replaces them: copying a million ids
    would take 20 ms."""
    count = min(len(given.ids), _LIMITS.max_prompt_ids + 1)
    return tuple(given.ids[:count]) if context is None or count < context else range(count)


def _speculation(request: pb.GenerateRequest, context: int | None) -> Speculation:
    if not (request.HasField("speculation") or request.HasField("prediction")):
        return UNASKED
    told = request.speculation
    most = told.max_tokens if told.HasField("max_tokens") else None
    # One id more than fits is refused for its number alone.
    return Speculation(told.method, most, tuple(_ids(request.prediction.token_ids, None if context is None else context + 1)))


def _messages(chat: pb.Chat) -> tuple[tuple[str, str], ...]:
    return tuple((message.role, message.content) for message in chat.messages[: _LIMITS.max_messages + 1])


def _names(chat: pb.Chat) -> tuple[str, ...]:
    names = tuple(message.name for message in chat.messages[: _LIMITS.max_messages + 1])
    return names if any(names) else ()


def _setting(chat: pb.Chat) -> Setting:
    """Raises INVALID_FIELD for a tool's parameters that are not JSON."""
    asides = tuple(
        Aside(tuple(PastCall(call.id, call.name, call.arguments) for call in message.tool_calls), message.tool_call_id, message.reasoning)
        for message in chat.messages[: _LIMITS.max_messages + 1]
    )
    setting = Setting(
        asides=asides if any(aside != Aside() for aside in asides) else (),
        tools=tuple(_tool(tool, i) for i, tool in enumerate(chat.tools[: MAX_TOOLS + 1])),
        choice=chat.tool_choice or "auto",
        parallel=chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True,
        effort=chat.reasoning_effort or None,
        splits_reasoning=chat.separate_reasoning,
        max_thinking=chat.max_thinking_tokens if chat.HasField("max_thinking_tokens") else None,
    )
    return PLAIN if setting == PLAIN else setting


def _tool(tool: pb.Tool, i: int) -> Tool:
    if not tool.parameters:
        return Tool(tool.name, tool.description, strict=tool.strict)
    if len(tool.parameters) > MAX_TOOLS_BYTES or (parameters := parsed(tool.parameters)) is None:
        raise invalid(f"tools[{i}].parameters", f"must be a JSON Schema, as text of at most {MAX_TOOLS_BYTES} bytes")
    return Tool(tool.name, tool.description, parameters, tool.strict)


def _calls(deltas: Sequence[Delta]) -> Iterator[pb.ToolCallDelta]:
    for delta in deltas:
        if isinstance(delta, CallBegin):
            yield pb.ToolCallDelta(index=delta.index, id=delta.id, name=delta.name)
        elif isinstance(delta, Arguments):
            yield pb.ToolCallDelta(index=delta.index, arguments=delta.text)


def _thought(deltas: Sequence[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, Reasoning))


_REPEATED = {"logit_bias", "stop_token_ids", "stop", "structured"}  # and what is a message
_HANDOFF = [fact.name for fact in pb.Handoff.DESCRIPTOR.fields]


def _to_sampling(sampling: pb.SamplingParams) -> AskSampling:
    given = {field.name: value for field, value in sampling.ListFields() if field.name not in _REPEATED}
    return AskSampling(
        logit_bias=dict(islice(sampling.logit_bias.items(), _LIMITS.max_logit_bias + 1)),
        stop_token_ids=tuple(sampling.stop_token_ids[: _LIMITS.max_stop_token_ids + 1]),
        stop=tuple(sampling.stop[: _LIMITS.max_stop + 1]),
        structured=_to_grammar(sampling.structured) if sampling.HasField("structured") else None,
        **given,
    )


def _to_grammar(given: pb.Structured) -> Grammar:
    return Grammar(given.kind, given.text, given.strict if given.HasField("strict") else True)


def _to_beams(given: pb.Beam) -> Beams:
    penalty = given.length_penalty if given.HasField("length_penalty") else 1.0
    return Beams(given.width, given.count or 1, penalty, given.early_stopping or "false")  # type: ignore[arg-type]  # it is checked later


def _from_sampling(event: Accepted) -> pb.SamplingParams:
    told = {name: getattr(event.params, name) for name in FIELDS}
    told["structured"] = event.params.structured and event.params.structured.told()
    told["stop_token_ids"] = sorted(event.params.stop_token_ids)
    return pb.SamplingParams(stop=event.stops, **told)


def to_response(event: Event) -> pb.GenerateResponse:
    match event:
        case Accepted():
            accepted = pb.Accepted(
                request_id=event.request_id,
                model=event.model,
                prompt_tokens=event.prompt_tokens,
                sampling=_from_sampling(event),
                resume=event.receipt,
                relaxed=event.relaxed,
                choices=event.choices,
                degraded=event.degraded,
            )
            return pb.GenerateResponse(accepted=accepted)
        case Scores():
            return pb.GenerateResponse(prompt_logprobs=pb.PromptLogprobs(tokens=map(_to_prompt_token, event.tokens)))
        case Pieces():
            return _to_tokens(event)
        case Found():
            return pb.GenerateResponse(hypothesis=_to_hypothesis(event))
        case Finished():
            return pb.GenerateResponse(finished=_to_finished(event))


def _to_prompt_token(token: PromptToken) -> pb.PromptToken:
    top = [pb.TopLogprob(id=id_, logprob=logprob) for id_, logprob in token.top]
    return pb.PromptToken(index=token.index, id=token.id, logprob=token.logprob, rank=token.rank, top=top)


def _to_tokens(event: Pieces) -> pb.GenerateResponse:
    """Tokens are made where they stay: to copy each into its message takes four times as long."""
    response = pb.GenerateResponse()
    response.tokens.choice = event.choice
    add = response.tokens.tokens.add
    for index, token, text, deltas in event.pieces:
        told = add(index=index, id=token.id, text=text)
        if token.logprob is not None:
            told.logprob = token.logprob
        for id_, logprob in token.top:
            told.top.add(id=id_, logprob=logprob)
        if token.guessed or token.rejected:
            told.guessed, told.rejected = token.guessed, token.rejected
        if deltas:
            told.reasoning = _thought(deltas)
            told.tool_calls.extend(_calls(deltas))
    return response


def _to_hypothesis(event: Found) -> pb.Hypothesis:
    return pb.Hypothesis(
        index=event.index,
        token_ids=event.token_ids,
        text=event.text,
        score=event.score,
        reason=_REASON[event.reason],
        reasoning=_thought(event.deltas),
    )


def _to_finished(event: Finished) -> pb.Finished:
    request, trace = event.request, event.request.trace
    message = pb.Finished(
        request_id=request.id,
        incomplete=event.incomplete,
        choice=event.choice,
        reason=pb.FINISH_REASON_TOOL_CALLS if event.calls and event.reason == "stop" else _REASON[event.reason],
        text=event.text,
        reasoning=_thought(event.deltas),
        tool_calls=_calls(event.deltas),
        usage=pb.Usage(
            prompt_tokens=request.prompt_len,
            completion_tokens=request.output_len,
            cached_tokens=trace.cached_tokens,
            reasoning_tokens=event.reasoning_tokens,
            drafted_tokens=trace.guesses.drafted,
            accepted_tokens=trace.guesses.accepted,
            accepted_prediction_tokens=event.predicted[0],
            rejected_prediction_tokens=event.predicted[1],
            discarded_tokens=event.discarded_tokens,
        ),
        stages=_to_stages(trace),
        workers=pb.Workers(prefill=trace.prefill_worker, decode=trace.decode_worker, retries=trace.retries),
        handoff=pb.Handoff(**{name: getattr(trace.handoff, name) for name in _HANDOFF}),
    )
    if event.uncached is not None:
        message.usage.cache.CopyFrom(pb.CacheReport(**event.uncached.to_json()))
    if event.stop is not None:
        message.stop = event.stop
    elif event.reason == "stop" and not request.found and request.tokens[-1] in request.params.stop_token_ids:
        message.stop_token_id = request.tokens[-1]
    return message


def _to_stages(trace: Trace) -> pb.StageTimes:
    seconds = trace.watch.seconds
    return pb.StageTimes(
        queue_ms=seconds["queue"] * 1000,
        prefill_ms=seconds["prefill"] * 1000,
        transfer_ms=seconds["transfer"] * 1000,
        decode_ms=seconds["decode"] * 1000,
        prefill_wait_ms=trace.prefill_wait_ms,
        prefill_compute_ms=trace.prefill_compute_ms,
        connect_ms=trace.handoff.connect_ms,
        read_ms=trace.handoff.read_ms,
        verify_ms=trace.handoff.verify_ms,
    )
