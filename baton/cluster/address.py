"""Where a process listens, and the address that it tells others.

A listener binds `cluster.host`; others connect to `cluster.advertise`. The two differ where a process listens on every address of its host:
a pod or a container has one address for its peers, and is reached on loopback, too (`kubectl port-forward`).
"""

import ipaddress
import socket

import psutil

from baton.cluster.config import EVERYWHERE, Config, ConfigError
from baton.cluster.redis_url import parse


def advertised(config: Config) -> str:
    """The address or name at which others reach this process. Raises ConfigError."""
    listen, wish = config.cluster.host, config.cluster.advertise
    if wish != "auto":
        return _address_of(wish) or wish
    return _address_towards(config.redis.url) if listen in EVERYWHERE else listen


def address_towards(host: str, port: int) -> str:
    """Our address on the way to `host`. Nothing is sent. Raises OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


def listener(host: str, port: int, backlog: int = 128) -> socket.socket:
    """A listening TCP socket; `::` takes IPv4 connections, too. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    dual = host == "::" and socket.has_dualstack_ipv6()
    return socket.create_server((host, port), family=family, backlog=backlog, dualstack_ipv6=dual)


def target(host: str, port: int) -> str:
    """`host:port` as gRPC writes it; an IPv6 address is in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _address_of(interface: str) -> str | None:
    """An address of a network interface, IPv4 before IPv6; None if there is no interface of that name. Raises ConfigError."""
    if interface not in (known := psutil.net_if_addrs()):
        return None
    entries = sorted(known[interface], key=lambda entry: entry.family != socket.AF_INET)
    found: list[str] = [entry.address for entry in entries if entry.family in (socket.AF_INET, socket.AF_INET6)]
    usable = [address for address in found if "%" not in address]  # a link-local address means nothing without the interface of its reader
    if not usable:
        raise ConfigError(f"cluster.advertise: interface {interface} has no address that others could connect to")
    return usable[0]


def _address_towards(redis_url: str) -> str:
    """Our address on the way to Redis, which all hosts of a cluster reach. Nothing is sent."""
    hosts = () if redis_url == "embedded" else parse(redis_url).hosts
    if not hosts:  # embedded or a socket file: every process is on this host
        return "127.0.0.1"
    host, port = hosts[0]
    try:
        return address_towards(host, port)
    except OSError as error:
        raise ConfigError(f"cluster.advertise: no route to Redis at {target(host, port)} ({error}); set it to an address") from None
