"""What a process listens on and what it tells others: two things, each of which can be set."""

import asyncio
import socket
from collections import namedtuple
from typing import Any

import psutil
import pytest

from baton.cluster.address import advertised, listener, target
from baton.cluster.config import Config, ConfigError
from baton.cluster.rpc import Server

Entry = namedtuple("Entry", "family address")
INTERFACES = {
    "lo": [Entry(socket.AF_INET, "127.0.0.1")],
    "eth0": [Entry(psutil.AF_LINK, "02:00:00:00:00:01"), Entry(socket.AF_INET6, "fd00::7"), Entry(socket.AF_INET, "10.0.0.7")],
    "ib0": [Entry(socket.AF_INET6, "fe80::1%ib0"), Entry(socket.AF_INET6, "fd00::9")],
    "down0": [Entry(socket.AF_INET6, "fe80::2%down0")],
}


def config(redis: str = "embedded", **cluster: Any) -> Config:
    return Config.model_validate({"cluster": cluster, "redis": {"url": redis}})


@pytest.fixture(autouse=True)
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: INTERFACES)


@pytest.mark.parametrize(
    ("cluster", "redis", "told"),
    [
        ({}, "embedded", "127.0.0.1"),
        ({"host": "10.0.0.7"}, "redis://10.9.9.9:1", "10.0.0.7"),
        ({"host": "::1"}, "embedded", "::1"),
        ({"host": "0.0.0.0"}, "embedded", "127.0.0.1"),
        ({"host": "::"}, "unix:///run/redis.sock", "127.0.0.1"),
        ({"host": "0.0.0.0"}, "redis://:secret@127.0.0.1:6379/0", "127.0.0.1"),
        ({"host": "::"}, "redis://[::1]:6379", "::1"),
        ({"host": "0.0.0.0", "advertise": "10.1.2.3"}, "redis://127.0.0.1", "10.1.2.3"),
        ({"advertise": "worker-3.example"}, "embedded", "worker-3.example"),
        ({"host": "0.0.0.0", "advertise": "eth0"}, "embedded", "10.0.0.7"),
        ({"host": "::", "advertise": "ib0"}, "embedded", "fd00::9"),
    ],
)
def test_others_are_told_an_address_that_they_can_reach(cluster: dict[str, str], redis: str, told: str) -> None:
    assert advertised(config(redis, **cluster)) == told


@pytest.mark.parametrize(
    ("cluster", "redis", "words"),
    [
        ({"advertise": "down0"}, "embedded", "interface down0 has no address"),
        ({"host": "0.0.0.0"}, "redis://no-such-host.invalid:6379", "no-such-host.invalid:6379.*set it to an address"),
    ],
)
def test_a_host_without_a_usable_address_is_refused_by_name(cluster: dict[str, str], redis: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        advertised(config(redis, **cluster))


@pytest.mark.parametrize("cluster", [{"host": "*"}, {"advertise": "0.0.0.0"}, {"advertise": "::"}, {"advertise": ""}])
def test_addresses_that_nobody_can_connect_to_are_refused(cluster: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=next(iter(cluster))):
        config(**cluster)


@pytest.mark.parametrize(("host", "reached"), [("0.0.0.0", ["127.0.0.1"]), ("::", ["127.0.0.1", "::1"]), ("::1", ["::1"])])
def test_a_listener_on_all_addresses_is_reached_at_each(host: str, reached: list[str]) -> None:
    with listener(host, 0) as listening:
        port = listening.getsockname()[1]
        for address in reached:
            socket.create_connection((address, port), timeout=5).close()


async def test_a_server_binds_one_address_and_tells_another() -> None:
    server = Server(config(host="0.0.0.0", advertise="10.1.2.3"), 1 << 20)
    address = server.bind(0)
    try:
        host, _, port = address.partition(":")
        assert host == "10.1.2.3"
        await server.start()
        _, writer = await asyncio.open_connection("127.0.0.1", int(port))
        writer.close()
    finally:
        await server.stop(None)


def test_an_ipv6_target_is_in_brackets() -> None:
    assert target("::1", 5) == "[::1]:5" and target("a.example", 5) == "a.example:5"
