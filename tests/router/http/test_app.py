"""The routes of the HTTP door over a scripted service: answers, refusals, and that every outcome frees the request."""

import asyncio
import gzip
import json
import zlib
from collections.abc import AsyncGenerator, Callable, Iterable
from hashlib import sha256
from typing import Any

import pytest
from http_door import CHAT, COMPLETION, CONTEXT, HELLO, Call, House, Script, failing, settled, toy_tokenizer

from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.keys import ApiKeys, KeyEntry
from router.events import Event
from router.http.app import allow_origins
from router.http.openapi import document
from router.tokenizer import Tokenizer
from router.uncached import Uncached
from router.validate import Ask

STREAM = {**HELLO, "stream": True}
PROMPT = {"prompt": "hello"}
MIB = 1 << 20


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.fixture
def house(tokenizer: Tokenizer) -> House:
    return House(tokenizer)


# Answers


async def test_a_chat_is_answered(house: House) -> None:
    answer = await house.post(CHAT, {**HELLO, "model": "toy", "max_tokens": 5, "temperature": 0})
    assert answer.status == 200 and answer.headers["content-type"] == "application/json"
    assert answer.json["choices"][0]["message"]["content"] == "abc" and answer.json["choices"][0]["finish_reason"] == "length"
    assert answer.json["model"] == "toy" and answer.json["object"] == "chat.completion"
    (request,) = house.script.begun
    assert bytes(request.tokens[: request.prompt_len]) == b"user: hello\nassistant: " and request.params.max_tokens == 5
    assert answer.json["usage"]["prompt_tokens"] == request.prompt_len and answer.json["usage"]["completion_tokens"] == 3
    house.check()


async def test_a_chat_is_streamed_in_chunks(house: House) -> None:
    answer = await house.post(CHAT, {**STREAM, "stream_options": {"include_usage": True}})
    assert (
        answer.headers["cache-control"] == "no-cache"
        and answer.headers["x-accel-buffering"] == "no"
        and "content-length" not in answer.headers
    )
    *chunks, usage = answer.chunks
    assert [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks] == ["", "a", "b", "c", ""]
    assert usage["usage"]["completion_tokens"] == 3 and usage["choices"] == []
    house.check()


@pytest.mark.parametrize("prompt", ["hello", list(b"hello")])
async def test_a_completion_is_answered(house: House, prompt: Any) -> None:
    answer = await house.post(COMPLETION, {"prompt": prompt})
    assert answer.json["choices"] == [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "length"}]
    (request,) = house.script.begun
    assert request.tokens[:5] == list(b"hello") and request.params.max_tokens == 16


async def test_a_batch_of_completions_is_answered_in_order(house: House) -> None:
    answer = await house.post(COMPLETION, {"prompt": ["x", "yy", "zzz"], "n": 2, "seed": 5})
    assert [choice["index"] for choice in answer.json["choices"]] == list(range(6))
    assert answer.json["usage"]["prompt_tokens"] == 1 + 2 + 3 and answer.json["usage"]["completion_tokens"] == 6 * 3
    begun = sorted((request.prompt_len, request.params.seed) for request in house.script.begun)  # they are tokenized in parallel
    assert begun == [(length, seed) for length in (1, 2, 3) for seed in (5, 6)]
    house.check()


async def test_each_api_has_its_own_default_length(house: House) -> None:
    await house.post(CHAT)
    await house.post(COMPLETION, PROMPT)
    chat, completion = house.script.begun
    assert chat.longest == CONTEXT and completion.params.max_tokens == 16


async def test_the_usage_reports_cached_tokens(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, Script(cached=16))
    assert (await house.post(CHAT)).json["usage"]["prompt_tokens_details"] == {"cached_tokens": 16}


async def test_a_stop_string_ends_both_the_text_and_the_generation(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, Script(b"abcdef"))
    answer = await house.post(CHAT, {**STREAM, "stop": "cd"})
    told = [chunk["choices"][0] for chunk in answer.chunks]
    assert "".join(choice["delta"].get("content", "") for choice in told) == "ab" and told[-1]["finish_reason"] == "stop"
    assert house.script.said == 4
    house.check()


async def test_a_character_is_never_split(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, Script("aé🙂".encode()))
    answer = await house.post(CHAT, STREAM)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in answer.chunks] == ["", "a", "", "é", "", "", "", "🙂", None]


@pytest.mark.parametrize(
    ("path", "body"), [(CHAT, {**HELLO, "logprobs": True, "top_logprobs": 2}), (COMPLETION, {**PROMPT, "logprobs": 2})]
)
async def test_logprobs_are_returned(house: House, path: str, body: dict[str, Any]) -> None:
    (choice,) = (await house.post(path, body)).json["choices"]
    told = choice["logprobs"]
    if path == CHAT:
        assert [entry["token"] for entry in told["content"]] == ["a", "b", "c"] and len(told["content"][0]["top_logprobs"]) == 2
    else:
        assert told["tokens"] == ["a", "b", "c"] and told["text_offset"] == [0, 1, 2] and len(told["top_logprobs"][0]) == 2


async def test_no_choice_waits_for_another(tokenizer: Tokenizer) -> None:
    """The second choice is complete before the first has sent anything."""
    gate = asyncio.Event()
    house = House(tokenizer, Script(gate=gate, waits=lambda request: request.id.endswith("-0")))
    call = Call(house.door, "POST", CHAT, {**STREAM, "n": 2})
    task = asyncio.create_task(call.run())
    await settled(lambda: b'"finish_reason":"length"' in call.got)
    assert b'"index":0' not in call.got
    gate.set()
    answer = await task
    assert {chunk["choices"][0]["index"] for chunk in answer.chunks} == {0, 1}
    house.check()


async def test_the_first_token_is_sent_before_the_second_is_made(tokenizer: Tokenizer) -> None:
    gate = asyncio.Event()
    house = House(tokenizer, Script(gate=gate, gate_at=1))
    call = Call(house.door, "POST", COMPLETION, {**PROMPT, "stream": True})
    task = asyncio.create_task(call.run())
    await settled(lambda: b'"text":"a"' in call.got)
    assert house.script.said == 1
    gate.set()
    assert (await task).status == 200


@pytest.mark.parametrize(("how", "ids"), [({}, [256]), ({"parse_special": True}, [256]), ({"parse_special": False}, [*b"<|eos|>"])])
async def test_control_tokens_of_a_raw_prompt_are_read_unless_they_are_to_stay_text(
    house: House, how: dict[str, Any], ids: list[int]
) -> None:
    assert (await house.post("/tokenize", {"prompt": "a<|eos|>b", **how})).json["tokens"] == [97, *ids, 98]
    answer = await house.post(COMPLETION, {"prompt": "a<|eos|>b", **how})
    assert answer.json["usage"]["prompt_tokens"] == len(ids) + 2
    for path in (COMPLETION, "/tokenize"):
        assert (await house.post(path, {"prompt": "a", "add_special_tokens": False})).status == 200


async def test_control_tokens_of_a_chat_stay_text(house: House) -> None:
    chat = {"messages": [{"role": "user", "content": "a<|eos|>b"}]}
    for how in ({}, {"parse_special": False, "add_special_tokens": False}):
        tokens = (await house.post("/tokenize", {**chat, **how})).json["tokens"]
        assert b"a<|eos|>b" in bytes(token for token in tokens if token < 256)
    for name in ("parse_special", "add_special_tokens"):
        answer = await house.post("/tokenize", {**chat, name: True})
        assert (answer.status, answer.json["error"]["param"]) == (400, name)


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
async def test_the_answer_names_the_parameters_in_force_if_asked(house: House, path: str) -> None:
    body = {
        **(HELLO if path == CHAT else {"prompt": "hello"}),
        "seed": 7,
        "n": 2,
        "stop": ["x"],
        "stop_token_ids": [9, 3],
        "logit_bias": {"5": 1},
    }
    answer = await house.post(path, {**body, "return_sampling": True})
    told = [choice["sampling"] for choice in answer.json["choices"]]
    assert [one["seed"] for one in told] == [7, 8]
    assert {name: told[0][name] for name in ("temperature", "top_k", "stop", "stop_token_ids", "logit_bias")} == {
        "temperature": 1.0,
        "top_k": 0,
        "stop": ["x"],
        "stop_token_ids": [3, 9],
        "logit_bias": {"5": 1.0},
    }
    again = await house.post(path, {**body, **{name: value for name, value in told[0].items() if name not in ("logprobs", "top_a")}})
    assert again.json["choices"] and "sampling" not in again.json["choices"][0], "they can be sent back"
    stream = await house.post(path, {**body, "return_sampling": True, "stream": True})
    named = [choice for chunk in stream.chunks for choice in chunk["choices"] if "sampling" in choice]
    assert sorted(choice["index"] for choice in named) == [0, 1] and named[0]["sampling"] in told


async def test_tokenize_and_detokenize(house: House) -> None:
    answer = await house.post("/tokenize", {"prompt": "héllo"})
    assert answer.json == {"count": 6, "max_model_len": CONTEXT, "tokens": list("héllo".encode())}
    assert (await house.post("/detokenize", {"tokens": answer.json["tokens"]})).json == {"prompt": "héllo"}
    chat = await house.post("/tokenize", HELLO)
    assert bytes(chat.json["tokens"]) == b"user: hello\nassistant: "
    assert (await house.post("/detokenize", {"tokens": [1, 257]})).error["param"] == "tokens[1]"
    assert (await house.post("/tokenize", {"prompt": ""})).error["param"] == "prompt"
    assert (await house.post("/tokenize", {"prompt": "x", "model": "other"})).status == 404


async def test_the_served_model_is_listed_and_others_are_not_found(house: House) -> None:
    (model,) = (await house.get("/v1/models")).json["data"]
    assert (model["id"], model["object"], model["root"], model["max_model_len"]) == ("toy", "model", "toy", CONTEXT)
    assert (await house.get("/v1/models/toy")).json == model
    for name in ("other", "toy/../x", "a/b"):
        answer = await house.get(f"/v1/models/{name}")
        assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")


# Health


async def test_health_and_readiness_follow_the_cluster_and_liveness_does_not(house: House) -> None:
    assert (await house.get("/health")).status == (await house.get("/readyz")).status == (await house.get("/livez")).status == 200
    assert set((await house.get("/version")).json) == {"version"}
    house.serving = False
    for path in ("/health", "/readyz"):
        answer = await house.get(path)
        assert (answer.status, answer.error["code"]) == (503, "no_worker") and int(answer.headers["retry-after"]) >= 1
    assert (await house.get("/livez")).status == 200


async def test_a_draining_router_is_not_ready_and_refuses_requests(house: House) -> None:
    house.service.draining = True
    for answer in (await house.get("/readyz"), await house.post(CHAT), await house.post(CHAT, STREAM)):
        assert (answer.status, answer.error["code"]) == (503, "draining") and answer.headers["retry-after"]
    assert (await house.get("/livez")).status == 200


async def test_before_the_first_worker_requests_are_refused(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, workers=False, serving=False)
    assert (await house.get("/v1/models")).json["data"][0]["max_model_len"] is None
    answer = await house.post(CHAT)
    assert (answer.status, answer.error["code"]) == (503, "no_worker")


# Refusals


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"temperature": 1e400}, "temperature", "invalid_value"),
        ({"top_p": -1}, "top_p", "invalid_value"),
        ({"top_k": -2}, "top_k", "invalid_value"),
        ({"min_p": 1.5}, "min_p", "invalid_value"),
        ({"presence_penalty": 3}, "presence_penalty", "invalid_value"),
        ({"stop": ["a", ""]}, "stop[1]", "invalid_value"),
        ({"stop": ["x"] * 17}, "stop", "invalid_value"),
        ({"logit_bias": {"257": 1}}, "logit_bias[257]", "invalid_value"),
        ({"logit_bias": {"1": 101}}, "logit_bias[1]", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_tokens": CONTEXT}, "max_tokens", "context_length_exceeded"),
        ({"max_tokens": 5, "min_tokens": 6}, "min_tokens", "invalid_value"),
        ({"stop_token_ids": [257]}, "stop_token_ids[0]", "invalid_value"),
        ({"cache_salt": "x" * 257}, "cache_salt", "invalid_value"),
        ({"model": "other"}, "model", "model_not_found"),
        ({"tools": 1}, "tools", "invalid_value"),
        ({"colour": "red"}, "colour", "unknown_parameter"),
    ],
    ids=str,
)
async def test_the_error_for_a_bad_value_names_the_parameter(
    house: House, path: str, stream: bool, fields: Any, param: str, code: str
) -> None:
    """Requests for a stream get an HTTP error status too, and no request reaches a worker."""
    if path == COMPLETION and param == "tools":
        code = "unknown_parameter"
    body = json.dumps({**(HELLO if path == CHAT else PROMPT), "stream": stream, **fields}).replace("Infinity", "1e400")
    answer = await house.post(path, body.encode())
    assert answer.status == (404 if code == "model_not_found" else 400)
    assert (answer.error["param"], answer.error["code"]) == (param, code) and answer.headers["content-type"] == "application/json"
    assert not house.script.begun
    house.check()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content"),
        (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {**HELLO, "prompt_logprobs": 21}, "prompt_logprobs"),
        (CHAT, {**STREAM, "prompt_logprobs": 1}, "prompt_logprobs"),
        (COMPLETION, {**PROMPT, "echo": True, "stream": True}, "echo"),
        (COMPLETION, {**PROMPT, "echo": True, "logprobs": 21}, "logprobs"),
        (CHAT, {**HELLO, "logprobs": True, "logprobs_mode": "raw_logits"}, "logprobs_mode"),
        (CHAT, {**HELLO, "max_completion_tokens": 0}, "max_completion_tokens"),
        (CHAT, {**HELLO, "max_completion_tokens": CONTEXT}, "max_completion_tokens"),
        (CHAT, {"messages": HELLO["messages"] * 1001}, "messages"),
        (COMPLETION, {"prompt": ""}, "prompt"),
        (COMPLETION, {"prompt": "x" * (MIB + 1)}, "prompt"),
        (COMPLETION, {"prompt": "x" * CONTEXT}, "prompt"),
        (COMPLETION, {"prompt": [1, 257]}, "prompt[1]"),
        (COMPLETION, {"prompt": [1, -1]}, "prompt[1]"),
        (COMPLETION, {"prompt": ["a", ""]}, "prompt[1]"),
        (COMPLETION, {"prompt": [[1], [2, 257]]}, "prompt[1][1]"),
        (COMPLETION, {**PROMPT, "logprobs": 21}, "logprobs"),
    ],
    ids=lambda value: str(value)[:60],
)  # fmt: skip
async def test_the_error_for_a_bad_prompt_names_its_position(house: House, path: str, body: Any, param: str) -> None:
    answer = await house.post(path, body)
    assert (answer.status, answer.error["param"]) == (400, param) and answer.error["message"].startswith(param)
    house.check()


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"content-type": "text/plain"}, 415),
        ({"content-type": ""}, 415),
        ({"content-type": "application/json; charset=latin-1"}, 415),
        ({"content-type": "Application/JSON; Charset=UTF-8"}, 200),
        ({"content-encoding": "br"}, 415),
        ({"content-encoding": "gzip, gzip"}, 415),
        ({"content-encoding": "identity"}, 200),
        ({"content-encoding": ""}, 415),
        ({"content-length": "999999999"}, 413),
    ],
)
async def test_bodies_of_other_types_are_refused(house: House, headers: dict[str, str], status: int) -> None:
    answer = await house.post(CHAT, headers=headers)
    assert answer.status == status
    assert status == 200 or answer.error["code"] in ("unsupported_media_type", "request_entity_too_large")


def gzipped(data: bytes) -> bytes:
    return gzip.compress(data)


@pytest.mark.parametrize(("name", "pack"), [("gzip", gzipped), ("GZIP", gzipped), ("x-gzip", gzipped), ("deflate", zlib.compress)])
async def test_a_compressed_body_is_unpacked(house: House, name: str, pack: Callable[[bytes], bytes]) -> None:
    answer = await house.post(CHAT, pack(json.dumps(HELLO).encode()), headers={"content-encoding": name})
    assert answer.status == 200


async def test_a_compressed_body_is_bounded_where_it_is_unpacked(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, config=RouterConfig(max_message_bytes=1 << 16))
    body = json.dumps(HELLO).encode()
    for packed, status in (
        (gzipped(body.ljust(1 << 16)), 200),
        (gzipped(body.ljust((1 << 16) + 1)), 413),
        (gzipped(b"{" + b" " * (64 << 20)), 413),
        (gzipped(body)[:-1], 400),
        (gzipped(body) + b"x", 400),
        (body, 400),
    ):
        assert (await house.post(CHAT, packed, headers={"content-encoding": "gzip"})).status == status
    house.check()


async def test_the_actual_length_of_a_body_counts_and_not_the_announced_one(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, config=RouterConfig(max_message_bytes=1024))
    assert (await house.post(CHAT, b"{" + b" " * 1024 + b"}", headers={"content-length": "5"})).status == 413
    body = json.dumps(HELLO).encode()
    assert (await house.post(CHAT, body.ljust(1024))).status == 200


@pytest.mark.parametrize(
    "path, says",
    [
        ("/v1/embeddings", "/v1/chat/completions"),
        ("/embed", "/v1/chat/completions"),
        ("/v1/moderations", "/v1/chat/completions"),
        ("/v1/audio/transcriptions", "/v1/chat/completions"),
        ("/v1/images/generations", "/v1/chat/completions"),
        ("/v1/files", "messages"),
        ("/v1/batches/batch_1/cancel", "priority"),
        ("/v1/threads/t/runs", "keeps nothing"),
        ("/v1/assistants", "keeps nothing"),
        ("/v2/rerank", "/v1/chat/completions"),
        ("/v1/score", "/v1/chat/completions"),
        ("/v1/load_lora_adapter", "baton"),
        ("/inference/v1/abort_requests", "close the connection"),
        ("/api/chat", "/v1/chat/completions"),
        ("/v1/no-such", "/openapi.json"),
        ("/v1", "/openapi.json"),
        ("/" + "x" * 3000, "/openapi.json"),
    ],
)
async def test_what_is_not_served_says_what_is(house: House, path: str, says: str) -> None:
    """404 with every method: the SDK tries again after 501."""
    for answer in (await house.post(path), await house.get(path), await house.get(path, method="DELETE")):
        assert (answer.status, answer.error["code"]) == (404, "not_found")
        assert says in answer.error["message"] and path[:80] in answer.error["message"] and len(answer.error["message"]) < 300
    assert not house.script.begun


async def test_unknown_paths_and_methods_are_refused(house: House) -> None:
    assert (await house.get("/v1/embeddings")).error["code"] == "not_found"
    for method in ("GET", "OPTIONS", "PUT", "DELETE"):
        answer = await house.get(CHAT, method=method)
        assert (answer.status, answer.error["code"], answer.headers["allow"]) == (405, "method_not_allowed", "POST")
        assert not any(name.startswith("access-control") for name in answer.headers)
    assert (await house.get("/livez", method="HEAD")).status == 200


async def test_a_slash_at_the_end_of_a_path_changes_nothing(house: House) -> None:
    assert (await house.post(f"{CHAT}/", json.dumps(HELLO).encode())).status == 200
    assert (await house.get("/v1/models/")).status == 200 and (await house.get("/")).status == 404


async def test_metrics_are_shown_to_those_who_may_read_them(tokenizer: Tokenizer) -> None:
    asked: list[list[tuple[bytes, bytes]]] = []

    async def metrics(path: bytes, headers: Iterable[tuple[bytes, bytes]]) -> tuple[int, str, bytes]:
        asked.append(list(headers))
        return 403, "text/plain", b"no"

    house = House(tokenizer, metrics=metrics)
    bearer = {"authorization": "Bearer x"}
    assert (await house.get("/metrics", headers=bearer)).status == 403 and (b"authorization", b"Bearer x") in asked[0]
    assert (await House(tokenizer).get("/metrics")).status == 404
    for admin, status in ((False, 401), (True, 403)):
        keys = ApiKeys([KeyEntry("n", sha256(b"x").digest(), "t", admin=admin)])
        assert (await House(tokenizer, keys=keys, metrics=metrics).get("/metrics", headers=bearer)).status == status
    assert len(asked) == 2


@pytest.mark.parametrize(
    ("reason", "status", "retry"),
    [
        (Reason.SATURATED, 429, True),
        (Reason.NO_WORKER, 503, True),
        (Reason.RETRIES_SPENT, 503, True),
        (Reason.DEADLINE, 504, False),
        (Reason.INTERNAL, 500, False),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_token_sets_the_status(
    tokenizer: Tokenizer, reason: Reason, status: int, retry: bool, stream: bool
) -> None:
    house = House(tokenizer, failing(BatonError(reason, "so it is")))
    answer = await house.post(CHAT, {**HELLO, "stream": stream})
    message, _, spent = answer.error["message"].partition(": it ended in ")
    assert (answer.status, message) == (status, "so it is") and ("retry-after" in answer.headers) == retry
    assert bool(spent) == (reason is Reason.DEADLINE)
    house.check()


async def test_a_failure_after_the_first_token_is_the_last_event(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, failing(BatonError(Reason.RETRIES_SPENT, "no worker came back"), after=2))
    answer = await house.post(CHAT, STREAM)
    assert answer.status == 200
    *chunks, last = [json.loads(data) for data in answer.data]
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks) == "ab"
    assert last == {"error": {"message": "no worker came back", "type": "server_error", "param": None, "code": "retries_spent"}}
    whole = await house.post(CHAT)
    assert (whole.status, whole.error["code"]) == (503, "retries_spent"), "half an answer is not an answer"
    house.check()


async def test_the_failure_of_one_choice_ends_all_choices(tokenizer: Tokenizer) -> None:
    script = Script(
        b"a", error=BatonError(Reason.RETRIES_SPENT, "gone"), fails=lambda request: request.id.endswith("-1"), gate=asyncio.Event()
    )
    script.waits = lambda request: not request.id.endswith("-1")
    house = House(tokenizer, script)
    answer = await house.post(CHAT, {**STREAM, "n": 3})
    assert json.loads(answer.data[-1])["error"]["code"] == "retries_spent" and "[DONE]" not in answer.data
    house.check()


@pytest.mark.parametrize("after", [0, 2])
async def test_an_unexpected_error_is_reported_without_its_text(tokenizer: Tokenizer, after: int, caplog: pytest.LogCaptureFixture) -> None:
    house = House(tokenizer, Script(b"abc"[:after], error=ZeroDivisionError("a prompt")))
    answer = await house.post(CHAT, STREAM)
    assert answer.status == (200 if after else 500)
    told = json.loads(answer.data[-1]) if after else answer.json
    assert told["error"]["code"] == "internal" and "a prompt" not in answer.body.decode() and "ZeroDivisionError" in caplog.text
    house.check()


async def test_too_many_simultaneous_prompts_are_refused(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, Script(gate=asyncio.Event()), RouterConfig(max_inflight=2, max_queue=0))
    answer = await house.post("/v1/completions", {"prompt": ["a", "b", "c"]})
    assert (answer.status, answer.error["code"]) == (429, "overloaded") and answer.headers["retry-after"] == "1"
    house.check()


# Deadlines


async def test_a_deadline_ends_the_wait_in_the_queue(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, Script(gate=asyncio.Event()), RouterConfig(max_inflight=1))
    first = asyncio.create_task(house.post(CHAT))
    await settled(lambda: len(house.script.begun) == 1)
    answer = await house.post(CHAT, headers={"x-request-timeout-ms": "30"})
    assert (answer.status, answer.error["code"]) == (504, "deadline")
    house.script.gate.set()  # type: ignore[union-attr]
    assert (await first).status == 200
    house.check()


@pytest.mark.parametrize("timeout", ["", "-1", "1.5", "soon", "9" * 10])
async def test_the_error_for_an_invalid_timeout_names_the_header(house: House, timeout: str) -> None:
    answer = await house.post(CHAT, headers={"x-request-timeout-ms": timeout})
    assert (answer.status, answer.error["param"]) == (400, "x-request-timeout-ms")


async def test_a_body_that_does_not_arrive_times_out(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, config=RouterConfig(http_read_timeout_s=0.02))
    answer = await house.post(CHAT, unfinished=True)
    assert (answer.status, answer.error["code"], answer.headers["connection"]) == (408, "request_timeout", "close")


async def test_a_client_that_disconnects_in_the_middle_of_the_body_starts_no_request(house: House) -> None:
    call = Call(house.door, "POST", CHAT, HELLO, unfinished=True)
    task = asyncio.create_task(call.run())
    await asyncio.sleep(0)
    call.gone.set()
    await asyncio.wait_for(task, 30)
    assert not house.script.begun


# The client leaves


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_disconnects_before_the_first_token_frees_everything(tokenizer: Tokenizer, stream: bool, n: int) -> None:
    house = House(tokenizer, Script(gate=asyncio.Event()))
    call = Call(house.door, "POST", CHAT, {**HELLO, "stream": stream, "n": n})
    task = asyncio.create_task(call.run())
    await settled(lambda: len(house.script.begun) == n)
    call.gone.set()
    await asyncio.wait_for(task, 30)
    house.check()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("after", range(1, 6))
async def test_a_client_that_disconnects_in_the_middle_of_a_stream_frees_everything(tokenizer: Tokenizer, n: int, after: int) -> None:
    house = House(tokenizer, Script(b"x" * 1000))
    await asyncio.wait_for(house.post(CHAT, {**STREAM, "n": n}, leave_after=after), 5)
    assert house.script.said < 1000
    house.check()


async def test_a_client_that_disconnects_in_the_queue_frees_its_place(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, Script(gate=asyncio.Event()), RouterConfig(max_inflight=1))
    first = asyncio.create_task(house.post(CHAT))
    call = Call(house.door, "POST", CHAT, HELLO)
    second = asyncio.create_task(call.run())
    await settled(lambda: house.admission.queued == 1 and len(house.script.begun) == 1)
    call.gone.set()
    await asyncio.wait_for(second, 30)
    assert house.admission.queued == 0 and len(house.script.begun) == 1
    house.script.gate.set()  # type: ignore[union-attr]
    await first
    house.check()


@pytest.mark.parametrize("gate_at", [0, 2])
async def test_a_server_that_closes_reports_draining(tokenizer: Tokenizer, gate_at: int) -> None:
    house = House(tokenizer, Script(gate=asyncio.Event(), gate_at=gate_at))
    call = Call(house.door, "POST", CHAT, STREAM)
    task = asyncio.create_task(call.run())
    await settled(lambda: len(house.script.begun) == 1 and house.script.said == gate_at)
    await asyncio.sleep(0.01)
    task.cancel()
    answer = await task
    error = json.loads(answer.data[-1])["error"] if gate_at else answer.error
    assert error["code"] == "draining" and answer.status == (200 if gate_at else 503)
    house.check()


async def test_a_place_that_is_not_freed_is_detected(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""
    house = House(tokenizer)
    monkeypatch.setattr(house.admission, "leave", lambda request_id, now: [])
    await house.post(CHAT)
    with pytest.raises(AssertionError):
        house.check()


# Request ids, traces and tenants


async def test_a_valid_request_id_is_kept_and_others_are_replaced(house: House) -> None:
    answer = await house.post(CHAT, headers={"x-request-id": "my-id.1"})
    assert answer.headers["x-request-id"] == "my-id.1" and answer.json["id"] == "chatcmpl-my-id.1" and house.script.begun[0].id == "my-id.1"
    for bad in ("", "a b", "x" * 121, "a\rb", "é"):
        answer = await house.post(CHAT, headers={"x-request-id": bad})
        assert answer.headers["x-request-id"].startswith("req-") and answer.json["id"] == f"chatcmpl-{answer.headers['x-request-id']}"
    for answer in (await house.get("/livez"), await house.get("/nowhere"), await house.post(CHAT, {}), await house.post(CHAT, STREAM)):
        assert answer.headers["x-request-id"].startswith("req-")


async def test_the_traceparent_of_the_caller_is_passed_on(house: House, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Ask] = []
    generate = house.service.generate

    def note(ask: Ask, timeout_s: float | None) -> AsyncGenerator[Event, None]:
        asked.append(ask)
        return generate(ask, timeout_s)

    monkeypatch.setattr(house.service, "generate", note)
    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    await house.post(CHAT, headers={"traceparent": parent, "tracestate": "a=1,b=2"})
    await house.post(COMPLETION, {"prompt": ["x", "y"]}, headers={"traceparent": parent, "tracestate": "a=1"})
    await house.post(CHAT)
    assert [(ask.traceparent, ask.tracestate) for ask in asked] == [(parent, "a=1,b=2"), (parent, "a=1"), (parent, "a=1"), ("", "")]


def keys(**tenants: str) -> ApiKeys:
    return ApiKeys(KeyEntry(key, sha256(key.encode()).digest(), tenant) for key, tenant in tenants.items())


@pytest.mark.parametrize("path", [CHAT, COMPLETION, "/tokenize", "/detokenize", "/v1/models", "/v1/models/toy"])
async def test_without_a_required_key_nothing_is_answered(tokenizer: Tokenizer, path: str) -> None:
    house = House(tokenizer, keys=keys(k="shop"))
    method = "GET" if "models" in path else "POST"
    for headers in ({}, {"authorization": "Bearer wrong"}):
        answer = await Call(house.door, method, path, b"no JSON", headers).run()
        assert (answer.status, answer.error["code"], answer.headers["www-authenticate"]) == (401, "invalid_api_key", "Bearer")
    answer = await Call(house.door, method, path, b"no JSON", {"authorization": "Bearer k"}).run()
    assert answer.status == (200 if method == "GET" else 400)


async def test_probes_need_no_key(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, keys=keys(k="shop"))
    for path in ("/health", "/readyz", "/livez", "/version", "/openapi.json"):
        assert (await house.get(path)).status == 200


async def test_tenants_share_prefixes_only_if_configured(tokenizer: Tokenizer) -> None:
    async def salts(house: House) -> list[str]:
        for key, salt in (("a", ""), ("b", ""), ("c", ""), ("a", "s"), ("b", "s")):
            await house.post(CHAT, {**HELLO, "cache_salt": salt}, headers={"authorization": f"Bearer {key}"})
        return [request.salt for request in house.script.begun]

    one, other, colleague, one_salted, other_salted = await salts(House(tokenizer, keys=keys(a="one", b="other", c="one")))
    assert len({one, other, one_salted, other_salted}) == 4 and one == colleague
    shared = await salts(House(tokenizer, keys=keys(a="one", b="other", c="one"), shared_prefixes=True))
    assert shared == ["", "", "", "s", "s"]
    assert await salts(House(tokenizer)) == shared, "without keys there are no tenants"


async def test_no_salt_gives_access_to_the_prefixes_of_another_tenant(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, keys=keys(a="x", b="xy"))
    for key, salt in (("a", "y\0s"), ("b", "s"), ("a", "\0s"), ("a", "s")):
        await house.post(CHAT, {**HELLO, "cache_salt": salt}, headers={"authorization": f"Bearer {key}"})
    assert len({request.salt for request in house.script.begun}) == 4


# The OpenAPI document


async def test_the_openapi_document_has_every_route(house: House) -> None:
    told = (await house.get("/openapi.json")).json
    assert told == document()
    routes = {route.path.replace(":path", ""): route.methods for route in house.door._router.routes}  # type: ignore[attr-defined]
    del routes["/openapi.json"]
    assert {path: set(methods) for path, methods in told["paths"].items()} == {
        path: {method.lower() for method in methods} - {"head"} for path, methods in routes.items()
    }


# What public clients expect


async def test_a_context_overflow_is_reported_in_the_words_that_clients_search_for(house: House) -> None:
    """LiteLLM searches for this text, in lower case, to decide whether to try a model with a longer context."""
    for path, body in ((CHAT, {**HELLO, "max_tokens": CONTEXT}), (COMPLETION, {"prompt": "x" * CONTEXT})):
        error = (await house.post(path, body)).error
        assert error["code"] == "context_length_exceeded"
        assert f"this model's maximum context length is {CONTEXT} tokens" in error["message"].lower()


async def test_the_error_for_a_value_out_of_range_contains_the_whole_range(house: House) -> None:
    error = (await house.post(CHAT, {**HELLO, "top_k": 1 << 31})).error
    assert error["message"] == "top_k: must be at least -1 and at most 2147483647"


async def test_a_message_may_have_a_name(house: House) -> None:
    assert (await house.post(CHAT, {"messages": [{**HELLO["messages"][0], "name": "Ida"}]})).status == 200
    error = (await house.post(CHAT, {"messages": [{**HELLO["messages"][0], "name": "x" * 257}]})).error
    assert error["param"] == "messages[0].name"


# Web pages of other origins


@pytest.mark.parametrize(
    ("origins", "origin", "allowed"),
    [
        ((), "https://a.example", None),
        (("https://a.example",), "https://a.example", "https://a.example"),
        (("https://a.example",), "https://b.example", None),
        (("*",), "https://b.example", "*"),
    ],
)
async def test_only_pages_of_listed_origins_may_read_an_answer(
    tokenizer: Tokenizer, origins: tuple[str, ...], origin: str, allowed: str | None
) -> None:
    house = House(tokenizer)
    app = allow_origins(house.door, origins)
    headers = {"origin": origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    preflight = await Call(app, "OPTIONS", CHAT, b"", headers=headers).run()
    assert (preflight.status == 200) == (allowed is not None)
    answer = await Call(app, "POST", CHAT, HELLO, headers={"origin": origin}).run()
    assert answer.status == 200, "the browser, not the server, withholds the answer from the page"
    assert answer.headers.get("access-control-allow-origin") == allowed
    if allowed:
        assert preflight.headers["access-control-allow-headers"] == "authorization,content-type"
        assert answer.headers["access-control-expose-headers"] == "x-request-id, request-id, retry-after, x-baton-degraded"
    assert "access-control-allow-credentials" not in answer.headers


# Why a prompt was not cached


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_asks_is_told_why_its_prompt_was_not_cached(house: House, stream: bool) -> None:
    found = Uncached(64, 96, (("busy", 32), ("changed", 16), ("partial", 3)), "p1", 8, 0)
    house.script.uncached = found
    body = {**HELLO, "stream": stream, "stream_options": {"include_usage": True}} if stream else HELLO
    silent, told = await house.post(CHAT, body), await house.post(CHAT, body, headers={"x-baton-explain": "cache"})
    details = [(one.chunks[-1] if stream else one.json)["usage"]["prompt_tokens_details"] for one in (silent, told)]
    assert "uncached_tokens" not in details[0]
    causes = {"busy": 32, "changed": 16, "partial": 3}
    more = {"promised_tokens": 64, "reachable_tokens": 96, "uncached_tokens": causes, "changed_at": 8, "changed_message": 0}
    assert details[1] == details[0] | more
    several = await house.post(CHAT, {**body, "n": 3}, headers={"x-baton-explain": "cache"})
    usage = (several.chunks[-1] if stream else several.json)["usage"]
    assert usage["prompt_tokens_details"] == details[0] | more, "the prompt counts once, also where it was computed for each"
    refused = await house.post(CHAT, body, headers={"x-baton-explain": "everything"})
    assert refused.status == 400 and refused.error["param"] == "x-baton-explain"
    house.check()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "hello", "store": False}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 5}),
    ],
)
async def test_other_apis_tell_it_in_their_usage(house: House, path: str, body: dict[str, Any]) -> None:
    house.script.uncached = Uncached(0, 0, (("new", 16), ("partial", 3)))
    told = (await house.post(path, body, headers={"x-baton-explain": "cache"})).json["usage"]["input_tokens_details"]
    assert told["uncached_tokens"] == {"new": 16, "partial": 3}
    house.check()
