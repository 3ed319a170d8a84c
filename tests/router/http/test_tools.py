"""Tools and thinking over HTTP: a script speaks for the model, and the unmodified OpenAI SDK for the client."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from http_door import CHAT, HELLO, House, Script, served, toy_tokenizer

from baton.cluster.config_router import RouterConfig
from baton.engine.options import ModelOptions
from baton.models.make_small import make_toy
from router.tokenizer import Tokenizer
from router.tools.families import BY_NAME, FAMILIES
from router.tools.forms import Forms
from router.tools.thinking import THINK

ADD: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds numbers.",
        "parameters": {"type": "object", "properties": {"x": {"type": "integer"}, "note": {"type": "string"}}},
    },
}
TIME: dict[str, Any] = {"type": "function", "function": {"name": "time"}}
ARGUMENTS = {"x": 12345678901234567890, "note": 'é🌸 "quoted" \\ }'}
CALL = f"<tool_call>\n{json.dumps({'name': 'add', 'arguments': ARGUMENTS}, ensure_ascii=False)}\n</tool_call>"
TWO = f'I add.\n{CALL}\n<tool_call>\n{{"name": "time", "arguments": {{}}}}\n</tool_call>'
PAGE = Path(__file__).parents[3] / "docs" / "tools.md"
NPM_PACKAGE = "openai@6.49.0"
HERMES = Forms(BY_NAME["hermes"])
ASK = HELLO | {"tools": [ADD, TIME], "seed": 1}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


def house(tokenizer: Tokenizer, text: str, forms: Forms = HERMES, path: Path | None = None, **script: Any) -> House:
    return House(tokenizer, Script(ids=text.encode(), **{"finish": "stop", **script}), forms=forms, path=path)


def assembled(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What the deltas of a choice add up to."""
    made: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "finish": None}
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"]
            made["content"] += delta.get("content") or ""
            made["reasoning"] += delta.get("reasoning") or ""
            assert delta.get("reasoning") == delta.get("reasoning_content")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(made["calls"]):
                    made["calls"].append([call["id"], call["function"]["name"], ""])
                made["calls"][call["index"]][2] += call["function"]["arguments"]
            made["finish"] = choice["finish_reason"] or made["finish"]
    return made


@asynccontextmanager
async def client(house: House) -> AsyncIterator[openai.AsyncOpenAI]:
    async with served(house.door) as address, openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


async def test_the_stream_of_a_call_equals_the_whole_answer(tokenizer: Tokenizer) -> None:
    whole = (await house(tokenizer, TWO).post(CHAT, ASK)).json
    message = whole["choices"][0]["message"]
    assert message["content"] == "I add." and whole["choices"][0]["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add", "time"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    for joins in (1, 7, 1000):
        chunks = (await house(tokenizer, TWO, joins=joins).post(CHAT, ASK | {"stream": True})).chunks
        made = assembled(chunks)
        assert made["content"] == "I add." and made["finish"] == "tool_calls"
        assert made["calls"] == [[call["id"], call["function"]["name"], call["function"]["arguments"]] for call in message["tool_calls"]]
        assert len(chunks) == len(TWO.encode()) + 2, "a chunk for each token, besides the first and the last"


async def test_the_sdk_reads_calls_whole_and_streamed(tokenizer: Tokenizer) -> None:
    made = house(tokenizer, f"<think>\nhm\n</think>\n\n{TWO}", Forms(BY_NAME["hermes"], THINK))
    asked: Any = {"model": "toy", "messages": HELLO["messages"], "tools": [ADD, TIME]}
    async with client(made) as sdk:
        answer = await sdk.chat.completions.create(**asked)
        choice = answer.choices[0]
        calls: Any = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and choice.message.content == "I add."
        assert choice.message.reasoning_content == "hm"
        assert answer.usage and answer.usage.completion_tokens_details
        assert answer.usage.completion_tokens_details.reasoning_tokens == len("<think>\nhm\n</think>") - len("<think")
        async with sdk.chat.completions.stream(**asked) as stream:
            events = [event async for event in stream]
            final = (await stream.get_final_completion()).choices[0]
        done: Any = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert [(event.name, json.loads(event.arguments)) for event in done] == [("add", ARGUMENTS), ("time", {})]
        told: Any = final.message.tool_calls
        assert [(call.function.name, call.function.arguments) for call in told] == [(c.function.name, c.function.arguments) for c in calls]
        assert (final.finish_reason, final.message.content) == ("tool_calls", "I add.")
        # The agent's next turn: the answer goes back with the results.
        turns: Any = [*HELLO["messages"], choice.message.model_dump(exclude_none=True)]
        turns += [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in calls]
        await sdk.chat.completions.create(model="toy", messages=turns, tools=asked["tools"])
    prompt = bytes(made.script.begun[-1].tokens[: made.script.begun[-1].prompt_len]).decode()
    assert "Result of add: 42" in prompt and json.dumps(ARGUMENTS, ensure_ascii=False) in prompt and '"Adds numbers."' in prompt


async def test_a_stream_that_died_in_an_argument_goes_on_with_the_same_deltas(tokenizer: Tokenizer) -> None:
    body = ASK | {"stream": True, "stream_options": {"include_event_ids": True}, "return_token_ids": True}
    events = (await house(tokenizer, TWO).post(CHAT, body)).events[:-1]
    want = assembled([json.loads(data) for data, _ in events])
    for cut in (2, TWO.index("add") + 3, TWO.index("é") + 2, len(TWO) - 30):
        had = [json.loads(data) for data, _ in events[:cut]]
        ids = [id_ for chunk in had for id_ in chunk["choices"][0].get("token_ids", ())]
        for known in ({}, {"output_so_far": ids}):
            # Another router of the cluster, to which the client knows nothing but the id of its last event, and perhaps the tokens.
            rest = await house(tokenizer, TWO).post(CHAT, body | known, headers={"last-event-id": events[cut - 1][1]})
            assert rest.status == 200
            assert assembled([*had, *rest.chunks]) == want


async def test_what_is_no_call_is_content(tokenizer: Tokenizer) -> None:
    text = '<tool_call>\n{"name": "add", "arguments": {"x": 1}\n</tool_call>'
    for body in (ASK, ASK | {"tool_choice": "none"}, HELLO):
        answer = (await house(tokenizer, text).post(CHAT, body)).json["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == (text, "stop") and "tool_calls" not in answer["message"]
    answer = (await house(tokenizer, TWO).post(CHAT, ASK | {"tool_choice": "none"})).json["choices"][0]
    assert answer["message"]["content"] == TWO, "nothing was asked for, so nothing is read"


async def test_a_call_that_is_cut_off_is_no_call_and_the_finish_reason_tells(tokenizer: Tokenizer) -> None:
    made = house(tokenizer, TWO[: TWO.index("quoted")], finish="length")
    answer = (await made.post(CHAT, ASK)).json["choices"][0]
    assert answer["message"] == {"role": "assistant", "content": "I add.", "refusal": None} and answer["finish_reason"] == "length"


async def test_without_parallel_calls_the_answer_ends_with_the_first(tokenizer: Tokenizer) -> None:
    for joins in (1, 1000):
        made = house(tokenizer, TWO, joins=joins)
        answer = (await made.post(CHAT, ASK | {"parallel_tool_calls": False})).json
        (choice,) = answer["choices"]
        assert [call["function"]["name"] for call in choice["message"]["tool_calls"]] == ["add"]
        assert choice["finish_reason"] == "tool_calls" and answer["usage"]["completion_tokens"] <= len(TWO.encode()) - 60
        made.check()


async def test_thinking_is_told_apart_unless_the_client_does_not_want_it(tokenizer: Tokenizer) -> None:
    forms = Forms(thinking=THINK)
    answer = (await house(tokenizer, "<think>hm</think>So", forms).post(CHAT)).json["choices"][0]["message"]
    assert (answer["content"], answer["reasoning"], answer["reasoning_content"]) == ("So", "hm", "hm")
    answer = (await house(tokenizer, "<think>hm</think>So", forms).post(CHAT, HELLO | {"separate_reasoning": False})).json
    assert answer["choices"][0]["message"]["content"] == "<think>hm</think>So"
    one = House(tokenizer, Script(ids=b"<think>hm</think>So"), RouterConfig(reasoning_field="reasoning"), forms=forms)
    assert set((await one.post(CHAT)).json["choices"][0]["message"]) == {"role", "content", "refusal", "reasoning"}


async def test_the_example_of_the_page_runs(tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]) -> None:
    code = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    made = house(tokenizer, CALL)
    async with client(made) as sdk:
        await asyncio.to_thread(exec, code.replace("http://127.0.0.1:8000/v1", str(sdk.base_url)).replace('"tale"', '"toy"'), {})
    id_, name, arguments = capsys.readouterr().out.strip().split(" ", 2)
    assert id_.startswith("call_") and name == "add" and json.loads(arguments) == ARGUMENTS


@pytest.fixture(scope="module")
def npm_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with OpenAI's package for Node."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("there is no Node")
    folder = tmp_path_factory.mktemp("npm")
    install = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), NPM_PACKAGE]
    try:
        subprocess.run(install, capture_output=True, text=True, timeout=120, check=True)
    except subprocess.SubprocessError as error:
        pytest.skip(f"npm cannot install {NPM_PACKAGE}: {error}")
    return folder


async def test_the_example_for_node_runs(tokenizer: Tokenizer, npm_folder: Path) -> None:
    code = PAGE.read_text().partition("```js\n")[2].partition("```")[0]
    made = house(tokenizer, CALL)
    async with client(made) as sdk:
        file = npm_folder / "example.mjs"
        file.write_text(code.replace("http://127.0.0.1:8000/v1", str(sdk.base_url)).replace('"tale"', '"toy"'))
        running = await asyncio.create_subprocess_exec("node", str(file), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        async with asyncio.timeout(60):
            told, wrong = await running.communicate()
    id_, name, arguments = told.decode().strip().split(" ", 2)
    assert id_.startswith("call_") and name == "add" and json.loads(arguments) == ARGUMENTS and not wrong


RESULT = {"role": "tool", "tool_call_id": "c", "content": "1"}
CALLED = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "add", "arguments": "{}"}}]}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [ADD, TIME, ADD]}, "tools[2].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]}, "tools[0].function.parameters"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"not": {}}, "strict": True}}]},
         "tools[0].function.parameters"),
        ({"tools": [TIME, {"type": "function", "function": {"name": "a", "parameters": {"type": 1}}}], "tool_choice": "required"},
         "tools[1].function.parameters"),
        ({"response_format": {"type": "json_object"}}, "response_format.json_schema.schema"),
        ({"tools": [{"type": "function", "function": {"name": "a", "description": "\ud800"}}]}, "tools"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type"),
        ({"tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice.function.name"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"messages": [*HELLO["messages"], RESULT]}, "messages[1].tool_call_id"),
        ({"messages": [*HELLO["messages"], RESULT, CALLED]}, "messages[1].tool_call_id"),
        ({"messages": [*HELLO["messages"], CALLED, CALLED]}, "messages[2].tool_calls[0].id"),
        ({"messages": [{"role": "user", "content": "a", "tool_calls": CALLED["tool_calls"]}]}, "messages[0].tool_calls"),
        ({"messages": [CALLED | {"tool_calls": [{"id": "c", "function": {"name": "add", "arguments": "1"}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
        ({"messages": [CALLED | {"tool_calls": [{"id": "c", "function": {"name": "add"}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
        ({"max_tokens": 5, "max_thinking_tokens": 6}, "max_thinking_tokens"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs.enable_thinking"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs.messages"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "continue_final_message"),
    ],
)  # fmt: skip
async def test_bad_input_is_refused_with_its_path(tokenizer: Tokenizer, fields: dict[str, Any], param: str) -> None:
    made = house(tokenizer, "x")
    answer = await made.post(CHAT, ASK | fields)
    assert answer.status == 400 and answer.error["param"] == param
    assert made.script.begun == []


async def test_calls_are_demanded_by_a_grammar_of_the_tools(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """What the workers get. That they obey, and that what they may write is read, is shown by others."""
    make_toy(tmp_path / "model")
    text = CALL
    strict = {"type": "function", "function": {**ADD["function"], "strict": True}}
    one = {"type": "function", "function": {"name": "time"}}
    for fields, named, required in (
        ({"tool_choice": "required"}, ("add", "time"), True),
        ({"tool_choice": one}, ("time",), True),
        ({"tools": [strict, TIME]}, ("add", "time"), False),
    ):
        made = house(tokenizer, text, path=tmp_path / "model")
        answer = await made.post(CHAT, ASK | fields | {"return_sampling": True})
        assert answer.status == 200, answer.error
        assert "structured_outputs" not in answer.json["choices"][0].get("sampling", {}), "a client that sends it back would be refused"
        (request,) = made.script.begun
        form = request.params.structured
        assert form is not None and form.kind == "lark"
        assert all((f'\\"name\\": \\"{name}\\"' in form.text) == (name in named) for name in ("add", "time"))
        assert ("TEXT" not in form.text.partition("\n")[2].partition("\n")[0]) == required
        assert answer.json["choices"][0]["finish_reason"] == "tool_calls" or named == ("time",)
    for fields in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"}):
        made = house(tokenizer, text, path=tmp_path / "model")
        await made.post(CHAT, ASK | fields)
        assert made.script.begun[0].params.structured is None


async def test_a_form_that_cannot_be_demanded_is_refused(tokenizer: Tokenizer) -> None:
    made = house(tokenizer, "x", forms=Forms(BY_NAME["llama_pythonic"], templated=True))
    answer = await made.post(CHAT, ASK | {"tool_choice": "required"})
    assert answer.status == 400 and answer.error["param"] == "tool_choice" and "llama_pythonic" in answer.error["message"]


async def test_a_last_message_goes_on_and_the_generation_prompt_can_be_left_out(tokenizer: Tokenizer) -> None:
    made = house(tokenizer, "x")
    messages = [*HELLO["messages"], {"role": "assistant", "content": "Once upon "}]
    await made.post(CHAT, {"messages": messages, "add_generation_prompt": False, "continue_final_message": True})
    await made.post(CHAT, {"messages": HELLO["messages"], "add_generation_prompt": False})
    await made.post(CHAT)
    continued, bare, usual = (bytes(one.tokens[: one.prompt_len]).decode() for one in made.script.begun)
    assert continued.rstrip().endswith("Once upon") and usual.startswith(bare) and len(usual) > len(bare)


async def test_the_ids_of_calls_differ_between_answers_and_fit_the_family(tokenizer: Tokenizer) -> None:
    made = house(tokenizer, TWO)
    ids = [call["id"] for body in (ASK, ASK | {"n": 2}) for choice in (await made.post(CHAT, body)).json["choices"]
           for call in choice["message"]["tool_calls"]]  # fmt: skip
    assert len(set(ids)) == 6
    mistral = house(tokenizer, "[TOOL_CALLS]time[ARGS]{}", Forms(BY_NAME["mistral"]))
    (call,) = (await mistral.post(CHAT, ASK)).json["choices"][0]["message"]["tool_calls"]
    assert len(call["id"]) == 9 and call["id"].isalnum()


def test_the_configuration_knows_every_family() -> None:
    formats = ModelOptions.model_json_schema()["properties"]["tool_format"]["enum"]
    assert set(formats) == {"auto", *(family.name for family in FAMILIES)}


async def test_many_streams_with_calls_end_and_leave_nothing(tokenizer: Tokenizer) -> None:
    made = house(tokenizer, TWO)
    answers = await asyncio.gather(*(made.post(CHAT, ASK | {"stream": True}) for _ in range(20)))
    assert {answer.status for answer in answers} == {200}
    made.check()
