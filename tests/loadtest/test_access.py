"""Both doors with a key and over TLS, against servers that require both."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from baton.v1 import generation_pb2 as pb
from baton.v1 import generation_pb2_grpc
from loadtest.access import DoorAccess, Tls
from loadtest.drive import Answer


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    folder = tmp_path_factory.mktemp("tls")
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-keyout", "key.pem", "-out", "own.pem", *subject]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)
    return folder / "own.pem", folder / "key.pem"


class Generation(generation_pb2_grpc.GenerationServicer):
    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        if ("authorization", "Bearer open sesame") not in context.invocation_metadata():
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "no key")
        for index in range(request.sampling.max_tokens):
            yield pb.GenerateResponse(tokens=pb.Tokens(tokens=[pb.Token(index=index, id=index)]))
        if request.cache_salt != "broken":
            yield pb.GenerateResponse(finished=pb.Finished(usage=pb.Usage(prompt_tokens=3, completion_tokens=2)))


async def ask(access: DoorAccess, address: str, salt: str = "") -> Answer:
    async with access.door(address, salt) as door:
        return await door.ask([1, 2, 3], 2, 5.0, lambda count: None)


async def test_the_grpc_door_works_with_a_key_over_tls(certificate: tuple[Path, Path]) -> None:
    own, key = certificate
    server = grpc.aio.server()
    generation_pb2_grpc.add_GenerationServicer_to_server(Generation(), server)
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key.read_bytes(), own.read_bytes())]))
    await server.start()
    address = f"127.0.0.1:{port}"
    try:
        told = await ask(DoorAccess("grpc", "open sesame", Tls(own)), address)
        assert (told.outcome, told.prompt_tokens, list(told.tokens)) == ("ok", 3, [0, 1])
        assert (await ask(DoorAccess("grpc", "wrong", Tls(own)), address)).reason == "UNAUTHENTICATED"
        assert (await ask(DoorAccess("grpc", "open sesame"), address)).reason == "NO_SERVER", "plain TCP is refused"
        assert (await ask(DoorAccess("grpc", "open sesame", Tls(own)), address, "broken")).reason == "CUT_SHORT", "no final message came"
    finally:
        await server.stop(None)


async def test_the_http_door_works_with_a_key_over_tls(certificate: tuple[Path, Path]) -> None:
    own, key = certificate

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            allowed = b"authorization: Bearer open sesame" in head
            event = b'data: {"usage": {"prompt_tokens": 3, "completion_tokens": 2}}\n\n'
            body = event if allowed else b'{"error": {"code": "invalid_api_key"}}'
            writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (200 if allowed else 401, len(body)) + body)
            await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=server_context(own, key))
    address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        told = await ask(DoorAccess("http", "open sesame", Tls(own)), address)
        assert (told.outcome, told.prompt_tokens) == ("ok", 3), told
        assert (await ask(DoorAccess("http", "wrong", Tls(own)), address)).reason == "INVALID_API_KEY"
        assert (await ask(DoorAccess("http", "open sesame", Tls()), address)).reason == "NO_SERVER", "the certificate is not trusted"
    finally:
        server.close()


def server_context(own: Path, key: Path) -> Any:
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(own, key)
    return context
