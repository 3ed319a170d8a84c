"""Turns the address that a person or a program gives into gRPC targets, and says how a channel to one behaves."""

import json
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

DEFAULT_PORT = 8470  # of the public gRPC API
DEFAULT_ADDRESS = f"127.0.0.1:{DEFAULT_PORT}"
# A proxy from the environment (http_proxy, https_proxy) cannot reach this host's loopback; for any other address it is used.
_LOOPBACK = re.compile(r"(dns:(//[^/]*/)?|ipv[46]:)?(localhost|127(\.\d+){1,3}|\[::1\]|\[::ffff:127(\.\d+){3}\])(:\w+)?$")
# A target with a scheme, which may stand for several addresses: calls go to all of them in turn.
_NAME = re.compile(r"(dns|ipv4|ipv6):")
_ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})
# A router whose host is gone answers no ping: the stream breaks then, and not only at its deadline. A restarted router is soon found again.
_DEFAULTS = {
    "grpc.keepalive_time_ms": 10_000,
    "grpc.keepalive_timeout_ms": 5_000,
    "grpc.http2.ping_timeout_ms": 5_000,
    "grpc.http2.max_pings_without_data": 0,
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.min_reconnect_backoff_ms": 5_000,  # also the time that a connection may take to come up
    "grpc.max_reconnect_backoff_ms": 1_000,
}
Address: TypeAlias = str | Sequence[str]
Options: TypeAlias = Sequence[tuple[str, Any]]


def targets_of(address: Address, port: int = DEFAULT_PORT) -> tuple[str, ...]:
    """The gRPC targets that an address of a client means; `port`: where it names none. Raises ValueError for what cannot be one."""
    given = [address] if isinstance(address, str) else list(address)
    parts = [part.strip() for each in given for part in ([each] if _NAME.match(each) else each.split(","))]
    targets = tuple(dict.fromkeys(_with_port(part, port) for part in parts if part))
    if not targets:
        raise ValueError("no address is given")
    return targets


def insists(targets: Sequence[str]) -> bool:
    """Whether they stand for several addresses, so that one that cannot serve is not the end."""
    return len(targets) > 1 or _NAME.match(targets[0]) is not None


def _with_port(address: str, port: int) -> str:
    """gRPC itself would take port 443 where there is none, and for 99999 its remainder."""
    if address.startswith(("unix:", "unix-abstract:")):
        return address
    scheme = _NAME.match(address)
    if "://" in address and not scheme:
        raise ValueError(f"address {address!r}: give host:port, without {address.partition('://')[0]}://")
    rest = address.rpartition("/")[2] if scheme and "/" in address else address[scheme.end() :] if scheme else address
    if scheme and "," in rest:  # several addresses of gRPC's own
        return address
    if rest.count(":") > 1 and not rest.startswith("["):  # IPv6 without brackets has no port
        return f"{address.removesuffix(rest)}[{rest}]:{port}"
    host, colon, given = rest.rpartition(":") if not rest.endswith("]") else (rest, "", "")
    if not colon:
        host, given = rest, str(port)
    if not host:
        raise ValueError(f"address {address!r}: names no host")
    if not (given.isascii() and given.isdigit() and 0 < int(given) < 1 << 16):
        raise ValueError(f"address {address!r}: {given!r} is not a port: a number from 1 to 65535")
    return address if colon else f"{address}:{port}"


def channel_options(address: str, options: Options = (), server_name: str | None = None) -> list[tuple[str, Any]]:
    """`address`: a gRPC target. `options` replace ours."""
    ours: dict[str, Any] = dict(_DEFAULTS)
    if _LOOPBACK.match(address):
        ours["grpc.enable_http_proxy"] = 0
    if server_name:
        ours["grpc.ssl_target_name_override"] = server_name
    if _NAME.match(address):
        ours["grpc.service_config"] = _ROUND_ROBIN
    return list((ours | dict(options)).items())
