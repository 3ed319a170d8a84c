"""Tool calls in a model's text: what each family writes is read, and however it is cut, the stream equals the parse."""

import json
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest
from each import for_each
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_calls import written

from router.tools.delta import Arguments, CallBegin, Content, Delta, Message
from router.tools.families import BY_NAME, FAMILIES, GENERIC, family_of
from router.tools.reading import AnswerFormat, Reader, read
from router.tools.thinking import BY_NAME as MARKS
from router.tools.thinking import THINK, is_open, thinking_of

TOOLS: dict[str, Any] = {
    "add": {"properties": {"x": {"type": "number"}, "note": {"type": "string"}, "any": {}}},
    "time": {},
}
CALLS = [("add", {"x": 1.5, "note": 'a "b" \\ }]</tool_call>\n é🌸'}), ("time", {}), ("add", {"any": {"deep": [1, None, True, "2"]}})]


def calls_of(message: Message) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in message.calls]


def streamed(text: str, format: AnswerFormat, cuts: Iterable[int], cut_off: bool = False) -> Message:
    reader, at = Reader(format), 0
    message = Message()
    for cut in cuts:
        message.add(reader.push(text[at : at + cut]))
        at += cut
    return message.add(reader.push(text[at:])).add(reader.flush(cut_off))


FORMATS = {family.name: AnswerFormat(family, TOOLS) for family in FAMILIES}


@for_each(FORMATS)
def test_a_familys_calls_are_read_with_their_types(name: str) -> None:
    message = read(written(name, CALLS), FORMATS[name])
    assert calls_of(message) == CALLS and message.content == ""
    if not name.startswith(("llama", "json")):
        assert read(f"First.\n{written(name, CALLS)}", FORMATS[name]).content == "First."


@for_each(FORMATS)
def test_byte_by_byte_and_in_one_piece_are_the_same(name: str) -> None:
    for live in (False, True):
        format = replace(FORMATS[name], live=live)
        text = written(name, CALLS) + "\nand more"
        assert streamed(text, format, [1] * len(text)) == read(text, format)
        assert calls_of(read(text, format)) == CALLS and read(text, format).content.strip() == "and more"


_PIECES = sorted(
    {begin for family in FAMILIES for style in family.styles for begin in (style.begin, style.end) if begin}
    | {"<think>", "</think>", "{", "}", '"', "\\", "\n", " ", "[", "]", "add", "time", "(", ")", "x=1", "'", ",", ";", "é", "🌸"}
    | {'{"name": "add", "arguments": {"x": 1}}', '{"name": "time", "parameters": {}}', '"arguments": {', "<parameter=x>", "[ARGS]"}
    | {"<｜tool▁sep｜>", "<function=add>", "</function>", "time()", 'string="true">', "\n```json\n", "text", "<|python_tag|>"}
)


@settings(max_examples=150)
@given(st.data())
def test_the_stream_equals_the_parse_for_any_text_and_any_cuts(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(FORMATS)))
    text = "".join(data.draw(st.lists(st.sampled_from(_PIECES), max_size=25)))
    if data.draw(st.booleans()):
        text = text[: data.draw(st.integers(0, 30))] + written(name, CALLS) + text
    thinking, opened = data.draw(st.sampled_from([(None, False), (THINK, False), (THINK, True)]))
    format = replace(FORMATS[name], live=data.draw(st.booleans()), thinking=thinking, opened=opened)
    cuts, cut_off = data.draw(st.lists(st.integers(1, 9), max_size=200)), data.draw(st.booleans())
    whole = read(text, format, cut_off)
    assert streamed(text, format, cuts, cut_off) == whole
    if not format.live:
        assert all(name in TOOLS and isinstance(json.loads(call.arguments), dict) for call in whole.calls for name in [call.name])
    if not whole.calls and thinking is None and not cut_off:
        assert whole.content == text, "a text without calls is all content"


@settings(max_examples=60)
@given(st.data())
def test_any_arguments_come_back(data: st.DataObject) -> None:
    leaf = (
        st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=9)
    )
    values = st.recursive(
        leaf, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3), max_leaves=6
    )
    name = data.draw(
        st.sampled_from(["hermes", "json", "llama_json", "mistral", "mistral_list", "deepseek_v3", "deepseek_v31", "llama_pythonic"])
    )
    calls = [("add", {"x": data.draw(values), "any": data.draw(values)}), ("time", {})]
    text = written(name, calls)
    if name != "llama_pythonic" or "\x00" not in text:
        assert calls_of(read(text, FORMATS[name])) == calls


def test_what_is_no_call_stays_text() -> None:
    for text in (
        '<tool_call>\n{"name": "add", "arguments": {"x": 1}\n</tool_call>',  # a brace is missing
        '<tool_call>{"name": "add", "arguments": {"x": NaN}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"x": 1, "x": 2}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": "x"}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>',
        "Use <tool_call> to call.",
    ):
        message = read(text, FORMATS["hermes"])
        assert message.calls == [] and message.content == text
    for text in ("[add(1)]", "[add(x=y)]", "[add(x=1, x=2)]", "[add(**d)]", "[add(x=1)", "[1, 2]", "[add(x=f())]"):
        assert read(text, FORMATS["llama_pythonic"]) == Message(text)
    assert read('{"a": 1} is a dict', FORMATS["llama_json"]) == Message('{"a": 1} is a dict')


def test_a_call_that_is_cut_off_is_dropped_and_whole_ones_are_kept() -> None:
    for name in FORMATS:
        if name in ("llama_pythonic", "llama_json", "json"):
            continue  # cut off, they are text: there is no mark that they were more
        text = written(name, CALLS[:2])
        assert calls_of(read(text[: text.rindex("time")], FORMATS[name], cut=True)) == CALLS[:1], name
        assert read(text[: text.index("note") + 9], FORMATS[name], cut=True) == Message(), name


def test_arguments_arrive_as_they_are_written_where_a_grammar_rules() -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"note": "ab\\"c"}}\n</tool_call>'
    reader = Reader(replace(FORMATS["hermes"], live=True))
    deltas: list[Delta] = [delta for char in text for delta in reader.push(char)]
    assert deltas[0] == CallBegin(0, "add")
    assert [delta.text for delta in deltas[1:] if isinstance(delta, Arguments)] == [*'{"note": "ab', '\\"', *'c"}']
    assert "".join(delta.text for delta in deltas if isinstance(delta, Arguments)) == '{"note": "ab\\"c"}'


def test_a_held_call_comes_whole() -> None:
    reader = Reader(FORMATS["hermes"])
    text = 'Hi <tool_call>{"name": "time", "arguments": {}}</tool_call>'
    deltas = [delta for char in text for delta in reader.push(char)]
    assert deltas == [Content("H"), Content("i"), CallBegin(0, "time"), Arguments(0, "{}")]


def test_a_value_between_tags_has_the_type_of_its_schema() -> None:
    kinds = {
        "text": {"type": "string"}, "whole": {"type": "integer"}, "either": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "words": {"enum": ["1", "2"]}, "list": {"type": ["array", "null"]}, "free": {}, "ref": {"$ref": "#/$defs/n"},
    }  # fmt: skip
    format = AnswerFormat(BY_NAME["qwen3_xml"], {"f": {"properties": kinds, "$defs": {"n": {"type": "number"}}}})
    given = {"text": "007", "whole": "7", "either": "None", "words": "1", "list": "[1]", "free": "true", "ref": "1e20", "new": "x y"}
    parameters = "".join(f"<parameter={name}>\n{text}\n</parameter>\n" for name, text in given.items())
    ((_, read_),) = calls_of(read(f"<tool_call>\n<function=f>\n{parameters}</function>\n</tool_call>", format))
    want = {"text": "007", "whole": 7, "either": None, "words": "1", "list": [1], "free": True, "ref": 1e20, "new": "x y"}
    assert read_ == want and type(read_["whole"]) is int
    text = "<tool_call>\n<function=f>\n<parameter=whole>\nseven\n</parameter>\n</function>\n</tool_call>"
    assert calls_of(read(text, format)) == [("f", {"whole": "seven"})]


def test_thinking_is_apart_and_its_marks_are_not_shown() -> None:
    format = AnswerFormat(BY_NAME["hermes"], TOOLS, THINK)
    text = f"<think>\nhm <tool_call>\n</think>\n\nSo.\n{written('hermes', CALLS[:1])}"
    message = read(text, format)
    assert (message.reasoning, message.content, calls_of(message)) == ("hm <tool_call>", "So.", CALLS[:1])
    assert read("hm</think>So", replace(format, opened=True)) == Message("So", "hm")
    assert read("no marks </think>", format) == Message("no marks </think>")
    assert read("<think>never ends ", format, cut=True) == Message("", "never ends")
    assert read("<think>\n\n</think>\n\n x", format) == Message("x", "")
    assert read("[THINK]a[/THINK]b", AnswerFormat(thinking=MARKS["mistral"])) == Message("b", "a")
    reader = Reader(format)
    states = [(reader.push(piece), reader.thinks)[1] for piece in ("<thi", "nk>", "a", "</think", ">", "b")]
    assert states == [False, True, True, True, False, False]


def test_only_the_end_of_a_prompt_opens_the_thinking() -> None:
    assert is_open(THINK, "<|im_start|>assistant\n<think>\n") and is_open(THINK, "<think>")
    assert not is_open(THINK, "<think>\n\n</think>\n\n") and not is_open(THINK, "user: <think><|im_start|>assistant\n")


def test_a_template_names_its_family() -> None:
    tools = "{% if tools %}{{ tools }}{% endif %}"
    told = {
        '<tool_call>\n{"name": </tool_call>': "hermes", "<tool_call><function=x><parameter=y></tool_call>": "qwen3_xml",
        "[TOOL_CALLS] [": "mistral_list", "[TOOL_CALLS]x[ARGS]": "mistral", "<｜tool▁calls▁begin｜>": "deepseek_v31",
        "<｜tool▁calls▁begin｜>```json": "deepseek_v3", "<｜DSML｜function_calls>": "deepseek_v32", "<|python_tag|>": "llama_json",
        "<|python_start|>": "llama_pythonic", "nothing known": "json",
    }  # fmt: skip
    assert {text: (found := family_of(tools + text)) and found.name for text in told} == told
    assert family_of("<tool_call></tool_call>") is family_of(None) is GENERIC, "it does not know tools"
    assert family_of(f"{tools}<tool_call><arg_key></tool_call>") is None
    assert thinking_of("x</think>") is THINK and thinking_of("x") is thinking_of(None) is None


def test_many_calls_end_somewhere() -> None:
    text = written("json", [("time", {})] * 200)
    message = read(text, FORMATS["json"])
    assert len(message.calls) == 128 and message.content.count("time") == 72


@pytest.mark.parametrize("text", ["{" * 3000, '{"a":' * 3000, "[" * 3000, "[add(x=" + "[" * 3000, "<tool_call>" * 500])
def test_deep_text_is_text(text: str) -> None:
    for name in ("llama_json", "llama_pythonic", "hermes", "json"):
        assert read(text, FORMATS[name]).content == text
        closed = f"{text}{'}' * 3000}{']' * 3000})]"
        assert read(closed, FORMATS[name]).calls == []
