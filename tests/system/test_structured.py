"""Answers in a form through a whole cluster: valid and exact, though a worker dies. And the examples of the page, as they stand there."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from jsonschema import Draft202012Validator
from live_cluster import Cluster, cluster, toy

from baton.client import AsyncClient, GenerateError, Result
from baton.engine.core.grammar import Grammar
from baton.engine.core.sampling import SamplingParams
from baton.engine.core.toy import naive
from baton.engine.grammars.library import Vocabulary, compile_grammar

pytestmark = pytest.mark.system

PAGE = Path(__file__).resolve().parents[2] / "docs" / "structured.md"
SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {"type": "object", "properties": {"n": {"type": "integer"}, "s": {"type": "string", "maxLength": 6}}, "required": ["n", "s"],
              "additionalProperties": False},
    "minItems": 3,
    "maxItems": 6,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return toy(tmp_path_factory.mktemp("model"), step_delay_ms=10)


@pytest.fixture(scope="module")
def running(model: Path) -> Iterator[Cluster]:
    with cluster(model, prefill=1, decode=2) as found:
        yield found


def expected(model: Path, prompt: list[int], seed: int, max_tokens: int) -> list[int]:
    form = Grammar("json_schema", json.dumps(SCHEMA))
    matcher = compile_grammar(Vocabulary.load(model, 257, [256]), form).matcher()
    return naive(prompt, SamplingParams(max_tokens=max_tokens, seed=seed, structured=form), matcher=matcher)


async def test_answers_are_valid_and_exact_though_a_worker_dies(running: Cluster, model: Path) -> None:
    begun = asyncio.Event()

    async def ask(client: AsyncClient, seed: int) -> tuple[list[int], Result]:
        prompt = [seed % 250 + i for i in range(5 + seed)]
        async with client.generate(token_ids=prompt, seed=seed, temperature=1.0, max_tokens=200, json_schema=SCHEMA) as stream:
            async for token in stream:
                if token.index == 5:  # the shortest answer has some forty
                    begun.set()
            return prompt, stream.result

    async with AsyncClient(running.grpc) as client:
        asked = [asyncio.create_task(ask(client, seed)) for seed in range(1, 17)]
        await asyncio.wait_for(begun.wait(), 60)
        busy = max(running.workers("decode"), key=lambda worker: worker["load"]["running"])
        os.kill(busy["pid"], signal.SIGKILL)
        answers = await asyncio.gather(*asked)
    assert any(result.workers["retries"] for _, result in answers)
    for seed, (prompt, result) in enumerate(answers, 1):
        assert list(result.token_ids) == expected(model, prompt, seed, 200)
        assert result.incomplete == (result.finish_reason == "length")
        if not result.incomplete:
            Draft202012Validator(SCHEMA).validate(json.loads(result.text))
    assert sum(not result.incomplete for _, result in answers) > 8


async def test_a_refusal_reaches_the_client_with_the_path(running: Cluster) -> None:
    async with AsyncClient(running.grpc) as client:
        with pytest.raises(GenerateError) as caught:
            async with client.generate("hi", json_schema={"not": {}}) as stream:
                async for _ in stream:
                    pass
    assert caught.value.code == "INVALID_ARGUMENT" and "$.not" in str(caught.value)


ADD: dict[str, Any] = {
    "type": "object", "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "say": {"enum": ["yes", "no"]}},
    "required": ["a", "say"], "additionalProperties": False,
}  # fmt: skip


async def test_a_call_that_is_demanded_comes_valid_and_the_stream_is_the_answer(running: Cluster) -> None:
    tools: Any = [{"type": "function", "function": {"name": "add", "parameters": ADD}}, {"type": "function", "function": {"name": "time"}}]
    asked: Any = {"messages": [{"role": "user", "content": "hi"}], "tools": tools, "max_tokens": 120, "temperature": 1.0}
    async with openai.AsyncOpenAI(base_url=f"http://{running.http}/v1", api_key="none", max_retries=0) as sdk:
        for seed, choice in enumerate(("required", "required", {"type": "function", "function": {"name": "add"}}), 1):
            model = (await sdk.models.list()).data[0].id
            told: Any = {**asked, "model": model, "tool_choice": choice, "seed": seed, "parallel_tool_calls": False}
            whole = (await sdk.chat.completions.create(**told)).choices[0]
            assert whole.finish_reason == "tool_calls" and not whole.message.content
            (call,) = whole.message.tool_calls or []
            assert call.type == "function" and call.function.name in ("add", "time")[: 2 if choice == "required" else 1]
            if call.function.name == "add":
                Draft202012Validator(ADD).validate(json.loads(call.function.arguments))
            deltas = [chunk.choices[0].delta async for chunk in await sdk.chat.completions.create(**told, stream=True) if chunk.choices]
            said = [part.function for delta in deltas for part in delta.tool_calls or [] if part.function is not None]
            assert "".join(part.name or "" for part in said) == call.function.name
            assert "".join(part.arguments or "" for part in said) == call.function.arguments


def test_the_command_takes_each_form(running: Cluster, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(json.dumps({"enum": ["a", "b"]}))

    def generate(*flags: str) -> str:
        done = running.here("generate", "hi", "--address", running.grpc, *flags)
        return done.stdout.strip() if done.returncode == 0 else done.stderr

    assert generate("--json-schema", str(tmp_path / "schema.json")) in ('"a"', '"b"')
    assert re.fullmatch("[0-9]{3}", generate("--regex", "[0-9]{3}"))
    assert generate("--choice", "yes", "--choice", "no") in ("yes", "no")
    assert "give one of" in generate("--choice", "yes", "--regex", "a")


@pytest.mark.parametrize("language, program", [("python", sys.executable), ("js", "node")])
def test_the_examples_of_the_page_run(running: Cluster, tmp_path: Path, language: str, program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"there is no {program}")
    (code,) = re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code.count("http://127.0.0.1:8000") == 1
    file = tmp_path / ("example.mjs" if language == "js" else "example.py")
    file.write_text(code.replace("127.0.0.1:8000", running.http))
    done = subprocess.run([program, str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    if language == "js":
        assert done.stdout.strip() in ("yes", "no")
    else:
        person = json.loads(done.stdout)
        assert len(person["name"]) <= 20 and 0 <= person["age"] <= 150
