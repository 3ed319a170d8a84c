"""Bodies of the responses API: what an item becomes, what is refused, and that docs/responses.md says it of every parameter of the SDK."""

import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import (
    EasyInputMessageParam,
    FunctionToolParam,
    ResponseFunctionToolCallParam,
    ResponseIncludable,
    ResponseInputTextParam,
    ResponseOutputMessageParam,
    ResponseOutputTextParam,
    ResponseReasoningItemParam,
    ResponseTextConfigParam,
    response_create_params,
)
from openai.types.responses.response_input_param import FunctionCallOutput as FunctionCallOutputParam
from openai.types.shared_params import Reasoning as ReasoningParam

from baton.engine.core.sampling import NUMBERS
from router.http import responses_in
from router.http.body import Body, Neutral, Rule
from router.http.errors import HttpError
from router.http.openai_in import Caller
from router.http.responses_in import LOGPROBS, AskedResponse, Response, after, response

PAGE = Path(__file__).parents[3] / "docs" / "responses.md"
CALLER = Caller("id", "tenant", "00-trace")
USER = {"role": "user", "content": "hello"}
CALL = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
THOUGHT = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


def said(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text, "annotations": []}]}


def result(text: Any = "4") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": "c", "output": text}


def ask(items: Any = "hello", **fields: Any) -> AskedResponse:
    return response(json.dumps({"input": items, **fields}).encode(), CALLER)


def messages(items: Any, **fields: Any) -> list[tuple[Any, ...]]:
    """Role, content, thoughts, ids of calls, id of a result."""
    (one,) = ask(items, **fields).asks
    asides = one.setting.asides or ()
    return [
        (role, content, *((asides[i].reasoning, [call.id for call in asides[i].calls], asides[i].call_id) if asides else ()))
        for i, (role, content) in enumerate(one.messages or ())
    ]


def refused(items: Any = "hello", **fields: Any) -> HttpError:
    with pytest.raises(HttpError) as caught:
        ask(items, **fields)
    assert caught.value.status == 400
    return caught.value


def test_items_become_messages() -> None:
    assert messages("hi") == [("user", "hi")]
    assert messages([USER, said("a"), {"role": "developer", "content": "b"}], instructions="be brief") == [
        ("system", "be brief"), ("user", "hello"), ("assistant", "a"), ("system", "b"),
    ]  # fmt: skip
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": "two"}]
    assert messages([{"role": "user", "content": parts}]) == [("user", "one\ntwo")]
    assert messages([USER, CALL, result(parts)]) == [
        ("user", "hello", "", [], ""), ("assistant", "", "", ["c"], ""), ("tool", "one\ntwo", "", [], "c"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("items", "turns"),
    [
        ([THOUGHT, said("a"), CALL], [("a", "hm", ["c"])]),
        ([THOUGHT, CALL, said("a")], [("a", "hm", ["c"])]),
        ([said("a"), CALL, CALL | {"call_id": "d"}, said("b")], [("ab", "", ["c", "d"])]),
        ([said("a"), said("b")], [("a", "", []), ("b", "", [])]),
        ([said("a"), THOUGHT, said("b")], [("a", "", []), ("b", "hm", [])]),
        ([THOUGHT], [("", "hm", [])]),
    ],
)
def test_what_an_answer_holds_is_one_turn(items: list[Any], turns: list[Any]) -> None:
    told = messages([USER, *items])
    assert [(one[1], *(one[2:4] or ("", []))) for one in told[1:]] == turns


def test_a_summary_stands_for_thoughts_that_are_not_there() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    assert messages([USER, summary, said("a")])[1] == ("assistant", "a", "hm", [], "")


def test_a_conversation_that_is_kept_is_the_same_when_it_goes_on() -> None:
    """What is kept of items becomes the same messages as the items."""
    items = [{"role": "system", "content": [{"type": "input_text", "text": "s"}]}, USER, THOUGHT, said("a"), CALL, result(), said("b")]
    whole, kept = ask([*items, USER], instructions="i"), json.loads(json.dumps(ask(items).items))
    assert after(ask([USER], instructions="i"), kept).asks[0].messages == whole.asks[0].messages
    assert after(ask([USER], instructions="i"), kept).asks[0].setting == whole.asks[0].setting
    again = after(ask([USER]), kept)
    assert again.items == [*kept, {"role": "user", "content": "hello"}]


def test_parameters_take_effect() -> None:
    (one,) = ask(
        model="m", max_output_tokens=5, temperature=0.5, top_p=0.1, seed=3, stop="x", cache_salt="s", priority=2, top_k=4,
        tools=[{"type": "function", "name": "add", "strict": True}], tool_choice={"type": "function", "name": "add"},
        parallel_tool_calls=False, reasoning={"effort": "low", "summary": "auto"}, chat_template_kwargs={"a": 1},
        text={"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
    ).asks  # fmt: skip
    said, setting = one.sampling, one.setting
    assert (said.max_tokens, said.temperature, said.top_p, said.seed, said.stop, said.top_k) == (5, 0.5, 0.1, 3, ("x",), 4)
    assert said.structured and said.structured.kind == "json_schema" and said.structured.strict
    assert (one.model, one.cache_salt, one.priority, one.tenant, one.request_id) == ("m", "s", 2, "tenant", "id")
    assert setting.choice == "named:add" and setting.tools[0].strict and not setting.parallel and setting.splits_reasoning
    assert (setting.effort, setting.variables) == ("low", {"a": 1})
    assert ask().asks[0].sampling.logprobs is None and ask(include=[]).asks[0].sampling.logprobs is None
    assert ask(include=[LOGPROBS]).asks[0].sampling.logprobs == 0 and ask(top_logprobs=3).asks[0].sampling.logprobs == 3
    for no_form in ({}, {"format": {"type": "text"}}, {"verbosity": "medium"}):
        assert ask(text=no_form).asks[0].sampling.structured is None
    assert ask(of_another_api=None, text=None, tools=None, metadata=None).asks == ask().asks


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"items": []}, "input", "invalid_value"),
        ({"items": [USER] * 1001}, "input", "invalid_value"),
        ({"items": 5}, "input", "invalid_value"),
        ({"items": ["x"]}, "input[0]", "invalid_value"),
        ({"items": [USER, {"type": "web_search_call"}]}, "input[1].type", "unsupported_parameter"),
        ({"items": [USER, {"type": ["message"]}]}, "input[1].type", "unsupported_parameter"),
        ({"items": [USER | {"more": 1}]}, "input[0].more", "unknown_parameter"),
        ({"items": [USER | {"role": "tool"}]}, "input[0].role", "invalid_value"),
        ({"items": [USER | {"content": []}]}, "input[0].content", "invalid_value"),
        ({"items": [USER | {"content": [{"type": "input_file", "file_id": "f"}]}]}, "input[0].content[0].type", "unsupported_parameter"),
        ({"items": [USER | {"content": [{"type": "input_text"}]}]}, "input[0].content[0].text", "missing_required_parameter"),
        ({"items": [{"role": "user"}]}, "input[0].content", "missing_required_parameter"),
        ({"items": [{"type": "function_call", "call_id": "c"}]}, "input[0].name", "missing_required_parameter"),
        ({"items": [THOUGHT | {"encrypted_content": "x"}]}, "input[0].encrypted_content", "unsupported_parameter"),
        ({"items": [THOUGHT | {"content": [{"type": "x", "text": "y"}]}]}, "input[0].content[0].type", "unsupported_parameter"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0].name", "missing_required_parameter"),
        ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools[0].type", "unsupported_parameter"),
        ({"tools": [{"type": "function", "name": "a", "parameters": []}]}, "tools[0].parameters", "invalid_value"),
        ({"tool_choice": "always"}, "tool_choice", "invalid_value"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type", "unsupported_parameter"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name", "invalid_value"),
        ({"tool_choice": {"type": "function", "name": "a", "x": 1}}, "tool_choice.x", "unknown_parameter"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "x": 1}}}, "text.format.x", "unknown_parameter"),
        ({"text": {"format": {"type": "json_object", "schema": {}}}}, "text.format.schema", "unknown_parameter"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "strict": 1}}}, "text.format.strict", "invalid_value"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "unsupported_parameter"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "invalid_value"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "unsupported_parameter"),
        ({"metadata": {"a": 1}}, "metadata", "invalid_value"),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", "invalid_value"),
        ({"metadata": {"a": "x" * 513}}, "metadata", "invalid_value"),
        ({"stream_options": {}}, "stream_options", "invalid_value"),
        ({"stream_options": {"include_usage": True}, "stream": True}, "stream_options.include_usage", "unknown_parameter"),
        ({"prompt_cache_options": {"prewarm": True}}, "prompt_cache_options.prewarm", "unsupported_parameter"),
        ({"n": 2}, "n", "unknown_parameter"),
        ({"max_tokens": 2}, "max_tokens", "unknown_parameter"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_path(fields: dict[str, Any], param: str, code: str) -> None:
    error = refused(fields.pop("items", "hello"), **fields)
    assert (error.param, error.code) == (param, code) and error.message.startswith(f"{param}: ")


MEMBERS = ["type", "role", "content", "text", "call_id", "name", "arguments", "output", "summary", "function_call", "Message", "format"]
WORDS = st.sampled_from(["message", "reasoning", "function_call", "function_call_output", "function", "user", "input_text", "json_schema"])
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda one: st.lists(one, max_size=3) | st.dictionaries(st.sampled_from(MEMBERS), one | WORDS, max_size=4),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(TREES)
def test_any_input_is_read_or_refused(items: Any) -> None:
    for fields in ({"items": items}, {"items": "x", "tools": items}, {"items": "x", "text": items}, {"items": "x", "reasoning": items}):
        try:
            ask(fields.pop("items"), **fields)
        except HttpError as error:
            assert error.status == 400 and error.param


def kind_of(name: str) -> str:
    rule = next((one for one in Response.model_fields[name].metadata if isinstance(one, Rule)), None)
    return "harmless" if rule is None else "neutral" if isinstance(rule, Neutral) else "effective"


def test_the_page_has_every_parameter_of_the_sdk_in_the_right_row() -> None:
    theirs = {*response_create_params.ResponseCreateParamsBase.__annotations__, "stream"}
    assert theirs <= set(Response.model_fields), "each one is known here"
    table = PAGE.read_text().partition("## Parameters")[2].partition("\n- ")[0]
    rows = [{*re.findall(r"`([a-z_]+)`", row.split("|")[1])} for row in table.splitlines() if row.startswith("| `")]
    effective, ours, harmless, neutral = rows
    assert effective | harmless | neutral == theirs and sum(map(len, rows)) == len(set.union(*rows))
    assert ours == set(Response.model_fields) - theirs and set(NUMBERS) <= effective | ours
    assert neutral == {name for name in Response.model_fields if kind_of(name) == "neutral"}
    assert harmless == {name for name in Response.model_fields if kind_of(name) == "harmless"} | {"prompt_cache_options"}
    assert {name for name in Response.model_fields if kind_of(name) == "effective"} == (effective | ours | {"prompt_cache_options"})


@pytest.mark.parametrize(
    ("theirs", "ours", "unknown"),
    [
        (EasyInputMessageParam, responses_in.InputMessage, set()),
        (ResponseOutputMessageParam, responses_in.InputMessage, set()),
        (ResponseInputTextParam, responses_in.InputPart, set()),
        (ResponseOutputTextParam, responses_in.InputPart, set()),
        (ResponseFunctionToolCallParam, responses_in.FunctionCall, {"async"}),
        (FunctionCallOutputParam, responses_in.FunctionCallOutput, set()),
        (ResponseReasoningItemParam, responses_in.ReasoningItem, set()),
        (FunctionToolParam, responses_in.FunctionTool, {"async"}),
        (ResponseTextConfigParam, responses_in.TextConfig, set()),
        (ReasoningParam, responses_in.ReasoningConfig, set()),
        (response_create_params.StreamOptions, responses_in.Streaming, set()),
        (response_create_params.PromptCacheOptions, responses_in.Caching, set()),
    ],
)
def test_every_member_that_the_sdk_may_send_is_known(theirs: Any, ours: type[Body], unknown: set[str]) -> None:
    assert {*theirs.__required_keys__, *theirs.__optional_keys__} - set(ours.model_fields) == unknown


def test_parameters_that_would_change_the_answer_are_refused_by_name() -> None:
    for name in Response.model_fields:
        if kind_of(name) == "neutral":
            error = refused(**{name: "other"})
            assert (error.param, error.code) == (name, "unsupported_parameter")
        elif kind_of(name) == "harmless":
            assert ask(**{name: {"any": [1]}}).asks == ask().asks
    for i, name in enumerate(get_args(ResponseIncludable)):
        if name != LOGPROBS:
            assert refused(include=[LOGPROBS] * i + [name]).param == f"include[{i}]"
