"""`max_thinking_tokens` from a body to an engine and back: what the engine is forced to write is output like any other."""

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from http_door import CHAT, HELLO, House, Script, toy_tokenizer

from baton.engine.core.engine import Engine
from baton.engine.core.kvcache import KvPool
from baton.engine.core.limits import Limits
from baton.engine.core.sequence import Finish
from baton.engine.core.toy import ToyRunner
from baton.engine.grammars.store import GrammarStore
from baton.v1 import generation_pb2 as pb
from baton.worker.wire import to_sequence
from router.calls import to_job
from router.door import to_ask
from router.request import Request, Token, Tokens
from router.tools.families import BY_NAME
from router.tools.forms import Forms
from router.tools.thinking import THINK

CONFIG = {"vocab_size": 257, "eos_token_id": 256, "max_position_embeddings": 4096, "kv_width": 8}
CLOSING = "\n</think>\n\n"
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, "two"]}}, "required": ["a"], "additionalProperties": False}
ASK = HELLO | {"temperature": 1, "seed": 5, "max_tokens": 60, "return_token_ids": True}


@dataclass
class Toys:
    """Stands in for the dispatcher: an engine for each attempt, which dies after `lives` tokens."""

    store: GrammarStore
    lives: int = 1 << 30
    attempts: int = 0
    begun: list[Request] = field(default_factory=list)

    async def generate(self, request: Request) -> AsyncGenerator[Tokens, None]:
        self.begun.append(request)
        while request.finish is None:
            self.attempts += 1
            runner = ToyRunner(CONFIG, "toy", 4)
            runner.attach(KvPool(runner.layout, 256))
            engine = Engine(runner, Limits(max_num_seqs=1, max_num_batched_tokens=512, reserve_growth=0.0), 1024)
            seq = to_sequence(to_job(request), "toy")
            if seq.params.structured is not None or seq.params.thinking is not None:
                seq.matcher = await self.store.ready(seq.params.structured, seq.tokens[seq.prompt_len :], seq.params.thinking)
            engine.add(seq)
            made = 0
            while not engine.idle and made < self.lives:
                for output in engine.step():
                    assert not output.failure
                    if output.sampled is not None:
                        made += 1
                        request.tokens.append(output.sampled.token)
                        request.finish = {Finish.STOP: "stop", Finish.LENGTH: "length", None: None}[output.finish]
                        yield (Token(output.sampled.token, output.sampled.logprob),)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("toy")
    toy_tokenizer(path)
    return path


def house(folder: Path, lives: int = 1 << 30, forms: Forms | None = None) -> House:
    made = House(toy_tokenizer(folder), forms=forms or Forms(thinking=THINK), path=folder)
    made.service._dispatcher = Toys(GrammarStore(folder, 257, [256]), lives)  # type: ignore[assignment]
    return made


def opened(body: dict[str, Any]) -> dict[str, Any]:
    """The prompt ends inside the thinking."""
    last = {"role": "assistant", "content": "<think>"}
    return body | {"messages": [*body["messages"], last], "continue_final_message": True, "add_generation_prompt": False}


async def answer(house: House, **given: Any) -> dict[str, Any]:
    got = (await house.post(CHAT, opened(ASK | given))).json
    choice: dict[str, Any] = got["choices"][0]
    return choice | {"usage": got["usage"], "text": bytes(id_ for id_ in choice["token_ids"] if id_ < 256).decode(errors="replace")}


@pytest.mark.parametrize("budget", [0, 1, 7])
async def test_thinking_ends_at_its_budget_and_the_answer_follows(folder: Path, budget: int) -> None:
    free = await answer(house(folder), guided_json=None)
    held = await answer(house(folder), max_thinking_tokens=budget)
    ids, size = held["token_ids"], len(CLOSING)
    at = bytes(ids).find(CLOSING.encode())
    assert budget <= at < budget + 4, "a character is not cut"
    assert ids[:at] == free["token_ids"][:at], "until then the budget changes nothing"
    assert held["usage"]["completion_tokens_details"]["reasoning_tokens"] == at + len("\n</think>")
    assert held["usage"]["completion_tokens"] == len(ids) > at + size
    assert "</think>" not in held["message"]["content"] and "</think>" not in held["message"].get("reasoning", "")
    roomy = await answer(house(folder), max_thinking_tokens=60)
    assert roomy["token_ids"] == free["token_ids"], "nor if it is never reached"


@pytest.mark.parametrize("given", [{}, {"guided_json": SCHEMA}, {"n": 2}, {"min_tokens": 20, "stop_token_ids": [10]}])
async def test_what_follows_is_the_same_wherever_a_worker_or_a_router_dies(folder: Path, given: dict[str, Any]) -> None:
    body = opened(ASK | {"max_thinking_tokens": 5, **given})
    whole = [choice["token_ids"] for choice in (await house(folder).post(CHAT, body)).json["choices"]]
    for lives in (1, 3, 8):
        again = house(folder, lives=lives)
        assert [choice["token_ids"] for choice in (await again.post(CHAT, body)).json["choices"]] == whole
        assert again.service._dispatcher.attempts > 1  # type: ignore[attr-defined]
    if "n" in given:
        return
    for cut in range(1, len(whole[0])):
        chunks = (await house(folder).post(CHAT, body | {"stream": True, "output_so_far": whole[0][:cut]})).chunks
        rest = [id_ for chunk in chunks for choice in chunk["choices"] for id_ in choice.get("token_ids", ())]
        assert whole[0][:cut] + rest == whole[0], cut


async def test_a_form_begins_after_the_forced_end(folder: Path) -> None:
    for seed in range(4):
        held = await answer(house(folder), max_thinking_tokens=6, guided_json=SCHEMA, seed=seed)
        assert held["finish_reason"] == "stop" and json.loads(held["message"]["content"])["a"] in (1, "two")
        assert held["usage"]["completion_tokens_details"]["reasoning_tokens"] >= 6


async def test_a_required_call_begins_after_the_forced_end(folder: Path) -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": SCHEMA, "strict": True}}
    for seed in range(3):
        forms = Forms(BY_NAME["hermes"], THINK)
        asked = {"max_thinking_tokens": 6, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False, "seed": seed}
        held = await answer(house(folder, forms=forms), **asked, max_tokens=150)
        (call,) = held["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["a"] in (1, "two") and held["finish_reason"] == "tool_calls"
        assert 6 <= bytes(held["token_ids"][:200]).find(CLOSING.encode()) < 10


async def test_a_stream_with_a_form_goes_on_inside_the_thinking_and_after_it(folder: Path) -> None:
    whole = [*b'hm</think>{"a":1}', 256]
    for cut in range(1, len(whole)):
        script = House(toy_tokenizer(folder), Script(whole, "stop"), forms=Forms(thinking=THINK), path=folder)
        body = opened(HELLO | {"guided_json": SCHEMA, "stream": True, "output_so_far": whole[:cut], "return_token_ids": True})
        got = await script.post(CHAT, body)
        assert got.status == 200 and [id_ for c in got.chunks for one in c["choices"] for id_ in one.get("token_ids", ())] == whole[cut:]


async def test_a_stop_string_and_logprobs_see_forced_tokens_as_any_other(folder: Path) -> None:
    held = await answer(house(folder), max_thinking_tokens=4, logprobs=True, stop="</think>")
    assert held["finish_reason"] == "stop" and bytes(held["token_ids"]).endswith(b"\n</think>")
    assert len(held["logprobs"]["content"]) == len(held["token_ids"])


@pytest.mark.parametrize(
    "fields, param, says",
    [
        ({"max_tokens": 5, "max_thinking_tokens": 6}, "max_thinking_tokens", "max_tokens (5)"),
        ({"max_thinking_tokens": -1}, "max_thinking_tokens", "0 or more"),
        ({"max_thinking_tokens": "3"}, "max_thinking_tokens", "integer"),
        ({"max_thinking_tokens": 3, "separate_reasoning": False}, "max_thinking_tokens", "separate_reasoning"),
        ({"max_thinking_tokens": 3, "thinking_token_budget": 4}, "thinking_token_budget", "differ"),
        ({"max_thinking_tokens": 0, "stream": True, "output_so_far": [97]}, "max_thinking_tokens", "does not fit"),
    ],
)
async def test_a_budget_that_cannot_be_kept_is_refused(folder: Path, fields: dict[str, Any], param: str, says: str) -> None:
    got = await house(folder).post(CHAT, opened(HELLO | fields))
    assert got.status == 400 and got.json["error"]["param"] == param and says in got.json["error"]["message"]


async def test_a_model_that_does_not_think_has_no_budget(folder: Path) -> None:
    got = await house(folder, forms=Forms()).post(CHAT, HELLO | {"max_thinking_tokens": 3})
    assert got.status == 400 and "does not think" in got.json["error"]["message"]


async def test_the_other_name_and_the_parameters_in_force(folder: Path) -> None:
    held = await answer(house(folder), thinking_token_budget=3, return_sampling=True)
    assert held["sampling"]["max_thinking_tokens"] == 3 and CLOSING in held["text"]


def test_grpc_has_the_budget_too() -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")])
    assert to_ask(pb.GenerateRequest(chat=chat)).setting.max_thinking is None
    chat.max_thinking_tokens = 0
    assert to_ask(pb.GenerateRequest(chat=chat)).setting.max_thinking == 0
