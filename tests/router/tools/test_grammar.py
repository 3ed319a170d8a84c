"""Grammars of tool calls: what one allows, the reader finds; what the reader would not find, none allows."""

import json
from typing import Any

import llguidance
import pytest
import tokenizers
from each import for_each
from tokenizer_parts import tokenizer_of
from tokenizers import decoders, models, pre_tokenizers, trainers
from tool_calls import written

from baton.engine.core.grammar import Grammar, GrammarRefused
from router.conversation import Setting, Tool
from router.tools.delta import Message
from router.tools.families import BY_NAME, FAMILIES
from router.tools.forms import Forms
from router.tools.grammar import after_thinking, lark
from router.tools.reading import AnswerFormat, read
from router.tools.thinking import THINK

SCHEMA = {
    "type": "object",
    "properties": {"note": {"type": "string"}, "x": {"type": "integer"}, "unit": {"type": "string", "enum": ["c", "f"]}},
    "required": ["note"],
    "additionalProperties": False,
}
TOOLS: dict[str, Any] = {"add": SCHEMA, "time": {}}
DEMANDED = [family.name for family in FAMILIES if family.name != "llama_pythonic"]
BARE = ("json", "llama_json")


def tokenizer(special: tuple[str, ...] = ()) -> Any:
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=["<eos>", *special], show_progress=False))
    return made


PLAIN = tokenizer()
LL = llguidance.LLTokenizer(PLAIN.to_str(), eos_token=0)


def allowed(grammar: str | None, text: str, made: Any = PLAIN, ll: Any = LL) -> bool:
    assert grammar is not None
    matcher = llguidance.LLMatcher(ll, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = made.encode(text, add_special_tokens=False).ids
    return bool(matcher.validate_tokens(ids) == len(ids)) and bool(matcher.consume_tokens(ids) and matcher.is_accepting())


def grammar(name: str, **options: Any) -> str | None:
    return lark(BY_NAME[name], TOOLS, {}, **{"required": True, **options})


def found(name: str, text: str) -> Message:
    return read(text, AnswerFormat(BY_NAME[name], TOOLS))


@for_each(DEMANDED)
def test_required_calls_are_allowed_as_they_are_read(name: str) -> None:
    one, two = [("add", {"note": "a <b> é", "x": 3})], [("add", {"note": "", "unit": "c"}), ("time", {})]
    for calls in (one, two):
        text = written(name, calls)
        assert allowed(grammar(name), text), name
        assert [(call.name, json.loads(call.arguments)) for call in found(name, text).calls] == calls
    assert allowed(grammar(name, parallel=False), written(name, one)) and not allowed(grammar(name, parallel=False), written(name, two))
    for wrong in ("", "text", written(name, [("other", {})]), written(name, [("add", {"x": 3})]), written(name, [("time", {"x": 1})])):
        assert not allowed(grammar(name), wrong), (name, wrong)
    assert not allowed(grammar(name), written(name, [("add", {"note": "a", "x": 3.5})]))


@for_each([name for name in DEMANDED if name not in BARE])
def test_auto_allows_text_and_after_the_mark_a_call_alone(name: str) -> None:
    free = grammar(name, required=False)
    call = written(name, [("add", {"note": "a"})])
    for text in ("", "Some text.", call, f"First.\n{call}", f"{call}\nmore"):
        assert allowed(free, text), (name, text)
    for text in (written(name, [("other", {})]), call[: len(call) // 2], call.replace("add", "ad")):
        assert not allowed(free, text), (name, text)


def test_bare_calls_can_only_be_required_and_pythons_literals_not_at_all() -> None:
    assert all(grammar(name, required=False) is None for name in BARE)
    assert grammar("llama_pythonic") is None and lark(BY_NAME["hermes"], {}, {}, required=True) is None
    free: dict[str, Any] = {"f": {"properties": {"x": {}}}}
    assert lark(BY_NAME["qwen3_xml"], free, {}, required=True) is None, "text between tags may be anything: its schema cannot be demanded"


def test_marks_that_are_control_tokens_are_named_by_their_ids() -> None:
    made = tokenizer(("[TOOL_CALLS]", "[ARGS]", "<think>", "</think>"))
    ids = {mark: made.token_to_id(mark) for mark in ("[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")}
    ll = llguidance.LLTokenizer(made.to_str(), eos_token=0)
    call = written("mistral", [("add", {"note": "[TOOL_CALLS"})])
    for required, text in ((True, call), (False, f"Hi {call}"), (False, "Hi")):
        assert allowed(lark(BY_NAME["mistral"], TOOLS, ids, required=required), text, made, ll)
    assert not allowed(lark(BY_NAME["mistral"], TOOLS, ids, required=False), "Hi [TOOL_CALLS]", made, ll)
    thinks = lark(BY_NAME["mistral"], TOOLS, ids, required=True, thinking=THINK)
    assert allowed(thinks, f"<think>hm</think>\n{call}", made, ll) and allowed(thinks, call, made, ll)
    opened = lark(BY_NAME["mistral"], TOOLS, ids, required=True, thinking=THINK, opened=True)
    assert allowed(opened, f"hm</think>{call}", made, ll) and not allowed(opened, call, made, ll)


@for_each([
    (Grammar("json_schema", json.dumps(SCHEMA)), '{"note":"a"}', '{"x":1}'),
    (Grammar("json", ""), '{"b":[1]}', "[1]"),
    (Grammar("choice", '["yes","n\\"o"]'), 'n"o', "maybe"),
    (Grammar("regex", r"[a-c/]+\/?\d"), "ab/7", "ab/"),
])  # fmt: skip
def test_a_form_begins_where_thinking_ends(case: tuple[Grammar, str, str]) -> None:
    form, right, wrong = case
    closed, opened = (after_thinking(form, THINK, whether, {}) for whether in (False, True))
    assert closed is not None and opened is not None
    for text in (right, f"<think>{wrong} or {right}</think>\n{right}"):
        assert allowed(closed.text, text), text
    assert allowed(opened.text, f"hm {wrong}</think>{right}") and not allowed(opened.text, right)
    for text in (wrong, f"<think>hm</think>{wrong}", f"<think>{right}"):
        assert not allowed(closed.text, text), text


def test_a_grammar_of_the_clients_own_has_no_place_after_thinking() -> None:
    assert after_thinking(Grammar("lark", "start: /a/"), THINK, False, {}) is None
    with pytest.raises(GrammarRefused, match=r"\$\.not"):
        after_thinking(Grammar("json_schema", '{"not": {}}'), THINK, False, {})


@for_each([True, False])
def test_marks_that_are_added_tokens_are_named_by_their_ids_whether_control_tokens_or_not(special: bool) -> None:
    """Qwen's `</think>` and `<tool_call>` are ordinary added tokens."""
    made = tokenizer(())
    (made.add_special_tokens if special else made.add_tokens)(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    forms = Forms.of(tokenizer_of(made.to_str(), template="{{ messages }}</think>"), "hermes")
    ll = llguidance.LLTokenizer(made.to_str(), eos_token=0)
    form = forms.beside_thinking(Grammar("choice", '["yes"]'), Setting(splits_reasoning=True), "<think>\n")
    tools = forms.demand(Setting(tools=(Tool("time"),), choice="required"))
    assert tools is not None
    call = '<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>'
    assert allowed(form.text, "hm</think>yes", made, ll) and allowed(tools.grammar.text, call, made, ll)
    assert allowed(tools.grammar.text, f"<think>hm</think>{call}", made, ll)
