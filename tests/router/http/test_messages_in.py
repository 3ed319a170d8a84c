"""Bodies of Anthropic's API: how the router reads them, which it refuses, and that nothing of the SDK's types is neither."""

import json
import re
from pathlib import Path
from typing import Any, Required, get_args, get_origin, get_type_hints

import jiter
import pytest
from anthropic import types
from anthropic.types import beta
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from router.conversation import Aside, PastCall, Setting, Tool
from router.http import messages_in, turns
from router.http.body import Body, Neutral, Rule
from router.http.errors import HttpError, to_param
from router.http.messages_in import CountTokens, CreateMessage, count_tokens, message
from router.http.messages_out import closed, refusal
from router.http.openai_in import Asked, Caller
from router.http.openapi import document
from router.validate import Ask, AskSampling

CALLER = Caller("id", "tenant", "00-trace")
HELLO: dict[str, Any] = {"max_tokens": 9, "messages": [{"role": "user", "content": "hello"}]}
USE: dict[str, Any] = {"type": "tool_use", "id": "c1", "name": "add", "input": {"x": 1}}
RESULT: dict[str, Any] = {"type": "tool_result", "tool_use_id": "c1", "content": "3"}
ADD: dict[str, Any] = {"name": "add", "input_schema": {"type": "object"}}
PAGE = Path(__file__).resolve().parents[3] / "docs" / "messages.md"


def asked(**fields: Any) -> Asked:
    return message(json.dumps(HELLO | fields).encode(), CALLER)


def ask(**fields: Any) -> Ask:
    (one,) = asked(**fields).asks
    return one


def said(*turns: Any, **fields: Any) -> tuple[tuple[tuple[str, str], ...], tuple[Aside, ...]]:
    made = ask(messages=[{"role": role, "content": content} for role, content in turns], **fields)
    return made.messages or (), made.setting.asides


def refused(**fields: Any) -> HttpError:
    with pytest.raises(HttpError) as caught:
        asked(**fields)
    assert caught.value.status == 400
    return caught.value


# Messages


def test_a_conversation_becomes_messages() -> None:
    made = ask(system="be brief", model="m", temperature=0.5, top_k=3, top_p=0.9, stop_sequences=["a", "b"], seed=-1)
    assert made.messages == (("system", "be brief"), ("user", "hello")) and made.setting == Setting(splits_reasoning=True)
    assert made.sampling == AskSampling(max_tokens=9, temperature=0.5, top_k=3, top_p=0.9, stop=("a", "b"), seed=(1 << 64) - 1)
    assert (made.model, made.request_id, made.tenant, made.traceparent) == ("m", "id", "tenant", "00-trace")
    assert ask(system="").messages == ask(system=[]).messages == (("user", "hello"),)
    assert asked().stream is False and asked(stream=True).stream


def test_blocks_of_text_become_lines_and_turns_of_one_role_one_message() -> None:
    text = [{"type": "text", "text": "one", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "two", "citations": None}]
    assert said(("user", text), ("user", "three"), system=text)[0] == (("system", "one\ntwo"), ("user", "one\ntwo\nthree"))
    assert said(("user", "a"), ("assistant", "b"), ("assistant", []), ("system", "c"), ("user", "d"))[0] == (
        ("user", "a"), ("assistant", "b"), ("system", "c"), ("user", "d"),
    )  # fmt: skip


def test_calls_and_their_results_become_messages_of_their_own() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": ""}
    second = USE | {"id": "c2", "input": {"x": "é"}, "caller": {"type": "direct"}}
    results = [RESULT, {"type": "tool_result", "tool_use_id": "c2", "is_error": True, "content": [{"type": "text", "text": "no"}]}]
    answer = [thought, {"type": "text", "text": "I add."}, USE, second]
    messages, asides = said(("user", "hi"), ("assistant", answer), ("user", [*results, {"type": "text", "text": "go on"}]))
    assert messages == (("user", "hi"), ("assistant", "I add."), ("tool", "3"), ("tool", "Error: no"), ("user", "go on"))
    calls = (PastCall("c1", "add", '{"x": 1}'), PastCall("c2", "add", '{"x": "\\u00e9"}'))
    assert asides == (Aside(), Aside(calls, reasoning="hm"), Aside(call_id="c1"), Aside(call_id="c2"), Aside())
    empties: list[dict[str, Any]] = [{}, {"content": []}, {"content": ""}]
    for empty in empties:
        bare = {name: value for name, value in RESULT.items() if name != "content"} | empty
        assert said(("user", "hi"), ("assistant", [USE]), ("user", [bare]))[0][-1] == ("tool", "")
        assert said(("user", "hi"), ("assistant", [USE]), ("user", [bare | {"is_error": True}]))[0][-1] == ("tool", "Error")


def test_a_last_message_of_the_assistant_goes_on() -> None:
    made = ask(messages=[*HELLO["messages"], {"role": "assistant", "content": "Once"}]).setting
    assert made.continue_final and not made.generation_prompt
    assert refused(messages=[*HELLO["messages"], {"role": "assistant", "content": [USE]}]).param == "messages[1].content"


TOLD = [
    ("chat.messages[0].content", "system"),
    ("chat.messages[1].content", "messages[0].content"),
    ("messages[2].tool_calls", "messages[1].content"),
    ("messages[2].tool_calls[0].id", "messages[1].content[1].id"),
    ("messages[2].tool_calls[1].function.name", "messages[1].content[2].name"),
    ("messages[2].tool_calls[1].function.arguments", "messages[1].content[2].input"),
    ("messages[2].reasoning", "messages[1].content"),
    ("messages[3].tool_call_id", "messages[2].content[0].tool_use_id"),
    ("chat.messages[3].content", "messages[2].content[0].content"),
    ("chat.messages[4].content", "messages[2].content"),
    ("chat.messages", "messages"),
    ("chat", "messages"),
    ("tools[0].function.name", "tools[0].name"),
    ("tools[0].function.parameters", "tools[0].input_schema"),
    ("tool_choice.function.name", "tool_choice.name"),
    ("sampling.stop[1]", "stop_sequences[1]"),
    ("sampling.max_tokens", "max_tokens"),
    ("sampling.structured", "output_config.format.schema"),
    ("max_thinking_tokens", "thinking.budget_tokens"),
    ("reasoning_effort", "output_config.effort"),
    ("continue_final_message", "messages[2].content"),
]


@pytest.mark.parametrize(("field", "path"), TOLD)
def test_a_field_of_an_ask_is_told_by_the_path_in_the_body(field: str, path: str) -> None:
    turns = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "text", "text": "a"}, USE, USE | {"id": "c2"}]},
        {"role": "user", "content": [RESULT, {"type": "text", "text": "b"}]},
    ]
    assert to_param(field, asked(system="s", messages=turns, tools=[ADD]).names) == path


# Tools, thinking, forms


def test_tools_are_read() -> None:
    odd = ADD | {"type": "custom", "description": "Adds.", "strict": True, "cache_control": {}, "eager_input_streaming": True}
    made = ask(tools=[odd, ADD | {"name": "b"}]).setting
    assert made.tools == (Tool("add", "Adds.", {"type": "object"}, True), Tool("b", "", {"type": "object"}))
    choices = [
        ({"type": "auto"}, "auto", True),
        ({"type": "any", "disable_parallel_tool_use": True}, "required", False),
        ({"type": "tool", "name": "add", "disable_parallel_tool_use": False}, "named:add", True),
        ({"type": "none"}, "none", True),
    ]
    for choice, ours, parallel in choices:
        setting = ask(tools=[ADD], tool_choice=choice).setting
        assert (setting.choice, setting.parallel) == (ours, parallel)


def test_thinking_and_effort_are_read() -> None:
    made = asked(thinking={"type": "enabled", "budget_tokens": 1024, "display": "omitted"}, output_config={"effort": "low"})
    setting = made.asks[0].setting
    assert setting.thinks and setting.max_thinking == 1024 and setting.effort == "low" and not made.shows_thinking
    off = asked(thinking={"type": "disabled"})
    assert off.asks[0].setting.effort == "none" and off.names["reasoning_effort"] == "thinking.type"
    for free in ({}, {"thinking": {"type": "adaptive", "display": "summarized"}}):
        assert asked(**free).asks[0].setting == Setting(splits_reasoning=True) and asked(**free).shows_thinking


@pytest.mark.parametrize("name", ["output_config", "output_format"])
def test_a_form_is_read(name: str) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    made = asked(**{name: {"format": form} if name == "output_config" else form})
    grammar = made.asks[0].sampling.structured
    assert grammar is not None and (grammar.kind, grammar.text, grammar.strict) == ("json_schema", '{"type": "object"}', True)
    assert made.names["structured"] == ("output_config.format.schema" if name == "output_config" else "output_format.schema")


USER: dict[str, Any] = {"role": "user"}


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "x"}, "messages", "invalid_value"),
        ({"messages": [5]}, "messages[0]", "invalid_value"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [USER]}, "messages[0].content", "missing_required_parameter"),
        ({"messages": [USER | {"content": 5}]}, "messages[0].content", "invalid_value"),
        ({"messages": [USER | {"content": []}]}, "messages[0].content", "invalid_value"),
        ({"messages": [USER | {"content": "x", "name": "y"}]}, "messages[0].name", "unknown_parameter"),
        ({"messages": [USER | {"content": ["x"]}]}, "messages[0].content[0]", "invalid_value"),
        ({"messages": [USER | {"content": [{"text": "x"}]}]}, "messages[0].content[0].type", "missing_required_parameter"),
        ({"messages": [USER | {"content": [{"type": ["text"]}]}]}, "messages[0].content[0].type", "unsupported_parameter"),
        ({"messages": [USER | {"content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0].type", "unsupported_parameter"),
        ({"messages": [USER | {"content": [USE]}]}, "messages[0].content[0].type", "unsupported_parameter"),
        ({"messages": [USER | {"content": [{"type": "text", "text": 5}]}]}, "messages[0].content[0].text", "invalid_value"),
        (
            {"messages": [USER | {"content": [{"type": "text", "text": "", "citations": [{}]}]}]},
            "messages[0].content[0].citations",
            "unsupported_parameter",
        ),
        ({"messages": [USER | {"content": [RESULT | {"content": 5}]}]}, "messages[0].content[0].content", "invalid_value"),
        (
            {"messages": [USER | {"content": [RESULT | {"content": [{"type": "document"}]}]}]},
            "messages[0].content[0].content[0].type",
            "unsupported_parameter",
        ),
        ({"messages": [USER | {"content": [RESULT | {"is_error": 1}]}]}, "messages[0].content[0].is_error", "invalid_value"),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            "messages[0].content[0].type",
            "unsupported_parameter",
        ),
        (
            {"messages": [{"role": "assistant", "content": [USE | {"input": "{}"}]}]},
            "messages[0].content[0].input",
            "invalid_value",
        ),
        ({"messages": [{"role": "system", "content": [RESULT]}]}, "messages[0].content[0].type", "unsupported_parameter"),
        ({"system": 5}, "system", "invalid_value"),
        ({"system": [{"type": "image"}]}, "system[0].type", "unsupported_parameter"),
        ({"max_tokens": None}, "max_tokens", "missing_required_parameter"),
        ({"max_tokens": "9"}, "max_tokens", "invalid_value"),
        ({"temperature": 1.5}, "temperature", "invalid_value"),
        ({"temperature": -0.1}, "temperature", "invalid_value"),
        ({"stop_sequences": "x"}, "stop_sequences", "invalid_value"),
        ({"stop": ["x"]}, "stop", "unknown_parameter"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 5}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [ADD, {"name": "b"}]}, "tools[1].input_schema", "missing_required_parameter"),
        ({"tools": [ADD | {"input_schema": []}]}, "tools[0].input_schema", "invalid_value"),
        ({"tools": [ADD | {"input_examples": [{}]}]}, "tools[0].input_examples", "unsupported_parameter"),
        ({"tools": [ADD | {"defer_loading": True}]}, "tools[0].defer_loading", "unsupported_parameter"),
        ({"tool_choice": "auto"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "required"}}, "tool_choice.type", "invalid_value"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", "missing_required_parameter"),
        ({"tool_choice": {"type": "any", "name": "add"}}, "tool_choice.name", "invalid_value"),
        ({"thinking": {"type": "between_tools"}}, "thinking.type", "invalid_value"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens", "missing_required_parameter"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, "thinking.budget_tokens", "invalid_value"),
        ({"thinking": {"type": "adaptive", "display": "all"}}, "thinking.display", "invalid_value"),
        ({"thinking": {"type": "disabled"}, "output_config": {"effort": "low"}}, "output_config.effort", "invalid_value"),
        ({"output_config": {"effort": "max"}}, "output_config.effort", "invalid_value"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget", "unsupported_parameter"),
        ({"output_config": {"format": {"type": "text"}}}, "output_config.format.type", "unsupported_parameter"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema", "missing_required_parameter"),
        ({"output_config": {"format": {"type": "json_schema", "schema": []}}}, "output_config.format.schema", "invalid_value"),
        ({"output_format": {"type": "json_schema", "schema": {}, "name": "x"}}, "output_format.name", "unknown_parameter"),
        ({"output_format": {}, "output_config": {"format": {}}}, "output_format", "invalid_value"),
        ({"thread": {"type": "create"}}, "thread", "thread_unsupported_request"),
        ({"container": "c"}, "container", "unsupported_parameter"),
        ({"speed": "fast"}, "speed", "unsupported_parameter"),
    ],
)
def test_the_error_names_the_place(fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(**fields)
    assert (error.param, error.code) == (param, code) and error.message.startswith(f"{param}: ")


def test_numbers_that_json_does_not_have_are_refused() -> None:
    body = json.dumps(HELLO | {"messages": [{"role": "assistant", "content": [USE]}]})
    with pytest.raises(HttpError) as caught:
        message(body.replace('"x": 1', '"x": 1e999').encode(), CALLER)
    assert caught.value.param == "messages[0].content[0].input"


def test_tokens_are_counted_of_the_same_body_without_an_answer() -> None:
    fields: dict[str, Any] = {"system": "s", "tools": [ADD], "tool_choice": {"type": "any"}, "output_config": {"effort": "low"}}
    counted, names = count_tokens(json.dumps({"messages": HELLO["messages"], **fields}).encode())
    assert counted.messages == ask(**fields).messages and counted.setting == ask(**fields).setting
    assert names == asked(**fields).names
    with pytest.raises(HttpError) as caught:
        count_tokens(json.dumps(HELLO).encode())
    assert caught.value.param == "max_tokens"


# What the SDK's types have

MODELS: dict[str, tuple[type[Body], list[Any]]] = {
    "the body": (CreateMessage, [types.MessageCreateParams, beta.MessageCreateParams]),
    "`count_tokens`": (CountTokens, [types.MessageCountTokensParams, beta.MessageCountTokensParams]),
    "a message": (turns.UserTurn, [types.MessageParam]),
    "`text`": (turns.TextBlock, [types.TextBlockParam]),
    "`tool_use`": (turns.ToolUse, [types.ToolUseBlockParam]),
    "`tool_result`": (turns.ToolResult, [types.ToolResultBlockParam]),
    "`thinking`": (turns.Thought, [types.ThinkingBlockParam]),
    "a tool": (messages_in.CustomTool, [types.ToolParam, beta.BetaToolParam]),
    "`tool_choice`": (messages_in.ToolChoice, [types.ToolChoiceParam]),
    "the body's `thinking`": (messages_in.ThinkingConfig, [types.ThinkingConfigParam]),
    "`output_config`": (messages_in.OutputConfig, [types.OutputConfigParam, beta.BetaOutputConfigParam]),
}  # fmt: skip
HEADERS = {"user_profile_id", "workspace_id", "betas"}  # the SDK sends them as headers


def fields_of(type_: Any) -> set[str]:
    """The members of a TypedDict, or of all of a union."""
    if get_origin(type_) is Required:
        return fields_of(get_args(type_)[0])
    parts = [part for part in get_args(type_) if part is not type(None)]
    return set().union(*map(fields_of, parts)) if parts else set(get_type_hints(type_))


def kinds_of(model: type[Body]) -> tuple[set[str], set[str], set[str]]:
    """Names of the fields that take effect, that have none, and that may only ask for nothing."""
    rules = {name: next((one for one in info.metadata if isinstance(one, Rule)), None) for name, info in model.model_fields.items()}
    neutral = {name for name, rule in rules.items() if isinstance(rule, Neutral) and name != "type"}
    without = {name for name, rule in rules.items() if rule is None}
    return set(rules) - neutral - without, without, neutral


@pytest.mark.parametrize("name", MODELS)
def test_every_field_of_the_sdk_is_known(name: str) -> None:
    model, theirs = MODELS[name]
    for one in theirs:
        fields = fields_of(one)
        assert len(fields) > 1 and fields - HEADERS <= set(model.model_fields)


def test_the_table_says_what_becomes_of_every_field() -> None:
    table = PAGE.read_text().partition("| of |")[2].partition("\n\n")[0]
    rows = {cells[0].strip(): [{*re.findall(r"`([a-z_]+)`", cell)} for cell in cells[1:4]] for line in table.splitlines()
            if (cells := line.strip("|").split("|")) and len(cells) == 4}  # fmt: skip
    for name, (model, _) in MODELS.items():
        if name != "`count_tokens`":
            assert rows[name] == list(kinds_of(model)), name
    page = PAGE.read_text()
    for kind in fields_of_blocks() - {"text", "tool_use", "tool_result", "thinking"}:
        assert f"`{kind}`" in page, kind


def fields_of_blocks() -> set[str]:
    """The types of all blocks that the SDK knows."""
    parts = get_args(types.ContentBlockParam)
    return {str(get_args(get_args(get_type_hints(part, include_extras=True)["type"])[0])[0]) for part in parts}


VALUES: list[Any] = ["x", {"a": 1}, True, 5]


@pytest.mark.parametrize("name", sorted(kinds_of(CreateMessage)[1]))
def test_a_field_without_effect_has_none(name: str) -> None:
    assert all(asked(**{name: value}) == asked() for value in VALUES)


@pytest.mark.parametrize("name", sorted(kinds_of(CreateMessage)[2]))
def test_an_unsupported_field_is_refused_by_name(name: str) -> None:
    rule = next(one for one in CreateMessage.model_fields[name].metadata if isinstance(one, Neutral))
    assert all(asked(**{name: value}) == asked() for value in (*rule.values, None))
    assert all(refused(**{name: value}).param == name for value in VALUES)


# Any body

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=6,
)
BLOCKS = st.one_of(
    JSON,
    st.sampled_from(
        [
            {"type": "text", "text": "x"}, USE, RESULT, {"type": "thinking", "thinking": "hm", "signature": "s"}, {"type": "image"},
            {"type": "redacted_thinking", "data": "x"}, RESULT | {"content": [{"type": "text", "text": "x"}], "is_error": True},
        ]
    ),
    st.dictionaries(st.sampled_from(["type", "text", "id", "name", "input", "content", "tool_use_id"]), JSON, max_size=4),
)  # fmt: skip
TURNS = JSON | st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | JSON, "content": st.text() | st.lists(BLOCKS, max_size=3)}
)
FIELDS = st.sampled_from([*CreateMessage.model_fields, "other"])
PARTS = JSON | st.sampled_from(
    [
        [ADD], {"type": "auto"}, {"type": "tool", "name": "add"}, {"type": "enabled", "budget_tokens": 5}, {"effort": "low"}, "auto", True,
        {"format": {"type": "json_schema", "schema": {}}}, {"type": "disabled"},
    ]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(FIELDS, PARTS, max_size=4), st.lists(TURNS, max_size=3))
def test_any_json_is_understood_and_valid_by_the_document_or_refused(fields: dict[str, Any], messages: list[Any]) -> None:
    for read, more, name in (
        (lambda body: message(body, CALLER), {"max_tokens": 5}, "CreateMessage"),
        (count_tokens, {}, "CountTokens"),
    ):
        body = {**more, "messages": messages, **fields}
        try:
            read(json.dumps(body).encode())
        except HttpError as error:
            assert error.status == 400 and refusal(error)["error"]["type"] == "invalid_request_error"
        else:
            validator = Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": document()["components"]})
            validator.validate(body)


def test_bodies_that_are_refused_for_their_shape_are_invalid_by_the_document() -> None:
    """Negative control."""
    validator = Draft202012Validator({"$ref": "#/components/schemas/CreateMessage", "components": document()["components"]})
    assert validator.is_valid(HELLO)
    image = [USER | {"content": [{"type": "image"}]}]
    wrong: list[dict[str, Any]] = [{"messages": []}, {"messages": image}, {"other": 1}, {"temperature": 2}, {"tools": [{}]}]
    for fields in wrong:
        assert not validator.is_valid(HELLO | fields), fields


# The end of a call that was cut


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.text(max_size=4), JSON, max_size=4), st.integers(0, 60), st.booleans())
def test_the_beginning_of_an_object_is_read_as_the_sdk_reads_it(value: dict[str, Any], size: int, ascii_: bool) -> None:
    cut = json.dumps(value, ensure_ascii=ascii_)[: size + 1]
    assert json.loads(closed(cut)) == jiter.from_json(cut.encode(), partial_mode=True)


def test_no_arguments_are_an_empty_object() -> None:
    assert closed("") == closed("{") == closed('{"a') == "{}"
