"""A worker as a process: an engine's host with both roles, one of which it serves when it starts."""

from importlib import import_module

from baton.cluster.config import Config
from baton.cluster.lifecycle import Stop
from baton.cluster.records import ROLES, RoleName
from baton.worker.host import Host

# Roles are imported by name, because the packages of the roles may not import each other, and this package may not import them.
ROOMS = {"prefill": "prefill_worker.wiring", "decode": "decode_worker.wiring"}


class WorkerProcess:
    """Implements `baton.cluster.lifecycle.Process`."""

    def __init__(self, config: Config, stop: Stop, serves: RoleName) -> None:
        self.config = config
        self.host = Host(config, serves, stop)
        self.host.roles = {name: import_module(ROOMS[name]).make(self.host) for name in ROLES}

    async def start(self) -> None:
        host = self.host
        await host.open()
        for name, role in host.roles.items():
            import_module(ROOMS[name]).serve(role, host)
        await host.serve()

    async def drain(self) -> None:
        await self.host.drain()

    async def close(self) -> None:
        await self.host.close()
