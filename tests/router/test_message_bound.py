"""A request with more fields than any legal one is refused before it is parsed, and counting stops there."""

from collections import Counter
from collections.abc import AsyncIterator

import grpc
import pytest

from baton.cluster.config import Config
from baton.cluster.errors import BatonError, Reason
from baton.cluster.rpc import Context, Server, to_error
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from router.message_bound import _FIELDS, MAX_FIELDS, UNCOUNTED_BYTES, _count, check_fields
from router.validate import RequestLimits

LIMITS = RequestLimits()
LARGEST = pb.GenerateRequest(
    request_id="r" * 128,
    model="m",
    cache_salt="s" * 256,
    priority=1,
    chat=pb.Chat(messages=[pb.ChatMessage(role="user", content="x" * 1000)] * LIMITS.max_messages),
    sampling=pb.SamplingParams(
        temperature=1.0, top_p=1.0, top_k=1, min_p=0.1, top_a=0.1, repetition_penalty=1.0, presence_penalty=0.1, frequency_penalty=0.1,
        seed=1, logprobs=1, max_tokens=1, min_tokens=1, ignore_eos=True, logit_bias=dict.fromkeys(range(LIMITS.max_logit_bias), 1.0),
        stop_token_ids=range(LIMITS.max_stop_token_ids), stop=["x"] * LIMITS.max_stop,
    ),
)  # fmt: skip
LEGAL = {
    "the largest request": LARGEST,
    "a text of 1 MiB": pb.GenerateRequest(text="x" * (1 << 20)),
    "a million ids": pb.GenerateRequest(token_ids=pb.TokenIds(ids=[70_000] * 1_000_000)),
}
MANY = 300_000


def part(number: int, content: bytes) -> bytes:
    """Returns a length-delimited field."""
    size, length = len(content), b""
    while size > 0x7F:
        length, size = length + bytes([size & 0x7F | 0x80]), size >> 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


HOSTILE = {
    "biases": pb.GenerateRequest(text="x", sampling=pb.SamplingParams(logit_bias=dict.fromkeys(range(MANY), 1.0))).SerializeToString(),
    "messages": pb.GenerateRequest(chat=pb.Chat(messages=[pb.ChatMessage()] * MANY)).SerializeToString(),
    "stops": pb.GenerateRequest(sampling=pb.SamplingParams(stop=[""] * MANY)).SerializeToString(),
    "one field repeated": pb.GenerateRequest(model="m").SerializeToString() * MANY,
    "one role repeated": part(4, part(1, part(1, b"") * MANY)),
    "unknown fields": b"\xf8\x01\x00" * MANY,
    "unknown groups": b"\xfb\x01" + b"\xf8\x01\x00" * MANY + b"\xfc\x01",
    "unpacked ids": part(5, b"\x08\x07" * MANY),
}


@pytest.mark.parametrize("name", LEGAL)
def test_everything_within_the_limits_passes(name: str) -> None:
    data = LEGAL[name].SerializeToString()
    assert len(data) > UNCOUNTED_BYTES
    check_fields(data)


@pytest.mark.parametrize("name", HOSTILE)
def test_a_message_with_too_many_fields_is_refused_before_all_are_counted(name: str) -> None:
    data = HOSTILE[name]
    pb.GenerateRequest.FromString(data)  # a valid message, except for its number of fields
    with pytest.raises(BatonError, match=str(MAX_FIELDS)) as caught:
        check_fields(data)
    assert caught.value.reason is Reason.INVALID_FIELD
    assert _count(data, 0, len(data), _FIELDS, MAX_FIELDS, Counter()) <= MAX_FIELDS + 3


@pytest.mark.parametrize("cut", range(1, 40))
def test_truncated_or_invalid_data_is_left_to_the_parser(cut: int) -> None:
    data = LARGEST.SerializeToString()
    check_fields(data[: len(data) - cut * 997])
    check_fields(bytes((value * 31 + cut) % 256 for value in range(1 << 10)) * 100)
    check_fields(b"\xff" * (1 << 17))


class Door(generation_pb2_grpc.GenerationServicer):
    async def Generate(self, request: pb.GenerateRequest, context: Context) -> AsyncIterator[pb.GenerateResponse]:
        yield pb.GenerateResponse()


@pytest.mark.parametrize("checked", [True, False])
async def test_the_server_answers_before_it_parses(checked: bool) -> None:
    """Control: without the check, the method is called."""
    server = Server(Config(), 4 << 20, check=check_fields if checked else None)
    generation_pb2_grpc.add_GenerationServicer_to_server(Door(), server.grpc)
    address = server.bind(0)
    await server.start()
    async with grpc.aio.insecure_channel(address, options=[("grpc.enable_http_proxy", 0)]) as channel:
        call = channel.unary_stream("/baton.v1.Generation/Generate")
        answers = [answer async for answer in call(LARGEST.SerializeToString(), timeout=10)]
        assert len(answers) == 1
        try:
            answers = [answer async for answer in call(HOSTILE["stops"], timeout=10)]
        except grpc.aio.AioRpcError as error:
            assert to_error(error).reason is Reason.INVALID_FIELD and checked
        else:
            assert len(answers) == 1 and not checked
    await server.stop(None)


NAMED = {
    "biases": "sampling.logit_bias",
    "messages": "chat.messages",
    "stops": "sampling.stop",
    "one field repeated": "model",
    "unknown fields": "request",
    "unpacked ids": "token_ids.ids",
}


@pytest.mark.parametrize("name", NAMED)
def test_the_most_frequent_field_is_named(name: str) -> None:
    with pytest.raises(BatonError) as caught:
        check_fields(HOSTILE[name])
    assert [violation.field for violation in caught.value.violations] == [NAMED[name]]
