"""The HTTP door of a whole cluster, driven by the unmodified `openai` package, another public client, misbehaving sockets and a fuzzer.
Every token is checked against the oracle."""

import asyncio
import itertools
import json
import os
import random
import re
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import anthropic
import httpx2
import openai
import psutil
import pytest
import schemathesis
from huggingface_hub import InferenceClient
from hypothesis import HealthCheck, given, settings
from live_cluster import Cluster, cluster, toy, toy_output
from schemathesis.generation import GenerationMode

from baton.client import Client, GenerateError

pytestmark = pytest.mark.system
CONTEXT = 1024
HELLO: list[Any] = [{"role": "user", "content": "hello, how are you today?"}]
PROMPT = b"user: hello, how are you today?\nassistant: "
EXACT: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
LONG_ASK: dict[str, Any] = {"model": "toy", "prompt": "x", "max_tokens": 900, "extra_body": {"ignore_eos": True}}
KEYS = {"key-a": "one", "key-b": "other", "key-c": "few requests=3", "key-d": "few"}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(toy(tmp_path_factory.mktemp("models") / "toy", context=CONTEXT, step_delay_ms=2)) as running:
        yield running


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with a short context and a short read timeout that requires an API key."""
    folder = tmp_path_factory.mktemp("small")
    lines = [f"{key} {sha256(key.encode()).hexdigest()} {tenant}\n" for key, tenant in KEYS.items()]
    (folder / "keys").write_text("".join(lines))
    flags = ("--security.api-keys", str(folder / "keys"), "--router.http-read-timeout-s", "2")
    with cluster(toy(folder / "toy", context=128), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(live: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{live.http}/v1", api_key="none", max_retries=0) as made:
        yield made


def text_of(ids: list[int]) -> str:
    """Token 256 ends the text and has no text itself."""
    return bytes(id_ for id_ in ids if id_ < 256).decode(errors="replace")


def said(prompt: bytes = PROMPT, **params: Any) -> str:
    return text_of(toy_output(list(prompt), **{"max_tokens": 24, **params}))


# The openai package


def test_chat_returns_an_answer(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="toy", messages=HELLO, **EXACT)
    (choice,) = answer.choices
    assert choice.message.content == said() and choice.message.role == "assistant" and choice.finish_reason == "length"
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(PROMPT), 24)
    again = client.chat.completions.create(model="toy", messages=HELLO, **EXACT)
    assert again.usage and again.usage.prompt_tokens_details and again.usage.prompt_tokens_details.cached_tokens
    assert again.choices[0].message.content == choice.message.content


def test_chat_streams_chunks(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(model="toy", messages=HELLO, stream=True, stream_options={"include_usage": True}, **EXACT)
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == said()
    assert chunks[0].choices[0].delta.role == "assistant" and [c.choices[0].finish_reason for c in chunks[-2:]] == [None, "length"]
    assert not last.choices and last.usage and last.usage.completion_tokens == 24
    assert len({chunk.id for chunk in chunks}) == 1


async def test_chat_works_with_the_async_client(live: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"http://{live.http}/v1", api_key="none", max_retries=0) as made:

        async def one(seed: int) -> str:
            stream = await made.chat.completions.create(
                model="toy", messages=HELLO, stream=True, seed=seed, max_tokens=24, extra_body={"ignore_eos": True}
            )
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        answers = await asyncio.gather(*(one(seed) for seed in range(20)))
    assert answers == [said(temperature=1.0, seed=seed) for seed in range(20)]
    await live.quiet()


def test_each_choice_has_its_own_seed(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "toy", "max_tokens": 24, "extra_body": {"ignore_eos": True}, "seed": 7, "n": 4}
    answer = client.completions.create(prompt="some prompt of a few tokens", **options)
    want = [said(b"some prompt of a few tokens", temperature=1.0, seed=7 + i) for i in range(4)]
    assert [choice.text for choice in answer.choices] == want and len(set(want)) == 4
    assert answer.usage and (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (27, 4 * 24)
    got = [""] * 4
    for chunk in client.completions.create(prompt="some prompt of a few tokens", stream=True, **options):
        got[chunk.choices[0].index] += chunk.choices[0].text
    assert got == want


@pytest.mark.parametrize("prompt", ["some prompt", list(b"some prompt")])
def test_a_completion_may_begin_with_its_prompt_and_what_the_model_says_of_it(client: openai.OpenAI, prompt: Any) -> None:
    asked: dict[str, Any] = {"model": "toy", "prompt": prompt, "n": 2, "echo": True, "temperature": 0, "max_tokens": 5}
    more = {"ignore_eos": True}
    plain = client.completions.create(**asked, extra_body=more)
    want = "some prompt" + said(b"some prompt", max_tokens=5)
    assert [choice.text for choice in plain.choices] == [want] * 2 and plain.choices[0].logprobs is None
    told = client.completions.create(**asked, logprobs=2, extra_body=more | {"prompt_logprobs": 1})
    for choice in told.choices:
        logprobs, scores = choice.logprobs, (choice.model_extra or {})["prompt_logprobs"]
        assert choice.text == want and logprobs and logprobs.tokens and logprobs.text_offset and logprobs.token_logprobs
        assert logprobs.tokens[:11] == list("some prompt") and len(logprobs.tokens) == 16 and logprobs.text_offset[:12] == list(range(12))
        assert logprobs.token_logprobs[0] is None and set(logprobs.token_logprobs[1:11]) <= {0.0, -9999.0}
        assert len(scores) == 11 and scores[0] is None and scores[1][str(ord("o"))]["decoded_token"] == "o"
        assert all(each[str(id_)]["rank"] in (1, 2) for each, id_ in zip(scores[1:], b"ome prompt", strict=True))


def test_a_chat_is_told_what_the_model_says_of_its_prompt(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="toy", messages=HELLO, **EXACT | {"extra_body": {"ignore_eos": True, "prompt_logprobs": 0}}
    )
    assert len((answer.model_extra or {})["prompt_logprobs"]) == len(PROMPT) and answer.choices[0].message.content == said()


@pytest.mark.parametrize("prompt", ["one prompt", ["one prompt", "another one"], [1, 2, 3], [[1, 2, 3], [4, 5]]])
def test_completions_accept_every_kind_of_prompt(client: openai.OpenAI, prompt: Any) -> None:
    several = prompt if isinstance(prompt[0], (list, str)) and isinstance(prompt, list) else [prompt]
    ids = [list(one.encode()) if isinstance(one, str) else one for one in several]
    answer = client.completions.create(model="toy", prompt=prompt, **EXACT)
    assert [choice.text for choice in answer.choices] == [text_of(toy_output(one, max_tokens=24)) for one in ids]
    assert answer.usage and answer.usage.prompt_tokens == sum(map(len, ids))


def test_logprobs_match_the_tokens(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model="toy", messages=HELLO, logprobs=True, top_logprobs=1, **EXACT)
    entries = chat.choices[0].logprobs.content
    assert entries and len(entries) == 24 and all(entry.top_logprobs[0].token == entry.token for entry in entries)
    ids = toy_output(list(PROMPT), max_tokens=24)
    assert [entry.bytes for entry in entries] == [[id_] if id_ < 256 else None for id_ in ids]
    legacy = client.completions.create(model="toy", prompt=PROMPT.decode(), logprobs=1, **EXACT).choices[0].logprobs
    assert legacy and legacy.tokens == [entry.token for entry in entries] and legacy.token_logprobs == [0.0] * 24


def test_a_stop_string_ends_the_output(client: openai.OpenAI) -> None:
    whole = said()
    stop = next(whole[i : i + 2] for i in range(8, 20) if "\ufffd" not in whole[i : i + 2] and whole.index(whole[i : i + 2]) == i)
    answer = client.chat.completions.create(model="toy", messages=HELLO, stop=[stop], **EXACT)
    assert answer.choices[0].message.content == whole[: whole.index(stop)] and answer.choices[0].finish_reason == "stop"


def test_models_are_listed_and_request_ids_returned(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "toy" and model.model_extra and model.model_extra["max_model_len"] == CONTEXT
    assert client.models.retrieve("toy") == model
    raw = client.chat.completions.with_raw_response.create(model="toy", messages=HELLO, extra_headers={"x-request-id": "mine"}, **EXACT)
    assert raw.headers["x-request-id"] == "mine" and raw.parse().id == "chatcmpl-mine"


@pytest.mark.parametrize(
    ("change", "kind", "param", "code"),
    [
        ({"model": "other"}, openai.NotFoundError, "model", "model_not_found"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", "invalid_value"),
        ({"max_tokens": CONTEXT}, openai.BadRequestError, "max_tokens", "context_length_exceeded"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, openai.BadRequestError, "tools[0].function.name", "invalid_value"),
        ({"response_format": {"type": "xml"}}, openai.BadRequestError, "response_format", "invalid_value"),
        ({"extra_body": {"guided_json": {"not": {}}}}, openai.BadRequestError, "guided_json", "invalid_value"),
        ({"extra_body": {"guided_yaml": {}}}, openai.BadRequestError, "guided_yaml", "unknown_parameter"),
        ({"messages": [{"role": "user", "content": "x" * 2000}]}, openai.BadRequestError, "messages", "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_raise_the_exceptions_of_the_package(
    client: openai.OpenAI, change: dict[str, Any], kind: type[openai.APIStatusError], param: str, code: str, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        client.chat.completions.create(**{"model": "toy", "messages": HELLO, "stream": stream, **EXACT, **change})
    assert (caught.value.param, caught.value.code) == (param, code) and caught.value.request_id


def test_a_client_that_times_out_frees_everything(live: Cluster, client: openai.OpenAI) -> None:
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.3).completions.create(**LONG_ASK)
    asyncio.run(live.quiet())


def test_a_server_deadline_is_reported(client: openai.OpenAI) -> None:
    headers = {"x-request-timeout-ms": "200"}
    with pytest.raises(openai.InternalServerError) as caught:
        client.completions.create(**LONG_ASK, extra_headers=headers)
    assert (caught.value.status_code, caught.value.code) == (504, "deadline")
    with pytest.raises(openai.APIError) as broken:
        list(client.completions.create(**LONG_ASK, extra_headers=headers | {"x-request-timeout-ms": "1000"}, stream=True))
    assert broken.value.code == "deadline"


def test_another_public_client_works(live: Cluster) -> None:
    other = InferenceClient(base_url=f"http://{live.http}/v1", api_key="none")
    options: dict[str, Any] = {"model": "toy", "temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    answer = other.chat_completion(HELLO, logprobs=True, top_logprobs=1, **options)
    assert answer.choices[0].message.content == said() and answer.usage.completion_tokens == 24
    options["stream_options"] = {"include_usage": True}
    stream = other.chat_completion(HELLO, stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices) == said()


def test_the_anthropic_package_gets_the_same_answer(live: Cluster, client: openai.OpenAI) -> None:
    want = client.chat.completions.create(model="toy", messages=HELLO, temperature=0, max_tokens=24).choices[0]
    with anthropic.Anthropic(base_url=f"http://{live.http}", api_key="none", max_retries=0) as sdk:
        asked: dict[str, Any] = {"model": "toy", "messages": HELLO, "max_tokens": 24, "extra_body": {"temperature": 0}}
        whole = sdk.messages.create(**asked)
        with sdk.messages.stream(**asked) as stream:
            final = stream.get_final_message()
        assert sdk.messages.count_tokens(model="toy", messages=HELLO).input_tokens == len(PROMPT)
    answers: list[Any] = [whole, final]
    for answer in answers:
        assert [block.text for block in answer.content] == [want.message.content]
        assert answer.stop_reason == {"length": "max_tokens", "stop": "end_turn"}[want.finish_reason]
        assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == len(PROMPT)


def test_http_and_grpc_return_the_same_text(live: Cluster, client: openai.OpenAI) -> None:
    with Client(live.grpc) as grpc_client, grpc_client.generate("a prompt", max_tokens=24, seed=5, ignore_eos=True) as stream:
        want = "".join(stream.texts())
    assert (
        client.completions.create(model="toy", prompt="a prompt", max_tokens=24, seed=5, extra_body={"ignore_eos": True}).choices[0].text
        == want
    )


def test_status_and_log_name_the_http_address(live: Cluster) -> None:
    told = json.loads(live.here("status", "--json", "--name", live.name).stdout)["endpoints"]
    assert told["http"] == live.http
    log = (live.logs.parent / f"{live.name}-up.log").read_text()
    (url, body) = re.search(r"curl (\S+) -H 'content-type: application/json' -d '(.*)'", log).groups()  # type: ignore[union-attr]
    answer = httpx2.post(url, content=body, headers={"content-type": "application/json"}, timeout=60)
    assert url == f"http://{live.http}/v1/chat/completions" and answer.json()["choices"][0]["message"]["content"]
    for path in ("health", "readyz", "livez", "version", "openapi.json"):
        assert httpx2.get(f"http://{live.http}/{path}").status_code == 200


# Misbehaving sockets


def connect(live: Cluster) -> socket.socket:
    host, port = live.http.rsplit(":", 1)
    return socket.create_connection((host, int(port)), timeout=30)


def post(body: dict[str, Any], path: str = "/v1/completions") -> bytes:
    data = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data


LONG = {"prompt": "x" * 50, "max_tokens": 900, "ignore_eos": True, "stream": True}


def inflight(live: Cluster) -> int:
    return int(live.status()["router"]["inflight"])


@pytest.mark.parametrize("reset", [False, True])
async def test_a_socket_dropped_during_a_stream_frees_everything(live: Cluster, reset: bool) -> None:
    dropped = [connect(live) for _ in range(8)]
    for sock in dropped:
        sock.sendall(post({**LONG, "n": 2}))
    for sock in dropped:
        assert sock.recv(200).startswith(b"HTTP/1.1 200")
    assert inflight(live) == 8, "two choices are one request"
    for sock in dropped:
        if reset:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        sock.close()
    await live.quiet()


async def test_an_incomplete_body_frees_everything(live: Cluster) -> None:
    halves = [connect(live) for _ in range(8)]
    for sock in halves:
        sock.sendall(post(LONG)[:-20])
    assert inflight(live) == 0
    for sock in halves:
        sock.close()
    await live.quiet()


async def test_a_client_that_stops_reading_does_not_disturb_others(live: Cluster, client: openai.OpenAI) -> None:
    stopped = connect(live)
    stopped.sendall(post(LONG))
    answer = await asyncio.to_thread(lambda: client.chat.completions.create(model="toy", messages=HELLO, **EXACT))
    assert answer.choices[0].message.content == said()
    stopped.close()
    await live.quiet()


def test_many_idle_connections_cost_little_and_do_not_disturb_others(live: Cluster, client: openai.OpenAI) -> None:
    router = psutil.Process(live.status()["router"]["pid"])
    before = router.num_fds(), router.memory_info().rss
    idle = [connect(live) for _ in range(1000)]
    live.wait(lambda: router.num_fds() > 1000)
    assert client.chat.completions.create(model="toy", messages=HELLO, **EXACT).choices[0].message.content == said()
    assert router.memory_info().rss - before[1] < 64 << 20
    for sock in idle:
        sock.close()
    live.wait(lambda: router.num_fds() < before[0] + 20)


# Keys and tenants


def complete(small: Cluster, key: str | None, prompt: str, **fields: Any) -> httpx2.Response:
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **fields}
    return httpx2.post(f"http://{small.http}/v1/completions", json=body, headers=headers, timeout=60)


def cached(response: httpx2.Response) -> int:
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_requests_without_a_valid_key_are_refused(small: Cluster) -> None:
    assert complete(small, None, "x").status_code == complete(small, "key-z", "x").status_code == 401
    assert complete(small, "key-a", "x").status_code == 200
    for key in (None, "key-z", "key-a"):
        with Client(small.grpc, api_key=key) as grpc_client, grpc_client.generate("x", max_tokens=2) as stream:
            if key == "key-a":
                assert len(list(stream)) == 2
            else:
                with pytest.raises(GenerateError) as caught:
                    list(stream)
                assert caught.value.reason == "UNAUTHENTICATED"
    asked = small.here("generate", "x", "--max-tokens", "2", "--name", small.name)
    assert asked.returncode == 1 and "API key" in asked.stderr
    small.env["BATON_API_KEY"] = "key-b"
    assert small.here("generate", "x", "--max-tokens", "2", "--name", small.name).returncode == 0
    del small.env["BATON_API_KEY"]


def test_tenants_do_not_share_cached_prefixes(small: Cluster) -> None:
    prompt = "".join(random.choices("abcdefgh", k=100))
    assert cached(complete(small, "key-a", prompt)) == 0
    assert cached(complete(small, "key-a", prompt)) > 0
    assert cached(complete(small, "key-b", prompt)) == 0
    assert cached(complete(small, "key-a", prompt, cache_salt="s")) == 0
    with Client(small.grpc, api_key="key-a") as grpc_client, grpc_client.generate(prompt, max_tokens=4) as stream:
        list(stream)
        assert stream.result.usage.cached_tokens > 0, "a tenant is the same tenant at both doors"


def test_a_conversation_goes_on_by_its_id_and_only_for_its_tenant(small: Cluster) -> None:
    made = [openai.OpenAI(base_url=f"http://{small.http}/v1", api_key=key, max_retries=0) for key in ("key-a", "key-b")]
    own, other = made
    asked: dict[str, Any] = {"model": "toy", "temperature": 0, "max_output_tokens": 8, "extra_body": {"ignore_eos": True}}
    first = own.responses.create(input="hi", **asked)
    second = own.responses.create(input="on", previous_response_id=first.id, **asked)
    first_prompt = b"user: hi\nassistant: "
    assert first.output_text == said(first_prompt, max_tokens=8) and first.status == "incomplete"
    whole = first_prompt + first.output_text.encode() + b"\nuser: on\nassistant: "
    assert second.output_text == said(whole, max_tokens=8)
    assert own.responses.retrieve(second.id).output_text == second.output_text
    for call in (
        lambda: other.responses.retrieve(second.id),
        lambda: other.responses.create(input="x", previous_response_id=second.id, **asked),
    ):
        with pytest.raises(openai.NotFoundError):
            call()
    own.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        own.responses.create(input="x", previous_response_id=second.id, **asked)
    for client in made:
        client.close()


def test_a_tenant_has_one_quota_across_doors_and_keys(small: Cluster) -> None:
    def over_grpc(key: str) -> None:
        with Client(small.grpc, api_key=key) as grpc_client, grpc_client.generate("x", max_tokens=2) as stream:
            list(stream)

    assert complete(small, "key-c", "x").status_code == complete(small, "key-d", "x").status_code == 200
    over_grpc("key-d")
    refused = complete(small, "key-c", "x")
    assert refused.status_code == 429 and refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert 1 <= int(refused.headers["retry-after"]) <= 61
    with pytest.raises(GenerateError) as caught:
        over_grpc("key-d")
    assert (caught.value.code, caught.value.reason) == ("RESOURCE_EXHAUSTED", "RATE_LIMITED")
    assert caught.value.retry_after_s is not None and 1 <= caught.value.retry_after_s <= 61
    assert complete(small, "key-a", "x").status_code == 200, "other tenants have their own quota"


# Fuzzing


@dataclass
class Fuzzed:
    """Checks what must hold for every request."""

    small: Cluster
    answers: int = 0

    def check(self, response: Any) -> None:
        self.answers += 1
        assert response.status_code in (200, 400, 401, 404, 405, 408, 413, 415), (response.status_code, response.text)
        if response.status_code != 200:
            body = json.loads(response.text)
            error, of_messages = body["error"], "request-id" in response.headers
            assert set(error) == ({"message", "type", "details"} if of_messages else {"message", "type", "param", "code"})
            assert error["message"] and (error["details"]["error_code"] if of_messages else error["code"])
            assert ({*body} == {"type", "error", "request_id"} and body["type"] == "error") if of_messages else {*body} == {"error"}
        assert response.headers["x-request-id"] or response.status_code == 408

    async def over(self) -> None:
        """Checks that nothing is left behind, nothing died, and the cluster still answers correctly."""
        await self.small.quiet()
        assert complete(self.small, "key-a", "a prompt").json()["choices"][0]["text"] == said(b"a prompt", max_tokens=4)
        assert not re.search(r"Traceback|an HTTP request failed|a call failed", self.small.log("router-0"))


@pytest.fixture
def fuzzed(small: Cluster) -> Iterator[Fuzzed]:
    made = Fuzzed(small)
    yield made
    asyncio.run(made.over())
    assert made.answers > 20


@pytest.fixture(scope="module")
def schema(small: Cluster) -> Any:
    return schemathesis.openapi.from_url(f"http://{small.http}/openapi.json")


HEADERS = {"authorization": "Bearer key-a"}

POSTS = (
    "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens", "/tokenize", "/detokenize",
    "/inference/v1/generate",
)  # fmt: skip
TWIN = {"/v1/chat/completions": "/v1/chat/completions/render"}  # takes the same bodies, and to generate one takes longer than to send it
PARTS = ("method", "path_parameters", "headers", "cookies", "query", "body", "media_type")  # of a case


@pytest.mark.parametrize(
    ("path", "mode"),
    [
        *itertools.product(POSTS, (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)),
        ("/v1/models/{name}", GenerationMode.POSITIVE),  # any text is a valid name
        ("/v1/responses/{id}", GenerationMode.POSITIVE),
    ],
)
def test_requests_generated_from_the_openapi_document_are_handled(schema: Any, fuzzed: Fuzzed, path: str, mode: GenerationMode) -> None:
    operation = schema[path]["GET" if "{" in path else "POST"]
    twin = schema[TWIN[path]]["POST"] if path in TWIN else None
    assert twin is None or twin.definition.raw["requestBody"] == operation.definition.raw["requestBody"]

    @settings(max_examples=24, deadline=None, suppress_health_check=list(HealthCheck), database=None, derandomize=True)
    @given(operation.as_strategy(generation_mode=mode))
    def fuzz(case: Any) -> None:
        fuzzed.check(case.call(headers=HEADERS, timeout=60))
        if twin is not None:
            same = twin.Case(**{part: getattr(case, part) for part in PARTS})
            fuzzed.check(same.call(headers=HEADERS, timeout=60))

    fuzz()


CALLED: list[Any] = [
    *HELLO,
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "text", "text": "I add."},
            {"type": "tool_use", "id": "a", "name": "add", "input": {"x": 1.5}},
        ],
    },
    {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "x"}], "is_error": True}],
    },
]
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 3, "logprobs": True, "top_logprobs": 2, "stop": ["x"], "seed": 1}),
    ("/v1/chat/completions", {"messages": HELLO, "stream": True, "stream_options": {"include_usage": True}, "n": 2, "max_tokens": 3}),
    ("/v1/completions", {"prompt": [[1, 2, 3], "abc"], "max_tokens": 3, "logit_bias": {"5": 1.5}, "temperature": 0.5}),
    ("/v1/responses", {"input": "hello", "max_output_tokens": 3, "top_logprobs": 2, "metadata": {"a": "b"}, "include": []}),
    (
        "/v1/responses",
        {
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "add"}]},
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
                {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "4"},
            ],
            "tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}],
            "stream": True,
            "max_output_tokens": 3,
        },
    ),
    ("/inference/v1/generate", {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 3, "logprobs": 1, "stop": ["x"], "n": 2}}),
    ("/v1/chat/completions/render", {"messages": HELLO, "max_tokens": 3, "guided_choice": ["a", "b"]}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 3, "stream": True, "temperature": 0.5, "system": "s", "stop_sequences": ["x"]}),
    ("/v1/messages", {"messages": CALLED, "max_tokens": 3, "tools": [{"name": "add", "input_schema": {"type": "object"}}]}),
    ("/v1/messages/count_tokens", {"messages": CALLED, "tool_choice": {"type": "auto"}}),
    ("/tokenize", {"prompt": "some text"}),
    ("/detokenize", {"tokens": [1, 2, 3, 255]}),
]
PIECES = [b"\\ud800", b"\x00", b"\xff", b"1e999", b"-1", b"null", b"[[[[", b"{}", b'"', b"\xf0\x9f\x99\x82", b"9" * 400, b"NaN", b"\\u0000"]


def mutated(rng: random.Random, body: bytes) -> bytes:
    data = bytearray(body)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0:
                data[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del data[at : at + rng.randrange(1, 9)]
            case 2:
                data[at:at] = rng.choice(PIECES)
            case 3:
                data[at:at] = data[rng.randrange(len(data) + 1) :][:20]
            case _:
                del data[at:]
    return bytes(data)


def test_mutated_bodies_are_handled(fuzzed: Fuzzed) -> None:
    rng = random.Random(6)
    router = psutil.Process(fuzzed.small.status()["router"]["pid"])
    with httpx2.Client(
        base_url=f"http://{fuzzed.small.http}", headers=HEADERS | {"content-type": "application/json"}, timeout=60
    ) as client:
        for i in range(600):
            if i == 200:
                # The library of grammars is loaded when it is needed first.
                client.post("/v1/chat/completions", json={"messages": HELLO, "max_tokens": 3, "response_format": {"type": "json_object"}})
                warm = router.memory_info().rss
            path, body = rng.choice(BODIES)
            fuzzed.check(client.post(path, content=mutated(rng, json.dumps(body).encode())))
    assert router.memory_info().rss - warm < 16 << 20 and router.is_running()


def test_mutated_requests_are_handled(small: Cluster) -> None:
    """Mutates the whole request, headers included. The result is an answer or a closed connection, never a 500."""
    rng = random.Random(7)
    for _ in range(200):
        path, body = rng.choice(BODIES)
        with connect(small) as sock:
            sock.sendall(mutated(rng, post(body, path).replace(b"host: x", b"host: x\r\nauthorization: Bearer key-a")))
            sock.shutdown(socket.SHUT_WR)
            got = sock.recv(100)
            while got.startswith(b"HTTP/1.1 100 "):  # an answer that takes its time
                got = got.partition(b"\r\n\r\n")[2] or sock.recv(100)
            assert not got or re.match(rb"HTTP/1.1 (200|400|401|404|405|408|413|415|501|503) ", got), got
    asyncio.run(Fuzzed(small).over())


# Stopping and dying


async def test_a_stopping_router_finishes_its_streams(live: Cluster) -> None:
    """It refuses later requests, and the launcher restarts it at the same address."""
    async with httpx2.AsyncClient(base_url=f"http://{live.http}", timeout=60) as client:
        async with client.stream("POST", "/v1/completions", json={**LONG, "stream_options": {"include_usage": True}}) as response:
            lines = response.aiter_lines()
            await anext(lines)
            os.kill(live.status()["router"]["pid"], signal.SIGTERM)
            await until_status(client, 503)
            refused = await client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining" and refused.headers["retry-after"]
            rest = [line async for line in lines if line.startswith("data: ")]
            assert rest[-1] == "data: [DONE]"
            assert json.loads(rest[-2].removeprefix("data: "))["usage"]["completion_tokens"] == LONG["max_tokens"]
        await until_status(client, 200)
    await live.quiet()


async def until_status(client: httpx2.AsyncClient, status: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            if (await client.get("/readyz")).status_code == status:
                return
        except httpx2.TransportError:
            pass
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


async def test_a_worker_that_dies_does_not_change_the_stream(live: Cluster) -> None:
    live.wait(lambda: [worker["state"] for worker in live.workers()] == ["ready"] * 2)
    async with httpx2.AsyncClient(base_url=f"http://{live.http}", timeout=60) as client:
        body = {"prompt": list(range(50)), "max_tokens": 300, "ignore_eos": True, "stream": True, "temperature": 0}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            got = []
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    got.append(line.removeprefix("data: "))
                    if len(got) == 20:
                        live.kill("decode-0")
    assert got[-1] == "[DONE]"
    assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in got[:-1]) == text_of(toy_output(list(range(50)), max_tokens=300))
