"""Answers of the OpenAI API: whole or in chunks, they contain the same text, tokens and usage."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from http_door import toy_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.engine.core.sampling import SamplingParams
from router.events import Accepted, Finished, Part, TextPiece
from router.http.errors import HttpError
from router.http.openai_in import Asked
from router.http.openai_out import OpenAiWriter
from router.http.prompt_out import token_text
from router.request import PromptToken, Request, Scores, Stopwatch, Token, Trace
from router.tokenizer import Tokenizer
from router.validate import Ask, AskSampling

HEAD = {"id": "chatcmpl-r", "created": 1000, "model": "m"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


def writer(tokenizer: Tokenizer, choices: int = 1, logprobs: int | None = None, **fields: Any) -> OpenAiWriter:
    asks = (Ask(sampling=AskSampling(logprobs=logprobs)),) * (choices // fields.get("n", choices))
    return OpenAiWriter(Asked(asks, **{"n": choices, "chat": True, **fields}), tokenizer, "r", "m", lambda: 1000.9)


def events(texts: list[str], held_back: str = "", prompt: int = 3, cached: int = 2, finish: Any = "stop", top: bool = True) -> list[Part]:
    """The events of one choice. Its token ids are 65, 66, …"""
    request = Request("r", [0] * prompt, prompt, SamplingParams(9), "", 0.0, Trace(Stopwatch(lambda: 0.0), cached_tokens=cached))
    tokens = [Token(65 + i, -0.5, ((66 + i, -0.1), (65 + i, -0.5)) if top else ()) for i in range(len(texts))]
    pieces = [TextPiece(i, token, text) for i, (token, text) in enumerate(zip(tokens, texts, strict=True))]
    return [Accepted("r", "m", prompt, request.params), *pieces, Finished(request, finish, held_back, None)]


def chunks(made: OpenAiWriter, *choices: list[Part]) -> list[dict[str, Any]]:
    return [chunk for i, choice in enumerate(choices) for event in choice for chunk in made.chunks(i, event)] + list(made.end())


def whole(made: OpenAiWriter, *choices: list[Part]) -> dict[str, Any]:
    for i, choice in enumerate(choices):
        for event in choice:
            made.take(i, event)
    answer: dict[str, Any] = json.loads(b"".join(made.whole()))
    return answer


def test_a_whole_chat_has_the_expected_format(tokenizer: Tokenizer) -> None:
    assert whole(writer(tokenizer), events(["a", "", "b"], "c")) == HEAD | {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "abc", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 3,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 2},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_a_whole_completion_has_the_expected_format(tokenizer: Tokenizer) -> None:
    made = whole(writer(tokenizer, chat=False), events(["a"], finish="length"))
    assert (made["id"], made["object"]) == ("cmpl-r", "text_completion")
    assert made["choices"] == [{"index": 0, "text": "a", "logprobs": None, "finish_reason": "length"}]


def test_chunks_of_a_chat_have_the_expected_format(tokenizer: Tokenizer) -> None:
    made = chunks(writer(tokenizer), events(["a", "", "b"], "c"))
    assert all({name: chunk[name] for name in HEAD} == HEAD and chunk["object"] == "chat.completion.chunk" for chunk in made)
    assert all("usage" not in chunk for chunk in made)
    deltas = [chunk["choices"][0]["delta"] for chunk in made]
    assert deltas == [{"role": "assistant", "content": ""}, *({"content": text} for text in ("a", "", "b", "c")), {}]
    assert [chunk["choices"][0]["finish_reason"] for chunk in made] == [None] * 5 + ["stop"]


def test_chunks_of_a_completion_have_the_expected_format(tokenizer: Tokenizer) -> None:
    made = chunks(writer(tokenizer, chat=False), events(["a", "b"]))
    assert [chunk["choices"][0] for chunk in made] == [
        {"index": 0, "text": "a", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "b", "logprobs": None, "finish_reason": None},
        {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"},
    ]


def test_the_usage_of_a_stream_has_its_own_chunk(tokenizer: Tokenizer) -> None:
    *made, last = chunks(writer(tokenizer, include_usage=True), events(["a"]))
    assert all(chunk["usage"] is None for chunk in made)
    assert (
        last["choices"] == [] and last["usage"]["completion_tokens"] == 1 and last["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    )


def test_continuous_usage_is_in_every_chunk(tokenizer: Tokenizer) -> None:
    made = chunks(writer(tokenizer, continuous_usage=True), events(["a", "b"]))
    assert [chunk["usage"]["completion_tokens"] for chunk in made] == [0, 1, 2, 2]
    assert all(chunk["usage"]["prompt_tokens"] == 3 for chunk in made) and all(chunk["choices"] for chunk in made)


def test_each_prompt_counts_once_and_its_cached_tokens_are_the_fewest_of_its_choices(tokenizer: Tokenizer) -> None:
    made = writer(tokenizer, choices=4, n=2, chat=False)
    usage = whole(
        made, events(["a"], cached=0), events(["b"], cached=16), events(["c"], prompt=5, cached=32), events(["d"], prompt=5, cached=32)
    )
    assert usage["usage"] == {
        "prompt_tokens": 8, "completion_tokens": 4, "total_tokens": 12, "prompt_tokens_details": {"cached_tokens": 32},
    }  # fmt: skip
    assert [choice["index"] for choice in usage["choices"]] == [0, 1, 2, 3] and [choice["text"] for choice in usage["choices"]] == list(
        "abcd"
    )


def test_the_first_chunk_of_each_choice_has_the_role(tokenizer: Tokenizer) -> None:
    made = writer(tokenizer, choices=2)
    first, second = events(["a"]), events(["b"])
    mixed = [(0, first[0]), (1, second[0]), (1, second[1]), (0, first[1]), (0, first[2]), (1, second[2])]
    told = [chunk["choices"][0] for i, event in mixed for chunk in made.chunks(i, event)]
    assert [(choice["index"], choice["delta"].get("role")) for choice in told] == [
        (1, "assistant"), (1, None), (0, "assistant"), (0, None), (0, None), (1, None),
    ]  # fmt: skip


# Log-probabilities


def test_logprobs_of_a_chat_have_the_expected_format(tokenizer: Tokenizer) -> None:
    (choice,) = whole(writer(tokenizer, logprobs=2), events(["A"]))["choices"]
    b, a = {"token": "B", "logprob": -0.1, "bytes": [66]}, {"token": "A", "logprob": -0.5, "bytes": [65]}
    assert choice["logprobs"] == {"content": [a | {"top_logprobs": [b, a]}], "refusal": None}


def test_logprobs_of_a_completion_have_the_expected_format(tokenizer: Tokenizer) -> None:
    (choice,) = whole(writer(tokenizer, logprobs=2, chat=False), events(["A", "", "C"]))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["A", "B", "C"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"B": -0.1, "A": -0.5}, {"C": -0.1, "B": -0.5}, {"D": -0.1, "C": -0.5}],
        "text_offset": [0, 1, 1],
    }


def test_the_chosen_token_is_reported_even_without_top_logprobs(tokenizer: Tokenizer) -> None:
    (choice,) = whole(writer(tokenizer, logprobs=0, chat=False), events(["A"], top=False))["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"A": -0.5}]
    (choice,) = whole(writer(tokenizer, logprobs=0), events(["A"], top=False))["choices"]
    assert choice["logprobs"]["content"] == [{"token": "A", "logprob": -0.5, "bytes": [65], "top_logprobs": []}]


@pytest.mark.parametrize("chat", [True, False])
def test_logprobs_in_chunks_equal_those_of_the_whole_answer(tokenizer: Tokenizer, chat: bool) -> None:
    said = events(["A", "", "C"], "!")
    (choice,) = whole(writer(tokenizer, logprobs=2, chat=chat), said)["choices"]
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks(writer(tokenizer, logprobs=2, chat=chat), said)]
    for name, values in choice["logprobs"].items():
        if values is not None:
            assert [value for part in parts if part for value in part[name]] == values


def test_the_json_contains_no_infinity(tokenizer: Tokenizer) -> None:
    made = writer(tokenizer, logprobs=1)
    for logprob in (float("-inf"), float("nan"), None):
        (chunk,) = [chunk for chunk in made.chunks(0, TextPiece(0, Token(65, logprob, ((66, float("-inf")),)), "A"))][-1:]
        (entry,) = chunk["choices"][0]["logprobs"]["content"]
        assert entry["logprob"] == entry["top_logprobs"][0]["logprob"] == -9999.0
        json.dumps(chunk, allow_nan=False)


def test_tokens_are_shown_as_readable_text(tokenizer: Tokenizer) -> None:
    assert token_text(tokenizer, 65) == "A" and token_text(tokenizer, 256) == "<|eos|>"
    assert token_text(tokenizer, 0xC3) == "bytes:\\xc3" and token_text(tokenizer, 100_000) == ""


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text(max_size=3), min_size=1, max_size=6), st.text(max_size=2), st.booleans(), st.booleans())
def test_joined_chunks_equal_the_whole_answer(tmp_path_factory: Any, texts: list[str], rest: str, chat: bool, usage: bool) -> None:
    tokenizer = _tokenizer(tmp_path_factory)
    said = events(texts, rest)
    (choice,) = whole(writer(tokenizer, chat=chat), said)["choices"]
    text = choice["message"]["content"] if chat else choice["text"]
    made = [chunk for chunk in chunks(writer(tokenizer, chat=chat, include_usage=usage), said) if chunk["choices"]]
    told = [chunk["choices"][0] for chunk in made]
    assert "".join(part["delta"].get("content", "") if chat else part["text"] for part in told) == text == "".join(texts) + rest
    assert [part["finish_reason"] for part in told] == [None] * (len(told) - 1) + ["stop"]
    assert len(told) == len(texts) + bool(rest) + 1 + chat, "one chunk per token"


_MADE: dict[str, Tokenizer] = {}


def _tokenizer(folders: pytest.TempPathFactory) -> Tokenizer:
    if "toy" not in _MADE:
        _MADE["toy"] = toy_tokenizer(Path(folders.mktemp("toy")))
    return _MADE["toy"]


def scored(ids: list[int]) -> Scores:
    best = ((98, -0.25), (97, -1.5))
    return Scores(tuple(PromptToken(i, id_, -1.5 if i else None, 2 if i else 0, best if i else ()) for i, id_ in enumerate(ids)))


def echoing(tokenizer: Tokenizer, n: int, **more: Any) -> OpenAiWriter:
    ask = Ask(text="ab", sampling=AskSampling(logprobs=1), n=n)
    return OpenAiWriter(Asked((ask,), n, echoes=True, echoed_logprobs=1, **more), tokenizer, "r", "m", clock=lambda: 1.0)


def test_each_choice_begins_with_the_prompt_that_was_scored_once(tokenizer: Tokenizer) -> None:
    writer = echoing(tokenizer, 2, prompt_logprobs=0)
    for index in range(2):
        writer.take(index, Accepted("r", "m", 2, SamplingParams(2)))
    writer.take(0, scored([97, 98]))
    for index in range(2):
        writer.take(index, TextPiece(0, Token(99 + index, -1.0), "cd"[index]))
    choices = json.loads(b"".join(writer.whole()))["choices"]
    assert [choice["text"] for choice in choices] == ["abc", "abd"]
    for choice, said in zip(choices, "cd", strict=True):
        assert choice["prompt_logprobs"] == [None, {"98": {"logprob": -1.5, "rank": 2, "decoded_token": "b"}}]
        assert choice["logprobs"]["tokens"] == ["a", "b", said] and choice["logprobs"]["text_offset"] == [0, 1, 2]
        assert choice["logprobs"]["token_logprobs"] == [None, -1.5, -1.0]


def test_what_is_told_with_every_choice_counts_as_often(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The size of a whole answer is bounded, and each choice repeats the prompt and what is said of it."""
    for n in (1, 40):
        writer = echoing(tokenizer, n)
        for index in range(n):
            writer.take(index, Accepted("r", "m", 2, SamplingParams(2)))
        writer.take(0, scored([97, 98] * 10))
        size = len(b"".join(writer.whole()))
        monkeypatch.setattr("router.http.openai_out.MAX_WHOLE_BYTES", size // 3)
        with pytest.raises(HttpError, match="stream: must be true"):
            writer.take(0, TextPiece(0, Token(99, -1.0), "c"))
        monkeypatch.undo()


def test_the_seed_of_a_best_choice_is_the_one_that_made_it(tokenizer: Tokenizer) -> None:
    made = writer(tokenizer, 2, sampling=True)
    accepted, *said, finished = events(["a"])
    assert isinstance(accepted, Accepted) and isinstance(finished, Finished)
    for index, seed in enumerate((7, 5)):  # the third and the first of those that were computed
        made.take(index, accepted.of(index))
        request = replace(finished.request, params=replace(finished.request.params, seed=seed))
        for event in (*said, replace(finished, request=request)):
            made.take(index, event)
    assert [choice["sampling"]["seed"] for choice in json.loads(b"".join(made.whole()))["choices"]] == [7, 5]
