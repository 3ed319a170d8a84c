"""Request bodies of OpenAI's responses API → one `router.validate.Ask`.

As in `openai_in`: every known parameter takes effect, cannot change the answer, or is refused with its path, and unknown names are refused.
The items of a conversation become messages; a later request that names an answer goes on with the items that the answer was kept with.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, StringConstraints, Tag, TypeAdapter, WithJsonSchema, create_model

from router.backlog import Backlog
from router.conversation import EFFORTS, MAX_TOOLS, Aside, Effort, PastCall, Setting, Tool
from router.http import forms
from router.http.body import UNSUPPORTED, Body, Boolean, Integer, Rule, String, Whatever, neutral, read, sized
from router.http.errors import bad_value, to_json
from router.http.openai_in import CONTEXT, NUMBER_FIELDS, Asked, Bias, Caller, Ids, Seed, Stop, sampling_of
from router.validate import Ask, RequestLimits

LOGPROBS = "message.output_text.logprobs"
_Json = dict[str, Any]
_LIMITS = RequestLimits()


class InputPart(Body):
    type: Annotated[Any, neutral("input_text", "output_text")]
    text: Annotated[str, Rule("must be a string")]
    annotations: Annotated[Any, neutral([])] = None
    logprobs: Whatever = None
    prompt_cache_breakpoint: Whatever = None


_CONTENT = Rule("must be a string or a list of parts")
Content = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[InputPart], Field(min_length=1, fail_fast=True), Tag("parts")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "parts" if isinstance(value, list) else None),
    _CONTENT,
]


class InputMessage(Body):
    type: Annotated[Any, neutral("message")] = None
    role: Annotated[Literal["user", "assistant", "system", "developer"], Rule("must be one of user, assistant, system and developer")]
    content: Content
    id: Whatever = None
    status: Whatever = None
    phase: Annotated[Any, neutral("final_answer")] = None


class FunctionCall(Body):
    type: Annotated[Any, neutral("function_call")]
    call_id: Annotated[str, Rule("must be a string")]
    name: Annotated[str, Rule("must be a string")]
    arguments: Annotated[str, Rule("must be a JSON object, as text")]
    id: Whatever = None
    status: Whatever = None
    namespace: Annotated[Any, neutral()] = None
    caller: Annotated[Any, neutral({"type": "direct"})] = None


class FunctionCallOutput(Body):
    type: Annotated[Any, neutral("function_call_output")]
    call_id: Annotated[str, Rule("must be a string")]
    output: Content
    id: Whatever = None
    status: Whatever = None
    name: Whatever = None
    namespace: Annotated[Any, neutral()] = None
    caller: Annotated[Any, neutral({"type": "direct"})] = None


class Summary(Body):
    type: Annotated[Any, neutral("summary_text")]
    text: Annotated[str, Rule("must be a string")]


class ReasoningText(Body):
    type: Annotated[Any, neutral("reasoning_text")]
    text: Annotated[str, Rule("must be a string")]


class ReasoningItem(Body):
    type: Annotated[Any, neutral("reasoning")]
    summary: Annotated[Annotated[list[Summary], Field(fail_fast=True)] | None, Rule("must be a list of summaries")] = None
    content: Annotated[Annotated[list[ReasoningText], Field(fail_fast=True)] | None, Rule("must be a list of thoughts")] = None
    id: Whatever = None
    status: Whatever = None
    encrypted_content: Annotated[Any, neutral()] = None


def _none(value: Any) -> Any:
    raise ValueError


_KINDS = {
    "message": "InputMessage",
    "function_call": "FunctionCall",
    "function_call_output": "FunctionCallOutput",
    "reasoning": "ReasoningItem",
}
_NO_ITEM = Rule(f"is not supported here (only {', '.join(_KINDS)} are)", UNSUPPORTED)


class OtherItem(Body):
    type: Annotated[Any, AfterValidator(_none), _NO_ITEM, WithJsonSchema({"not": {}})]


def _kind(value: Any) -> str:
    kind = (value.get("type") or "message") if isinstance(value, dict) else "message"
    return _KINDS.get(kind, "OtherItem") if isinstance(kind, str) else "OtherItem"


Item = Annotated[
    Annotated[InputMessage, Tag("InputMessage")]
    | Annotated[FunctionCall, Tag("FunctionCall")]
    | Annotated[FunctionCallOutput, Tag("FunctionCallOutput")]
    | Annotated[ReasoningItem, Tag("ReasoningItem")]
    | Annotated[OtherItem, Tag("OtherItem")],
    Discriminator(_kind),
]
Input = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[Item], Field(min_length=1, max_length=_LIMITS.max_messages, fail_fast=True), Tag("items")],
    Discriminator(lambda value: "text" if isinstance(value, str) else "items" if isinstance(value, list) else None),
    Rule(sized(_LIMITS.max_messages, "items", "must be a string or a list of items")),
]
ITEMS: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


class FunctionTool(Body):
    type: Annotated[Any, neutral("function")]
    name: Annotated[str, Rule("must be a string")]
    description: String = None
    parameters: Annotated[dict[str, Any] | None, Rule("must be a JSON Schema: an object")] = None
    strict: Boolean = None
    allowed_callers: Annotated[Any, neutral(["direct"])] = None
    defer_loading: Annotated[Any, neutral(False)] = None
    output_schema: Annotated[Any, neutral()] = None


class TextConfig(Body):
    format: Annotated[dict[str, Any] | None, Rule("must be an object")] = None
    verbosity: Annotated[Any, neutral("medium")] = None


class ReasoningConfig(Body):
    effort: Annotated[Effort | None, Rule(f"must be one of {', '.join(EFFORTS)}")] = None
    summary: Annotated[Any, neutral("auto")] = None  # there is none: the thoughts themselves are told
    generate_summary: Annotated[Any, neutral("auto")] = None
    context: Annotated[Any, neutral("auto")] = None
    mode: Annotated[Any, neutral("standard")] = None


class Streaming(Body):
    include_obfuscation: Boolean = None


class Caching(Body):
    mode: Whatever = None
    ttl: Whatever = None
    comparison_response_id: Annotated[Any, neutral()] = None
    prewarm: Annotated[Any, neutral(False)] = None


Metadata = Annotated[
    Annotated[
        dict[Annotated[str, StringConstraints(max_length=64)], Annotated[str, StringConstraints(max_length=512)]], Field(max_length=16)
    ]
    | None,
    Rule("must be an object of at most 16 strings; a name has at most 64 characters, a value 512"),
]
Sampling: Any = create_model("Sampling", __base__=Body, **NUMBER_FIELDS)


class Response(Sampling):  # type: ignore[misc]
    """Body of POST /v1/responses."""

    model: String = None
    input: Input
    instructions: String = None
    previous_response_id: String = None
    store: Boolean = None
    max_output_tokens: Integer = None
    top_logprobs: Integer = None
    include: Annotated[Annotated[list[str], Field(fail_fast=True)] | None, Rule("must be a list of strings")] = None
    tools: Annotated[
        Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None,
        Rule(sized(MAX_TOOLS, "tools", "must be a list of tools")),
    ] = None
    tool_choice: Annotated[str | dict[str, Any] | None, Rule('must be "none", "auto", "required", or an object that names a tool')] = None
    parallel_tool_calls: Boolean = None
    text: Annotated[TextConfig | None, Rule("must be an object")] = None
    reasoning: Annotated[ReasoningConfig | None, Rule("must be an object")] = None
    metadata: Metadata = None
    stream: Boolean = None
    stream_options: Annotated[Streaming | None, Rule("must be an object")] = None
    user: String = None
    safety_identifier: String = None
    prompt_cache_key: String = None
    # Beyond the API, as in `openai_in`.
    seed: Seed = None
    logit_bias: Bias = None
    stop: Stop = None
    stop_token_ids: Ids = None
    min_tokens: Integer = None
    ignore_eos: Boolean = None
    logprobs_mode: String = None
    cache_salt: String = None
    priority: Integer = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Rule("must be an object")] = None
    prompt_cache_retention: Whatever = None
    max_tool_calls: Whatever = None  # of tools that the server runs; there are none
    image: Whatever = None
    prompt_cache_options: Annotated[Caching | None, Rule("must be an object")] = None
    truncation: Annotated[Any, neutral("disabled")] = None
    service_tier: Annotated[Any, neutral("auto", "default")] = None
    background: Annotated[Any, neutral(False)] = None
    conversation: Annotated[Any, neutral()] = None
    prompt: Annotated[Any, neutral()] = None
    context_management: Annotated[Any, neutral([])] = None
    moderation: Annotated[Any, neutral()] = None
    access_programs: Annotated[Any, neutral()] = None


@dataclass(frozen=True, slots=True)
class AskedResponse(Asked):
    given: Response = field(default_factory=lambda: Response(input=""))
    size: int = 0  # bytes of the body, and of what it goes on with
    before: Sequence[_Json] = ()  # items of the conversation that the request goes on with
    echo: Mapping[str, bytes] = field(default_factory=dict)  # members of the answer, written in JSON

    @property
    def logprobs(self) -> bool:
        return self.asks[0].sampling.logprobs is not None

    @property
    def obfuscated(self) -> bool:
        return bool(self.given.stream_options and self.given.stream_options.include_obfuscation)

    @property
    def items(self) -> list[_Json]:
        """The conversation that the answer follows, without instructions."""
        given = self.given.input
        new = [{"role": "user", "content": given}] if isinstance(given, str) else [_kept(item) for item in given]
        return [*self.before, *new]


def response(body: bytes, caller: Caller) -> AskedResponse:
    """Reads the body of POST /v1/responses. Raises HttpError. The conversation that it goes on with is still to come (`after`)."""
    given = read(body, Response)
    if given.stream_options is not None and not given.stream:
        raise bad_value("stream_options", "needs stream to be true")
    form = None if given.text is None or given.text.format is None else forms.text_format(given.text.format)
    logprobs = given.top_logprobs or 0 if _wants_logprobs(given) else None
    ask = Ask(
        request_id=caller.request_id,
        model=given.model or "",
        cache_salt=given.cache_salt or "",
        priority=given.priority or 0,
        sampling=sampling_of(given, form, max_tokens=given.max_output_tokens, default_max_tokens=CONTEXT, logprobs=logprobs),
        tenant=caller.tenant,
        traceparent=caller.traceparent,
        tracestate=caller.tracestate,
        backlog=Backlog(),
        setting=Setting(
            tools=tuple(Tool(tool.name, tool.description or "", tool.parameters, bool(tool.strict)) for tool in given.tools or ()),
            choice=_choice(given.tool_choice),
            parallel=given.parallel_tool_calls is not False,
            variables=given.chat_template_kwargs or {},
            effort=given.reasoning.effort if given.reasoning else None,
            splits_reasoning=True,
        ),
    )
    return after(
        AskedResponse(asks=(ask,), chat=True, resumable=False, stream=bool(given.stream), given=given, size=len(body), echo=_echo(given)),
        (),
    )


def after(asked: AskedResponse, before: Sequence[_Json], size: int = 0) -> AskedResponse:
    """`asked`, going on with the items `before`, which have `size` bytes."""
    turns = [_Turn("system", "instructions", [asked.given.instructions])] if asked.given.instructions is not None else []
    for item in ITEMS.validate_python(list(before)):
        _add(turns, item, "")
    given = asked.given.input
    if isinstance(given, str):
        turns.append(_Turn("user", "input", [given]))
    else:
        for i, item in enumerate(given):
            _add(turns, item, f"input[{i}]")
    (ask,) = asked.asks
    asides = tuple(turn.aside for turn in turns)
    setting = replace(ask.setting, asides=asides if any(aside != Aside() for aside in asides) else ())
    ask = replace(ask, messages=tuple((turn.role, "".join(turn.texts)) for turn in turns), setting=setting)
    return replace(asked, asks=(ask,), names=_Names(turns), before=before, size=asked.size + size)


@dataclass(slots=True)
class _Turn:
    """What becomes one message. Places are paths of the request; empty for what was kept from an earlier one."""

    role: str
    place: str
    texts: list[str] = field(default_factory=list)
    call_id: str = ""
    reasoning: str = ""
    reasoning_place: str = ""
    calls: list[PastCall] = field(default_factory=list)
    call_places: list[str] = field(default_factory=list)

    @property
    def aside(self) -> Aside:
        return Aside(tuple(self.calls), self.call_id, self.reasoning)


def _add(turns: list[_Turn], item: Any, place: str) -> None:
    """Thoughts, texts and calls that follow each other are one turn of the assistant; a text after a text is another turn."""
    last = turns[-1] if turns and turns[-1].role == "assistant" else None
    match item:
        case InputMessage(role="assistant"):
            if last is None or (last.texts and not last.calls):
                turns.append(last := _Turn("assistant", place))
            last.texts.append(_text(item.content))
            last.place = place
        case InputMessage():
            turns.append(_Turn("user" if item.role == "user" else "system", place, [_text(item.content)]))
        case FunctionCall():
            if last is None:
                turns.append(last := _Turn("assistant", place))
            last.calls.append(PastCall(item.call_id, item.name, item.arguments))
            last.call_places.append(place)
        case FunctionCallOutput():
            turns.append(_Turn("tool", place, [_text(item.output)], item.call_id))
        case ReasoningItem():
            turns.append(_Turn("assistant", place, reasoning=_thoughts(item), reasoning_place=place))


def _kept(item: Any) -> _Json:
    """What of an item becomes part of the prompt, as an item."""
    match item:
        case InputMessage():
            return {"role": item.role, "content": _text(item.content)}
        case FunctionCall():
            return {"type": item.type, "call_id": item.call_id, "name": item.name, "arguments": item.arguments}
        case FunctionCallOutput():
            return {"type": item.type, "call_id": item.call_id, "output": _text(item.output)}
    return {"type": item.type, "content": [{"type": "reasoning_text", "text": _thoughts(item)}]}


def _thoughts(item: ReasoningItem) -> str:
    return "\n".join(one.text for one in item.content or item.summary or ())


def _text(content: str | list[InputPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


_FIXED: Mapping[str, str] = {
    "chat": "input",
    "chat.messages": "input",
    "prompt": "input",
    "max_tokens": "max_output_tokens",
    "logprobs": "top_logprobs",
    "reasoning_effort": "reasoning.effort",
    "tool_choice.function.name": "tool_choice.name",
    **dict.fromkeys(("structured", "structured.text", "structured.kind"), "text.format"),
}
_MESSAGE = re.compile(r"(?:chat\.)?messages\[(\d+)\](?:\.tool_calls\[(\d+)\])?(?:\.([a-z_.]+))?")
_TOOL = re.compile(r"tools\[(\d+)\]\.function(.*)")
_OF_CALL: Mapping[str, str] = {"id": "call_id", "function.name": "name", "function.arguments": "arguments"}


class _Names(Mapping[str, str]):
    """Fields of an Ask → parameters of this API."""

    def __init__(self, turns: Sequence[_Turn]) -> None:
        self._turns = turns

    def __getitem__(self, field: str) -> str:
        if found := _MESSAGE.fullmatch(field):
            return self._of_message(self._turns[int(found[1])], found[2], found[3] or "")
        if found := _TOOL.fullmatch(field):
            return f"tools[{found[1]}]{found[2]}"
        return _FIXED[field]

    def _of_message(self, turn: _Turn, call: str | None, member: str) -> str:
        place, name = turn.place, member
        if call is not None:
            place, name = turn.call_places[int(call)], _OF_CALL.get(member, member)
        elif member == "tool_call_id":
            name = "call_id"
        elif member == "tool_calls":
            place, name = next(iter(turn.call_places), place), ""
        elif member == "reasoning":
            place, name = turn.reasoning_place, "content"
        elif member == "content" and turn.role == "tool":
            name = "output"
        if not place:
            return "previous_response_id"
        return f"{place}.{name}" if name and place.startswith("input[") else place

    def __iter__(self) -> Iterator[str]:
        return iter(_FIXED)

    def __len__(self) -> int:
        return len(_FIXED)


def _wants_logprobs(given: Response) -> bool:
    """Raises HttpError."""
    for i, name in enumerate(given.include or ()):
        if name == "reasoning.encrypted_content":
            raise bad_value(f"include[{i}]", "is not supported here: reasoning items have their text in content, and may be sent back so")
        if name != LOGPROBS:
            raise bad_value(f"include[{i}]", f'is not supported here (only "{LOGPROBS}" is)', UNSUPPORTED)
    return bool(given.include or given.top_logprobs)


def _choice(given: str | _Json | None) -> str:
    """Raises HttpError."""
    if isinstance(given, dict):
        if given.get("type") != "function":
            raise bad_value("tool_choice.type", 'is not supported here (only "function" is)', UNSUPPORTED)
        if unknown := next((name for name, value in given.items() if name not in ("type", "name") and value is not None), None):
            raise bad_value(f"tool_choice.{unknown[:80]}", "is not a known parameter", "unknown_parameter")
        if not isinstance(given.get("name"), str):
            raise bad_value("tool_choice.name", "must be a string")
        return f"named:{given['name']}"
    if given not in (None, "none", "auto", "required"):
        raise bad_value("tool_choice", 'must be "none", "auto", "required", or an object that names a tool')
    return given or "auto"


def _echo(given: Response) -> dict[str, bytes]:
    """What an answer repeats of its request, written in JSON: with tools it may be long."""
    choice = given.tool_choice or "auto"
    told = {
        "background": False,
        "instructions": given.instructions,
        "max_output_tokens": given.max_output_tokens,
        "max_tool_calls": None,
        "metadata": given.metadata or {},
        "parallel_tool_calls": given.parallel_tool_calls is not False,
        "previous_response_id": given.previous_response_id,
        "prompt_cache_key": given.prompt_cache_key,
        "reasoning": {"effort": given.reasoning.effort if given.reasoning else None, "summary": None},
        "safety_identifier": given.safety_identifier,
        "service_tier": "default",
        "text": {"format": (given.text.format if given.text else None) or {"type": "text"}},
        "tool_choice": choice if isinstance(choice, str) else {"type": "function", "name": choice["name"]},
        "tools": [_shown(tool) for tool in given.tools or ()],
        "top_logprobs": given.top_logprobs or 0,
        "truncation": "disabled",
        "user": given.user,
    }
    return {name: to_json(value) for name, value in told.items()}


def _shown(tool: FunctionTool) -> _Json:
    return {
        "type": "function",
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": bool(tool.strict),
    }
