"""The registry over rediss://, with a real server that requires certificates."""

import asyncio
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import authority
import pytest

from baton.cluster.config import Config, RedisConfig, SecurityConfig
from baton.cluster.connect import connect_registry
from baton.cluster.keys import Quota
from baton.cluster.records import Pools
from baton.cluster.redis_client import tls_options
from baton.cluster.registry import Registry, RegistryUnavailable
from baton.launch.ports import Ports
from router.rates import Rates, redis_counters


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return authority.make(tmp_path_factory.mktemp("redis") / "tls", "localhost")


@pytest.fixture(scope="module")
def port(files: Path) -> Iterator[int]:
    binary = shutil.which("redis-server")
    if binary is None:
        pytest.skip("no redis-server is installed")
    ports = Ports("127.0.0.1")
    at = ports.hold()
    tls = {"port": at, "cert-file": files / "server.pem", "key-file": files / "server.key", "ca-cert-file": files / "ca.pem"}
    options = [part for name, value in tls.items() for part in (f"--tls-{name}", str(value))]
    command = [binary, "--port", "0", "--bind", "127.0.0.1", "::1", "--save", "", "--requirepass", "secret", "--tls-auth-clients", "yes"]
    server = subprocess.Popen([*command, *options], cwd=files, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        deadline = time.monotonic() + 30
        while not listens(at):
            if server.poll() is not None:
                assert server.stdout is not None and "Bad directive" in (said := server.stdout.read()), said
                pytest.skip("this redis-server was built without TLS")
            assert time.monotonic() < deadline
            time.sleep(0.05)
        with ports:
            yield at
    finally:
        server.terminate()
        server.wait(20)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@asynccontextmanager
async def registry(url: str, security: SecurityConfig) -> AsyncIterator[Registry]:
    made = connect_registry(Config(redis=RedisConfig(url=url, command_timeout_s=5.0), security=security))
    try:
        yield made
    finally:
        await made.close()


def url(port: int, scheme: str = "rediss", host: str = "localhost") -> str:
    return f"{scheme}://:secret@{host}:{port}/0"


async def test_the_registry_works_over_tls(port: int, files: Path) -> None:
    async with registry(url(port), authority.security(files)) as ours:
        await ours.desire(Pools(2, 3))
        assert await ours.desired() == Pools(2, 3)
        await asyncio.gather(*(ours.ping() for _ in range(8)))
        assert await ours.events(None, 0.0) == ([], "0-0")


async def test_another_authority_may_be_that_of_redis(port: int, files: Path, tmp_path: Path) -> None:
    """The cluster's own one is different."""
    foreign = authority.make(tmp_path / "foreign")
    own: dict[str, Any] = {"tls_cert": str(files / "client.pem"), "tls_key": str(files / "client.key"), "tls_ca": str(foreign / "ca.pem")}
    mixed = SecurityConfig(**own, redis_ca=str(files / "ca.pem"))
    async with registry(url(port), mixed) as ours:
        await ours.ping()


@pytest.mark.parametrize("wrong", ["another authority", "no certificate", "another host", "in clear"])
async def test_a_connection_that_is_not_verified_is_refused(port: int, files: Path, tmp_path: Path, wrong: str) -> None:
    """Negative controls."""
    foreign = authority.make(tmp_path / "foreign")
    address, security = {
        "another authority": (url(port), authority.security(files, redis_ca=str(foreign / "ca.pem"))),
        "no certificate": (url(port), SecurityConfig(redis_ca=str(files / "ca.pem"))),
        "another host": (url(port, host="127.0.0.1"), authority.security(files)),
        "in clear": (url(port, "redis"), authority.security(files)),
    }[wrong]
    async with registry(address, security) as ours:
        with pytest.raises(RegistryUnavailable):
            await ours.ping()


async def test_quotas_are_counted_over_tls(port: int, files: Path) -> None:
    rates = Rates(
        redis_counters(url(port), "tls", tls_options(url(port), authority.security(files))), lambda tenant: Quota(requests=5), 5.0
    )
    await rates.admit("shop", 1)
    assert rates.shared
    blind = Rates(redis_counters(url(port), "tls"), lambda tenant: Quota(requests=5), 5.0)
    await blind.admit("shop", 1)
    assert not blind.shared, "negative control: without the files Redis is out of reach"
