"""A port that is held goes to the process it was chosen for, and to nobody else."""

import asyncio
import socket
import sys
from pathlib import Path

import grpc
import pytest
from hosts import hosts

from baton.cluster.rpc import SERVER_OPTIONS
from baton.launch.ports import Ports

HOST, ROOT = "127.0.0.1", Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere ports are only probed")


@pytest.mark.parametrize("host", [HOST, "::1"])
def test_a_held_port_is_refused_to_others_until_it_is_released(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with Ports(host) as ports:
        port = ports.hold()
        with socket.socket(family) as other, pytest.raises(OSError, match="in use"):
            other.bind((host, port))
    with socket.socket(family) as other:
        other.bind((host, port))


def test_a_port_that_another_process_listens_on_cannot_be_held() -> None:
    with Ports(HOST) as ports, socket.create_server((HOST, 0)) as other, pytest.raises(OSError, match="in use"):
        ports.hold(other.getsockname()[1])


async def test_the_servers_of_a_router_listen_on_held_ports_again_and_again() -> None:
    with Ports(HOST) as ports:
        port = ports.hold()
        for _ in range(3):
            server = grpc.aio.server(options=SERVER_OPTIONS)
            assert server.add_insecure_port(f"{HOST}:{port}") == port
            await server.start()
            _, writer = await asyncio.open_connection(HOST, port)
            writer.close()
            await server.stop(None)
            async with await asyncio.start_server(lambda reader, writer: writer.close(), HOST, port):
                _, writer = await asyncio.open_connection(HOST, port)
                writer.close()


CONNECT = """
import socket, sys
from baton.launch.ports import Ports

with Ports("127.0.0.1") as ports, socket.create_server(("127.0.0.1", 0), backlog=200) as server:
    chosen = ports.hold()
    if sys.argv[1] == "dropped":
        ports.__exit__()
    made = []
    try:
        while True:
            made.append(socket.create_connection(server.getsockname()))
    except OSError:
        pass
    print(len(made), chosen in {one.getsockname()[1] for one in made})
"""


@pytest.mark.parametrize("held", ["held", "dropped"])
def test_no_connection_takes_a_held_port(held: str) -> None:
    """All ports of the host are used up. Without the hold, one of the connections has the port."""
    with hosts(1) as [host]:
        host.run("sh", "-c", "echo 40000 40099 > /proc/sys/net/ipv4/ip_local_port_range")
        told = host.run("env", f"PYTHONPATH={ROOT}", sys.executable, "-c", CONNECT, held)
    assert told.split() == (["98", "False"] if held == "held" else ["99", "True"])
