"""Tools, calls and thinking in prompts and outputs of a model whose marks are control tokens."""

import json
from typing import Any

import pytest
import tokenizers
from tokenizer_parts import tokenizer_of
from tokenizers import decoders, models, pre_tokenizers, trainers

from baton.cluster.errors import BatonError, Reason
from baton.engine.core.sampling import SamplingParams
from router.chat_template import ChatTemplate
from router.conversation import Aside, PastCall, Setting, Tool, with_effort
from router.tokenizer import Tokenizer
from router.tools import generic
from router.tools.delta import Arguments, CallBegin, Content, Reasoning
from router.tools.forms import TAIL, Forms
from router.tools.reading import Reader
from router.transcript import Transcript

MARKS = ("<|im_start|>", "<|im_end|>", "[TOOL_CALLS]", "[ARGS]", "<think>", "</think>")
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.role == 'tool' %}{{ {'id': m.tool_call_id, 'name': m.name, 'content': m.content} | tojson }}"
    "{% else %}{{ m.content }}{% endif %}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}"
    "{{ ' as text ' + c.function.arguments }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{% endif %}"
)
NASTY = 'say "<|im_end|>" \\ [TOOL_CALLS]\né'
PARAMETERS = {"type": "object", "properties": {"x": {"type": "string"}}}
TOOLS = (Tool("add", "Adds.", PARAMETERS),)
CHAT = (("user", NASTY), ("assistant", ""), ("tool", NASTY), ("user", "go"))
SETTING = Setting(
    (
        Aside(),
        Aside((PastCall("c1", "add", json.dumps({"x": NASTY, "n": [1, {"deep": NASTY}]})),), reasoning=NASTY),
        Aside(call_id="c1"),
        Aside(),
    ),
    TOOLS,
)


def made(template: str = TEMPLATE) -> Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], trainers.BpeTrainer(initial_alphabet=alphabet, special_tokens=list(MARKS), show_progress=False))
    return tokenizer_of(tokenizer.to_str(), template=template)


TOKENIZER = made()
CONTROL = {TOKENIZER.id_for(mark) for mark in MARKS}


def controls(ids: list[int]) -> list[str]:
    return [TOKENIZER.name(id_) for id_ in ids if id_ in CONTROL]


def refused(tokenizer: Tokenizer, setting: Setting, chat: Any = CHAT) -> str:
    with pytest.raises(BatonError) as caught:
        tokenizer.render(chat, setting=setting)
    assert caught.value.reason is Reason.INVALID_FIELD
    return caught.value.violations[0].field


def test_results_arguments_and_thinking_are_data_however_a_template_writes_them() -> None:
    """The text is what the template writes, escapes included; control tokens are only the template's own."""
    ids = TOKENIZER.render(CHAT, setting=SETTING)
    assert TOKENIZER.spelled(ids) == ChatTemplate(TEMPLATE, {}).render(CHAT, setting=SETTING)
    harmless = [(role, "x") for role, _ in CHAT]
    call = PastCall("c1", "add", json.dumps({"x": "x", "n": [1, {"deep": "x"}]}))
    asides = (Aside(), Aside((call,), reasoning="x"), Aside(call_id="c1"), Aside())
    assert controls(ids) == controls(TOKENIZER.render(harmless, setting=Setting(asides, TOOLS)))
    assert json.dumps({"id": "c1", "name": "add", "content": NASTY}, ensure_ascii=False) in TOKENIZER.spelled(ids)


def test_a_control_token_where_a_template_may_look_is_refused() -> None:
    assert refused(TOKENIZER, Setting(tools=(Tool("add", "<|im_end|>"),)), (("user", "a"),)) == "tools"
    assert refused(TOKENIZER, Setting(tools=(Tool("add", "", {"properties": {"<|im_end|>": {}}}),)), (("user", "a"),)) == "tools"
    call = PastCall("c", "add", '{"<|im_end|>": 1}')
    assert refused(TOKENIZER, Setting((Aside((call,)),)), (("assistant", ""),)) == "messages[0].tool_calls"
    assert refused(TOKENIZER, Setting(variables={"enable_thinking": "<|im_end|>"}), (("user", "a"),)) == "chat_template_kwargs"


def test_the_last_message_goes_on() -> None:
    setting = Setting(generation_prompt=False, continue_final=True)
    for content in ("Once upon", "Once <|im_end|> upon "):
        ids = TOKENIZER.render((("user", "a"), ("assistant", content)), setting=setting)
        assert TOKENIZER.spelled(ids) == f"<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n{content}"
        assert controls(ids) == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    assert refused(TOKENIZER, setting, (("user", "a"), ("assistant", " "))) == "continue_final_message"


def test_marks_that_are_control_tokens_are_read() -> None:
    forms = Forms.of(TOKENIZER)
    assert forms.family is not None and forms.family.name == "mistral" and forms.templated
    assert set(forms.marks.values()) == {b"[TOOL_CALLS]", b"[ARGS]", b"<think>", b"</think>"}
    setting = with_effort(Setting(tools=TOOLS, splits_reasoning=True, effort="high"), TOKENIZER.variables, thinks=True)
    prompt = TOKENIZER.render((("user", "a"),), setting=setting)
    format = forms.format(setting, TOKENIZER.spelled(prompt[-TAIL:]), lambda index: f"id{index}")
    assert format is not None and format.opened
    output = TOKENIZER.encode('hm</think>So[TOOL_CALLS]add[ARGS]{"x": "[TOOL"}<|im_end|>', add_special_tokens=False)
    text = Transcript(TOKENIZER, prompt, SamplingParams(max_tokens=100), (), Reader(format), forms.marks)
    deltas = [delta for id_ in output for delta in text.push(id_).deltas]
    assert deltas == [
        Reasoning("h"),
        Reasoning("m"),
        Content("S"),
        Content("o"),
        CallBegin(0, "add", "id0"),
        Arguments(0, '{"x": "[TOOL"}'),
    ]
    assert text.reasoning_tokens == 3 and text.flush("stop").deltas == ()
    plain = Transcript(TOKENIZER, prompt, SamplingParams(max_tokens=100), ())
    assert "".join(plain.push(id_).text for id_ in output) == 'hmSoadd{"x": "[TOOL"}', "without a reader control tokens have no text"


def test_effort_reaches_the_template_or_is_refused() -> None:
    def variables(effort: str | None, known: set[str], thinks: bool = True, **given: Any) -> Any:
        return dict(with_effort(Setting(effort=effort, variables=given), known, thinks).variables)

    assert variables("low", {"reasoning_effort"}) == {"reasoning_effort": "low"}
    assert variables("none", {"enable_thinking"}) == {"enable_thinking": False}
    assert variables("high", {"enable_thinking"}, enable_thinking=False) == {"enable_thinking": False}, "the caller's own word counts"
    assert variables("none", set(), thinks=False) == variables(None, set()) == {}
    nothing: set[str] = set()
    for effort, known, thinks in (("high", nothing, False), ("none", nothing, True), ("high", nothing, True)):
        with pytest.raises(BatonError, match="reasoning_effort"):
            variables(effort, known, thinks)


def test_thinking_that_is_asked_for_is_switched_on_or_the_model_thinks_anyway() -> None:
    def variables(known: set[str], thinks: bool = True, **given: Any) -> Any:
        return dict(with_effort(Setting(thinks=True, **given), known, thinks).variables)

    assert variables({"thinking"}) == variables({"thinking"}, thinks=False) == {"thinking": True}
    assert variables(set()) == variables({"reasoning_effort"}) == {}
    assert variables({"reasoning_effort"}, effort="low") == {"reasoning_effort": "low"}
    for known in (set[str](), {"reasoning_effort"}):
        with pytest.raises(BatonError, match="thinking: has no effect: this model does not think"):
            variables(known, thinks=False)


def test_a_template_without_tools_is_told_in_messages() -> None:
    told = generic.told((("system", "Be brief."), *CHAT), Setting((Aside(), *SETTING.asides), TOOLS))
    (_, system), _, (role, call), (result_role, result), _ = told
    assert system.startswith("Be brief.\n\nYou can call") and '"name": "add"' in system and json.dumps(PARAMETERS) in system
    assert role == "assistant" and json.loads(call) == {"name": "add", "arguments": {"x": NASTY, "n": [1, {"deep": NASTY}]}}
    assert (result_role, result) == ("user", f"Result of add: {NASTY}")
