"""Validation of requests: every kind of bad input has a row and is refused with the name of its field, and good input passes."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from turns import within

from baton.cluster.errors import BatonError, Reason
from router.validate import MAX_VIOLATIONS, Ask, AskSampling, RequestLimits, check, resolve

LIMITS = RequestLimits()
VOCAB = 1000
NAMES = ("small",)
GOOD = Ask(text="hello")
NAN, INF = float("nan"), float("inf")


def ask(**fields: Any) -> Ask:
    """Returns a valid request except for `fields`. Another kind of prompt replaces the text."""
    prompt = {} if fields.keys() & {"text", "messages", "token_ids"} else {"text": "hello"}
    return Ask(**{**prompt, **fields})


def sampling(**fields: Any) -> Ask:
    return ask(sampling=AskSampling(**fields))


def refused(bad: Ask, limits: RequestLimits = LIMITS) -> BatonError:
    with pytest.raises(BatonError) as caught:
        check(bad, limits, NAMES, VOCAB)
    return caught.value


BAD: list[tuple[str, Callable[[], Ask]]] = [
    # F93, F94, F95: prompts
    ("text", lambda: ask(text="a" * ((1 << 20) + 1))),
    ("text", lambda: ask(text="é" * ((1 << 19) + 1))),
    ("text", lambda: ask(text="")),
    ("text", lambda: ask(text="lone \ud800 surrogate")),
    ("prompt", lambda: Ask()),
    ("prompt", lambda: ask(text="a", token_ids=(1,))),
    ("token_ids.ids", lambda: ask(token_ids=())),
    ("token_ids.ids", lambda: ask(token_ids=(1,) * ((1 << 20) + 1))),
    ("token_ids.ids[7]", lambda: ask(token_ids=(*range(7), VOCAB, VOCAB))),
    ("token_ids.ids[1]", lambda: ask(token_ids=(0, -1))),
    ("token_ids.ids[0]", lambda: ask(token_ids=(2**32 - 1,))),
    # F96: sampling
    *[("sampling.temperature", lambda v=v: sampling(temperature=v)) for v in (NAN, INF, -INF, -1.0, 100.5, 1e38)],
    *[("sampling.top_p", lambda v=v: sampling(top_p=v)) for v in (NAN, INF, -0.1, 1.001)],
    *[("sampling.top_k", lambda v=v: sampling(top_k=v)) for v in (-2, 1 << 31)],
    *[("sampling.min_p", lambda v=v: sampling(min_p=v)) for v in (NAN, -0.1, 1.1)],
    *[("sampling.repetition_penalty", lambda v=v: sampling(repetition_penalty=v)) for v in (NAN, INF, 0.0, -1.0, 1e-38, 101.0, 1e38)],
    *[("sampling.presence_penalty", lambda v=v: sampling(presence_penalty=v)) for v in (NAN, -2.1, 2.1)],
    *[("sampling.frequency_penalty", lambda v=v: sampling(frequency_penalty=v)) for v in (NAN, -INF, 1e38)],
    # F97: lengths, seed
    *[("sampling.max_tokens", lambda v=v: sampling(max_tokens=v)) for v in (0, -1, 1 << 31)],
    *[("sampling.min_tokens", lambda v=v: sampling(min_tokens=v, max_tokens=4)) for v in (-1, 5)],
    ("sampling.min_tokens", lambda: sampling(min_tokens=257)),
    *[("sampling.seed", lambda v=v: sampling(seed=v)) for v in (-1, 1 << 64)],
    # F98: stop strings
    ("sampling.stop", lambda: sampling(stop=("x",) * 100_000)),
    ("sampling.stop[1]", lambda: sampling(stop=("x", "y" * (1 << 20)))),
    ("sampling.stop[0]", lambda: sampling(stop=("é" * 129,))),
    ("sampling.stop[0]", lambda: sampling(stop=("",))),
    ("sampling.stop[0]", lambda: sampling(stop=("\udfff",))),
    ("sampling.stop_token_ids", lambda: sampling(stop_token_ids=(1,) * 129)),
    ("sampling.stop_token_ids[1]", lambda: sampling(stop_token_ids=(1, VOCAB))),
    # F99: biases, logprobs
    ("sampling.logit_bias", lambda: sampling(logit_bias=dict.fromkeys(range(1025), 1.0))),
    (f"sampling.logit_bias[{VOCAB}]", lambda: sampling(logit_bias={VOCAB: 1.0})),
    *[("sampling.logit_bias[3]", lambda v=v: sampling(logit_bias={3: v})) for v in (NAN, INF, 100.5, -100.5)],
    *[("sampling.logprobs", lambda v=v: sampling(logprobs=v)) for v in (-1, 21)],
    # F101: chats
    ("chat.messages", lambda: ask(messages=())),
    ("chat.messages", lambda: ask(messages=(("user", "a"),) * 10_000)),
    ("chat.messages", lambda: ask(messages=(("user", "a" * (1 << 19)), ("user", "é" * (1 << 19))))),
    ("chat.messages[3].role", lambda: ask(messages=(("user", "a"),) * 3 + (("robot", "a"),))),
    ("chat.messages[0].role", lambda: ask(messages=(("", "a"),))),
    ("chat.messages[0].content", lambda: ask(messages=(("user", "\ud800"),))),
    # the other fields
    *[("request_id", lambda v=v: ask(request_id=v)) for v in ("a" * 129, "a\r\nb", "é", "\x00", "tab\t")],
    ("cache_salt", lambda: ask(cache_salt="é" * 129)),
    ("cache_salt", lambda: ask(cache_salt="\ud800")),
]


@pytest.mark.parametrize(("field", "make"), BAD)
def test_bad_input_is_refused_with_the_name_of_its_field(field: str, make: Callable[[], Ask]) -> None:
    bad = make()
    error = refused(bad)
    assert error.reason is Reason.INVALID_FIELD
    assert [violation.field for violation in error.violations] == [field]
    assert field in error.message and len(error.message) < 300  # never the value itself


GOOD_ASKS = [
    ask(text=" \n\t "),
    ask(text="\x00"),
    ask(text="a" * (1 << 20)),
    ask(text="\u202e\u200d" * 1000),
    ask(messages=(("system", ""), ("user", "{{ 7 * 7 }}"), ("assistant", "\x00"))),
    ask(messages=(("user", "a"),) * 1000),
    ask(token_ids=(0, VOCAB - 1)),
    ask(request_id="req 1:a/b~", cache_salt="ü" * 128, model="small"),
    sampling(temperature=0.0, top_p=1.0, top_k=-1, min_p=0.0, repetition_penalty=0.01, presence_penalty=-2.0, frequency_penalty=2.0),
    sampling(temperature=-0.0),
    sampling(temperature=100.0, top_p=1e-9, top_k=(1 << 31) - 1, min_p=1.0, repetition_penalty=100.0),
    sampling(seed=(1 << 64) - 1, max_tokens=(1 << 31) - 1, min_tokens=(1 << 31) - 1, ignore_eos=True),
    sampling(stop=("a", "a", "ab", "x" * 256), stop_token_ids=(0, VOCAB - 1), logprobs=20, logit_bias={0: 100.0, 1: -100.0}),
    sampling(logprobs=0, min_tokens=256),
]


@pytest.mark.parametrize("good", GOOD_ASKS)
def test_good_input_passes(good: Ask) -> None:
    check(good, LIMITS, NAMES, VOCAB)


def test_all_violations_are_reported_together() -> None:
    bad = Ask(request_id="\n", messages=(("wizard", "a"),), sampling=AskSampling(top_p=2.0, max_tokens=0, stop=("",)))
    error = refused(bad)
    fields = ["request_id", "chat.messages[0].role", "sampling.top_p", "sampling.max_tokens", "sampling.stop[0]"]
    assert [violation.field for violation in error.violations] == fields
    assert "4 more" in error.message


def test_the_size_of_the_error_is_limited() -> None:
    """The answer is sent in the trailers of the call."""
    error = refused(ask(messages=(("wizard", "a"),) * 1000))
    assert len(error.violations) == MAX_VIOLATIONS and "999 more" in error.message


@pytest.mark.parametrize("name", ["large", "x" * 1_000_000, "small\n", "Small"])
def test_an_unknown_model_is_refused(name: str) -> None:
    error = refused(replace(GOOD, model=name))
    assert error.reason is Reason.MODEL_NOT_FOUND and len(error.message) < 200


def test_huge_input_is_refused_quickly() -> None:
    huge = Ask(text="a" * 100_000_000, sampling=AskSampling(stop=("x",) * 100_000, logit_bias=dict.fromkeys(range(100_000), NAN)))
    start = time.thread_time()
    refused(huge)
    within(time.thread_time() - start, 0.02)


def test_the_limits_decide_what_is_refused() -> None:
    """Negative control."""
    bad = ask(text="a" * 20, request_id="b" * 20, sampling=AskSampling(stop=("c",) * 2))
    small = RequestLimits(max_prompt_bytes=10, max_request_id=10, max_stop=1)
    assert {violation.field for violation in refused(bad, small).violations} == {"text", "request_id", "sampling.stop"}
    check(bad, LIMITS, NAMES, VOCAB)


@pytest.mark.parametrize("top_p", [0.0, -0.0])
def test_a_top_p_of_nothing_keeps_the_likeliest_token(top_p: float) -> None:
    check(asked := ask(sampling=AskSampling(top_p=top_p)), LIMITS, NAMES, VOCAB)
    assert resolve(asked, 10, 1000, draw_seed=5)[0].top_p == 1e-9  # for which the samplers' tests show it


def test_missing_parameters_get_defaults() -> None:
    params, stops = resolve(GOOD, 10, 1000, draw_seed=5)
    assert (params.max_tokens, params.min_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (
        256,
        0,
        1.0,
        0,
        1.0,
        0.0,
    )
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.0, 0.0, 0.0)
    assert (params.seed, params.logprobs, params.ignore_eos, dict(params.logit_bias)) == (5, None, False, {})
    assert stops == () and params.stop_token_ids == frozenset()


def test_given_parameters_are_kept() -> None:
    asked = AskSampling(
        temperature=0.5, top_p=0.9, top_k=-1, min_p=0.1, repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.3, seed=0,
        logit_bias={3: 1.5}, logprobs=0, stop_token_ids=(7, 7), stop=("a", "b"), max_tokens=20, min_tokens=2, ignore_eos=True,
    )  # fmt: skip
    params, stops = resolve(ask(sampling=asked), 10, 1000, draw_seed=5)
    assert (params.max_tokens, params.min_tokens, params.temperature, params.top_k, params.top_p, params.min_p) == (20, 2, 0.5, 0, 0.9, 0.1)
    assert (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) == (1.1, 0.2, 0.3)
    assert (params.seed, params.logprobs, params.ignore_eos, dict(params.logit_bias)) == (0, 0, True, {3: 1.5})
    assert stops == ("a", "b") and params.stop_token_ids == {7}


@pytest.mark.parametrize("temperature", [0.0, -0.0, 1e-6, 1e-45])
def test_tiny_temperatures_mean_greedy_sampling(temperature: float) -> None:
    assert str(resolve(sampling(temperature=temperature), 1, 10, 0)[0].temperature) == "0.0"


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "expected"),
    [(10, None, 90), (10, 90, 90), (99, None, 1), (1, None, 99), (10, 91, "sampling.max_tokens"), (100, None, "text"), (5000, 1, "text")],
)
def test_prompt_and_output_must_fit_the_context(prompt: int, max_tokens: int | None, expected: int | str) -> None:
    asked = sampling(max_tokens=max_tokens)
    if isinstance(expected, int):
        assert resolve(asked, prompt, 100, 0)[0].max_tokens == expected
        return
    with pytest.raises(BatonError) as caught:
        resolve(asked, prompt, 100, 0)
    error = caught.value
    assert error.reason is Reason.CONTEXT_LENGTH and error.violations[0].field == expected
    assert "100" in error.message and str(prompt) in error.message
    assert error.metadata == {"prompt_tokens": str(prompt), "context": "100"}


@pytest.mark.parametrize(("prompt", "field"), [({"messages": (("user", "a"),)}, "chat"), ({"token_ids": (1,)}, "token_ids")])
def test_the_error_for_a_long_prompt_names_its_field(prompt: dict[str, Any], field: str) -> None:
    with pytest.raises(BatonError) as caught:
        resolve(Ask(**prompt), 100, 100, 0)
    assert caught.value.violations[0].field == field


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(BatonError, match="INVALID_FIELD: text"):
        resolve(GOOD, 0, 100, 0)


def test_the_default_length_and_min_tokens_are_limited_by_the_context() -> None:
    params, _ = resolve(sampling(min_tokens=200), 50, 100, 0)
    assert (params.min_tokens, params.max_tokens) == (50, 50)


numbers = st.none() | st.integers(-3, 300)
floats = st.none() | st.floats(width=32)


@given(st.builds(AskSampling, temperature=floats, top_p=floats, top_k=numbers, min_p=floats, repetition_penalty=floats, max_tokens=numbers,
                 min_tokens=numbers, logprobs=numbers, seed=numbers), st.integers(1, 99))  # fmt: skip
def test_parameters_that_pass_are_within_bounds(asked: AskSampling, prompt: int) -> None:
    try:
        check(ask(sampling=asked), LIMITS, NAMES, VOCAB)
        params, _ = resolve(ask(sampling=asked), prompt, 100, 0)
    except BatonError as error:
        assert error.reason in (Reason.INVALID_FIELD, Reason.CONTEXT_LENGTH) and error.violations
        return
    assert 1 <= params.max_tokens <= 100 - prompt and 0 <= params.min_tokens <= params.max_tokens
    assert 0 <= params.temperature <= 100 and 0 < params.top_p <= 1 and params.top_k >= 0 and 0 <= params.min_p <= 1
    assert 0 < params.repetition_penalty <= 100
