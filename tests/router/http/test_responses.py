"""The responses API: a script speaks for the model, and the unmodified OpenAI SDK, whose types are the contract, for the client."""

import asyncio
import json
import shutil
import sys
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import openai
import pytest
from http_door import Call, House, Script, failing, served, settled, toy_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_answers import MemoryAnswers
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from turns import watched

from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.keys import ApiKeys, KeyEntry
from router import kept
from router.http import json_body, responses, responses_out
from router.tokenizer import Tokenizer
from router.tools.families import BY_NAME
from router.tools.forms import Forms
from router.tools.thinking import THINK

PATH = "/v1/responses"
PAGE = Path(__file__).parents[3] / "docs" / "responses.md"
ADD: dict[str, Any] = {
    "type": "function",
    "name": "add",
    "description": "Adds numbers.",
    "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}},
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>'
THOUGHT = "<think>\nhm 🌸\n</think>\n\n"
ANSWER = f"{THOUGHT}I add.\n{CALL}\n{CALL}"
FORMS = Forms(BY_NAME["hermes"], THINK)
ASK = {"input": "hello", "tools": [ADD], "seed": 1}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
LOGPROBS = "message.output_text.logprobs"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


def house(tokenizer: Tokenizer, text: str = ANSWER, *, store: MemoryAnswers | None = None, forms: Forms = FORMS, **more: Any) -> House:
    script = {name: more.pop(name) for name in ("finish", "joins", "error", "gate", "gate_at") if name in more}
    return House(tokenizer, Script(ids=text.encode(), **{"finish": "stop", **script}), forms=forms, answers=store, **more)


@asynccontextmanager
async def client(house: House) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served(house.door) as address, openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def events_of(body: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each one valid by the SDK's type, numbered in order, and named by its line `event:`."""
    assert body.endswith(b"\n\n")
    told = []
    for number, frame in enumerate(body.decode().split("\n\n")[:-1]):
        name, data = frame.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}" and event["sequence_number"] == number
        assert EVENTS.validate_python(event).type == event["type"]
        told.append(event)
    return told


def rebuilt(events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output that the deltas add up to. The events that say what is done must say the same."""
    output: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        item: Any = output[event["output_index"]] if event.get("output_index", len(output)) < len(output) else None
        match kind:
            case "output_item.added":
                assert item is None and event["item"]["status"] == "in_progress"
                output.append(event["item"])
            case "content_part.added":
                item["content"].append(event["part"])
            case "output_text.delta":
                item["content"][0]["text"] += event["delta"]
                item["content"][0]["logprobs"] += event["logprobs"]
            case "reasoning_text.delta":
                item["content"][0]["text"] += event["delta"]
            case "function_call_arguments.delta":
                item["arguments"] += event["delta"]
            case "output_text.done":
                assert all(item["content"][0][name] == event[name] for name in ("text", "logprobs"))
            case "reasoning_text.done":
                assert item["content"][0]["text"] == event["text"]
            case "function_call_arguments.done":
                assert item["arguments"] == event["arguments"]
            case "content_part.done":
                assert item["content"] == [event["part"]]
            case "output_item.done":
                item["status"] = event["item"]["status"]
                assert item == event["item"] and event["output_index"] == len(output) - 1
    return output


def timeless(answer: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in answer.items() if name not in ("created_at", "completed_at")}


async def both_ways(make: Any, ask: dict[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The whole answer, and the events of its stream, which say the same."""
    whole = (await make().post(PATH, ask)).json
    Response.model_validate(whole)
    answer = await make().post(PATH, ask | {"stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer.body)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == f"response.{whole['status']}" and timeless(events[-1]["response"]) == timeless(whole)
    assert rebuilt(events) == whole["output"]
    return whole, events


PIECES = st.sampled_from([CALL, "text", " é🌸 ", "\n", "<tool_call>", "</think>", '{"name": "add"', "<", "\u2028", '"\\', CALL[:-5]])


@settings(max_examples=60, deadline=None)
@given(st.booleans(), st.lists(PIECES, max_size=5), st.sampled_from([1, 3, 1000]), st.sampled_from(["stop", "length"]), st.booleans())
def test_the_stream_of_any_text_adds_up_to_the_whole_answer(
    tokenizer: Tokenizer, thinks: bool, pieces: list[str], joins: int, finish: str, logprobs: bool
) -> None:
    text = (THOUGHT if thinks else "") + "".join(pieces)
    ask = ASK | ({"include": [LOGPROBS], "top_logprobs": 2} if logprobs else {})
    whole, _ = asyncio.run(both_ways(lambda: house(tokenizer, text, joins=joins, finish=finish), ask))
    assert whole["output"] and (whole["status"] == "incomplete") == (finish == "length")


async def test_thoughts_text_and_calls_are_items_in_the_order_of_the_output(tokenizer: Tokenizer) -> None:
    whole, events = await both_ways(lambda: house(tokenizer), ASK)
    thought, text, one, two = whole["output"]
    assert thought["content"] == [{"type": "reasoning_text", "text": "hm 🌸"}] and thought["summary"] == []
    assert text["content"] == [{"type": "output_text", "annotations": [], "text": "I add.", "logprobs": []}]
    assert [(call["name"], json.loads(call["arguments"])) for call in (one, two)] == [("add", {"x": 1})] * 2
    assert one["call_id"] != two["call_id"] and len({item["id"] for item in whole["output"]}) == 4
    usage = whole["usage"]
    assert usage["output_tokens"] == len(ANSWER.encode()) and 0 < usage["output_tokens_details"]["reasoning_tokens"] < 30
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert events[0]["response"]["status"] == "in_progress" and events[0]["response"]["output"] == []


async def test_an_answer_repeats_what_was_asked_for(tokenizer: Tokenizer) -> None:
    asked: dict[str, Any] = {
        "instructions": "be brief", "max_output_tokens": 900, "metadata": {"a": "b"}, "parallel_tool_calls": False, "prompt_cache_key": "k",
        "reasoning": {"effort": None}, "safety_identifier": "s", "temperature": 0.5, "top_p": 0.9, "tool_choice": "auto", "user": "u",
        "text": {"format": {"type": "text"}}, "truncation": "disabled", "tools": [ADD | {"strict": False}], "top_logprobs": 1,
    }  # fmt: skip
    whole = (await house(tokenizer, "hi").post(PATH, {"input": "hello", **asked})).json
    told = {name: whole[name] for name in asked if name != "reasoning"}
    assert told == {name: value for name, value in asked.items() if name != "reasoning"}
    assert (whole["store"], whole["background"], whole["model"], whole["object"]) == (False, False, "toy", "response")


async def test_an_empty_answer_is_an_empty_message(tokenizer: Tokenizer) -> None:
    whole, _ = await both_ways(lambda: house(tokenizer, ""), ASK)
    assert [item["content"][0]["text"] for item in whole["output"]] == [""] and whole["status"] == "completed"


async def test_an_answer_that_was_cut_is_incomplete(tokenizer: Tokenizer) -> None:
    whole, _ = await both_ways(lambda: house(tokenizer, ANSWER[:-20], finish="length"), ASK)
    assert whole["status"] == "incomplete" and whole["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["type"] for item in whole["output"]] == ["reasoning", "message", "function_call"], "a call that was cut is none"
    assert [item["status"] for item in whole["output"]] == ["completed", "completed", "incomplete"] and whole["completed_at"] is None


async def test_a_document_cut_by_a_stop_string_is_incomplete(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer(tmp_path / "toy")
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
    form = {"format": {"type": "json_schema", "name": "n", "schema": schema, "strict": True}}
    ask = {"input": "x", "text": form, "stop": "ST"}
    for text, status in (('{"a":"x"}', "completed"), ('{"a":"xSTOP"}', "incomplete")):
        script = Script(ids=[*text.encode(), 256], finish="stop")
        whole, _ = await both_ways(partial(House, tokenizer, script, path=tmp_path / "toy"), ask)
        assert whole["status"] == status and whole["text"] == form
        assert (whole["incomplete_details"] is None) == (status == "completed")


async def test_arguments_that_a_grammar_holds_stream_as_they_are_written(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer(tmp_path / "toy")
    strict = ADD["parameters"] | {"required": ["x"], "additionalProperties": False}
    ask = ASK | {"tools": [ADD | {"strict": True, "parameters": strict}], "tool_choice": {"type": "function", "name": "add"}}
    text = '<tool_call>\n{"name": "add", "arguments": {"x":123}}\n</tool_call>'
    make = partial(house, tokenizer, text, forms=Forms(BY_NAME["hermes"]), path=tmp_path / "toy")
    whole, events = await both_ways(make, ask)
    (call,) = whole["output"]
    assert json.loads(call["arguments"]) == {"x": 123} and whole["tool_choice"] == ask["tool_choice"]
    assert sum(event["type"] == "response.function_call_arguments.delta" for event in events) > 3
    cut, _ = await both_ways(partial(make.func, tokenizer, text[:-20], finish="length", **make.keywords), ask)
    assert cut["status"] == "incomplete" and cut["output"][-1]["status"] == "incomplete"


async def test_logprobs_are_those_of_the_tokens_of_the_text(tokenizer: Tokenizer) -> None:
    for ask in ({"include": [LOGPROBS]}, {"top_logprobs": 2}, {"include": [LOGPROBS], "top_logprobs": 2}):
        whole, _ = await both_ways(lambda: house(tokenizer, f"{THOUGHT}I é.\n{CALL}\nSo"), ASK | ask)
        for item in whole["output"]:
            if item["type"] == "message":
                (part,) = item["content"]
                assert bytes(byte for entry in part["logprobs"] for byte in entry["bytes"]).decode() == part["text"]
                assert {len(entry["top_logprobs"]) for entry in part["logprobs"]} == {ask.get("top_logprobs", 0)}


async def test_obfuscation_hides_the_length_of_a_delta(tokenizer: Tokenizer) -> None:
    ask = {"input": "x", "stream": True, "stream_options": {"include_obfuscation": True}}
    events = events_of((await house(tokenizer, "a longer text", joins=5).post(PATH, ask)).body)
    padded = [len(json.dumps(event["delta"])) + len(event["obfuscation"]) for event in events if event["type"].endswith("delta")]
    assert padded and not any(size % responses_out.PADDED for size in padded)


# The SDK


class Sum(BaseModel):
    x: int
    why: str


async def test_the_sdk_creates_streams_and_parses(tmp_path: Path) -> None:
    tokenizer = toy_tokenizer(tmp_path / "toy")
    text = '{"x":3,"why":"so"}'
    made = House(tokenizer, Script(ids=[*text.encode(), 256], finish="stop"), path=tmp_path / "toy")
    async with client(made) as sdk:
        answer = await sdk.responses.create(model="toy", input="hello")
        assert answer.output_text == text and answer.status == "completed" and answer.usage
        parsed = await sdk.responses.parse(model="toy", input="hello", text_format=Sum)
        assert parsed.output_parsed == Sum(x=3, why="so")
        async with sdk.responses.stream(model="toy", input="hello", text_format=Sum) as stream:
            events = [event async for event in stream]
            final = await stream.get_final_response()
        assert final.output_parsed == Sum(x=3, why="so") and events[-1].type == "response.completed"
        done: Any = next(event for event in events if event.type == "response.output_text.done")
        assert done.parsed == Sum(x=3, why="so")
        plain = [event async for event in await sdk.responses.create(model="toy", input="hello", stream=True)]
        assert "".join(event.delta for event in plain if event.type == "response.output_text.delta") == text

        def blocking() -> None:
            with openai.OpenAI(base_url=sdk.base_url, api_key="none", max_retries=0) as sync:
                assert sync.responses.create(model="toy", input="hello").output_text == text
                with sync.responses.stream(model="toy", input="hello") as told:
                    assert told.get_final_response().output_text == text
                assert sync.responses.parse(model="toy", input="x", text_format=Sum).output_parsed == Sum(x=3, why="so")

        await asyncio.to_thread(blocking)


async def test_a_tool_loop_goes_on_by_items_or_by_the_id_with_the_same_prompt(tokenizer: Tokenizer) -> None:
    made = house(tokenizer, store=MemoryAnswers())
    tools: Any = [ADD]
    async with client(made) as sdk:
        async with sdk.responses.stream(model="toy", input="hello", tools=tools, instructions="be brief") as stream:
            answer: Any = await stream.get_final_response()
        calls = [item for item in answer.output if item.type == "function_call"]
        assert [json.loads(call.arguments) for call in calls] == [{"x": 1}] * 2
        results: Any = [{"type": "function_call_output", "call_id": call.call_id, "output": f"r{i}"} for i, call in enumerate(calls)]
        again: Any = {"model": "toy", "tools": tools, "instructions": "be brief"}
        by_items: Any = [{"role": "user", "content": "hello"}, *answer.output, *results]
        await sdk.responses.create(input=by_items, **again)
        await sdk.responses.create(input=[by_items[0], *(item.to_dict() for item in answer.output), *results], **again)
        second = await sdk.responses.create(input=results, previous_response_id=answer.id, **again)
        prompts = [bytes(request.tokens[: request.prompt_len]) for request in made.script.begun]
        assert prompts[1] == prompts[2] == prompts[3] and prompts[0] != prompts[1]
        shown = prompts[1].decode()
        assert shown.index("be brief") < shown.index("hello") < shown.index("I add.") < shown.index("r0") < shown.index("r1")
        third = await sdk.responses.create(model="toy", input="and now?", previous_response_id=second.id)
        shown = bytes(made.script.begun[-1].tokens[: made.script.begun[-1].prompt_len]).decode()
        assert "be brief" not in shown, "instructions are not carried over"
        assert shown.index("hello") < shown.index("r1") < shown.rindex("I add.") < shown.index("and now?")
        assert third.previous_response_id == second.id
        found = await sdk.responses.retrieve(third.id)
        assert found == third
        await sdk.responses.delete(third.id)
        with pytest.raises(openai.NotFoundError):
            await sdk.responses.retrieve(third.id)
    made.check()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model"),
        ({"temperature": -1}, openai.BadRequestError, "temperature"),
        ({"max_output_tokens": 0}, openai.BadRequestError, "max_output_tokens"),
        ({"max_output_tokens": 1 << 20}, openai.BadRequestError, "max_output_tokens"),
        ({"input": "x" * 5000}, openai.BadRequestError, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, openai.BadRequestError, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, openai.BadRequestError,
         "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "function_call_output", "call_id": "c", "output": "1"}]},
         openai.BadRequestError, "input[1].call_id"),
        ({"input": [{"role": "user", "content": "x"}, {"type": "function_call", "call_id": "c", "name": "a", "arguments": "{"}]},
         openai.BadRequestError, "input[1].arguments"),
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError, "tools[0].type"),
        ({"tools": [ADD, ADD | {"name": "a b"}]}, openai.BadRequestError, "tools[1].name"),
        ({"tools": [ADD, ADD]}, openai.BadRequestError, "tools[1].name"),
        ({"tools": [ADD | {"strict": True, "parameters": {"not": {}}}]}, openai.BadRequestError, "tools[0].parameters"),
        ({"tool_choice": {"type": "function", "name": "other"}}, openai.BadRequestError, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, openai.BadRequestError, "tool_choice.type"),
        ({"reasoning": {"effort": "high"}}, openai.BadRequestError, "reasoning.effort"),
        ({"include": ["file_search_call.results"]}, openai.BadRequestError, "include[0]"),
        ({"text": {"format": {"type": "json_object"}}, "tools": [ADD]}, openai.BadRequestError, "text.format"),
        ({"text": {"format": {"type": "xml"}}}, openai.BadRequestError, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "n"}}}, openai.BadRequestError, "text.format.schema"),
        ({"background": True}, openai.BadRequestError, "background"),
        ({"truncation": "auto"}, openai.BadRequestError, "truncation"),
        ({"previous_response_id": "resp_1"}, openai.NotFoundError, "previous_response_id"),
        ({"top_logprobs": 21}, openai.BadRequestError, "top_logprobs"),
        ({"extra_body": {"response_format": {"type": "json_object"}}}, openai.BadRequestError, "response_format"),
        ({"extra_body": {"chat_template_kwargs": {"x": 1}}}, openai.BadRequestError, "chat_template_kwargs.x"),
    ],
)  # fmt: skip
async def test_refusals_are_exceptions_of_the_sdk_with_the_path(
    tokenizer: Tokenizer, fields: dict[str, Any], kind: type[openai.APIStatusError], param: str, stream: bool
) -> None:
    made = house(tokenizer, store=MemoryAnswers(), forms=Forms(BY_NAME["hermes"]))
    async with client(made) as sdk:
        with pytest.raises(kind) as caught:
            await sdk.responses.create(**{"model": "toy", "input": "hello", "stream": stream, **fields})
    assert caught.value.param == param and caught.value.message.find(param) >= 0
    assert made.service.idle


async def test_other_statuses_have_their_exceptions(tokenizer: Tokenizer) -> None:
    for error, kind in (
        (BatonError(Reason.NO_WORKER, "x"), openai.InternalServerError),
        (BatonError(Reason.SATURATED, "x"), openai.RateLimitError),
        (BatonError(Reason.UNAUTHENTICATED, "x"), openai.AuthenticationError),
    ):
        async with client(House(tokenizer, failing(error), answers=MemoryAnswers())) as sdk:
            for stream in (False, True):
                with pytest.raises(kind):
                    await sdk.responses.create(model="toy", input="hello", stream=stream)


async def test_a_stream_that_breaks_is_never_taken_for_a_finished_one(tokenizer: Tokenizer) -> None:
    store = MemoryAnswers()
    error = BatonError(Reason.RETRIES_SPENT, "the worker has died")
    make = partial(House, tokenizer, failing(error, after=2), answers=store)
    events = events_of((await make().post(PATH, {"input": "x", "stream": True})).body)
    failed, last = events[-2:]
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed" and failed["response"]["store"] is False
    assert failed["response"]["error"] == {"code": "server_error", "message": "the worker has died"}
    assert (last["type"], last["code"], last["message"]) == ("error", "retries_spent", "the worker has died")
    assert not any(event["type"] in ("response.completed", "response.incomplete") for event in events) and not store.kept
    async with client(make()) as sdk:
        with pytest.raises(openai.APIError) as caught:
            [event async for event in await sdk.responses.create(model="toy", input="x", stream=True)]
        assert caught.value.code == "retries_spent"
        async with sdk.responses.stream(model="toy", input="x") as stream:
            with pytest.raises(openai.APIError):
                await stream.get_final_response()


async def test_a_stream_has_no_ids_and_says_so(tokenizer: Tokenizer) -> None:
    ask = {"input": "x", "stream": True}
    refused = await house(tokenizer).post(PATH, ask, headers={"x-event-ids": "true"})
    assert (refused.status, refused.error["param"]) == (400, "x-event-ids")
    refused = await house(tokenizer).post(PATH, ask, headers={"last-event-id": "1.AAAAAAAAAAAA.1.1.AAAA"})
    assert (refused.status, refused.error["param"]) == (400, "last-event-id")


# Answers that are kept


def keys(**tenants: str) -> ApiKeys:
    return ApiKeys(KeyEntry(key, sha256(key.encode()).digest(), tenant) for key, tenant in tenants.items())


async def test_an_answer_says_whether_it_is_kept(tokenizer: Tokenizer) -> None:
    for stream in (False, True):
        for store, fields, stored in (
            (MemoryAnswers(), {}, True),
            (MemoryAnswers(), {"store": True}, True),
            (MemoryAnswers(), {"store": False}, False),
            (MemoryAnswers(away=True), {}, False),
            (MemoryAnswers(away=True), {"store": True}, False),
            (None, {}, False),
        ):
            answer = await house(tokenizer, "hi", store=store).post(PATH, {"input": "x", "stream": stream, **fields})
            told = events_of(answer.body)[-1]["response"] if stream else answer.json
            assert told["status"] == "completed" and told["store"] is stored and bool(store and store.kept) is stored


async def test_what_is_too_large_is_not_kept_and_not_lost(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryAnswers()
    config = RouterConfig(response_bytes=2000)
    answer = (await house(tokenizer, "y" * 2000, store=store, config=config).post(PATH, {"input": "x"})).json
    assert answer["output"][0]["content"][0]["text"] == "y" * 2000 and answer["store"] is False and not store.kept
    monkeypatch.setattr(json_body, "MAX_NODES", 40)  # enough for the body
    answer = (await house(tokenizer, "y", store=store).post(PATH, {"input": "x"})).json
    assert answer["status"] == "completed" and answer["store"] is False and not store.kept, "reading it again would delay others"


async def test_without_a_store_going_on_is_refused_by_name(tokenizer: Tokenizer) -> None:
    for fields, param in (({"previous_response_id": "resp_1"}, "previous_response_id"), ({"store": True}, "store")):
        refused = await house(tokenizer).post(PATH, {"input": "x", **fields})
        assert (refused.status, refused.error["param"], refused.error["code"]) == (400, param, "unsupported_parameter")
        assert "router.responses_keep_s" in refused.error["message"]
    assert (await house(tokenizer).get(f"{PATH}/resp_1")).status == 400


async def test_a_store_that_is_away_refuses_at_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "AGAIN_S", 60.0)
    store = MemoryAnswers()
    made = house(tokenizer, "hi", store=store)
    id_ = (await made.post(PATH, {"input": "x"})).json["id"]
    store.away = True
    asked = store.asked
    for _ in range(3):
        refused = await made.post(PATH, {"input": "x", "previous_response_id": id_, "stream": True})
        assert (refused.status, refused.error["param"], refused.error["code"]) == (503, "previous_response_id", "store_unavailable")
        assert refused.headers["retry-after"] == "1"
    assert (await made.get(f"{PATH}/{id_}")).status == (await made.get(f"{PATH}/{id_}", "DELETE")).status == 503
    assert store.asked == asked + 1, "it is not asked again for a moment"
    store.away = False
    loop = asyncio.get_running_loop()
    now = loop.time
    monkeypatch.setattr(loop, "time", lambda: now() + 60.0)
    assert (await made.post(PATH, {"input": "x", "previous_response_id": id_})).status == 200


async def test_an_id_of_another_tenant_cannot_be_told_from_an_unknown_one(tokenizer: Tokenizer) -> None:
    made = house(tokenizer, "hi", store=MemoryAnswers(), keys=keys(a="one", b="one", c="other"))
    own, other = {"authorization": "Bearer a"}, {"authorization": "Bearer c"}
    id_ = (await made.post(PATH, {"input": "secret"}, headers=own)).json["id"]
    for key in ("a", "b"):
        headers = {"authorization": f"Bearer {key}"}
        assert (await made.post(PATH, {"input": "x", "previous_response_id": id_}, headers=headers)).status == 200
        assert (await made.get(f"{PATH}/{id_}", headers=headers)).json["id"] == id_
    begun = len(made.script.begun)
    strange = await made.post(PATH, {"input": "x", "previous_response_id": id_}, headers=other)
    unknown = await made.post(PATH, {"input": "x", "previous_response_id": "resp_none"}, headers=other)
    assert (strange.status, strange.body) == (unknown.status, unknown.body) == (404, strange.body) and len(made.script.begun) == begun
    assert strange.error["param"] == "previous_response_id"
    for method in ("GET", "DELETE"):
        found, none = [await made.get(f"{PATH}/{one}", method, headers=other) for one in (id_, "resp_none")]
        assert (found.status, found.body) == (none.status, none.body) and found.status == 404
    assert (await made.get(f"{PATH}/{id_}")).status == 401
    assert (await made.get(f"{PATH}/{id_}", headers=own)).status == 200


async def test_a_record_that_was_altered_or_is_of_another_cluster_is_none(tokenizer: Tokenizer) -> None:
    store = MemoryAnswers()
    id_ = (await house(tokenizer, "hi", store=store).post(PATH, {"input": "x"})).json["id"]
    go_on = {"input": "x", "previous_response_id": id_, "store": False}
    assert (await house(tokenizer, "hi", store=store).post(PATH, go_on)).status == 200, "any router of the cluster"
    assert (await house(tokenizer, "hi", store=store, receipt_key=b"o" * 32).post(PATH, go_on)).status == 404
    ((name, _),) = store.kept.items()
    store.kept[name] = store.kept[name].replace(b'"content":"x"', b'"content":"y"')
    assert (await house(tokenizer, "hi", store=store).post(PATH, go_on)).status == 404


async def test_a_call_that_was_cut_is_not_part_of_the_conversation(tmp_path: Path) -> None:
    """Its arguments are no JSON, so nobody could go on otherwise."""
    tokenizer = toy_tokenizer(tmp_path / "toy")
    store, text = MemoryAnswers(), '<tool_call>\n{"name": "add", "arguments": {"x": 1'

    def make(text: str, finish: Any) -> House:
        script = Script(ids=text.encode(), finish=finish)
        return House(tokenizer, script, forms=Forms(BY_NAME["hermes"]), path=tmp_path / "toy", answers=store)

    answer = (await make(text, "length").post(PATH, ASK | {"tool_choice": "required"})).json
    assert answer["status"] == "incomplete" and answer["store"]
    cut = [item for item in answer["output"] if item["type"] == "function_call"]
    assert [item["status"] for item in cut] in (["incomplete"], [])
    assert (await make("hi", "stop").post(PATH, {"input": "x", "previous_response_id": answer["id"]})).status == 200


async def test_an_answer_whose_client_has_left_is_not_kept(tokenizer: Tokenizer) -> None:
    store, gate = MemoryAnswers(), asyncio.Event()
    made = house(tokenizer, "a longer answer", store=store, gate=gate, gate_at=5)
    call = Call(made.door, "POST", PATH, {"input": "x", "stream": True}, leave_after=3)
    await call.run()
    gate.set()
    await settled(lambda: made.service.idle)
    made.check()
    assert not store.kept and b"response.completed" not in call.got


async def test_queries_are_refused_by_name(tokenizer: Tokenizer) -> None:
    made = house(tokenizer, "hi", store=MemoryAnswers())
    id_ = (await made.post(PATH, {"input": "x"})).json["id"]
    refused = await made.get(f"{PATH}/{id_}?stream=true")
    assert (refused.status, refused.error["param"]) == (400, "stream")
    assert (await made.get(f"{PATH}/{id_}", "PUT")).status == 405


async def test_a_long_conversation_holds_nobody_up(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte is read from the body, kept, found again and rendered."""
    threads: list[threading.Thread] = []

    def parse(record: bytes) -> Any:
        threads.append(threading.current_thread())
        return json_body.parse(record)

    monkeypatch.setattr(responses, "parse", parse)
    store, long = MemoryAnswers(), 1 << 21
    made = House(tokenizer, Script(ids=b"hi", finish="stop"), RouterConfig(response_bytes=8 << 20), answers=store, context=long)
    said = [{"role": "user", "content": "é" * 1000}, {"role": "assistant", "content": "y" * 100}] * 450
    tools = [ADD | {"name": f"t{i}", "parameters": {f"p{j}": {} for j in range(110)}} for i in range(100)]
    body = json.dumps({"input": said, "max_output_tokens": 2, "tools": tools, "tool_choice": "none", "stream": True}).encode()
    with watched() as turns:
        first = await made.post(PATH, body)
        id_ = first.body.partition(b'"id":"')[2].partition(b'"')[0].decode()
        second = await made.post(PATH, {"input": "x", "previous_response_id": id_, "stream": True, "max_output_tokens": 2})
        told = await made.get(f"{PATH}/{id_}")
    assert (first.status, second.status, told.status) == (200, 200, 200) and made.script.said == 4
    assert events_of(first.body)[-1]["response"]["store"] is told.json["store"] is True
    assert max(map(len, store.kept.values())) > 2_500_000
    assert len(threads) == 2 and threading.main_thread() not in threads
    turns.check(0.020)


async def test_the_end_of_a_long_answer_holds_nobody_up(tokenizer: Tokenizer) -> None:
    """It repeats the whole answer four times, with the log-probabilities of every token."""
    made = house(tokenizer, "y" * 7000, joins=100, store=MemoryAnswers(), context=1 << 14)
    with watched() as turns:
        answer = await made.post(PATH, {"input": "x", "stream": True, "top_logprobs": 20})
    assert len(answer.body) > 25_000_000 and answer.body.rindex(b"event: response.completed") > 18_000_000
    turns.check(0.020)


async def test_an_answer_is_bounded(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(responses_out, "MAX_WHOLE_BYTES", 1000)
    made = house(tokenizer, "y" * 2000, joins=10)
    refused = await made.post(PATH, {"input": "x"})
    assert (refused.status, refused.error["param"]) == (400, "max_output_tokens")
    events = events_of((await made.post(PATH, {"input": "x", "stream": True})).body)
    assert events[-1]["type"] == "error" and events[-1]["param"] == "max_output_tokens"
    made.check()


@pytest.mark.parametrize(("language", "program"), [("python", sys.executable), ("js", "node")])
async def test_the_examples_of_the_page_run(tokenizer: Tokenizer, tmp_path: Path, language: str, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program} here")
    code = PAGE.read_text().partition(f"```{language}\n")[2].partition("```")[0]
    file = tmp_path / f"example.{'py' if language == 'python' else 'mjs'}"
    async with served(house(tokenizer, "Once.", store=MemoryAnswers()).door) as address:
        file.write_text(code.replace("127.0.0.1:8000", address).replace('"tale"', '"toy"'))
        process = await asyncio.create_subprocess_exec(program, str(file), stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
    assert process.returncode == 0 and out.decode().split() == ["Once."] * (2 if language == "python" else 1)
