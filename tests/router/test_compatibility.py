"""Clients that were generated from an earlier generation.proto still ask and read. Each file in `stubs` is what such a client was made of:

python -m grpc_tools.protoc -I proto --descriptor_set_out=tests/router/stubs/NAME.binpb baton/v1/generation.proto
"""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pool, message_factory
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from http_door import House, Script, settled, toy_tokenizer

from baton.cluster.config import Config
from baton.cluster.rpc import Server
from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from router.door import GenerationDoor
from router.tokenizer import Tokenizer

STUBS = {path.stem: path for path in sorted((Path(__file__).parent / "stubs").glob("*.binpb"))}
SERVICE = "/baton.v1.Generation"


def file_of(path: Path) -> FileDescriptorProto:
    (found,) = FileDescriptorSet.FromString(path.read_bytes()).file
    return found


def today() -> FileDescriptorProto:
    made = FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(made)
    return made


def broken(old: Any, new: Any, where: str = "") -> Iterator[str]:
    """What an old client may use and would not find, or would take for something else. Names are compared too: JSON has them."""
    for kind in ("message_type", "enum_type", "service", "nested_type", "field", "value", "method"):
        there = {each.name: each for each in getattr(new, kind, ())}
        for each in getattr(old, kind, ()):
            path = f"{where}.{each.name}"
            if each.name not in there:
                yield f"{path} is gone"
                continue
            yield from (f"{path} has another {name}" for name in facts(each) if facts(each)[name] != facts(there[each.name])[name])
            yield from broken(each, there[each.name], path)


def facts(of: Any) -> dict[str, Any]:
    names = ("number", "label", "type", "type_name", "proto3_optional", "input_type", "output_type", "client_streaming", "server_streaming")
    told = {name: getattr(of, name) for name in names if hasattr(of, name)}
    return told | ({"oneof": of.HasField("oneof_index")} if isinstance(of, FieldDescriptorProto) else {})


@pytest.mark.parametrize("name", STUBS)
def test_nothing_that_an_old_client_knows_has_changed(name: str) -> None:
    assert not list(broken(file_of(STUBS[name]), today()))


@pytest.mark.parametrize("change", ["gone", "number", "type", "label", "method"])
def test_a_change_that_breaks_old_clients_is_found(change: str) -> None:
    """Negative control."""
    new = today()
    request: DescriptorProto = next(message for message in new.message_type if message.name == "GenerateRequest")
    match change:
        case "gone":
            del request.field[3]
        case "number":
            request.field[1].number = 99
        case "type":
            request.field[1].type = FieldDescriptorProto.TYPE_INT32
        case "label":
            request.field[1].label = FieldDescriptorProto.LABEL_REPEATED
        case _:
            new.service[0].method[0].server_streaming = False
    for path in STUBS.values():
        assert list(broken(file_of(path), new))


class OldClient:
    """Knows the messages of its file alone."""

    def __init__(self, path: Path, channel: grpc.aio.Channel) -> None:
        pool = descriptor_pool.DescriptorPool()
        pool.Add(file_of(path))
        self._pool, self._channel = pool, channel

    def message(self, name: str) -> Any:
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"baton.v1.{name}"))

    async def generate(self, **fields: Any) -> list[Any]:
        read = self.message("GenerateResponse").FromString
        call = self._channel.unary_stream(f"{SERVICE}/Generate", lambda sent: sent.SerializeToString(), read)
        return [event async for event in call(self.message("GenerateRequest")(**fields), timeout=30)]

    async def ask(self, method: str, request: Any, answer: str) -> Any:
        call = self._channel.unary_unary(f"{SERVICE}/{method}", lambda sent: sent.SerializeToString(), self.message(answer).FromString)
        return await call(request, timeout=30)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return toy_tokenizer(tmp_path_factory.mktemp("toy"))


@asynccontextmanager
async def served(name: str, tokenizer: Tokenizer) -> AsyncIterator[OldClient]:
    house = House(tokenizer, Script(b"abc", "stop"))
    server = Server(Config(), 1 << 20, 30.0)
    generation_pb2_grpc.add_GenerationServicer_to_server(GenerationDoor(house.service, house.keys), server.grpc)
    address = server.bind(0)
    await server.start()
    async with grpc.aio.insecure_channel(address) as channel:
        yield OldClient(STUBS[name], channel)
    await server.stop(None)
    await settled(lambda: house.service.idle)


@pytest.mark.parametrize("name", STUBS)
async def test_an_old_client_is_answered_and_understands_all_of_it(name: str, tokenizer: Tokenizer) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}]}
    async with served(name, tokenizer) as client:
        for prompt in ({"text": "hi"}, {"chat": chat}, {"token_ids": {"ids": [1, 2]}}):
            accepted, *tokens, finished = await client.generate(**prompt, sampling={"max_tokens": 9, "logprobs": 1})
            assert accepted.accepted.sampling.max_tokens == 9 and accepted.accepted.resume
            assert "".join(token.text for event in tokens for token in event.tokens.tokens) == "abc"
            assert finished.finished.usage.completion_tokens == 3 and finished.finished.reason == 1
            again = [event.SerializeToString() for event in (accepted, *tokens, finished)]
            assert all(pb.GenerateResponse.FromString(data).WhichOneof("event") for data in again), "what it does not know, it keeps"
        ids = await client.ask("Tokenize", client.message("GenerateRequest")(text="hi"), "TokenizeResponse")
        assert list(ids.token_ids.ids) == [*b"hi"]
        models = await client.ask("ListModels", client.message("ListModelsRequest")(), "ListModelsResponse")
        assert len(models.models) == 1


@pytest.mark.parametrize("name", STUBS)
async def test_an_old_client_goes_on_with_a_stream_that_broke(name: str, tokenizer: Tokenizer) -> None:
    """It sends back what it was told, also what it does not know."""
    async with served(name, tokenizer) as client:
        accepted, *_ = await client.generate(text="hi", sampling={"max_tokens": 9})
        rest = {"sampling": accepted.accepted.sampling, "resume": accepted.accepted.resume, "output_so_far": {"ids": [*b"ab"]}}
        _, *tokens, _ = await client.generate(text="hi", request_id=accepted.accepted.request_id, **rest)
        assert [token.id for event in tokens for token in event.tokens.tokens] == [*b"c"]
