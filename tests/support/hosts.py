"""Hosts for tests: network namespaces of this machine, joined by a bridge. They share files and processes, but no address and no port.

The machine itself has an address on the bridge, too, so a test reaches every host. Needs root and iproute2.
"""

import ipaddress
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True, slots=True)
class Host:
    name: str  # of its namespace
    address: str
    port: str  # the end of its cable at the bridge

    def start(self, *command: str, env: Mapping[str, str], log: Path) -> "subprocess.Popen[bytes]":
        """Runs `command` there. The process is the command itself: `ip netns exec` becomes it."""
        with log.open("ab") as out:
            return subprocess.Popen(["ip", "netns", "exec", self.name, *command], env=dict(env), stdout=out, stderr=out)

    def run(self, *command: str) -> str:
        done = subprocess.run(["ip", "netns", "exec", self.name, *command], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def unplug(self) -> None:
        _ip("link", "set", self.port, "down")

    def plug_in(self) -> None:
        _ip("link", "set", self.port, "up")

    def limit(self, mbit: int) -> None:
        """Limits what the host sends and what it receives, each to `mbit` Mbit/s."""
        shape = ("root", "tbf", "rate", f"{mbit}mbit", "burst", "256kb", "latency", "50ms")
        self.run("tc", "qdisc", "replace", "dev", "eth0", *shape)
        _run("tc", "qdisc", "replace", "dev", self.port, *shape)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Skips the test where namespaces cannot be made."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        pytest.skip("hosts are network namespaces: they need root and iproute2")
    tag = f"bt{os.getpid() % 100_000}"
    net = ipaddress.ip_network(f"10.231.{os.getpid() % 250}.0/24")
    with ExitStack() as stack:
        try:
            _ip("link", "add", "name", tag, "type", "bridge")
            stack.callback(_ip, "link", "del", tag)
            _ip("addr", "add", f"{net[254]}/24", "dev", tag)
            _ip("link", "set", tag, "up")
            made = [stack.enter_context(_host(tag, number, f"{net[number]}")) for number in range(1, count + 1)]
        except AssertionError as error:
            pytest.skip(f"this machine makes no hosts: {error}")
        yield made


@contextmanager
def _host(bridge: str, number: int, address: str) -> Iterator[Host]:
    host = Host(f"{bridge}-{number}", address, f"{bridge}p{number}")
    _ip("netns", "add", host.name)
    with ExitStack() as stack:
        stack.callback(_ip, "netns", "del", host.name)
        _ip("link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        stack.callback(_ip, "link", "del", host.port)  # with the namespace it would go some time later
        _ip("link", "set", host.port, "master", bridge, "up")
        for command in (("link", "set", "lo", "up"), ("addr", "add", f"{address}/24", "dev", "eth0"), ("link", "set", "eth0", "up")):
            _ip("-n", host.name, *command)
        yield host


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr.strip()}"
