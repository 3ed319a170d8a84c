"""Request bodies of the OpenAI API → `router.validate.Ask`, one for each choice.

The models below define what every known parameter must be; the OpenAPI document is made from the same models. An unknown name is refused.
Some parameters exist only for clients that always send them: those that cannot change the answer are accepted with any value, and those
that would change it only with values that ask for nothing. So no parameter that would have made a difference is ignored.

Bounds of values are those of `router.validate`; the models only bound what JSON can express and an Ask cannot. Only the first error is
reported, with the path of the parameter down to its index.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    StringConstraints,
    create_model,
)

from baton.engine.core.beams import Beams
from baton.engine.core.grammar import Grammar
from baton.engine.core.sampling import NUMBERS
from baton.engine.core.speculation import UNASKED, Speculation
from router.backlog import Backlog
from router.conversation import PLAIN
from router.http import forms
from router.http.body import Body, Boolean, Integer, Number, Rule, String, Whatever, neutral, read, sized
from router.http.conversing import (
    Content,
    Conversing,
    Messages,
    conversation,
    setting_of,
    text_of,
)
from router.http.errors import bad_value
from router.validate import MAX_REQUEST_ID, Ask, AskSampling, RequestLimits

WHOLE = "is told in a whole answer only: stream must be false"
ONE_CHOICE = "needs a stream of one choice"
REQUEST_ID = re.compile(rf"[A-Za-z0-9._:/+=@-]{{1,{MAX_REQUEST_ID - 8}}}")  # leaves room for the number of a choice
MAX_CHOICES = 128  # of one HTTP request: prompts times n
COMPLETION_MAX_TOKENS = 16  # the default of the legacy API
_LIMITS = RequestLimits()
CONTEXT = 1 << 31  # as many tokens as still fit the context: the default of a chat
_NO_NAMES: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Caller:
    """What the headers say."""

    request_id: str
    tenant: str = ""
    traceparent: str = ""
    tracestate: str = ""


@dataclass(frozen=True, slots=True)
class Asked:
    asks: tuple[Ask, ...]  # one for each prompt, with n choices
    n: int = 1
    beams: bool = False  # an ask has n answers
    chat: bool = False
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    token_ids: bool = False  # the answer names them
    event_ids: bool = False  # the events of the stream have ids
    resumable: bool = True  # they can have
    sampling: bool = False  # the answer names the parameters that are in force
    text: bool = True  # the answer has the text
    prompt: tuple[int, ...] | None = None  # the answer repeats it
    shows_thinking: bool = True
    explains: bool = False  # the usage says why prompts were not cached
    echoes: bool = False  # the text of a choice begins with the prompt
    echoed_logprobs: int | None = None  # of the prompt's tokens, before the output's
    prompt_logprobs: int | None = None  # of the prompt's tokens, apart from the output's
    names: Mapping[str, str] = field(default_factory=lambda: _NO_NAMES)  # field of an Ask → parameter

    @property
    def is_one(self) -> bool:
        """Whether a single choice is computed."""
        return len(self.asks) == 1 and self.asks[0].computed == 1

    def names_of(self, choice: int) -> Mapping[str, str]:
        """`names`; in a batch of prompts, with the index of the prompt."""
        if len(self.asks) == 1:
            return self.names
        return {ours: f"prompt[{choice // self.n}]" if theirs == "prompt" else theirs for ours, theirs in self.names.items()}


def _few(value: Any) -> Any:
    """Refuses an object that is too large before its entries are checked."""
    if isinstance(value, dict) and len(value) > _LIMITS.max_logit_bias:
        raise ValueError
    return value


_Ids = Annotated[list[int], Field(fail_fast=True)]
_Prompt = Annotated[list[int], Field(fail_fast=True, min_length=1)]
Ids = Annotated[_Ids | None, Rule("must be a list of token ids")]
Seed = Annotated[Annotated[int, Field(ge=-(1 << 63), lt=1 << 64)] | None, Rule("must be an integer of 64 bits")]
Choices = Annotated[Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None, Rule(f"must be an integer from 1 to {MAX_CHOICES}")]
Stop = Annotated[str | Annotated[list[str], Field(fail_fast=True)] | None, Rule("must be a string or a list of strings")]
Bias = Annotated[
    Annotated[
        dict[Annotated[str, StringConstraints(pattern=r"^(0|[1-9][0-9]{0,9})$")], float],
        Field(max_length=_LIMITS.max_logit_bias),
        BeforeValidator(_few),
    ]
    | None,
    Rule(sized(_LIMITS.max_logit_bias, "entries", "must be an object of token ids and numbers")),
]
Prompt = Annotated[
    str | _Prompt | Annotated[list[str | _Prompt], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)],
    Rule(sized(MAX_CHOICES, "prompts", f"must be a string, a list of token ids, or a list of up to {MAX_CHOICES} of these")),
]


class Speculating(Body):
    """`baton.v1.Speculation`."""

    method: String = None
    max_tokens: Integer = None


class Predicted(Body):
    type: Annotated[Literal["content"], Rule('must be "content"')]
    content: Content


class StreamOptions(Body):
    include_usage: Boolean = None
    continuous_usage_stats: Boolean = None
    include_event_ids: Boolean = None
    include_obfuscation: Whatever = None


# A field for each number that `baton.engine.core.sampling` declares.
NUMBER_FIELDS: dict[str, Any] = {name: (Integer if number.integer else Number, None) for name, number in NUMBERS.items()}
_FORMS: dict[str, Any] = {name: (Annotated[Any, Rule("must be a form")], None) for name in forms.NAMES}  # checked there
Numbers: Any = create_model("Numbers", __base__=Body, **NUMBER_FIELDS, **_FORMS)


class Generation(Numbers):  # type: ignore[misc]
    """Parameters of both APIs."""

    model: String = None
    seed: Seed = None
    logit_bias: Bias = None
    stop: Stop = None
    stop_token_ids: Ids = None
    max_tokens: Integer = None
    min_tokens: Integer = None
    ignore_eos: Boolean = None
    logprobs_mode: String = None
    n: Choices = None
    stream: Boolean = None
    stream_options: Annotated[StreamOptions | None, Rule("must be an object")] = None
    return_token_ids: Boolean = None
    return_sampling: Boolean = None
    output_so_far: Ids = None
    cache_salt: String = None
    priority: Integer = None
    speculation: Annotated[Speculating | None, Rule("must be an object")] = None
    user: Whatever = None
    metadata: Whatever = None
    store: Whatever = None
    safety_identifier: Whatever = None
    prompt_cache_key: Whatever = None
    prompt_cache_retention: Whatever = None
    prompt_cache_options: Whatever = None
    service_tier: Annotated[Any, neutral("auto", "default")] = None
    skip_special_tokens: Annotated[Any, neutral(True)] = None
    include_stop_str_in_output: Annotated[Any, neutral(False)] = None
    prompt_logprobs: Integer = None
    use_beam_search: Boolean = None
    length_penalty: Number = None
    early_stopping: Annotated[bool | Literal["never"] | None, Rule('must be true, false or "never"')] = None
    spaces_between_special_tokens: Annotated[Any, neutral(True)] = None
    bad_words: Annotated[Any, neutral([])] = None
    return_tokens_as_token_ids: Annotated[Any, neutral(False)] = None
    return_token_offsets: Annotated[Any, neutral(False)] = None


class Chat(Generation, Conversing):
    """Body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Integer = None
    logprobs: Boolean = None
    top_logprobs: Integer = None
    parallel_tool_calls: Boolean = None
    separate_reasoning: Boolean = None
    max_thinking_tokens: Integer = None
    thinking_token_budget: Integer = None  # the same by vLLM's name
    functions: Annotated[Any, neutral([])] = None
    function_call: Annotated[Any, neutral("none", "auto")] = None
    modalities: Annotated[Any, neutral(["text"])] = None
    audio: Annotated[Any, neutral()] = None
    prediction: Annotated[Predicted | None, Rule("must be an object")] = None
    verbosity: Annotated[Any, neutral("medium")] = None
    web_search_options: Annotated[Any, neutral()] = None
    chat_template: Annotated[Any, neutral()] = None
    include_reasoning: Annotated[Any, neutral(True)] = None
    documents: Annotated[Any, neutral([])] = None


class Completion(Generation):
    """Body of POST /v1/completions."""

    prompt: Prompt
    logprobs: Integer = None
    best_of: Choices = None
    echo: Boolean = None
    suffix: Annotated[Any, neutral("")] = None
    add_special_tokens: Boolean = None
    parse_special: Boolean = None


class Tokenize(Conversing):
    """Body of POST /tokenize."""

    model: String = None
    prompt: String = None
    messages: Annotated[Messages | None, Rule("must be a list of messages")] = None
    add_special_tokens: Boolean = None
    parse_special: Boolean = None
    return_token_strs: Annotated[Any, neutral(False)] = None


class Detokenize(Body):
    """Body of POST /detokenize."""

    model: String = None
    tokens: Annotated[_Ids, Rule("must be a list of token ids")]


SAMPLING = tuple(one.name for one in fields(AskSampling) if one.name not in ("logprobs", "default_max_tokens", "structured"))


def chat(body: bytes, caller: Caller) -> Asked:
    """Reads the body of POST /v1/chat/completions. Raises HttpError."""
    given = read(body, Chat)
    limit = "max_tokens" if given.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = getattr(given, limit)
    if given.max_tokens not in (None, max_tokens):
        raise bad_value("max_tokens", "is the old name of max_completion_tokens; the two differ")
    if given.top_logprobs is not None and not given.logprobs:
        raise bad_value("top_logprobs", "needs logprobs to be true")
    if None not in (given.max_thinking_tokens, given.thinking_token_budget) and given.max_thinking_tokens != given.thinking_token_budget:
        raise bad_value("thinking_token_budget", "and max_thinking_tokens are two names of one thing; the two differ")
    logprobs = (given.top_logprobs or 0) if given.logprobs else None
    messages, names = conversation(given.messages)
    ask = Ask(
        model=given.model or "",
        messages=messages,
        names=names,
        setting=replace(
            setting_of(given, given.messages),
            parallel=given.parallel_tool_calls is not False,
            splits_reasoning=given.separate_reasoning is not False,
            max_thinking=given.thinking_token_budget if given.max_thinking_tokens is None else given.max_thinking_tokens,
        ),
        cache_salt=given.cache_salt or "",
        priority=given.priority or 0,
        speculation=_speculation(given),
        predicted_text=None if given.prediction is None else text_of(given.prediction.content),
        sampling=sampling_of(given, forms.read(given), max_tokens=max_tokens, default_max_tokens=CONTEXT, logprobs=logprobs),
        tenant=caller.tenant,
        traceparent=caller.traceparent,
        tracestate=caller.tracestate,
    )
    called = {"chat": "messages", "chat.messages": "messages", "logprobs": "top_logprobs", "max_tokens": limit}
    called["prediction.text"] = "prediction.content"
    return _asked(given, [ask], caller, chat=True, names=called)


def completion(body: bytes, caller: Caller) -> Asked:
    """Reads the body of POST /v1/completions. Raises HttpError."""
    given = read(body, Completion)
    if given.stream and given.best_of is not None and given.best_of > (given.n or 1) and not given.use_beam_search:
        raise bad_value("best_of", "must not be more than n in a stream: the best choices are known when all have ended")
    said = sampling_of(given, forms.read(given), default_max_tokens=COMPLETION_MAX_TOKENS, logprobs=given.logprobs)
    echoed = given.logprobs if given.echo else None
    if echoed is not None:
        said = replace(said, prompt_logprobs=max(echoed, given.prompt_logprobs or 0))
    prompts: Any = [given.prompt] if isinstance(given.prompt, str) or isinstance(given.prompt[0], int) else given.prompt
    asks = [
        Ask(
            model=given.model or "",
            text=one if isinstance(one, str) else None,
            token_ids=None if isinstance(one, str) else tuple(one),
            parse_special=given.parse_special,
            add_special_tokens=given.add_special_tokens,
            cache_salt=given.cache_salt or "",
            priority=given.priority or 0,
            speculation=_speculation(given),
            sampling=said,
            tenant=caller.tenant,
            traceparent=caller.traceparent,
            tracestate=caller.tracestate,
        )
        for one in prompts
    ]
    if given.echo and (given.stream or given.output_so_far):
        raise bad_value("echo", WHOLE)
    names = {"text": "prompt", "token_ids": "prompt", "token_ids.ids": "prompt"}
    if echoed is not None and given.prompt_logprobs is None:
        names["prompt_logprobs"] = "logprobs"
    asked = _asked(given, asks, caller, chat=False, names=names)
    return replace(asked, echoes=True, echoed_logprobs=echoed) if given.echo else asked


def tokenize(body: bytes) -> tuple[Ask, Mapping[str, str]]:
    """Reads the body of POST /tokenize. Returns the ask, and what its fields are called there. Raises HttpError."""
    given = read(body, Tokenize)
    if (given.prompt is None) == (given.messages is None):
        raise bad_value("prompt", "exactly one of prompt and messages must be given")
    messages, names = (None, ()) if given.messages is None else conversation(given.messages)
    called = {"text": "prompt", "chat": "messages", "chat.messages": "messages"}
    ask = Ask(
        model=given.model or "",
        text=given.prompt,
        messages=messages,
        names=names,
        setting=PLAIN if given.messages is None else setting_of(given, given.messages),
        parse_special=given.parse_special,
        add_special_tokens=given.add_special_tokens,
    )
    return ask, called


def detokenize(body: bytes) -> tuple[Ask, Mapping[str, str]]:
    """Likewise for POST /detokenize."""
    given = read(body, Detokenize)
    return Ask(model=given.model or "", token_ids=tuple(given.tokens)), {"token_ids.ids": "tokens"}


def _speculation(given: Generation) -> Speculation:
    told = given.speculation
    return UNASKED if told is None else Speculation(told.method or "", told.max_tokens)


def sampling_of(given: Body, form: Grammar | None, **more: Any) -> AskSampling:
    """What a body of any API says about sampling, as far as it has the parameters of this one."""
    told = {name: value for name in SAMPLING if (value := getattr(given, name, None)) is not None} | more
    if "seed" in told:
        told["seed"] %= 1 << 64
    if "logit_bias" in told:
        told["logit_bias"] = {int(id_): bias for id_, bias in told["logit_bias"].items()}
    stop = told.get("stop", ())
    told["stop"] = tuple(filter(None, [stop])) if isinstance(stop, str) else tuple(stop)  # "" asks for nothing, as at other servers
    told["stop_token_ids"] = tuple(told.get("stop_token_ids", ()))
    return AskSampling(**told, structured=form)


def _asked(given: Generation, prompts: list[Ask], caller: Caller, *, chat: bool, names: dict[str, str]) -> Asked:
    n = given.n or 1
    if given.prompt_logprobs is not None and given.stream:
        raise bad_value("prompt_logprobs", WHOLE)
    if (beams := _beams(given, n)) is not None:
        prompts = [replace(prompt, beams=beams) for prompt in prompts]
        names = names | {f"beam.{name}": name for name in ("length_penalty", "early_stopping")}
        names |= {"beam.width": "n" if beams.width == n else "best_of", "beam.count": "n"}
    if given.output_so_far:
        if not given.stream or n * len(prompts) > 1:  # a stream has no more choices than it shows
            raise bad_value("output_so_far", ONE_CHOICE)
        prompts = [replace(prompts[0], output_so_far=tuple(given.output_so_far))]
    asked = asked_of(given, prompts, caller, n=n, names=names | forms.called(given) | {"output_so_far.ids": "output_so_far"})
    if beams is not None:  # one search has them all
        asked = replace(asked, beams=True, asks=tuple(replace(ask, n=1, best_of=None) for ask in asked.asks))
    return replace(
        asked,
        chat=chat,
        token_ids=bool(given.return_token_ids),
        sampling=bool(given.return_sampling),
        prompt_logprobs=given.prompt_logprobs,
    )


def _beams(given: Generation, n: int) -> Beams | None:
    """vLLM's names: `best_of`, or else `n`, is the width. Raises HttpError."""
    early = given.early_stopping or False
    if not given.use_beam_search:
        for name, asks in (("length_penalty", given.length_penalty not in (None, 1)), ("early_stopping", early)):
            if asks:
                raise bad_value(name, "needs use_beam_search to be true")
        return None
    if given.stream:
        raise bad_value("stream", "must not be true with use_beam_search: nothing is known of the answer before the search is done")
    penalty = 1.0 if given.length_penalty is None else given.length_penalty
    width = getattr(given, "best_of", None) or n
    return Beams(width, n, penalty, early if early == "never" else "true" if early else "false")


def asked_of(given: Any, prompts: list[Ask], caller: Caller, *, n: int, names: Mapping[str, str]) -> Asked:
    """`given` has `stream` and `stream_options`. Raises HttpError."""
    best_of = getattr(given, "best_of", None)
    for name, count in (("n", n), ("best_of", best_of or 1)):
        if count * len(prompts) > MAX_CHOICES:
            raise bad_value(name, f"{len(prompts)} prompts with {count} choices each are more than {MAX_CHOICES} choices")
    if given.stream_options is not None and not given.stream:
        raise bad_value("stream_options", "needs stream to be true")
    options = given.stream_options or StreamOptions()
    if options.include_event_ids and max(n, best_of or 1) * len(prompts) > 1:
        raise bad_value("stream_options.include_event_ids", ONE_CHOICE)
    backlog = Backlog()
    alone = len(prompts) == 1
    asks = (
        replace(ask, backlog=backlog, n=n, best_of=best_of, request_id=caller.request_id if alone else f"{caller.request_id}-{i}")
        for i, ask in enumerate(prompts)
    )
    return Asked(
        asks=tuple(asks),
        n=n,
        stream=bool(given.stream),
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        event_ids=bool(options.include_event_ids),
        names={**names, "resume": "last-event-id"},
    )
