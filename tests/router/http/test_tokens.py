"""vLLM's endpoints for token ids: what a chat is rendered to, and what continues it."""

import json
from pathlib import Path
from typing import Any

import pytest
from http_door import CHAT, HELLO, House, Script, toy_tokenizer

from router.tools.families import BY_NAME
from router.tools.forms import Forms
from router.tools.thinking import THINK

GENERATE, RENDER = "/inference/v1/generate", "/v1/chat/completions/render"
IDS: dict[str, Any] = {"token_ids": [*b"hello"], "sampling_params": {"max_tokens": 9}}
EOS = 256


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy")
    toy_tokenizer(path)
    return path


def house(folder: Path, ids: Any = b"abc", finish: Any = "stop", forms: Forms | None = None, **options: Any) -> House:
    return House(toy_tokenizer(folder), Script(ids, finish, **options), forms=forms or Forms(), path=folder)


def how(**given: Any) -> dict[str, Any]:
    return IDS | {"sampling_params": IDS["sampling_params"] | given}


async def test_token_ids_are_continued_by_token_ids(folder: Path) -> None:
    made = house(folder, [*b"abc", EOS])
    told = (await made.post(GENERATE, IDS | {"request_id": "mine-1", "cache_salt": "s", "priority": 3})).json
    assert told["request_id"] == "mine-1" and told["output_mode"] == "tokens" and "prompt_token_ids" not in told
    assert told["choices"] == [{"index": 0, "token_ids": [*b"abc", EOS], "logprobs": None, "finish_reason": "stop", "stop_reason": None}]
    assert told["usage"]["prompt_tokens"] == 5 and told["usage"]["completion_tokens"] == 4
    (request,) = made.script.begun
    assert (request.id, request.tokens[:5], request.salt, request.priority) == ("mine-1", [*b"hello"], "s", 3)
    assert request.params.max_tokens == 9
    again = house(folder, [*b"abc", EOS])
    told = (await again.post(GENERATE, IDS | {"sampling_params": {}, "output_mode": "text", "return_token_ids": True})).json
    assert told["choices"][0]["text"] == "abc" and told["prompt_token_ids"] == [*b"hello"] and told["output_mode"] == "text"
    assert again.script.begun[0].params.max_tokens == 4096 - 5, "the rest of the context, as at vLLM"


@pytest.mark.parametrize("mode", ["tokens", "text"])
async def test_the_stream_equals_the_whole_answer(folder: Path, mode: str) -> None:
    body = how(n=2, logprobs=2, stop=["c"]) | {"output_mode": mode, "return_token_ids": True}
    whole = (await house(folder, b"abcd").post(GENERATE, body)).json
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = (await house(folder, b"abcd").post(GENERATE, body | {"stream": True, "stream_options": options})).chunks
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [[*b"hello"], *[None] * (len(chunks) - 1)]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"] and chunks[0]["usage"]["completion_tokens"] > 0
    for choice in whole["choices"]:
        mine = [one for chunk in chunks for one in chunk["choices"] if one["index"] == choice["index"]]
        assert [id_ for one in mine for id_ in one["token_ids"]] == choice["token_ids"] == [*b"abc"]
        assert [entry for one in mine if one["logprobs"] for entry in one["logprobs"]["content"]] == choice["logprobs"]["content"]
        assert (mine[-1]["finish_reason"], mine[-1]["stop_reason"]) == (choice["finish_reason"], choice["stop_reason"]) == ("stop", "c")
        assert all(one["finish_reason"] is None for one in mine[:-1])
        assert ("text" in choice) == (mode == "text") and choice.get("text") == ("".join(one.get("text", "") for one in mine) or None)


async def test_log_probabilities_name_tokens_by_their_ids(folder: Path) -> None:
    told = (await house(folder, b"a").post(GENERATE, how(logprobs=2))).json["choices"][0]["logprobs"]["content"]
    first = {"token_id": 97, "logprob": -0.5, "rank": 1}
    assert told == [first | {"top_logprobs": [first, {"token_id": 98, "logprob": -1.5, "rank": 2}]}]
    alone = (await house(folder, b"a").post(GENERATE, how(logprobs=0))).json["choices"][0]["logprobs"]["content"]
    assert alone[0]["rank"] is None and len(alone[0]["top_logprobs"]) == 1
    text = (await house(folder, b"a").post(GENERATE, how(logprobs=1) | {"output_mode": "text"})).json
    assert text["choices"][0]["logprobs"]["content"][0]["token"] == "a"


async def test_the_token_that_stopped_an_output_is_told(folder: Path) -> None:
    told = (await house(folder, b"ab").post(GENERATE, how(stop_token_ids=[98]))).json["choices"][0]
    assert (told["finish_reason"], told["stop_reason"], told["token_ids"]) == ("stop", 98, [97, 98])


@pytest.mark.parametrize(
    "chat, forms",
    [
        ({"temperature": 0.5, "seed": 9, "stop": "x", "logit_bias": {"5": 1.5}, "n": 2, "logprobs": True, "top_logprobs": 2}, Forms()),
        ({"guided_regex": "a+", "min_tokens": 2, "priority": 4, "cache_salt": "c", "max_tokens": 7, "stream": True}, Forms()),
        ({"guided_json": {"type": "object"}, "max_thinking_tokens": 4, "seed": 3}, Forms(thinking=THINK)),
        ({"max_thinking_tokens": 0, "ignore_eos": True, "seed": 3}, Forms(thinking=THINK)),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required", "seed": 1},
            Forms(BY_NAME["hermes"], THINK),
        ),
    ],
)
async def test_a_rendered_chat_is_computed_as_the_chat_would_have_been(folder: Path, chat: dict[str, Any], forms: Forms) -> None:
    asked = HELLO | chat
    first, second = house(folder, b"", forms=forms), house(folder, b"", forms=forms)
    body = (await first.post(RENDER, asked)).json
    assert not first.script.begun, "nothing is computed"
    await first.post(CHAT, asked)
    answer = await second.post(GENERATE, body)
    assert answer.status == 200, answer.json
    assert len(first.script.begun) == len(second.script.begun) == chat.get("n", 1)
    begun = (sorted(each.script.begun, key=lambda request: request.params.seed) for each in (first, second))  # choices begin in any order
    for one, other in zip(*begun, strict=True):
        assert (one.tokens, one.params, one.salt, one.priority) == (other.tokens, other.params, other.salt, other.priority)
    assert answer.headers["content-type"].startswith("text/event-stream" if chat.get("stream") else "application/json")


@pytest.mark.parametrize("more", [{"prompt_logprobs": 1}, {"use_beam_search": True, "n": 2}])
async def test_what_the_rendered_body_cannot_ask_for_is_not_rendered(folder: Path, more: dict[str, Any]) -> None:
    answer = await house(folder, b"").post(RENDER, HELLO | more)
    assert (answer.status, answer.json["error"]["param"]) == (400, next(iter(more))), answer.json


@pytest.mark.parametrize(
    "body, param",
    [
        ({}, "token_ids"),
        ({"token_ids": [1]}, "sampling_params"),
        (IDS | {"token_ids": []}, "token_ids"),
        (IDS | {"token_ids": [1, -1]}, "token_ids[1]"),
        (IDS | {"token_ids": [1, 400]}, "token_ids[1]"),
        (IDS | {"token_ids": ["a"]}, "token_ids"),
        (IDS | {"features": {"mm_hashes": {}}}, "features"),
        (IDS | {"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params"),
        (IDS | {"no_such": 1}, "no_such"),
        (IDS | {"request_id": "a b"}, "request_id"),
        (IDS | {"output_mode": "sound"}, "output_mode"),
        (IDS | {"stream_options": {"include_usage": True}}, "stream_options"),
        (how(temperature="1"), "sampling_params.temperature"),
        (how(temperature=-1), "sampling_params.temperature"),
        (how(no_such=1), "sampling_params.no_such"),
        (how(allowed_token_ids=[1]), "sampling_params.allowed_token_ids"),
        (how(prompt_logprobs=1), "sampling_params.prompt_logprobs"),
        (how(logprobs=21), "sampling_params.logprobs"),
        (how(min_tokens=10), "sampling_params.min_tokens"),
        (how(structured_outputs={"json": 1, "regex": "a"}), "sampling_params.structured_outputs"),
        (how(structured_outputs={"regex": "(a"}), "sampling_params.structured_outputs"),
        (how(structured_outputs={"poem": "x"}), "sampling_params.structured_outputs.poem"),
        (how(structured_outputs={"regex": "a"}) | {"reasoning_ended": False}, "reasoning_ended"),
        (how(thinking_token_budget=10), "sampling_params.thinking_token_budget"),
        (how(thinking_token_budget=-1), "sampling_params.thinking_token_budget"),
        (how(thinking_token_budget=3), "sampling_params.thinking_token_budget"),  # this model does not think
        (how(n=0), "sampling_params.n"),
    ],
)
async def test_what_is_refused_is_named_by_its_path(folder: Path, body: dict[str, Any], param: str) -> None:
    made = house(folder)
    answer = await made.post(GENERATE, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.json
    assert param.partition("[")[0] in answer.json["error"]["message"] and not made.script.begun


async def test_a_failure_is_the_last_event_of_the_stream(folder: Path) -> None:
    made = house(folder, b"abc", error=RuntimeError("broken"))
    answer = await made.post(GENERATE, IDS | {"stream": True})
    assert "error" in json.loads(answer.body.decode().strip().split("data: ")[-1]) and b"[DONE]" not in answer.body
