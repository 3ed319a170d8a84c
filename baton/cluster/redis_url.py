"""The addresses of Redis that the configuration takes.

redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]                         one server; rediss:// with TLS
unix:///PATH                                                       one server, at a socket
redis+sentinel://[[USER]:PASSWORD@]HOST[:PORT][,...]/MASTER[/DB]   the master that these Sentinels name; PASSWORD is theirs and Redis's
redis+cluster://[[USER]:PASSWORD@]HOST[:PORT][,...]                a sharded Redis, found through any of these servers
"""

from dataclasses import dataclass
from typing import Literal
from urllib.parse import SplitResult, unquote, urlsplit

PORT = 6379
SENTINEL_PORT = 26379
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "redis+cluster")
Kind = Literal["server", "sentinel", "cluster"]


@dataclass(frozen=True, slots=True)
class RedisUrl:
    kind: Kind
    hosts: tuple[tuple[str, int], ...] = ()  # none: a socket file
    username: str | None = None
    password: str | None = None
    master: str = ""  # the name by which the Sentinels know it
    db: int = 0


def parse(url: str) -> RedisUrl:
    """Raises ValueError; the text does not repeat the URL, which may hold a password."""
    parts = urlsplit(url)
    if parts.scheme not in SCHEMES:
        raise ValueError(f"the address of Redis must begin with one of {', '.join(f'{scheme}://' for scheme in SCHEMES)}")
    if parts.scheme == "unix":
        if not parts.path:
            raise ValueError("unix:// needs the path of a socket")
        return RedisUrl("server")
    kind: Kind = "sentinel" if parts.scheme == "redis+sentinel" else "cluster" if parts.scheme == "redis+cluster" else "server"
    username, password = _login(parts)
    places = parts.netloc.rpartition("@")[2].split(",")
    if kind == "server" and len(places) > 1:
        raise ValueError("only redis+sentinel:// and redis+cluster:// take several hosts")
    hosts = tuple(_host(place, SENTINEL_PORT if kind == "sentinel" else PORT) for place in places)
    path = [part for part in parts.path.split("/") if part]
    master = ""
    if kind == "sentinel":
        if not path:
            raise ValueError("redis+sentinel:// needs the master's name after the hosts")
        master, *path = path
    if len(path) > (kind != "cluster") or any(not part.isdigit() for part in path):
        raise ValueError("the path must be the number of a database" if kind != "cluster" else "redis+cluster:// has no databases")
    return RedisUrl(kind, hosts, username, password, master, int(path[0]) if path else 0)


def _login(parts: SplitResult) -> tuple[str | None, str | None]:
    login, at, _ = parts.netloc.rpartition("@")
    username, _, password = login.partition(":")
    return (unquote(username) or None, unquote(password) or None) if at else (None, None)


def _host(place: str, default: int) -> tuple[str, int]:
    try:
        found = urlsplit(f"//{place}")
        host, port = found.hostname, found.port
    except ValueError:
        raise ValueError(f"{place!r} is not HOST:PORT") from None
    if not host:
        raise ValueError("a host is missing")
    return host, default if port is None else port
