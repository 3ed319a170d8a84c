"""The process of `baton cockpit`: it listens on loopback, and ends at Ctrl-C."""

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path

from baton.access.options import ClientIdentity, ClusterOptions
from baton.cluster.config import Config
from baton.cluster.rpc import Tasks
from baton.cockpit.bench import Bench
from baton.cockpit.cluster import CockpitCluster, finder
from baton.cockpit.page import Cockpit
from router.http.server import HttpServer


async def serve(port: int, place: ClusterOptions, identity: ClientIdentity, profile: Path | None, ready: Callable[[str], None]) -> None:
    """`ready` gets the address once the page can be opened. Raises BatonError if the port is in use."""
    bench = Bench(CockpitCluster(finder(place, identity)), profile)
    server = HttpServer(Config(), Cockpit(bench, identity.api_key))
    ended = asyncio.Event()
    failures: list[BaseException] = []

    def fail(error: BaseException) -> None:
        failures.append(error)
        ended.set()

    tasks = Tasks(fail)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    try:
        address = server.bind(port)
        server.start(tasks)
        ready(f"http://{address}/")
        await ended.wait()
    finally:
        await bench.close()
        await server.stop()
        await tasks.close()
    if failures:
        raise failures[0]
