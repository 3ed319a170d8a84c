"""The gRPC door over a real socket: clients that do not read must not block others, and oversized input is not copied."""

import asyncio
import hashlib
from pathlib import Path

import grpc
import pytest
from grpc_door import serving
from http_door import House, Script, settled, toy_tokenizer

from baton.cluster.config_router import RouterConfig
from baton.cluster.errors import BatonError, Reason
from baton.cluster.keys import ApiKeys
from baton.cluster.rpc import to_error
from baton.v1 import generation_pb2 as pb
from router.conversation import PLAIN, Aside, PastCall, Tool
from router.door import to_ask, to_response
from router.events import Pieces, TextPiece
from router.request import Token
from router.tokenizer import Tokenizer
from router.tools.delta import Arguments, CallBegin, Reasoning
from router.validate import Context, RequestLimits, check

ASK = pb.GenerateRequest(text="hello", sampling=pb.SamplingParams(logprobs=20))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


@pytest.mark.parametrize("stall_s", [0.3, None])
async def test_streams_that_nobody_reads_free_their_places(tokenizer: Tokenizer, stall_s: float | None) -> None:
    """Negative control (None): without a time limit, unread streams block other requests."""
    house = House(tokenizer, Script(b"x" * 100_000), RouterConfig(max_inflight=8, queue_timeout_s=60.0))
    async with serving(house, stall_s) as stub:
        unread = [stub.Generate(ASK) for _ in range(8)]
        await settled(lambda: house.admission.inflight == 8)
        for _ in range(8):  # each call needs one more place to be freed
            call = stub.Generate(ASK)
            if stall_s is None:
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(1.5):
                        await call.read()
                break
            assert (await call.read()).accepted.prompt_tokens == 5
            call.cancel()
        if stall_s is None:
            assert house.admission.inflight == 8
        else:
            await settled(lambda: house.service.idle)
            for stream in unread:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    async for _ in stream:
                        pass
                assert to_error(caught.value).reason is Reason.STALLED
        for stream in unread:
            stream.cancel()


async def test_the_trailing_metadata_contain_the_request_id(tokenizer: Tokenizer) -> None:
    async with serving(House(tokenizer), None) as stub:
        for given, want in (("mine", "mine"), ("", "req-1")):
            call = stub.Generate(pb.GenerateRequest(text="hello", request_id=given))
            async for _ in call:
                pass
            assert dict(await call.trailing_metadata())["x-request-id"] == want


def test_a_message_has_a_name_and_a_text_says_how_it_is_read() -> None:
    messages = [pb.ChatMessage(role="user", content="a", name="Ida"), pb.ChatMessage(role="assistant", content="b")]
    ask = to_ask(pb.GenerateRequest(chat=pb.Chat(messages=messages)))
    assert (ask.messages, ask.names) == ((("user", "a"), ("assistant", "b")), ("Ida", ""))
    assert to_ask(pb.GenerateRequest(chat=pb.Chat(messages=messages[1:]))).names == ()
    plain = to_ask(pb.GenerateRequest(text="x", parse_special=False, add_special_tokens=False))
    assert (plain.parse_special, plain.add_special_tokens) == (False, False)
    assert (to_ask(ASK).parse_special, to_ask(ASK).add_special_tokens) == (None, None)


def test_lists_that_are_too_long_are_refused_without_being_copied_whole() -> None:
    limits = RequestLimits()
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="x")] * 5000)
    bias = {i: 1.0 for i in range(5000)}
    many = pb.SamplingParams(logit_bias=bias, stop=["x"] * 5000, stop_token_ids=range(5000))
    ask = to_ask(pb.GenerateRequest(chat=chat, sampling=many))
    assert ask.messages is not None
    lengths = [len(each) for each in (ask.messages, ask.sampling.logit_bias, ask.sampling.stop, ask.sampling.stop_token_ids)]
    assert lengths == [limits.max_messages + 1, limits.max_logit_bias + 1, limits.max_stop + 1, limits.max_stop_token_ids + 1]
    with pytest.raises(BatonError) as caught:
        check(ask, limits, (), 10_000)
    fields = {violation.field for violation in caught.value.violations}
    assert fields == {"chat.messages", "sampling.logit_bias", "sampling.stop", "sampling.stop_token_ids"}


@pytest.mark.parametrize("count", [99, 100, 101, 5000])
def test_ids_that_fill_the_context_are_counted_and_not_copied(count: int) -> None:
    """Their values do not matter: too many ids are refused, and the message names their number."""
    given = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[7] * count))
    ask = to_ask(given, context=100)
    assert ask.token_ids == ((7,) * count if count < 100 else range(count))
    if count >= 100:
        with pytest.raises(BatonError, match=f"{count} tokens") as caught:
            check(ask, RequestLimits(), (), 10, Context(100, None))
        assert caught.value.reason is Reason.CONTEXT_LENGTH


async def test_short_questions_are_answered_as_generate_would(tokenizer: Tokenizer) -> None:
    house = House(tokenizer, Script(b"x"), RouterConfig())
    async with serving(house, None) as stub:
        asked = await stub.Tokenize(pb.GenerateRequest(text="hello"), timeout=20)
        accepted = (await stub.Generate(pb.GenerateRequest(text="hello")).read()).accepted
        assert list(asked.token_ids.ids) == tokenizer.encode("hello", 100) and len(asked.token_ids.ids) == accepted.prompt_tokens
        back = await stub.Detokenize(pb.DetokenizeRequest(token_ids=asked.token_ids), timeout=20)
        assert back.text == "hello"
        [model] = (await stub.ListModels(pb.ListModelsRequest(), timeout=20)).models
        assert model.name == accepted.model and model.max_model_len == house.service.max_model_len
        for method, request, field in (
            (stub.Tokenize, pb.GenerateRequest(), "prompt"),
            (stub.Tokenize, pb.GenerateRequest(text="x", model="other"), "model"),
            (stub.Detokenize, pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=[1 << 30])), "token_ids"),
            (stub.Detokenize, pb.DetokenizeRequest(), "token_ids"),
        ):
            with pytest.raises(grpc.RpcError, match=field):
                await method(request, timeout=20)


async def test_short_questions_need_the_key_that_generate_needs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"ann {hashlib.sha256(b'secret').hexdigest()}\n")
    house = House(tokenizer, Script(b"x"), RouterConfig())
    house.keys = ApiKeys.load(str(tmp_path / "keys"))
    async with serving(house, None) as stub:
        for method, request in (
            (stub.Tokenize, pb.GenerateRequest(text="x")),
            (stub.Detokenize, pb.DetokenizeRequest(token_ids=pb.TokenIds(ids=[1]))),
            (stub.ListModels, pb.ListModelsRequest()),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                await method(request, timeout=20)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
            await method(request, timeout=20, metadata=(("authorization", "Bearer secret"),))


def test_a_chat_brings_tools_calls_and_results() -> None:
    call = pb.ToolCall(id="c", name="add", arguments='{"x": 1}')
    request = pb.GenerateRequest(
        chat=pb.Chat(
            messages=[
                pb.ChatMessage(role="user", content="a"),
                pb.ChatMessage(role="assistant", tool_calls=[call], reasoning="hm"),
                pb.ChatMessage(role="tool", tool_call_id="c", content="2"),
            ],
            tools=[pb.Tool(name="add", description="Adds.", parameters='{"type": "object"}', strict=True), pb.Tool(name="time")],
            tool_choice="none",
            parallel_tool_calls=False,
            reasoning_effort="low",
            separate_reasoning=True,
        )
    )
    setting = to_ask(request).setting
    assert setting.tools == (Tool("add", "Adds.", {"type": "object"}, strict=True), Tool("time"))
    assert setting.asides == (Aside(), Aside((PastCall("c", "add", '{"x": 1}'),), reasoning="hm"), Aside(call_id="c"))
    assert (setting.choice, setting.parallel, setting.effort, setting.splits_reasoning) == ("none", False, "low", True)
    request.chat.tools[1].parameters = "[]"
    with pytest.raises(BatonError) as caught:
        to_ask(request)
    assert caught.value.violations[0].field == "tools[1].parameters"


def test_yesterdays_clients_ask_and_read_as_before() -> None:
    """A chat without the new fields is a plain one, and an answer to it has no field that they do not know."""
    assert to_ask(pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="a")]))).setting is PLAIN
    token = to_response(Pieces((TextPiece(0, Token(7), "a"),))).tokens.tokens[0]
    assert {field.name for field, _ in token.ListFields()} == {"id", "text"}
    calls = (Reasoning("hm"), CallBegin(0, "add", "c"), Arguments(0, "{}"))
    token = to_response(Pieces((TextPiece(0, Token(7), "a", calls),))).tokens.tokens[0]
    assert token.reasoning == "hm" and [(part.id, part.name, part.arguments) for part in token.tool_calls] == [
        ("c", "add", ""),
        ("", "", "{}"),
    ]
