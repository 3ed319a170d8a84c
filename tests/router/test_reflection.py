"""Server reflection: what tools learn about the API from the router itself."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_reflection.v1alpha import reflection_pb2

from router import reflection
from router.wiring import SERVICE

VERSIONS = (reflection.OLD, reflection.NEW)


@asynccontextmanager
async def asking(version: str) -> AsyncIterator[Any]:
    server = grpc.aio.server()
    reflection.offer([SERVICE], server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(
            f"/{version}.ServerReflection/{reflection.METHOD}",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )

        async def ask(**question: Any) -> Any:
            async for answer in call(iter([reflection_pb2.ServerReflectionRequest(**question)])):
                return answer

        yield ask
    await server.stop(None)


def files(answer: Any) -> dict[str, descriptor_pb2.FileDescriptorProto]:
    made = [descriptor_pb2.FileDescriptorProto.FromString(data) for data in answer.file_descriptor_response.file_descriptor_proto]
    return {file.name: file for file in made}


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_services_are_listed(version: str) -> None:
    async with asking(version) as ask:
        listed = (await ask(list_services="*")).list_services_response.service
        assert {service.name for service in listed} == {SERVICE, *(f"{known}.ServerReflection" for known in VERSIONS)}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("symbol", [SERVICE, f"{SERVICE}.Generate", "baton.v1.GenerateRequest"])
async def test_a_service_a_method_and_a_message_are_found(version: str, symbol: str) -> None:
    """The tool ghz looks up the method."""
    async with asking(version) as ask:
        found = files(await ask(file_containing_symbol=symbol))
        assert "Generation" in {service.name for service in found["baton/v1/generation.proto"].service}


@pytest.mark.parametrize("version", VERSIONS)
async def test_every_listed_service_can_be_described(version: str) -> None:
    async with asking(version) as ask:
        for service in (await ask(list_services="*")).list_services_response.service:
            found = files(await ask(file_containing_symbol=service.name))
            package, _, name = service.name.rpartition(".")
            assert any(file.package == package and name in {one.name for one in file.service} for file in found.values())


@pytest.mark.parametrize("symbol", [f"{SERVICE}.Nothing", "baton.v1.Nothing", "Nothing", "", "."])
async def test_unknown_symbols_are_not_found(symbol: str) -> None:
    async with asking(reflection.NEW) as ask:
        assert (await ask(file_containing_symbol=symbol)).error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
