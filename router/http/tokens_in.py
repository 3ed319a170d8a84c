"""Token ids in, token ids out: the body of vLLM's POST /inference/v1/generate → `router.validate.Ask`, and what .../render answers, which
is such a body. So another router can render a chat here and have it computed there, or the other way round."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints, create_model

from baton.engine.core.sampling import NUMBERS, RAW
from router.conversation import PLAIN, Setting
from router.http import forms
from router.http.body import Body, Boolean, Integer, Number, Rule, String, Whatever, neutral, read
from router.http.errors import HttpError, bad_value
from router.http.openai_in import (
    CONTEXT,
    REQUEST_ID,
    Asked,
    Bias,
    Caller,
    Choices,
    Ids,
    Seed,
    Stop,
    StreamOptions,
    asked_of,
    sampling_of,
)
from router.service import Rendered
from router.validate import Ask

_Json = dict[str, Any]
_NUMBERS: dict[str, Any] = {name: (Integer if number.integer else Number, None) for name, number in NUMBERS.items()}
_Numbers: Any = create_model("_Numbers", __base__=Body, **_NUMBERS)


_Id = Annotated[Annotated[str, StringConstraints(pattern=f"^{REQUEST_ID.pattern}$")] | None, Rule(f"must match {REQUEST_ID.pattern}")]


class TokenSampling(_Numbers):  # type: ignore[misc]
    """vLLM's SamplingParams."""

    n: Choices = None
    seed: Seed = None
    stop: Stop = None
    stop_token_ids: Ids = None
    ignore_eos: Boolean = None
    max_tokens: Integer = None
    min_tokens: Integer = None
    logprobs: Integer = None
    logprobs_mode: String = None
    logit_bias: Bias = None
    structured_outputs: Annotated[Any, Rule("must be a form")] = None  # checked in `forms`
    thinking_token_budget: Annotated[Annotated[int, Field(ge=0)] | None, Rule("must be an integer of 0 or more")] = None
    detokenize: Whatever = None
    output_kind: Whatever = None
    stream_interval: Whatever = None
    skip_clone: Whatever = None
    skip_reading_prefix_cache: Whatever = None
    output_text_buffer_length: Whatever = None
    prompt_logprob_start: Whatever = None
    flat_logprobs: Annotated[Any, neutral(False)] = None
    prompt_logprobs: Annotated[Any, neutral()] = None
    prompt_logprob_token_ids: Annotated[Any, neutral()] = None
    logprob_token_ids: Annotated[Any, neutral()] = None
    skip_special_tokens: Annotated[Any, neutral(True)] = None
    spaces_between_special_tokens: Annotated[Any, neutral(True)] = None
    include_stop_str_in_output: Annotated[Any, neutral(False)] = None
    watermarking: Annotated[Any, neutral(False)] = None
    allowed_token_ids: Annotated[Any, neutral()] = None
    bad_words: Annotated[Any, neutral([])] = None
    extra_args: Annotated[Any, neutral({})] = None
    repetition_detection: Annotated[Any, neutral()] = None
    routed_experts_prompt_start: Annotated[Any, neutral(0)] = None
    trace_decode_token_ids: Annotated[Any, neutral()] = None


class Generate(Body):
    """Body of POST /inference/v1/generate."""

    token_ids: Annotated[
        Annotated[list[int], Field(fail_fast=True, min_length=1)],
        Rule(lambda value: "must not be empty" if value == [] else "must be a list of token ids"),
    ]
    sampling_params: Annotated[TokenSampling, Rule("must be an object")]
    request_id: _Id = None
    model: String = None
    stream: Boolean = None
    stream_options: Annotated[StreamOptions | None, Rule("must be an object")] = None
    cache_salt: String = None
    priority: Integer = None
    output_mode: Annotated[Literal["tokens", "text"] | None, Rule('must be "tokens" or "text"')] = None
    return_token_ids: Boolean = None
    reasoning_ended: Boolean = None
    reasoning_parser_kwargs: Whatever = None
    token_offsets: Whatever = None
    features: Annotated[Any, neutral()] = None
    content_parts: Annotated[Any, neutral([])] = None
    kv_transfer_params: Annotated[Any, neutral()] = None
    ec_transfer_params: Annotated[Any, neutral()] = None


_NAMES = {name: f"sampling_params.{name}" for name in TokenSampling.model_fields} | {
    **dict.fromkeys(("structured", "structured.text", "structured.kind"), "sampling_params.structured_outputs"),
    "max_thinking_tokens": "sampling_params.thinking_token_budget",
    "token_ids.ids": "token_ids",
}


def generate(body: bytes, caller: Caller) -> Asked:
    """Reads the body of POST /inference/v1/generate. Raises HttpError."""
    given = read(body, Generate)
    how = given.sampling_params
    form = _form(how)
    if form is not None and given.reasoning_ended is False:
        raise bad_value("reasoning_ended", "must not be false with structured_outputs: here a form begins with the first token")
    budget = how.thinking_token_budget
    if budget is not None:
        where = "sampling_params.thinking_token_budget"
        if how.max_tokens is not None and budget > how.max_tokens:
            raise bad_value(where, f"must not be more than max_tokens ({how.max_tokens})")
        if form is not None and form.kind != "lark":
            raise bad_value(where, "cannot be combined with a form that begins with the first token")
    ask = Ask(
        model=given.model or "",
        token_ids=tuple(given.token_ids),
        setting=PLAIN if budget is None else Setting(max_thinking=budget, splits_reasoning=True),
        cache_salt=given.cache_salt or "",
        priority=given.priority or 0,
        sampling=sampling_of(how, form, default_max_tokens=CONTEXT, logprobs=how.logprobs),
        tenant=caller.tenant,
        traceparent=caller.traceparent,
        tracestate=caller.tracestate,
    )
    caller = replace(caller, request_id=given.request_id or caller.request_id)
    asked = asked_of(given, [ask], caller, n=how.n or 1, names=_NAMES)
    prompt = tuple(given.token_ids) if given.return_token_ids else None
    return replace(asked, token_ids=True, text=given.output_mode == "text", prompt=prompt)


def _form(how: TokenSampling) -> Any:
    told = SimpleNamespace(**dict.fromkeys(forms.NAMES) | {"structured_outputs": how.structured_outputs})
    try:
        return forms.read(told)
    except HttpError as error:
        where = f"sampling_params.{error.param}"
        raise HttpError(400, f"sampling_params.{error.message}", param=where, code=error.code) from None


def rendered(asked: Asked, made: Rendered, request_id: str, model: str) -> _Json:
    """The body with which `generate` computes what the chat `asked` would have computed."""
    (ask, *_), params = asked.asks, made.params
    options = {"include_usage": asked.include_usage, "continuous_usage_stats": asked.continuous_usage}
    how: _Json = {name: getattr(params, name) for name in ("max_tokens", "min_tokens", *NUMBERS, "ignore_eos", "logprobs")}
    how |= {"n": asked.n, "seed": ask.sampling.seed, "stop": list(made.stops), "stop_token_ids": sorted(params.stop_token_ids)}
    how["logit_bias"] = {str(id_): bias for id_, bias in params.logit_bias.items()} or None
    how["structured_outputs"] = forms.written(params.structured) if params.structured is not None else None
    how["logprobs_mode"] = params.logprobs_mode if params.logprobs_mode != RAW else None
    how["thinking_token_budget"] = params.thinking.max_tokens if params.thinking is not None else None
    return {
        "request_id": request_id,
        "token_ids": list(made.prompt),
        "sampling_params": how,
        "model": model,
        "stream": asked.stream,
        "stream_options": options if asked.stream else None,
        "cache_salt": ask.cache_salt or None,
        "priority": ask.priority,
        "reasoning_ended": True if params.structured is not None else None,  # the form says itself where thinking may come
    }
