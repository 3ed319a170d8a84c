"""Redis servers other than the embedded one: a sharded server, and a primary with a replica under Sentinels."""

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import redis

from baton.launch.ports import Ports
from baton.launch.redis_server import find_binary

PASSWORD = "sesame"
WITHIN_S = 30.0


def low(ports: Ports) -> int:
    """Low enough for a sharded server, which also listens 10,000 ports above."""
    while (port := ports.hold()) > 55_535:
        pass
    return port


@contextmanager
def server(*settings: str, sentinel: bool = False) -> Iterator[tuple[redis.Redis, subprocess.Popen[bytes]]]:
    """A server that requires PASSWORD, on any free port. Yields a client of it and its process."""
    with Ports("127.0.0.1") as ports, tempfile.TemporaryDirectory(prefix="baton-test-redis-") as folder:
        port = low(ports)
        lines = [
            f"port {port}",
            "bind 127.0.0.1",
            f"requirepass {PASSWORD}",
            f"masterauth {PASSWORD}",
            'save ""',
            f"dir {folder}",
            *settings,
        ]
        if sentinel:
            lines = [line for line in lines if not line.startswith(("masterauth", "save"))]
        file = Path(folder) / "redis.conf"  # a Sentinel rewrites its file
        file.write_text("\n".join(lines) + "\n")
        command = [str(find_binary()), str(file), *(["--sentinel"] if sentinel else [])]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        client = redis.Redis(port=port, password=PASSWORD)
        try:
            until(client.ping)
            yield client, process
        finally:
            client.close()
            process.kill()
            process.wait()


def port_of(client: redis.Redis) -> int:
    return int(client.connection_pool.connection_kwargs["port"])


def until(condition: Any, within_s: float = WITHIN_S) -> None:
    deadline = time.monotonic() + within_s
    while True:
        try:
            if condition():
                return
        except redis.RedisError:
            pass
        assert time.monotonic() < deadline, condition
        time.sleep(0.02)


@contextmanager
def sharded() -> Iterator[tuple[str, redis.Redis]]:
    """A cluster of one server, which has all slots. Yields its URL and a client of the server."""
    with server("cluster-enabled yes") as (client, _):
        admin: Any = client
        admin.execute_command("CLUSTER ADDSLOTS", *range(16384))
        until(lambda: admin.execute_command("CLUSTER INFO")["cluster_state"] == "ok")
        yield f"redis+cluster://:{PASSWORD}@127.0.0.1:{port_of(client)}", client


@contextmanager
def watched() -> Iterator[tuple[str, subprocess.Popen[bytes], subprocess.Popen[bytes]]]:
    """A primary with a replica and three Sentinels; two of them can order a failover. Yields the URL, the primary, the first Sentinel."""
    with ExitStack() as stack:
        primary, process = stack.enter_context(server())
        replica, _ = stack.enter_context(server(f"replicaof 127.0.0.1 {port_of(primary)}"))
        watch = (
            f"sentinel monitor baton 127.0.0.1 {port_of(primary)} 2",
            f"sentinel auth-pass baton {PASSWORD}",
            "sentinel down-after-milliseconds baton 500",
            "sentinel failover-timeout baton 3000",
            f"sentinel sentinel-pass {PASSWORD}",
        )
        sentinels = [stack.enter_context(server(*watch, sentinel=True)) for _ in range(3)]
        until(lambda: replica.info("replication")["master_link_status"] == "up")
        for client, _ in sentinels:
            until(lambda client=client: client.sentinel_master("baton")["num-slaves"] == 1)
            until(lambda client=client: client.sentinel_master("baton")["num-other-sentinels"] == 2)
        hosts = ",".join(f"127.0.0.1:{port_of(client)}" for client, _ in sentinels)
        yield f"redis+sentinel://:{PASSWORD}@{hosts}/baton", process, sentinels[0][1]
