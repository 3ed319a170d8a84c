"""Requests of the OpenAI API: how the router interprets them and which ones it refuses."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.core.sampling import NUMBERS
from router.http import json_body, openai_in
from router.http.body import Body, Neutral, Rule, read
from router.http.errors import HttpError
from router.http.json_body import MAX_NODES, MAX_VALUES
from router.http.openai_in import (
    MAX_CHOICES,
    Asked,
    Caller,
    Chat,
    Completion,
    Tokenize,
    chat,
    completion,
)
from router.validate import Ask, AskSampling

CALLER = Caller("id", "tenant", "00-trace")
HELLO = [{"role": "user", "content": "hello"}]


def ask_chat(messages: Any = HELLO, **fields: Any) -> Asked:
    return chat(json.dumps({"messages": messages, **fields}).encode(), CALLER)


def ask_completion(prompt: Any = "hello", **fields: Any) -> Asked:
    return completion(json.dumps({"prompt": prompt, **fields}).encode(), CALLER)


def sampling(asked: Asked) -> AskSampling:
    (ask,) = asked.asks
    return ask.sampling


def refused(read_body: Any, *arguments: Any, **fields: Any) -> HttpError:
    with pytest.raises(HttpError) as caught:
        read_body(*arguments, **fields)
    assert caught.value.status == 400
    return caught.value


# Prompts


def test_a_chat_becomes_its_messages() -> None:
    asked = ask_chat(
        [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "hi"}], model="m", cache_salt="s", priority=-3
    )
    (ask,) = asked.asks
    assert ask.messages == (("system", "be brief"), ("user", "hi")) and ask.text is None and ask.token_ids is None
    assert ask.priority == -3 and ask_chat([{"role": "user", "content": "hi"}]).asks[0].priority == 0
    assert (ask.model, ask.cache_salt, ask.request_id, ask.tenant, ask.traceparent) == ("m", "s", "id", "tenant", "00-trace")
    assert asked.chat and not asked.stream and asked.n == 1


def test_text_parts_become_lines() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ask_chat([{"role": "user", "content": parts}]).asks[0].messages == (("user", "one\ntwo"),)


def test_an_answer_can_be_sent_back_with_the_fields_that_clients_keep() -> None:
    kept: dict[str, Any] = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "tool_calls": None,
        "function_call": None,
        "audio": None,
        "annotations": [],
    }
    assert ask_chat([*HELLO, kept]).asks[0].messages == (("user", "hello"), ("assistant", "hi"))


def test_members_that_clients_add_and_that_ask_for_nothing_are_accepted() -> None:
    part = {"type": "text", "text": "hi", "id": "1", "cache_control": {"type": "ephemeral"}, "annotations": []}  # LangChain, LiteLLM
    message = {"role": "user", "content": [part], "type": "message", "id": "2", "cache_control": {"type": "ephemeral"}}
    assert ask_chat([message, HELLO[0] | {"type": "text"}]).asks[0].messages == (("user", "hi"), ("user", "hello"))  # lm-eval
    assert ask_chat(stop="", top_p=0).asks[0].sampling == AskSampling(top_p=0, default_max_tokens=1 << 31)


def test_null_is_absent_everywhere() -> None:
    part = {"type": "text", "text": "hi", "of_another_api": None}
    asked = ask_chat([{"role": "user", "content": [part], "reasoning_content": None, "tool_call_id": None}], guided_json=None, stop=None)
    assert asked == ask_chat([{"role": "user", "content": "hi"}])
    options = {"include_usage": True, "of_another_api": None}
    assert ask_completion(stream=True, stream_options=options, guided_regex=None).include_usage
    assert refused(ask_chat, guided={}).code == refused(ask_chat, guided=0).code == "unknown_parameter"
    assert refused(ask_chat, logit_bias={"1": None}).param == "logit_bias"


def test_an_assistants_turn_may_be_empty_and_no_other() -> None:
    for turn in ({"role": "assistant", "content": None}, {"role": "assistant"}, {"role": "assistant", "content": ""}):
        assert ask_chat([*HELLO, turn]).asks[0].messages == (("user", "hello"), ("assistant", ""))
    wrong: list[dict[str, Any]] = [{"role": "user", "content": None}, {"role": "system"}, {"role": "assistant", "content": []}]
    for turn in wrong:
        error = refused(ask_chat, [*HELLO, turn])
        assert error.param == "messages[1].content"
        assert error.code == ("missing_required_parameter" if turn["role"] != "assistant" else "invalid_value")


@pytest.mark.parametrize(
    ("prompt", "texts", "ids"),
    [
        ("hello", ["hello"], [None]),
        (["a", "b"], ["a", "b"], [None, None]),
        ([1, 2], [None], [(1, 2)]),
        ([[1], [2, 3]], [None, None], [(1,), (2, 3)]),
        (["a", [7]], ["a", None], [None, (7,)]),
    ],
)
def test_a_completion_is_one_prompt_or_several(prompt: Any, texts: list[Any], ids: list[Any]) -> None:
    asked = ask_completion(prompt)
    assert [ask.text for ask in asked.asks] == texts and [ask.token_ids for ask in asked.asks] == ids
    assert not any(ask.messages for ask in asked.asks)


def test_the_field_name_in_a_batch_contains_the_index_of_the_prompt() -> None:
    asked = ask_completion(["a", "b"], n=2)
    assert [asked.names_of(i)["text"] for i in range(4)] == ["prompt[0]", "prompt[0]", "prompt[1]", "prompt[1]"]
    assert ask_completion("a", n=2).names_of(1)["text"] == "prompt"
    assert ask_chat(n=2).names_of(1)["chat.messages"] == "messages"


@pytest.mark.parametrize("prompt", [None, 1, {}, [], [[]], [""] * (MAX_CHOICES + 1), [1, "a"], [[1], 2], [True], [1.5], [[None]]])
def test_the_error_for_an_invalid_prompt_names_the_parameter(prompt: Any) -> None:
    assert refused(ask_completion, prompt).param == "prompt"


@pytest.mark.parametrize(
    ("messages", "param", "code"),
    [
        ([], "messages", "invalid_value"),
        ("hello", "messages", "invalid_value"),
        (None, "messages", "missing_required_parameter"),
        (["hello"], "messages[0]", "invalid_value"),
        ([{"content": "x"}], "messages[0].role", "missing_required_parameter"),
        ([{"role": "user"}], "messages[0].content", "missing_required_parameter"),
        ([{"role": "user", "content": None}], "messages[0].content", "missing_required_parameter"),
        ([{"role": "user", "content": []}], "messages[0].content", "invalid_value"),
        ([{"role": 1, "content": "x"}], "messages[0].role", "invalid_value"),
        ([*HELLO, {"role": "user", "content": "x", "colour": "red"}], "messages[1].colour", "unknown_parameter"),
        ([{"role": "user", "content": "x", "name": 5}], "messages[0].name", "invalid_value"),
        ([{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls[0].id", "missing_required_parameter"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]", "invalid_value"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type", "unsupported_parameter"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text", "missing_required_parameter"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content[0].text", "invalid_value"),
        ([{"role": "user", "content": [{"type": "text", "text": "", "x": 1}]}], "messages[0].content[0].x", "unknown_parameter"),
    ],
)  # fmt: skip
def test_the_error_for_an_invalid_message_names_its_position(messages: Any, param: str, code: str) -> None:
    error = refused(ask_chat, messages)
    assert (error.param, error.code) == (param, code) and param in error.message


# Parameters


def test_every_sampling_parameter_arrives() -> None:
    given: dict[str, Any] = {
        "temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "presence_penalty": -1,
        "frequency_penalty": 1, "seed": 7, "logit_bias": {"5": -100, "0": 1.5}, "stop": ["a", "b"], "stop_token_ids": [3],
        "max_tokens": 9, "min_tokens": 2,
        "ignore_eos": True, "logprobs_mode": "processed_logprobs", "prompt_logprobs": 3,
    }  # fmt: skip
    given |= {name: number.range.high for name, number in NUMBERS.items() if name not in given}
    assert set(given) == set(openai_in.SAMPLING)
    want = {**given, "logit_bias": {5: -100, 0: 1.5}, "stop": ("a", "b"), "stop_token_ids": (3,)}
    assert sampling(ask_completion(**given)) == AskSampling(**want, default_max_tokens=16)
    got = sampling(ask_chat(**given))
    assert replace(got, default_max_tokens=16) == AskSampling(**want, default_max_tokens=16)


def test_without_sampling_parameters_only_the_default_length_is_set() -> None:
    assert sampling(ask_completion()) == AskSampling(default_max_tokens=16)
    assert sampling(ask_chat()).default_max_tokens > 1_000_000, "a chat may use the whole context"


def test_one_stop_string_becomes_a_list_of_one() -> None:
    assert sampling(ask_chat(stop="end")).stop == ("end",)


def test_max_completion_tokens_is_another_name_of_max_tokens_in_chats() -> None:
    asked = ask_chat(max_completion_tokens=5)
    assert sampling(asked).max_tokens == 5 and asked.names["max_tokens"] == "max_completion_tokens"
    assert sampling(ask_chat(max_completion_tokens=5, max_tokens=5)).max_tokens == 5
    assert refused(ask_chat, max_completion_tokens=5, max_tokens=6).param == "max_tokens"
    assert refused(ask_completion, max_completion_tokens=5).code == "unknown_parameter"


def test_each_api_has_its_own_form_of_logprobs() -> None:
    assert sampling(ask_chat(logprobs=True)).logprobs == 0
    assert sampling(ask_chat(logprobs=True, top_logprobs=3)).logprobs == 3
    assert sampling(ask_chat(logprobs=True, logprobs_mode="processed_logprobs")).logprobs_mode == "processed_logprobs"
    assert sampling(ask_chat(logprobs=False)).logprobs is None
    assert refused(ask_chat, top_logprobs=3).param == "top_logprobs"
    assert refused(ask_chat, logprobs=3).param == "logprobs"
    assert sampling(ask_completion(logprobs=3)).logprobs == 3
    assert refused(ask_completion, logprobs=True).param == "logprobs"


def test_each_prompt_is_a_request_with_n_choices() -> None:
    asked = ask_completion(["a", "b"], n=3, best_of=4, seed=5)
    assert [(ask.text, ask.n, ask.best_of, ask.sampling.seed) for ask in asked.asks] == [("a", 3, 4, 5), ("b", 3, 4, 5)]
    assert [ask.request_id for ask in asked.asks] == ["id-0", "id-1"] and asked.n == 3
    assert [(ask.request_id, ask.n) for ask in ask_chat(n=2).asks] == [("id", 2)]
    assert asked.asks[0].backlog is asked.asks[1].backlog


def test_a_negative_seed_becomes_an_unsigned_64_bit_seed() -> None:
    assert sampling(ask_chat(seed=-1)).seed == (1 << 64) - 1
    assert refused(ask_chat, seed=1 << 64).param == refused(ask_chat, seed=-(1 << 63) - 1).param == "seed"


@pytest.mark.parametrize("n", [0, -1, MAX_CHOICES + 1, 10**9, 1.0, True, "1"])
def test_n_is_limited(n: Any) -> None:
    assert refused(ask_chat, n=n).param == "n"


def test_prompts_times_n_is_limited() -> None:
    assert len(ask_completion(["a"] * 32, n=4).asks) == 32
    assert refused(ask_completion, ["a"] * 32, n=5).param == "n"
    assert refused(ask_completion, ["a"] * 32, n=4, best_of=5).param == "best_of"


def test_the_best_of_more_cannot_be_streamed() -> None:
    assert ask_completion(best_of=2, n=2, stream=True).stream and ask_completion(best_of=3, n=2).asks[0].computed == 3
    assert refused(ask_completion, best_of=3, n=2, stream=True).param == "best_of"


def test_stream_options_require_a_stream() -> None:
    asked = ask_chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": False})
    assert asked.stream and asked.include_usage and asked.continuous_usage
    assert not ask_chat(stream=True).include_usage and not ask_chat(stream=True, stream_options={}).include_usage
    assert refused(ask_chat, stream_options={}).param == "stream_options"
    assert refused(ask_chat, stream=True, stream_options={"usage": True}).param == "stream_options.usage"
    assert refused(ask_chat, stream=True, stream_options={"include_usage": 1}).param == "stream_options.include_usage"


@pytest.mark.parametrize(
    "bias", [{"x": 1}, {"-1": 1}, {"01": 1}, {"1.0": 1}, {"٣": 1}, {"": 1}, {"9" * 5000: 1}, {"1": "1"}, {"1": True}, [1], 5]
)
def test_the_error_for_an_invalid_logit_bias_names_the_parameter(bias: Any) -> None:
    assert refused(ask_chat, logit_bias=bias).param == "logit_bias"


# Parameters without effect and unsupported parameters


def rules(model: type[Body]) -> dict[str, Rule | None]:
    """Returns the rule of each parameter. None: it has no effect, whatever its value."""
    return {name: next((one for one in info.metadata if isinstance(one, Rule)), None) for name, info in model.model_fields.items()}


APIS = [("chat", rules(Chat), ask_chat), ("completion", rules(Completion), ask_completion)]
NEUTRAL = [
    (api, name, rule.values or (None,), ask) for api, known, ask in APIS for name, rule in known.items() if isinstance(rule, Neutral)
]
WITHOUT_EFFECT = [(api, name, ask) for api, known, ask in APIS for name, rule in known.items() if rule is None]


@pytest.mark.parametrize(("api", "name", "neutral", "ask"), NEUTRAL, ids=lambda value: value if isinstance(value, str) else "")
def test_an_unsupported_parameter_that_would_change_the_answer_is_refused_by_name(
    api: str, name: str, neutral: tuple[Any, ...], ask: Any
) -> None:
    for value in (*neutral, None):
        assert ask(**{name: value}) == ask(), "a neutral value changes nothing"
    for value in ([{"type": "function"}], {"type": "json_object"}, "other", 3, not neutral[0]):
        if value not in neutral:
            error = refused(ask, **{name: value})
            assert (error.param, error.code) == (name, "unsupported_parameter") and name in error.message


@pytest.mark.parametrize(("api", "name", "ask"), WITHOUT_EFFECT, ids=lambda value: value if isinstance(value, str) else "")
def test_a_parameter_that_cannot_change_the_answer_is_accepted(api: str, name: str, ask: Any) -> None:
    for value in ("x", {"a": 1}, True, 5, None):
        assert ask(**{name: value}) == ask()


def test_tools_and_formats_are_in_the_tables() -> None:
    """The tests above take their cases from the tables, so they would not notice a missing entry."""
    names = {(api, name) for api, name, _, _ in NEUTRAL}
    assert names >= {("chat", name) for name in ("functions", "function_call", "audio", "modalities")}
    assert names >= {("completion", name) for name in ("suffix", "bad_words")}
    assert {name for _, name, _ in WITHOUT_EFFECT} >= {"user", "metadata", "store"}


@pytest.mark.parametrize("ask", [ask_chat, ask_completion])
def test_the_error_for_an_unknown_parameter_names_it(ask: Any) -> None:
    error = refused(ask, temperatur=1)
    assert (error.param, error.code) == ("temperatur", "unknown_parameter")


@pytest.mark.parametrize("ask", [ask_chat, ask_completion])
def test_null_means_absent(ask: Any) -> None:
    model = Chat if ask is ask_chat else Completion
    everything = dict.fromkeys(set(model.model_fields) - {"messages", "prompt"})
    assert ask(**everything) == ask()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1"), ("temperature", True), ("top_k", 1.5), ("top_k", True), ("max_tokens", 5.0), ("max_tokens", "5"),
        ("stream", 1), ("stream", "true"), ("ignore_eos", 0), ("stop", 1), ("stop", [1]), ("stop", {"a": 1}), ("stop_token_ids", ["1"]),
        ("stop_token_ids", 1), ("model", 1), ("cache_salt", 1), ("seed", 1.5), ("stream_options", []),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_not_converted(name: str, value: Any) -> None:
    error = refused(ask_chat, **{name: value})
    assert (error.param, error.code) == (name, "invalid_value")


# Names


def test_messages_keep_their_names() -> None:
    """Agent frameworks send names."""
    given = [{"role": "user", "content": "hi", "name": "Ida"}, {"role": "assistant", "content": "x"}, {**HELLO[0], "name": None}]
    assert ask_chat(given).asks[0].names == ("Ida", "", "") and ask_chat().asks[0].names == ()


# Bodies


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"null", b"[]", b'"x"', b"1", b"{} {}", b'{"messages":', b"{'messages': []}", b'{"n": NaN}', b'{"n": Infinity}',
        b'{"n": -Infinity}', b'{"n": ' + b"9" * 5000 + b"}", b"[" * 100_000, b'{"a":' * 100_000, b"\xff\xfe{}",
        '{"messages": []}'.encode("utf-16"), b"\xef\xbb\xbf{}", b'{"user": "\xff"}', b'{"n": 1, "n": 1}',
        b'{"user": {"a": 1, "a": 2}}', b"\x00", b'{"user": "a\nb"}',
    ],
)  # fmt: skip
def test_a_body_that_is_not_a_json_object_is_refused(body: bytes) -> None:
    error = refused(read, body, Chat)
    assert error.code == "invalid_json" and error.param is None


def test_lone_surrogates_reach_the_validation_of_texts() -> None:
    assert read(b'{"user": "\\ud800", "prompt": ""}', Completion).user == "\ud800"
    assert ask_completion("\ud800").asks[0].text == "\ud800"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=5), children, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*Chat.model_fields, *Completion.model_fields, *Tokenize.model_fields, "tokens", "other"]), JSON, max_size=6
    ),
    JSON,
)
def test_any_json_is_either_understood_or_refused(fields: dict[str, Any], message: Any) -> None:
    body = json.dumps({"messages": [message], "prompt": message, **fields}).encode()
    for read_body in (lambda: chat(body, CALLER), lambda: completion(body, CALLER), lambda: openai_in.tokenize(body)):
        try:
            made = read_body()
        except HttpError as error:
            assert error.status == 400 and error.message
        else:
            assert isinstance(made, Asked) or isinstance(made[0], Ask)


def items(text: str, count: int) -> bytes:
    return b'{"user": [' + b",".join([text.encode()] * count) + b'], "prompt": ""}'


def test_a_body_with_too_many_values_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has few bytes, but parsing it would delay all other requests."""
    monkeypatch.setattr("router.http.json_body.json.loads", lambda *arguments, **options: pytest.fail("parsed"))
    escaped = '"' + 100 * "\\\\" + '"'
    for body in (
        items("1", MAX_VALUES + 9),
        items("[]", MAX_NODES + 9),
        items("{}", MAX_NODES + 9),
        items(escaped, MAX_VALUES + 9),
        items('{"a":1}', MAX_NODES // 2 + 9),
    ):
        with pytest.raises(HttpError) as caught:
            read(body, Completion)
        assert caught.value.status == 400 and str(MAX_VALUES) in caught.value.message


@given(st.text(alphabet='\\",:[é', max_size=40), st.integers(1, 7))
def test_text_outside_strings_is_found_for_any_chunk_size(text: str, size: int) -> None:
    """The oracle examines one character after another."""
    body, inside, escaped, outside = text.encode(), False, False, b""
    for character in body:
        outside += b"" if inside or character in b'\\"' else bytes([character])
        inside ^= character == ord('"') and not escaped
        escaped = character == ord("\\") and not escaped
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_body, "SCAN_BYTES", size)
        found = b"".join(json_body._outside_strings(body))
    assert found.replace(b"\\", b"") == outside


def test_a_text_may_contain_any_number_of_commas_and_brackets() -> None:
    """Negative control: the content of a string does not count as values."""
    for text in ("," * (MAX_VALUES + 9), ":" * MAX_NODES + ":", "[{" * MAX_NODES, '\\",' * (MAX_VALUES + 9), ',"' * (MAX_VALUES // 2)):
        assert ask_completion(text).asks[0].text == text
    assert len(read(items("1", MAX_VALUES - 9), Completion).user) == MAX_VALUES - 9


@pytest.mark.parametrize(
    ("ask", "fields", "message"),
    [
        (ask_chat, {"messages": []}, "messages: must not be empty"),
        (ask_chat, {"messages": [HELLO[0]] * 1001}, "messages: must be at most 1000 messages (got 1001)"),
        (ask_chat, {"messages": 5}, "messages: must be a list of messages"),
        (ask_completion, {"prompt": []}, "prompt: must not be empty"),
        (ask_completion, {"prompt": ["x"] * 129}, "prompt: must be at most 128 prompts (got 129)"),
        (ask_chat, {"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias: must be at most 1024 entries (got 1025)"),
    ],
)
def test_the_error_for_a_list_of_the_wrong_length_states_the_limit(ask: Any, fields: dict[str, Any], message: str) -> None:
    assert refused(ask, **fields).message == message


def test_the_error_for_a_number_with_too_many_digits_is_readable() -> None:
    error = refused(read, b'{"n": ' + b"9" * 5000 + b"}", Chat)
    assert error.message == "the body is not JSON in UTF-8: a number has too many digits"


def test_a_parameter_name_that_is_not_unicode_is_refused() -> None:
    assert refused(read, b'{"prompt": "", "\\ud800": 1}', Completion).status == 400


# /tokenize and /detokenize


def test_tokenize_accepts_a_prompt_or_messages() -> None:
    assert openai_in.tokenize(b'{"prompt": "x", "model": "m"}')[0] == Ask(model="m", text="x")
    assert openai_in.tokenize(json.dumps({"messages": HELLO}).encode())[0] == Ask(messages=(("user", "hello"),))
    for body in ({}, {"prompt": "x", "messages": HELLO}):
        assert refused(openai_in.tokenize, json.dumps(body).encode()).param == "prompt"


def test_detokenize_accepts_ids() -> None:
    assert openai_in.detokenize(b'{"tokens": [1, 2]}')[0] == Ask(token_ids=(1, 2))
    for body in (b"{}", b'{"tokens": "x"}', b'{"tokens": [1.5]}'):
        assert refused(openai_in.detokenize, body).param == "tokens"
