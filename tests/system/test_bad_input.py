"""Invalid requests through the real door: each is refused quickly, the refusal names the field, and no worker is involved.

The rows are those of the fault catalogue (F92 to F98, F101, F104) that concern this interface. Some requests are raw bytes, because the
generated stubs would refuse to send them.
"""

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from live_cluster import Cluster, cluster, toy, toy_output

from baton.client import GenerateError, build_request, to_error
from baton.v1 import generation_pb2 as pb

pytestmark = pytest.mark.system
METHOD = "/baton.v1.Generation/Generate"
CONTEXT = 4096  # tokens; of the toy model
REFUSED_WITHIN_S = 2.0
NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster(toy(tmp_path_factory.mktemp("models") / "toy"), prefill=1, decode=1) as running:
        yield running


@pytest.fixture
async def door(live: Cluster) -> AsyncIterator[grpc.aio.UnaryStreamMultiCallable]:
    """The Generate method, taking raw bytes."""
    async with grpc.aio.insecure_channel(live.grpc) as channel:
        yield channel.unary_stream(METHOD, response_deserializer=pb.GenerateResponse.FromString)


async def answer(door: grpc.aio.UnaryStreamMultiCallable, request: bytes | pb.GenerateRequest, timeout_s: float | None = 30) -> Any:
    """Returns the last message. Raises GenerateError."""
    data = request if isinstance(request, bytes) else request.SerializeToString()
    try:
        return [message async for message in door(data, timeout=timeout_s)][-1]
    except grpc.RpcError as error:
        raise to_error(error) from None


async def refusal(
    door: grpc.aio.UnaryStreamMultiCallable, request: bytes | pb.GenerateRequest, within_s: float = REFUSED_WITHIN_S
) -> GenerateError:
    began = time.monotonic()
    with pytest.raises(GenerateError) as caught:
        await answer(door, request)
    assert time.monotonic() - began < within_s
    return caught.value


def work(live: Cluster) -> list[tuple[Any, ...]]:
    """The state of the workers that changes as soon as one computes a token: what they cache, hold and run."""
    return [(worker["name"], worker["load"], worker["blocks_in_use"], worker["idle"]) for worker in live.workers()]


async def answers_rightly(live: Cluster) -> None:
    prompt = [random.randrange(256) for _ in range(100)]
    async with live.client() as client, client.generate(token_ids=prompt, max_tokens=8, temperature=0.0, ignore_eos=True) as stream:
        assert [token.id async for token in stream] == toy_output(prompt, max_tokens=8)
        assert stream.result.workers["retries"] == 0


def ask(prompt: str | None = "hello", **fields: Any) -> pb.GenerateRequest:
    if prompt is not None and "messages" not in fields and "token_ids" not in fields:
        fields["prompt"] = prompt
    return build_request(**fields)


def chat(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in messages]


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def sampling(number: int, value: int) -> bytes:
    """A request whose sampling parameters contain a varint that the stubs would not write."""
    inner = varint(number << 3) + varint(value)
    return ask().SerializeToString() + b"\x32" + varint(len(inner)) + inner


# name → request, fields that the refusal must name
BAD: dict[str, tuple[bytes | pb.GenerateRequest, list[str]]] = {
    # F93: too long
    "text of two MB": (ask("x" * (2 << 20)), ["text"]),
    "chat of two MB": (ask(messages=chat(*[("user", "x" * 100_000)] * 21)), ["chat.messages"]),
    "too many ids": (ask(token_ids=[1] * ((1 << 20) + 1)), ["token_ids.ids"]),
    # F94: empty prompts and invalid tokens
    "no prompt": (pb.GenerateRequest(), ["prompt"]),
    "empty text": (ask(""), ["text"]),
    "no ids": (ask(token_ids=[]), ["token_ids.ids"]),
    "id of the vocabulary's size": (ask(token_ids=[1, 257]), ["token_ids.ids[1]"]),
    "largest id": (ask(token_ids=[2**32 - 1]), ["token_ids.ids[0]"]),
    "negative id": (b"\x2a\x0c\x0a\x0a" + varint(2**64 - 1), ["token_ids.ids[0]"]),
    # F95: invalid text
    "text that is not UTF-8": (b"\x1a\x02\xc3\x28", ["request"]),
    "lone surrogate": (b"\x1a\x03\xed\xa0\x80", ["request"]),
    "stop that cuts a character": (ask().SerializeToString() + b"\x32\x03\x62\x01\xc3", ["request"]),
    "request id with a line break": (ask(request_id="a\nb"), ["request_id"]),
    "long request id": (ask(request_id="a" * 129), ["request_id"]),
    "long salt": (ask(cache_salt="a" * 257), ["cache_salt"]),
    # F96: numbers that are not finite or out of range
    **{f"temperature {value}": (ask(temperature=value), ["sampling.temperature"]) for value in (NAN, INF, -INF, -0.5, 1e38)},
    **{f"top_p {value}": (ask(top_p=value), ["sampling.top_p"]) for value in (NAN, INF, -1.0, 1.5)},
    **{f"min_p {value}": (ask(min_p=value), ["sampling.min_p"]) for value in (NAN, -0.1, 1.1)},
    **{f"top_k {value}": (ask(top_k=value), ["sampling.top_k"]) for value in (-2, -(2**31))},
    **{f"repetition {value}": (ask(repetition_penalty=value), ["sampling.repetition_penalty"]) for value in (NAN, 0.0, -1.0, 1e38)},
    **{f"presence {value}": (ask(presence_penalty=value), ["sampling.presence_penalty"]) for value in (NAN, INF, 2.5, -1e38)},
    **{f"frequency {value}": (ask(frequency_penalty=value), ["sampling.frequency_penalty"]) for value in (NAN, -INF, 3.0)},
    "bias that is not a number": (ask(logit_bias={3: NAN}), ["sampling.logit_bias[3]"]),
    "huge bias": (ask(logit_bias={3: 1e38}), ["sampling.logit_bias[3]"]),
    "bias for an unknown token": (ask(logit_bias={257: 1.0}), ["sampling.logit_bias[257]"]),
    "too many biases": (ask(logit_bias=dict.fromkeys(range(1025), 1.0)), ["sampling.logit_bias"]),
    # F97: lengths
    **{f"max_tokens {value}": (ask(max_tokens=value), ["sampling.max_tokens"]) for value in (0, -1, -(2**31))},
    "max_tokens 2**31": (sampling(13, 2**31), ["sampling.max_tokens"]),
    "min_tokens -1": (ask(min_tokens=-1), ["sampling.min_tokens"]),
    "min_tokens above max_tokens": (ask(min_tokens=6, max_tokens=5), ["sampling.min_tokens"]),
    "logprobs -1": (ask(logprobs=-1), ["sampling.logprobs"]),
    "too many logprobs": (ask(logprobs=257), ["sampling.logprobs"]),
    # F98: stop strings
    "100000 stop strings": (ask(stop=["x"] * 100_000), ["sampling.stop"]),
    "a stop string of one MB": (ask(stop=["x" * 1_000_000]), ["sampling.stop[0]"]),
    "an empty stop string": (ask(stop=["x", ""]), ["sampling.stop[1]"]),
    "100000 stop tokens": (ask(stop_token_ids=[1] * 100_000), ["sampling.stop_token_ids"]),
    "unknown stop token": (ask(stop_token_ids=[1, 999]), ["sampling.stop_token_ids[1]"]),
    # F101: conversations
    "no messages": (ask(messages=[]), ["chat.messages"]),
    "unknown role": (ask(messages=chat(("user", "x"), ("critic", "x"))), ["chat.messages[1].role"]),
    "no role": (ask(messages=chat(("", "x"))), ["chat.messages[0].role"]),
    "10000 messages": (ask(messages=chat(*[("user", "x")] * 10_000)), ["chat.messages"]),
    # several mistakes in one request
    "three mistakes": (ask("", temperature=-1, max_tokens=0), ["text", "sampling.temperature", "sampling.max_tokens"]),
}


async def test_every_invalid_field_is_named_quickly_and_no_worker_is_involved(
    live: Cluster, door: grpc.aio.UnaryStreamMultiCallable
) -> None:
    await answers_rightly(live)
    await live.quiet()
    before = await asyncio.to_thread(work, live)
    for name, (request, fields) in BAD.items():
        error = await refusal(door, request)
        assert (error.code, error.reason) == ("INVALID_ARGUMENT", "INVALID_FIELD"), name
        assert [field for field, _ in error.violations] == fields, name
        assert all(description for _, description in error.violations) and error.retry_after_s is None, name
        assert len(error.message) < 300, name
    assert await asyncio.to_thread(work, live) == before
    await answers_rightly(live)


async def test_a_valid_request_changes_the_state_of_the_workers(live: Cluster) -> None:
    """Negative control for the comparison above."""
    before = await asyncio.to_thread(work, live)
    await answers_rightly(live)
    await asyncio.to_thread(live.wait, lambda: work(live) != before)


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (ask("x" * CONTEXT), "text"),
        (ask("x" * 100_000), "text"),
        (ask("x" * 1_000_000), "text"),
        (ask(messages=chat(("user", "x" * 5000))), "chat"),
        (ask(token_ids=[1] * CONTEXT), "token_ids"),
        (ask(token_ids=[1] * 1_000_000), "token_ids"),
        (ask(max_tokens=2**31 - 1), "sampling.max_tokens"),
        (ask("x" * 4000, max_tokens=97), "sampling.max_tokens"),
    ],
    ids=["full", "long", "one word of a million letters", "chat", "ids", "a million ids", "max_tokens", "both"],
)
async def test_a_request_longer_than_the_context_is_refused(
    request_: pb.GenerateRequest, field: str, door: grpc.aio.UnaryStreamMultiCallable
) -> None:
    error = await refusal(door, request_, within_s=20)
    assert (error.code, error.reason) == ("INVALID_ARGUMENT", "CONTEXT_LENGTH")
    assert [field for field, _ in error.violations] == [field] and error.metadata["context"] == str(CONTEXT)


async def test_a_long_text_is_refused_while_others_are_answered(live: Cluster, door: grpc.aio.UnaryStreamMultiCallable) -> None:
    long = [asyncio.create_task(refusal(door, ask("x" * 1_000_000), within_s=60)) for _ in range(2)]
    await asyncio.sleep(0.1)
    await answers_rightly(live)
    for task in long:
        assert (await task).reason == "CONTEXT_LENGTH"


@pytest.mark.parametrize("name", ["gpt-5", "TOY", "toy ", "../toy", "x" * 100_000, "\x00", "👩‍👩‍👧‍👦" * 1000])
async def test_an_unknown_model_is_not_found(name: str, door: grpc.aio.UnaryStreamMultiCallable) -> None:
    error = await refusal(door, ask(model=name))
    assert (error.code, error.reason) == ("NOT_FOUND", "MODEL_NOT_FOUND") and len(error.message) < 1500


async def test_a_hundred_megabytes_are_refused_unread(live: Cluster, door: grpc.aio.UnaryStreamMultiCallable) -> None:
    error = await refusal(door, ask("x" * (100 << 20)), within_s=20)
    assert error.code == "RESOURCE_EXHAUSTED"
    assert (await refusal(door, ask("x" * (4 << 20)))).code == "RESOURCE_EXHAUSTED"
    await answers_rightly(live)


# Unusual but valid requests

GOOD: dict[str, pb.GenerateRequest] = {
    "white space": ask("  \n\t "),
    "NUL": ask("a\x00b"),
    "right to left": ask("\u202e" * 500),
    "joiners": ask("\u200d" * 500),
    "control token in the text": ask("<|eos|>"),
    "negative zero": ask(temperature=-0.0, presence_penalty=-0.0),
    "top_k -1": ask(top_k=-1),
    "top_p 0": ask(top_p=0.0),
    "top_p 1": ask(top_p=1.0, min_p=0.0),
    "largest seed": ask(seed=2**64 - 1),
    "seed 0": ask(seed=0),
    "sixteen stop strings, each a prefix of the next": ask(stop=["\x01" * n for n in range(1, 17)]),
    "longest stop string": ask(stop=["👩‍👩‍👧‍👦" * 10]),
    "empty message": ask(messages=chat(("user", ""))),
    "min_tokens equal to max_tokens": ask(min_tokens=4, max_tokens=4),
    "longest request id": ask(request_id="~" * 128),
    "salt": ask(cache_salt="\u2603" * 85),
    "unknown field": pb.GenerateRequest.FromString(ask().SerializeToString() + b"\xfa\x7f\x02hi"),
}


@pytest.mark.parametrize("name", GOOD)
async def test_unusual_but_valid_requests_are_answered(name: str, door: grpc.aio.UnaryStreamMultiCallable) -> None:
    request = pb.GenerateRequest()
    request.CopyFrom(GOOD[name])
    if not request.sampling.HasField("max_tokens"):
        request.sampling.max_tokens = 4
    last = await answer(door, request)
    assert last.WhichOneof("event") == "finished" and 1 <= last.finished.usage.completion_tokens <= 4


async def test_message_content_is_neither_rendered_nor_parsed(live: Cluster) -> None:
    content = "{{ 7 * 7 }}{% for x in range(9) %}a{% endfor %}{{ messages }}{# gone #}<|eos|>"
    prompt = list(f"user: {content}\nassistant: ".encode())
    params: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
    async with live.client() as client, client.generate(messages=chat(("user", content)), **params) as stream:
        assert [token.id async for token in stream] == toy_output(prompt, max_tokens=8)
        assert stream.result.usage.prompt_tokens == len(prompt)


async def test_no_piece_splits_a_character(live: Cluster) -> None:
    """The toy produces arbitrary bytes. Characters arrive whole, and invalid bytes become replacement characters."""
    async with live.client() as client:
        for seed in range(5):
            params = {"max_tokens": 300, "temperature": 1.0, "seed": seed, "ignore_eos": True}
            async with client.generate("👩‍👩‍👧‍👦 Grüße", **params) as stream:
                pieces = [token.text async for token in stream]
                result = stream.result
            said = bytes(id_ for id_ in result.token_ids if id_ < 256)
            assert result.text == said.decode(errors="replace") and "".join(pieces) == result.text[: len("".join(pieces))]


async def test_requests_with_the_same_id_are_all_answered(live: Cluster) -> None:
    """An id only serves to find a request again. It does not grant access to another answer (F88, F89)."""
    prompts = [[seed] * 100 for seed in range(10)]

    async with live.client() as client:

        async def one(prompt: list[int]) -> list[int]:
            async with client.generate(token_ids=prompt, request_id="same", max_tokens=8, temperature=0.0, ignore_eos=True) as stream:
                return [token.id async for token in stream]

        assert await asyncio.gather(*map(one, prompts)) == [toy_output(prompt, max_tokens=8) for prompt in prompts]
    await live.quiet()


# Deadlines


@pytest.mark.parametrize("timeout_s", [-5.0, 0.0, 1e-9])
async def test_a_deadline_in_the_past_is_exceeded(timeout_s: float, live: Cluster, door: grpc.aio.UnaryStreamMultiCallable) -> None:
    with pytest.raises(GenerateError) as caught:
        await answer(door, ask(), timeout_s)
    assert caught.value.code == "DEADLINE_EXCEEDED"
    await live.quiet()


@pytest.mark.parametrize("timeout_s", [None, 1e5, 1e9])
async def test_an_absurd_deadline_is_clamped(timeout_s: float | None, door: grpc.aio.UnaryStreamMultiCallable) -> None:
    last = await answer(door, ask(max_tokens=4), timeout_s)
    assert last.WhichOneof("event") == "finished"


# Other methods


async def test_reflection_lists_the_service(live: Cluster) -> None:
    async with grpc.aio.insecure_channel(live.grpc) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert {"baton.v1.Generation", "grpc.health.v1.Health"} <= names and not any("Decode" in name or "Admin" in name for name in names)
        await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol="baton.v1.Generation"))
        assert (await call.read()).file_descriptor_response.file_descriptor_proto
        call.cancel()


@pytest.mark.parametrize("name", ["", "baton.v1.Generation"])
async def test_health_reports_serving(name: str, live: Cluster) -> None:
    async with grpc.aio.insecure_channel(live.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        assert (await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)).status == health_pb2.HealthCheckResponse.SERVING
        watched = stub.Watch(health_pb2.HealthCheckRequest(service=name), timeout=5)
        assert (await watched.read()).status == health_pb2.HealthCheckResponse.SERVING
        watched.cancel()


async def test_health_of_an_unknown_service_is_not_found(live: Cluster) -> None:
    async with grpc.aio.insecure_channel(live.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=5)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "method", ["/baton.v1.Generation/Nothing", "/baton.v1.Admin/Status", "/baton.v1.Decode/Session", "/nobody/Nothing"]
)
async def test_other_methods_are_unimplemented(method: str, live: Cluster) -> None:
    async with grpc.aio.insecure_channel(live.grpc) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(method)(b"", timeout=5)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_bytes_that_are_not_http2_do_no_harm(live: Cluster) -> None:
    host, _, port = live.grpc.rpartition(":")
    for data in (b"GET / HTTP/1.1\r\n\r\n", bytes(range(256)) * 64, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 4096, b""):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        writer.close()
        await asyncio.wait_for(reader.read(), 5) if data else None
    await answers_rightly(live)


# Fuzzing

TOOLS = pb.Chat(
    messages=[
        pb.ChatMessage(role="user", content="add"),
        pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="c", name="add", arguments='{"x": 1}')]),
        pb.ChatMessage(role="tool", tool_call_id="c", content="2"),
    ],
    tools=[pb.Tool(name="add", description="Adds.", parameters='{"type": "object", "properties": {"x": {"type": "integer"}}}')],
    tool_choice="required",
    parallel_tool_calls=False,
)
SEEDS = [
    ask(max_tokens=2),
    ask("👩‍👩‍👧‍👦 Grüße", max_tokens=2, temperature=0.5, top_p=0.5, top_k=3, min_p=0.1, seed=7),
    ask(token_ids=list(range(100)), max_tokens=2, logprobs=3, stop_token_ids=[5, 6], logit_bias={3: 1.5, 9: -2.0}),
    ask(messages=chat(("system", "be kind"), ("user", "hi"), ("assistant", "yes")), max_tokens=2, stop=["a", "bcd"], ignore_eos=True),
    ask(model="toy", request_id="r", cache_salt="s", min_tokens=1, max_tokens=2, presence_penalty=0.5, frequency_penalty=0.5),
    ask(
        max_tokens=4,
        structured={"kind": "json_schema", "text": '{"type": "object", "properties": {"a": {"enum": [1, "b"]}}}', "strict": False},
    ),
    ask(max_tokens=4, structured={"kind": "regex", "text": "(a|b{2,5})+[0-9]?"}),
    ask(max_tokens=4, structured={"kind": "choice", "text": '["yes", "no"]'}),
    pb.GenerateRequest(chat=TOOLS, sampling=pb.SamplingParams(max_tokens=4)),
]
LAWFUL = {"OK", "INVALID_ARGUMENT", "NOT_FOUND"}
FUZZ_REQUESTS = 1000


def mutated(rng: random.Random) -> bytes:
    data = bytearray(rng.choice(SEEDS).SerializeToString())
    for _ in range(rng.choice([1, 1, 2, 4, 16])):
        at = rng.randrange(len(data)) if data else 0
        match rng.randrange(6):
            case 0 if data:
                data[at] ^= 1 << rng.randrange(8)
            case 1 if data:
                data[at] = rng.choice([0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)])
            case 2:
                data[at:at] = bytes(rng.randrange(256) for _ in range(rng.randrange(1, 6)))
            case 3:
                del data[at : at + rng.randrange(1, 8)]
            case 4:
                data[at:at] = data[at : at + rng.randrange(1, 40)]
            case _:
                data += rng.choice(SEEDS).SerializeToString()
    return bytes(data)


async def outcome(door: grpc.aio.UnaryStreamMultiCallable, data: bytes) -> str:
    """Returns the status. A call that streams more than a few messages counts as OK and is cancelled."""
    call = door(data, timeout=30)
    try:
        messages = 0
        async for _ in call:
            messages += 1
            if messages == 5:
                call.cancel()
                return "OK"
    except grpc.RpcError as error:
        code: str = error.code().name
        return code
    return "OK"


async def test_a_thousand_broken_requests_never_break_the_cluster(live: Cluster, door: grpc.aio.UnaryStreamMultiCallable) -> None:
    rng = random.Random(20)
    seen: dict[str, int] = {}
    unlawful: list[tuple[str, bytes]] = []

    async def send() -> None:
        while sum(seen.values()) < FUZZ_REQUESTS:
            data = mutated(rng)
            status = await outcome(door, data)
            seen[status] = seen.get(status, 0) + 1
            if status not in LAWFUL:
                unlawful.append((status, data))

    await asyncio.gather(*(send() for _ in range(16)))
    assert not unlawful
    assert sum(seen.values()) > 500 and min(seen.get(status, 0) for status in LAWFUL) > 0, seen
    await live.quiet()
    await answers_rightly(live)
    status = await asyncio.to_thread(live.status)
    assert len(status["workers"]) == 2 and all(worker["state"] == "ready" for worker in status["workers"])
    for log in live.logs.glob("*.log"):
        assert "Traceback" not in log.read_text(errors="replace"), log


async def test_prompts_never_appear_in_logs_or_errors(live: Cluster, door: grpc.aio.UnaryStreamMultiCallable) -> None:
    secret = "my password is xyzzy-4711"
    await answer(door, ask(secret, max_tokens=2))
    for bad in (ask(secret, max_tokens=0), ask(secret * 1000), ask(messages=chat((secret, secret))), ask(stop=[secret * 100])):
        assert "xyzzy" not in (await refusal(door, bad)).message
    logs = {log.name: log.read_text(errors="replace") for log in live.logs.glob("*.log")}
    assert "router-0.log" in logs and not [name for name, text in logs.items() if "xyzzy" in text]
