"""The operator's doors: which configuration leaves them open to the network, and who may use them."""

import asyncio
import os
import subprocess
from hashlib import sha256
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from baton.cluster.config import ClusterConfig, Config, ConfigError, SecurityConfig
from baton.cluster.errors import BatonError
from baton.cluster.guard import Guard, check_doors, token
from baton.cluster.metrics import Book
from baton.cluster.metrics_http import Exposition, MetricsServer
from baton.cluster.packages import command
from baton.cluster.rpc import Server

CLUSTER_KEY = "0123456789abcdef"
MTLS = {"tls_cert": "c", "tls_key": "k", "tls_ca": "a"}


def config(host: str, **security: Any) -> Config:
    return Config(cluster=ClusterConfig(host=host, key=CLUSTER_KEY), security=SecurityConfig(**security))


def line(name: str, key: str, *words: str) -> str:
    return " ".join((name, sha256(key.encode()).hexdigest(), *words)) + "\n"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    (tmp_path / "keys").write_text(line("shop", "tenant-key") + line("ops", "admin-key", "admin=yes"))
    return tmp_path / "keys"


class TestStart:
    @pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "node-7"])
    @pytest.mark.parametrize("security", [{}, {"tls_cert": "c", "tls_key": "k"}], ids=["plain", "one-way TLS"])
    def test_doors_that_are_open_to_the_network_stop_a_start(self, host: str, security: dict[str, Any]) -> None:
        with pytest.raises(ConfigError) as caught:
            check_doors(config(host, **security))
        for way in ("cluster.host", "tls_ca", "security.api_keys", "security.open_admin"):
            assert way in str(caught.value)

    @pytest.mark.parametrize(
        ("host", "security", "warned"),
        [
            ("127.0.0.1", {}, False), ("::1", {}, False), ("localhost", {}, False), ("0.0.0.0", MTLS, False),
            ("0.0.0.0", {"api_keys": "keys"}, False), ("0.0.0.0", {"open_admin": True}, True),
            ("0.0.0.0", {"open_admin": True, **MTLS}, False),
        ],
    )  # fmt: skip
    def test_protected_or_deliberately_open_doors_do_not(
        self, host: str, security: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        check_doors(config(host, **security))
        assert ("open to everybody" in caplog.text) == warned

    @pytest.mark.parametrize(
        "process", [command("router"), command("decode_worker"), command("baton", "up", "--detach")], ids=["router", "worker", "up"]
    )
    def test_every_process_refuses_to_start(self, process: tuple[str, ...], tmp_path: Path) -> None:
        env = {**os.environ, "BATON_CLUSTER_HOST": "0.0.0.0", "BATON_CLUSTER_KEY": CLUSTER_KEY, "BATON_STATE_DIR": str(tmp_path)}
        done = subprocess.run(process, env=env, capture_output=True, text=True, timeout=120)
        assert done.returncode == 2 and "security.open_admin" in done.stderr and done.stderr.count("\n") == 1, done.stderr


class TestGuard:
    @pytest.mark.parametrize(
        ("authorization", "admitted"),
        [
            ("Bearer admin-key", True), ("bearer  admin-key", True), ("Bearer tenant-key", False), ("Bearer guess", False),
            ("admin-key", False), ("", False), (None, False), ("Bearer None", False), ("Bearer \ud800", False),
        ],
    )  # fmt: skip
    def test_only_an_admin_key_opens_a_door_on_the_network(self, keys: Path, authorization: str | None, admitted: bool) -> None:
        guard = Guard(config("0.0.0.0", api_keys=str(keys)))
        if admitted:
            guard.check(authorization)
        else:
            with pytest.raises(BatonError, match="admin=yes"):
                guard.check(authorization)

    def test_the_clusters_own_token_does_too(self, keys: Path) -> None:
        ours = config("0.0.0.0", api_keys=str(keys))
        Guard(ours).check(f"Bearer {token(ours)}")
        other = ours.model_copy(update={"cluster": ClusterConfig(host="0.0.0.0", key="f" * 16)})
        without = ours.model_copy(update={"cluster": ClusterConfig(host="0.0.0.0")})
        for foreign in (other, without):
            with pytest.raises(BatonError):
                Guard(ours).check(f"Bearer {token(foreign)}")
            with pytest.raises(BatonError):
                Guard(foreign).check(f"Bearer {token(ours)}")

    @pytest.mark.parametrize(("host", "more"), [("127.0.0.1", {}), ("0.0.0.0", MTLS), ("0.0.0.0", {"open_admin": True})])
    def test_elsewhere_no_key_is_needed(self, keys: Path, host: str, more: dict[str, Any]) -> None:
        """Negative control: loopback, mutual TLS, a network that the operator trusts."""
        Guard(config(host, api_keys=str(keys), **more)).check(None)

    def test_the_file_is_read_again_and_a_broken_one_is_not(self, keys: Path, caplog: pytest.LogCaptureFixture) -> None:
        guard = Guard(config("0.0.0.0", api_keys=str(keys)))
        keys.write_text("nonsense")
        for _ in range(3):
            guard.check("Bearer admin-key")
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        keys.write_text(line("ops", "new-key", "admin=yes"))
        guard.check("Bearer new-key")
        with pytest.raises(BatonError):
            guard.check("Bearer admin-key")


class TestDoors:
    async def test_a_guarded_grpc_server_refuses_every_call_without_the_key(self, keys: Path) -> None:
        served = config("0.0.0.0", api_keys=str(keys))
        server = Server(served, 1 << 20, admit=Guard(served).check)
        port = server.bind(0).rpartition(":")[2]
        await server.start()
        await server.health.set("", health_pb2.HealthCheckResponse.SERVING)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub, request = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
                for key in ("tenant-key", ""):
                    shown = (("authorization", f"Bearer {key}"),)
                    with pytest.raises(grpc.RpcError) as caught:
                        await stub.Check(request, timeout=20, metadata=shown)
                    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                    with pytest.raises(grpc.RpcError) as caught:
                        async for _ in stub.Watch(request, timeout=20, metadata=shown):
                            pytest.fail("a stream was answered")
                    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
                answer = await stub.Check(request, timeout=20, metadata=(("authorization", "Bearer admin-key"),))
                assert answer.status == health_pb2.HealthCheckResponse.SERVING
        finally:
            await server.stop(None)

    @pytest.mark.parametrize("path", ["/metrics", "/targets", "/else"])
    async def test_metrics_need_the_key_and_health_does_not(self, keys: Path, path: str) -> None:
        served = config("0.0.0.0", api_keys=str(keys))
        server = MetricsServer(served, Exposition(Book("router")), lambda: True, Guard(served), lambda: [])
        port = int((await server.start(0)).rpartition(":")[2])
        try:
            assert await status(port, path) == 401 and await status(port, path, "tenant-key") == 401
            assert await status(port, path, "admin-key") == (404 if path == "/else" else 200)
            assert await status(port, "/health") == 200
        finally:
            await server.close()


async def status(port: int, path: str, key: str = "") -> int:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    shown = f"Authorization: Bearer {key}\r\n" if key else ""
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\n{shown}\r\n".encode())
    head = await asyncio.wait_for(reader.read(), 30)
    writer.close()
    return int(head.split(b" ")[1])
