"""Certificates that name a service: who is accepted, who is refused, and that new files are used without a restart. Real connections."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import authority
import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.client import channel_options
from baton.cluster.config import Config, ConfigError, SecurityConfig
from baton.cluster.guard import Guard
from baton.cluster.metrics import Book
from baton.cluster.metrics_http import Exposition, MetricsServer
from baton.cluster.rpc import ProcessChannels, Server, channel
from baton.cluster.tls import certificates

NAME = "baton.internal"


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return authority.make(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same names under another authority."""
    return authority.make(tmp_path_factory.mktemp("tls") / "foreign")


@asynccontextmanager
async def serving(security: SecurityConfig) -> AsyncIterator[str]:
    """A server with the health service, which answers once `health.set` was called; returns its address."""
    server = Server(Config(security=security), 1 << 20)
    address = server.bind(0)
    await server.start()
    await server.health.set("", health_pb2.HealthCheckResponse.SERVING)
    try:
        yield address
    finally:
        await server.stop(None)


async def accepted(open_channel: grpc.aio.Channel) -> bool:
    """Whether a call over a new connection succeeds. Fails the test for any failure but that of the connection."""
    async with open_channel:
        try:
            await health_pb2_grpc.HealthStub(open_channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.UNAVAILABLE, error
            return False
        return True


class TestNames:
    async def test_processes_of_one_cluster_accept_each_other_wherever_they_run(self, ours: Path) -> None:
        """The certificate contains no address at all."""
        async with serving(authority.security(ours)) as address:
            assert await accepted(channel(address, authority.security(ours)))

    async def test_a_certificate_for_another_service_is_refused(self, ours: Path) -> None:
        """Negative control: the authority is the right one."""
        async with serving(authority.security(ours)) as address:
            assert not await accepted(channel(address, authority.security(ours, server_name="other.internal")))

    async def test_a_certificate_of_another_authority_is_refused_on_both_sides(self, ours: Path, foreign: Path) -> None:
        """Negative control: the name is the right one."""
        mixed = SecurityConfig(
            tls_cert=str(foreign / "server.pem"), tls_key=str(foreign / "server.key"), tls_ca=str(ours / "ca.pem")
        )  # fmt: skip
        async with serving(authority.security(ours)) as address:
            assert not await accepted(channel(address, authority.security(foreign)))
            assert not await accepted(channel(address, mixed)), "the server accepted a client of another authority"

    async def test_without_a_server_name_the_address_counts(self, ours: Path, tmp_path: Path) -> None:
        local = authority.make(tmp_path / "local", "localhost")
        async with serving(authority.security(ours)) as address:
            assert not await accepted(channel(address, authority.security(ours, server_name=None)))
        async with serving(authority.security(local)) as address:
            port = address.rpartition(":")[2]
            assert await accepted(channel(f"localhost:{port}", authority.security(local, server_name=None)))

    async def test_a_client_certificate_does_not_pass_for_a_process(self, ours: Path) -> None:
        posing = SecurityConfig(tls_cert=str(ours / "client.pem"), tls_key=str(ours / "client.key"), tls_ca=str(ours / "ca.pem"))
        async with serving(posing) as address:
            assert not await accepted(channel(address, authority.security(ours)))

    @pytest.mark.parametrize(("name", "works"), [(NAME, True), ("other.internal", False), (None, False)])
    async def test_a_client_names_the_service_that_it_expects(self, ours: Path, name: str | None, works: bool) -> None:
        pem = [(ours / file).read_bytes() for file in ("ca.pem", "client.key", "client.pem")]
        async with serving(authority.security(ours)) as address:
            how = channel_options(address, server_name=name)
            assert await accepted(grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(*pem), how)) == works


@asynccontextmanager
async def metrics(security: SecurityConfig) -> AsyncIterator[int]:
    config = Config(security=security)
    server = MetricsServer(config, Exposition(Book("router")), lambda: True, Guard(config))
    await server.start(0)
    try:
        yield int(server.address.rpartition(":")[2])
    finally:
        await server.close()


async def scrape(port: int, trusted: Path, own: Path, name: str = NAME) -> bool:
    """As a Prometheus whose tls_config has `server_name`."""
    context = ssl.create_default_context(cafile=trusted / "ca.pem")
    context.load_cert_chain(own / "client.pem", own / "client.key")
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context, server_hostname=name)
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
    except (ssl.SSLError, ConnectionError):
        return False
    return answer.startswith(b"HTTP/1.1 200 ")


class TestReload:
    async def test_new_connections_use_new_files_and_running_ones_continue(self, tmp_path: Path) -> None:
        files, newer = authority.make(tmp_path / "files"), authority.make(tmp_path / "newer")
        async with serving(authority.security(files)) as address, metrics(authority.security(files)) as port:
            running = channel(address, authority.security(files))
            check = health_pb2_grpc.HealthStub(running).Check
            await check(health_pb2.HealthCheckRequest(), timeout=10)
            before = authority.make(tmp_path / "before")
            authority.replace(before, files)  # a copy
            assert await scrape(port, before, before) and not await scrape(port, newer, newer)
            authority.replace(files, newer)
            for folder, works in ((newer, True), (before, False)):
                assert await accepted(channel(address, authority.security(folder))) == works
                assert await scrape(port, folder, folder) == works
            assert not await scrape(port, newer, before), "a client of the previous authority was accepted"
            await check(health_pb2.HealthCheckRequest(), timeout=10)
            await running.close()

    @pytest.mark.parametrize("broken", ["server.pem", "server.key", "ca.pem"])
    async def test_broken_files_leave_the_previous_ones_in_force(
        self, tmp_path: Path, broken: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        files, before, other = (authority.make(tmp_path / name) for name in ("files", "before", "other"))
        authority.replace(before, files)
        async with serving(authority.security(files)) as address, metrics(authority.security(files)) as port:
            for bad in (b"not PEM", (other / broken).read_bytes() if broken != "ca.pem" else b"", None):
                (files / broken).unlink() if bad is None else (files / broken).write_bytes(bad)
                caplog.clear()
                for _ in range(3):
                    assert await accepted(channel(address, authority.security(before)))
                    assert await scrape(port, before, before)
                [line] = [record for record in caplog.records if "keeping the previous certificates" in record.message]
                assert line.levelname == "ERROR" and broken in line.message
            authority.replace(files, other)
            assert await accepted(channel(address, authority.security(other))), "the next good files were not used"

    async def test_calls_to_a_process_show_new_certificates(self, tmp_path: Path) -> None:
        files, newer = authority.make(tmp_path / "files"), authority.make(tmp_path / "newer")
        first = Server(Config(security=authority.security(files)), 1 << 20)
        address = first.bind(0)
        await first.start()
        await first.health.set("", health_pb2.HealthCheckResponse.SERVING)
        line, plain = ProcessChannels(address, authority.security(files)), channel(address, authority.security(files))
        for opened in (line.channel(), plain):
            await health_pb2_grpc.HealthStub(opened).Check(health_pb2.HealthCheckRequest(), timeout=20)
        assert line.channel() is line.channel()
        authority.replace(files, newer)
        await first.stop(None)  # its connections end
        second = Server(Config(security=authority.security(files)), 1 << 20)
        second.bind(int(address.rpartition(":")[2]))
        await second.start()
        await second.health.set("", health_pb2.HealthCheckResponse.SERVING)
        request = health_pb2.HealthCheckRequest()
        await health_pb2_grpc.HealthStub(line.channel()).Check(request, timeout=20, wait_for_ready=True)
        assert not await accepted(plain), "negative control: a channel keeps the certificates that it began with"
        await line.close()
        await second.stop(None)

    async def test_a_process_without_changes_reads_its_files_once(self, ours: Path) -> None:
        first = certificates(authority.security(ours))
        assert first is not None and first is certificates(authority.security(ours)) and first.current() is first.current()


async def test_files_that_cannot_be_used_stop_a_start(tmp_path: Path, ours: Path) -> None:
    for missing in ("server.pem", "server.key", "ca.pem"):
        folder = tmp_path / missing
        folder.mkdir()
        authority.replace(folder, ours)
        (folder / missing).unlink()
        with pytest.raises(ConfigError, match=rf"security\.tls_.*{missing}"):
            Server(Config(security=authority.security(folder)), 1 << 20)


def test_an_encrypted_key_is_refused_instead_of_asking_the_terminal(tmp_path: Path, ours: Path) -> None:
    from cryptography.hazmat.primitives import serialization

    authority.replace(folder := authority.make(tmp_path / "files"), ours)
    key = serialization.load_pem_private_key((ours / "server.key").read_bytes(), None)
    locked = serialization.BestAvailableEncryption(b"secret")
    encoded = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, locked)
    (folder / "server.key").write_bytes(encoded)
    with pytest.raises(ConfigError, match="tls_key"):
        certificates(authority.security(folder))


def test_new_files_are_read_without_all_that_the_system_trusts(ours: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That takes 20 ms of the event loop, and only a client needs it."""
    made: list[str | None] = []
    make = ssl.create_default_context

    def count(cafile: str | None = None) -> ssl.SSLContext:
        made.append(cafile)
        return make(cafile=cafile)

    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    cert.write_bytes((ours / "client.pem").read_bytes())
    key.write_bytes((ours / "client.key").read_bytes())
    files = certificates(SecurityConfig(tls_cert=str(cert), tls_key=str(key)))
    assert files is not None
    before = files.current()
    monkeypatch.setattr(ssl, "create_default_context", count)
    cert.write_bytes(cert.read_bytes() + b"\n")
    assert files.current() is not before and not made
    assert files.current().client() is files.current().client() and made == [None]
