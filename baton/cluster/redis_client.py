"""A connection to Redis whose every command has a deadline. The only file that imports redis."""

import asyncio
import contextlib
import re
import sys
from collections.abc import Awaitable, Iterator, Sequence
from typing import Any, cast

from baton.cluster.config import RedisConfig, SecurityConfig
from baton.cluster.redis_url import parse
from baton.cluster.registry import RegistryUnavailable


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """redis-py imports the SDK of OpenTelemetry, where it is installed, to measure itself: a fourth of its own import, in each process that
    starts, for figures that nobody here reads. Tracing (`otel`) imports it when it is on."""
    hidden = "opentelemetry" not in sys.modules
    if hidden:
        sys.modules["opentelemetry"] = cast(Any, None)  # as if it were not installed
    try:
        yield
    finally:
        if hidden:
            del sys.modules["opentelemetry"]


with _alone():
    from redis.asyncio import Redis, RedisCluster
    from redis.asyncio.cluster import ClusterNode
    from redis.asyncio.retry import Retry
    from redis.asyncio.sentinel import Sentinel
    from redis.backoff import NoBackoff
    from redis.exceptions import (
        AuthenticationError,
        BusyLoadingError,
        NoPermissionError,
        OutOfMemoryError,
        ReadOnlyError,
        RedisError,
    )
    from redis.exceptions import ConnectionError as RedisConnectionError
    from redis.exceptions import TimeoutError as RedisTimeoutError

Word = str | bytes | int
_CONNECTIONS = 16


class RedisClient:
    """`url`: see `redis_url`; for an embedded server, the address that it was started with. `security`: the authority and the certificate
    for rediss://."""

    def __init__(self, url: str, config: RedisConfig, security: SecurityConfig | None = None) -> None:
        self._client = _client(url, config, tls_options(url, security or SecurityConfig()))
        self._timeout_s = config.command_timeout_s

    async def call(self, *command: Word, wait_s: float = 0.0) -> Any:
        """Raises RegistryUnavailable, after the command timeout at the latest (plus `wait_s` if the command itself waits)."""
        return await self._bounded(cast(Awaitable[Any], self._client.execute_command(*command)), wait_s)

    async def script(self, script: str, keys: Sequence[str], arguments: Sequence[Word]) -> Any:
        """Likewise."""
        # EVAL instead of EVALSHA: a few hundred bytes more, but no second code path for a server that has lost its scripts.
        return await self.call("EVAL", script, len(keys), *keys, *arguments)

    async def close(self) -> None:
        """Never raises."""
        with contextlib.suppress(RegistryUnavailable):
            await self._bounded(self._client.aclose())

    async def _bounded(self, call: Awaitable[Any], wait_s: float = 0.0) -> Any:
        """A command that times out here closes its connection, so no later command can read its answer."""
        try:
            async with asyncio.timeout(self._timeout_s + wait_s):
                return await call
        except TimeoutError:
            raise RegistryUnavailable("slow", f"no answer from Redis within {self._timeout_s:g} s") from None
        except (RedisError, OSError) as error:
            raise RegistryUnavailable(_kind(error), f"Redis: {error}") from error


def tls_options(url: str, security: SecurityConfig) -> dict[str, Any]:
    """Options of redis-py for this URL. It reads the files at every new connection, so new ones need no restart."""
    if not url.startswith("rediss:"):
        return {}
    files = {
        "ssl_ca_certs": security.redis_ca or security.tls_ca,
        "ssl_certfile": security.tls_cert,
        "ssl_keyfile": security.tls_key,
    }
    return {"ssl_cert_reqs": "required", "ssl_check_hostname": True, **{name: file for name, file in files.items() if file}}


def _client(url: str, config: RedisConfig, tls: dict[str, Any]) -> Redis | RedisCluster:
    # RESP2 saves each new connection a round trip. The timeouts of redis-py are off: `_bounded` is the only clock.
    options: dict[str, Any] = {"protocol": 2, "socket_timeout": None, "socket_connect_timeout": None, "max_connections": _CONNECTIONS}
    address = parse(url)
    login: dict[str, Any] = {"username": address.username, "password": address.password}
    if address.kind == "cluster":
        return RedisCluster(startup_nodes=[ClusterNode(*host) for host in address.hosts], **options, **login)
    if address.kind == "sentinel":
        # A Sentinel that does not answer must leave time to ask the next one within the same command.
        patience_s = config.command_timeout_s / (len(address.hosts) + 1)
        once = Retry(NoBackoff(), 0)
        asking: dict[str, Any] = {"socket_timeout": patience_s, "socket_connect_timeout": patience_s, "retry": once, **login}
        sentinels = Sentinel(list(address.hosts), sentinel_kwargs=asking)  # type: ignore[no-untyped-call]
        return cast(Redis, sentinels.master_for(address.master, db=address.db, **options, **login))
    return Redis.from_url(url, **options, **tls)


_KINDS: dict[str, str] = {
    "LOADING": "loading",
    "READONLY": "readonly",
    "OOM": "oom",
    "NOAUTH": "auth",
    "WRONGPASS": "auth",
    "NOPERM": "auth",
    "user executing the script": "auth",  # NOPERM inside a script, as 6.2 words it
}
_CLASSES: tuple[tuple[type[Exception], str], ...] = (  # some derive from ConnectionError, which therefore comes last
    (BusyLoadingError, "loading"),
    (ReadOnlyError, "readonly"),
    (OutOfMemoryError, "oom"),
    (AuthenticationError, "auth"),
    (NoPermissionError, "auth"),
    (RedisTimeoutError, "slow"),
    (RedisConnectionError, "down"),
    (OSError, "down"),
)


def _kind(error: Exception) -> str:
    for error_class, kind in _CLASSES:
        if isinstance(error, error_class):
            return kind
    # An error inside a script arrives as "ERR Error running script ...: -OOM command not allowed ...".
    code = re.search(rf"\b({'|'.join(_KINDS)})\b", str(error))
    return _KINDS[code[1]] if code else "refused"
