"""A prompt of 220 KB takes 0.1 s and more to tokenize and hash: the router's loop goes on meanwhile, whatever door it came through."""

import asyncio
import random
from collections.abc import Callable
from typing import Any

import pytest
from readers import Hall, hall
from turns import Turns, watched

from baton.cli.up import SHIPPED
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from router.tokenizer import Tokenizer
from router.tokenizer_pool import TokenizerPool

BYTES, TURN_S, TOKENS = 220_000, 0.020, 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(SHIPPED)


@pytest.fixture(scope="module")
def prompts(tokenizer: Tokenizer) -> list[str]:
    words = [word for i in range(tokenizer.vocab_size) if (word := tokenizer.decode([i])).strip().isalpha()]
    rng = random.Random(7)
    return [" ".join(rng.choices(words, k=BYTES // 4))[:BYTES] for _ in range(3)]


async def over_grpc(made: Hall, prompt: dict[str, Any]) -> int:
    sampling = pb.SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    count = 0
    async for response in generation_pb2_grpc.GenerationStub(made.channel).Generate(pb.GenerateRequest(sampling=sampling, **prompt)):
        count += len(response.tokens.tokens)
    return count


async def over_http(made: Hall, body: dict[str, Any], path: str) -> int:
    reader = await made.http_reader({**body, "max_tokens": TOKENS, "stream": True, "ignore_eos": True}, path)
    return (await reader.rest()).count(b'"index"')


def ask(made: Hall, door: str, text: str, ids: Callable[[str], list[int]]) -> Any:
    match door:
        case "text":
            return over_grpc(made, {"text": text})
        case "ids":
            return over_grpc(made, {"token_ids": pb.TokenIds(ids=ids(text))})
        case "chat":
            return over_grpc(made, {"chat": pb.Chat(messages=[pb.ChatMessage(role="user", content=text)])})
        case "completion":
            return over_http(made, {"prompt": text}, "/v1/completions")
        case _:
            return over_http(made, {"messages": [{"role": "user", "content": text}]}, "/v1/chat/completions")


async def turns_of(tokenizer: Tokenizer, prompts: list[str], door: str) -> Turns:
    known = {text: tokenizer.encode(text) for text in prompts} if door == "ids" else {}
    async with hall(tokenizer, TOKENS, 0) as made:
        with watched() as turns:
            counts = await asyncio.gather(*(ask(made, door, text, known.__getitem__) for text in prompts))
        assert all(count >= TOKENS for count in counts) and made.worker.done
    return turns


@pytest.mark.parametrize("door", ["text", "ids", "chat", "completion", "chat completion"])
async def test_long_prompts_hold_nobody_up(tokenizer: Tokenizer, prompts: list[str], door: str) -> None:
    (await turns_of(tokenizer, prompts, door)).check(TURN_S)


async def test_in_the_loop_they_would(tokenizer: Tokenizer, prompts: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control."""

    async def run(pool: TokenizerPool, function: Callable[..., Any], *arguments: Any, within_s: float, begun: bool = False) -> Any:
        return function(*arguments)

    monkeypatch.setattr(TokenizerPool, "run", run)
    assert (await turns_of(tokenizer, prompts[:1], "text")).longest.cpu_s > TURN_S
