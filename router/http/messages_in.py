"""Request bodies of Anthropic's API → `router.validate.Ask`.

As in `router.http.openai_in`: each known parameter takes effect, is harmless, or is refused by its path, and an unknown one is refused.
What a beta adds to the API is a parameter, too, so the header that asks for betas needs no reading.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from baton.engine.core.grammar import Grammar
from router.conversation import MAX_TOOLS, Aside, Setting, Tool
from router.http.body import UNSUPPORTED, Body, Boolean, Integer, Neutral, Number, Rule, String, Whatever, neutral, read, sized
from router.http.errors import HttpError, bad_value
from router.http.openai_in import Asked, Caller, Seed
from router.http.turns import Conversation, Texts, Turns, dumped, type_of
from router.validate import Ask, AskSampling

VERSION_HEADER = "anthropic-version"
FIRST_VERSION = "2023-06-01"  # streams of the one before had another form
_CONTENT = Rule("must be a string or a list of blocks")
_FORMAT = 'must be an object like {"type": "json_schema", "schema": {...}}'
_EFFORTS = ("low", "medium", "high", "xhigh")


class CustomTool(Body):
    type: Annotated[Any, Neutral(lambda kind: f'tools of {type_of(kind)} are not supported here, only "custom"', values=("custom",))] = None
    name: Annotated[str, Rule("must be a string")]
    description: String = None
    input_schema: Annotated[dict[str, Any], Rule("must be a JSON Schema: an object")]
    strict: Boolean = None
    defer_loading: Annotated[Any, neutral(False)] = None
    input_examples: Annotated[Any, neutral([])] = None
    allowed_callers: Annotated[Any, neutral(["direct"])] = None
    eager_input_streaming: Whatever = None
    cache_control: Whatever = None


class ToolChoice(Body):
    type: Annotated[Literal["auto", "any", "tool", "none"], Rule('must be "auto", "any", "tool" or "none"')]
    name: String = None
    disable_parallel_tool_use: Boolean = None


class ThinkingConfig(Body):
    type: Annotated[Literal["enabled", "disabled", "adaptive"], Rule('must be "enabled", "disabled" or "adaptive"')]
    budget_tokens: Integer = None
    display: Annotated[Literal["summarized", "omitted"] | None, Rule('must be "summarized" or "omitted"')] = None


class OutputConfig(Body):
    effort: Annotated[Literal["low", "medium", "high", "xhigh"] | None, Rule(f"must be one of {', '.join(_EFFORTS)}")] = None
    format: Annotated[dict[str, Any] | None, Rule(_FORMAT)] = None
    task_budget: Annotated[Any, neutral()] = None


class CountTokens(Body):
    """Body of POST /v1/messages/count_tokens: what becomes a prompt."""

    model: String = None
    messages: Turns
    system: Annotated[Texts | None, _CONTENT] = None
    tools: Annotated[
        Annotated[list[CustomTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None,
        Rule(sized(MAX_TOOLS, "tools", "must be a list of tools")),
    ] = None
    tool_choice: Annotated[ToolChoice | None, Rule("must be an object")] = None
    thinking: Annotated[ThinkingConfig | None, Rule("must be an object")] = None
    output_config: Annotated[OutputConfig | None, Rule("must be an object")] = None
    output_format: Annotated[dict[str, Any] | None, Rule(_FORMAT)] = None  # the name before `output_config.format`
    cache_control: Whatever = None
    speed: Annotated[Any, neutral("standard")] = None
    mcp_servers: Annotated[Any, neutral([])] = None
    context_management: Annotated[Any, neutral()] = None
    compaction: Annotated[Any, neutral()] = None
    billing_policy: Annotated[Any, neutral()] = None


class CreateMessage(CountTokens):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Rule("must be an integer")]
    stop_sequences: Annotated[Annotated[list[str], Field(fail_fast=True)] | None, Rule("must be a list of strings")] = None
    stream: Boolean = None
    temperature: Annotated[Annotated[float, Field(ge=0, le=1)] | None, Rule("must be a number from 0 to 1")] = None
    top_k: Integer = None
    top_p: Number = None
    seed: Seed = None  # not of Anthropic's API
    metadata: Whatever = None
    service_tier: Annotated[Any, neutral("auto", "standard_only")] = None
    container: Annotated[Any, neutral()] = None
    diagnostics: Annotated[Any, neutral()] = None
    inference_geo: Annotated[Any, neutral()] = None
    fallbacks: Annotated[Any, neutral([])] = None
    fallback_credit_token: Annotated[Any, neutral()] = None
    # The code tells the SDK's tool runner to send whole conversations instead.
    thread: Annotated[Any, Neutral("is not supported here: send the whole conversation", "thread_unsupported_request")] = None


def message(body: bytes, caller: Caller) -> Asked:
    """Reads the body of POST /v1/messages. Raises HttpError."""
    given = read(body, CreateMessage)
    ask, names = _ask(given)
    thinking = given.thinking
    sampling = AskSampling(
        max_tokens=given.max_tokens,
        temperature=given.temperature,
        top_k=given.top_k,
        top_p=given.top_p,
        seed=None if given.seed is None else given.seed % (1 << 64),
        stop=tuple(given.stop_sequences or ()),
        structured=_form(given),
    )
    return Asked(
        asks=(
            Ask(
                request_id=caller.request_id,
                tenant=caller.tenant,
                traceparent=caller.traceparent,
                tracestate=caller.tracestate,
                sampling=sampling,
                **ask,
            ),
        ),
        chat=True,
        stream=bool(given.stream),
        shows_thinking=thinking is None or thinking.display != "omitted",
        names=names,
    )


def count_tokens(body: bytes) -> tuple[Ask, Mapping[str, str]]:
    """Reads the body of POST /v1/messages/count_tokens. Returns the ask, and what its fields are called there. Raises HttpError."""
    given = read(body, CountTokens)
    _form(given)
    ask, names = _ask(given)
    return Ask(**ask), names


def check_version(version: str | None) -> None:
    """Raises HttpError."""
    if version is not None and (re.fullmatch(r"[0-9]{4}-[0-9]{2}-[0-9]{2}", version) is None or version < FIRST_VERSION):
        raise bad_value(VERSION_HEADER, f"must be a date, not before {FIRST_VERSION}")


def _ask(given: CountTokens) -> tuple[dict[str, Any], Mapping[str, str]]:
    """What becomes the prompt, and what its fields are called here. Raises HttpError."""
    made = Conversation.of(given.system, given.messages)
    names = {"chat": "messages", "chat.messages": "messages", "tool_choice.function.name": "tool_choice.name", "stop": "stop_sequences"}
    for i in range(len(given.tools or ())):
        names |= {f"tools[{i}].function": f"tools[{i}]", f"tools[{i}].function.parameters": f"tools[{i}].input_schema"}
    path = "output_config.format" if given.output_format is None else "output_format"
    names |= {each: f"{path}.schema" for each in ("structured", "structured.text", "structured.kind")}
    thinks = "thinking.type" if given.thinking is not None and given.thinking.type == "disabled" else "output_config.effort"
    names |= {"thinking": "thinking.type", "reasoning_effort": thinks, "max_thinking_tokens": "thinking.budget_tokens"}
    names |= {"continue_final_message": f"messages[{len(given.messages) - 1}].content", "resume": "last-event-id"}
    ask = {"model": given.model or "", "messages": tuple(made.messages), "setting": _setting(given, made)}
    return ask, names | made.names


def _setting(given: CountTokens, made: Conversation) -> Setting:
    """Raises HttpError."""
    choice, thinking = given.tool_choice, given.thinking
    effort = given.output_config.effort if given.output_config is not None else None
    _check_thinking(thinking, effort)
    continues = made.messages[-1][0] == "assistant"
    if continues and made.asides[-1].calls:
        raise bad_value(f"messages[{len(given.messages) - 1}].content", "ends with calls, whose results must follow")
    return Setting(
        asides=tuple(made.asides) if any(aside != Aside() for aside in made.asides) else (),
        tools=tuple(Tool(one.name, one.description or "", one.input_schema, bool(one.strict)) for one in given.tools or ()),
        choice="auto" if choice is None else _choice(choice),
        parallel=choice is None or not choice.disable_parallel_tool_use,
        effort="none" if thinking is not None and thinking.type == "disabled" else effort,
        thinks=thinking is not None and thinking.type == "enabled",
        max_thinking=None if thinking is None else thinking.budget_tokens,
        splits_reasoning=True,
        generation_prompt=not continues,
        continue_final=continues,
    )


def _choice(given: ToolChoice) -> str:
    """Raises HttpError."""
    if given.type == "tool":
        if given.name is None:
            raise _missing("tool_choice.name")
        return f"named:{given.name}"
    if given.name is not None:
        raise bad_value("tool_choice.name", 'belongs to the type "tool"')
    return "required" if given.type == "any" else given.type


def _check_thinking(given: ThinkingConfig | None, effort: str | None) -> None:
    """Raises HttpError."""
    if given is None:
        return
    if given.type == "enabled" and given.budget_tokens is None:
        raise _missing("thinking.budget_tokens")
    if given.type != "enabled" and given.budget_tokens is not None:
        raise bad_value("thinking.budget_tokens", 'belongs to the type "enabled"')
    if given.type == "disabled" and effort is not None:
        raise bad_value("output_config.effort", "has no effect while thinking is disabled")


def _form(given: CountTokens) -> Grammar | None:
    """Raises HttpError."""
    inside = given.output_config.format if given.output_config is not None else None
    if inside is not None and given.output_format is not None:
        raise bad_value("output_format", "is the old name of output_config.format: give one of them")
    form, path = (given.output_format, "output_format") if inside is None else (inside, "output_config.format")
    if form is None:
        return None
    if unknown := next((name for name in form if name not in ("type", "schema")), None):
        raise bad_value(f"{path}.{unknown[:80]}", "is not a known parameter", "unknown_parameter")
    if form.get("type") != "json_schema":
        raise bad_value(f"{path}.type", 'must be "json_schema"', UNSUPPORTED)
    schema = form.get("schema")
    if schema is None:
        raise _missing(f"{path}.schema")
    if not isinstance(schema, dict):
        raise bad_value(f"{path}.schema", "must be a JSON Schema: an object")
    return Grammar("json_schema", dumped(schema, f"{path}.schema"))


def _missing(path: str) -> HttpError:
    return bad_value(path, "must be given", "missing_required_parameter")
