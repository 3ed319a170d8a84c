"""`baton up` on one host, and `baton up --join` on others."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hosts import Host, hosts
from live_cluster import Cluster
from redis_servers import until

PORT, ADMIN_PORT = 8470, 8471  # the defaults: every host has its own
KEY = "a key that all hosts share"
OPEN = ("--cluster.host", "0.0.0.0", "--cluster.advertise", "eth0", "--security.open-admin", "true")
SMALL = ("--engine.kv-memory-mib", "64", "--router.bypass-tokens", "0")


@dataclass
class Commands:
    """`baton` on several hosts, each with a state directory of its own."""

    hosts: list[Host]
    folder: Path

    def env(self, number: int, key: str = KEY) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("BATON_")}
        self.state(number).mkdir(exist_ok=True)
        return {**clean, "BATON_STATE_DIR": str(self.state(number)), "BATON_CLUSTER_KEY": key, "BATON_KV_TRANSPORT": "tcp"}

    def state(self, number: int) -> Path:
        return self.folder / f"state-{number}"

    def start(self, number: int, *arguments: str, key: str = KEY) -> tuple["subprocess.Popen[bytes]", Path]:
        log = self.folder / f"up-{number}-{len(arguments)}.log"
        command = (sys.executable, "-P", "-m", "baton", *arguments)
        return self.hosts[number].start(*command, env=self.env(number, key), log=log), log

    @property
    def admin(self) -> str:
        return f"{self.hosts[0].address}:{ADMIN_PORT}"


@contextmanager
def joined(model: Path, folder: Path, count: int, *flags: str) -> Iterator[tuple[Cluster, list[Host]]]:
    """A cluster of `count` hosts: Redis and the routers on the first, and on each one prefill and one decode worker."""
    with hosts(count) as made:
        commands, name = Commands(made, folder), f"t{os.getpid()}"
        started: list[subprocess.Popen[bytes]] = []
        try:
            for number in range(count):
                first = ("--model", str(model), "--cluster.name", name, *SMALL, *OPEN, *flags)
                process, log = commands.start(number, "up", *(first if number == 0 else ("--join", commands.admin)))
                started.append(process)
                if number == 0:
                    (commands.state(0) / f"{name}-up.log").symlink_to(log)
                said = "joined" if number else "Ctrl-C stops it"
                until(lambda said=said, log=log, process=process: said in log.read_text() or process.poll() is not None, within_s=120)
                assert process.poll() is None, log.read_text()
            door, logs = f"{made[0].address}:{PORT}", commands.state(0) / f"{name}-logs"
            yield Cluster(name, door, "", commands.admin, "", started[0].pid, commands.env(0), logs), made
        finally:
            for process in reversed(started):
                if process.poll() is None:
                    process.terminate()
                    process.wait(60)
