"""Anthropic's API: a script speaks for the model, and the unmodified SDK for the client. Its types say what an answer and an event are."""

import asyncio
import json
import random
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import anthropic
import pytest
from anthropic import AsyncAnthropic, beta_async_tool, beta_tool
from anthropic._models import BaseModel as Model
from anthropic._models import validate_type
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from http_door import Answer, House, Script, failing, served, toy_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel

from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.keys import ApiKeys, KeyEntry
from baton.models.make_small import make_toy
from router.http import openai_out
from router.request import Request, Tokens
from router.tokenizer import Tokenizer
from router.tools.families import BY_NAME
from router.tools.forms import Forms
from router.tools.thinking import THINK

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
HELLO: dict[str, Any] = {"model": "toy", "max_tokens": 1000, "messages": [{"role": "user", "content": "hello"}]}
ADD: dict[str, Any] = {
    "name": "add",
    "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}, "note": {"type": "string"}}},
}
TIME: dict[str, Any] = {"name": "time", "input_schema": {"type": "object"}}
ARGUMENTS = {"x": 12345678901234567890, "note": 'é🌸 "quoted" \\ }', "deep": [{"a": 1.5}, None]}
CALL = f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': ARGUMENTS}, ensure_ascii=False)}\n</tool_call>"
TWO = f'<think>\nhm 🌸\n</think>\n\nI add.\n{CALL}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'
PAGE = Path(__file__).resolve().parents[3] / "docs" / "messages.md"
END = [*b"abcd", 256]
FORMS = Forms(BY_NAME["hermes"], THINK)
ASK = HELLO | {"tools": [ADD, TIME]}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


def house(tokenizer: Tokenizer, text: str, forms: Forms = FORMS, path: Path | None = None, **script: Any) -> House:
    return House(tokenizer, Script(**{"ids": text.encode(), "finish": "stop", **script}), forms=forms, path=path)


@asynccontextmanager
async def client(house: House, **options: Any) -> AsyncIterator[AsyncAnthropic]:
    options = {"api_key": "none", "max_retries": 0, **options}
    async with served(house.door) as address, AsyncAnthropic(base_url=f"http://{address}", **options) as sdk:
        yield sdk


def valid(type_: Any, value: Any) -> Any:
    """`value` as the SDK's type, by which it is valid and has no other members."""
    made = validate_type(type_=type_, value=value)
    assert not unknown(made), value
    return made


def unknown(made: Any) -> set[str]:
    if isinstance(made, Model):
        inside = (getattr(made, name) for name in made.model_fields_set)
        return set(made.model_extra or ()) | {name for one in inside for name in unknown(one)}
    return {name for one in made for name in unknown(one)} if isinstance(made, list) else set()


def events_of(answer: Answer) -> list[Any]:
    """The events of a stream, each valid by the SDK's types."""
    assert answer.headers["content-type"].startswith("text/event-stream") and answer.body.endswith(b"\n\n"), answer.body
    made = []
    for event in answer.body.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")[:2]
        value = json.loads(data.removeprefix("data: "))
        assert name == f"event: {value['type']}"
        made.append(valid(RawMessageStreamEvent, value))
    return made


def built(events: Sequence[Any]) -> dict[str, Any]:
    """The message that the SDK builds of a whole stream."""
    snapshot: Any = None
    buffers: dict[int, bytes] = {}
    for event in events:
        snapshot = accumulate_event(event=event, current_snapshot=snapshot, json_bufs=buffers)
    assert [event.type for event in events].count("message_stop") == 1 and events[-1].type == "message_stop"
    return told(snapshot)


def told(message: Any) -> dict[str, Any]:
    """The SDK adds members that are null to a message that it builds."""
    return dict(message.to_dict(exclude_none=True))


async def both(made: House, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same request answered whole, and as a stream builds it."""
    headers = {"x-request-id": "same"}
    whole = await made.post(MESSAGES, body, headers=headers)
    stream = await made.post(MESSAGES, body | {"stream": True}, headers=headers)
    assert whole.status == stream.status == 200, whole.body
    return told(valid(Message, whole.json)), built(events_of(stream))


# Answers


async def test_an_answer_is_a_message_of_blocks(tokenizer: Tokenizer) -> None:
    async with client(house(tokenizer, TWO, cached=7)) as sdk:
        answer = await sdk.messages.create(**ASK)
        thinking, text, add, time = answer.content
        assert thinking.type == "thinking" and thinking.thinking == "hm 🌸" and text.type == "text" and text.text == "I add."
        assert (
            add.type == time.type == "tool_use" and (add.name, add.input) == ("add", ARGUMENTS) and (time.name, time.input) == ("time", {})
        )
        assert add.id != time.id and answer.stop_reason == "tool_use" and answer.stop_sequence is None and answer.model == "toy"
        usage = answer.usage
        counted = await sdk.messages.count_tokens(model="toy", messages=HELLO["messages"], tools=ASK["tools"])
        assert usage.cache_read_input_tokens == 7 and usage.cache_creation_input_tokens == 0
        assert usage.input_tokens + 7 == counted.input_tokens, "as Anthropic counts: what was read from the cache is told apart"
        assert usage.output_tokens == len(TWO.encode()) and usage.output_tokens_details
        assert usage.output_tokens_details.thinking_tokens == len("<think>\nhm 🌸\n</think>".encode()) - len("<think")
        assert answer._request_id and answer.id == f"msg_{answer._request_id}"


async def test_the_stream_helper_builds_the_same_message(tokenizer: Tokenizer) -> None:
    async with client(house(tokenizer, TWO, joins=3)) as sdk:
        options: Any = {"extra_headers": {"x-request-id": "same"}}
        whole = await sdk.messages.create(**ASK, **options)
        async with sdk.messages.stream(**ASK, **options) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_message()
        assert told(final) == told(whole)
        assert "".join(event.text for event in events if event.type == "text") == "I add."
        assert "".join(event.thinking for event in events if event.type == "thinking") == "hm 🌸"
        done: Any = [event.content_block for event in events if event.type == "content_block_stop"]
        assert [block.type for block in done] == ["thinking", "text", "tool_use", "tool_use"] and done[2].input == ARGUMENTS
        async with sdk.messages.stream(**HELLO) as stream:
            assert "".join([text async for text in stream.text_stream]).startswith("I add.\n<tool_call>"), "without tools, it is all text"


def test_the_sync_client_reads_both(tokenizer: Tokenizer) -> None:
    def ask(address: str) -> None:
        with anthropic.Anthropic(base_url=f"http://{address}", api_key="none", max_retries=0) as sdk:
            answer = sdk.messages.create(**ASK)
            with sdk.messages.stream(**ASK) as stream:
                final = stream.get_final_message()
            assert [block.type for block in final.content] == [block.type for block in answer.content]
            raw = [event.type for event in sdk.messages.create(**HELLO, stream=True)]
            assert raw[0] == "message_start" and raw[-2:] == ["message_delta", "message_stop"]
            assert sdk.messages.count_tokens(model="toy", messages=HELLO["messages"]).input_tokens == len(b"user: hello\nassistant: ")

    async def serve() -> None:
        async with served(house(tokenizer, TWO).door) as address:
            await asyncio.to_thread(ask, address)

    asyncio.run(serve())


PARTS = st.sampled_from(
    [
        "So",
        " é🌸",
        "\n",
        "<tool_call>",
        CALL,
        '\n<tool_call>\n{"name": "time", "arguments": {}}\n</tool_call>',
        "</think>",
        '{"name": "x"}',
        " ",
    ]
)


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.lists(PARTS, max_size=6), st.integers(1, 40), st.sampled_from(["stop", "length"]), st.integers(0, 30))
def test_the_stream_builds_the_whole_answer(
    tokenizer: Tokenizer, thinks: bool, parts: list[str], joins: int, finish: Any, cut: int
) -> None:
    """The same seed, and the same tokens however they are joined."""
    text = ("<think>hm</think>" if thinks else "") + "".join(parts)
    text = text[: len(text) - cut] or "x"
    whole, streamed = asyncio.run(both(house(tokenizer, text, joins=joins, finish=finish), ASK))
    assert streamed == whole
    assert all(block[block["type"]] for block in whole["content"] if block["type"] != "tool_use"), "no block is empty"


async def test_a_call_that_is_cut_has_the_arguments_that_are_whole(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A call that a grammar rules is told as it is written, so it may be cut anywhere."""
    make_toy(tmp_path / "model")
    made = house(tokenizer, "", Forms(BY_NAME["hermes"]), tmp_path / "model", finish="length")
    inputs = []
    for size in range(len(CALL.encode())):
        made.script.ids = CALL.encode()[:size] or b"<"
        whole, streamed = await both(made, ASK | {"tool_choice": {"type": "any"}})
        assert streamed == whole and whole["stop_reason"] == "max_tokens"
        inputs += [block["input"] for block in whole["content"] if block["type"] == "tool_use"]
    assert inputs[0] == {} and inputs[-1] == ARGUMENTS and len({json.dumps(one) for one in inputs}) > 5


@pytest.mark.parametrize(
    ("text", "script", "fields", "reason", "stop"),
    [
        ("abcd", {}, {}, "end_turn", None),
        ("abcd", {"finish": "length"}, {}, "max_tokens", None),
        ("abcd", {}, {"stop_sequences": ["cd"]}, "stop_sequence", "cd"),
        ("abcd", {"ids": END}, {"stop_sequences": ["<|eos|>"]}, "stop_sequence", "<|eos|>"),
        ("abcd", {"ids": END}, {}, "end_turn", None),
        (CALL, {}, {"tools": [ADD]}, "tool_use", None),
        (CALL, {"finish": "length"}, {"tools": [ADD]}, "max_tokens", None),
        (TWO, {}, {"tools": [ADD, TIME], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, "tool_use", None),
    ],
)
async def test_the_reason_why_an_answer_ended(
    tokenizer: Tokenizer, text: str, script: dict[str, Any], fields: dict[str, Any], reason: str, stop: str | None
) -> None:
    made = house(tokenizer, text, **script)
    whole, streamed = await both(made, HELLO | fields)
    assert whole == streamed and (whole["stop_reason"], whole.get("stop_sequence")) == (reason, stop)
    if "tool_choice" in fields:
        assert [block["type"] for block in whole["content"]] == ["thinking", "text", "tool_use"]


class Fact(BaseModel):
    name: str
    age: int


async def test_an_answer_in_a_form_is_parsed(tokenizer: Tokenizer, tmp_path: Path) -> None:
    make_toy(tmp_path / "model")
    made = house(tokenizer, '{"name":"Ida","age":7}', Forms(), tmp_path / "model")
    made.script.ids = [*made.script.ids, 256]
    async with client(made) as sdk:
        parsed = await sdk.messages.parse(**HELLO, output_format=Fact)
        assert parsed.parsed_output == Fact(name="Ida", age=7) and parsed.stop_reason == "end_turn"
        form = made.script.begun[0].params.structured
        assert form is not None and form.kind == "json_schema" and form.strict and '"age"' in form.text
        again = [*HELLO["messages"], {"role": "assistant", "content": parsed.content}, HELLO["messages"][0]]
        await sdk.messages.create(**HELLO | {"messages": again})
        async with sdk.messages.stream(**HELLO, output_format=Fact) as stream:
            assert (await stream.get_final_message()).parsed_output == Fact(name="Ida", age=7)
        old = await made.post(MESSAGES, HELLO | {"output_format": {"type": "json_schema", "schema": Fact.model_json_schema()}})
        assert old.status == 200 and made.script.begun[-1].params.structured is not None
        made.script.ids = b'{"name":"Id'
        half = await sdk.messages.create(**HELLO, output_config={"format": {"type": "json_schema", "schema": Fact.model_json_schema()}})
        assert half.stop_reason == "max_tokens", "half a document, whatever cut it"
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.format\.schema: \$\.not"):
            await sdk.messages.create(**HELLO, output_config={"format": {"type": "json_schema", "schema": {"not": {}}}})


# Tools


@dataclass
class Rounds(Script):
    """An answer for each request."""

    answers: Sequence[str] = ()

    async def generate(self, request: Request) -> AsyncGenerator[Tokens, None]:
        self.ids = self.answers[len(self.begun)].encode()
        async for tokens in super().generate(request):
            yield tokens


def rounds(tokenizer: Tokenizer, *answers: str) -> House:
    return House(tokenizer, Rounds(finish="stop", answers=answers), forms=Forms(BY_NAME["hermes"]))


def prompt_of(request: Request) -> str:
    return bytes(request.tokens[: request.prompt_len]).decode()


async def test_the_tool_runner_calls_until_the_model_answers(tokenizer: Tokenizer) -> None:
    """Its threads are refused in such a way that it sends whole conversations instead."""
    call = '<tool_call>\n{"name": "add", "arguments": {"x": 2, "y": 3}}\n</tool_call>'

    @beta_async_tool
    async def add(x: int, y: int) -> str:
        """Adds two numbers."""
        if x > 2:
            raise ValueError("too large")
        return str(x + y)

    for stream in (False, True):
        made = rounds(tokenizer, call, call.replace("2", "4"), "It is five.")
        async with client(made) as sdk:
            runner = sdk.beta.messages.tool_runner(**HELLO, tools=[add], stream=stream)
            final = await runner.until_done()
        assert final.content[0].type == "text" and final.content[0].text == "It is five." and final.stop_reason == "end_turn"
        first, second, third = made.script.begun
        assert "Adds two numbers." in prompt_of(first)
        assert "Result of add: 5" in prompt_of(second) and '{"x": 2, "y": 3}' in prompt_of(second)
        assert "Result of add: Error: ValueError('too large')" in prompt_of(third)


def test_the_sync_tool_runner_does_the_same(tokenizer: Tokenizer) -> None:
    @beta_tool
    def now() -> str:
        """The time."""
        return "noon"

    def ask(address: str) -> None:
        with anthropic.Anthropic(base_url=f"http://{address}", api_key="none", max_retries=0) as sdk:
            final = sdk.beta.messages.tool_runner(**HELLO, tools=[now]).until_done()
            assert final.content[0].type == "text" and final.content[0].text == "Noon."

    async def serve() -> None:
        made = rounds(tokenizer, '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>', "Noon.")
        async with served(made.door) as address:
            await asyncio.to_thread(ask, address)
        assert "Result of now: noon" in prompt_of(made.script.begun[1])

    asyncio.run(serve())


async def test_thinking_can_be_shown_left_out_and_sent_back(tokenizer: Tokenizer) -> None:
    async with client(house(tokenizer, "<think>hm</think>So")) as sdk:
        shown = await sdk.messages.create(**HELLO, thinking={"type": "adaptive", "display": "summarized"})
        hidden = await sdk.messages.create(**HELLO, thinking={"type": "adaptive", "display": "omitted"})
        assert [block.type for block in shown.content] == [block.type for block in hidden.content] == ["thinking", "text"]
        assert shown.content[0].thinking == "hm" and hidden.content[0].thinking == ""
        again: Any = [*HELLO["messages"], {"role": "assistant", "content": shown.content}, HELLO["messages"][0]]
        assert (await sdk.messages.create(**HELLO | {"messages": again})).content[1].text == "So"
        with pytest.raises(anthropic.BadRequestError, match=r"thinking\.type: has no effect: this model always thinks"):
            await sdk.messages.create(**HELLO, thinking={"type": "disabled"})
    async with client(house(tokenizer, "So", Forms())) as sdk:
        await sdk.messages.create(**HELLO, thinking={"type": "disabled"})
        await sdk.messages.create(**HELLO, thinking={"type": "adaptive"})
        with pytest.raises(anthropic.BadRequestError, match=r"output_config\.effort: has no effect: this model does not think"):
            await sdk.messages.create(**HELLO, output_config={"effort": "low"})


async def test_an_answer_goes_on_with_a_last_message_of_the_assistant(tokenizer: Tokenizer) -> None:
    made = house(tokenizer, "a time")
    turns = [*HELLO["messages"], {"role": "assistant", "content": [{"type": "text", "text": "Once upon"}]}]
    assert (await made.post(MESSAGES, HELLO | {"messages": turns})).status == 200
    assert prompt_of(made.script.begun[0]).endswith("Once upon")


# Refusals

REFUSED = [
    (Reason.INVALID_FIELD, anthropic.BadRequestError, "invalid_request_error"),
    (Reason.CONTEXT_LENGTH, anthropic.BadRequestError, "invalid_request_error"),
    (Reason.UNAUTHENTICATED, anthropic.AuthenticationError, "authentication_error"),
    (Reason.FORBIDDEN, anthropic.PermissionDeniedError, "permission_error"),
    (Reason.MODEL_NOT_FOUND, anthropic.NotFoundError, "not_found_error"),
    (Reason.RATE_LIMITED, anthropic.RateLimitError, "rate_limit_error"),
    (Reason.SATURATED, anthropic.RateLimitError, "rate_limit_error"),
    (Reason.NO_WORKER, anthropic.InternalServerError, "overloaded_error"),
    (Reason.DEADLINE, anthropic.InternalServerError, "timeout_error"),
    (Reason.INTERNAL, anthropic.InternalServerError, "api_error"),
]


@pytest.mark.parametrize(("reason", "kind", "name"), REFUSED)
async def test_refusals_raise_the_exceptions_of_the_sdk(tokenizer: Tokenizer, reason: Reason, kind: type, name: str) -> None:
    """A failure before the first token has its status, streamed or not. After it, the stream ends with an error."""
    made = House(tokenizer, failing(BatonError(reason, "what happened")))
    async with client(made) as sdk:
        for stream in (False, True):
            with pytest.raises(kind) as caught:
                await sdk.messages.create(**HELLO, stream=stream)
            error: Any = caught.value
            assert (error.type, error.api_message, error.status_code) == (name, str(error.api_message), reason.value.http)
            assert str(error.api_message).startswith("what happened")
            assert error.request_id == error.body["request_id"] and error.request_id
            assert ("retry-after" in error.response.headers) == (error.status_code in (429, 503))
    made = House(tokenizer, failing(BatonError(reason, "what happened"), after=2))
    async with client(made) as sdk:
        got = []
        with pytest.raises(anthropic.APIStatusError) as broken:
            async with sdk.messages.stream(**HELLO) as events:
                async for event in events:
                    got.append(event.type)
        assert "text" in got and "message_stop" not in got and broken.value.type == name
        assert broken.value.body["request_id"] == events.response.headers["request-id"]  # type: ignore[index]


async def test_a_stream_of_a_router_that_closes_ends_with_an_error(tokenizer: Tokenizer) -> None:
    """The SDK takes a stream that is cut for one that has finished."""
    made = house(tokenizer, "abcdef", gate=asyncio.Event(), gate_at=3)
    got: list[str] = []

    async def read(sdk: AsyncAnthropic) -> None:
        async with sdk.messages.stream(**HELLO) as events:
            async for event in events:
                got.append(event.type)

    async with AsyncAnthropic(base_url="http://x", api_key="none", max_retries=0) as sdk:
        async with served(made.door) as address:
            sdk.base_url = f"http://{address}"
            task = asyncio.create_task(read(sdk))
            while "text" not in got:
                await asyncio.sleep(0.01)
        with pytest.raises(anthropic.APIStatusError) as broken:
            await task
    assert broken.value.type == "overloaded_error" and "closing" in str(broken.value.api_message)


async def test_every_refusal_has_the_form_of_the_api(tokenizer: Tokenizer) -> None:
    made = House(tokenizer, config=RouterConfig(max_message_bytes=5000))
    long = HELLO | {"metadata": {"user_id": "x" * 6000}}
    for answer, status, kind, param in (
        (await made.get(MESSAGES), 405, "invalid_request_error", None),
        (await made.get(f"{MESSAGES}/"), 405, "invalid_request_error", None),
        (await made.get(f"{MESSAGES}/batches"), 404, "not_found_error", None),
        (await made.post(f"{COUNT}/x"), 404, "not_found_error", None),
        (await made.post(MESSAGES, long), 413, "request_too_large", None),
        (await made.post(COUNT, long), 413, "request_too_large", None),
        (await made.post(MESSAGES, b"{"), 400, "invalid_request_error", None),
        (await made.post(MESSAGES, HELLO, headers={"content-type": "text/plain"}), 415, "invalid_request_error", None),
        (await made.post(MESSAGES, HELLO, headers={"anthropic-version": "2023-01-01"}), 400, "invalid_request_error", "anthropic-version"),
        (await made.post(COUNT, HELLO, headers={"anthropic-version": "next"}), 400, "invalid_request_error", "anthropic-version"),
        (await made.post(MESSAGES, HELLO, headers={"x-request-timeout-ms": "x"}), 400, "invalid_request_error", "x-request-timeout-ms"),
        (await made.post(COUNT, HELLO), 400, "invalid_request_error", "max_tokens"),
        (await made.post(COUNT, {"messages": []}), 400, "invalid_request_error", "messages"),
        (await made.post(COUNT, {"model": "other", "messages": HELLO["messages"]}), 404, "not_found_error", "model"),
    ):
        assert answer.status == status, answer.body
        body = answer.json
        assert set(body) == {"type", "error", "request_id"} and body["type"] == "error"
        assert (body["error"]["type"], body["error"]["details"].get("param")) == (kind, param) and body["error"]["message"]
        assert body["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]
    assert made.script.begun == []
    assert "request-id" not in (await made.get("/v1/models")).headers and "error" in (await made.get("/v1/messages2")).json
    assert "type" not in (await made.get("/v1/messages2")).json, "the paths of the OpenAI API keep their own form"


async def test_a_key_may_come_in_either_header(tokenizer: Tokenizer) -> None:
    keys = ApiKeys([KeyEntry("k", sha256(b"secret").digest(), "shop")])
    made = House(tokenizer, keys=keys)
    async with client(made, api_key="secret") as sdk:
        await sdk.messages.create(**HELLO)
    assert made.script.begun[0].salt.startswith("shop")
    for path, body in ((MESSAGES, HELLO), (COUNT, {"messages": HELLO["messages"]})):
        assert (await made.post(path, body, headers={"x-api-key": "secret"})).status == 200
        assert (await made.post(path, body, headers={"authorization": "Bearer secret", "x-api-key": "wrong"})).status == 200
        for wrong in ({}, {"x-api-key": "wrong"}, {"x-api-key": ""}, {"authorization": "Bearer wrong", "x-api-key": "secret"}):
            answer = await made.post(path, body, headers=wrong)
            assert answer.status == 401 and answer.json["error"]["type"] == "authentication_error"
    assert (await made.post("/v1/completions", {"prompt": "x"}, headers={"x-api-key": "secret"})).status == 401, "only there"


async def test_a_stream_that_breaks_goes_on_by_the_id_of_its_last_event(tokenizer: Tokenizer) -> None:
    made = house(tokenizer, TWO)
    asked = {"x-request-id": "same", "x-event-ids": "true"}
    whole = (await made.post(MESSAGES, ASK | {"stream": True}, headers=asked)).body.decode().split("\n\n")[:-1]
    assert all(event.split("\n")[2].startswith("id: ") for event in whole)
    for at in random.Random(5).sample(range(len(whole)), 8):
        last = whole[at].split("\nid: ")[1]
        rest = await made.post(MESSAGES, ASK | {"stream": True}, headers=asked | {"last-event-id": last})
        assert rest.status == 200 and rest.body.decode() == "".join(f"{event}\n\n" for event in whole[at + 1 :])


async def test_what_of_a_tool_is_not_enforced_is_told(tokenizer: Tokenizer, tmp_path: Path) -> None:
    make_toy(tmp_path / "model")
    made = house(tokenizer, CALL, Forms(BY_NAME["hermes"]), tmp_path / "model")
    odd = {"name": "add", "input_schema": {"type": "object", "not": {"required": ["z"]}}}
    body = HELLO | {"tools": [TIME, odd], "tool_choice": {"type": "tool", "name": "add"}}
    whole = await made.post(MESSAGES, body)
    (told,) = whole.json["relaxed"]
    assert told.startswith("tools[1].input_schema $.not")
    stream = (await made.post(MESSAGES, body | {"stream": True})).body.decode()
    assert json.loads(stream.split("\n")[1].removeprefix("data: "))["message"]["relaxed"] == [told]
    strict = await made.post(MESSAGES, body | {"tools": [TIME, odd | {"strict": True}]})
    assert strict.status == 400 and strict.json["error"]["details"]["param"] == "tools[1].input_schema"


async def test_a_whole_answer_that_is_too_long_is_refused(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_out, "MAX_WHOLE_BYTES", 50)
    for text in ("x" * 60, f"<think>{'x' * 60}", CALL):
        made = house(tokenizer, text)
        answer = await made.post(MESSAGES, ASK)
        assert answer.status == 400 and answer.json["error"]["details"]["param"] == "stream"
        assert (await made.post(MESSAGES, ASK | {"stream": True})).status == 200
        made.check()


async def test_the_example_of_the_page_runs(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    code = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    async with served(house(tokenizer, "Once upon a time").door) as address:
        await asyncio.to_thread(exec, code.replace("127.0.0.1:8000", address).replace('"tale"', '"toy"'), {})
    story, usage = capsys.readouterr().out.split("Usage(")
    assert story == "Once upon a time" and "output_tokens=16" in usage


async def test_many_streams_end_and_leave_nothing(tokenizer: Tokenizer) -> None:
    made = house(tokenizer, TWO)
    answers = await asyncio.gather(*(made.post(MESSAGES, ASK | {"stream": True}) for _ in range(20)))
    assert {answer.status for answer in answers} == {200}
    made.check()


async def test_thinking_is_bounded(tokenizer: Tokenizer, tmp_path: Path) -> None:
    make_toy(tmp_path / "model")
    made = house(tokenizer, "<think>hm</think>So", path=tmp_path / "model")
    async with client(made) as sdk:
        await sdk.messages.create(**HELLO, thinking={"type": "enabled", "budget_tokens": 100})
        budget = made.script.begun[0].params.thinking
        assert budget is not None and budget.max_tokens == 100
        with pytest.raises(anthropic.BadRequestError, match=r"thinking\.budget_tokens: must not be more than max_tokens"):
            await sdk.messages.create(**HELLO, thinking={"type": "enabled", "budget_tokens": 1001})
    async with client(house(tokenizer, "So", Forms())) as sdk:
        with pytest.raises(anthropic.BadRequestError, match=r"thinking"):
            await sdk.messages.create(**HELLO, thinking={"type": "enabled", "budget_tokens": 100})
