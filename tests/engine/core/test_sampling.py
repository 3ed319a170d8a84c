"""A numeric sampling parameter is declared once: everything between a client and the sampler follows from that declaration."""

import json
import math
from dataclasses import MISSING, fields, replace
from types import SimpleNamespace
from typing import Any

import pytest

from baton.engine.core.beams import Beams
from baton.engine.core.grammar import Grammar
from baton.engine.core.sampling import FIELDS, NUMBERS, Range, SamplingParams
from baton.engine.core.speculation import UNASKED, Speculation
from baton.engine.core.thinking import Marks, ThinkingBudget
from baton.v1 import generation_pb2
from baton.worker.wire import to_params
from router.calls import to_job
from router.http import openai_in
from router.http.errors import HttpError
from router.http.openai_in import Caller
from router.validate import Ask, AskSampling, resolve


def other(name: str) -> float:
    """An allowed value that is not the default."""
    number = NUMBERS[name]
    return next(value for value in (1, 0.5, 2, 0.25) if not number.range.refusal(value) and value != number.default)


def test_the_numeric_parameters_are_exactly_these() -> None:
    assert set(NUMBERS) == {
        "temperature", "top_k", "top_p", "min_p", "top_a", "repetition_penalty", "presence_penalty", "frequency_penalty",
    }  # fmt: skip
    assert NUMBERS["top_k"].integer and not NUMBERS["top_a"].integer
    assert all(number.range.refusal(number.default) is None for number in NUMBERS.values())


def test_every_engine_parameter_can_be_sent_in_a_job() -> None:
    """A parameter that is declared but missing from generation.proto cannot be sent. `stop` is handled by the router alone."""
    assert set(FIELDS) == set(generation_pb2.SamplingParams.DESCRIPTOR.fields_by_name) - {"stop"}


def test_the_engine_receives_what_the_router_resolved() -> None:
    values: dict[str, Any] = {
        "max_tokens": 7, "min_tokens": 3, "seed": 1 << 63, "logit_bias": {5: 1.5}, "logprobs": 2, "stop_token_ids": frozenset({9, 4}),
        "ignore_eos": True, "logprobs_mode": "processed_logprobs", "prompt_logprobs": 3,
        "structured": Grammar("regex", "a+", False),
        "thinking": ThinkingBudget(3, (Marks("<a>", ("<b>", "c"), (1, 2)), Marks("<d>", ("<e>",), (3,))), True),
        "speculation": Speculation("none", 2, (4, 5)), "beams": Beams(4, 2, 0.6, "never"),
    }  # fmt: skip
    numbers: dict[str, Any] = {name: other(name) for name in NUMBERS}
    params = SamplingParams(**values, **numbers)
    assert all(getattr(params, each.name) != each.default for each in fields(SamplingParams) if each.default is not MISSING)
    for sent in (params, SamplingParams(max_tokens=1), replace(params, logprobs=0)):
        request: Any = SimpleNamespace(id="r", tokens=[1], prompt_len=1, salt="", params=sent, unscored=True)
        assert to_params(to_job(request)) == sent
        assert to_params(to_job(request, decodes=False)) == replace(sent, speculation=UNASKED), "no prefill worker guesses"


@pytest.mark.parametrize("name", NUMBERS)
def test_a_request_sets_each_number_and_omitting_it_gives_the_default(name: str) -> None:
    def resolved(**given: Any) -> float:
        params, _ = resolve(Ask(text="a", sampling=AskSampling(**given)), 1, 100, draw_seed=1)
        value: float = getattr(params, name)
        return value

    assert resolved() == NUMBERS[name].default
    assert resolved(**{name: other(name)}) == other(name)
    assert resolved(**{name: NUMBERS[name].range.high}) == NUMBERS[name].range.high


@pytest.mark.parametrize("name", NUMBERS)
def test_the_http_api_accepts_each_number(name: str) -> None:
    def asked(value: object) -> Ask:
        return openai_in.completion(json.dumps({"prompt": "a", name: value}).encode(), Caller("r")).asks[0]

    assert getattr(asked(other(name)).sampling, name) == other(name)
    with pytest.raises(HttpError, match=name):
        asked("1")


def test_ranges_refuse_values_outside_their_bounds() -> None:
    assert Range(0, 1).refusal(0) is None and Range(0, 1).refusal(1) is None
    assert Range(0, 1, above_low=True).refusal(0) == "must be greater than 0 and at most 1"
    assert all(Range(0, 1).refusal(value) == "must be at least 0 and at most 1" for value in (-0.1, 1.1, math.nan, math.inf))
