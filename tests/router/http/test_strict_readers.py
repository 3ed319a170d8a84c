"""Streams as benchmarks read them, which know no more of server-sent events than their own rule.

SGLang's rule is written from its source, the others from what is known of them; vLLM's benchmark itself runs in tests/system/test_vllm.py.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from http_door import CHAT, COMPLETION, HELLO, House, Script, toy_tokenizer

from router.tokenizer import Tokenizer

DATA = "data: "


def vllm(stream: str) -> list[Any]:
    """`vllm bench serve` 0.32 (StreamedResponseHandler): a message ends with an empty line; all of it but the first word is data."""
    messages = [message.strip() for message in stream.split("\n\n") if message.strip()]
    return [json.loads(data) for message in messages if (data := message.removeprefix(DATA)) != "[DONE]"]


def sglang(stream: str) -> list[Any]:
    """`sglang.benchmark.serving` 0.5.23 (async_request_openai_completions): every line is data."""
    lines = [line.strip() for line in stream.split("\n") if line.strip()]
    return [json.loads(data) for line in lines if (data := line.removeprefix(DATA)) != "[DONE]"]


def llmperf(stream: str) -> list[Any]:
    """llmperf (OpenAIChatCompletionsClient): every line is data, after as many characters as the word has."""
    lines = [line.strip() for line in stream.split("\n") if line.strip()]
    return [json.loads(data) for line in lines if (data := line[len(DATA) :]) != "[DONE]"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.mark.parametrize("read", [vllm, sglang, llmperf])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("path, body", [(CHAT, HELLO), (COMPLETION, {"prompt": "hello"})])
async def test_every_reader_understands_a_stream(
    tokenizer: Tokenizer, read: Callable[[str], list[Any]], n: int, path: str, body: dict[str, Any]
) -> None:
    asked = {**body, "stream": True, "n": n, "stream_options": {"include_usage": True}}
    answer = await House(tokenizer, Script("añb c".encode())).post(path, asked)
    chunks = read(answer.body.decode())
    texts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for chunk in chunks for choice in chunk["choices"]]
    assert sorted("".join(texts)) == sorted("añb c" * n) and chunks[-1]["usage"]["completion_tokens"] == 6 * n


@pytest.mark.parametrize("read", [vllm, sglang, llmperf])
async def test_none_of_them_understands_ids(tokenizer: Tokenizer, read: Callable[[str], list[Any]]) -> None:
    """Negative control, and the reason why ids have to be asked for."""
    answer = await House(tokenizer).post(CHAT, {**HELLO, "stream": True, "stream_options": {"include_event_ids": True}})
    with pytest.raises(json.JSONDecodeError):
        read(answer.body.decode())
